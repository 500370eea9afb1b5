"""LightningModules: the algorithms."""

from rlite.modules.base import PolicyModule
from rlite.modules.grpo import GRPOModule
from rlite.modules.ppo import CriticConfig, PPOModule
from rlite.modules.sft import SFTModule

__all__ = ["CriticConfig", "GRPOModule", "PPOModule", "PolicyModule", "SFTModule"]
