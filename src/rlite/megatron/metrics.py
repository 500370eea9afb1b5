"""Metric sums of one update: added over micro-batches and data-parallel ranks, then known to every pipeline stage."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

MAX_PREFIX = "max:"
"""Keys with this prefix are reduced with the maximum instead of the sum."""


class MetricSums:
    """Collects the metrics of each micro-batch on the device and moves them to the host once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keys: list[str] | None = None
        self._values: list[Tensor] = []

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Metrics of one micro-batch. Raises ValueError when keys differ from those of the previous one."""
        self._set_keys(metrics)
        if metrics:
            self._values.append(torch.stack([self._scalar(metrics[key]) for key in sorted(metrics)]))

    def add_keys(self, metrics: Mapping[str, Tensor]) -> None:
        """Keys only: this rank has no rows."""
        self._set_keys(metrics)

    def reduce(self) -> dict[str, float]:
        """The result, equal on every rank. Collective."""
        values = None
        if self._keys is not None:
            values = dict(zip(self._keys, self._reduce_data_parallel(self._keys), strict=True))
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return values or {}
        message = [values]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(message, src=source, group=parallel_state.get_pipeline_model_parallel_group())
        return message[0] or {}

    def _scalar(self, value: Tensor) -> Tensor:
        return value.detach().to(device=self._device, dtype=torch.float32).reshape(())

    def _set_keys(self, metrics: Mapping[str, Tensor]) -> None:
        keys = sorted(metrics)
        if self._keys is not None and keys != self._keys:
            raise ValueError(f"metric_sums has keys {keys}, but an earlier micro-batch had {self._keys}")
        self._keys = keys

    def _reduce_data_parallel(self, keys: list[str]) -> list[float]:
        is_max = torch.tensor([key.startswith(MAX_PREFIX) for key in keys], dtype=torch.bool)
        neutral = torch.where(is_max, -torch.inf, 0.0).double()
        stacked = torch.stack([neutral, *(values.cpu().double() for values in self._values)])
        group = parallel_state.get_data_parallel_group()
        sums, peaks = stacked[:, ~is_max].sum(0), stacked[:, is_max].amax(0)
        if sums.numel():
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        if peaks.numel():
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        result = neutral.clone()
        result[~is_max], result[is_max] = sums, peaks
        return result.tolist()
