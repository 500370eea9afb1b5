"""What an engine may do to the process, and what the trainer sees of it."""

import gc
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from rlite.rollout.process_guard import ProcessGuard, console_to_file, unfrozen_heap


def test_environment_changes_are_seen_inside_only_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLITE_KEPT", "trainer")
    monkeypatch.setenv("RLITE_DELETED", "trainer")
    monkeypatch.delenv("RLITE_ADDED", raising=False)
    guard = ProcessGuard({"RLITE_GIVEN": "engine"})
    before = dict(os.environ)
    with guard:
        assert os.environ["RLITE_GIVEN"] == "engine"
        os.environ.update(RLITE_KEPT="engine", RLITE_ADDED="engine")
        del os.environ["RLITE_DELETED"]
    assert dict(os.environ) == before
    with guard:
        assert os.environ["RLITE_KEPT"] == os.environ["RLITE_ADDED"] == os.environ["RLITE_GIVEN"] == "engine"
        assert "RLITE_DELETED" not in os.environ
    assert dict(os.environ) == before


def test_random_states_are_the_trainers_on_leaving_also_after_an_error() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with pytest.raises(KeyError), ProcessGuard({}):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        raise KeyError
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_replaced_functions_are_in_force_inside_only() -> None:
    original, guard = torch.set_num_threads, ProcessGuard({})
    replacement = print
    with guard:
        torch.set_num_threads = replacement
    assert torch.set_num_threads is original
    with guard:
        assert torch.set_num_threads is replacement
    assert torch.set_num_threads is original


def test_deprecation_warnings_are_silent_inside_and_heard_after() -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with ProcessGuard({}):
            warnings.warn("inside", FutureWarning, stacklevel=1)
            warnings.warn("problem", RuntimeWarning, stacklevel=1)
        warnings.warn("after", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in heard] == ["problem", "after"]


def test_a_heap_frozen_inside_is_unfrozen_but_one_frozen_before_stays() -> None:
    gc.unfreeze()
    with unfrozen_heap():
        gc.freeze()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with unfrozen_heap():
        gc.freeze()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_console_output_goes_to_the_file_from_python_and_below(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "sub" / "log.txt"
    for _ in range(2):
        with console_to_file(log):
            print("python out")
            print("python err", file=sys.stderr)
            os.write(1, b"c out\n")
            os.write(2, b"c err\n")
    print("after")
    assert capfd.readouterr() == ("after\n", "")
    assert sorted(log.read_text().split("\n")) == sorted(["", *["python out", "python err", "c out", "c err"] * 2])
