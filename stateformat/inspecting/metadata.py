"""What a store holds, as tables: checkpoints, operators, states, handles.

:data:`METADATA_TABLES` lists their columns. No data file is read; what another system's metadata
lacks is null.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InvalidInput
from ..graph import Operator, Status
from ..manifest import codes_of, integers, state_runs
from ..model import Record, State, known_names
from ..reading import checked_parts, chosen_columns
from ..schema import KEY_GROUP, MANIFEST_SCHEMA, PLANNING_COLUMNS, segment_schema
from ..tables import ArrowStream, prefetch

if TYPE_CHECKING:
    from ..reading import Checkpoint


class _Store(Protocol):
    def history(self) -> list[Record]: ...

    def checkpoints(self, ids: Sequence[int] | None = None) -> list[Checkpoint]: ...


_TEXT: Final = pa.string()
_COLUMN: Final = pa.struct(
    [
        pa.field("name", _TEXT),
        pa.field("type", _TEXT),
        pa.field("nullable", pa.bool_()),
        pa.field("id", pa.int32()),
        pa.field("default", _TEXT),
    ]
)
_ID: Final = pa.field("checkpoint_id", pa.int64(), nullable=False)


def _handle_field(field: pa.Field) -> pa.Field:
    kind = pa.binary() if pa.types.is_fixed_size_binary(field.type) else field.type
    return pa.field(field.name, kind, nullable=field.nullable or field.name in ("rows", "segment_rows"))


def _field(name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


_Column = tuple[pa.Field, Callable[[Any], Any]]
"""A column, and its value for a record, an operator or a state."""

_OF_CHECKPOINTS: Final[Sequence[_Column]] = (
    (_field("attempt_id", _TEXT), lambda record: record.attempt_id),
    (_field("kind", _TEXT), lambda record: record.kind.value),
    (_field("parent_id", pa.int64(), nullable=True), lambda record: record.parent and record.parent.checkpoint_id),
    (_field("job_id", _TEXT), lambda record: record.job_id),
    (_field("job_name", _TEXT), lambda record: record.job_name),
    (_field("writer", _TEXT), lambda record: record.writer),
    (_field("created_at", pa.timestamp("us", "UTC")), lambda record: record.created_at_us),
    (_field("operators", pa.int32()), lambda record: len(record.graph.operators)),
    (_field("finished_operators", pa.int32()), lambda record: sum(map(_has_finished, record.graph.operators))),
    (_field("states", pa.int32()), lambda record: len(record.states)),
    (_field("handles", pa.int64()), lambda record: record.totals.handles),
    (_field("rows", pa.int64(), nullable=True), lambda record: record.totals.rows),
    (_field("segments", pa.int64()), lambda record: record.totals.segments),
    (_field("bytes", pa.int64()), lambda record: record.totals.bytes),
    (_field("stop", _TEXT, nullable=True), lambda record: record.stop and record.stop.mode.value),
    (
        _field("rescaled_from", pa.int64(), nullable=True),
        lambda record: record.rescaled_from and record.rescaled_from.source.checkpoint_id,
    ),
    (
        _field("content_of", pa.int64(), nullable=True),
        lambda record: record.content_of and record.content_of.checkpoint_id,
    ),
    (_field("properties", pa.map_(_TEXT, _TEXT)), lambda record: list(record.properties.items())),
)
_OF_OPERATORS: Final[Sequence[_Column]] = (
    (_field("operator", _TEXT), lambda operator: operator.uid),
    (_field("name", _TEXT), lambda operator: operator.name),
    (_field("parallelism", pa.int32()), lambda operator: operator.parallelism),
    (_field("max_parallelism", pa.int32(), nullable=True), lambda operator: operator.max_parallelism),
    (_field("key_hash", _TEXT, nullable=True), lambda operator: operator.key_hash),
    (_field("status", _TEXT), lambda operator: operator.status.value),
    (_field("finished_subtasks", pa.int32()), lambda operator: len(operator.finished)),
    (_field("finishing_subtasks", pa.int32()), lambda operator: len(operator.finishing)),
    (_field("chain", _TEXT, nullable=True), lambda operator: operator.chain),
    (_field("coordinator", pa.bool_()), lambda operator: operator.coordinator),
)
_OF_STATES: Final[Sequence[_Column]] = (
    (_field("operator", _TEXT), lambda state: state.operator),
    (_field("state", _TEXT), lambda state: state.name),
    (_field("mode", _TEXT), lambda state: state.mode.value),
    (_field("kind", _TEXT, nullable=True), lambda state: state.kind and state.kind.value),
    (_field("edge", _TEXT, nullable=True), lambda state: state.edge),
    (_field("key_columns", pa.list_(_TEXT)), lambda state: list(state.key_columns)),
    (_field("columns", pa.list_(_COLUMN)), lambda state: _columns(state)),
    (_field("schemas", pa.int32()), lambda state: len(state.schemas)),
)
METADATA_TABLES: Final[Mapping[str, pa.Schema]] = {
    "checkpoints": pa.schema([_ID, *(field for field, _ in _OF_CHECKPOINTS)]),
    "operators": pa.schema([_ID, *(field for field, _ in _OF_OPERATORS), _field("states", pa.int32())]),
    "states": pa.schema(
        [
            _ID,
            *(field for field, _ in _OF_STATES),
            _field("handles", pa.int64()),
            _field("layers", pa.int32()),
            _field("rows", pa.int64(), nullable=True),
            _field("segments", pa.int64()),
            _field("bytes", pa.int64()),
        ]
    ),
    "handles": pa.schema([_ID, *(_handle_field(MANIFEST_SCHEMA.field(name)) for name in PLANNING_COLUMNS)]),
}
"""The columns of each table; docs/metadata-tables.md lists them. ``checkpoint_id`` comes first.

