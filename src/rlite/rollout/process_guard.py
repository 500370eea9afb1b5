"""Keeps what an in-process engine does to the process apart from the trainer's view of it.

vLLM re-seeds the global random generators, sets `LOCAL_WORLD_SIZE` and other environment variables, replaces
`torch.set_num_threads` and `torch.accelerator` functions by no-ops, and freezes the garbage collector's heap.
"""

import contextlib
import gc
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_REPLACED_FUNCTIONS = (
    (torch, "set_num_threads"),
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
)


class ProcessGuard:
    """`with guard:` surrounds every call into the engine. Inside, the engine's environment variables and function
    replacements are in force; outside, the trainer's. Random states and thread count are the trainer's on leaving.
    Deprecation warnings that the engine causes are not shown: the user cannot act on them."""

    def __init__(self, engine_env: Mapping[str, str]) -> None:
        self._engine_env: dict[str, str | None] = dict(engine_env)
        self._engine_functions: dict[tuple[Any, str], Any] = {}

    def __enter__(self) -> None:
        self._env = dict(os.environ)
        self._functions = {(owner, name): getattr(owner, name) for owner, name in _REPLACED_FUNCTIONS}
        self._num_threads = torch.get_num_threads()
        self._rng = (torch.get_rng_state(), random.getstate(), np.random.get_state(), _device_rng_states())
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        for category in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        _set_env(self._engine_env)
        for (owner, name), function in self._engine_functions.items():
            setattr(owner, name, function)

    def __exit__(self, *exc_info: object) -> None:
        self._warnings.__exit__(*exc_info)
        self._engine_functions = {key: getattr(*key) for key in self._functions}
        for (owner, name), function in self._functions.items():
            setattr(owner, name, function)
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        names = set(os.environ) | set(self._env)
        self._engine_env |= {k: os.environ.get(k) for k in names if os.environ.get(k) != self._env.get(k)}
        _set_env({name: self._env.get(name) for name in names})
        torch_state, random_state, numpy_state, device_states = self._rng
        torch.set_rng_state(torch_state)
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        if device_states is not None:
            torch.get_device_module().set_rng_state_all(device_states)


def _device_rng_states() -> list[torch.Tensor] | None:
    return torch.get_device_module().get_rng_state_all() if torch.accelerator.is_available() else None


def _set_env(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


@contextlib.contextmanager
def unfrozen_heap() -> Iterator[None]:
    """Undoes a `gc.freeze()` inside, which would keep the trainer's garbage alive, unless the heap was frozen before."""
    was_frozen = gc.get_freeze_count() > 0
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


@contextlib.contextmanager
def console_to_file(path: Path) -> Iterator[None]:
    """Appends everything that is written to stdout and stderr meanwhile, from C++ too, to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1) as log, contextlib.ExitStack() as stack:
        for stream_fd in (1, 2):
            saved_fd = os.dup(stream_fd)
            stack.callback(os.close, saved_fd)
            stack.callback(os.dup2, saved_fd, stream_fd)
            os.dup2(log.fileno(), stream_fd)
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            yield
