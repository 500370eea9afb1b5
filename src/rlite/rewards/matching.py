"""Rewards that compare a completion with the answer column: text, last number, pattern, sums."""

import re
from collections.abc import Sequence
from typing import Any

from rlite.rewards.number import parse_number

_NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")


def exact_match(completions: Sequence[str], answer: Sequence[Any], *, ignore_case: bool = False) -> list[float]:
    """1 where the completion without surrounding white space is the answer, else 0."""

    def norm(value: Any) -> str:
        text = str(value).strip()
        return text.lower() if ignore_case else text

    return [float(norm(c) == norm(a)) for c, a in zip(completions, answer, strict=True)]


def last_number_match(completions: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """1 where the last number written in the completion equals the answer, else 0.

    Values compare as numbers: `1,200.0` is `1200`. Abstains where the answer is no number.
    """
    return [_last_number(c, a) for c, a in zip(completions, answer, strict=True)]


def _last_number(completion: str, answer: Any) -> float | None:
    wanted = parse_number(str(answer))
    if wanted is None:
        return None
    found = _NUMBER.findall(completion.replace("\u2212", "-"))
    return float(bool(found) and parse_number(found[-1]) == wanted)


def regex_match(completions: Sequence[str], *, pattern: str) -> list[float]:
    """1 where `pattern` matches the whole completion (`.` matches newlines too), else 0."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(c) is not None) for c in completions]


def number_closeness(completions: Sequence[str], answer: Sequence[Any], *, partial: float = 0.5) -> list[float | None]:
    """Shaped reward of number answers: 1 if exact, `partial / (1 + |error|)` for another number, 0 if it is no number.

    The whole completion must be the number. Abstains where the answer is no number.
    """
    return [_closeness(c, a, partial) for c, a in zip(completions, answer, strict=True)]


def _closeness(completion: str, answer: Any, partial: float) -> float | None:
    wanted = parse_number(str(answer))
    if wanted is None:
        return None
    given = parse_number(completion)
    if given is None:
        return 0.0
    return 1.0 if given == wanted else float(partial / (1 + abs(given - wanted)))
