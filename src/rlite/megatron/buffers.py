"""The flat storages behind a trained model, for whoever moves memory between phases.

Every view (parameter, gradient, optimizer shard) stays valid when `untyped_storage().resize_(0)` frees a storage and
`resize_(n)` plus a copy brings it back.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlite.megatron.optimizer import McoreOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CAST_ELEMENTS = 2**24
"""fp32 elements on the device at a time while weights are made of main weights."""


def flat_parameters(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    """One tensor for each storage that holds weights of wrapped chunks, in compute dtype."""
    buffers = [buffer.param_data for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return _whole_storages([*buffers, *(parameter.data for chunk in chunks for parameter in chunk.parameters())])


def flat_gradients(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    """One tensor for each gradient buffer. Contents matter only between backward and optimizer step."""
    return [buffer.grad_data for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def flat_optimizer_state(optimizer: McoreOptimizer) -> list[Tensor]:
    """Moments, and fp32 main weights when the weights are bf16: one tensor of each kind for each sub-optimizer.

    Moves the state into these tensors where it is not there yet, so call it again after a checkpoint was loaded. For
    fp32 weights the main weights are views of `flat_parameters`.
    """
    create_state(optimizer)
    flats: list[Tensor] = []
    for part in optimizer.parts:
        inner = part.optimizer
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        flats += _flatten_main_weights(part, parameters)
        for key in _MOMENTS:
            moments = [inner.state[parameter][key] for parameter in parameters]
            flat, views = _flatten(moments)
            for parameter, view in zip(parameters, views, strict=True):
                inner.state[parameter][key] = view
            flats += flat
    return flats


class WeightRebuilder:
    """Makes the weights in compute dtype from the fp32 main weights, as an optimizer step ends: cast, then all-gather.

    The same bits as before, since weights are the cast of the main weights from the first step to the last.

    Args:
        chunks: wrapped chunks.
        optimizer: over these chunks, after `flat_optimizer_state`.
        content_of: gives the content of a main weight wherever it is, on the device or on the host.

    Raises:
        ValueError: weights without main weights apart from them.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: McoreOptimizer,
        *,
        content_of: Callable[[Tensor], Tensor],
    ) -> None:
        for chunk in chunks:
            _check_rebuildable(chunk)
        self.chunks, self.content_of = chunks, content_of
        self.shards = [shard for part in optimizer.parts for shard in _main_weight_shards(part)]

    @torch.no_grad()
    def run(self) -> int:
        """Fills the flat parameter buffers, padding aside; returns the bytes that were copied from another device.

        Collective over the ranks that share optimizer state.
        """
        copied = 0
        for main, weights in self.shards:
            source = self.content_of(main)
            for piece, cast in zip(source.split(_CAST_ELEMENTS), weights.split(_CAST_ELEMENTS), strict=True):
                cast.copy_(piece.to(cast.device))  # first over: `copy_` would cast on the host
            copied += source.nbytes if source.data_ptr() != main.data_ptr() else 0
        for chunk in self.chunks:
            chunk.start_param_sync()
        return copied


def _check_rebuildable(chunk: torch.nn.Module) -> None:
    """Megatron keeps main weights of parameters in half precision that are trained, and only of these."""
    trained = {id(p) for buffer in chunk.buffers + chunk.expert_parallel_buffers for p in buffer.params}
    for name, parameter in chunk.named_parameters():
        if id(parameter) not in trained or parameter.dtype not in (torch.bfloat16, torch.float16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"MemoryOffload.rebuild_weights = true: {name} ({dtype}) has no fp32 main weights apart from itself; set "
                "trainer.precision to bf16-mixed, or rebuild_weights to false"
            )


def _main_weight_shards(part: MegatronOptimizer) -> list[tuple[Tensor, Tensor]]:
    """(fp32 main weights, flat weights that are their cast) for every parameter that this rank has optimizer state of."""
    shards = []
    for mains, parameters in zip(part.shard_fp32_from_float16_groups, part.model_float16_groups, strict=True):
        for main, parameter in zip(mains, parameters, strict=True):
            buffer, _, bucket = part.model_param_gbuf_map[parameter]
            where = part._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            flat = part.buffers[buffer].buckets[bucket].param_data.view(-1)
            shards.append((main, flat[where.start : where.end]))
    return shards


def create_state(optimizer: McoreOptimizer) -> None:
    """Zero moments before the first step: torch's AdamW creates them lazily, checkpoints and offload need them now."""
    for part in optimizer.parts:
        if optimizer.config.is_precision_aware:
            part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if not state:
                    state.update({key: torch.zeros_like(parameter.data) for key in _MOMENTS})
                    if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
                        where = parameter.device if group["fused"] else "cpu"
                        state["step"] = torch.zeros((), dtype=torch.float32, device=where)


def _flatten_main_weights(part: MegatronOptimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """fp32 main weights that are not views of the model's own buffers."""
    model_storages = {
        buffer.param_data.untyped_storage()._cdata
        for chunk in part.model_chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    }
    own = [p for p in parameters if p.untyped_storage()._cdata not in model_storages]
    flat, views = _flatten([parameter.data for parameter in own])
    for parameter, view in zip(own, views, strict=True):
        parameter.data = view
    return flat


def _flatten(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(the one flat tensor that holds them, views into it); unchanged when they fill one storage in order already."""
    if not tensors:
        return [], []
    num_elements = sum(tensor.numel() for tensor in tensors)
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    if len(storages) == 1 and tensors[0].untyped_storage().nbytes() == num_elements * tensors[0].element_size():
        return [_whole(tensors[0])], list(tensors)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    views = [piece.view(t.shape) for piece, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]
    return [flat], views


def _whole_storages(tensors: Iterable[Tensor]) -> list[Tensor]:
    unique = {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.numel()}
    return [_whole(tensor) for tensor in unique.values()]


def _whole(tensor: Tensor) -> Tensor:
    """A flat view of everything in the storage of `tensor`."""
    storage = tensor.untyped_storage()
    num_elements = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (num_elements,))
