"""Balance of the experts: an auxiliary loss, and a router bias that moves against the load.

Megatron-core has both, for micro-batches without padding whose gradients are divided by their tokens: its auxiliary loss
takes all packed sequences for one, counts padding, and weighs micro-batches for a division that partial losses do without;
its bias also moves when the optimizer step is skipped. So Megatron-core is told of neither, and both are made here from its
routing scores.

Shape legend: R tokens that this rank's routers see, S groups of tokens that are balanced together, E experts.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlite.megatron.microbatch import MicroBatch
from rlite.megatron.model import unwrap
from rlite.megatron.options import MegatronOptions
from rlite.megatron.router_replay import router_positions
from rlite.types import TokenRow


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGroups:
    """The tokens of one micro-batch that are balanced together: each sequence, or all of them. Padding is in no group."""

    group_R: Tensor
    """int64, group of each token of this rank; S where it is padding."""
    tokens_S: Tensor
    """fp32, tokens of each group on all tensor- and context-parallel ranks."""
    weight_S: Tensor
    """fp32, what each group counts in the auxiliary loss; sums to 1 over micro-batches and data-parallel ranks."""

    def sums(self, values_RE: Tensor) -> Tensor:
        """`[S, E]`: sum over the tokens of each group on this rank."""
        num_groups = self.tokens_S.numel()
        zeros = values_RE.new_zeros(num_groups + 1, values_RE.size(1))
        return zeros.index_add(0, self.group_R, values_RE)[:num_groups]


class LayerBalance:
    """The hook in one router: sees what it does with each micro-batch that has a gradient."""

    def __init__(self, router: TopKRouter, *, coeff: float) -> None:
        self.router = router
        self.coeff = coeff
        self.load_E = torch.zeros(router.config.num_moe_experts, dtype=torch.int64, device=router.weight.device)
        """Tokens of this rank sent to each expert since `reset`."""
        self.aux_loss = torch.zeros((), dtype=torch.float32, device=router.weight.device)
        """This rank's part of the auxiliary loss since `reset`, without the coefficient."""
        self._expected: deque[TokenGroups] = deque()
        # The class's method, not the instance's: a runner made before may have left its hook there.
        self._native = type(router).routing
        router.routing = self.routing

    def reset(self) -> None:
        self._expected.clear()
        self.load_E.zero_()
        self.aux_loss.zero_()

    def expect(self, groups: TokenGroups) -> None:
        """The next micro-batch of this layer. Its pass with gradient may come in the backward pass (recompute)."""
        self._expected.append(groups)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """In place of `TopKRouter.routing`: the same gates and routes, the loss attached to the gates."""
        probs_RE, routes_RE = self._native(self.router, logits, padding_mask=padding_mask)
        if not (self.router.training and torch.is_grad_enabled()):
            return probs_RE, routes_RE
        groups = self._expected.popleft()
        self.load_E += groups.sums(routes_RE.long()).sum(0)
        if self.coeff and groups.tokens_S.numel():
            loss = self._aux_loss(logits.view(routes_RE.shape), groups)
            self.aux_loss += loss.detach()
            probs_RE = MoEAuxLossAutoScaler.apply(probs_RE, self.coeff * loss)
        return probs_RE, routes_RE

    def _aux_loss(self, logits_RE: Tensor, groups: TokenGroups) -> Tensor:
        """Summed over tensor- and context-parallel ranks: weighted mean over groups of E / (k T^2) * sum_e n_e sum_t s_te.

        n: tokens of the group whose own top k experts (without bias and groups of experts) hold e; s: scores over all
        experts, normalised. 1 when balanced. arXiv 2101.03961 (2), 2412.19437 (17)-(20).
        """
        topk, num_experts = self.router.topk, logits_RE.size(1)
        chosen_RE, scores_RE = compute_routing_scores_for_aux_loss(logits_RE, topk, self.router.score_function)
        count_SE = groups.sums(chosen_RE.to(scores_RE.dtype)).detach()
        if self.router.tp_cp_group.size() > 1:
            dist.all_reduce(count_SE, group=self.router.tp_cp_group)
        products_S = (count_SE * groups.sums(scores_RE)).sum(1)
        return (groups.weight_S * products_S * num_experts / (topk * groups.tokens_S.square())).sum()


