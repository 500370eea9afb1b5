"""Residents: the things that hold device memory, each of which can leave the device and come back.

A resident owns whole storages. Leaving frees them with `storage.resize_(0)`, so every view that Megatron keeps
(`param.data`, `main_grad`, bucket and optimizer shards) stays valid and sees the content again after `onload`.
"""

from collections.abc import Callable, Iterable
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlite import device
from rlite.memory.copies import Arrival, BackgroundCopy, Copier, CopyPair, HostArena

Contents = Literal["mutable", "constant", "scratch", "derived"]
"""mutable: copied to the host when it leaves and back when it returns. constant: never changes on the device, so it is
only copied in. scratch: worthless when it leaves (gradients), comes back as zeros. derived: made anew from other residents."""


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


@runtime_checkable
class BackgroundResident(Resident, Protocol):
    """A resident whose content may still be on its way while the device computes with others."""

    def start_onload(self) -> None:
        """Takes its memory on the device and begins to fill it; does nothing when it is there."""
        ...

    def finish_onload(self) -> Arrival | None:
        """Waits until it is filled, before anybody uses it; None when nothing was on its way.

        Raises what the copy raised; the resident is off the device then.
        """
        ...


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
        self._copier = Copier(next((view.device for view in self._views if not view.is_cpu), torch.device("cpu")))
        self._arena: HostArena | None = None
        self._arriving: BackgroundCopy | None = None
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

    def content_of(self, tensor: Tensor) -> Tensor:
        """`tensor`, a contiguous view into these buffers; while they are off the device, its copy on the host."""
        assert self._arriving is None, f"{self.name} is still on its way to the device"
        if self._on_device:
            return tensor.detach()
        assert self._arena is not None
        storages = [view.untyped_storage()._cdata for view in self._views]
        block = self._arena.blocks[storages.index(tensor.untyped_storage()._cdata)]
        begin = tensor.storage_offset() * tensor.element_size()
        return block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

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
        self.finish_onload()
        if not self._on_device:
            return 0
        moved = self._copy_to_host() if self.contents == "mutable" else 0
        self._free()
        return moved

    def onload(self) -> int:
        self.finish_onload()
        if self._on_device:
            return 0
        try:
            self._allocate()
            moved = self._fill()
        except BaseException:
            self._free()  # or half of it would stay, in no book
            raise
        self._on_device = True
        return moved

    def start_onload(self) -> None:
        if self._on_device or self._arena is None:
            self.onload()  # nothing to copy
            return
        try:
            self._allocate()
            self._arriving = self._copier.start(self._pairs_from_host())
        except BaseException:
            self._free()
            raise
        self._on_device = True

    def finish_onload(self) -> Arrival | None:
        if self._arriving is None:
            return None
        try:
            arrival = self._arriving.wait()
        except Exception:  # not an interrupt: then the copy goes on, into memory that must stay
            self._arriving = None
            self._free()
            raise
        self._arriving = None
        return arrival

    def _allocate(self) -> None:
        for view, size in zip(self._views, self._sizes_bytes, strict=True):
            view.untyped_storage().resize_(size)

    def _fill(self) -> int:
        """The content of storages that are there again; returns the bytes copied from the host."""
        if self.contents == "scratch":
            for view in self._views:
                view.zero_()
            return 0
        return self._copier.run(self._pairs_from_host())

    def _free(self) -> None:
        for view in self._views:
            view.untyped_storage().resize_(0)
        self._on_device = False
        if any(view.is_cpu for view in self._views):
            device.return_free_memory()

    def _pairs_from_host(self) -> list[CopyPair]:
        assert self._arena is not None
        return list(zip(self._views, self._arena.blocks, strict=True))

    def _copy_to_host(self) -> int:
        if self._arena is None:
            self._arena = HostArena(self._sizes_bytes, pinned=any(not v.is_cpu for v in self._views))
        return self._copier.run([(block, view) for view, block in self._pairs_from_host()])


class DerivedBuffers(FlatBuffers):
    """Flat buffers that are never copied: what other residents hold is enough to make them anew.

    Args:
        name, tensors: see `FlatBuffers`.
        rebuild: fills the storages, which are there again with content undefined; returns the bytes copied from the host.
    """

    def __init__(self, name: str, tensors: Iterable[Tensor], *, rebuild: Callable[[], int]) -> None:
        super().__init__(name, tensors, contents="derived")
        self._rebuild = rebuild

    def _fill(self) -> int:
        return self._rebuild()


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
