"""`PPOModule`: proximal policy optimisation with a critic, on the same strategy as GRPO."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from rlite.algorithms import AlgorithmConfig, add_metric_sums, summarize_metrics
from rlite.algorithms.gae import GaeResult, gae, token_rewards, value_loss
from rlite.algorithms.whitening import whiten
from rlite.megatron.options import OptimizerConfig
from rlite.memory import Phase
from rlite.modules.experience import Experience
from rlite.modules.grpo import GRPOModule
from rlite.modules.step import StepFacts
from rlite.types import LossOutput, RolloutBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """How the critic, a second model that starts from the policy's weights, judges and learns."""

    gamma: float = 1.0
    """Discount of a reward one token later."""
    lam: float = 0.95
    """Trace decay of GAE: 1 trusts the sampled reward, 0 the critic."""
    value_clip: float | None = 0.2
    """A value may move this far from the one before the update; None: as far as it likes."""

    def __post_init__(self) -> None:
        for key in ("gamma", "lam"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"model.critic.{key} = {getattr(self, key)}: must be in [0, 1]")
        if self.value_clip is not None and self.value_clip <= 0:
            raise ValueError(f"model.critic.value_clip = {self.value_clip}: must be > 0, or null for no clipping")


class PPOModule(GRPOModule):
    """`GRPOModule` with GAE in the place of group-relative advantages: one completion of a prompt is enough.

    After the old log-probabilities, phase CRITIC puts the critic on the device instead of the policy: it values every
    token, learns from the returns, and leaves. Advantages are whitened over all tokens of the rollout step.

    Args:
        critic: discount, trace decay and clipping.
        critic_optimizer: learning rate and schedule of the critic, which makes as many steps as the policy; by default the
            policy's. A critic usually wants a larger learning rate.
        algorithm: as of `GRPOModule`, by default the clipped loss averaged over tokens; `advantage` must be left alone.
        kwargs: see `GRPOModule`.
    """

    def __init__(
        self,
        *,
        critic: CriticConfig | None = None,
        critic_optimizer: OptimizerConfig | None = None,
        algorithm: AlgorithmConfig | str | dict[str, Any] = "ppo",
        **kwargs: Any,
    ) -> None:
        self.critic = critic or CriticConfig()
        super().__init__(algorithm=algorithm, **kwargs)
        self.critic_optimizer_config = critic_optimizer or self.optimizer_config
        self._critic_metrics: dict[str, float] = {}

    @override
    def _check_config(self) -> None:
        if self.algorithm.advantage != "grpo":
            raise ValueError(
                f"model.algorithm.advantage = {self.algorithm.advantage}: PPOModule estimates advantages with its critic; "
                "remove it, or use GRPOModule"
            )
        if self.algorithm.drop_zero_variance and self.batch.group_size < 2:
            raise ValueError(
                "model.algorithm.drop_zero_variance drops every group with model.batch.group_size = 1: set it to false"
            )
        self._check_replay()

    @override
    def configure_optimizers(self) -> Any:
        policy = super().configure_optimizers()
        self.strategy.build_critic(self.critic_optimizer_config, total_steps=self.total_steps)
        return policy

    @override
    def _advantages(self, experience: Experience, batch: RolloutBatch) -> dict[str, float]:
        return super()._advantages(experience, batch) | self._critic_metrics

    @override
    def _estimate(self, experience: Experience, everyone: StepFacts, rewards_B: Tensor, mine: slice) -> Tensor:
        """Whitened GAE of every token of all ranks, `[N]`. The critic learns on the way."""
        strategy = self.strategy
        strategy.enter(Phase.CRITIC)
        with strategy.stopwatch.timed("critic"):
            values = [row.cpu() for row in strategy.score_values(experience.rows)]
            rewards_N = token_rewards(rewards_B[mine], experience.lengths_B, token_kl_N=self._token_kl(experience))
            values_N = torch.cat([torch.empty(0), *values])
            result = gae(rewards_N, values_N, experience.lengths_B, gamma=self.critic.gamma, lam=self.critic.lam)
            learned = self._update_critic(
                experience, values, list(result.returns_N.split(experience.lengths_B.tolist()))
            )
        everyones = self.strategy.gather_data_parallel((values_N, result))
        self._critic_metrics = learned | _fit_metrics(everyones)
        return whiten(torch.cat([result.advantages_N for _, result in everyones]))

    def _update_critic(
        self, experience: Experience, old_values: Sequence[Tensor], returns: Sequence[Tensor]
    ) -> dict[str, float]:
        """The policy's minibatches and epochs. Tokens of completions that nothing judged (NaN) teach nothing."""
        sums, grad_norms = [], []
        for indices in self._minibatches(len(experience.rows)):
            judged = sum(int((~returns[i].isnan()).sum()) for i in indices)
            num_tokens = max(1, sum(self.strategy.gather_data_parallel(judged)))

            def loss_fn(
                rows: Sequence[int], values_N: Tensor, indices: list[int] = indices, num_tokens: int = num_tokens
            ) -> LossOutput:
                chosen = [indices[row] for row in rows]
                old_N, wanted_N = (_flat(parts, chosen, values_N) for parts in (old_values, returns))
                judged_N = ~wanted_N.isnan()
                losses_N, clipped_N = value_loss(
                    values_N[judged_N], old_N[judged_N], wanted_N[judged_N], clip=self.critic.value_clip
                )
                loss = losses_N.sum() / num_tokens
                sums = {"sum:critic/loss": loss.detach(), "count:valued": judged_N.sum()}
                return LossOutput(loss=loss, metric_sums=sums | {"valued:critic/clip_frac": clipped_N.sum()})

            result = self.strategy.update_critic([experience.rows[i] for i in indices], loss_fn)
            sums.append(result.metric_sums)
            grad_norms.append(result.grad_norm)
        metrics = summarize_metrics(add_metric_sums(sums))
        metrics["critic/loss"] /= len(sums)
        return metrics | {"critic/grad_norm": sum(grad_norms) / len(grad_norms)}


def _flat(parts: Sequence[Tensor], chosen: Sequence[int], like: Tensor) -> Tensor:
    return torch.cat([torch.empty(0), *(parts[i] for i in chosen)]).to(like)


def _fit_metrics(everyones: Sequence[tuple[Tensor, GaeResult]]) -> dict[str, float]:
    """How well the values before the update foretold the returns: `critic/explained_variance` is 1 when exactly, 0 when no
    better than their mean."""
    values_N = torch.cat([values for values, _ in everyones]).double()
    returns_N = torch.cat([result.returns_N for _, result in everyones])
    judged_N = ~returns_N.isnan()
    values_N, returns_N = values_N[judged_N], returns_N[judged_N]
    if len(returns_N) < 2:
        return {}
    metrics = {"critic/value_mean": float(values_N.mean()), "critic/return_mean": float(returns_N.mean())}
    variance = float(returns_N.var())
    if variance > 0:
        metrics["critic/explained_variance"] = 1.0 - float((returns_N - values_N).var()) / variance
    return metrics
