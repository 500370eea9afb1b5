"""Generation engines that share the trainer's processes and devices. Importing this package imports no engine."""

from rlite.rollout.config import TransformersConfig, VLLMConfig
from rlite.rollout.engine import (
    EngineError,
    EngineStateError,
    GenerationRequest,
    ProgressFn,
    RequestMismatchError,
    RolloutEngine,
    StaleWeightsError,
)
from rlite.rollout.sampling import sampling_seed

__all__ = [
    "EngineError",
    "EngineStateError",
    "GenerationRequest",
    "ProgressFn",
    "RequestMismatchError",
    "RolloutEngine",
    "StaleWeightsError",
    "TransformersConfig",
    "VLLMConfig",
    "sampling_seed",
]