class RouterBalance:
    """Auxiliary loss and bias update of all routers on this rank; does nothing where both are off.

    `seq_aux_loss` is the mean over the SEQUENCES of an update of each one's loss: it does not depend on micro-batches,
    data-parallel size or layout. `aux_loss` is the mean over TOKENS of the loss of the micro-batch that they are in: it depends
    on which sequences share a micro-batch, which is its definition, and on nothing else. The coefficient multiplies the
    sum over layers. Only updates add it, scoring never does.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], options: MegatronOptions) -> None:
        self._kind = options.moe_router_load_balancing_type
        self._rate = options.moe_router_bias_update_rate
        self.is_active = self._kind != "none" or self._rate > 0
        self._layers: list[list[LayerBalance]] = []
        """Of each chunk."""
        if self.is_active:
            coeff = options.moe_aux_loss_coeff
            self._layers = [[LayerBalance(router, coeff=coeff) for router in routers_of(chunk)] for chunk in chunks]
        config = unwrap(chunks[0]).config
        self._num_layers = sum(config.moe_layer_freq) if config.num_moe_experts else 0
        self._totals = (0.0, 0.0)

    def begin(self, rows: Sequence[TokenRow]) -> None:
        """Before the forward passes of an update on `rows` of this data-parallel rank. Collective."""
        if not self.is_active:
            return
        for layer in self._all:
            layer.reset()
        totals = torch.tensor([sum(row.token_ids.numel() for row in rows), len(rows)], dtype=torch.float64)
        dist.all_reduce(
            totals
        )  # over the default group, which takes CPU tensors on any device; peers count the same rows
        totals /= dist.get_world_size() / parallel_state.get_data_parallel_world_size()
        self._totals = (float(totals[0]), float(totals[1]))

    def expect(self, chunk: int, batch: MicroBatch) -> None:
        """Before the forward pass of `chunk` over a micro-batch that has a gradient."""
        if self.is_active and self._layers[chunk]:
            groups = self._groups(batch)
            for layer in self._layers[chunk]:
                layer.expect(groups)

    def metric_sums(self) -> dict[str, float]:
        """`moe/aux_loss`: mean over layers, without the coefficient; 1 is balance. Collective, when there is such a loss."""
        if self._kind == "none":
            return {}
        total = torch.zeros((), dtype=torch.float64)
        for layer in self._all:
            total += layer.aux_loss.cpu()
        dist.all_reduce(total)
        return {"count:balanced": 1.0, "balanced:moe/aux_loss": float(total) / self._num_layers}

    @torch.no_grad()
    def step(self) -> None:
        """After an optimizer step: each bias moves by rate * sign(mean load - load) (arXiv 2408.15664). Collective."""
        layers = list(self._all)
        if self._rate == 0 or not layers:
            return
        load_LE = torch.stack([layer.load_E for layer in layers])
        dist.all_reduce(load_LE, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        direction_LE = torch.sign(load_LE.sum(1, keepdim=True) - load_LE.size(1) * load_LE)
        for layer, direction_E in zip(layers, direction_LE, strict=True):
            layer.router.expert_bias.add_(direction_E.to(torch.float32), alpha=self._rate)

    @property
    def _all(self) -> Iterator[LayerBalance]:
        return (layer for layers in self._layers for layer in layers)

    def _groups(self, batch: MicroBatch) -> TokenGroups:
        device, lengths = batch.tokens_T.device, batch.row_lengths
        num_tokens, num_sequences = self._totals
        whole = self._kind != "seq_aux_loss"
        group_T = torch.full_like(batch.tokens_T, 1 if whole and lengths else len(lengths))
        for index, (start, length) in enumerate(zip(batch.starts, lengths, strict=False)):
            group_T[start : start + length] = 0 if whole else index
        tokens = [sum(lengths)] if whole and lengths else list(lengths)
        weights = [count / num_tokens for count in tokens] if whole else [1 / num_sequences] * len(tokens)
        return TokenGroups(
            group_R=group_T[router_positions(batch)],
            tokens_S=torch.tensor(tokens, dtype=torch.float32, device=device),
            weight_S=torch.tensor(weights, dtype=torch.float32, device=device),
        )


def routers_of(chunk: torch.nn.Module) -> list[TopKRouter]:
    """In the order of their layers."""
    return [module for module in unwrap(chunk).modules() if isinstance(module, TopKRouter)]


def router_biases(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    """fp32 `[E]` of each router on this rank that has a bias."""
    routers = [router for chunk in chunks for router in routers_of(chunk)]
    return [router.expert_bias for router in routers if router.expert_bias is not None]


@contextmanager
def with_router_biases(chunks: Sequence[torch.nn.Module], values: Sequence[Tensor]) -> Iterator[None]:
    """The routers of `chunks` use `values`, in the order of `router_biases`, until the end of the block."""
    biases = router_biases(chunks)
    own = [bias.clone() for bias in biases]
    for bias, value in zip(biases, values, strict=True):
        bias.copy_(value)
    try:
        yield
    finally:
        for bias, value in zip(biases, own, strict=True):
            bias.copy_(value)
