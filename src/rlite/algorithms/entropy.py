"""Which tokens get a policy gradient, by their entropy: the 80/20 rule (arXiv 2506.01939)."""

import math

from torch import Tensor


def high_entropy_threshold(entropy_N: Tensor, fraction: float) -> float:
    """Entropy that the top `fraction` of the tokens reach: the (1 - fraction) quantile, interpolated linearly.

    `entropy_N` must hold all trained tokens of the optimizer step, gathered over data-parallel ranks.
    """
    if len(entropy_N) == 0:
        return 0.0
    ordered = entropy_N.detach().double().sort().values
    position = (1.0 - fraction) * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (position - below) * (ordered[above] - ordered[below]))


def high_entropy_mask(entropy_N: Tensor, threshold: float) -> Tensor:
    """bool `[N]`: tokens that keep their policy gradient. Denominators stay those of all tokens."""
    return entropy_N.detach() >= threshold
