"""Freeing tensors in place: their storages are resized to nothing and back, so every reference to them stays valid."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rlite.device import return_free_memory


def _distinct(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return list({storage._cdata: storage for storage in storages}.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum(storage.nbytes() for storage in _distinct(tensors))


class StorageSleeper:
    """Frees the storages of tensors and allocates them again, content undefined."""

    def __init__(self) -> None:
        self._asleep: list[tuple[torch.UntypedStorage, int]] = []

    def free(self, tensors: Iterable[Tensor]) -> None:
        """What is free already keeps the size that it will have again."""
        self._asleep += [(storage, storage.nbytes()) for storage in _distinct(tensors) if storage.nbytes()]
        self._free()

    def restore(self) -> None:
        """All storages or, when there is no memory for one of them, none: then it can be tried again."""
        try:
            for storage, size_bytes in self._asleep:
                storage.resize_(size_bytes)
        except BaseException:
            self._free()
            raise
        self._asleep = []

    def _free(self) -> None:
        for storage, _ in self._asleep:
            storage.resize_(0)
        return_free_memory()
