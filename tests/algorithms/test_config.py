"""AlgorithmConfig, presets and the registry: what is accepted, and how a mistake is named."""

import pytest
import torch

from rlite import algorithms as alg
from rlite.algorithms.losses.base import unclipped
from rlite.algorithms.registry import Registry


def double_reinforce(inputs, *, factor: float = 2.0):
    """A loss of the user's own, found by its dotted path."""
    return unclipped(-factor * inputs.advantages_N * inputs.logprobs_N)


class RankAdvantage:
    """An estimator of the user's own: a class with options."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, batch: alg.AdvantageInputs) -> torch.Tensor:
        return self.scale * batch.rewards_B.argsort().argsort().double()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "ppo_clp"}, r"model.algorithm.loss = 'ppo_clp': unknown; did you mean 'ppo_clip'"),
        ({"loss": "no_such.module"}, r"model.algorithm.loss = 'no_such.module': cannot be imported"),
        (
            {"loss": "cispo", "loss_args": {"ratio_mx": 5}},
            r"loss 'cispo' has no option 'ratio_mx'; did you mean 'ratio_max'",
        ),
        ({"loss": "cispo", "clip_high": 0.3}, r"loss 'cispo' has no option 'clip_high'"),
        ({"advantage": "grp"}, r"model.algorithm.advantage = 'grp': unknown; did you mean 'grpo'"),
        (
            {"advantage": "dr_grpo", "advantage_args": {"eps": 1}},
            r"advantage 'dr_grpo' has no option 'eps'; it has: none",
        ),
        ({"aggregation": "mean"}, r"model.algorithm.aggregation = 'mean': choose one of token_mean"),
        ({"kl_estimator": "k4"}, r"model.algorithm.kl_estimator = 'k4'"),
        ({"kl_coef": -1.0}, r"model.algorithm.kl_coef = -1.0: must be >= 0"),
        ({"kl_target": 0.1}, r"model.algorithm.kl_target = 0.1: needs kl_coef > 0"),
        ({"dual_clip": 1.1, "clip_high": 0.2}, r"model.algorithm.dual_clip = 1.1: must be > 1 \+ clip_high"),
        ({"entropy_top_fraction": 0.0}, r"model.algorithm.entropy_top_fraction = 0.0: must be in \(0, 1\]"),
        ({"correction": "token_truncate"}, r"model.algorithm.correction_max = None: .* needs an upper bound"),
        ({"correction": "geo_mask"}, r"model.algorithm.correction_max = None: .* needs correction_min or"),
        ({"correction_max": 2.0}, r"model.algorithm.correction_max = 2.0: has no effect"),
        (
            {"correction": "token_mask", "correction_min": 3.0, "correction_max": 2.0},
            r"must exceed correction_min = 3.0",
        ),
        (
            {"old_policy": "rollout", "correction": "token_truncate", "correction_max": 2.0},
            r"model.algorithm.correction = 'token_truncate': the ratio to the engine already contains it",
        ),
        ({"kl_in_reward": True}, r"model.algorithm.kl_in_reward = True: has no effect with kl_coef = 0"),
        (
            {"advantage": "gdpo", "overlong_buffer_tokens": 4},
            r"model.algorithm.advantage = 'gdpo': reads single rewards",
        ),
        ({"correction_normalize": "batch"}, r"model.algorithm.correction_normalize = 'batch': has no effect"),
        (
            {"overlong_buffer_tokens": 10, "truncation_reward_scale": 0.0},
            r"model.algorithm.truncation_reward_scale = 0.0: cannot be combined",
        ),
    ],
)
def test_mistake_names_its_key(fields, message):
    with pytest.raises(ValueError, match=message):
        alg.AlgorithmConfig(**fields)


def test_preset_with_overrides():
    config = alg.algorithm_config({"preset": "dapo", "clip_high": 0.3})
    assert (config.clip_high, config.clip_low, config.aggregation) == (0.3, 0.2, "token_mean")
    assert alg.algorithm_config("dapo").clip_high == 0.28
    assert alg.algorithm_config({"kl_coef": 0.1}) == alg.AlgorithmConfig(kl_coef=0.1)
    assert alg.algorithm_config(config) is config


def test_unknown_preset_and_field_give_the_nearest():
    with pytest.raises(ValueError, match=r"model.algorithm.preset = 'dapoo': unknown; did you mean 'dapo'"):
        alg.algorithm_config("dapoo")
    with pytest.raises(ValueError, match=r"model.algorithm.clip_hig: unknown field; did you mean 'clip_high'"):
        alg.algorithm_config({"clip_hig": 0.3})


@pytest.mark.parametrize("preset", alg.PRESETS)
def test_every_preset_builds_and_names_only_what_it_changes(preset):
    config, default = alg.algorithm_config(preset), alg.AlgorithmConfig()
    assert all(getattr(config, name) == value for name, value in alg.PRESETS[preset].items())
    assert preset == "grpo" or config != default


def test_own_loss_and_estimator_by_dotted_path():
    config = alg.AlgorithmConfig(
        loss="tests.algorithms.test_config.double_reinforce",
        loss_args={"factor": 3.0},
        advantage="tests.algorithms.test_config.RankAdvantage",
        advantage_args={"scale": 0.5},
        aggregation="token_mean",
    )
    advantages_B = alg.compute_advantages(
        torch.tensor([5.0, 1.0, 9.0]), torch.zeros(3, dtype=int), torch.ones(3, dtype=int), config
    )
    assert advantages_B.tolist() == [0.5, 0.0, 1.0]
    inputs = alg.LossInputs(
        logprobs_N=torch.tensor([-1.0, -2.0, -3.0]),
        advantages_N=advantages_B.float(),
        row_N=torch.arange(3),
        lengths_B=torch.ones(3, dtype=int),
    )
    # -3 * (0.5 * -1 + 0 * -2 + 1 * -3) / 3 = 3.5
    assert alg.PolicyObjective(config)(inputs, alg.Counts.of(inputs.lengths_B)).loss.item() == pytest.approx(3.5)


def test_a_name_cannot_be_registered_twice():
    registry = Registry("loss")
    registry.register("mine")(double_reinforce)
    registry.register("mine")(double_reinforce)
    with pytest.raises(ValueError, match="'mine' is registered twice"):
        registry.register("mine")(RankAdvantage)
