"""Estimators of KL(policy || reference) from sampled tokens (http://joschu.net/blog/kl-approx.html).

With x the live and f the reference log-probability, delta = clamp(f - x, -20, 20), r = exp(x - old):

| name | value               | gradient wrt x     | used by                                              |
|------|---------------------|--------------------|------------------------------------------------------|
| k1   | x - f               | 1 (carries no KL)  | only inside a reward                                 |
| k2   | (x - f)^2 / 2       | x - f              | REINFORCE++                                          |
| k3   | e^delta - delta - 1 | 1 - e^delta        | GRPO; unbounded where the policy is far below f      |
| k3+  | as k3               | x - f              | verl "low_var_kl+"                                   |
| k3s  | as k3               | x - f              | NeMo-RL                                              |
| k3u  | r * k3              | r * (x - f)        | TRL, DeepSeek-V3.2: unbiased for samples of the old policy |
"""

from typing import Literal, get_args

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before `exp`: e^20 is beyond every clip range and finite in fp32."""

KLEstimator = Literal["k1", "k2", "k3", "k3+", "k3s", "k3u"]
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)


def kl_estimate(
    logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: str, *, log_ratio_N: Tensor | None = None
) -> Tensor:
    """`[N]` KL of each token, with the gradient of the table above.

    `log_ratio_N` (clamped x - old) is only read by `k3u`; None means on-policy (r = 1). Beyond the clamp the gradient
    is 0. Raises ValueError for an unknown estimator.
    """
    delta_N = (ref_logprobs_N - logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if estimator == "k1":
        return -delta_N
    k2_N = 0.5 * delta_N.square()
    if estimator == "k2":
        return k2_N
    k3_N = delta_N.exp() - delta_N - 1.0
    if estimator == "k3":
        return k3_N
    if estimator in ("k3+", "k3s"):
        return _with_gradient_of(k2_N, value_N=k3_N)
    if estimator == "k3u":
        # grad(r * k3) = r * grad(k2) exactly; written this way it stays right where delta is clamped.
        ratio_N = torch.ones_like(k3_N) if log_ratio_N is None else log_ratio_N.detach().exp()
        return _with_gradient_of(ratio_N * k2_N, value_N=ratio_N * k3_N)
    raise ValueError(f"model.algorithm.kl_estimator = {estimator!r}: choose one of {', '.join(KL_ESTIMATORS)}")


def _with_gradient_of(surrogate_N: Tensor, *, value_N: Tensor) -> Tensor:
    return surrogate_N - surrogate_N.detach() + value_N.detach()
