"""Reward of generated reasoning-gym tasks: the task's own scorer."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any


def reasoning_gym_score(
    completions: Sequence[str],
    question: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    answer_pattern: str | None = None,
) -> list[float]:
    """Score in [0, 1] that the reasoning-gym task gives the completion.

    Args:
        completions: texts.
        question, answer, metadata: columns of the source `kind: reasoning_gym`.
        answer_pattern: regular expression whose last match (first group, if it has one) is the answer to score; a
            completion without a match is scored 0. None scores the whole completion without surrounding white space.
    """
    rows = zip(completions, question, answer, metadata, strict=True)
    return [
        _score(_extract(completion, answer_pattern), {"question": q, "answer": a, "metadata": m})
        for completion, q, a, m in rows
    ]


def _score(given: str | None, entry: dict[str, Any]) -> float:
    return 0.0 if given is None else float(_scorer(entry["metadata"]["source_dataset"])(given, entry))


@lru_cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _extract(completion: str, pattern: str | None) -> str | None:
    if pattern is None:
        return completion.strip()
    matches = list(re.finditer(pattern, completion, re.DOTALL))
    if not matches:
        return None
    return matches[-1].group(1 if matches[-1].re.groups else 0).strip()
