"""One table of every private name of Megatron-core that rlite replaces, and the only way to replace one."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

_PREFIX = "megatron.core"

PATCHED: dict[str, str] = {}
"""`"module:name"` -> why. Filled as patches are applied; a test asserts that every name exists in a fresh import."""


def replace(target: str, make: Callable[[Any], Any], *, why: str) -> None:
    """Replace `target` ("module:name" or "module:Class.name", module relative to megatron.core) by `make(old)`.

    Modules of megatron.core that imported the old object by name get the new one too.

    Raises:
        RuntimeError: the name does not exist: another Megatron-core release.
    """
    module_name, _, path = target.partition(":")
    module = importlib.import_module(f"{_PREFIX}.{module_name}")
    owner_path, _, name = path.rpartition(".")
    owner = getattr(module, owner_path, None) if owner_path else module
    if owner is None or not hasattr(owner, name):
        raise RuntimeError(f"{_PREFIX}.{module_name} has no {path}: this Megatron-core release is not supported")
    old = getattr(owner, name)
    new = make(old)
    setattr(owner, name, new)
    PATCHED[target] = f"{PATCHED[target]}; {why}" if target in PATCHED else why
    if owner is module and old is not None and not isinstance(old, bool):
        for other in core_modules():
            if other.__dict__.get(name) is old:
                setattr(other, name, new)


def core_modules() -> list[Any]:
    """Modules of megatron.core imported so far."""
    return [module for name, module in list(sys.modules.items()) if name.startswith(_PREFIX) and module is not None]
