"""Rows of another system's state: of every fixture columns, keys and parts are the whole's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import stateformat
from stateformat.errors import InvalidInput
from stateformat.reading import Checkpoint, StateRows
from tests.foreign.test_import_fixtures import EACH, FIXTURES, is_readable, plain
from tests.worlds.stores import refused

KEYS_TRIED = 2


def texts(table: pa.Table) -> list[str]:
    """Each row as text: NaN is itself, and days that Python has not are numbers."""
    columns = [plain(column) for column in table.columns]
    return list(map(repr, zip(*columns, strict=True))) if columns else [""] * table.num_rows


def joined(parts: list[StateRows]) -> list[str]:
    return [text for part in parts for text in texts(part.table())]


def at_some_keys(rows: StateRows, whole: pa.Table) -> None:
    """Every few keys, alone and together; the oracle compares texts of the key columns."""
    keys = whole.select(list(rows.state.key_columns))
    labels = texts(keys)
    chosen = sorted({labels.index(label) for label in labels[:: max(1, len(labels) // KEYS_TRIED)]})
    for at in (chosen[:1], chosen):
        wanted = {labels[number] for number in at}
        right = [text for text, label in zip(texts(whole), labels, strict=True) if label in wanted]
        found = rows.at_keys(pa.concat_tables(keys.slice(number, 1) for number in at))
        assert sorted(texts(found.table())) == sorted(right), (rows, at)
        assert found.select([]).table().num_rows == len(right)


@pytest.mark.parametrize("folder", EACH)
def test_columns_keys_and_parts_are_those_of_the_whole(folder: Path) -> None:
    checkpoint: Checkpoint = stateformat.open(folder).open()
    for state in checkpoint.states:
        if not is_readable(checkpoint, state.operator, state.name):
            continue
        rows = checkpoint.state(state)
        whole = rows.table()
        assert whole.num_rows == rows.select([]).table().num_rows
        backwards = rows.columns[:0:-1]
        assert texts(rows.select(backwards).table()) == texts(whole.select(backwards)), state
        split = [pickle.loads(pickle.dumps(part)) for part in rows.split(3)]
        assert len(split) <= 3
        assert joined(split) == texts(whole), state
        if state.key_columns and whole.num_rows:
            at_some_keys(rows, whole)


def opened(path: str) -> Checkpoint:
    checkpoint: Checkpoint = stateformat.open(FIXTURES / path).open()
    return checkpoint


def test_a_key_of_flink_or_spark_reads_its_key_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, operator, name in (
        ("spark-4.3.0/aggregate/checkpoint", "operator-0", "default"),
        ("flink-2.3.0/core-rocksdb-canonical/savepoint", "by-string", "mean"),
    ):
        rows = opened(path).state(operator, name)
        key = rows.table().select(list(rows.state.key_columns)).slice(3, 1)
        found = rows.at_keys(key)
        spans = found.task.slices.select(["first_group", "last_group"]).to_pylist()
        assert len(spans) == 1
        assert spans[0]["first_group"] == spans[0]["last_group"]
        groups: list[Any] = found.task.table()["_key_group"].unique().to_pylist()
        assert groups == [spans[0]["first_group"]]


def test_duckdb_reads_foreign_state_and_is_told_of_a_wrong_key() -> None:
    rows = opened("spark-4.3.0/aggregate/checkpoint").state("operator-0", "default")
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        assert connection.execute("select count(*) from rows").fetchall() == [(rows.table().num_rows,)]
    words = f"a key of state 'default' of 'operator-0': .* is none of its key columns; it has '{rows.columns[0]}'"
    refused(InvalidInput, lambda: rows.at_keys({"no such": 1}), words)
