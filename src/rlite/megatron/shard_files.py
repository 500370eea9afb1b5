"""A sharded checkpoint in three steps: planned by all ranks together, written by each in any thread, finished by rank 0.

Megatron-core's own asynchronous save forks a process that writes; a fork of a process that holds a device context and
vLLM's threads is not safe. Here a thread writes what was copied, and synchronous saves take the same way.
"""

import inspect
import io
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from typing_extensions import override

from rlite.files import write_durably

# Not the decorated function: its decorator switches garbage collection off for the whole process while it writes.
_write_bucket = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)


class ShardFiles:
    """This rank's files of one sharded checkpoint. The constructor is collective.

    Args:
        path: an empty directory that every rank sees.
        state: Megatron's sharded state dict.
        data_parallel_group: ranks that share the writing of what they all hold.
    """

    def __init__(self, path: Path, state: dict[str, Any], data_parallel_group: Any) -> None:
        self.path = path
        strategy = _PlanOnly("torch_dist", 1, thread_count=1)
        wrapper = FullyParallelSaveStrategyWrapper(strategy, data_parallel_group)
        with _kept_common() as common:
            dist_checkpointing.save(state, str(path), wrapper, async_sharded_save=True)
        self._common = common.getvalue()
        self._writer, self._metadata = strategy.planned
        self._buckets = self._writer.write_buckets or []

    def copy_to_host(self) -> None:
        """Copies what is to be written, so that the tensors may change, move, or be freed before it is."""
        for *_, (_, tensors) in self._buckets:
            tensors[:] = [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors]

    def write(self) -> list[Any]:
        """Writes the files of this rank and waits until they are on the disk; returns what `finish` needs of it.

        Raises:
            RuntimeError, OSError: a write failed.
        """
        if dist.get_rank() == 0:
            write_durably(self.path / COMMON_STATE_FNAME, self._common)
        transforms, written = [self._writer.transforms], []
        for file, key, (objects, tensors) in self._buckets:
            on_host = [(item, tensor.to("cpu")) for item, tensor in tensors]
            results, count = queue.Queue(), queue.Queue()
            count.put(0)
            _write_bucket(transforms, 0, (file, key, (objects, on_host)), results, count, True)
            _, outcome = results.get_nowait()
            if isinstance(outcome, Exception):
                raise outcome
            written += outcome
        self._buckets.clear()
        self._writer.write_buckets = None
        return written

    def finish(self, written_by_rank: list[list[Any]]) -> None:
        """On rank 0, with what `write` returned on every rank: writes the index of all files."""
        self._writer.finish(self._metadata, written_by_rank)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.path))


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Stops where Megatron's strategy would hand over the writing."""

    planned: tuple[FileSystemWriterAsync, Any]
    """The writer, and on rank 0 the metadata of all ranks' shards."""

    @override
    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        self.planned = (writer, save_state_dict_ret[1])
        return AsyncRequest(None, (), [])


@contextmanager
def _kept_common() -> Iterator[io.BytesIO]:
    """Megatron-core writes the small state that all ranks share on rank 0, in the middle of collectives: an error there would
    leave the other ranks waiting. In this context it goes into a buffer."""
    buffer = io.BytesIO()

    class Keep(TorchCommonSaveStrategy):
        @override
        def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
            torch.save(common_state_dict, buffer)

    original = serialization.get_default_save_common_strategy
    serialization.get_default_save_common_strategy = lambda *_, **__: Keep("torch", 1)
    try:
        yield buffer
    finally:
        serialization.get_default_save_common_strategy = original
