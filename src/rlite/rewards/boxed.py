r"""Reward for answers in `\boxed{}`."""

import re
from collections.abc import Sequence
from typing import Any

from rlite.rewards.number import parse_number

_SPACING = re.compile(r"\\[,;!: ]|\s+|\\left|\\right|\\?\$")
_SYNONYMS = (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\leq", "\\le"), ("\\geq", "\\ge"), ("\\cdot", "*"))


def math_boxed(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    r"""1 where the last `\boxed{...}` of the completion equals the answer, else 0.

    Numbers compare by value (`0.5` is `\frac{1}{2}`), everything else as text after LaTeX spacing is dropped; tuples
    and sets compare part by part. There is no algebra (`x+1` is not `1+x`), and so nothing that could take long.
    """
    return [float(_equal(last_boxed(c), str(a))) for c, a in zip(completions, answer, strict=True)]


def last_boxed(text: str) -> str | None:
    r"""Contents of the last complete `\boxed{...}` or `\fbox{...}`, or None."""
    for start in sorted((m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)), reverse=True):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position]
    return None


def _equal(given: str | None, wanted: str) -> bool:
    if given is None:
        return False
    boxed = last_boxed(wanted)
    wanted = wanted if boxed is None else boxed
    number = parse_number(wanted)
    if number is not None:
        return parse_number(given) == number
    left, right = _normal(given), _normal(wanted)
    if left == right:
        return True
    parts = _parts(left), _parts(right)
    return all(parts) and len(parts[0]) == len(parts[1]) and all(map(_equal, *parts))


def _normal(text: str) -> str:
    text = _SPACING.sub("", text)
    for synonym, name in _SYNONYMS:
        text = text.replace(synonym, name)
    return text.rstrip(".")


def _parts(text: str) -> list[str]:
    """Entries of a tuple, interval or set at its top level; none of anything else."""
    text = text.replace("\\{", "[").replace("\\}", "]")
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return []
    parts, depth, entry = [], 0, ""
    for char in text[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(entry)
            entry = ""
        else:
            entry += char
    return [*parts, entry] if parts else []
