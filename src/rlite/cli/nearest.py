"""Finds the key that a user meant."""

import difflib
import inspect
import re
from typing import Any

_PATTERNS = (
    re.compile(r"[Uu]nrecognized arguments?: --([\w.+-]+)"),
    re.compile(r"[Kk]ey ['\"]([\w.+-]+)['\"] is not expected"),
    re.compile(r"No action for key ['\"]([\w.+-]+)['\"]"),
    re.compile(r"[Oo]ption ['\"]([\w.+-]+)['\"] is not accepted"),
    re.compile(r"unexpected keyword argument ['\"]([\w.+-]+)['\"]"),
)
_FEW = 20
"""A parser with at most this many keys has all of them listed when none is near."""


def add_nearest_key(message: str, parser: Any) -> str:
    """`message` with "Did you mean ...?" when it complains about an unknown key.

    The keys of the parser that complains come first: a nested one knows those of its class.
    """
    found = next((match for pattern in _PATTERNS if (match := pattern.search(message))), None)
    if found is None or "Did you mean" in message or "Known keys" in message:
        return message  # nothing to add, or a nested parser did
    own = sorted({action.dest for action in parser._actions if action.dest not in ("help", "config", "subcommand")})
    key = found[1]
    for known, cutoff in ((own, 0.5), (class_keys(), 0.6)):
        names = {name.rsplit(".", 1)[-1]: name for name in known} | {name: name for name in known}
        near = difflib.get_close_matches(key, names, n=1, cutoff=cutoff)
        near = near or difflib.get_close_matches(key.rsplit(".", 1)[-1], names, n=1, cutoff=cutoff)
        if near:
            return f"{message}\nDid you mean '{names[near[0]]}'?"
    return f"{message}\nKnown keys: {', '.join(own)}" if len(own) <= _FEW else message


def class_keys() -> list[str]:
    """Constructor arguments of every public class that a config can name."""
    from rlite import callbacks, data, loggers, modules, strategies

    classes = [getattr(package, name) for package in (callbacks, data, modules, strategies) for name in package.__all__]
    classes = [thing for thing in [*classes, loggers.RunLogger] if inspect.isclass(thing)]
    owners = {base for thing in classes for base in thing.__mro__ if base.__module__.startswith("rlite")}
    return sorted(
        {p for owner in owners for p in inspect.signature(owner.__init__).parameters} - {"self", "args", "kwargs"}
    )
