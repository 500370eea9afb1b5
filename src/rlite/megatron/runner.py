"""Runs the policy over rows: log-probabilities without gradient, and optimizer steps.

All ranks call the same methods in the same order. Rows differ between data-parallel ranks and are equal on tensor-,
context- and pipeline-parallel peers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlite.layout.parallel import ParallelLayout
from rlite.megatron.balance import RouterBalance
from rlite.megatron.forward import forward_hidden, token_scores
from rlite.megatron.metrics import MetricSums
from rlite.megatron.microbatch import MicroBatch, agree_on_count, make_microbatch, pack_rows, round_up, spread_rows
from rlite.megatron.model import unwrap
from rlite.megatron.optimizer import McoreOptimizer
from rlite.megatron.options import MegatronOptions
from rlite.megatron.router_replay import ExpertRecord, RouterReplay
from rlite.types import LossFn, LossOutput, TokenRow, TokenScores, UpdateResult

LossStep = Callable[[torch.nn.Module, MicroBatch, Tensor], Any]
"""(last chunk, micro-batch, its hidden states) -> what Megatron's schedule expects of a loss function."""


class PolicyRunner:
    """Scores and updates the policy with Megatron's schedules.

    Args:
        chunks: this rank's chunks; wrapped by `wrap_for_training` when `update` is used.
        layout: the training layout.
        options: token budgets.
        optimizer: of the same chunks; None for a model that is only scored.
    """

    balances_experts = True
    """Whether the options' auxiliary loss and bias update rate are for this model."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        layout: ParallelLayout,
        *,
        options: MegatronOptions | None = None,
        optimizer: McoreOptimizer | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.layout = layout
        self.options = options or MegatronOptions()
        self.optimizer = optimizer
        self.replay = RouterReplay(self.chunks)
        self.balance = RouterBalance(self.chunks, self.options if self.balances_experts else MegatronOptions())
        for chunk in self.chunks:
            unwrap(chunk).config.finalize_model_grads_func = _sum_gradients

    @torch.no_grad()
    def score(
        self, rows: Sequence[TokenRow], *, temperature: float = 1.0, record_experts: bool = False
    ) -> list[TokenScores]:
        """Log-probabilities and entropies of the trained tokens of each row; one entry for each row. Collective.

        Routers send tokens to `TokenRow.experts` where given. With `record_experts` the scores tell the experts of every
        token. Raises ValueError when they are asked of a model without routers, or given for another model.
        """
        if record_experts and not self.replay.has_routers:
            raise ValueError("record_experts (model.algorithm.router_replay = R2): the model has no routers")
        self._set_training(False)
        batches = self._microbatches(rows)
        results: list[TokenScores] = []

        def collect(model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> None:
            results.append(self._token_scores(model, hidden, batch, temperature))

        record = ExpertRecord(self.replay) if record_experts else None
        self._run(batches, collect, forward_only=True, record=record)
        lengths = [row.num_loss_tokens for row in rows]
        values = torch.zeros(2, sum(lengths), dtype=torch.float32, device=self._device)
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for batch, scores in zip(batches, results, strict=False):
            pieces = torch.stack([scores.logprobs, scores.entropy]).split(batch.num_tokens_per_row, dim=1)
            for index, piece in zip(batch.row_indices, pieces, strict=False):
                values[:, offsets[index] : offsets[index] + piece.size(1)] = piece
        values = self.from_last_stage(values)
        experts = record.rows(batches, rows) if record is not None else [None] * len(rows)
        return [
            TokenScores(logprobs=row[0].clone(), entropy=row[1].clone(), experts=chosen)
            for row, chosen in zip(values.split(lengths, dim=1), experts, strict=True)
        ]

    def update(
        self,
        rows: Sequence[TokenRow],
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        step: Callable[[], Any] | None = None,
    ) -> UpdateResult:
        """One optimizer step on the sum of the partial losses of all micro-batches and data-parallel ranks. Collective.

        The step is skipped on every rank when a loss or the gradient norm is not finite. A rank without rows still
        takes part; there `loss_fn` is called with no rows, only to learn the metric keys. When experts were replayed, the
        metric sums give `moe/routing_mismatch`: the fraction of them that the live routers would not have chosen. An
        auxiliary loss (`RouterBalance`) is added to the gradients, not to the loss that is reported: it is `moe/aux_loss`.

        Args:
            step: what makes the optimizer step, when something else has to count it (Lightning's wrapped optimizer);
                it must end in `self.optimizer.step()`.
        """
        if self.optimizer is None:
            raise ValueError("PolicyRunner.update needs an optimizer: pass build_optimizer(chunks, config)")
        sums, losses = MetricSums(self._device), []
        self._accumulate(rows, loss_fn, temperature=temperature, sums=sums, losses=losses)
        metric_sums = sums.reduce() | self._routing_sums() | self.balance.metric_sums()
        if not self._all_finite(losses):
            return UpdateResult(metric_sums=metric_sums, grad_norm=float("nan"), applied=False)
        self.optimizer.last_step = None
        (step or self.optimizer.step)()
        result = self.optimizer.last_step
        assert result is not None, "`step` did not call optimizer.step()"
        if result.applied:
            self.balance.step()
        return UpdateResult(metric_sums=metric_sums, grad_norm=result.grad_norm, applied=result.applied)

    def _accumulate(
        self, rows: Sequence[TokenRow], loss_fn: LossFn, *, temperature: float, sums: MetricSums, losses: list[Tensor]
    ) -> None:
        """Zero gradients, then forward and backward over all micro-batches and reduction over ranks."""
        assert self.optimizer is not None
        self._set_training(True)
        self.replay.forget_mismatch()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.balance.begin(rows)

        def loss_of(model: torch.nn.Module, batch: MicroBatch, hidden: Tensor) -> Tensor:
            loss = hidden.flatten()[:0].sum().float()  # 0, but connected: its backward runs every collective
            if batch.row_indices:
                output = loss_fn(batch.row_indices, self._token_scores(model, hidden, batch, temperature))
                sums.add(output.metric_sums)
                loss = loss + output.loss
            elif not rows:
                sums.add_keys(_call_without_rows(loss_fn, hidden.device).metric_sums)
            losses.append(loss.detach())
            return loss

        self._run(self._microbatches(rows), loss_of, forward_only=False)

    def _routing_sums(self) -> dict[str, float]:
        if not self.replay.has_routers:
            return {}
        missing, count = self.replay.take_mismatch()
        return {"count:routed": count, "routed:moe/routing_mismatch": missing} if count else {}

    def _run(
        self,
        batches: Sequence[MicroBatch],
        last_stage: LossStep,
        *,
        forward_only: bool,
        record: ExpertRecord | None = None,
    ) -> None:
        """Megatron's schedule over the micro-batches; `last_stage` sees the hidden states of each."""

        def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            (index, batch), chunk = next(iterator), self.chunks.index(model)
            if not forward_only:
                self.balance.expect(chunk, batch)
            with self.replay.forward(chunk, batch, with_gradient=not forward_only):
                hidden = forward_hidden(model, batch)
            if record is not None:
                record.add(chunk, index, batch)
            return hidden, partial(_schedule_loss, last_stage, model, batch)

        self.replay.reset()
        iterators = [iter(enumerate(batches)) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0].tokens_T.numel(),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _microbatches(self, rows: Sequence[TokenRow]) -> list[MicroBatch]:
        layout, max_tokens = self.layout, self.options.max_tokens_per_microbatch
        row_multiple = (
            2 * layout.cp if layout.cp > 1 else 1
        )  # context parallelism cuts every row, tensor parallelism all
        lengths = [round_up(row.token_ids.numel(), row_multiple) for row in rows]
        count = agree_on_count(
            len(pack_rows(lengths, max_tokens=max_tokens)), multiple_of=layout.pp if layout.vpp > 1 else 1
        )
        return [
            make_microbatch(
                rows, indices, row_multiple=row_multiple, total_multiple=row_multiple * layout.tp, device=self._device
            )
            for indices in spread_rows(lengths, count=count, max_tokens=max_tokens)
        ]

    def _token_scores(
        self, model: torch.nn.Module, hidden: Tensor, batch: MicroBatch, temperature: float
    ) -> TokenScores:
        chunk_tokens = self.options.logprob_chunk_tokens
        return token_scores(model, hidden, batch, temperature=temperature, chunk_tokens=chunk_tokens)

    def _all_finite(self, losses: Sequence[Tensor]) -> bool:
        finite = all(bool(torch.isfinite(loss)) for loss in losses)
        flag = torch.tensor(int(finite))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def from_last_stage(self, values: Tensor) -> Tensor:
        """`values` of the last pipeline stage, on every stage."""
        if self.layout.pp == 1 or not values.numel():
            return values
        shared = values.to(self._device, copy=True)
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(shared, src=source, group=parallel_state.get_pipeline_model_parallel_group())
        return shared

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.train(training)

    @property
    def _device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device


def _schedule_loss(
    last_stage: LossStep, model: torch.nn.Module, batch: MicroBatch, hidden: Tensor, non_loss_data: bool = False
) -> Any:
    """Megatron's contract: (loss, number of tokens, report). The triple form is not divided by anything."""
    result = last_stage(model, batch, hidden)
    return None if non_loss_data else (result, torch.zeros((), dtype=torch.int), None)


def _sum_gradients(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction without its division by the number of tokens: losses are partial sums already."""
    finalize_model_grads(chunks, None, **kwargs)


def _call_without_rows(loss_fn: LossFn, device: torch.device) -> LossOutput:
    empty = torch.zeros(0, dtype=torch.float32, device=device)
    return loss_fn((), TokenScores(logprobs=empty, entropy=empty))
