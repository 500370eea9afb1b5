"""Tiny models and rows, and one function that brings a policy up in a test world."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from rlite.layout.architecture import Architecture
from rlite.layout.megatron import megatron_boxes
from rlite.layout.parallel import ParallelLayout
from rlite.megatron.groups import build_process_groups
from rlite.megatron.model import build_policy, named_local_tensors, unwrap
from rlite.megatron.optimizer import build_optimizer, wrap_for_training
from rlite.megatron.options import MegatronOptions, OptimizerConfig
from rlite.megatron.runner import PolicyRunner
from rlite.types import LossOutput, TokenRow, TokenScores

_COMMON = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.1,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
_MLA = dict(kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4)
_MOE = dict(moe_intermediate_size=24, num_experts_per_tok=2)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama", "head_dim": 8},
    "llama_tied": {**_COMMON, "model_type": "llama", "head_dim": 8, "tie_word_embeddings": True},
    "qwen2": {**_COMMON, "model_type": "qwen2"},
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        **_COMMON,
        **_MOE,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {**_COMMON, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": {
        **_COMMON,
        **_MLA,
        **_MOE,
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **_COMMON,
        **_MLA,
        **_MOE,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
    },
}


class Policy(NamedTuple):
    runner: PolicyRunner
    chunks: torch.nn.ModuleList
    layout: ParallelLayout


def bring_up(
    config: Mapping[str, Any],
    layout: ParallelLayout,
    *,
    options: MegatronOptions | None = None,
    optimizer: OptimizerConfig | None = None,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """Groups, model, wrapper and optimizer of this rank; weights from a canonical state dict when given."""
    build_process_groups(layout)
    chunks = build_policy(config, layout, options=options, params_dtype=dtype)
    if weights is not None:
        load_canonical(config, layout, chunks, weights)
    chunks = wrap_for_training(chunks, grad_reduce_in_fp32=(options or MegatronOptions()).grad_reduce_in_fp32)
    adapter = build_optimizer(chunks, optimizer or OptimizerConfig(lr=1e-2))
    return Policy(PolicyRunner(chunks, layout, options=options, optimizer=adapter), chunks, layout)


def boxes_of(config: Mapping[str, Any], layout: ParallelLayout) -> Any:
    arch = Architecture.from_config(config)
    return megatron_boxes(arch, layout, dist.get_world_size(), dist.get_rank(), dtype="float32")


def load_canonical(
    config: Mapping[str, Any], layout: ParallelLayout, chunks: Sequence[torch.nn.Module], weights: Mapping[str, Tensor]
) -> None:
    """Copies this rank's boxes out of full Hugging Face tensors."""
    local = named_local_tensors(chunks)
    for box in boxes_of(config, layout).boxes:
        piece = weights[box.tensor][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        local[box.local][box.local_index(box.start, box.stop)] = piece.to(local[box.local].dtype)


def canonical_parts(
    config: Mapping[str, Any], layout: ParallelLayout, tensors: Mapping[str, Tensor]
) -> list[tuple[str, tuple, tuple, Tensor]]:
    """This rank's boxes of local tensors: (canonical name, start, stop, values)."""
    return [
        (box.tensor, box.start, box.stop, tensors[box.local][box.local_index(box.start, box.stop)].clone())
        for box in boxes_of(config, layout).boxes
        if box.local in tensors
    ]


def assemble(parts_of_ranks: Sequence[Sequence[tuple[str, tuple, tuple, Tensor]]]) -> dict[str, Tensor]:
    """Full canonical tensors from the parts of all ranks; copies of a part must agree to 1e-5 of its largest value."""
    full: dict[str, Tensor] = {}
    for parts in parts_of_ranks:
        for name, _, stop, values in parts:
            shape = [max(a, b) for a, b in zip(full[name].shape if name in full else stop, stop, strict=True)]
            if name not in full or list(full[name].shape) != shape:
                grown = torch.full(shape, torch.nan, dtype=values.dtype)
                if name in full:
                    grown[tuple(slice(0, n) for n in full[name].shape)] = full[name]
                full[name] = grown
    for parts in parts_of_ranks:
        for name, start, stop, values in parts:
            region = full[name][tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            known = ~region.isnan()
            scale = values.abs().max().clamp_min(1e-12)
            assert ((region - values)[known].abs() <= 1e-5 * scale).all(), f"{name}: copies differ"
            region.copy_(values)
    for name, tensor in full.items():
        assert not tensor.isnan().any(), f"{name} is not covered"
    return full


def keep_whole_gradients(policy: Policy) -> None:
    """Gradients are all-reduced instead of reduce-scattered, so that every rank can show all of its own."""
    for chunk in policy.chunks:
        unwrap(chunk).config.finalize_model_grads_func = lambda model, *_, **__: finalize_model_grads(
            model, None, force_all_reduce=True
        )


def local_gradients(policy: Policy) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": parameter.main_grad
        for index, chunk in enumerate(policy.chunks)
        for name, parameter in unwrap(chunk).named_parameters()
    }


def local_moments(policy: Policy, key: str) -> dict[str, Tensor]:
    """`exp_avg` or `exp_avg_sq` in the shape of each parameter, out of the shards of the data-parallel ranks."""
    names = {
        parameter: f"{index}.{name}"
        for index, chunk in enumerate(policy.chunks)
        for name, parameter in unwrap(chunk).named_parameters()
    }
    moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for parameter, name in names.items()}
    for part in policy.runner.optimizer.parts:
        for parameter, (group, order) in part.model_param_group_index_map.items():
            shard = part._get_model_param_range_map(parameter)["param"]
            main = part.optimizer.param_groups[group]["params"][order]
            moments[names[parameter]].view(-1)[shard.start : shard.end] = part.optimizer.state[main][key].view(-1)
    for parameter, name in names.items():
        is_expert = not getattr(parameter, "allreduce", True)
        group = parallel_state.get_expert_data_parallel_group if is_expert else parallel_state.get_data_parallel_group
        dist.all_reduce(moments[name], group=group())
    return moments


