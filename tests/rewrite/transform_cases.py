"""Functions for the states of the data world, each with what it does to a row in plain Python.

Both engines are held to them (``test_transform`` and ``tests/spark/test_transform_spark``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.backends.rewrite import Engine, RewriteSpec, Rewritten, Transform, rewrite
from stateformat.reading import Checkpoint
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import validate
from tests.worlds import data as world

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A transform of one state, and its oracle."""

    state: tuple[str, str]
    function: Callable[[pa.Table], Any] | None
    row: Callable[[Row], Row | None]
    """What becomes of a row; None if it goes."""
    changes: str
    """What becomes of the columns, where they are not kept: ``orders retyped``."""
    renames: Mapping[str, str] = field(default_factory=dict)
    rekey: bool = False

    def __str__(self) -> str:
        return f"{self.state[1]}-{self.changes or 'kept'}"

    @property
    def transform(self) -> Transform:
        return Transform(self.function, self.renames, self.rekey)

    def expected(self) -> list[Row]:
        """The rows afterwards."""
        return [made for row in world.expected_rows(*self.state) if (made := self.row(row)) is not None]


def put(table: pa.Table, name: str, values: Any, new: str | None = None) -> pa.Table:
    """A column in place of another one."""
    return table.set_column(table.column_names.index(name), new or name, values)


def correct(rows: pa.Table) -> pa.Table:
    """Drop, correct, add and give up: all in one."""
    rows = rows.filter(pc.greater(rows["orders"], 3))
    rows = put(rows, "euros", pc.multiply(rows["euros"], 2))
    return rows.append_column("country", pa.array(["CH"] * len(rows), pa.string())).drop_columns(["tier"])


def corrected(row: Row) -> Row | None:
    if row["orders"] <= 3:
        return None
    kept = {name: value for name, value in row.items() if name != "tier"}
    return {**kept, "euros": row["euros"] * 2, "country": "CH"}


def upper(rows: pa.Table) -> pa.Table:
    return put(rows, "user", pc.utf8_upper(rows["user"]))


def uppered(row: Row) -> Row:
    return {**row, "user": row["user"] and row["user"].upper()}


def days_as_text(rows: pa.Table) -> pa.Table:
    return put(rows, "day", pc.strftime(rows["day"], "%Y/%m/%d"), "date")


def with_days_as_text(row: Row) -> Row:
    return {"user": row["user"], "date": row["day"].strftime("%Y/%m/%d"), "amount": row["amount"]}


def as_lists(rows: pa.Table) -> pa.Table:
    """By way of Python values, with the schema."""
    schema = rows.schema.append(pa.field("length", pa.int32()))
    return pa.Table.from_pylist([{**row, "length": len(row["tags"] or [])} for row in rows.to_pylist()], schema)


def shifted(rows: pa.Table) -> pa.RecordBatch:
    """Later timers, the last first, as one batch."""
    later = put(rows, "_timestamp", pc.add(rows["_timestamp"], 3_600_000_000))
    batches = later.take(pa.array(range(len(later)), pa.int64())[::-1]).combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], later.schema)


def totals(name: str) -> tuple[str, str]:
    return "totals", name


def orders(name: str) -> tuple[str, str]:
    return "orders", name


CASES = [
    Case(totals("spent"), correct, corrected, "country added, tier dropped"),
    Case(
        totals("spent"),
        lambda rows: put(rows, "orders", pc.cast(rows["orders"], pa.string())),
        lambda row: {**row, "orders": str(row["orders"])},
        "orders retyped",
    ),
    Case(
        totals("spent"),
        lambda rows: rows.rename_columns([{"city": "town"}.get(name, name) for name in rows.column_names]),
        lambda row: {("town" if name == "city" else name): value for name, value in row.items()},
        "town renamed",
        {"city": "town"},
    ),
    Case(
        totals("spent"),
        None,
        lambda row: {{"city": "tier", "tier": "city"}.get(name, name): value for name, value in row.items()},
        "tier renamed, city renamed",
        {"city": "tier", "tier": "city"},
    ),
    Case(
        totals("spent"),
        lambda rows: rows.append_column("place", rows["city"]).drop_columns(["city"]),
        lambda row: {("place" if name == "city" else name): value for name, value in row.items()},
        "place added, city dropped",
    ),
    Case(totals("spent"), lambda rows: rows.slice(0, 0), lambda _: None, ""),
    Case(totals("spent"), upper, uppered, "", {}, True),
    Case(
        totals("baskets"),
        lambda rows: put(rows, "_map_key", pc.binary_join_element_wise("a", rows["_map_key"], "-")),
        lambda row: {**row, "_map_key": f"a-{row['_map_key']}"},
        "",
    ),
    Case(
        totals("recent"),
        lambda rows: put(rows, "_index", pc.subtract(rows["_index"], 3)),
        lambda row: {**row, "_index": row["_index"] - 3},
        "",
    ),
    Case(totals("recent"), as_lists, lambda row: {**row, "length": len(row["tags"] or [])}, "length added"),
    Case(totals("reminders"), shifted, lambda row: {**row, "_timestamp": row["_timestamp"] + 3_600_000_000}, ""),
    Case(
        totals("by_day"),
        lambda rows: put(rows, "amount", pc.cast(rows["amount"], pa.float64())),
        lambda row: row,
        "amount widened",
    ),
    Case(totals("by_day"), days_as_text, with_days_as_text, "date retyped", {"day": "date"}, True),
    Case(
        totals("refunds"),
        lambda rows: rows.append_column("why", pa.nulls(len(rows), pa.string())),
        lambda row: {**row, "why": None},
        "why added",
    ),
    Case(
        totals("rates"),
        lambda rows: put(rows, "euros", pc.negate(rows["euros"])),
        lambda row: {**row, "euros": -row["euros"]},
        "",
    ),
    Case(
        orders("positions"),
        lambda rows: put(rows, "position", pc.multiply(rows["position"], 0)),
        lambda row: {**row, "position": 0},
        "",
    ),
    Case(
        orders("shards"),
        lambda rows: put(rows, "owner", pc.fill_null(rows["owner"], "nobody")).select(["owner", "shard"]),
        lambda row: {"owner": row["owner"] or "nobody", "shard": row["shard"]},
        "",
    ),
    Case(
        orders("unassigned"),
        lambda rows: put(rows, "path", pc.utf8_upper(rows["path"])),
        lambda row: {"path": row["path"].upper()},
        "",
    ),
]


def changed(done: Rewritten) -> str:
    """What became of the columns of the one transformed state, but for those that were kept."""
    [one] = done.transformed
    told = [(column.column or column.was, column.change) for column in one.state.columns]
    return ", ".join(f"{name} {change}" for name, change in told if change != "kept")


def rewritten_to(folder: Path, source: CheckpointStore, engine: Engine | None, spec: RewriteSpec) -> Rewritten:
    """Rewrite the newest checkpoint into an empty folder, which is valid then."""
    target = open_store(str(folder))
    done = rewrite(source, source.open(), spec, engine=engine, target=target)
    assert validate(target, level="full").problems == ()
    return done


def check_case(case: Case, done: Rewritten, checkpoint: Checkpoint) -> None:
    """The rows of the transformed state, and of all others, are what plain Python says."""
    wanted = case.expected()
    [one] = done.transformed
    assert (one.read, one.written) == (len(world.expected_rows(*case.state)), len(wanted))
    assert changed(done) == case.changes
    assert world.same_rows(checkpoint.state(*case.state).table(), wanted)
    for name in world.NAMES:
        if name != case.state:
            assert world.same_rows(checkpoint.state(*name).table(), world.expected(*name)), name
