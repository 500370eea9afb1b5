"""vLLM as a generation engine inside the trainer's processes."""

import itertools
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.rollout import vllm_compat, vllm_memory
from rlite.rollout.config import VLLMConfig
from rlite.rollout.engine import GenerationRequest, ProgressFn, RequestMismatchError, check_requests
from rlite.rollout.lifecycle import Lifecycle
from rlite.rollout.process_guard import ProcessGuard, console_to_file, unfrozen_heap
from rlite.rollout.sampling import requests_fingerprint
from rlite.rollout.stop_tokens import end_of_sequence_ids
from rlite.rollout.storages import storage_bytes
from rlite.rollout.vllm_routing import RoutingRecorder
from rlite.types import NATIVE_EXPERT, Completion


class VLLMEngine:
    """A `RolloutEngine`: `world_size / tp` independent vLLM engines, each on `tp` consecutive ranks.

    `torch.distributed` must be initialised, and every rank of the world builds its engine at the same time. Weights
    start arbitrary: only the config is read from `model_dir`. Their names are vLLM's, without `routed_experts.`.
    """

    def __init__(
        self,
        config: VLLMConfig,
        model_dir: Path | str,
        *,
        log_file: Path | str,
        local_rank: int | None = None,
        capture_routing: bool = False,
    ) -> None:
        """vLLM's own output is appended to `log_file`. Every completion ends at the model's end-of-sequence tokens.

        `local_rank`: which of the node's devices is this rank's; by default what the environment says (SLURM's says nothing).
        `capture_routing`: `Completion.experts` then tells the experts of every token; only on CPU, without prefix caching.
        Raises ValueError for a layout that does not cover the world or an argument in `config.extra` that rlite sets.
        """
        if not dist.is_initialized():
            raise RuntimeError("VLLMEngine: torch.distributed is not initialised; the trainer does that first")
        config.layout.validate(dist.get_world_size())
        self._config = config
        self._eos_token_ids = end_of_sequence_ids(model_dir)
        self._log_file = Path(log_file)
        self._lifecycle = Lifecycle()
        self._guard = ProcessGuard(_engine_env(local_rank))
        with self._guard, unfrozen_heap(), console_to_file(self._log_file):
            self._build(str(model_dir))
        self._request_ids = itertools.count()
        self._recorder = self._routing_recorder() if capture_routing else None

    def _build(self, model_dir: str) -> None:
        self._platform = vllm_compat.platform()
        on_cpu = self._platform == "cpu"
        if on_cpu:
            vllm_compat.apply_cpu_fixes()
        hf_config = json.loads((Path(model_dir) / "config.json").read_text())
        args = self._llm_args(model_dir) | vllm_compat.platform_llm_args(self._platform, hf_config, self._config)
        _check_extra(self._config.extra, args)
        from vllm import LLM

        self._llm = LLM(**args, **self._config.extra)
        vllm_compat.own_shutdown(self._llm)
        _log_to_file(self._log_file)
        from vllm.distributed.parallel_state import get_tp_group

        self._tp_group = get_tp_group()
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._model: torch.nn.Module = self._core.model_executor.driver_worker.worker.model_runner.model
        self._memory = vllm_memory.CPUEngineMemory(self._core) if on_cpu else vllm_memory.PooledEngineMemory(self._llm)

    def _llm_args(self, model_dir: str) -> dict[str, Any]:
        config = self._config
        return {
            "model": model_dir,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "generation_config": "vllm",
            "dtype": config.dtype,
            "tensor_parallel_size": config.tp,
            "enable_expert_parallel": config.expert_parallel,
            "distributed_executor_backend": "external_launcher",
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
            "enable_prefix_caching": config.enable_prefix_caching,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "seed": 0,
        }

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
        return storage_bytes(vllm_memory.weight_tensors(self._model)) if self._lifecycle.weights_awake else 0

    @property
    def kv_cache_bytes(self) -> int:
        return self._memory.kv_cache_bytes() if self._lifecycle.kv_cache_awake else 0

    @property
    def kv_tokens(self) -> int:
        cache = self._core.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size if self._lifecycle.kv_cache_awake else 0

    def weights(self) -> dict[str, Tensor]:
        self._lifecycle.check_weights("weights")
        self._lifecycle.on_weights_handed_out()
        return vllm_memory.named_weights(self._model, transposed_experts=self._platform == "npu")

    def finish_weight_update(self, policy_version: int) -> None:
        self._lifecycle.check_weights("finish_weight_update")
        with self._guard:
            vllm_memory.refresh_derived(self._model, self._core.vllm_config.model_config.dtype)
            self._llm.reset_prefix_cache()
        self._lifecycle.on_weights_updated(policy_version)

    def sleep(self) -> None:
        self._lifecycle.check_sleep()
        with self._guard:
            self._memory.release()
        self._lifecycle.on_sleep()

    def wake_weights(self) -> None:
        self._lifecycle.check_wake_weights()
        with self._guard:
            self._memory.wake_weights()
        self._lifecycle.on_wake_weights()

    def wake_kv_cache(self, budget_bytes: int | None = None) -> None:
        self._lifecycle.check_wake_kv_cache()
        with self._guard:
            self._memory.wake_kv_cache(budget_bytes)
        self._lifecycle.on_wake_kv_cache()

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_progress: ProgressFn | None = None
    ) -> list[Completion]:
        self._lifecycle.check_generate()
        self._check_identical(requests)
        check_requests(requests, max_model_len=self._config.max_model_len)
        try:
            with self._guard:
                return self._generate(requests, on_progress)
        except BaseException as error:
            self._lifecycle.on_dead(f"generate failed with {type(error).__name__}: {error}")
            raise

    def _generate(self, requests: Sequence[GenerationRequest], on_progress: ProgressFn | None) -> list[Completion]:
        ids = [self._submit(request) for request in requests]
        done: dict[str, Completion] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                done[output.request_id] = _completion(output.outputs[0], self.policy_version)
                if on_progress is not None:
                    on_progress(len(done), len(requests))
        if missing := [index for index, request_id in enumerate(ids) if request_id not in done]:
            raise RuntimeError(f"vLLM returned no completion for requests {missing}")
        completions = [done[request_id] for request_id in ids]
        if self._recorder is None:
            return completions
        return [
            self._with_experts(completion, request_id, request)
            for request_id, request, completion in zip(ids, requests, completions, strict=True)
        ]

    def _with_experts(self, completion: Completion, request_id: str, request: GenerationRequest) -> Completion:
        num_tokens = len(request.prompt_token_ids) + len(completion.token_ids)
        experts_TLK = self._recorder.take(request_id, num_tokens - 1)
        last = torch.full_like(experts_TLK[:1], NATIVE_EXPERT)  # sampled, but never fed to a layer
        return replace(completion, experts=torch.cat([experts_TLK, last]))

    def _submit(self, request: GenerationRequest) -> str:
        from vllm import TokensPrompt

        request_id = str(next(self._request_ids))
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_token_ids))
        self._engine.add_request(request_id, prompt, _sampling_params(request, self._eos_token_ids))
        return request_id

    def _routing_recorder(self) -> RoutingRecorder:
        if self._platform != "cpu" or self._config.enable_prefix_caching:
            raise ValueError(
                f"capture_routing on {self._platform} with enable_prefix_caching = {self._config.enable_prefix_caching}: "
                "it works on cpu and with engine.enable_prefix_caching = false only"
            )
        return RoutingRecorder(self._core.model_executor.driver_worker.worker.model_runner)

    def _check_identical(self, requests: Sequence[GenerationRequest]) -> None:
        if self._config.tp == 1:
            return
        mine = torch.tensor([len(requests), requests_fingerprint(requests)], dtype=torch.int64)
        of_rank = [torch.empty_like(mine) for _ in self._tp_group.ranks]
        dist.all_gather(of_rank, mine, group=self._tp_group.cpu_group)
        differing = [r for r, x in zip(self._tp_group.ranks, of_rank, strict=True) if not torch.equal(x, of_rank[0])]
        if differing:
            counts = {r: int(x[0]) for r, x in zip(self._tp_group.ranks, of_rank, strict=True)}
            raise RequestMismatchError(
                f"generate: ranks {differing} asked for other completions than rank {self._tp_group.ranks[0]} of the "
                f"same engine (number of requests by rank: {counts}). Broadcast the requests over the engine's ranks."
            )

    def shutdown(self) -> None:
        if self._llm is None:
            return
        self._lifecycle.on_dead("it was shut down")
        with self._guard, console_to_file(self._log_file):
            vllm_compat.shut_down(self._llm)
        self._llm = self._engine = self._core = self._model = self._memory = None


