"""Storages may be freed and refilled between updates: training goes on bit for bit."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.buffers import flat_gradients, flat_optimizer_state, flat_parameters
from rlite.megatron.model import named_local_tensors
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from tests.helpers.world import run_world
from tests.megatron.tiny import CONFIGS, Policy, bring_up, make_rows, shard_rows, toy_loss


class Parked:
    """Frees the storages of some tensors and brings them back; with or without their contents."""

    def __init__(self, tensors: Sequence[Tensor], *, keep: bool) -> None:
        self.storages = [tensor.untyped_storage() for tensor in tensors]
        self.sizes = [storage.nbytes() for storage in self.storages]
        self.copies = [storage.clone() if keep else None for storage in self.storages]
        for storage in self.storages:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size, copy in zip(self.storages, self.sizes, self.copies, strict=True):
            storage.resize_(size)
            storage.copy_(copy) if copy is not None else storage.fill_(7)


def _train(config: dict, layout: ParallelLayout, dtype: torch.dtype, park: bool) -> tuple[list, dict[str, Tensor]]:
    policy = bring_up(config, layout, dtype=dtype)
    results = []
    for step in range(3):
        if park:
            _park_everything(policy)
        mine = shard_rows(make_rows(4, seed=step), layout)[1]
        results.append(policy.runner.update(mine, lambda i, s: toy_loss(i, 30, s)))
    return results, {name: tensor.clone() for name, tensor in named_local_tensors(policy.chunks).items()}


def _park_everything(policy: Policy) -> None:
    optimizer = flat_optimizer_state(policy.runner.optimizer)
    parameters, gradients = flat_parameters(policy.chunks), flat_gradients(policy.chunks)
    storages = {t.untyped_storage()._cdata for t in [*optimizer, *parameters, *gradients]}
    assert len(storages) == len(optimizer) + len(parameters) + len(gradients), "no storage is listed twice"
    parked = [Parked(optimizer, keep=True), Parked(parameters, keep=True), Parked(gradients, keep=False)]
    held = named_local_tensors(policy.chunks)
    assert all(t.untyped_storage().nbytes() == 0 for n, t in held.items() if not n.endswith("expert_bias"))
    for part in parked:
        part.restore()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "layout"), [("deepseek_v3", ParallelLayout(ep=2)), ("llama_tied", ParallelLayout(pp=2))]
)
def test_training_is_bit_identical_when_storages_are_freed(
    name: str, layout: ParallelLayout, dtype: torch.dtype
) -> None:
    kept = run_world(2, _train, CONFIGS[name], layout, dtype, False)
    freed = run_world(2, _train, CONFIGS[name], layout, dtype, True)
    for (results, weights), (freed_results, freed_weights) in zip(kept, freed, strict=True):
        assert results == freed_results
        for tensor, weight in weights.items():
            assert torch.equal(freed_weights[tensor], weight), tensor


def _sizes(dtype: torch.dtype) -> tuple[int, int, int, int]:
    policy = bring_up(CONFIGS["llama"], ParallelLayout(), dtype=dtype)
    num_weights = sum(parameter.numel() for parameter in policy.chunks.parameters())
    sizes = [
        sum(tensor.numel() for tensor in tensors)
        for tensors in (
            flat_parameters(policy.chunks),
            flat_gradients(policy.chunks),
            flat_optimizer_state(policy.runner.optimizer),
        )
    ]
    return num_weights, *sizes


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 2), (torch.bfloat16, 3)])
def test_everything_is_listed(dtype: torch.dtype, copies: int) -> None:
    """Two moments, and fp32 main weights only where the weights are bf16 (padding of the buffers aside)."""
    num_weights, parameters, gradients, optimizer = run_world(1, _sizes, dtype)[0]
    assert num_weights <= parameters == gradients <= 1.1 * num_weights
    assert optimizer == copies * num_weights


def _after_a_step() -> tuple[set, set, bool]:
    """dtypes of gradient buffers and optimizer state, and whether the step left copies of gradients behind."""
    options = MegatronOptions(grad_reduce_in_fp32=False)
    policy = bring_up(CONFIGS["llama"], ParallelLayout(), options=options, dtype=torch.bfloat16)
    policy.runner.update(make_rows(2), lambda i, s: toy_loss(i, 30, s))
    optimizer = policy.runner.optimizer
    mains = [p for part in optimizer.parts for group in part.optimizer.param_groups for p in group["params"]]
    dtypes = [{t.dtype for t in flats} for flats in (flat_gradients(policy.chunks), flat_optimizer_state(optimizer))]
    return *dtypes, any(parameter.grad is not None for parameter in mains)


def test_gradients_in_bf16_leave_no_fp32_copies_behind() -> None:
    assert run_world(1, _after_a_step) == [({torch.bfloat16}, {torch.float32}, False)]


def test_moments_in_bf16_need_transformer_engine() -> None:
    def build() -> str:
        with pytest.raises(ValueError, match="exp_avg_sq_dtype = bfloat16 need Transformer Engine"):
            bring_up(CONFIGS["llama"], ParallelLayout(), optimizer=OptimizerConfig(exp_avg_sq_dtype="bfloat16"))
        return "refused"

    assert run_world(1, build) == ["refused"]
