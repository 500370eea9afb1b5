"""Chunked vocabulary-parallel log-probabilities against a plain fp64 softmax."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.logprob_memory import chunked, peak_bytes, whole
from rlite.megatron.logprobs import vocab_parallel_logprobs
from tests.helpers.world import run_world

N, H, VOCAB, TEMPERATURE = 11, 8, 13, 0.7


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(N, H, generator=generator)
    weight_VH = torch.randn(VOCAB, H, generator=generator)
    targets_N = torch.randint(0, VOCAB, (N,), generator=generator)
    coefficients = torch.randn(2, N, generator=generator)
    return hidden_NH, weight_VH, targets_N, coefficients


def _reference() -> dict[str, Tensor]:
    hidden_NH, weight_VH, targets_N, coefficients = _inputs()
    hidden_NH, weight_VH = (t.double().requires_grad_() for t in (hidden_NH, weight_VH))
    log_p_NV = (hidden_NH @ weight_VH.t() / TEMPERATURE).log_softmax(-1)
    logprobs = log_p_NV.gather(-1, targets_N[:, None])[:, 0]
    entropy = -(log_p_NV.exp() * log_p_NV).sum(-1)
    (coefficients[0] * logprobs + coefficients[1] * entropy).sum().backward()
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden_NH.grad,
        "weight": weight_VH.grad,
    }


def _shard(chunk_tokens: int) -> dict[str, Tensor]:
    """This rank's quarter (or half) of a vocabulary padded with rows of huge values that must not count."""
    hidden_NH, weight_VH, targets_N, coefficients = _inputs()
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = -(-VOCAB // size)
    padded = torch.cat([weight_VH, torch.full((rows * size - VOCAB, H), 1e4)])
    shard = padded[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    hidden_NH.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        hidden_NH,
        shard,
        targets_N,
        vocab_size=VOCAB,
        temperature=TEMPERATURE,
        group=dist.group.WORLD,
        chunk_tokens=chunk_tokens,
    )
    (coefficients[0] * logprobs + coefficients[1] * entropy).sum().backward()
    gradient = hidden_NH.grad.clone()
    dist.all_reduce(gradient)
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "hidden": gradient, "weight": shard.grad}


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_and_gradients_equal_a_full_softmax(world_size: int, chunk_tokens: int) -> None:
    expected = _reference()
    per_rank = run_world(world_size, _shard, chunk_tokens)
    for rank in per_rank:
        for key in ("logprobs", "entropy", "hidden"):
            torch.testing.assert_close(rank[key].double(), expected[key], rtol=1e-5, atol=1e-5)
    weight = torch.cat([rank["weight"] for rank in per_rank])
    torch.testing.assert_close(weight[:VOCAB].double(), expected["weight"], rtol=1e-5, atol=1e-5)
    assert (weight[VOCAB:] == 0).all(), "padding rows of the vocabulary must not be trained"


def test_no_more_logits_than_a_chunk_exist() -> None:
    """The largest tensor made in forward and backward is [chunk, vocabulary], whatever the number of tokens."""
    vocabulary, chunk_tokens = 512, 16
    hidden_NH = torch.randn(256, 4, requires_grad=True)
    weight_VH = torch.randn(vocabulary, 4, requires_grad=True)
    targets_N = torch.randint(0, vocabulary, (256,))
    with _LargestTensor() as largest:
        logprobs, entropy = vocab_parallel_logprobs(
            hidden_NH, weight_VH, targets_N, vocab_size=vocabulary, chunk_tokens=chunk_tokens
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.numel == chunk_tokens * vocabulary


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("backward", [False, True])
def test_peak_memory_grows_with_the_chunk_and_not_with_tokens_times_vocabulary(backward: bool) -> None:
    sizes = {"vocabulary": 2048, "hidden": 8, "backward": backward}
    chunk_bytes = 16 * 2048 * 4
    few, many = (peak_bytes(chunked(16), tokens=tokens, **sizes) for tokens in (64, 1024))
    head_bytes = 2 * 2048 * 8 * 4 if backward else 0  # the gradient of the LM head, and what a chunk adds to it
    assert 2 * chunk_bytes <= few <= 2.1 * chunk_bytes + head_bytes, "two matrices: logits and their softmax"
    hidden_bytes = 8 * 4 if backward else 0  # of one token: its gradient
    assert (many - few) / (1024 - 64) <= hidden_bytes + 32, "a token keeps some numbers, never a row of the vocabulary"
    doubled = peak_bytes(chunked(32), tokens=64, **sizes)
    assert 1.9 * chunk_bytes <= doubled - few <= 2.1 * chunk_bytes
    assert peak_bytes(whole, tokens=64, **sizes) > 2.5 * doubled, "what the chunks save"


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature = 0"):
        vocab_parallel_logprobs(*_inputs()[:3], vocab_size=VOCAB, temperature=0)


def test_no_tokens_give_no_scores() -> None:
    hidden_NH, weight_VH, targets_N, _ = _inputs()
    logprobs, entropy = vocab_parallel_logprobs(hidden_NH[:0], weight_VH, targets_N[:0], vocab_size=VOCAB)
    assert logprobs.shape == entropy.shape == (0,)