def _engine_env(local_rank: int | None) -> dict[str, str]:
    """What vLLM reads; the rank variables as torchrun sets them, since other launchers leave some out."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0") if local_rank is None else str(local_rank),
        "WORLD_SIZE": str(dist.get_world_size()),
    }


def _check_extra(extra: dict[str, Any], args: dict[str, Any]) -> None:
    for key in sorted(extra.keys() & args.keys()):
        raise ValueError(f"engine.extra.{key} = {extra[key]!r}: rlite sets this argument of vllm.LLM itself")


def _log_to_file(path: Path) -> None:
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False


def _sampling_params(request: GenerationRequest, eos_token_ids: tuple[int, ...]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    greedy = sampling.temperature == 0
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        min_p=0.0 if greedy else sampling.min_p,
        seed=None if greedy else request.seed,
        stop_token_ids=sorted({*eos_token_ids, *sampling.stop_token_ids}),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: Any, policy_version: int) -> Completion:
    logprobs = output.logprobs
    if list(logprobs.token_ids) != list(output.token_ids):
        raise RuntimeError("vLLM returned log-probs of other tokens than those it sampled")
    return Completion(
        token_ids=tuple(output.token_ids),
        logprobs=tuple(logprobs.logprobs),
        finish_reason=output.finish_reason,
        policy_version=policy_version,
    )
