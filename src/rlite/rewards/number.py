r"""Numbers as people and LaTeX write them, as exact fractions: no evaluation, so nothing can blow up or hang."""

import re
from fractions import Fraction

MAX_CHARS = 200
"""Longer texts are not numbers; keeps huge integers out of the conversion."""

_DECIMAL = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_PLAIN = re.compile(rf"([-+]?)\s*({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?")
_LATEX_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}")
_SHORT_FRACTION = re.compile(r"frac(\d)(\d)")
_DECORATION = re.compile(
    r"\\[,;!: ]|~|\\left|\\right|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\}|\\?\$|\\?%|\^\\circ|\^\{\\circ\}"
)


def parse_number(text: str) -> Fraction | None:
    r"""The number `text` consists of, or None.

    Understands signs, decimals, thousands separators, `a/b`, `\frac{a}{b}`; drops units in `\text{}`, dollar, percent
    and degree signs and LaTeX spacing, as graders of the MATH data set do.
    """
    if len(text) > MAX_CHARS:
        return None
    text = _DECORATION.sub("", text.replace("\u2212", "-"))
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text).replace("{,}", ",").strip().rstrip(".")
    if latex := _LATEX_FRACTION.fullmatch(text):
        sign, above, below = latex.groups()
        return _signed(sign, _ratio(parse_number(above), parse_number(below)))
    plain = _PLAIN.fullmatch(text)
    if plain is None:
        return None
    sign, above, below = plain.groups()
    return _signed(sign, _ratio(_decimal(above), _decimal(below) if below else Fraction(1)))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _ratio(above: Fraction | None, below: Fraction | None) -> Fraction | None:
    return above / below if above is not None and below else None


def _signed(sign: str, value: Fraction | None) -> Fraction | None:
    return -value if value is not None and sign == "-" else value
