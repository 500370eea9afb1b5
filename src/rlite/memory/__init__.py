"""Who is on the device in which phase."""

from rlite.memory.ledger import Ledger, PhaseEntry, phase_metrics
from rlite.memory.phases import Phase, PhaseError, PhaseMachine
from rlite.memory.residents import CallableResident, FlatBuffers, HostArena, Resident

__all__ = [
    "CallableResident",
    "FlatBuffers",
    "HostArena",
    "Ledger",
    "Phase",
    "PhaseEntry",
    "PhaseError",
    "PhaseMachine",
    "Resident",
    "phase_metrics",
]
