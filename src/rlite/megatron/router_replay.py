"""Router replay: each MoE layer is told which experts a token goes to, and remembers which it went to.

Only the choice is replayed; the gates are the live scores of the chosen experts, so the router keeps its gradient
(R2, arXiv 2507.18071; R3, arXiv 2510.11370). Megatron-core's top-k asks `router.router_replay.get_replay_topk(...)`.

Shape legend: T packed tokens of a micro-batch, L MoE layers of the whole model, K experts a token, R tokens that this
rank's routers see (`T / cp / tp`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlite.megatron.forward import context_rank_positions
from rlite.megatron.microbatch import MicroBatch
from rlite.megatron.model import unwrap
from rlite.types import NATIVE_EXPERT, TokenRow

TopK = Callable[..., tuple[Tensor, Tensor]]


class LayerReplay:
    """The hook in one router. `moe_layer` counts the MoE layers of the whole model."""

    def __init__(self, moe_layer: int) -> None:
        self.moe_layer = moe_layer
        self.chosen_RK: Tensor | None = None
        """Experts of the last forward pass; None when the router did not ask."""
        self.mismatch: Tensor | None = None
        """fp64 `[2]`: fractions of experts that the live router would not have chosen, summed over tokens; replayed tokens."""
        self._wanted_RK: Tensor | None = None
        self._in_forward = False
        self._for_recompute: deque[Tensor | None] = deque()

    def begin(self, wanted_RK: Tensor | None, *, keep_for_recompute: bool) -> None:
        """The next pass is a forward pass in which tokens go to `wanted_RK`; None: the router's own choice."""
        self._wanted_RK, self._in_forward, self.chosen_RK = wanted_RK, True, None
        if keep_for_recompute:
            self._for_recompute.append(wanted_RK)

    def end(self) -> None:
        """What comes now is recomputation in the backward pass, of the micro-batches in the order of their forward passes.

        Raises RuntimeError when the router never asked: it would have trained on other experts than the recorded ones.
        """
        self._in_forward = False
        if self._wanted_RK is not None and self.chosen_RK is None:
            raise RuntimeError(
                f"the router of MoE layer {self.moe_layer} does not ask for experts to replay: Megatron-core's top-k was "
                "replaced (by a fused kernel or a patch for this device). Set model.algorithm.router_replay = none"
            )

    def reset(self) -> None:
        """Forgets what was kept for a backward pass."""
        self._for_recompute.clear()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, native: TopK
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) of each token, `[R, K]`; the contract of Megatron-core's `RouterReplay`."""
        wanted_RK = self._wanted_RK if self._in_forward else self._for_recompute.popleft()
        values_RK, own_RK = native(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if wanted_RK is None:
            experts_RK = own_RK
        else:
            replayed_R1 = wanted_RK[:, :1] != NATIVE_EXPERT
            experts_RK = torch.where(replayed_R1, wanted_RK, own_RK)
            values_RK = scores.gather(1, experts_RK)
        if self._in_forward:
            self.chosen_RK = experts_RK
            if wanted_RK is not None:
                self._compare(wanted_RK, own_RK)
        return values_RK, experts_RK

    def _compare(self, wanted_RK: Tensor, own_RK: Tensor) -> None:
        missing_R = 1.0 - (wanted_RK[:, :, None] == own_RK[:, None, :]).any(2).double().mean(1)
        replayed_R = (wanted_RK[:, 0] != NATIVE_EXPERT).double()
        sums = torch.stack([(missing_R * replayed_R).sum(), replayed_R.sum()])
        self.mismatch = sums if self.mismatch is None else self.mismatch + sums


class RouterReplay:
    """The hooks of all routers on this rank, and what they replay in each micro-batch.

    Works with tensor (sequence), context, pipeline and expert parallelism: routers see the tokens of their rank before
    any is sent away.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._layers: list[list[LayerReplay]] = []
        """Of each chunk."""
        for chunk in chunks:
            routers = [m for m in unwrap(chunk).modules() if isinstance(m, TopKRouter)]
            hooks = [LayerReplay(_moe_layer(router)) for router in routers]
            for router, hook in zip(routers, hooks, strict=True):
                router.router_replay = hook
            self._layers.append(hooks)
        config = unwrap(chunks[0]).config
        self.num_layers = sum(config.moe_layer_freq) if config.num_moe_experts else 0
        self.topk = config.moe_router_topk
        self._recomputes = config.recompute_granularity == "full" or (
            config.recompute_granularity == "selective" and "moe" in config.recompute_modules
        )

    @contextmanager
    def forward(self, chunk: int, batch: MicroBatch, *, with_gradient: bool) -> Iterator[None]:
        """Around the forward pass of a chunk."""
        layers = self._layers[chunk]
        wanted_RLK = self._local(batch) if layers else None
        for layer in layers:
            wanted_RK = None if wanted_RLK is None else wanted_RLK[:, layer.moe_layer]
            layer.begin(wanted_RK, keep_for_recompute=with_gradient and self._recomputes)
        yield
        for layer in layers:
            layer.end()

    @property
    def has_routers(self) -> bool:
        """Of the whole model, so equal on every rank."""
        return self.num_layers > 0

    def forget_mismatch(self) -> None:
        """What passes without an update compared counts for nothing."""
        for layer in self._all:
            layer.mismatch = None

    def reset(self) -> None:
        """Before a run over micro-batches: a run that failed may have left some for recomputation."""
        for layer in self._all:
            layer.reset()

    def chosen(self, chunk: int, batch: MicroBatch) -> Tensor:
        """int32 `[T, L, K]`, -1 in layers of other chunks and for tokens of other ranks: the last forward pass."""
        shape = (batch.tokens_T.numel(), self.num_layers, self.topk)
        experts_TLK = torch.full(shape, NATIVE_EXPERT, dtype=torch.int32, device=batch.tokens_T.device)
        here = router_positions(batch)
        for layer in self._layers[chunk]:
            assert layer.chosen_RK is not None
            experts_TLK[here, layer.moe_layer] = layer.chosen_RK.to(torch.int32)
        return experts_TLK

    def take_mismatch(self) -> tuple[float, float]:
        """(sum, number) of the fractions of experts that the live routers would not have chosen, over replayed tokens and
        layers of all ranks since the last call. Collective."""
        total = torch.zeros(2, dtype=torch.float64)
        for layer in self._all:
            if layer.mismatch is not None:
                total += layer.mismatch.cpu()
            layer.mismatch = None
        dist.all_reduce(total)
        return float(total[0]), float(total[1])

    @property
    def _all(self) -> Iterator[LayerReplay]:
        return (layer for layers in self._layers for layer in layers)

    def _local(self, batch: MicroBatch) -> Tensor | None:
        """int64 `[R, L, K]`."""
        if batch.experts_TLK is None:
            return None
        given = tuple(batch.experts_TLK.shape[1:])
        if given != (self.num_layers, self.topk):
            raise ValueError(
                f"TokenRow.experts: {given} (MoE layers, experts a token), but the model has {(self.num_layers, self.topk)}"
            )
        return batch.experts_TLK[router_positions(batch)].long()


def router_positions(batch: MicroBatch) -> Tensor:
    """int64 `[R]`: positions of T whose tokens this rank's routers see, in their order."""
    positions = context_rank_positions(batch)
    if positions is None:
        positions = torch.arange(batch.tokens_T.numel(), device=batch.tokens_T.device)
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return positions.chunk(tp)[rank]


class ExpertRecord:
    """The experts that the routers of this rank chose in each micro-batch of a run."""

    def __init__(self, replay: RouterReplay) -> None:
        self._replay = replay
        self._chosen: dict[int, Tensor] = {}

    def add(self, chunk: int, index: int, batch: MicroBatch) -> None:
        """After the forward pass of `chunk` over micro-batch number `index`."""
        chosen = self._replay.chosen(chunk, batch)
        self._chosen[index] = torch.maximum(self._chosen[index], chosen) if index in self._chosen else chosen

    def rows(self, batches: Sequence[MicroBatch], rows: Sequence[TokenRow]) -> list[Tensor]:
        """int16 `[tokens, L, K]` of each row, on the CPU of every tensor-, context- and pipeline-parallel peer. Collective."""
        experts: dict[int, Tensor] = {}
        tensor_and_pipeline = parallel_state.get_model_parallel_group()
        for number, batch in enumerate(batches):
            chosen_TLK = self._chosen[number]
            for peers in (tensor_and_pipeline, parallel_state.get_context_parallel_group()):
                if peers.size() > 1:
                    dist.all_reduce(chosen_TLK, op=dist.ReduceOp.MAX, group=peers)
            for start, index in zip(batch.starts, batch.row_indices, strict=False):
                stop = start + rows[index].token_ids.numel()
                experts[index] = chosen_TLK[start:stop].to(torch.int16).cpu()
        return [experts[index] for index in range(len(rows))]


def _moe_layer(router: TopKRouter) -> int:
    """Number of the router's layer among the MoE layers of the whole model."""
    return sum(router.config.moe_layer_freq[: router.layer_number - 1])
