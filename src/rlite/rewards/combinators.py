"""Rewards made of rewards, for what the weighted list of a config cannot say.

Used like any class in a config: `{fn: AllOf, options: {rewards: [format_think, math_boxed]}}`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlite.rewards.spec import RewardLike, named_parameters, resolve_reward, takes_everything
from rlite.rewards.values import checked_values, weighted_total


class _Combined(ABC):
    """Runs several rewards and combines their values row by row. Asks for all that its parts ask for."""

    def __init__(self, rewards: Sequence[RewardLike]) -> None:
        if not rewards:
            raise ValueError(f"{type(self).__name__}: rewards is empty")
        self.parts = [resolve_reward(reward) for reward in rewards]
        self.__signature__ = self._joint_signature()

    def __call__(self, **arguments: list[Any]) -> list[float | None]:
        # Every argument has one entry per completion, so any of them tells how many there are.
        count = len(next(iter(arguments.values())))
        columns = [
            checked_values(part.call(arguments), name=part.name, count=count, describe=lambda row: f"row {row}")
            for part in self.parts
        ]
        return [self._combine(row) for row in zip(*columns, strict=True)]

    @abstractmethod
    def _combine(self, values: Sequence[float | None]) -> float | None: ...

    def _joint_signature(self) -> inspect.Signature:
        keyword, joint = inspect.Parameter.KEYWORD_ONLY, {"completions": inspect.Parameter.empty}
        for part in self.parts:
            for name, parameter in named_parameters(part.fn).items():
                if name not in part.options and joint.get(name) is not inspect.Parameter.empty:
                    joint[name] = parameter.default
        parameters = [inspect.Parameter(name, keyword, default=default) for name, default in joint.items()]
        if any(takes_everything(part.fn) for part in self.parts):
            parameters.append(inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD))
        return inspect.Signature(parameters)


class AllOf(_Combined):
    """The smallest of the rewards: good only where every one is. Abstains where one abstains."""

    def _combine(self, values: Sequence[float | None]) -> float | None:
        return None if None in values else min(values)


class FirstOf(_Combined):
    """The first of the rewards that does not abstain: a verifier, then its fallback. Abstains where all abstain."""

    def _combine(self, values: Sequence[float | None]) -> float | None:
        return next((value for value in values if value is not None), None)


class Weighted(_Combined):
    """Weighted sum of the rewards that do not abstain, as one reward: to nest in another combinator."""

    def _combine(self, values: Sequence[float | None]) -> float | None:
        return weighted_total([part.weight for part in self.parts], values)
