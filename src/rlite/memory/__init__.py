"""Who is on the device in which phase."""

from rlite.memory.budget import DeviceBudget
from rlite.memory.copies import Arrival, HostArena
from rlite.memory.ledger import Ledger, Move, PhaseEntry
from rlite.memory.metrics import LeakCheck, PhaseMetrics
from rlite.memory.phases import OffloadPolicy, Phase, PhaseError, PhaseMachine
from rlite.memory.residents import BackgroundResident, CallableResident, DerivedBuffers, FlatBuffers, Resident

__all__ = [
    "Arrival",
    "BackgroundResident",
    "CallableResident",
    "DerivedBuffers",
    "DeviceBudget",
    "FlatBuffers",
    "HostArena",
    "LeakCheck",
    "Ledger",
    "Move",
    "OffloadPolicy",
    "Phase",
    "PhaseEntry",
    "PhaseError",
    "PhaseMachine",
    "PhaseMetrics",
    "Resident",
]
