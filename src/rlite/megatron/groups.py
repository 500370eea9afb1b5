"""Process groups and random generators of a layout."""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rlite.layout.parallel import ParallelLayout


def build_process_groups(layout: ParallelLayout, *, seed: int = 0) -> None:
    """Create Megatron's groups for `layout` on the initialised default group. Collective; once a process.

    Raises:
        ValueError: the layout does not fit the world size.
        RuntimeError: this process already has groups.
    """
    layout.validate(dist.get_world_size())
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("Megatron's process groups exist already: one layout per process")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it was seeded
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def check_process_groups(layout: ParallelLayout) -> None:
    """Raises ValueError when the groups of this process are those of another layout."""
    built = {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    wanted = {axis: getattr(layout, axis) for axis in built}
    if wanted != built:
        raise ValueError(
            f"trainer.strategy.layout = {wanted}: Megatron's process groups of this process are those of {built}, of an "
            "earlier Trainer; start a new process for another layout"
        )


def exchange_objects(outgoing: Sequence[Any]) -> list[Any]:
    """Gives `outgoing[r]` to rank r of this rank's data-parallel group; returns what each of them gave. Collective over all.

    Unlike an all-gather of objects it moves each only to where it goes; over the default group, which has gloo for the CPU
    beside any device's backend, so that no device memory is needed.
    """
    peers = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    payloads = dict(zip(peers, (pickle.dumps(value) for value in outgoing), strict=True))
    sizes = torch.tensor([len(payloads.get(rank, b"")) for rank in range(dist.get_world_size())])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    send_sizes, receive_sizes = sizes.tolist(), incoming.tolist()
    sent = torch.frombuffer(bytearray(b"".join(payloads[rank] for rank in sorted(payloads))), dtype=torch.uint8)
    received = torch.empty(sum(receive_sizes), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes)
    parts = received.split(receive_sizes)
    return [pickle.loads(parts[rank].numpy().tobytes()) for rank in peers]
