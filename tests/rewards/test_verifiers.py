from fractions import Fraction

import pytest

from rlite.rewards import (
    exact_match,
    format_think,
    last_number_match,
    math_boxed,
    number_closeness,
    reasoning_gym_score,
    regex_match,
    repetition_penalty,
    soft_overlong,
)
from rlite.rewards.boxed import last_boxed
from rlite.rewards.number import parse_number


def test_exact_match_ignores_outer_space_only():
    assert exact_match(["7", " 7\n", "77", "", "a"], [7, "7", "7", "7", "A"]) == [1, 1, 0, 0, 0]
    assert exact_match(["Paris"], ["paris"], ignore_case=True) == [1]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so it is 7, I think", "7", 1),
        ("10-3=7", 7, 1),
        ("10-3", "3", 1),
        ("the result is -3.", "-3", 1),
        ("\u22123", "-3", 1),
        ("1,200.0", "1200", 1),
        ("7 or 8", "7", 0),
        ("no idea", "7", 0),
        ("7", "seven", None),
    ],
)
def test_last_number_match(completion, answer, expected):
    assert last_number_match([completion], [answer]) == [expected]


def test_regex_match_wants_the_whole_completion():
    assert regex_match(["a\nb", "xa\nb"], pattern="a.b") == [1, 0]


def test_number_closeness_pays_for_near_misses():
    assert number_closeness(["7", "8", "4", "x", "", "1"], ["7"] * 5 + ["?"]) == [1.0, 0.25, 0.125, 0.0, 0.0, None]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3.50", Fraction(-7, 2)),
        ("1,200", 1200),
        ("12,34", None),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac12", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        ("3/0", None),
        (r"50\%", 50),
        (r"9\text{ cm}", 9),
        (r"90^\circ", 90),
        ("$5", 5),
        ("x", None),
        ("", None),
        ("9" * 1000, None),
    ],
)
def test_parse_number(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"thus \boxed{\frac{1}{2}}.", "0.5", 1),
        (r"\boxed{3} no, \boxed{4}", "4", 1),
        (r"\boxed{3} no, \boxed{4}", "3", 0),
        (r"\boxed{(1, \frac{1}{2})}", "(1,0.5)", 1),
        (r"\boxed{(1, 2]}", "(1,2,3)", 0),
        (r"\boxed{\{1, 2\}}", r"\{1,2\}", 1),
        (r"\boxed{x+1}", "x + 1", 1),
        (r"\boxed{1+x}", "x+1", 0),
        (r"\boxed{4}", r"the answer is \boxed{4}", 1),
        (r"\boxed{{1}", "1", 0),
        ("4", "4", 0),
        ("", "4", 0),
    ],
)
def test_math_boxed(completion, answer, expected):
    assert math_boxed([completion], [answer]) == [expected]


def test_last_boxed_skips_an_unfinished_box():
    assert last_boxed(r"\boxed{a{b}c} \boxed{unfinished") == "a{b}c"


def test_format_think():
    texts = ["<think>a\nb</think>4", "<think>a</think>", "<think>a", "a<think>b</think>", "<think><think></think>"]
    assert format_think(texts) == [1, 1, 0, 0, 0]


def test_soft_overlong_follows_dapo_equation_13():
    ids = [[0] * length for length in (0, 6, 7, 8, 10, 15)]
    assert soft_overlong(ids, max_tokens=10, cache_tokens=4) == [0, 0, -0.25, -0.5, -1, -1]
    assert soft_overlong(ids, max_tokens=10, cache_tokens=4, factor=2.0)[-1] == -2
    with pytest.raises(ValueError, match="cache_tokens"):
        soft_overlong(ids, max_tokens=4, cache_tokens=10)


def test_repetition_penalty_counts_repeated_ngrams():
    # 1 2 1 2: bigrams 12 21 12, of which 2 of 3 are distinct.
    assert repetition_penalty([[1, 2, 1, 2], [1, 2, 3], [1], []], ngram=2) == pytest.approx([-1 / 3, 0, 0, 0])


def test_reasoning_gym_uses_the_scorer_of_the_task():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    row = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    completions = [row["answer"], f"so <answer>{row['answer']}</answer>", "nonsense", ""]
    columns = {key: [row[key]] * 4 for key in ("question", "answer", "metadata")}
    plain = reasoning_gym_score(completions, **columns)
    tagged = reasoning_gym_score(completions, **columns, answer_pattern="<answer>(.*?)</answer>")
    assert plain[0] == 1.0 and plain[2] == plain[3] == 0.0
    assert tagged == [0.0, 1.0, 0.0, 0.0]
