"""Runs the rewards of a rollout step and checks what they return, before anything is trained on it."""

import math
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlite.rewards.spec import ResolvedReward, RewardLike, resolve_reward
from rlite.rewards.time_limit import TimeLimitReached, time_limit
from rlite.rewards.values import RewardError, checked_values, show, weighted_total
from rlite.types import Rollout

Arguments = Mapping[str, list[Any]]


class Scored(NamedTuple):
    """Rewards of one rollout."""

    rewards: dict[str, float | None]
    """By reward name; None where a reward abstained."""
    total: float
    """`sum(weight * reward)` over the rewards with a weight that did not abstain; NaN when all did."""


class RewardRunner:
    """The rewards of a run.

    Args:
        rewards: names, callables, `RewardSpec`s or dicts with the keys of a spec.
        timeout_s: longest time one reward may take for a rollout step; None for no limit. It works in the main thread,
            see `time_limit`.

    Raises:
        ValueError: no rewards, equal names, a weight that is not finite, all weights 0, an unknown name or option.
    """

    def __init__(
        self,
        rewards: Sequence[RewardLike],
        *,
        timeout_s: float | None = 600.0,
    ) -> None:
        self.rewards = [resolve_reward(reward) for reward in rewards]
        self.timeout_s = timeout_s
        names = self.names
        if not names:
            raise ValueError("rewards is empty: list at least one reward, or override reward() of the module")
        if len(set(names)) < len(names):
            raise ValueError(f"rewards: names must differ, got {names}; set `name` of one of them")
        for reward in self.rewards:
            if not math.isfinite(reward.weight):
                raise ValueError(f"reward {reward.name!r}: weight = {reward.weight}, must be finite")
        if not any(reward.weight for reward in self.rewards):
            raise ValueError(f"rewards: the weights of {names} are all 0, nothing would be learned")

    @property
    def names(self) -> list[str]:
        return [reward.name for reward in self.rewards]

    @property
    def weights(self) -> list[float]:
        return [reward.weight for reward in self.rewards]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Checks every signature against the columns of the data set; call it before models load.

        Raises:
            ValueError: a reward names a column that does not exist; names the nearest one.
        """
        columns = list(columns)
        for reward in self.rewards:
            reward.check_columns(columns)

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Rewards of all rollouts, in order.

        Raises:
            RewardError: a reward raised, took too long, or returned a wrong number of values or a value that is
                neither a finite number nor None.
        """
        if not rollouts:
            return []
        arguments = _arguments(rollouts)
        columns = [
            checked_values(
                self._run(reward, arguments, rollouts),
                name=reward.name,
                count=len(rollouts),
                describe=lambda row: _describe(row, rollouts),
            )
            for reward in self.rewards
        ]
        return [self._scored(values) for values in zip(*columns, strict=True)]

    def fill(self, rollouts: Sequence[Rollout]) -> None:
        """Writes `rewards` and `reward` of every rollout; raises as `score` does, before the first is written."""
        for rollout, scored in zip(rollouts, self.score(rollouts), strict=True):
            rollout.rewards, rollout.reward = scored.rewards, scored.total

    def _scored(self, values: Sequence[float | None]) -> Scored:
        total = weighted_total(self.weights, values)
        return Scored(rewards=dict(zip(self.names, values, strict=True)), total=math.nan if total is None else total)

    def _run(self, reward: ResolvedReward, arguments: Arguments, rollouts: Sequence[Rollout]) -> Any:
        try:
            with time_limit(self.timeout_s):
                return reward.call(arguments)
        except TimeLimitReached as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            raise RewardError(
                f"reward {reward.name!r} {error} for {len(rollouts)} completions; it was here:\n{where}"
                "Raise the reward timeout or make the reward faster."
            ) from None
        except Exception as error:
            row = self._first_raising_row(reward, arguments, len(rollouts))
            where = "all rows together, no single one" if row is None else _describe(row, rollouts)
            raise RewardError(
                f"reward {reward.name!r} raised {type(error).__name__}: {error}\n  at {where}\n{traceback.format_exc()}"
            ) from error

    def _first_raising_row(self, reward: ResolvedReward, arguments: Arguments, count: int) -> int | None:
        for row in range(count):
            try:
                with time_limit(self.timeout_s):
                    reward.call({name: values[row : row + 1] for name, values in arguments.items()})
            except (Exception, TimeLimitReached):
                return row
        return None


def _arguments(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    columns = dict.fromkeys(name for rollout in rollouts for name in rollout.prompt.columns)
    return {
        **{name: [rollout.prompt.columns.get(name) for rollout in rollouts] for name in columns},
        "prompts": [rollout.prompt.text for rollout in rollouts],
        "completions": [rollout.completion.text for rollout in rollouts],
        "completion_ids": [list(rollout.completion.token_ids) for rollout in rollouts],
        "finish_reasons": [rollout.completion.finish_reason for rollout in rollouts],
    }


def _describe(row: int, rollouts: Sequence[Rollout]) -> str:
    rollout = rollouts[row]
    return (
        f"row {row} (prompt uid {rollout.prompt.uid}, sample {rollout.sample_index}): "
        f"prompt {show(rollout.prompt.text)}, completion {show(rollout.completion.text)}"
    )
