import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlite.data import DataSource, arithmetic_rows, load_rows
from rlite.data.sources import check_columns

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": "3"}]


def write_jsonl(path, lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_jsonl_rows_blank_lines_and_size(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [json.dumps(ROWS[0]), "", json.dumps(ROWS[1]), json.dumps(ROWS[2])])
    assert load_rows(DataSource(kind="file", path=path)) == ROWS
    assert load_rows(DataSource(kind="file", path=path, size=2)) == ROWS[:2]


def test_a_column_that_a_line_lacks_is_none(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ['{"prompt": "a"}', '{"prompt": "b", "answer": "2"}'])
    assert load_rows(DataSource(kind="file", path=path))[0] == {"prompt": "a", "answer": None}


def test_parquet_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert load_rows(DataSource(kind="file", path=str(path))) == ROWS
    assert load_rows(DataSource(kind="file", path=str(path), size=1)) == ROWS[:1]


def test_saved_and_local_data_sets(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"easy": data}).save_to_disk(tmp_path / "dict")
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", [json.dumps(row) for row in ROWS])
    assert load_rows(DataSource(kind="dataset", path=str(tmp_path / "one"), size=2)) == ROWS[:2]
    assert load_rows(DataSource(kind="dataset", path=str(tmp_path / "dict"), split="easy")) == ROWS
    assert load_rows(DataSource(kind="dataset", path=str(tmp_path / "files"))) == ROWS
    with pytest.raises(ValueError, match=r"data\.val\.split = 'train': .* has easy"):
        load_rows(DataSource(kind="dataset", path=str(tmp_path / "dict")), key="data.val")


def test_reasoning_gym_rows_have_a_prompt_and_what_the_scorer_needs():
    pytest.importorskip("reasoning_gym")
    source = DataSource(kind="reasoning_gym", path="chain_sum", size=3, seed=1, params={"min_terms": 2, "max_terms": 2})
    rows = load_rows(source)
    assert len(rows) == 3
    assert rows[0]["prompt"] == rows[0]["question"]
    assert set(rows[0]) == {"prompt", "question", "answer", "metadata"}
    assert all(row["metadata"]["num_terms"] == 2 for row in rows)
    assert rows == load_rows(source)


def test_rows_may_be_given():
    assert load_rows(DataSource(kind="rows", rows=ROWS)) == ROWS
    assert load_rows(DataSource(kind="rows", rows=ROWS, size=2)) == ROWS[:2]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DataSource(kind="file", path="nowhere.jsonl"), r"data\.train\.path = 'nowhere\.jsonl': no such file"),
        (DataSource(kind="file"), r"data\.train\.path = None: kind 'file' needs path"),
        (DataSource(kind="dataset", path="./no/such/dir"), r"data\.train: datasets\.load_dataset"),
        (DataSource(kind="reasoning_gym", path="chain_sums"), "did you mean 'chain_sum'"),
        (DataSource(kind="reasoning_gym", path="chain_sum", params={"terms": 2}), r"data\.train\.params\.terms"),
        (
            DataSource(kind="reasoning_gym", path="chain_sum", params={"min_terms": 9, "max_terms": 2}),
            "refused by reasoning-gym task 'chain_sum'",
        ),
        (DataSource(kind="arithmetic", params={"operand": 3}), r"data\.train\.params\.operand"),
        (DataSource(kind="arithmetic", size=0), r"data\.train\.size = 0"),
        (DataSource(kind="rows"), r"data\.train is empty"),
        (DataSource(kind="rows", params={"a": 1}), r"data\.train\.params = {'a': 1}: kind 'rows' takes none"),
        (DataSource(kind="arithmetic", path="a.jsonl"), "kind 'arithmetic' takes no path"),
        (DataSource(kind="arithmetic", rows=ROWS), r"data\.train\.rows is only for kind 'rows'"),
    ],
)
def test_a_bad_source_names_key_and_fix(source, message):
    with pytest.raises(ValueError, match=message):
        load_rows(source)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{oops\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", '["prompt"]\n', r"a\.jsonl:1: expected a JSON object with columns, got list"),
        ("a.jsonl", "\n\n", r"data\.train is empty: file .*a\.jsonl holds no rows"),
        ("a.csv", "prompt\na\n", r"expected a \.jsonl or \.parquet file"),
    ],
)
def test_a_malformed_file_names_the_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_rows(DataSource(kind="file", path=str(tmp_path / name)))


def test_a_missing_column_names_the_nearest():
    with pytest.raises(ValueError, match=r"data\.prompt\.column = 'promt': no such column .*did you mean 'prompt'"):
        check_columns(["promt"], ["answer", "prompt"], key="data.prompt.column")


def test_arithmetic_is_distinct_right_and_given_by_the_seed():
    rows = arithmetic_rows(seed=1)
    assert len({row["prompt"] for row in rows}) == len(rows) == 100
    for row in rows:
        left, right = row["prompt"].rstrip("=").split("+")
        assert row["answer"] == str(int(left) + int(right))
    assert rows == arithmetic_rows(seed=1) != arithmetic_rows(seed=2)
    assert arithmetic_rows(10, seed=1) == arithmetic_rows(10, seed=1)


def test_arithmetic_operands_and_operators():
    rows = arithmetic_rows(min_operand=10, max_operand=11, operators="+-")
    expected = {"10+10=": "20", "10+11=": "21", "11+10=": "21", "11+11=": "22"}
    expected |= {"10-10=": "0", "10-11=": "-1", "11-10=": "1", "11-11=": "0"}
    assert {row["prompt"]: row["answer"] for row in rows} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 101}, "give 100 distinct problems"),
        ({"operators": "*"}, "operators = '\\*'"),
        ({"min_operand": 5, "max_operand": 4}, "min_operand <= max_operand"),
    ],
)
def test_arithmetic_refuses_what_it_cannot_make(arguments, message):
    with pytest.raises(ValueError, match=message):
        arithmetic_rows(**arguments)
