"""`GRPOModule`: group-relative policy optimisation. The algorithm is in `rlite.algorithms`; this is its order of events."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from rlite.algorithms import (
    AlgorithmConfig,
    Coefficients,
    Counts,
    LossInputs,
    ModelShape,
    PolicyObjective,
    add_metric_sums,
    algorithm_config,
    compute_advantages,
    expand_rows,
    group_token_counts,
    high_entropy_threshold,
    shape_rewards,
    summarize_metrics,
    trainable_rows,
    update_metrics,
)
from rlite.algorithms.rollout_metrics import advantage_metrics
from rlite.config import BatchConfig
from rlite.megatron.options import OptimizerConfig
from rlite.memory import Phase
from rlite.modules.base import PolicyModule
from rlite.modules.experience import Experience
from rlite.modules.groups import Balance, group_tokens, minibatches_of, receive
from rlite.modules.step import StepFacts, difference_sums, step_metrics
from rlite.rewards import RewardRunner, RewardSpec
from rlite.types import LossFn, LossOutput, RolloutBatch, TokenScores

RewardLike = RewardSpec | str | Callable[..., Any]

_MAX_STEPS_WITHOUT_UPDATE = 5


class GRPOModule(PolicyModule):
    """Samples a group of completions for each prompt, scores them, and reinforces those above their group's mean.

    A new reward is a subclass with `reward`, or a list of rewards in the config:

    ```python
    class MyModule(GRPOModule):
        def reward(self, completions, answer):
            return [float(c.strip() == a) for c, a in zip(completions, answer)]
    ```

    Args:
        policy: see `PolicyModule`.
        algorithm: name of a preset, or fields of `AlgorithmConfig` (with `preset: NAME` to start from one).
        optimizer, init_from: see `PolicyModule`.
        batch: group size and optimizer steps of a rollout step.
        rewards: names in `rlite.rewards`, dotted paths, callables, or `RewardSpec`s with weights; they are summed.
        reward_timeout_s: longest time one reward may take for a rollout step.
    """

    def __init__(
        self,
        *,
        policy: str,
        algorithm: AlgorithmConfig | str | dict[str, Any] = "grpo",
        optimizer: OptimizerConfig | None = None,
        batch: BatchConfig | None = None,
        rewards: list[RewardLike] | None = None,
        reward_timeout_s: float = 600.0,
        init_from: str | None = None,
    ) -> None:
        super().__init__(policy=policy, optimizer=optimizer, init_from=init_from)
        self.algorithm = algorithm_config(algorithm)
        self.coefficients = Coefficients(self.algorithm)
        self.batch = batch or BatchConfig()
        self.updates_per_batch = self.batch.updates_per_rollout
        self._check_config()
        listed: list[RewardLike] = list(rewards or [])
        if type(self).reward is not GRPOModule.reward:
            listed.append(self.reward)
        self.rewards = RewardRunner(listed, timeout_s=reward_timeout_s)
        self.objective = PolicyObjective(self.algorithm)
        self._steps_without_update = 0

    def _check_config(self) -> None:
        if self.batch.group_size < 2 and self.algorithm.advantage != "reinforce_pp":
            raise ValueError(
                f"model.batch.group_size = {self.batch.group_size}: advantage = {self.algorithm.advantage} compares the "
                "completions of a prompt with each other, so it needs at least 2"
            )
        self._check_replay()

    def _check_replay(self) -> None:
        if self.algorithm.router_replay == "R2" and self.updates_per_batch == 1:
            raise ValueError(
                "model.algorithm.router_replay = R2 has no effect with one update a rollout: it would replay what the trainer "
                "chooses anyway. Set model.batch.minibatches or epochs > 1, or use R3"
            )

    def reward(self, completions: list[str], **columns: list[Any]) -> list[float | None]:
        """Override: one number for each completion, None to abstain.

        Name the arguments you want: `prompts`, `completions`, `completion_ids`, `finish_reasons` and any column of the
        data set; each is a list with one entry for each completion.
        """
        raise TypeError("GRPOModule.reward is called only when a subclass overrides it")

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        columns = getattr(getattr(self.trainer, "datamodule", None), "columns", None)
        if columns is None:
            raise TypeError(
                f"{type(self).__name__} needs a data module that yields prompts: pass datamodule=PromptDataModule(...) to the "
                "Trainer"
            )
        self.rewards.check_columns(columns)
        if stage == "fit" and self.algorithm.needs_ref_logprobs:
            self.strategy.keep_reference()

    @override
    def training_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        started_s = time.perf_counter()
        earlier = ("generate", "sync", "reward") if batch.scored else ("generate", "sync")  # by the rollout callback
        self.score(batch)
        balance = self._balance(batch) if self.batch.balance else {}
        experience = Experience.from_rollouts(batch.rollouts)
        self._logprobs(experience, batch)
        metrics = balance | self._advantages(experience, batch)
        metrics |= self._updates(experience, batch)
        metrics["rollout_step"] = float(batch_idx)
        self._log(batch, metrics, started_s, earlier)

    @override
    def validation_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: RolloutBatch, stage: str) -> None:
        self.score(batch)
        facts = StepFacts.concatenate(self._step_facts(batch))
        count = len(facts.rewards_B)
        for name, value in step_metrics(facts, torch.arange(count), self.rewards.names).items():
            if name.startswith(("reward", "completions/")):
                self.log(f"{stage}/{name}", value, on_step=False, on_epoch=True, batch_size=count)

    @override
    def predict_step(self, batch: RolloutBatch, batch_idx: int) -> None:
        pass  # the rollout callback fills the batch and SampleLog writes it

    # -- the steps of a rollout step ---------------------------------------------------------------------------------

    def score(self, batch: RolloutBatch) -> None:
        """Fills rewards, unless the rollout callback had it done already (dynamic sampling). Every rank calls it.

        One rank of each data rank computes them, so that its peers see the same even from a moody judge.
        """
        if batch.scored:
            return
        outcome: Any = None
        with self.strategy.stopwatch.timed("reward"):
            if self.strategy.leads_data_rank:
                try:
                    outcome = self.rewards.score(batch.rollouts)
                except ValueError as error:
                    outcome = error
            outcomes = self.strategy.gather_data_parallel(outcome)
        _raise_first(outcomes)
        for rollout, scored in zip(batch.rollouts, outcomes[self.strategy.dp_rank], strict=True):
            rollout.rewards, rollout.reward = scored.rewards, scored.total
        batch.scored = True

    def _balance(self, batch: RolloutBatch) -> dict[str, float]:
        """Evens out the tokens of data-parallel ranks, within each optimizer step; returns how even they were and are."""
        groups = batch.groups(self.batch.group_size)
        everyone = self.strategy.gather_data_parallel([group_tokens(group) for group in groups])
        if len(everyone) == 1:
            return {}
        balance = Balance(tokens=everyone, minibatches=self.batch.minibatches)
        receive(batch, self.strategy.exchange_data_parallel(balance.outgoing(self.strategy.dp_rank, groups)))
        return balance.metrics()

    def _logprobs(self, experience: Experience, batch: RolloutBatch) -> None:
        """Reference log-probabilities, and the trainer's own where the updates would move away from them."""
        strategy, temperature = self.strategy, batch.sampling.temperature
        if self.algorithm.needs_ref_logprobs:
            strategy.enter(Phase.REFERENCE)
            with strategy.stopwatch.timed("logprob"):
                scores = strategy.score_reference(experience.rows, temperature=temperature)
            experience.ref_logprobs = [s.logprobs for s in scores]
        moves_away = self.batch.updates_per_rollout > 1 and self.algorithm.old_policy == "trainer"
        if moves_away or self.algorithm.needs_old_logprobs:
            strategy.enter(Phase.LOGPROB)
            with strategy.stopwatch.timed("logprob"):
                record = self.algorithm.router_replay == "R2"
                scores = strategy.score(experience.rows, temperature=temperature, record_experts=record)
            experience.old_logprobs = [s.logprobs for s in scores]
            if record:
                experience.rows = [
                    replace(row, experts=s.experts) for row, s in zip(experience.rows, scores, strict=True)
                ]
            experience.entropy_threshold = self._entropy_threshold([s.entropy for s in scores])
        _raise_first(strategy.gather_data_parallel(experience.logprob_problem()))

    def _entropy_threshold(self, entropies: Sequence[Tensor]) -> float | None:
        """Entropy above which tokens are trained on, over the whole rollout step (`entropy_top_fraction`)."""
        fraction = self.algorithm.entropy_top_fraction
        if fraction >= 1.0:
            return None
        everyone = self.strategy.gather_data_parallel(torch.cat([torch.empty(0), *(e.cpu() for e in entropies)]))
        return high_entropy_threshold(torch.cat(everyone), fraction)

    def _advantages(self, experience: Experience, batch: RolloutBatch) -> dict[str, float]:
        """Advantages over the whole rollout step, whichever rank its groups are on, and which rows are trained on.

        Returns the metrics of the step's rewards, lengths and advantages.
        """
        strategy, config = self.strategy, self.algorithm
        facts = self._step_facts(batch, self._token_kl(experience))
        everyone = StepFacts.concatenate(facts)
        first = sum(len(rank.rewards_B) for rank in facts[: strategy.dp_rank])
        mine = slice(first, first + len(batch.rollouts))
        groups_B = torch.arange(len(everyone.rewards_B)) // self.batch.group_size
        rewards_B = shape_rewards(
            everyone.rewards_B, everyone.lengths_B, everyone.truncated_B, config, max_tokens=batch.sampling.max_tokens
        )
        values = self._estimate(experience, everyone, rewards_B, mine)
        experience.advantages = list(values.float().split(everyone.lengths_B.tolist()))[mine]
        keep_B = trainable_rows(everyone.rewards_B, groups_B, everyone.truncated_B, config)
        experience.keep_B = keep_B[mine]
        experience.group_tokens_B = group_token_counts(everyone.lengths_B, groups_B, keep_B=keep_B)[mine]
        for rollout, tokens in zip(batch.rollouts, experience.advantages, strict=True):
            rollout.advantage = float(tokens.mean()) if len(tokens) else 0.0
        metrics = step_metrics(everyone, groups_B, self.rewards.names)
        if self.batch.group_size == 1:  # a group of one says nothing about its spread
            metrics = {k: v for k, v in metrics.items() if k not in ("frac_reward_zero_std", "reward/group_std_mean")}
        return metrics | summarize_metrics(advantage_metrics(values))

    def _estimate(self, experience: Experience, everyone: StepFacts, rewards_B: Tensor, mine: slice) -> Tensor:
        """Advantages of every token of all ranks, `[N]`, from the shaped rewards; `mine` are this rank's completions."""
        groups_B = torch.arange(len(rewards_B)) // self.batch.group_size
        values = compute_advantages(
            rewards_B,
            groups_B,
            everyone.lengths_B,
            self.algorithm,
            reward_table=everyone.reward_table_BK,
            weights=torch.tensor(self.rewards.weights),
            token_kl_N=everyone.token_kl_N,
        )
        return expand_rows(values, everyone.lengths_B) if values.shape == groups_B.shape else values

    def _step_facts(self, batch: RolloutBatch, token_kl_N: Tensor | None = None) -> list[StepFacts]:
        """Of every data-parallel rank, in order."""
        mine = StepFacts.of(batch.rollouts, num_rewards=len(self.rewards.names), token_kl_N=token_kl_N)
        return self.strategy.gather_data_parallel(mine)

    def _token_kl(self, experience: Experience) -> Tensor | None:
        """KL penalty of each token for `kl_in_reward`, flat over this rank's rows, on the CPU as everything about rewards."""
        if not (self.algorithm.kl_in_reward and self.algorithm.needs_ref_logprobs):
            return None
        assert experience.old_logprobs is not None and experience.ref_logprobs is not None
        old_N, ref_N = (torch.cat(logprobs).cpu() for logprobs in (experience.old_logprobs, experience.ref_logprobs))
        return self.coefficients.kl * (old_N - ref_N).double()

    def _updates(self, experience: Experience, batch: RolloutBatch) -> dict[str, float]:
        strategy = self.strategy
        strategy.enter(Phase.TRAIN)
        self.objective.max_completion_tokens = batch.sampling.max_tokens
        sums, grad_norms, skipped = [], [], 0
        for indices in self._minibatches(len(experience.rows)):
            with strategy.stopwatch.timed("update"):
                result = strategy.update(
                    [experience.rows[i] for i in indices],
                    self._loss_fn(experience, indices),
                    temperature=batch.sampling.temperature,
                )
            sums.append(result.metric_sums)
            grad_norms.append(result.grad_norm)
            skipped += not result.applied
            lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.step_schedules()
        differences_B = strategy.from_last_stage(experience.logprob_diff_B)
        for rollout, difference in zip(batch.rollouts, differences_B.tolist(), strict=True):
            rollout.logprob_diff = difference
        self._abort_after_skips(skipped, len(sums))
        metrics = summarize_metrics(add_metric_sums(sums))
        for name in ("loss", "policy_loss", "kl_loss"):  # sums over the updates; their mean compares between runs
            if name in metrics:
                metrics[name] /= len(sums)
        self.coefficients.update(metrics, completions=sum(self.strategy.gather_data_parallel(len(experience.rows))))
        return {**metrics, "grad_norm": sum(grad_norms) / len(grad_norms), "lr": lr, "updates_skipped": float(skipped)}

    def _abort_after_skips(self, skipped: int, updates: int) -> None:
        self._steps_without_update = self._steps_without_update + 1 if skipped == updates else 0
        if self._steps_without_update >= _MAX_STEPS_WITHOUT_UPDATE:
            raise RuntimeError(
                f"no optimizer step could be applied in {_MAX_STEPS_WITHOUT_UPDATE} rollout steps in a row: loss or gradients "
                "are not finite. Lower model.optimizer.lr, or resume from an earlier checkpoint."
            )

    def _minibatches(self, num_rows: int) -> list[list[int]]:
        """Row indices of each optimizer step; groups stay whole, epochs repeat the same parts."""
        size = self.batch.group_size
        parts = minibatches_of(num_rows // size, self.batch.minibatches)
        return [list(range(part.start * size, part.stop * size)) for part in parts] * self.batch.epochs

    def _loss_fn(self, experience: Experience, indices: Sequence[int]) -> LossFn:
        """The loss of one optimizer step, with its denominators summed once over all ranks."""
        local = self.objective.counts(experience.loss_inputs(indices))
        counts = Counts.from_tensor(sum(self.strategy.gather_data_parallel(local.to_tensor())))

        def loss_fn(rows: Sequence[int], scores: TokenScores) -> LossOutput:
            absolute = [indices[row] for row in rows]
            output = self.loss(experience.loss_inputs(absolute, scores), counts, experience.entropy_threshold)
            differences = experience.engine_differences(absolute, scores.logprobs)
            for row, difference in zip(absolute, differences, strict=True):
                experience.logprob_diff_B[row] = difference.mean() if len(difference) else 0.0
            return replace(output, metric_sums=output.metric_sums | difference_sums(differences))

        return loss_fn

    def loss(self, inputs: LossInputs, counts: Counts, entropy_threshold: float | None = None) -> LossOutput:
        """Override for another loss.

        Args:
            inputs: the trained tokens of a micro-batch.
            counts: global denominators of the optimizer step.
            entropy_threshold: of the rollout step, when `entropy_top_fraction` < 1.

        Returns:
            The PARTIAL loss: numerator of these rows over the global denominators.
        """
        return self.objective(
            inputs,
            counts,
            kl_coef=self.coefficients.kl,
            entropy_coef=self.coefficients.entropy,
            entropy_threshold=entropy_threshold,
        )

    @cached_property
    def model_shape(self) -> ModelShape:
        """What decides the FLOPs of the policy."""
        return ModelShape.from_hf(json.loads((Path(self.policy_dir) / "config.json").read_text()))

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["algorithm"] = self.coefficients.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.coefficients.load_state_dict(checkpoint.get("algorithm", {}))

    def _log(self, batch: RolloutBatch, metrics: dict[str, float], started_s: float, earlier: Sequence[str]) -> None:
        """`earlier`: what was timed before this step began."""
        metrics |= self.strategy.drain_metrics()
        before_s = sum(metrics.get(f"timing_s/{name}", 0.0) for name in earlier)
        step_s = before_s + time.perf_counter() - started_s
        lengths = [len(r.prompt.token_ids) + len(r.completion.token_ids) for r in batch.rollouts]
        everyones = [length for rank in self.strategy.gather_data_parallel(lengths) for length in rank]
        metrics |= {"timing_s/step": step_s, "perf/tokens_per_s": sum(everyones) / step_s}
        metrics |= update_metrics(
            self.model_shape,
            everyones,
            epochs=self.batch.epochs,
            seconds=metrics["timing_s/update"],
            devices=self.trainer.world_size,
            device_name=self.strategy.device_name,
        )
        self.log_values(metrics, batch_size=max(1, len(batch.rollouts)))


def _raise_first(gathered: Sequence[Any]) -> None:
    """A row that is wrong on one rank ends the run on all: the others would wait for it in the next collective."""
    for value in gathered:
        if isinstance(value, ValueError):
            raise value
