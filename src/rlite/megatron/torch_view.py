"""What Megatron-core sees as `torch` on a machine without an accelerator.

Every module of megatron.core has a global `torch`. `compat_cpu` replaces that global by a *view*: the attributes of
torch, with `cuda` answered by the CPU and factories that map device="cuda" to the CPU. torch itself is not changed, so
vLLM, transformers and Lightning in the same process see the real one.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "as_tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "linspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "eye",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
)


class Event:
    """An event that already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


class Stream:
    """The only stream of a CPU: program order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: "Stream") -> None: ...
    def wait_event(self, _: Event) -> None: ...
    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class CudaView(types.ModuleType):
    """`torch.cuda`, answered by the CPU. Names not listed here (tensor types, nvtx, ...) come from torch.cuda."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        stream = Stream()
        self.current_device = lambda: _CPU
        self.device_count = lambda: 1
        self.is_available = lambda: False
        self.get_device_capability = lambda *_: (0, 0)
        self.current_stream = self.default_stream = lambda *_: stream
        self.stream = lambda *_: contextlib.nullcontext()
        self.set_device = self.synchronize = self.empty_cache = lambda *_: None
        self.memory_allocated = self.max_memory_allocated = lambda *_: 0
        self.get_rng_state = lambda *_, **__: torch.get_rng_state()
        self.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        self.manual_seed = self.manual_seed_all = lambda seed: torch.default_generator.manual_seed(int(seed))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _DeviceMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        return _to_cpu(torch.device(*args, **kwargs))


class Device(metaclass=_DeviceMeta):
    """`torch.device` that turns "cuda" into the CPU."""


class TorchView(types.ModuleType):
    """`torch` for megatron.core on a CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__.update({key: value for key, value in torch.__dict__.items() if not key.startswith("__")})
        self.__file__ = torch.__file__
        self.cuda = CudaView()
        self.device = Device
        for name in _FACTORIES:
            setattr(self, name, _cpu_factory(getattr(torch, name)))
        self.autocast = lambda device, *args, **kwargs: torch.autocast(
            "cpu" if device == "cuda" else device, *args, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _to_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    return _CPU if isinstance(device, torch.device) and device.type == "cuda" else device


def _cpu_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped
