"""`HealthWarnings` says a thing once, and again only when it stays true for long."""

from types import SimpleNamespace

import pytest
import torch

from rlite.callbacks import HealthWarnings


def step(callback: HealthWarnings, index: int, *, is_global_zero: bool = True, **metrics: float) -> None:
    values = {name.replace("__", "/"): torch.tensor(value) for name, value in metrics.items()}
    trainer = SimpleNamespace(callback_metrics=values, is_global_zero=is_global_zero)
    callback.on_train_batch_end(trainer, None, None, None, index)  # type: ignore[arg-type]


def test_a_lasting_warning_is_one_line_every_n_steps(capsys: pytest.CaptureFixture[str]) -> None:
    callback = HealthWarnings(every_n_steps=3)
    for index in range(7):
        step(callback, index, rollout__ess=0.1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"warning, rollout {n}" for n in (1, 4, 7)]
    assert "effective sample size 0.10 < 0.3" in lines[0]


def test_different_warnings_do_not_silence_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    callback = HealthWarnings()
    step(callback, 0, rollout__ess=0.1)
    step(callback, 1, rollout__ess=0.1, frac_reward_zero_std=1.0)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    step(HealthWarnings(), 0, is_global_zero=False, rollout__ess=0.1)
    assert capsys.readouterr().out == ""


def test_a_resumed_run_remembers_peak_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = HealthWarnings(), HealthWarnings()
    step(first, 0, entropy=2.0, rollout__ess=0.1)
    second.load_state_dict(first.state_dict())
    capsys.readouterr()
    step(second, 1, entropy=0.01, rollout__ess=0.1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "peak 2.000" in lines[0]
