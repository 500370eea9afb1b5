"""Megatron-core on CPU and gloo: replaces what insists on CUDA, inside megatron.core only."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlite.megatron.gloo_collectives import even_gather, even_reduce_scatter
from rlite.megatron.patching import core_modules, replace
from rlite.megatron.torch_view import TorchView

_MODULES = (
    "tensor_parallel",
    "tensor_parallel.random",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "distributed",
    "optimizer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.optimizer",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "models.common.embeddings.rope_utils",
    "models.common.language_module.language_module",
    "pipeline_parallel",
    "transformer.moe.moe_layer",
    "transformer.moe.experts",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "transformer.multi_latent_attention",
    "transformer.multi_token_prediction",
    "dist_checkpointing",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.exchange_utils",
    "rerun_state_machine",
    "fusions.fused_cross_entropy",
)
"""Imported before the sweep, so that none of them keeps the real torch."""

_MOVES_TO_CUDA = (
    "models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
    "optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero",
    "dist_checkpointing.exchange_utils:exchange_loaded_tensors_gather_rounds",
    "dist_checkpointing.exchange_utils:exchange_loaded_tensors_gather_object",
    "dist_checkpointing.exchange_utils:exchange_loaded_tensors_broadcast",
    "dist_checkpointing.exchange_utils:exchange_by_distribution",
)


def apply() -> None:
    """Install every replacement. Called once, by `bootstrap`."""
    for name in _MODULES:
        importlib.import_module(f"megatron.core.{name}")
    view = TorchView()
    for module in core_modules():
        if getattr(module, "torch", None) is torch:
            module.torch = view
    _replace_rng()
    _replace_cuda_type_checks()
    for target in _MOVES_TO_CUDA:
        replace(target, _with_identity_cuda, why="calls tensor.cuda()")
    _replace_collectives()
    replace(
        "models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
        lambda _: _get_pos_emb_on_this_cp_rank,
        why="pins memory and calls tensor.cuda()",
    )


def _replace_rng() -> None:
    random = "tensor_parallel.random"
    replace(f"{random}:_get_cuda_rng_state", lambda _: lambda *_, **__: torch.get_rng_state(), why="CUDA generator")
    replace(
        f"{random}:_set_cuda_rng_state",
        lambda _: lambda state, *_, **__: torch.set_rng_state(state),
        why="CUDA generator",
    )
    replace(f"{random}:CudaRNGStatesTracker.fork", lambda _: _fork_rng, why="CPU and model-parallel generator are one")


def _replace_cuda_type_checks() -> None:
    replace(
        "optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        _with_cuda_type_names,
        why="compares tensor.type() with 'torch.cuda.FloatTensor'",
    )
    replace(
        "optimizer.clip_grads:clip_grad_by_total_norm_fp32",
        lambda _: _clip_grad_by_total_norm_fp32,
        why="asserts 'torch.cuda.FloatTensor'",
    )


def _replace_collectives() -> None:
    replace("tensor_parallel.mappings:_gather_along_first_dim", even_gather, why="gloo cannot all-gather uneven sizes")
    replace(
        "tensor_parallel.mappings:_reduce_scatter_along_first_dim",
        even_reduce_scatter,
        why="gloo cannot reduce-scatter uneven sizes",
    )
    replace(
        "transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        _splits_as_numpy,
        why="all-to-all split sizes become numbers only when they are on CUDA",
    )


def _splits_as_numpy(move: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, Tensor) else moved

    return maybe_move_tensor_to_cpu


@contextlib.contextmanager
def _fork_rng(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    if name not in self.states_:
        raise KeyError(f"random state {name} was not added")
    outer_state, outer_name = torch.get_rng_state(), self._current_state_name
    nested = outer_name != "default-rng"
    if nested:
        self.states_[outer_name] = outer_state
    torch.set_rng_state(self.states_[name])
    self._current_state_name = name
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(self.states_[outer_name] if nested else outer_state)
        self._current_state_name = outer_name


@torch.no_grad()
def _clip_grad_by_total_norm_fp32(
    parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None:
    attribute = "decoupled_grad" if use_decoupled_grad else "grad"
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    gradients = [grad for grad in (getattr(p, attribute, None) for p in parameters) if grad is not None]
    coefficient = max_norm / (total_norm + 1.0e-6)
    if coefficient < 1.0 and gradients:
        torch._foreach_mul_(gradients, coefficient)


def _get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    size, rank = cp_group.size(), cp_group.rank()
    chunks = pos_emb.chunk(2 * size, dim=seq_dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=seq_dim)


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """While `function` runs, `tensor.type()` answers as for a CUDA tensor."""
    real_type = torch.Tensor.type

    def cuda_type(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self) if dtype is None else real_type(self, dtype, *args, **kwargs)
        is_cpu_name = isinstance(result, str) and not result.startswith("torch.cuda.")
        return "torch.cuda." + result.removeprefix("torch.") if is_cpu_name else result

    return _with_tensor_method(function, "type", cuda_type)


def _with_identity_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """While `function` runs, `tensor.cuda()` is the tensor itself."""
    return _with_tensor_method(function, "cuda", lambda self, *_, **__: self)


def _with_tensor_method(function: Callable[..., Any], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        real_method = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, method)
        try:
            return function(*args, **kwargs)
        finally:
            setattr(torch.Tensor, name, real_method)

    return wrapped
