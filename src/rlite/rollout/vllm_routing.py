"""Which experts every token was sent to while generating, for router replay in training (R3, arXiv:2510.11370).

vLLM's own `enable_return_routed_experts` needs its second model runner, which needs Triton; this is for eager CPU runs.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor


class RoutingRecorder:
    """Listens to the routers of `runner.model` and sorts what they chose by request.

    Cached prefixes are not routed again, so prefix caching has to be off.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._step: dict[int, Tensor] = {}
        self._chunks: dict[str, list[tuple[int, Tensor]]] = {}
        routers = [module.router for module in runner.model.modules() if _records(getattr(module, "router", None))]
        if not routers:
            raise ValueError("model.algorithm.router_replay = R3: the model has no expert router to record")
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._hear, layer))
        self._execute_model = runner.execute_model
        runner.execute_model = self._execute_and_record

    def take(self, request_id: str, num_tokens: int) -> Tensor:
        """Experts of the first `num_tokens` tokens of a finished request, int16 `[num_tokens, MoE layers, top_k]`, global
        expert ids in the order of the layers; forgets the request."""
        chunks = self._chunks.pop(request_id)
        experts_TLK = torch.full((num_tokens, *chunks[0][1].shape[1:]), -1, dtype=torch.int16)
        for start, chunk in chunks:  # in order of time: a preempted request is computed again
            experts_TLK[start : start + len(chunk)] = chunk
        if bool((experts_TLK < 0).any()):
            raise RuntimeError(f"vLLM routed only a part of the {num_tokens} tokens of request {request_id}")
        return experts_TLK

    def _hear(self, layer: int, topk_ids: Tensor) -> None:
        self._step[layer] = topk_ids.to(torch.int16)

    def _execute_and_record(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._step.clear()
        result = self._execute_model(scheduler_output, *args, **kwargs)
        if self._step:
            self._sort(scheduler_output, torch.stack([self._step[layer] for layer in sorted(self._step)], dim=1))
        return result

    def _sort(self, scheduler_output: Any, experts_TLK: Tensor) -> None:
        """The step's tokens lie request after request, in the order of the runner's batch."""
        batch, offset = self._runner.input_batch, 0
        for internal_id in batch.req_ids:
            count = scheduler_output.num_scheduled_tokens.get(internal_id, 0)
            if count:
                start = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[internal_id]])
                request_id = internal_id.partition("-")[0]
                self._chunks.setdefault(request_id, []).append((start, experts_TLK[offset : offset + count]))
                offset += count


def _records(router: Any) -> bool:
    return hasattr(router, "set_capture_fn")
