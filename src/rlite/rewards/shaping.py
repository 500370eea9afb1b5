"""Rewards on form rather than content: format, length, repetition."""

import re
from collections.abc import Hashable, Sequence

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL)


def format_think(completions: Sequence[str]) -> list[float]:
    """1 where the completion is `<think>...</think>` and then the answer, with one such block, else 0 (as in TRL)."""
    return [float(_THINK.match(c) is not None) for c in completions]


def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_tokens: int, cache_tokens: int, factor: float = 1.0
) -> list[float]:
    """DAPO's soft punishment of long completions (arXiv 2503.14476, eq. 13), times `factor`; values in `[-factor, 0]`.

    0 up to `max_tokens - cache_tokens` tokens, then falling linearly, `-factor` from `max_tokens` on.

    Raises:
        ValueError: unless `0 < cache_tokens <= max_tokens`.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"soft_overlong: needs 0 < cache_tokens <= max_tokens, got {cache_tokens} and {max_tokens}")
    excess = [max(0, len(ids) - (max_tokens - cache_tokens)) for ids in completion_ids]
    return [-factor * min(1.0, tokens / cache_tokens) for tokens in excess]


def repetition_penalty(completion_ids: Sequence[Sequence[int]], *, ngram: int = 3, factor: float = 1.0) -> list[float]:
    """`-factor * (1 - distinct n-grams / n-grams)` of the tokens; 0 when nothing repeats or fewer than `ngram` tokens.

    Raises:
        ValueError: `ngram` below 1.
    """
    if ngram < 1:
        raise ValueError(f"repetition_penalty: ngram = {ngram}, must be at least 1")
    return [-factor * _repeated_share(ids, ngram) for ids in completion_ids]


def _repeated_share(ids: Sequence[Hashable], ngram: int) -> float:
    ngrams = [tuple(ids[start : start + ngram]) for start in range(len(ids) - ngram + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
