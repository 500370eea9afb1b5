"""A trainer that runs again: `trainer.fit(...)`, then `trainer.validate(...)`."""

from types import SimpleNamespace

import torch
from lightning.pytorch.trainer.states import TrainerFn

from rlite.memory import FlatBuffers, OffloadPolicy, Phase
from rlite.memory.phases import POLICY
from rlite.strategies import ColocatedRLStrategy


def test_the_next_run_starts_with_the_weights_on_the_device_and_an_idle_machine() -> None:
    strategy, weights = ColocatedRLStrategy(), torch.arange(4.0)
    strategy.phases.offload_policy = OffloadPolicy(name="full")
    strategy.phases.register(FlatBuffers(POLICY, [weights]))
    strategy.enter(Phase.CRITIC)
    assert weights.untyped_storage().nbytes() == 0
    seen = []
    strategy._policy = SimpleNamespace(register_residents=lambda: seen.append(weights.clone()))
    strategy._accelerator = SimpleNamespace(setup=lambda trainer: None)
    strategy.setup_precision_plugin = lambda: None
    strategy.setup(SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.VALIDATING)))
    assert strategy.phases.phase is Phase.IDLE
    assert seen[0].tolist() == [0.0, 1.0, 2.0, 3.0], "residents are looked for where the weights are"
