"""`PolicyObjective`: the whole loss of a micro-batch, composed from the parts in this package.

Order (the same as TRL and verl): per-token policy loss with its clips -> off-policy sequence mask -> entropy mask ->
train/infer weight -> + kl_coef * KL (neither masked nor weighted) -> aggregate -> - entropy_coef * token mean entropy.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rlite.algorithms.aggregation import aggregate
from rlite.algorithms.config import AlgorithmConfig
from rlite.algorithms.corrections import Correction, correction_weights, opsm_mask, weight_mass
from rlite.algorithms.entropy import high_entropy_mask
from rlite.algorithms.inputs import Counts, LossInputs
from rlite.algorithms.kl import kl_estimate
from rlite.algorithms.losses import PolicyLoss, log_ratio, raw_log_ratio
from rlite.algorithms.metrics import extremes
from rlite.algorithms.mismatch import mismatch_metrics
from rlite.algorithms.registry import LOSSES
from rlite.algorithms.rows import row_mean
from rlite.types import LossOutput


class PolicyObjective:
    """Turns `LossInputs` into a partial loss and metric sums. Without state: the same inputs give the same loss."""

    def __init__(self, config: AlgorithmConfig, *, max_completion_tokens: int | None = None) -> None:
        self.config = config
        self.max_completion_tokens = max_completion_tokens
        """The rollout's max_tokens; only `seq_mean_token_sum_norm` needs it."""
        self._policy_loss = LOSSES.bind(config.loss, config.loss_options())

    def counts(self, inputs: LossInputs) -> Counts:
        """Denominators of this rank's rows of one optimizer step; sum them over ranks before the first micro-batch.

        No forward pass is needed: pass the recorded log-probabilities as `logprobs_N`. Raises ValueError when
        `correction_normalize` asks for `old_logprobs_N` and they are missing.
        """
        if self.config.correction_normalize != "none" and inputs.old_logprobs_N is None:
            raise ValueError(
                "model.algorithm.correction_normalize needs old_logprobs_N before the update: compute them"
            )
        inputs, correction = self._prepare(inputs)
        counts = Counts.of(inputs.lengths_B, inputs.group_tokens_B)
        if correction is None or self.config.correction_normalize != "batch":
            return counts
        total, number = weight_mass(correction, inputs)
        return replace(counts, weight_sum=float(total), weight_count=float(number))

    def __call__(
        self,
        inputs: LossInputs,
        counts: Counts,
        *,
        kl_coef: float | None = None,
        entropy_coef: float | None = None,
        entropy_threshold: float | None = None,
    ) -> LossOutput:
        """Partial loss of a micro-batch over the global `counts`; gradients are to be summed.

        `kl_coef` and `entropy_coef` override the configured ones (adaptive controllers); `entropy_threshold` comes from
        `high_entropy_threshold` over the whole step when `entropy_top_fraction` < 1. Raises ValueError when an input
        that the configuration needs is missing.
        """
        kl_coef = self.config.kl_coef if kl_coef is None else kl_coef
        entropy_coef = self.config.entropy_coef if entropy_coef is None else entropy_coef
        inputs, correction = self._prepare(inputs)
        policy = self._policy_loss(inputs)
        weighted_N = policy.loss_N
        masks: dict[str, Tensor] = {}
        if self.config.opsm_delta is not None:
            masks["opsm"] = opsm_mask(inputs, self.config.opsm_delta)
            weighted_N = weighted_N * masks["opsm"]
        if self.config.entropy_top_fraction < 1.0:
            weighted_N = weighted_N * self._entropy_mask(inputs, entropy_threshold)
        if correction is not None:
            weighted_N = weighted_N * self._normalised(correction, counts)
        policy_loss = self._aggregate(weighted_N, inputs, counts)
        loss, sums = policy_loss, {"sum:policy_loss": policy_loss.detach()}
        if inputs.ref_logprobs_N is not None:
            kl_loss, kl_sums = self._kl(inputs, counts)
            loss, sums = loss + (0.0 if self.config.kl_in_reward else kl_coef) * kl_loss, sums | kl_sums
        elif kl_coef > 0 and not self.config.kl_in_reward:
            raise ValueError("model.algorithm.kl_coef > 0 needs LossInputs.ref_logprobs_N")
        if entropy_coef > 0:
            loss = loss - entropy_coef * self._entropy_mean(inputs, counts)
        sums["sum:loss"] = loss.detach()
        return LossOutput(loss=loss, metric_sums=sums | self._metrics(inputs, policy, correction, masks))

    def _prepare(self, inputs: LossInputs) -> tuple[LossInputs, Correction | None]:
        """Drops the rows that do not train, settles the old policy, and computes the train/infer weights."""
        config = self.config
        if inputs.keep_B is not None:
            inputs = inputs.select_tokens(inputs.keep_B[inputs.row_N])
        if config.needs_rollout_logprobs and inputs.rollout_logprobs_N is None:
            raise ValueError("model.algorithm.correction (or old_policy = rollout) needs LossInputs.rollout_logprobs_N")
        live_N = inputs.logprobs_N.detach()
        recorded_N = live_N if inputs.old_logprobs_N is None else inputs.old_logprobs_N
        if config.old_policy == "rollout":
            recorded_N = torch.where(torch.isnan(inputs.rollout_logprobs_N), recorded_N, inputs.rollout_logprobs_N)
        elif config.old_policy == "live":
            recorded_N = live_N
        inputs = replace(inputs, old_logprobs_N=recorded_N)
        if config.correction == "none" and config.veto_ratio is None:
            return inputs, None
        correction = correction_weights(
            inputs,
            config.correction,
            low=config.correction_min,
            high=config.correction_max,
            veto_ratio=config.veto_ratio,
        )
        if config.correction_normalize == "kept":
            kept_N = ~correction.rejected_N
            inputs = inputs.select_tokens(kept_N)
            correction = replace(
                correction,
                weight_N=correction.weight_N[kept_N],
                rejected_N=correction.rejected_N[kept_N],
                out_of_bounds_N=correction.out_of_bounds_N[kept_N],
            )
        return inputs, correction

    def _normalised(self, correction: Correction, counts: Counts) -> Tensor:
        if self.config.correction_normalize != "batch" or counts.weight_sum <= 0:
            return correction.weight_N
        return correction.weight_N * (counts.weight_count / counts.weight_sum)

    def _aggregate(self, loss_N: Tensor, inputs: LossInputs, counts: Counts) -> Tensor:
        return aggregate(
            loss_N, inputs, counts, self.config.aggregation, max_completion_tokens=self.max_completion_tokens
        )

    def _kl(self, inputs: LossInputs, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        kl_N = kl_estimate(
            inputs.logprobs_N, inputs.ref_logprobs_N, self.config.kl_estimator, log_ratio_N=log_ratio(inputs)
        )
        partial = self._aggregate(kl_N, inputs, counts)
        return partial, {"sum:kl_loss": partial.detach(), "tokens:kl": kl_N.detach().sum()}

    def _entropy_mask(self, inputs: LossInputs, threshold: float | None) -> Tensor:
        if threshold is None or inputs.entropy_N is None:
            raise ValueError(
                "model.algorithm.entropy_top_fraction < 1 needs LossInputs.entropy_N and entropy_threshold"
            )
        return high_entropy_mask(inputs.entropy_N, threshold)

    def _entropy_mean(self, inputs: LossInputs, counts: Counts) -> Tensor:
        if inputs.entropy_N is None:
            raise ValueError("model.algorithm.entropy_coef > 0 needs LossInputs.entropy_N")
        return aggregate(inputs.entropy_N, inputs, counts, "token_mean")

    @torch.no_grad()
    def _metrics(
        self, inputs: LossInputs, policy: PolicyLoss, correction: Correction | None, masks: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        sums = _ratio_metrics(inputs) | _clip_metrics(policy, inputs)
        tokens = inputs.logprobs_N.new_tensor(len(inputs.row_N))
        sums |= {"count:tokens": tokens, "count:rows": (inputs.lengths_B > 0).sum().to(tokens.dtype)}
        if inputs.entropy_N is not None:
            sums["tokens:entropy"] = inputs.entropy_N.detach().sum()
        if inputs.rollout_logprobs_N is not None and self.config.old_policy != "rollout":
            sums |= mismatch_metrics(inputs)
        if correction is not None:
            kind = "rows" if correction.per_row else "tokens"
            sums[f"{kind}:rollout/is_frac_oob"] = _fraction_sum(correction.out_of_bounds_N, inputs, kind)
            sums["tokens:rollout/frac_rejected"] = _fraction_sum(correction.rejected_N, inputs, "tokens")
        if "opsm" in masks:
            sums["rows:opsm/frac_masked_seqs"] = _fraction_sum(~masks["opsm"], inputs, "rows")
        return sums


def _fraction_sum(flags_N: Tensor, inputs: LossInputs, kind: str) -> Tensor:
    values_N = flags_N.to(inputs.logprobs_N.dtype)
    return values_N.sum() if kind == "tokens" else row_mean(values_N, inputs.row_N, inputs.lengths_B).sum()


def _ratio_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    log_ratio_N = log_ratio(inputs).detach()
    ratio_N = log_ratio_N.exp()
    return {
        "tokens:ratio/mean": ratio_N.sum(),
        "tokens:approx_kl/k1": -log_ratio_N.sum(),
        "tokens:approx_kl/k2": 0.5 * log_ratio_N.square().sum(),
        "tokens:approx_kl/k3": (ratio_N - 1.0 - log_ratio_N).sum(),
        "tokens:ratio/clamped_frac": (raw_log_ratio(inputs).detach() != log_ratio_N).to(ratio_N.dtype).sum(),
        **extremes("ratio", ratio_N),
    }


def _clip_metrics(policy: PolicyLoss, inputs: LossInputs) -> dict[str, Tensor]:
    kind = "rows" if policy.per_row else "tokens"
    has_tokens_B = inputs.lengths_B > 0
    low_B, high_B = (
        row_mean(flags_N.to(inputs.logprobs_N.dtype), inputs.row_N, inputs.lengths_B)[has_tokens_B]
        for flags_N in (policy.clipped_low_N, policy.clipped_high_N)
    )
    return {
        f"{kind}:clip_ratio/low_mean": _fraction_sum(policy.clipped_low_N, inputs, kind),
        f"{kind}:clip_ratio/high_mean": _fraction_sum(policy.clipped_high_N, inputs, kind),
        f"{kind}:clip_ratio/dual": _fraction_sum(policy.dual_clipped_N, inputs, kind),
        "max:-clip_ratio/low_min": extremes("low", low_B)["max:-low/min"],
        "max:clip_ratio/high_max": extremes("high", high_B)["max:high/max"],
    }
