"""Tables of an export, read by the libraries of their formats, and a state of every type."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from stateformat.backends.exporting import Exported, Format, Place, TableExport, one_checkpoint, several_checkpoints
from stateformat.graph import JobGraph
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.worlds.stores import Job, operator

FORMATS = (Format.ICEBERG, Format.DELTA)
POINT = pa.struct([pa.field("x", pa.int8()), pa.field("more", pa.list_(pa.struct([pa.field("y.z", pa.int16())])))])
COLUMNS = {
    "yes": pa.bool_(),
    "tiny": pa.int8(),
    "small": pa.int16(),
    "int": pa.int32(),
    "long": pa.int64(),
    "single": pa.float32(),
    "double": pa.float64(),
    "text": pa.string(),
    "bytes": pa.binary(),
    "day": pa.date32(),
    "local": pa.timestamp("us"),
    "instant": pa.timestamp("us", "UTC"),
    "cents": pa.decimal128(8, 2),
    "precise": pa.decimal128(38, 10),
    "point": POINT,
    "tags": pa.list_(pa.string()),
    "counts": pa.map_(pa.string(), pa.int16()),
    "a.b": pa.int32(),
    "A_b": pa.int32(),
    "a b": pa.int32(),
    "Text": pa.string(),
}
_NOW = datetime.datetime(2026, 3, 1, 12, 30, 15, 123456)  # noqa: DTZ001
FULL: dict[str, Any] = {
    "yes": True,
    "tiny": -128,
    "small": 32767,
    "int": -(2**31),
    "long": 2**63 - 1,
    "single": 1.5,
    "double": float("-inf"),
    "text": "Zürich\n",
    "bytes": b"\x00\xff",
    "day": datetime.date(1969, 12, 31),
    "local": _NOW,
    "instant": _NOW.replace(tzinfo=datetime.UTC),
    "cents": Decimal("-12345.67"),
    "precise": Decimal("1234567890123456789012345678.0123456789"),
    "point": {"x": 7, "more": [{"y.z": 9}, None, {"y.z": None}]},
    "tags": ["a", None, ""],
    "counts": [("k", 3), ("l", None)],
    "a.b": 1,
    "A_b": 2,
    "a b": 3,
    "Text": "T",
}
ROWS = [
    FULL,
    dict.fromkeys(FULL),
    {**FULL, "double": float("nan"), "tags": [], "counts": [], "point": {"x": None, "more": None}},
]
TYPES = "every type"
"""The operator and the state of :func:`types_store`."""


def types_store(url: str) -> CheckpointStore:
    """One checkpoint of one state with a column of each type, and names that formats refuse."""
    state = declare.even_split_state(TYPES, TYPES, columns=COLUMNS)
    at = operator(TYPES, 1)
    table = pa.Table.from_pylist(ROWS, pa.schema(list(COLUMNS.items())))
    store = open_store(url)
    Job("types", JobGraph((at,)), (state,), {(TYPES, TYPES): lambda _subtask: table}).publish(store, None)
    return store


def export_one(
    store: CheckpointStore, file_format: Format, to: object, name: tuple[str, str], at: int | None = None, **chosen: Any
) -> Exported:
    """Export one state of one checkpoint into a table."""
    checkpoint = store.open(at)
    source = one_checkpoint(checkpoint, checkpoint.record.state(*name), **chosen)
    with TableExport([source], file_format, Place(str(to)), alone=True) as tables:
        return tables.run()[0]


def export_several(
    store: CheckpointStore,
    file_format: Format,
    to: object,
    name: tuple[str, str],
    ids: range | list[int],
    **chosen: Any,
) -> Exported:
    """Export one state of several checkpoints into a table."""
    history = {int(record.checkpoint_id): record for record in store.history()}
    source = several_checkpoints(store, [history[number] for number in ids], history[max(history)], *name, **chosen)
    with TableExport([source], file_format, Place(str(to)), alone=True) as tables:
        return tables.run()[0]


def rows_of(file_format: Format, folder: Path) -> pa.Table:
    """All rows of a table that has only its folder."""
    if file_format is Format.DELTA:
        from deltalake import DeltaTable

        return DeltaTable(folder).to_pyarrow_table()
    from pyiceberg.table import StaticTable

    return StaticTable.from_metadata(str(folder)).scan().to_arrow()


def rows_by_catalog(folder: Path, *name: str) -> pa.Table:
    """All rows of an Iceberg table of the folder's catalog."""
    return catalog_of(folder).load_table(name).scan().to_arrow()


def catalog_of(folder: Path) -> Any:
    """The catalog beside the tables."""
    from pyiceberg.catalog.sql import SqlCatalog

    return SqlCatalog("stateformat", uri=f"sqlite:///{folder}/catalog.db")


def versions_of(file_format: Format, folder: Path) -> int:
    """How often a table was changed."""
    if file_format is Format.DELTA:
        from deltalake import DeltaTable

        return int(DeltaTable(folder).version()) + 1
    from pyiceberg.table import StaticTable

    return len(StaticTable.from_metadata(str(folder)).snapshots())


def files_in(folder: Path) -> set[str]:
    """Every file below a folder, by its relative path."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
