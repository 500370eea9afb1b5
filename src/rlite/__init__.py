"""rlite: RL post-training of large MoE language models on PyTorch Lightning; training and generation share the devices.

Public names are imported on first use, so that `import rlite` is instant.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "ColocatedRLStrategy": "rlite.strategies",
    "GRPOModule": "rlite.modules",
    "MegatronPrecision": "rlite.strategies",
    "PPOModule": "rlite.modules",
    "PromptDataModule": "rlite.data",
    "SFTDataModule": "rlite.data",
    "SFTModule": "rlite.modules",
    "RLiteTrainer": "rlite.cli.app",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlite' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
