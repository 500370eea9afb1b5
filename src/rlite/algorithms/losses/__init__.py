"""Policy losses by name; importing this package registers them."""

from rlite.algorithms.losses.base import PolicyLoss, clipped_surrogate, log_ratio, raw_log_ratio
from rlite.algorithms.losses.clipped import gmpo, gspo, ppo_clip, rloo_sequence
from rlite.algorithms.losses.weighted import cispo, dppo_kl, dppo_tv, dro, reinforce, sapo, vespo

__all__ = [
    "PolicyLoss",
    "cispo",
    "clipped_surrogate",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gspo",
    "log_ratio",
    "ppo_clip",
    "raw_log_ratio",
    "reinforce",
    "rloo_sequence",
    "sapo",
    "vespo",
]
