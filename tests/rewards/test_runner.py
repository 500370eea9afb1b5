import asyncio
import math
import time

import numpy as np
import pytest
import torch

from rlite.rewards import RewardError, RewardRunner, RewardSpec


def half(completions):
    return [0.5] * len(completions)


def returning(result):
    def reward(completions):
        return result(len(completions)) if callable(result) else result

    return reward


def test_a_reward_gets_what_it_names(rollouts):
    seen = {}

    def reward(completions, prompts, completion_ids, finish_reasons, answer):
        seen.update(locals())
        return [1.0] * 4

    RewardRunner([reward]).score(rollouts)
    assert seen["completions"] == ["7", "8", "", "2"]
    assert seen["prompts"] == ["prompt 3", "prompt 3", "prompt 4", "prompt 4"]
    assert seen["completion_ids"] == [[0], [0], [], [0]]
    assert seen["finish_reasons"] == ["stop", "length", "stop", "stop"]
    assert seen["answer"] == ["7", "7", "2", "2"]


def test_keyword_arguments_receive_all_columns(rollouts):
    seen = {}

    class Module:
        def reward(self, completions, **columns):
            seen.update(columns)
            return [0.0] * len(completions)

    RewardRunner([Module().reward]).score(rollouts)
    assert set(seen) == {"prompts", "completion_ids", "finish_reasons", "answer", "level"}


def test_total_is_the_weighted_sum(rollouts):
    runner = RewardRunner([RewardSpec(fn="exact_match", weight=2.0), RewardSpec(fn=half, weight=-1.0)])
    scored = runner.score(rollouts)
    assert [s.total for s in scored] == [1.5, -0.5, -0.5, 1.5]
    assert scored[0].rewards == {"exact_match": 1.0, "half": 0.5}


def test_abstentions_count_for_nothing_and_all_abstaining_is_nan(rollouts):
    first = returning([1.0, None, None, 0.0])
    second = returning([1.0, 3.0, None, None])
    runner = RewardRunner([{"fn": first, "name": "a"}, {"fn": second, "name": "b", "weight": 0.5}])
    scored = runner.score(rollouts)
    assert [s.total for s in scored[:2]] == [1.5, 1.5]
    assert math.isnan(scored[2].total)
    assert scored[2].rewards == {"a": None, "b": None}
    assert scored[3].total == 0.0


def test_weight_zero_is_a_metric_outside_the_total(rollouts):
    runner = RewardRunner(
        [{"fn": returning([None] * 4), "name": "main"}, {"fn": half, "name": "metric", "weight": 0.0}]
    )
    scored = runner.score(rollouts)
    assert scored[0].rewards["metric"] == 0.5
    assert math.isnan(scored[0].total)


def test_fill_writes_into_the_rollouts(rollouts):
    RewardRunner(["exact_match"]).fill(rollouts)
    assert [r.reward for r in rollouts] == [1.0, 0.0, 0.0, 1.0]
    assert rollouts[1].rewards == {"exact_match": 0.0}


def test_no_rollouts_need_no_reward_call():
    assert RewardRunner([returning("never called")]).score([]) == []


@pytest.mark.parametrize(
    "result",
    [
        (1, 0, True, 0.5),
        torch.tensor([1.0, 0.0, 1.0, 0.5]),
        np.array([1, 0, 1, 0.5]),
        [torch.tensor(1.0), np.float32(0), np.int64(1), 0.5],
        lambda n: (value for value in (1, 0, 1, 0.5)),
    ],
    ids=["tuple", "tensor", "array", "scalars", "generator"],
)
def test_anything_that_is_a_list_of_numbers_will_do(rollouts, result):
    assert [s.total for s in RewardRunner([returning(result)]).score(rollouts)] == [1.0, 0.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "returned 1 values for 4 completions"),
        ([1.0] * 3, "returned 3 values for 4 completions"),
        ([1.0] * 5, "returned 5 values for 4 completions"),
        (1.0, "returned 1.0, expected a list of 4"),
        (None, "returned None, expected a list of 4"),
        ("good", "returned 'good', expected a list of 4"),
        ([0, 0, math.nan, 0], r"returned nan \(to abstain, return None\)\s+at row 2 \(prompt uid 4, sample 0\)"),
        ([0, math.inf, 0, 0], r"returned inf .*\s+at row 1 \(prompt uid 3, sample 1\)"),
        (["1", 0, 0, 0], r"returned '1', which is not a number\s+at row 0"),
        ([0, 0, 0, [1]], r"returned \[1\], which is not a number\s+at row 3"),
        (torch.zeros(4, 1), r"returned \[0.0\], which is not a number\s+at row 0"),
    ],
)
def test_a_bad_return_value_names_reward_row_and_value(rollouts, result, message):
    with pytest.raises(RewardError, match=f"reward 'judge' {message}"):
        RewardRunner([{"fn": returning(result), "name": "judge"}]).score(rollouts)


