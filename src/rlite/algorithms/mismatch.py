"""How far the engine that samples is from the policy that trains, on the sampled tokens: metric sums.

Healthy: kl_k3 below 1e-3 (MoE 1.5e-3), is_mean within 1 +- 0.01, ess above 0.9, prob_pearson above 0.99,
mult_prob_error below 1.02. A drift upwards is a broken weight transfer.
"""

import torch
from torch import Tensor

from rlite.algorithms.corrections import mismatch_log_ratio
from rlite.algorithms.inputs import LossInputs
from rlite.algorithms.kl import LOG_RATIO_BOUND
from rlite.algorithms.metrics import extremes
from rlite.algorithms.rows import row_mean, row_sum

EXTREME_RATIO = 2.0


def mismatch_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """Sums for `rollout/*`, from `old_logprobs_N` and `rollout_logprobs_N` (both needed)."""
    assert inputs.old_logprobs_N is not None and inputs.rollout_logprobs_N is not None
    old_N, recorded_N = inputs.old_logprobs_N.detach(), inputs.rollout_logprobs_N
    log_w_N = mismatch_log_ratio(old_N, recorded_N)
    rollout_N = torch.where(torch.isnan(recorded_N), old_N, recorded_N)
    return _token_metrics(old_N, rollout_N, log_w_N) | _row_metrics(log_w_N, inputs)


def _token_metrics(old_N: Tensor, rollout_N: Tensor, log_w_N: Tensor) -> dict[str, Tensor]:
    w_N, distance_N = log_w_N.exp(), log_w_N.abs()
    prob_old_N, prob_rollout_N = old_N.exp(), rollout_N.exp()
    prob_gap_N = (prob_old_N - prob_rollout_N).abs()
    mean_log_N = torch.logaddexp(old_N, rollout_N) - torch.log(old_N.new_tensor(2.0))
    js_N = 0.5 * (_k3(mean_log_N - rollout_N) + _k3(mean_log_N - old_N))
    means = {
        "rollout/kl_k1": -log_w_N,
        "rollout/kl_k3": _k3(log_w_N),
        "rollout/kl_k3_reverse": _k3(-log_w_N),
        "rollout/js": js_N,
        "rollout/logprob_diff_mean": distance_N,
        "rollout/prob_abs_mean": prob_gap_N,
        "rollout/mult_prob_error": distance_N.exp(),
        "rollout/is_mean": w_N,
        "rollout/frac_extreme": (distance_N > torch.log(distance_N.new_tensor(EXTREME_RATIO))).to(w_N.dtype),
        "moment/is_square": w_N.square(),
        "moment/prob_abs_square": prob_gap_N.square(),
        "moment/prob_old": prob_old_N,
        "moment/prob_rollout": prob_rollout_N,
        "moment/prob_old_square": prob_old_N.square(),
        "moment/prob_rollout_square": prob_rollout_N.square(),
        "moment/prob_product": prob_old_N * prob_rollout_N,
    }
    sums = {f"tokens:{name}": values_N.sum() for name, values_N in means.items()}
    for name, values_N in (("is", w_N), ("logprob_diff", distance_N), ("prob_abs", prob_gap_N)):
        bounds = extremes(name, values_N)
        sums[f"max:rollout/{name}_max"] = bounds[f"max:{name}/max"]
        if name == "is":
            sums["max:-rollout/is_min"] = bounds["max:-is/min"]
    return sums


def _row_metrics(log_w_N: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
    has_tokens_B = (inputs.lengths_B > 0).to(log_w_N.dtype)
    mean_B = row_mean(log_w_N, inputs.row_N, inputs.lengths_B)
    total_B = row_sum(log_w_N, inputs.row_N, len(inputs.lengths_B)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "rows:rollout/log_ppl_diff": -mean_B.sum(),
        "rows:rollout/log_ppl_abs_diff": mean_B.abs().sum(),
        "rows:rollout/ppl_ratio": ((-mean_B).exp() * has_tokens_B).sum(),
        "rows:moment/seq_is_square": ((2 * total_B).exp() * has_tokens_B).sum(),
    }


def _k3(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.exp() - 1.0 - log_ratio_N
