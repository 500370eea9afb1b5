"""Which prompts make up which rollout step, on which data-parallel rank."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

ENDLESS = 2**31
"""`len()` of the endless sampler: of a loader without a length Lightning prefetches a batch, and loses it on resume."""


class PromptSampler(Sampler[list[int]]):
    """Batch sampler: endless, sharded over data-parallel ranks, reshuffled on each pass over the data, resumable.

    A rollout step takes the next `batch_size` prompts of one global order; rank r of `num_replicas` gets every
    `num_replicas`-th of them from the r-th on. The state is a position in the global order and so the same on every
    rank: a checkpoint of one rank restores all of them, also under another number of ranks. A batch may straddle two
    passes but never holds a prompt twice.

    Args:
        num_prompts: size of the data set.
        batch_size: prompts of one rollout step, all ranks together.
        num_replicas, rank: size of the data-parallel axis and place on it (`strategy.distributed_sampler_kwargs`).
        seed: with the number of the pass it determines the order.
        shuffle: false keeps the order of the data set.

    Raises:
        ValueError: no prompts, a batch larger than the data set, or a batch that does not split evenly.
    """

    _IDENTITY = ("num_prompts", "batch_size", "seed", "shuffle")
    """What the order depends on; a checkpoint only continues a run that has the same."""

    def __init__(
        self,
        num_prompts: int,
        *,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        check_batch_size(num_prompts, batch_size=batch_size, num_replicas=num_replicas)
        self.num_prompts, self.batch_size = num_prompts, batch_size
        self.num_replicas, self.rank = num_replicas, rank
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0
        self.position = 0
        self._order = self._shuffled(0)

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> list[int]:
        """This rank's part of the next `batch_size` prompts. Every rank has to take it."""
        return self._next_global_batch()[self.rank :: self.num_replicas]

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank. `epoch` counts passes, `position` the prompts already taken from this pass."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            **{key: getattr(self, key) for key in self._IDENTITY},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in self._IDENTITY:
            if state[key] != getattr(self, key):
                raise ValueError(
                    f"data: the checkpoint was made with {key} = {state[key]}, this run has {getattr(self, key)}: the "
                    "order of the prompts would not continue. Resume with the same data settings, or start a new run."
                )
        self._order = self._shuffled(0)
        for epoch in range(1, state["epoch"] + 1):
            self._order = self._order_after(self._order, epoch)
        self.epoch, self.position = state["epoch"], state["position"]

    def _next_global_batch(self) -> list[int]:
        batch = self._order[self.position : self.position + self.batch_size]
        self.position += len(batch)
        missing = self.batch_size - len(batch)
        if missing:
            self.epoch += 1
            self._order = self._order_after(self._order, self.epoch)
            batch = batch + self._order[:missing]
            self.position = missing
        return batch

    def _shuffled(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_prompts))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.num_prompts, generator=generator).tolist()

    def _order_after(self, previous: list[int], epoch: int) -> list[int]:
        """Order of pass `epoch`, given the order of the pass before.

        Prompts that the straddling batch already took from `previous` move behind its end: twice in one batch they
        would get the same sampling seeds and so the same completions.
        """
        order = self._shuffled(epoch)
        carried = (epoch * self.num_prompts) % self.batch_size
        if not carried:
            return order
        tail = set(previous[-carried:])
        fresh = [index for index in order if index not in tail]
        head = fresh[: self.batch_size - carried]
        taken = set(head)
        return head + [index for index in order if index not in taken]


class EvalSampler(Sampler[list[int]]):
    """Batch sampler for validation, test and prediction: every prompt once, in order.

    All ranks yield the same number of batches, as the collectives inside a step need; when the last batch has fewer
    prompts than ranks, some ranks get an empty list. Nothing is padded or repeated, so sums over ranks are exact.
    """

    def __init__(self, num_prompts: int, *, batch_size: int, num_replicas: int = 1, rank: int = 0) -> None:
        self.num_prompts, self.batch_size = num_prompts, batch_size
        self.num_replicas, self.rank = num_replicas, rank

    def __len__(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices: Sequence[int] = range(self.num_prompts)
        for start in range(0, self.num_prompts, self.batch_size):
            yield list(indices[start : start + self.batch_size][self.rank :: self.num_replicas])


def check_batch_size(num_prompts: int, *, batch_size: int, num_replicas: int) -> None:
    """Raises ValueError when a rollout step cannot be formed; zero steps is an error, never a silent success."""
    if batch_size < 1:
        raise ValueError(f"data.batch_size = {batch_size}: must be at least 1")
    if batch_size > num_prompts:
        raise ValueError(
            f"data.batch_size = {batch_size} is larger than the data set ({num_prompts} prompts): not one step "
            f"could run. Set data.batch_size <= {num_prompts} or bring more prompts."
        )
    if batch_size % num_replicas:
        below = batch_size - batch_size % num_replicas
        near = f"{below} or {below + num_replicas}" if below else f"{num_replicas}"
        raise ValueError(
            f"data.batch_size = {batch_size} does not split evenly over dp = {num_replicas} ranks: set it to {near}."
        )
