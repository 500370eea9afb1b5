"""Log-probabilities and entropy from hidden states, without the logits of a whole batch.

The vocabulary is split over tensor-parallel ranks and the tokens are processed in chunks: at most
`chunk_tokens * vocab / tp` logits exist at any time, in the forward and in the backward pass (which recomputes them).

Shape legend: N tokens of interest, C tokens of one chunk, V local vocabulary (padded), H hidden size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_EXCLUDED = -1e30
"""Logit of a padding row of the vocabulary. Finite: its probability 0 times infinity would be NaN."""


def vocab_parallel_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """fp32 log-probabilities `[N]` of `targets_N` and entropies `[N]` (nats) at `temperature`.

    Args:
        hidden_NH: last hidden states, equal on every rank of `group`.
        weight_VH: this rank's rows of the LM head; logits are computed in its dtype, everything after in fp32.
        targets_N: int64 token ids over the whole vocabulary.
        vocab_size: rows of the LM head that are tokens; later ones are padding and excluded.
        group: tensor-parallel group; None for one rank.

    The gradient of `hidden_NH` is this rank's PART of it (to be summed over the group, as the reduce-scatter of
    sequence parallelism does); that of `weight_VH` is complete.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: log-probabilities need a positive temperature")
    head = _Head(weight_VH, vocab_size, 1.0 / temperature, group)
    return _ChunkedLogprobs.apply(hidden_NH, weight_VH, targets_N, head, chunk_tokens)


class _Head:
    """The LM head of one rank: logits, and sums over the whole vocabulary."""

    def __init__(self, weight_VH: Tensor, vocab_size: int, scale: float, group: dist.ProcessGroup | None) -> None:
        self.scale = scale
        self.group = group if group is not None and group.size() > 1 else None
        rows = weight_VH.size(0)
        self.first = rows * self.group.rank() if self.group else 0
        self.num_tokens = min(max(vocab_size - self.first, 0), rows)

    def logits(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """fp32 `[C, V]`, divided by the temperature."""
        logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH).float().mul_(self.scale)
        logits_CV[:, self.num_tokens :] = _EXCLUDED
        return logits_CV

    def local_targets(self, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each target on this rank (0 where it is elsewhere), and whether it is here."""
        local = targets_C - self.first
        here = (local >= 0) & (local < self.num_tokens)
        return torch.where(here, local, 0), here

    def all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, head: _Head, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        log_z_N = hidden_NH.new_empty(hidden_NH.size(0), dtype=torch.float32)
        logprob_N, entropy_N = torch.empty_like(log_z_N), torch.empty_like(log_z_N)
        for start in range(0, hidden_NH.size(0), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            log_z_C, target_C, mean_C = _chunk_sums(head, hidden_NH[chunk], weight_VH, targets_N[chunk])
            log_z_N[chunk] = log_z_C
            logprob_N[chunk] = target_C - log_z_C
            entropy_N[chunk] = log_z_C - mean_C
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, log_z_N, entropy_N)
        ctx.head, ctx.chunk_tokens = head, chunk_tokens
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_logprob_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        """With p = softmax(z): d logprob / d z_j = [j = target] - p_j; d entropy / d z_j = -p_j (log p_j + entropy)."""
        hidden_NH, weight_VH, targets_N, log_z_N, entropy_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for start in range(0, hidden_NH.size(0), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            grad_CV = _chunk_gradient(
                ctx.head,
                hidden_NH[chunk],
                weight_VH,
                targets_N[chunk],
                log_z_N[chunk],
                entropy_N[chunk],
                grad_logprob_N[chunk],
                grad_entropy_N[chunk],
            )
            grad_hidden_NH[chunk] = grad_CV @ weight_VH
            grad_weight_VH += grad_CV.t() @ hidden_NH[chunk]
            del grad_CV  # before the next chunk's logits
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None


def _chunk_sums(head: _Head, hidden_CH: Tensor, weight_VH: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 `[C]` each: log of the partition sum, logit of the target, mean logit under the softmax.

    A function of its own, so that a chunk's logits are gone before the next chunk makes its own.
    """
    logits_CV = head.logits(hidden_CH, weight_VH)
    peak_C = head.all_reduce(logits_CV.amax(-1), dist.ReduceOp.MAX)
    local_C, here_C = head.local_targets(targets_C)
    target_C = logits_CV.gather(-1, local_C[:, None])[:, 0] * here_C
    exp_CV = (logits_CV - peak_C[:, None]).exp_()
    sums = torch.stack([exp_CV.sum(-1), target_C, exp_CV.mul_(logits_CV).sum(-1)])
    z_C, target_C, weighted_C = head.all_reduce(sums, dist.ReduceOp.SUM)
    return z_C.log() + peak_C, target_C, weighted_C / z_C


def _chunk_gradient(
    head: _Head,
    hidden_CH: Tensor,
    weight_VH: Tensor,
    targets_C: Tensor,
    log_z_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor,
) -> Tensor:
    """`[C, V]`, gradient of the product of hidden states and LM head, in its dtype."""
    log_p_CV = head.logits(hidden_CH, weight_VH).sub_(log_z_C[:, None])
    p_CV = log_p_CV.exp()
    grad_CV = log_p_CV.add_(entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
    grad_CV.sub_(grad_logprob_C[:, None]).mul_(p_CV)
    del p_CV
    local_C, here_C = head.local_targets(targets_C)
    grad_CV.scatter_add_(-1, local_C[:, None], (grad_logprob_C * here_C)[:, None])
    return grad_CV.mul_(head.scale).to(weight_VH.dtype)
