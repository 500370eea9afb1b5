import pytest

from rlite.rewards import AllOf, FirstOf, RewardError, RewardRunner, Weighted


def rate(**by_text):
    def reward(completions):
        return [by_text.get(f"c{c}") for c in completions]

    return reward


def named(name, fn):
    return {"fn": fn, "name": name}


FIRST = named("first", rate(c7=1.0, c8=0.5))
SECOND = named("second", rate(c7=0.25, c2=1.0))


def totals(reward, rollouts):
    return [s.rewards["combined"] for s in RewardRunner([named("combined", reward)]).score(rollouts)]


def test_all_of_is_the_smallest_and_abstains_with_any(rollouts):
    assert totals(AllOf([FIRST, SECOND]), rollouts) == [0.25, None, None, None]


def test_first_of_falls_back(rollouts):
    assert totals(FirstOf([FIRST, SECOND]), rollouts) == [1.0, 0.5, None, 1.0]


def test_weighted_nests(rollouts):
    reward = Weighted([{**FIRST, "weight": 2.0}, {**SECOND, "weight": 4.0}])
    assert totals(reward, rollouts) == [3.0, 1.0, None, 4.0]


def test_a_combinator_asks_for_what_its_parts_ask_for(rollouts):
    spec = {"fn": "AllOf", "options": {"rewards": ["exact_match", {"fn": "regex_match", "options": {"pattern": "7"}}]}}
    runner = RewardRunner([spec])
    assert runner.names == ["AllOf"]
    assert [s.total for s in runner.score(rollouts)] == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="column 'answer' not in the data set"):
        runner.check_columns(["prompt"])


def test_a_bad_value_inside_names_the_inner_reward(rollouts):
    inner = named("inner", lambda completions: [float("nan")] * len(completions))
    with pytest.raises(RewardError, match="reward 'inner' returned nan"):
        RewardRunner([AllOf([inner])]).score(rollouts)


def test_an_empty_combinator_is_refused():
    with pytest.raises(ValueError, match="FirstOf: rewards is empty"):
        FirstOf([])