def make_rows(num_rows: int, *, seed: int = 0, vocab_size: int = 97) -> list[TokenRow]:
    """Ragged random rows; prompts of 3 to 6 tokens, completions of 2 to 12, some of them with a hole in the mask."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        prompt = int(torch.randint(3, 7, (), generator=generator))
        length = prompt + int(torch.randint(2, 13, (), generator=generator))
        mask = torch.arange(length) >= prompt
        if index % 3 == 2:
            mask[prompt] = False
        token_ids = torch.randint(0, vocab_size, (length,), generator=generator)
        rows.append(TokenRow(token_ids=token_ids, loss_mask=mask))
    return rows


def shard_rows(rows: Sequence[TokenRow], policy_layout: ParallelLayout) -> tuple[list[int], list[TokenRow]]:
    """(indices, rows) of this data-parallel rank: every dp-th one."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dp_rank, dp = policy_layout.coordinates(rank, world).dp, policy_layout.dp(world)
    indices = list(range(dp_rank, len(rows), dp))
    return indices, [rows[index] for index in indices]


def toy_loss(indices: Sequence[int], total_tokens: int, scores: TokenScores) -> LossOutput:
    """A loss through log-probability and entropy, divided by the tokens of the whole batch."""
    loss = (-scores.logprobs + 0.1 * scores.logprobs.square() - 0.3 * scores.entropy).sum() / total_tokens
    return LossOutput(
        loss=loss,
        metric_sums={
            "tokens": torch.tensor(float(scores.logprobs.numel())),
            "loss": loss.detach(),
            "max:logprob": scores.logprobs.detach().amax() if scores.logprobs.numel() else torch.tensor(0.0),
        },
    )
