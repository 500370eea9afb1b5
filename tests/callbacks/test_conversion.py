"""`EP2TPConversion`: what it tells the engine. The exchange itself is tested in tests/reshard."""

from types import SimpleNamespace

import pytest

from rlite.callbacks import EP2TPConversion, conversion
from rlite.memory import Ledger, PhaseMachine


def test_the_policy_version_is_the_number_of_rollout_steps_that_were_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions: list[int] = []
    engine = SimpleNamespace(weights=dict, finish_weight_update=versions.append)
    strategy = SimpleNamespace(engine=engine, policy=SimpleNamespace(local_tensors=dict), phases=PhaseMachine(Ledger()))
    progress = SimpleNamespace(current=SimpleNamespace(completed=0))
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)))
    monkeypatch.setattr(conversion, "colocated", lambda trainer: strategy)
    callback = EP2TPConversion()
    callback._transfer = SimpleNamespace(run=lambda source, destination: None)
    callback.setup(trainer, None, "fit")
    for completed in (0, 1, 7):
        progress.current.completed = completed
        strategy.phases._convert()
    assert versions == [0, 1, 7]
