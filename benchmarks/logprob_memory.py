"""Memory of the log-probability pass: live bytes of tensors by chunk size and number of tokens, against whole logits.

    python benchmarks/logprob_memory.py

Counts, on the CPU, every storage that an operator makes while it lives: the peak beyond hidden states, LM head and targets.
Prints a table and, last, one JSON line.
"""

import argparse
import json
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlite.megatron.logprobs import vocab_parallel_logprobs

Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """`peak`: most bytes of storages alive at one time that operators made in this block; those of `known` do not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._see(value.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self.live += nbytes
            self._seen[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes))

    def _gone(self, key: int, nbytes: int) -> None:
        self.live -= nbytes
        del self._seen[key]


def peak_bytes(scores: Scores, *, tokens: int, vocabulary: int, hidden: int, backward: bool) -> int:
    """Beyond hidden states `[tokens, hidden]`, LM head `[vocabulary, hidden]` and targets."""
    hidden_NH = torch.randn(tokens, hidden, requires_grad=backward)
    weight_VH = torch.randn(vocabulary, hidden, requires_grad=backward)
    targets_N = torch.randint(0, vocabulary, (tokens,))
    with LiveBytes([hidden_NH, weight_VH, targets_N]) as memory:
        logprobs_N, entropy_N = scores(hidden_NH, weight_VH, targets_N)
        if backward:
            (logprobs_N.sum() + entropy_N.sum()).backward()
    return memory.peak


def chunked(chunk_tokens: int) -> Scores:
    def scores(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        return vocab_parallel_logprobs(
            hidden_NH, weight_VH, targets_N, vocab_size=weight_VH.size(0), chunk_tokens=chunk_tokens
        )

    return scores


def whole(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """What the pass would be with the logits of all tokens."""
    log_p_NV = (hidden_NH @ weight_VH.t()).log_softmax(-1)
    return log_p_NV.gather(1, targets_N[:, None])[:, 0], -(log_p_NV.exp() * log_p_NV).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024])
    options = parser.parse_args()
    rows = []
    ways = [(str(chunk), chunked(chunk)) for chunk in options.chunks] + [("all", whole)]
    header = "".join(f"{tokens:>10}" for tokens in options.tokens)
    print(f"MiB at the peak; vocabulary {options.vocabulary}, hidden size {options.hidden}, fp32\n")
    for backward in (False, True):
        print(f"{'forward and backward' if backward else 'forward':<24}{header}  tokens")
        for name, scores in ways:
            sizes = dict(vocabulary=options.vocabulary, hidden=options.hidden, backward=backward)
            peaks = [peak_bytes(scores, tokens=tokens, **sizes) for tokens in options.tokens]
            print(f"  chunk of {name:<13}" + "".join(f"{peak / MIB:>10.1f}" for peak in peaks))
            rows += [
                {"chunk_tokens": name, "tokens": tokens, "backward": backward, "peak_bytes": peak}
                for tokens, peak in zip(options.tokens, peaks, strict=True)
            ]
    print(json.dumps({"vocabulary": options.vocabulary, "hidden": options.hidden, "peaks": rows}))


if __name__ == "__main__":
    main()
