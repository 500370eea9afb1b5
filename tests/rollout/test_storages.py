"""Storages that sleep: all of them or none, also when memory runs out."""

import pytest
import torch

from rlite.rollout.storages import StorageSleeper, storage_bytes


class Full(torch.UntypedStorage):
    """There is no memory for it any more."""

    def resize_(self, size: int) -> None:
        if size:
            raise MemoryError("no room")


def test_storages_sleep_and_wake_with_their_sizes() -> None:
    first, second, sleeper = torch.ones(4), torch.ones(6), StorageSleeper()
    sleeper.free([first, first[1:], second])
    assert storage_bytes([first, second]) == 0
    sleeper.free([first, second])
    sleeper.restore()
    assert (first.untyped_storage().nbytes(), second.untyped_storage().nbytes()) == (16, 24)


def test_a_waking_that_fails_half_way_holds_nothing_and_can_be_tried_again() -> None:
    first, second, sleeper = torch.ones(4), torch.ones(6), StorageSleeper()
    sleeper.free([first, second])
    asleep = list(sleeper._asleep)
    sleeper._asleep.insert(1, (Full(), 8))
    with pytest.raises(MemoryError):
        sleeper.restore()
    assert storage_bytes([first, second]) == 0
    sleeper._asleep = asleep
    sleeper.restore()
    assert storage_bytes([first, second]) == 40
