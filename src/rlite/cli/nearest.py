"""Finds the key that a user meant."""

import difflib
import re
from typing import Any

_PATTERNS = (
    re.compile(r"[Uu]nrecognized arguments?: --([\w.+-]+)"),
    re.compile(r"[Kk]ey ['\"]([\w.+-]+)['\"] is not expected"),
    re.compile(r"No action for key ['\"]([\w.+-]+)['\"]"),
    re.compile(r"[Oo]ption ['\"]([\w.+-]+)['\"] is not accepted"),
    re.compile(r"unexpected keyword argument ['\"]([\w.+-]+)['\"]"),
)


def add_nearest_key(message: str, parser: Any) -> str:
    """`message` with "did you mean ...?" when it complains about an unknown key."""
    if "Did you mean" in message:
        return message  # a nested parser said it already
    for pattern in _PATTERNS:
        if found := pattern.search(message):
            key = found[1]
            known = known_keys(parser)
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.3) or difflib.get_close_matches(
                key.rsplit(".", 1)[-1], known, n=1, cutoff=0.3
            )
            if near:
                return f"{message}\nDid you mean {near[0]!r}?"
    return message


def known_keys(parser: Any) -> list[str]:
    """Every option of the parser and of the classes that its configs name, with and without their prefixes."""
    import inspect

    from rlite import callbacks, data, modules, strategies

    keys = {action.dest for action in parser._actions if action.dest not in ("help", "config")}
    for package in (callbacks, data, modules, strategies):
        for name in package.__all__:
            thing = getattr(package, name)
            if inspect.isclass(thing):
                for base in thing.__mro__:
                    if base.__module__.startswith("rlite"):
                        keys |= {
                            p
                            for p in inspect.signature(base.__init__).parameters
                            if p not in ("self", "kwargs", "args")
                        }
                        keys |= set(getattr(base, "__dataclass_fields__", ()))
    return sorted(keys | {key.rsplit(".", 1)[-1] for key in keys})
