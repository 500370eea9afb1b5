"""Verifiers, shaping terms and combinators, and the runner that checks what rewards return."""

from rlite.rewards.boxed import math_boxed
from rlite.rewards.combinators import AllOf, FirstOf, Weighted
from rlite.rewards.gym import reasoning_gym_score
from rlite.rewards.matching import exact_match, last_number_match, number_closeness, regex_match
from rlite.rewards.runner import RewardRunner, Scored
from rlite.rewards.shaping import format_think, repetition_penalty, soft_overlong
from rlite.rewards.spec import RewardFn, RewardLike, RewardSpec
from rlite.rewards.values import RewardError

__all__ = [
    "AllOf",
    "FirstOf",
    "RewardError",
    "RewardFn",
    "RewardLike",
    "RewardRunner",
    "RewardSpec",
    "Scored",
    "Weighted",
    "exact_match",
    "format_think",
    "last_number_match",
    "math_boxed",
    "number_closeness",
    "reasoning_gym_score",
    "regex_match",
    "repetition_penalty",
    "soft_overlong",
]
