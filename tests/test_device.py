"""What the CPU answers to questions about devices."""

import subprocess
import sys

import torch

from rlite import device
from rlite.device import DeviceKind


def test_backends_carry_cpu_tensors_over_gloo() -> None:
    assert [kind.backend for kind in DeviceKind] == ["gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,npu:hccl"]


def test_the_cpu_has_memory_and_a_name() -> None:
    kind = DeviceKind.CPU
    assert device.local_device(kind, 3) == device.current_device(kind) == torch.device("cpu")
    assert device.allocated_bytes(kind) > 1 << 20
    assert device.free_bytes(kind) > 0
    assert device.device_name(kind) == "cpu"
    buffer = device.host_buffer(16, kind)
    device.reset_peak(kind)
    device.empty_cache(kind)
    device.synchronize(kind)
    assert buffer.shape == (16,) and buffer.dtype == torch.uint8 and not buffer.is_pinned()


_FRESH = """
import torch
from rlite import device

device.reset_peak(device.DeviceKind.CPU)
before = device.peak_resident_bytes()
large = torch.ones(2**24)  # 64 MiB
high = device.peak_resident_bytes()
assert high > before + large.nbytes // 2, (before, high)
del large
device.reset_peak(device.DeviceKind.CPU)
assert device.peak_resident_bytes() < high - 2**25, (high, device.peak_resident_bytes())

device.keep_large_blocks_apart()
for _ in range(3):  # where glibc's limit rises, the second block of 24 MiB would stay in the heap
    before = device.resident_bytes()
    block = torch.ones(6 * 2**20)
    assert device.resident_bytes() > before + 20 * 2**20, (before, device.resident_bytes())
    del block
    assert device.resident_bytes() < before + 4 * 2**20, (before, device.resident_bytes())
"""


def test_the_peak_starts_anew_and_large_blocks_leave_as_soon_as_they_are_freed() -> None:
    """In a fresh process: the heap of this one has holes of any size."""
    done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
