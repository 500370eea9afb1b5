"""What a reward may return."""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


class RewardError(ValueError):
    """A reward raised or returned something that is not a reward; names the reward, the row and the value."""


def checked_values(result: Any, *, name: str, count: int, describe: Callable[[int], str]) -> list[float | None]:
    """What reward `name` returned, as `count` floats, None where it abstained.

    Lists, tuples, generators, arrays and tensors will do; `describe` says in words which row a bad value belongs to.

    Raises:
        RewardError: wrong number of values, or a value that is neither a finite number nor None.
    """
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise RewardError(
            f"reward {name!r} returned {show(result)}, expected a list of {count} numbers or None, one per completion"
        )
    values = list(result)
    if len(values) != count:
        raise RewardError(
            f"reward {name!r} returned {len(values)} values for {count} completions, expected one for each"
        )
    return [_number(value, name, row, describe) for row, value in enumerate(values)]


def weighted_total(weights: Sequence[float], values: Sequence[float | None]) -> float | None:
    """`sum(weight * value)` over the values that are not None and have a weight; None when there is no such value."""
    terms = [weight * value for weight, value in zip(weights, values, strict=True) if weight and value is not None]
    return math.fsum(terms) if terms else None


def show(value: Any) -> str:
    """`repr`, shortened to what fits an error message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _number(value: Any, name: str, row: int, describe: Callable[[int], str]) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        problem = f"{show(value)}, which is not a number"
    elif not math.isfinite(value):
        problem = f"{float(value)} (to abstain, return None)"
    else:
        return float(value)
    raise RewardError(f"reward {name!r} returned {problem}\n  at {describe(row)}")
