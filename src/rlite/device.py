"""The only place that asks which device this run uses: CPU, CUDA or Ascend NPU.

Everything is a thin forward to torch; on the CPU the memory calls answer from the process' resident set.
"""

import ctypes
import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_libc = ctypes.CDLL(None)
_M_MMAP_THRESHOLD = -3
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class DeviceKind(StrEnum):
    """Where tensors of a run live."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"

    @property
    def backend(self) -> str:
        """Backend string for `torch.distributed.init_process_group`; CPU tensors always travel over gloo."""
        return {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[self.value]

    @property
    def is_accelerator(self) -> bool:
        return self is not DeviceKind.CPU


def detect_device_kind() -> DeviceKind:
    """The best device of this machine: CUDA, then NPU (needs the `torch_npu` package), then CPU."""
    if torch.cuda.is_available():
        return DeviceKind.CUDA
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
        if torch.npu.is_available():
            return DeviceKind.NPU
    return DeviceKind.CPU


def local_device(kind: DeviceKind, local_rank: int = 0) -> torch.device:
    """The device of a local rank, made current on accelerators."""
    if kind is DeviceKind.CPU:
        return torch.device("cpu")
    _runtime(kind).set_device(local_rank)
    return torch.device(kind.value, local_rank)


def current_device(kind: DeviceKind) -> torch.device:
    """The device that new tensors of this process belong on."""
    return torch.device("cpu") if kind is DeviceKind.CPU else torch.device(kind.value, _runtime(kind).current_device())


def _runtime(kind: DeviceKind) -> Any:
    """`torch.cuda` or `torch.npu`."""
    return getattr(torch, kind.value)


def allocated_bytes(kind: DeviceKind) -> int:
    """Bytes held by live tensors; on the CPU the resident set of this process."""
    return resident_bytes() if kind is DeviceKind.CPU else int(_runtime(kind).memory_allocated())


def peak_bytes(kind: DeviceKind) -> int:
    """Most bytes held since `reset_peak`; on the CPU the largest resident set."""
    return peak_resident_bytes() if kind is DeviceKind.CPU else int(_runtime(kind).max_memory_allocated())


def free_bytes(kind: DeviceKind) -> int:
    """Bytes that a new allocation could use right now, on the whole device (or host)."""
    if kind is DeviceKind.CPU:
        import psutil

        return int(psutil.virtual_memory().available)
    return int(_runtime(kind).mem_get_info()[0])


def reset_peak(kind: DeviceKind) -> None:
    """Both `peak_bytes` and `peak_resident_bytes` count from now on."""
    if kind.is_accelerator:
        _runtime(kind).reset_peak_memory_stats()
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")  # see proc(5)


def empty_cache(kind: DeviceKind) -> None:
    """Hand memory that the allocator caches back to the device, so that another allocator can take it."""
    if kind.is_accelerator:
        _runtime(kind).empty_cache()


def synchronize(kind: DeviceKind) -> None:
    if kind.is_accelerator:
        _runtime(kind).synchronize()


def host_buffer(num_bytes: int, kind: DeviceKind) -> Tensor:
    """uint8 `[num_bytes]` on the host, page-locked where the device can copy from page-locked memory asynchronously."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=kind.is_accelerator)


def device_name(kind: DeviceKind) -> str:
    """What the device calls itself, for example `NVIDIA H100 80GB HBM3`."""
    return str(_runtime(kind).get_device_name()) if kind.is_accelerator else "cpu"


def resident_bytes() -> int:
    """Host memory that this process holds: its resident set."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The largest resident set since `reset_peak`, where the system keeps one (Linux); else the current one."""
    if not _STATUS.exists():
        return resident_bytes()
    peak = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


def keep_large_blocks_apart() -> None:
    """From now on glibc takes blocks of 1 MiB and more from the system and gives them back when they are freed.

    By default its limit rises to the largest block that was ever freed; smaller ones then fragment the heap, and a process
    that frees and allocates gigabytes in every rollout grows for a while.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, 2**20)


def return_free_memory() -> None:
    """Gives freed host memory back to the system: glibc keeps blocks of up to 32 MiB for itself otherwise."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
