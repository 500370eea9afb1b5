"""Flat buffers leave and come back; every view of them survives."""

import pytest
import torch

from rlite import device
from rlite.memory import FlatBuffers


def test_views_see_the_content_again_after_offload_and_onload() -> None:
    flat = torch.arange(12.0)
    view = flat[4:8].view(2, 2)
    buffers = FlatBuffers("weights", [flat, view])
    assert buffers.device_bytes() == 48
    assert buffers.offload() == 48
    assert flat.untyped_storage().nbytes() == 0
    assert (buffers.on_device, buffers.device_bytes(), buffers.host_bytes()) == (False, 0, 48)
    assert buffers.onload() == 48
    assert torch.equal(view, torch.tensor([[4.0, 5.0], [6.0, 7.0]]))


def test_moving_twice_moves_nothing_the_second_time() -> None:
    buffers = FlatBuffers("weights", [torch.ones(4)])
    assert (buffers.onload(), buffers.offload(), buffers.offload(), buffers.onload()) == (0, 16, 0, 16)


def test_the_host_arena_is_allocated_once() -> None:
    buffers = FlatBuffers("weights", [torch.ones(4)])
    buffers.offload()
    blocks = [block.data_ptr() for block in buffers._arena.blocks]
    buffers.onload()
    buffers.offload()
    assert [block.data_ptr() for block in buffers._arena.blocks] == blocks


def test_gradients_are_never_copied_and_return_as_zeros() -> None:
    gradients = torch.full((8,), 3.0)
    buffers = FlatBuffers("gradients", [gradients], contents="scratch")
    assert (buffers.offload(), buffers.host_bytes()) == (0, 0)
    assert buffers.onload() == 0
    assert torch.equal(gradients, torch.zeros(8))


def test_a_frozen_copy_takes_the_place_of_the_weights_and_gives_it_back() -> None:
    weights = torch.tensor([1.0, 2.0])
    policy = FlatBuffers("policy", [weights])
    reference = policy.frozen_copy("reference")
    weights.copy_(torch.tensor([5.0, 6.0]))
    policy.offload()
    assert reference.onload() == 8
    assert weights.tolist() == [1.0, 2.0]
    assert reference.offload() == 0, "a constant needs no copy back"
    policy.onload()
    assert weights.tolist() == [5.0, 6.0]


def test_weights_that_are_off_the_device_cannot_become_a_reference() -> None:
    policy = FlatBuffers("policy", [torch.ones(2)])
    policy.offload()
    with pytest.raises(RuntimeError, match="off the device"):
        policy.frozen_copy("reference")


def test_an_onload_that_fails_leaves_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(4), torch.ones(4)
    buffers = FlatBuffers("weights", [first, second])
    buffers.offload()

    def no_memory() -> int:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(buffers, "_fill", no_memory)
        with pytest.raises(MemoryError):
            buffers.onload()
    assert (buffers.on_device, buffers.device_bytes()) == (False, 0)
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    buffers.onload()
    assert torch.equal(second, torch.ones(4)), "the copy on the host survived"


def test_freed_buffers_leave_the_resident_set() -> None:
    """Blocks of less than 32 MiB that glibc would keep."""
    tensors = [torch.ones(2**20) for _ in range(24)]  # 4 MiB each
    buffers = FlatBuffers("gradients", tensors, contents="scratch")
    before = device.resident_bytes()
    buffers.offload()
    assert before - device.resident_bytes() > 0.9 * buffers.full_bytes()
