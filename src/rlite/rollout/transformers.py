"""Hugging Face `generate` as a generation engine: for machines without vLLM, and as a reference."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, PreTrainedModel

from rlite.rollout.config import TransformersConfig
from rlite.rollout.engine import GenerationRequest, ProgressFn, check_requests
from rlite.rollout.lifecycle import Lifecycle
from rlite.rollout.process_guard import ProcessGuard
from rlite.rollout.seeded_sampler import SeededSampler
from rlite.rollout.stop_tokens import end_of_sequence_ids
from rlite.rollout.storages import StorageSleeper, storage_bytes
from rlite.rollout.transformers_weights import canonical_weights, keep_router_bias_fp32, stored_tensors
from rlite.types import Completion, SamplingConfig


class TransformersEngine:
    """A `RolloutEngine` with the whole model on this rank; ranks generate independently.

    Weights start random: only the config is read from `model_dir`. They have their canonical (checkpoint) names;
    experts, which transformers keeps fused in memory, are handed out one by one as views.
    """

    def __init__(
        self, config: TransformersConfig, model_dir: Path | str, *, device: torch.device | str = "cpu"
    ) -> None:
        self._config = config
        self._device = torch.device(device)
        self._eos_token_ids = end_of_sequence_ids(model_dir)
        self._lifecycle = Lifecycle()
        self._guard = ProcessGuard({})
        self._sleeper = StorageSleeper()
        with self._guard, self._device:
            self._model: PreTrainedModel = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(model_dir), dtype=getattr(torch, config.dtype)
            )
        self._model.requires_grad_(False).eval()
        keep_router_bias_fp32(self._model)
        # The model's own sampling defaults must not act behind the request's.
        self._model.generation_config = GenerationConfig()
        self._token_bytes = self._measure_token_bytes()
        self._budget_bytes = 0
        self._plan_kv_cache(config.kv_cache_memory_bytes)

    @property
    def policy_version(self) -> int:
        return self._lifecycle.policy_version

    @property
    def weights_awake(self) -> bool:
        return self._lifecycle.weights_awake

    @property
    def kv_cache_awake(self) -> bool:
        return self._lifecycle.kv_cache_awake

    @property
    def weight_bytes(self) -> int:
        return storage_bytes(self._weight_tensors()) if self._lifecycle.weights_awake else 0

    @property
    def kv_cache_bytes(self) -> int:
        """Reserved while awake: transformers allocates a cache in every `generate` call and frees it at its end."""
        return self.kv_tokens * self._token_bytes

    @property
    def kv_tokens(self) -> int:
        return self._budget_bytes // self._token_bytes if self._lifecycle.kv_cache_awake else 0

    def weights(self) -> dict[str, Tensor]:
        self._lifecycle.check_weights("weights")
        self._lifecycle.on_weights_handed_out()
        return canonical_weights(self._model)

    def finish_weight_update(self, policy_version: int) -> None:
        self._lifecycle.check_weights("finish_weight_update")
        self._lifecycle.on_weights_updated(policy_version)

    def sleep(self) -> None:
        self._lifecycle.check_sleep()
        self._sleeper.free(self._weight_tensors())
        self._lifecycle.on_sleep()

    def wake_weights(self) -> None:
        self._lifecycle.check_wake_weights()
        self._sleeper.restore()
        self._lifecycle.on_wake_weights()

    def wake_kv_cache(self, budget_bytes: int | None = None) -> None:
        self._lifecycle.check_wake_kv_cache()
        if budget_bytes is not None:
            self._plan_kv_cache(budget_bytes)
        self._lifecycle.on_wake_kv_cache()

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_progress: ProgressFn | None = None
    ) -> list[Completion]:
        self._lifecycle.check_generate()
        check_requests(requests, max_model_len=self._config.max_model_len)
        completions: dict[int, Completion] = {}
        try:
            with self._guard, torch.inference_mode():
                for batch in self._batches(requests):
                    for index, completion in zip(batch, self._generate([requests[i] for i in batch]), strict=True):
                        completions[index] = completion
                    if on_progress is not None:
                        on_progress(len(completions), len(requests))
        except BaseException as error:
            self._lifecycle.on_dead(f"generate failed with {type(error).__name__}: {error}")
            raise
        return [completions[index] for index in range(len(requests))]

    def shutdown(self) -> None:
        if not self._lifecycle.dead and self._lifecycle.weights_awake:
            self._sleeper.free(self._weight_tensors())
        self._lifecycle.on_dead("it was shut down")

    def _batches(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Indices of requests that are sampled together: same sampling settings, as many as the KV cache holds."""
        by_sampling: dict[SamplingConfig, list[int]] = {}
        for index, request in enumerate(requests):
            by_sampling.setdefault(request.sampling, []).append(index)
        size = min(self._config.max_num_seqs, self.kv_tokens // self._config.max_model_len)
        return [same[i : i + size] for same in by_sampling.values() for i in range(0, len(same), size)]

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        sampling = requests[0].sampling
        prompts = [request.prompt_token_ids for request in requests]
        longest = max(map(len, prompts))
        input_ids_BT = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self._device)
        mask_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        limits = [min(sampling.max_tokens, self._config.max_model_len - len(p)) for p in prompts]
        stop_ids = sorted({*self._eos_token_ids, *sampling.stop_token_ids})
        sampler = SeededSampler(sampling, seeds=[request.seed for request in requests], device=self._device)
        config = GenerationConfig(
            max_new_tokens=max(limits), do_sample=False, eos_token_id=stop_ids or None, pad_token_id=0
        )
        self._model.generate(input_ids_BT, attention_mask=mask_BT, generation_config=config, logits_processor=[sampler])
        version = self._lifecycle.policy_version
        return [sampler.completion(row, limit, stop_ids, version) for row, limit in enumerate(limits)]

    def _weight_tensors(self) -> list[Tensor]:
        return list(stored_tensors(self._model).values())

    def _measure_token_bytes(self) -> int:
        """KV cache bytes of one token, from a cache that the model filled."""
        cache = DynamicCache(config=self._model.config)
        with self._guard, torch.inference_mode():
            self._model(torch.zeros(1, 1, dtype=torch.int64, device=self._device), past_key_values=cache)
        return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))

    def _plan_kv_cache(self, budget_bytes: int) -> None:
        needed = self._config.max_model_len * self._token_bytes
        if budget_bytes < needed:
            raise ValueError(
                f"rollout: a KV cache of {budget_bytes} bytes cannot serve max_model_len = "
                f"{self._config.max_model_len}: that takes {needed}. Free more memory before generation or lower max_model_len."
            )
        self._budget_bytes = budget_bytes
