"""Rows of a data set from wherever they live: a file, a Hugging Face data set, a generated task, or Python.

A row is a dict of columns. Rows of one source have the same columns; where a JSON line lacks one, its value is None.
"""

import difflib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlite.data.arithmetic import arithmetic_rows

# Spelled out, since for `Any` jsonargparse reads the text "7" of a config as the number 7.
Row = dict[str, str | int | float | bool | list | dict | None]


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where the rows come from."""

    kind: Literal["file", "dataset", "reasoning_gym", "arithmetic", "rows"]
    """`file`: .jsonl or .parquet. `dataset`: anything `datasets.load_dataset` opens, or a `save_to_disk` directory.
    `reasoning_gym`: a generated task. `arithmetic`: generated sums, see `rlite.data.arithmetic`. `rows`: given here."""
    path: str | None = None
    """File path, data set path or name, or reasoning-gym task name (such as `chain_sum`)."""
    split: str = "train"
    """Split of a `dataset`."""
    size: int | None = None
    """Generated sources: how many rows to generate. Others: only the first so many rows. None takes all there are."""
    seed: int = 0
    """Of generated sources. Give train and validation different seeds."""
    params: dict[str, Any] = field(default_factory=dict)
    """Further arguments: of the reasoning-gym task, of `arithmetic_rows`, or of `datasets.load_dataset`."""
    rows: list[Row] = field(default_factory=list)
    """The rows themselves, of kind `rows`."""


def load_rows(source: DataSource, *, key: str = "data.train") -> list[Row]:
    """Reads or generates the rows of `source`.

    Args:
        source: what to read.
        key: config key of the source, for error messages.

    Raises:
        ValueError: missing file, unknown task, bad parameter, malformed line, empty set; names key, value and fix.
    """
    _check_fields(source, key)
    rows = _READERS[source.kind](source, key)
    if not rows:
        raise ValueError(f"{key} is empty: {source.kind} {source.path or ''} holds no rows")
    return _same_columns(rows)


def check_columns(needed: Iterable[str], columns: Sequence[str], *, key: str) -> None:
    """Raises ValueError that names `key`, the missing column and the nearest existing one."""
    for name in needed:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, n=1, cutoff=0.0)
            raise ValueError(
                f"{key} = {name!r}: no such column (have: {', '.join(columns)}); did you mean {near[0]!r}?"
                if near
                else f"{key} = {name!r}: the data set has no columns"
            )


def _check_fields(source: DataSource, key: str) -> None:
    if source.size is not None and source.size < 1:
        raise ValueError(f"{key}.size = {source.size}: must be at least 1, or null for all rows")
    needs_path = source.kind in ("file", "dataset", "reasoning_gym")
    if needs_path != bool(source.path):
        raise ValueError(
            f"{key}.path = {source.path!r}: kind {source.kind!r} {'needs' if needs_path else 'takes no'} path"
        )
    if source.params and source.kind in ("file", "rows"):
        raise ValueError(f"{key}.params = {source.params}: kind {source.kind!r} takes none")
    if source.rows and source.kind != "rows":
        raise ValueError(f"{key}.rows is only for kind 'rows', got kind {source.kind!r}")


def _read_given(source: DataSource, key: str) -> list[Row]:
    return [dict(row) for row in source.rows[: source.size]]


def _read_file(source: DataSource, key: str) -> list[Row]:
    path = Path(source.path or "").expanduser()
    if not path.is_file():
        raise ValueError(f"{key}.path = {source.path!r}: no such file (working directory: {Path.cwd()})")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).slice(0, source.size).to_pylist()
    if path.suffix != ".jsonl":
        raise ValueError(f"{key}.path = {source.path!r}: expected a .jsonl or .parquet file")
    rows: list[Row] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(_parse_line(line, where=f"{path}:{number}"))
            if len(rows) == source.size:
                break
    return rows


def _parse_line(line: str, *, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with columns, got {type(row).__name__}")
    return row


def _read_dataset(source: DataSource, key: str) -> list[Row]:
    import datasets

    path = Path(source.path or "").expanduser()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        data = datasets.load_from_disk(str(path))
        if isinstance(data, datasets.DatasetDict):
            if source.split not in data:
                raise ValueError(f"{key}.split = {source.split!r}: {source.path} has {', '.join(data)}")
            data = data[source.split]
    else:
        try:
            data = datasets.load_dataset(source.path, split=source.split, **source.params)
        except (FileNotFoundError, ValueError, TypeError) as error:
            raise ValueError(
                f"{key}: datasets.load_dataset({source.path!r}, split={source.split!r}, **{source.params}): {error}"
            ) from error
    return data.select(range(min(source.size or len(data), len(data)))).to_list()


def _read_reasoning_gym(source: DataSource, key: str) -> list[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"{key}.kind = 'reasoning_gym' needs the package: pip install reasoning-gym") from error
    task = source.path or ""
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"{key}.path = {task!r}: no such reasoning-gym task; did you mean {near!r}?")
    known = inspect.signature(DATASETS[task][1]).parameters
    for name in source.params:
        if name not in known or name in ("size", "seed"):
            raise ValueError(
                f"{key}.params.{name}: task {task!r} has {', '.join(n for n in known if n not in ('size', 'seed'))} "
                f"(size and seed are keys of {key} itself)"
            )
    size = {} if source.size is None else {"size": source.size}
    try:
        data = reasoning_gym.create_dataset(task, seed=source.seed, **size, **source.params)
    except AssertionError as error:
        raise ValueError(f"{key}.params = {source.params}: refused by reasoning-gym task {task!r}: {error}") from error
    return [{"prompt": entry["question"], **entry} for entry in data]


def _read_arithmetic(source: DataSource, key: str) -> list[Row]:
    known = set(inspect.signature(arithmetic_rows).parameters) - {"size", "seed"}
    for name in source.params:
        if name not in known:
            raise ValueError(f"{key}.params.{name}: kind 'arithmetic' has {', '.join(sorted(known))}")
    return arithmetic_rows(source.size, seed=source.seed, **source.params)


_READERS = {
    "file": _read_file,
    "dataset": _read_dataset,
    "reasoning_gym": _read_reasoning_gym,
    "arithmetic": _read_arithmetic,
    "rows": _read_given,
}


def _same_columns(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]
