"""Freeing and allocating what a vLLM engine holds on its device, between rollouts.

On CPU vLLM cannot sleep, so storages are resized in place and the KV cache is planned anew for every budget. On CUDA
and NPU vLLM's own sleep mode does it (level 2: nothing is copied); there the KV cache keeps the size planned at start.
"""

from typing import Any

import torch
from torch import Tensor

from rlite.rollout.storages import StorageSleeper, storage_bytes

_MLA_DERIVED = ("W_UK_T", "W_UV")
_EXPERT_WEIGHTS = (".w13_weight", ".w2_weight")


def mla_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Attention layers that hold matrices computed from `kv_b_proj` (the absorbed projections of MLA)."""
    return [module for module in model.modules() if hasattr(module, "kv_b_proj") and hasattr(module, "W_UK_T")]


def refresh_derived(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recomputes the absorbed projections from the weights just written, in the storage that they have."""
    for layer in mla_layers(model):
        layer.process_weights_after_loading(dtype)


def named_weights(model: torch.nn.Module, *, transposed_experts: bool = False) -> dict[str, Tensor]:
    """Parameters by name, without the `routed_experts.` of newer versions; derived ones left out.

    `transposed_experts`: the model keeps `[E, H, 2I]` and `[E, I, H]`, as on NPU; views in the usual order are returned.
    """
    derived = {id(getattr(layer, name)) for layer in mla_layers(model) for name in _MLA_DERIVED}
    weights = {
        name.replace(".routed_experts.", "."): parameter.data
        for name, parameter in model.named_parameters()
        if id(parameter) not in derived
    }
    if transposed_experts:
        weights |= {k: w.transpose(1, 2) for k, w in weights.items() if k.endswith(_EXPERT_WEIGHTS)}
    return weights


def weight_tensors(model: torch.nn.Module) -> list[Tensor]:
    """Parameters, and what is derived from them."""
    derived = [getattr(layer, name).data for layer in mla_layers(model) for name in _MLA_DERIVED]
    return [*(parameter.data for parameter in model.parameters()), *derived]


class CPUEngineMemory:
    """Resizes storages; `core` is vLLM's in-process `EngineCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._weights = StorageSleeper()

    def release(self) -> None:
        self._release_kv_cache()
        self._weights.free(weight_tensors(self._runner.model))

    def wake_weights(self) -> None:
        self._weights.restore()

    def wake_kv_cache(self, budget_bytes: int | None) -> None:
        """Plans the number of blocks for `budget_bytes` and builds cache and scheduler for it, as `EngineCore` does."""
        config = self._core.vllm_config
        planned_bytes = config.cache_config.kv_cache_memory_bytes
        if budget_bytes is not None:
            config.cache_config.kv_cache_memory_bytes = budget_bytes
        try:
            self._build_scheduler(self._build_kv_cache())
        except BaseException:
            config.cache_config.kv_cache_memory_bytes = planned_bytes
            self._release_kv_cache()
            raise

    def _build_kv_cache(self) -> Any:
        """What vLLM planned and allocated; ValueError when the longest sequence does not fit."""
        config = self._core.vllm_config
        try:
            return self._core._initialize_kv_caches(config)
        except ValueError as error:
            raise ValueError(
                f"rollout: a KV cache of {config.cache_config.kv_cache_memory_bytes} bytes cannot serve max_model_len = "
                f"{config.model_config.max_model_len}. Free more memory before generation or lower max_model_len. "
                f"vLLM says: {error}"
            ) from error

    def _build_scheduler(self, kv_cache_config: Any) -> None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        config = self._core.vllm_config
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
        scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=self._core.structured_output_manager,
            log_stats=self._core.log_stats,
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        # The runner hears of finished requests with the next step; unheard, it would keep them for ever.
        scheduler.finished_req_ids = self._core.scheduler.finished_req_ids
        self._core.scheduler = scheduler
        self._core._initialize_effective_attention_block_size()

    def kv_cache_bytes(self) -> int:
        return storage_bytes(self._runner.kv_caches)

    def _release_kv_cache(self) -> None:
        """As the runner's own clean-up after profiling, without its garbage collections (0.3 s each)."""
        self._runner.kv_caches.clear()
        self._runner.attn_groups.clear()
        for layer in self._core.vllm_config.compilation_config.static_forward_context.values():
            if hasattr(layer, "kv_cache"):
                layer.kv_cache = torch.tensor([])


class PooledEngineMemory:
    """vLLM's sleep mode on CUDA and NPU. Addresses stay reserved, so captured graphs survive. Not run yet."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def release(self) -> None:
        self._llm.sleep(level=2)

    def wake_weights(self) -> None:
        self._llm.wake_up(tags=["weights"])

    def wake_kv_cache(self, budget_bytes: int | None) -> None:
        planned_bytes = storage_bytes(self._runner.kv_caches)
        if budget_bytes is not None and budget_bytes < planned_bytes:
            raise ValueError(
                f"rollout: the KV cache was planned with {planned_bytes} bytes and only {budget_bytes} are free now; "
                "on this device vLLM cannot shrink it. Lower engine.kv_cache_memory_bytes, or offload more."
            )
        self._llm.wake_up(tags=["kv_cache"])

    def kv_cache_bytes(self) -> int:
        return storage_bytes(self._runner.kv_caches)
