"""Residents: the things that hold device memory, each of which can leave the device and come back.

A resident owns whole storages. Leaving frees them with `storage.resize_(0)`, so every view that Megatron keeps
(`param.data`, `main_grad`, bucket and optimizer shards) stays valid and sees the content again after `onload`.
"""

from collections.abc import Callable, Iterable
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlite import device

Contents = Literal["mutable", "constant", "scratch"]
"""mutable: copied to the host when it leaves and back when it returns. constant: never changes on the device, so it is
only copied in. scratch: worthless when it leaves (gradients), comes back as zeros."""


@runtime_checkable
class Resident(Protocol):
    """Something that occupies the device in some phases."""

    name: str

    @property
    def on_device(self) -> bool: ...

    def onload(self) -> int:
        """Brings it to the device; does nothing when it is there. Returns the bytes copied from the host."""
        ...

    def offload(self) -> int:
        """Takes it off the device; does nothing when it is off. Returns the bytes copied to the host."""
        ...

    def device_bytes(self) -> int: ...

    def full_bytes(self) -> int:
        """What it holds when it is on the device, as far as is known."""
        ...

    def host_bytes(self) -> int: ...


class HostArena:
    """Host copies of some storages, allocated once and reused in every cycle; pinned when the device has pinned memory."""

    def __init__(self, sizes_bytes: Iterable[int], *, pinned: bool) -> None:
        self.blocks = [torch.empty(n, dtype=torch.uint8, pin_memory=pinned) for n in sizes_bytes]

    def nbytes(self) -> int:
        return sum(block.numel() for block in self.blocks)


class FlatBuffers:
    """A resident made of flat tensors, each of which is a whole storage.

    Two residents may share the same tensors when they are never on the device together: that is how reference weights
    take the place of the policy's for one pass.

    Args:
        name: as shown in the ledger.
        tensors: the flat tensors, on the device. Views of one storage count once.
        contents: what must survive, see `Contents`.
    """

    def __init__(self, name: str, tensors: Iterable[Tensor], *, contents: Contents = "mutable") -> None:
        self.name = name
        self.contents: Contents = contents
        self._views = _whole_storages(tensors)
        self._sizes_bytes = [view.numel() for view in self._views]
        self._stream = _side_stream(self._views)
        self._arena: HostArena | None = None
        self._on_device = True

    def frozen_copy(self, name: str) -> "FlatBuffers":
        """A resident with what these storages hold now, on the host; its `onload` puts that back into them.

        Raises:
            RuntimeError: this resident is off the device.
        """
        if not self._on_device:
            raise RuntimeError(f"{name}: cannot be copied from {self.name}, which is off the device")
        copy = FlatBuffers(name, self._views, contents="constant")
        copy._copy_to_host()
        copy._on_device = False
        return copy

    @property
    def on_device(self) -> bool:
        return self._on_device

    def device_bytes(self) -> int:
        return self.full_bytes() if self._on_device else 0

    def full_bytes(self) -> int:
        return sum(self._sizes_bytes)

    def host_bytes(self) -> int:
        return self._arena.nbytes() if self._arena is not None else 0

    def offload(self) -> int:
        if not self._on_device:
            return 0
        moved = self._copy_to_host() if self.contents == "mutable" else 0
        self._free()
        self._on_device = False
        return moved

    def onload(self) -> int:
        if self._on_device:
            return 0
        try:
            moved = self._fill()
        except Exception:
            self._free()  # or half of it would stay, in no book
            raise
        self._on_device = True
        return moved

    def _fill(self) -> int:
        for view, size in zip(self._views, self._sizes_bytes, strict=True):
            view.untyped_storage().resize_(size)
        if self.contents == "scratch":
            for view in self._views:
                view.zero_()
            return 0
        assert self._arena is not None
        return self._move([(v, b) for v, b in zip(self._views, self._arena.blocks, strict=True)])

    def _free(self) -> None:
        for view in self._views:
            view.untyped_storage().resize_(0)
        if any(view.is_cpu for view in self._views):
            device.return_free_memory()

    def _copy_to_host(self) -> int:
        if self._arena is None:
            self._arena = HostArena(self._sizes_bytes, pinned=any(not v.is_cpu for v in self._views))
        return self._move([(b, v) for v, b in zip(self._views, self._arena.blocks, strict=True)])

    def _move(self, copies: list[tuple[Tensor, Tensor]]) -> int:
        """Copies source into destination, on a side stream where the device has streams, and waits for the end."""
        stream = self._stream
        if stream is None:
            for destination, source in copies:
                destination.copy_(source)
        else:
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                for destination, source in copies:
                    destination.copy_(source, non_blocking=True)
            stream.synchronize()
        return sum(source.numel() for _, source in copies)


class CallableResident:
    """A resident whose memory somebody else manages (the engine's weights and KV cache)."""

    def __init__(
        self,
        name: str,
        *,
        onload: Callable[[], None],
        offload: Callable[[], None],
        device_bytes: Callable[[], int],
        on_device: Callable[[], bool],
    ) -> None:
        self.name = name
        self._onload, self._offload = onload, offload
        self._device_bytes, self._is_on_device = device_bytes, on_device
        self._full_bytes = 0

    @property
    def on_device(self) -> bool:
        return self._is_on_device()

    def onload(self) -> int:
        if not self.on_device:
            self._onload()
        return 0

    def offload(self) -> int:
        if self.on_device:
            self._offload()
        return 0

    def device_bytes(self) -> int:
        held = self._device_bytes() if self.on_device else 0
        self._full_bytes = held or self._full_bytes
        return held

    def full_bytes(self) -> int:
        """What it held when it was last seen on the device."""
        return self.device_bytes() or self._full_bytes

    def host_bytes(self) -> int:
        return 0


def _whole_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One uint8 view of each distinct non-empty storage, in order of appearance."""
    views, seen = [], set()
    for tensor in tensors:
        storage = tensor.detach().untyped_storage()
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            views.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    return views


def _side_stream(views: list[Tensor]) -> "torch.Stream | None":
    devices = {view.device for view in views if not view.is_cpu}
    return torch.Stream(device=devices.pop()) if devices else None
