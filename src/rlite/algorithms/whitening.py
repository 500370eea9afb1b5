"""REINFORCE++ (arXiv 2501.03262): advantages per trained token, whitened over all of them, `[N]` fp64."""

import torch
from torch import Tensor

from rlite.algorithms.advantages import AdvantageInputs, GroupStatistics
from rlite.algorithms.registry import register_advantage
from rlite.algorithms.rows import expand_rows

VARIANCE_FLOOR = 1e-8


def whiten(values_N: Tensor, *, population_variance: bool = False) -> Tensor:
    """Mean 0 and variance 1 over the tokens that are not NaN; NaN becomes 0, and so does everything when all are equal.

    Divides by the root of the sample variance + 1e-8 (verl) or, with `population_variance`, of the larger of the
    population variance and 1e-8 (NeMo-RL, OpenRLHF).
    """
    judged_N = ~torch.isnan(values_N)
    values = values_N[judged_N]
    if len(values) < 2 or values.max() == values.min():
        return torch.zeros_like(values_N)
    if population_variance:
        variance = values.var(correction=0).clamp(min=VARIANCE_FLOOR)
    else:
        variance = values.var(correction=1) + VARIANCE_FLOOR
    return torch.where(judged_N, (values_N - values.mean()) / variance.sqrt(), 0.0)


@register_advantage("reinforce_pp")
def reinforce_pp(batch: AdvantageInputs, *, population_variance: bool = False) -> Tensor:
    """Whitened return: the completion's reward, minus the KL penalty of this token and of those after it."""
    returns_N = expand_rows(batch.rewards_B, batch.lengths_B) - _kl_to_go(batch)
    return whiten(returns_N, population_variance=population_variance)


@register_advantage("reinforce_pp_baseline")
def reinforce_pp_baseline(batch: AdvantageInputs, *, population_variance: bool = False) -> Tensor:
    """Whitened return with the group's mean reward as a baseline."""
    stats = GroupStatistics.of(batch.rewards_B, batch.group_B)
    centred_B = torch.where(stats.varied, batch.rewards_B - stats.mean, 0.0)
    centred_B = torch.where(torch.isnan(batch.rewards_B), torch.nan, centred_B)
    returns_N = expand_rows(centred_B, batch.lengths_B) - _kl_to_go(batch)
    return whiten(returns_N, population_variance=population_variance)


def _kl_to_go(batch: AdvantageInputs) -> Tensor | float:
    """`[N]` KL penalty summed from each token to the end of its row."""
    if batch.token_kl_N is None:
        return 0.0
    rows = batch.token_kl_N.split(batch.lengths_B.tolist())
    return torch.cat([row_T.flip(0).cumsum(0).flip(0) for row_T in rows])
