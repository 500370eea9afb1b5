"""A trainer that runs again: `trainer.fit(...)`, then `trainer.validate(...)`."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from rlite.megatron.options import OptimizerConfig
from rlite.memory import FlatBuffers, OffloadPolicy, Phase
from rlite.memory.phases import POLICY
from rlite.strategies import ColocatedRLStrategy
from rlite.strategies.policy import PolicyState


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


def test_a_second_fit_of_a_trainer_is_refused_with_what_to_do_instead() -> None:
    strategy = ColocatedRLStrategy()
    strategy._policy = PolicyState.__new__(PolicyState)
    strategy._policy.optimizer = object()
    with pytest.raises(RuntimeError, match="a second fit needs a new Trainer and module"):
        strategy.build_optimizer(OptimizerConfig(), total_steps=1)
