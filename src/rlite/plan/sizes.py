"""Sizes as people write and read them."""

import re

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the torch name of the dtype."""


def parse_size(text: str, *, key: str) -> int:
    """Bytes of `64GiB`, `80 GB` or a plain number of bytes. Raises ValueError naming `key`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = found[2].lower() or "b" if found else ""
    if found is None or unit not in _BY_LOWER or float(found[1]) <= 0:
        raise ValueError(f"{key} = {text!r}: write a size such as 64GiB or 80GB ({', '.join(_UNITS)})")
    return int(float(found[1]) * _BY_LOWER[unit])


def show_size(nbytes: float) -> str:
    """Three significant digits in the largest binary unit that keeps the number at 1 or above."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:#.3g}".rstrip(".") + f" {unit}"
    return f"{nbytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """Three significant digits, in seconds, milliseconds or microseconds."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