def test_a_bad_value_leaves_the_rollouts_untouched(rollouts):
    with pytest.raises(RewardError):
        RewardRunner(["exact_match", returning([0, 0, 0, math.nan])]).fill(rollouts)
    assert all(rollout.rewards == {} for rollout in rollouts)


def test_an_exception_comes_with_traceback_and_row(rollouts):
    def parse(completions):
        return [float(int(c)) for c in completions]

    with pytest.raises(RewardError) as caught:
        RewardRunner([parse]).score(rollouts)
    message = str(caught.value)
    assert "reward 'parse' raised ValueError: invalid literal" in message
    assert "row 2 (prompt uid 4, sample 0): prompt 'prompt 4', completion ''" in message
    assert "return [float(int(c)) for c in completions]" in message
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_exception_that_no_single_row_causes_says_so(rollouts):
    def pairwise(completions):
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [0.0]

    with pytest.raises(RewardError, match="all rows together, no single one"):
        RewardRunner([pairwise]).score(rollouts)


def test_async_rewards_are_awaited(rollouts):
    async def judge(completions, answer):
        async def one(completion, wanted):
            await asyncio.sleep(0)
            return float(completion == wanted)

        return await asyncio.gather(*map(one, completions, answer))

    async def inside_a_running_loop():
        return RewardRunner([judge]).score(rollouts)

    assert [s.total for s in RewardRunner([judge]).score(rollouts)] == [1.0, 0.0, 0.0, 1.0]
    assert [s.total for s in asyncio.run(inside_a_running_loop())] == [1.0, 0.0, 0.0, 1.0]


def test_a_hung_reward_is_interrupted_and_named(rollouts):
    def hang(completions):
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    with pytest.raises(RewardError, match=r"reward 'hang' took longer than 0.2 s for 4 completions"):
        RewardRunner([hang], timeout_s=0.2).score(rollouts)


def test_the_time_limit_is_lifted_afterwards(rollouts):
    RewardRunner([half], timeout_s=0.05).score(rollouts)
    time.sleep(0.1)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "rewards is empty"),
        ([half, half], "names must differ"),
        ([{"fn": half, "weight": 0.0}], "are all 0"),
        ([{"fn": half, "weight": math.nan}], "must be finite"),
        (["exact_mach"], "did you mean 'exact_match'"),
        (["no_such_module.reward"], "cannot import module 'no_such_module'"),
        (["math.pi"], "expected a callable"),
        ([{"fn": "soft_overlong", "options": {"max_token": 5}}], "no option 'max_token'; did you mean 'max_tokens'"),
    ],
)
def test_a_bad_configuration_is_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        RewardRunner(rewards)


def test_a_dotted_path_names_any_function(rollouts):
    runner = RewardRunner([{"fn": "rlite.rewards.shaping.repetition_penalty", "options": {"ngram": 1}}])
    assert runner.names == ["repetition_penalty"]
    assert [s.total for s in runner.score(rollouts)] == [0.0] * 4


def test_columns_are_checked_before_anything_runs():
    def typo(completions, answr):
        raise AssertionError("not called")

    with pytest.raises(ValueError, match=r"reward 'typo': column 'answr' not in the data set .*mean 'answer'"):
        RewardRunner([typo]).check_columns(["prompt", "answer"])


def test_defaults_options_and_keyword_arguments_need_no_column():
    def reward(completions, level=None, *, scale, **columns):
        return [scale] * len(completions)

    RewardRunner([{"fn": reward, "options": {"scale": 1.0}}]).check_columns([])
    with pytest.raises(ValueError, match="column 'scale'"):
        RewardRunner([reward]).check_columns([])
