"""Fixes for Megatron-core 0.16.1 that are needed on any device."""

from typing import Any

import torch
from torch import Tensor

from rlite.megatron.patching import core_modules, replace


def apply() -> None:
    """Bugs that do not depend on Transformer Engine."""
    replace(
        "transformer.moe.router:TopKRouter._apply_expert_bias",
        lambda _: _apply_expert_bias,
        why="padding_mask [T] does not broadcast against the routing map [T, E]",
    )
    replace(
        "optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        lambda _: _set_main_param_and_optimizer_states,
        why="KeyError 'step' and an in-place write on a leaf when loading a resharded torch AdamW state",
    )
    replace(
        "optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        _with_separate_steps,
        why="one shared `step` tensor in every state: one step after resume advanced Adam by the number of tensors",
    )


def apply_without_transformer_engine() -> None:
    """Names that Megatron-core leaves undefined or wrong when Transformer Engine is missing."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # NameError in every MoE router otherwise
    replace(
        "transformer.multi_latent_attention:HAVE_TE",
        lambda _: False,
        why="True without TE (the extension imports with mocks): TypeError in isinstance()",
    )
    assert core_modules(), "megatron.core must be imported by now"


def _apply_expert_bias(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    if not (self.enable_expert_bias and torch.is_grad_enabled()):
        return
    with torch.no_grad():
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        self.local_tokens_per_expert += routing_map.sum(dim=0)


@torch.no_grad()
def _set_main_param_and_optimizer_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
    group_index, group_order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group_index]["params"][group_order]
    for key, destination in {"param": main_param, **self.optimizer.state[main_param]}.items():
        if key in tensors:  # `step` travels in the parameter groups
            destination.copy_(tensors[key])


def _with_separate_steps(load_state_dict: Any) -> Any:
    def load(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        separate_steps(self.optimizer)

    return load


def separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its own `step` tensor: torch's AdamW increments each one in place."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()
