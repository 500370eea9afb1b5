"""The comparison of engine and trainer after the first weight sync, when only one of two engines is broken."""

from types import SimpleNamespace

import pytest
import torch

from rlite.callbacks.engine_check import EngineCheck
from rlite.layout.parallel import EngineLayout
from rlite.types import Completion, TokenScores
from tests.helpers.world import run_world


def _check(broken: dict[int, float]) -> tuple[list[list[int]], str]:
    """(rows that this rank would score, the error it raises); the broken engine samples another, shorter completion."""
    rank = torch.distributed.get_rank()
    tokens = (1, 2, 3) if rank not in broken else (9,)
    completion = Completion(token_ids=tokens, logprobs=(broken.get(rank, -1.0),) * len(tokens), finish_reason="stop")
    engine = SimpleNamespace(generate=lambda requests: [completion for _ in requests])

    def score(rows: list, *, temperature: float) -> list[TokenScores]:
        return [TokenScores(logprobs=-torch.ones(row.num_loss_tokens), entropy=torch.zeros(0)) for row in rows]

    strategy = SimpleNamespace(
        world_size=2,
        policy=SimpleNamespace(architecture=SimpleNamespace(vocab_size=50)),
        enter=lambda phase: None,
        score=score,
    )
    check = EngineCheck.sample(strategy, engine, EngineLayout(tp=1), temperature=1.0)
    try:
        check.compare(strategy, tolerance=0.1)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    return [row.token_ids.tolist()[6:] for row in check.rows], error


@pytest.mark.parametrize("logprob", [-3.0, float("nan")])
def test_every_rank_scores_the_samples_of_every_engine_and_all_of_them_stop(logprob: float) -> None:
    (rows, error), (rows_1, error_1) = run_world(2, _check, {1: logprob})
    assert rows == rows_1 == [[1, 2, 3], [1, 2, 3], [9], [9]]
    assert error == error_1
    assert "engine and trainer disagree" in error


def test_engines_that_agree_pass() -> None:
    assert [error for _, error in run_world(2, _check, {})] == ["", ""]
