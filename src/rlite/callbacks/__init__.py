"""Callbacks: rollout, weight conversion, memory offload, and what a run shows and saves."""

from rlite.callbacks.checkpoint import RolloutCheckpoint
from rlite.callbacks.console import ConsoleProgress
from rlite.callbacks.conversion import EP2TPConversion
from rlite.callbacks.health import HealthWarnings
from rlite.callbacks.offload import MemoryOffload
from rlite.callbacks.preemption import GracefulPreemption
from rlite.callbacks.rollout import RolloutCallback, TransformersRollout, VLLMRollout
from rlite.callbacks.samples import SampleLog
from rlite.callbacks.trace import Trace

__all__ = [
    "ConsoleProgress",
    "EP2TPConversion",
    "GracefulPreemption",
    "HealthWarnings",
    "MemoryOffload",
    "RolloutCallback",
    "RolloutCheckpoint",
    "SampleLog",
    "Trace",
    "TransformersRollout",
    "VLLMRollout",
]