- ``checkpoints``: a row per checkpoint, newest first. ``rows`` counts stored rows, of all layers;
  ``segments`` and ``bytes`` count distinct segments. ``stop`` is ``drain`` or ``no_drain`` if the
  job stops there. ``content_of``: for a repair, the checkpoint whose content it has.
- ``operators``: a row per checkpoint and operator, in the order of the job graph. ``operator`` is
  the uid. ``status`` is ``running``, ``partially_finished`` or ``fully_finished``.
- ``states``: a row per checkpoint and state. ``columns`` are those of its rows in the newest
  schema, with Arrow types as text and field ids (null for stateformat's own columns); ``schemas``
  counts all schemas. ``layers``: the most layers that a subtask has. ``rows`` counts stored rows: a
  key in three layers counts three times.
- ``handles``: a row per checkpoint and handle, in the manifest's order (SPEC.md section 4.1).
"""


def metadata_table(store: _Store, name: str, checkpoint_id: int | None = None) -> pa.Table:
    """Return one of :data:`METADATA_TABLES`, for one checkpoint or the whole history.

    Newest checkpoint first. ``checkpoints`` and ``operators`` read records, the others manifests
    too. Raises ``InvalidInput`` for an unknown table, and as ``CheckpointStore.checkpoints`` does.
    """
    if name not in METADATA_TABLES:
        raise InvalidInput(f"there is no table {name!r} of metadata; {known_names(list(METADATA_TABLES), name)}")
    if name in _OF_RECORDS and checkpoint_id is None:
        tables = [_OF_RECORDS[name](record) for record in store.history()]
    else:
        found = store.checkpoints(None if checkpoint_id is None else [checkpoint_id])
        tables = list(_each(found, name))
    return pa.concat_tables([METADATA_TABLES[name].empty_table(), *tables])


@dataclass(frozen=True)
class MetadataRows(ArrowStream):
    """One of :data:`METADATA_TABLES`, for these checkpoints in their order. Picklable.

    Only one manifest is in memory at a time.
    """

    name: str
    checkpoints: tuple[Checkpoint, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, name: str, checkpoints: Sequence[Checkpoint]) -> MetadataRows:
        """Return all columns."""
        return cls(name, tuple(checkpoints), tuple(METADATA_TABLES[name].names))

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch. Reads nothing."""
        return pa.schema([METADATA_TABLES[self.name].field(name) for name in self.columns])

    @property
    def stored_bytes(self) -> int:
        """About how many stored bytes are read: the manifests for ``handles``, else almost none."""
        return sum(one.record.manifest.size_bytes for one in self.checkpoints) if self.name == "handles" else 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows."""
        for checkpoint in self.checkpoints:
            yield from _made(self.name, copy(checkpoint)).select(self.columns).to_batches()

    def select(self, columns: Sequence[str]) -> MetadataRows:
        """Return the same rows with these columns only, in this order.

        Raises ``InvalidInput`` for a column that does not exist or is named twice.
        """
        where = f"the table {self.name!r} of metadata"
        return replace(self, columns=chosen_columns(where, METADATA_TABLES[self.name].names, columns))

    def split(self, parts: int) -> list[MetadataRows]:
        """Return the same rows in up to ``parts`` parts with about the same number of checkpoints.

        Read in order, the parts give the rows in order. Raises ``InvalidInput`` for less than one.
        """
        share = max(1, -(-len(self.checkpoints) // checked_parts(parts)))
        starts = range(0, len(self.checkpoints), share)
        return [replace(self, checkpoints=self.checkpoints[start : start + share]) for start in starts] or [self]


def _made(name: str, checkpoint: Checkpoint) -> pa.Table:
    """Return a table of one checkpoint."""
    return _OF_RECORDS[name](checkpoint.record) if name in _OF_RECORDS else _OF_MANIFESTS[name](checkpoint)


def _each(checkpoints: Sequence[Checkpoint], name: str) -> Iterator[pa.Table]:
    """Yield a table of each checkpoint; several are read at a time if reading is mostly waiting."""
    at_once = max((one.storage.reads_at_once for one in checkpoints), default=1)
    calls = (partial(_made, name, copy(one)) for one in checkpoints)
    with closing(prefetch(calls, workers=max(1, at_once), depth=max(1, at_once))) as tables:
        yield from tables


def _rows(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), METADATA_TABLES[name])


def _row(checkpoint_id: int, columns: Sequence[_Column], of: Any) -> dict[str, Any]:
    return {_ID.name: checkpoint_id, **{field.name: value(of) for field, value in columns}}


def _has_finished(operator: Operator) -> bool:
    return operator.status is Status.FULLY_FINISHED


def _checkpoints(record: Record) -> pa.Table:
    return _rows("checkpoints", [_row(record.checkpoint_id, _OF_CHECKPOINTS, record)])


def _operators(record: Record) -> pa.Table:
    states = Counter(state.operator for state in record.states)
    return _rows(
        "operators",
        [
            {**_row(record.checkpoint_id, _OF_OPERATORS, operator), "states": states[operator.uid]}
            for operator in record.graph.operators
        ],
    )


def _states(checkpoint: Checkpoint) -> pa.Table:
    handles = checkpoint.outline
    runs = {name: (start, stop - start) for name, start, stop in state_runs(handles)}
    rows = []
    for state in checkpoint.states:
        mine = handles.slice(*runs.get((state.operator, state.name), (0, 0)))
        rows.append({**_row(checkpoint.id, _OF_STATES, state), **_held(mine)})
    return _rows("states", rows)


def _columns(state: State) -> list[dict[str, Any]]:
    fields = {item.name: item for item in state.current.fields}
    rows = []
    for column in segment_schema(state):
        item = fields.get(column.name)
        row = {"name": column.name, "type": str(column.type), "nullable": column.nullable, "id": None, "default": None}
        if item is not None:
            row |= {"nullable": item.nullable, "id": item.id, "default": item.default}
        if column.name != KEY_GROUP.name:
            rows.append(row)
    return rows


def _held(handles: pa.Table) -> dict[str, Any]:
    """Return what the handles of one state hold."""
    codes, count = codes_of(handles["path"])
    sizes = np.zeros(count, np.int64)
    sizes[codes[codes >= 0]] = integers(handles["size_bytes"])[codes >= 0]
    rows = handles["rows"]
    owned = np.stack([integers(handles["subtask"]), integers(handles["layer"])], axis=1)
    layers = np.unique(owned[codes >= 0], axis=0)[:, 0]
    return {
        "handles": handles.num_rows,
        "layers": int(np.unique(layers, return_counts=True)[1].max(initial=0)),
        "rows": None if rows.null_count else pc.sum(rows).as_py() or 0,
        "segments": count,
        "bytes": int(sizes.sum()),
    }


def _handles(checkpoint: Checkpoint) -> pa.Table:
    handles, schema = checkpoint.outline, METADATA_TABLES["handles"]
    number = pa.repeat(pa.scalar(checkpoint.id, pa.int64()), handles.num_rows)
    columns = [handles[name].cast(schema.field(name).type) for name in PLANNING_COLUMNS]
    return pa.Table.from_arrays([number, *columns], schema=schema)


_OF_RECORDS: Final[Mapping[str, Callable[[Record], pa.Table]]] = {"checkpoints": _checkpoints, "operators": _operators}
_OF_MANIFESTS: Final[Mapping[str, Callable[[Checkpoint], pa.Table]]] = {"states": _states, "handles": _handles}
