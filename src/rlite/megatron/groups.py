"""Process groups and random generators of a layout."""

import torch
from megatron.core import parallel_state, tensor_parallel

from rlite.layout.parallel import ParallelLayout


def build_process_groups(layout: ParallelLayout, *, seed: int = 0) -> None:
    """Create Megatron's groups for `layout` on the initialised default group. Collective; once a process.

    Raises:
        ValueError: the layout does not fit the world size.
        RuntimeError: this process already has groups.
    """
    layout.validate(torch.distributed.get_world_size())
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
