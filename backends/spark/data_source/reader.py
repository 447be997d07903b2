"""A read by the data source: its options, the stream they name, and the tasks that read it.

Spark passes options as text, and their names in any case. A stream is planned once and split among
Spark's tasks. Filters on all key columns become keys to read. Spark still applies every filter
itself, so a read may return too many rows, but never too few, and any filter that is in doubt here
is left to Spark.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, EqualNullSafe, EqualTo, Filter, In, InputPartition, IsNull

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.inspecting import METADATA_TABLES, MetadataRows, StateChanges, StateRange
from stateformat.model import known_names
from stateformat.paths import savepoint_url
from stateformat.reading import StateRows, keys_from_json
from stateformat.storage import checkpoint_address, is_id, split_name, without_secrets
from stateformat.store import CheckpointStore, open as open_at

from ..worker_process import without_traceback

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


STORAGE_PREFIX: Final = "option."
"""``option.KEY`` is passed to the storage as KEY, like ``ckpt --option KEY=VALUE``."""
_STORAGE: Final = ("endpoint_url",)
"""Storage options that need no prefix. Others may clash with ours: S3 has an option ``key``."""
OPTIONS: Final = (
    *("operator", "state", "checkpoint", "columns", "key", "changes_from", "changes_to", "every", "table"),
    *("push_filters", "partitions", "with_expired", "allow_outside", *_STORAGE),
)
"""The options of a read, besides ``option.KEY``."""
ALL: Final = "all"
"""The value of ``checkpoint`` that reads all checkpoints of the history."""
_BOOLEANS: Final = {"true": True, "false": False}


@dataclass(frozen=True)
class ReadOptions:
    """What to read: a state, its changes between two checkpoints, or a table of metadata."""

    url: str
    checkpoint: int | None = None
    """None: the newest."""
    all_checkpoints: bool = False
    operator: str | None = None
    state: str | None = None
    columns: tuple[str, ...] | None = None
    key: str | None = None
    """One key or an array of them, as JSON."""
    changes: tuple[int, int | None] | None = None
    """The first and the last checkpoint; a last of None is the newest."""
    every: bool = False
    """Whether to read the changes of each checkpoint in between, too."""
    table: str | None = None
    push_filters: bool | None = None
    """Whether filters may limit what is read; None: only where Spark handles that correctly."""
    partitions: int | None = None
    with_expired: bool = False
    """Whether to read rows that had expired at their checkpoint, too."""
    allow_outside: bool = False
    storage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The address, without secrets."""
        return without_secrets(self.url)


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read, whose names are in lower case.

    Raises ``InvalidInput`` for an option that is unknown, has the wrong type, or contradicts
    another.
    """
    rest = dict(given)
    url, checkpoint = _address(rest)
    storage: dict[str, Any] = {}
    for name in [*rest]:
        if name.startswith(STORAGE_PREFIX) or name in _STORAGE:
            text = rest.pop(name)
            storage[name.removeprefix(STORAGE_PREFIX)] = _BOOLEANS.get(text.lower(), text)
    for name in rest:
        if name not in OPTIONS:
            raise InvalidInput(
                f"the data source stateformat has no option {name!r}; {known_names(OPTIONS, name)}. An option of the "
                f"storage is written {STORAGE_PREFIX}{name}"
            )
    if rest.get("checkpoint") is not None:
        if checkpoint is not None:
            raise InvalidInput(
                f"the address ends in @{checkpoint} and the option checkpoint is {rest['checkpoint']!r}; give one of "
                "them"
            )
        url, checkpoint = _checkpoint(url, rest)
    options = ReadOptions(
        url,
        checkpoint,
        all_checkpoints=rest.get("checkpoint", "").strip().lower() == ALL,
        operator=rest.get("operator"),
        state=rest.get("state"),
        columns=_columns(rest.get("columns")),
        key=rest.get("key"),
        changes=_changes(rest),
        every=_boolean(rest, "every"),
        table=rest.get("table"),
        push_filters=_boolean(rest, "push_filters") if "push_filters" in rest else None,
        partitions=_partitions(rest.get("partitions")),
        with_expired=_boolean(rest, "with_expired"),
        allow_outside=_boolean(rest, "allow_outside"),
        storage=storage,
    )
    _check_together(options, rest)
    return options


def _address(rest: dict[str, str]) -> tuple[str, int | None]:
    """Take the address out of the options: the URL, and the id if it is ``URL@ID``."""
    if "paths" in rest:
        raise InvalidInput("load() takes one store, and several paths are given; read each, and union them")
    path = rest.pop("path", "")
    if not path.strip():
        raise InvalidInput(
            "load() names no store; give the path or URL of one: load('s3://bucket/store')", kind=ErrorKind.INVALID_URL
        )
    url, checkpoint = checkpoint_address(path)
    if url.lower().startswith("memory:"):
        raise InvalidInput(
            f"{url} exists only in the process that made it, not in Spark's workers; give a store in a folder or on S3",
            kind=ErrorKind.INVALID_URL,
        )
    return url, checkpoint


def _checkpoint(url: str, rest: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the URL and id for the option ``checkpoint``: an id, all, or a savepoint's name."""
    given = rest["checkpoint"].strip()
    if given.lower() == ALL:
        return url, None
    if split_name(f"store@{given}")[1] is not None:
        return savepoint_url(url, given), None
    return url, _id(rest, "checkpoint", f", the name of a pin, or {ALL}")


def _id(rest: Mapping[str, str], name: str, other: str = "") -> int:
    digits = rest[name].strip()
    if not (digits.isascii() and digits.isdigit() and is_id(digits)):
        raise InvalidInput(
            f"the option {name} is {rest[name]!r}, not a checkpoint id; give one from 1 to 2^53 - 1{other}"
        )
    return int(digits)


def _boolean(rest: Mapping[str, str], name: str) -> bool:
    text = rest.get(name, "false").strip().lower()
    if text not in _BOOLEANS:
        raise InvalidInput(f"the option {name} is {rest[name]!r}; it is true or false")
    return _BOOLEANS[text]


def _partitions(text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 7 and int(digits)):
        raise InvalidInput(f"the option partitions is {text!r}; it is a number from 1 to 999999")
    return int(digits)


def _columns(text: str | None) -> tuple[str, ...] | None:
    """Parse names separated by commas, or a JSON array for names that contain commas."""
    if text is None:
        return None
    names: Any = [name.strip() for name in text.split(",")]
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"the option columns is {text!r:.200}, no array of JSON: {error}") from None
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidInput(
            f"the option columns is {text!r:.200}; write names with commas between them, or a JSON array"
        )
    return tuple(names)


def _changes(rest: Mapping[str, str]) -> tuple[int, int | None] | None:
    if "changes_from" not in rest:
        alone = next((name for name in ("changes_to", "every") if name in rest), None)
        if alone is not None:
            raise InvalidInput(f"the option {alone} is given without changes_from, where the changes begin")
        return None
    return _id(rest, "changes_from"), _id(rest, "changes_to") if "changes_to" in rest else None


def _check_together(options: ReadOptions, rest: Mapping[str, str]) -> None:
    """Raise ``InvalidInput`` for options that contradict each other, or name nothing to read."""
    given = {*rest, *(("checkpoint",) if options.checkpoint is not None else ())}
    for one, others in {
        "table": ("operator", "state", "key", "changes_from"),
        "changes_from": ("checkpoint", "key"),
    }.items():
        other = next((name for name in others if name in given), None)
        if one in rest and other is not None:
            raise InvalidInput(f"the options {one} and {other} cannot be combined; leave one out")
    if options.all_checkpoints and options.key is not None:
        raise InvalidInput("a key is looked up in one checkpoint, and the option checkpoint is all; leave one out")
    if options.table is None:
        missing = next((name for name in ("operator", "state") if name not in rest), None)
        if missing is not None:
            raise InvalidInput(
                f"the option {missing} is missing: name the operator and the state to be read, or a table of metadata "
                f"(table). `ckpt inspect {options.shown}` lists the states, and so does option('table', 'states')",
                kind=ErrorKind.UNKNOWN_OPERATOR if missing == "operator" else ErrorKind.UNKNOWN_STATE,
            )


PART_BYTES_MAX: Final = 64 * 2**20
"""If a partition would have more stored state than this, there are more of them than cores."""
PART_BYTES_MIN: Final = 4 * 2**20
"""If a partition would have less stored state than this, there are fewer of them than cores."""


Readable = StateRows | StateRange | StateChanges | MetadataRows


def open_store(options: ReadOptions) -> CheckpointStore:
    """Return the store of a read. Reads nothing, unless the URL may be ``STORE@NAME``."""
    return open_at(options.url, allow_outside=options.allow_outside, **options.storage)


def stream_of(options: ReadOptions) -> Readable:
    """Find the checkpoints and the rows that a read asks for. The result is picklable.

    Raises ``InvalidInput`` for a table, operator, state, column or key that does not exist,
    ``NotFound``, and whatever a damaged checkpoint raises.
    """
    found = _whole(open_store(options), options)
    if options.key is not None:
        assert isinstance(found, StateRows)
        found = found.at_keys(keys_from_json(found.state, options.key, many=True))
    return found if options.columns is None else found.select(options.columns)


def _whole(store: CheckpointStore, options: ReadOptions) -> Readable:
    if options.table is not None:
        if options.table not in METADATA_TABLES:
            raise InvalidInput(
                f"a store has no table {options.table!r}; {known_names([*METADATA_TABLES], options.table)}"
            )
        ids = None if options.checkpoint is None else [options.checkpoint]
        return MetadataRows.of(options.table, store.checkpoints(ids))
    assert options.operator is not None
    assert options.state is not None
    if options.changes is not None:
        start, end = options.changes
        last = store.open().id if end is None else end
        return store.changes(
            options.operator, options.state, start, last, every=options.every, with_expired=options.with_expired
        )
    if options.all_checkpoints:
        return store.states_over(options.operator, options.state, with_expired=options.with_expired)
    rows = store.open(options.checkpoint).state(options.operator, options.state)
    return rows.with_expired() if options.with_expired else rows


def parts_of(stream: Readable, parts: int | None) -> Sequence[Readable]:
    """Split a stream into ``parts``; if None, into as many as :func:`part_count` returns."""
    return stream.split(parts or part_count(stream.stored_bytes))


def part_count(size_bytes: int) -> int:
    """Return how many tasks read this much stored state. A worker knows only its own cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(-(-size_bytes // PART_BYTES_MAX), min(cores, size_bytes // PART_BYTES_MIN), 1)


KEYS_MAX: Final = 10_000
"""If the filters allow more keys than this, everything is read: that costs less."""


def with_keys_of(rows: Readable, filters: Sequence[Filter]) -> Readable:
    """Return only the rows whose keys can pass all filters; all rows if that is in doubt."""
    if not isinstance(rows, StateRows) or rows.keys is not None:
        return rows
    types = {field.name: field.type for field in rows.task.schema}
    allowed = [_values(name, filters) for name in rows.state.key_columns if not pa.types.is_struct(types[name])]
    found = [values for values in allowed if values is not None]
    if not found or len(found) < len(rows.state.key_columns) or prod(map(len, found)) > KEYS_MAX:
        return rows
    keys: list[Mapping[str, Any]] = [dict(zip(rows.state.key_columns, key, strict=True)) for key in product(*found)]
    try:
        return rows.at_keys(keys)
    except InvalidInput:
        return rows  # In Python, the value of a filter may have another type.


def _values(name: str, filters: Sequence[Filter]) -> Sequence[Any] | None:
    """Return the values that the strictest filter allows for a column; None if none limits it."""
    fewest: Sequence[Any] | None = None
    for one in filters:
        if getattr(one, "attribute", None) != (name,):
            continue
        match one:
            case EqualTo(value=value):
                values: Sequence[Any] = [] if value is None else [value]
            case EqualNullSafe(value=value):
                values = [value]
            case In(value=value):
                values = [item for item in value if item is not None]
            case IsNull():
                values = [None]
            case _:
                continue
        fewest = values if fewest is None or len(values) < len(fewest) else fewest
    return fewest


def spark_columns(schema: pa.Schema) -> StructType:
    """Return the Spark columns for Arrow columns; timestamps without a zone are ``timestamp_ntz``.

    Raises ``InvalidInput`` for two names that differ only in case: Spark would confuse them.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    seen: dict[str, str] = {}
    for name in schema.names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise InvalidInput(
                f"columns {other!r} and {name!r} differ in case only, and Spark would not tell them apart; name one of "
                "them, and the others you need, in the option columns",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
    columns: StructType = from_arrow_schema(schema)
    return columns


def arrow_columns(columns: StructType) -> pa.Schema:
    """Return the Arrow columns that Spark expects from a source with these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema

    schema: pa.Schema = to_arrow_schema(columns, timezone="UTC")
    return schema


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with exactly this schema, whose columns have the same names in this order.

    Values are copied only where Spark uses another width (binary of a fixed size).
    """
    pairs = zip(batch.columns, schema, strict=True)
    columns = [column if column.type == field.type else column.cast(field.type) for column, field in pairs]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


SPARK_KEEPS_FILTERS_APART: Final = hasattr(DataSourceReader, "pushLimit")
"""Whether Spark plans the filters of each query separately.

Spark 4.3 does not: a DataFrame keeps the plan that it last made with filters, and reads no more
than that for any other query, or for another use in the same query. Rows are missing without a
warning. The fix came with the pushdown of limits (SPARK-58551).
"""
_FILTERS_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
"""The module that a worker runs to plan a read with filters."""


def reader_of(options: ReadOptions, found: Readable, columns: StructType) -> DataSourceReader:
    """Return a reader of these columns: all of the stream, or those that a user named."""
    pushes = SPARK_KEEPS_FILTERS_APART if options.push_filters is None else options.push_filters
    kind = StateReaderWithFilters if pushes and _plans_filters() else StateReader
    return kind(options.partitions, chosen(found, columns), arrow_columns(columns))


class Part(InputPartition):  # type: ignore[misc]
    """What one task reads: ``value`` is one part of the stream."""


class StateReader(DataSourceReader):  # type: ignore[misc]
    """Reads a stream in parallel tasks."""

    def __init__(self, parts: int | None, stream: Readable, schema: pa.Schema) -> None:
        self._parts = parts
        self._stream: Readable | None = stream
        self._schema = schema

    def __getstate__(self) -> dict[str, Any]:
        # The reader is sent to every task, whose partition says what to read.
        return {**self.__dict__, "_stream": None}

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each task."""
        assert self._stream is not None
        with without_traceback():
            return [Part(part) for part in parts_of(self._stream, self._parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Stream the batches of one partition."""
        with without_traceback():
            for batch in partition.value.batches():
                yield fitted(batch, self._schema)


class StateReaderWithFilters(StateReader):
    """A reader that uses filters. Spark refuses it where filter pushdown is off."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name
        """Read only the keys that filters on all key columns allow. Spark still applies each."""
        assert self._stream is not None
        with without_traceback():
            self._stream = with_keys_of(self._stream, filters)
        return filters


def chosen(stream: Readable, columns: StructType) -> Readable:
    """Return the stream with only these columns. ``InvalidInput`` if names or types differ."""
    whole = spark_columns(stream.schema)
    if whole == columns:
        return stream
    types = {column.name: column.dataType for column in whole}
    for column in columns:
        if column.name not in types:
            raise InvalidInput(
                f"the schema names a column {column.name!r}, which is not read; {known_names([*types], column.name)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
        given, found = column.dataType.simpleString(), types[column.name].simpleString()
        if given != found:
            raise InvalidInput(
                f"the schema says that column {column.name!r} is {given}, and it is {found}; leave the schema out, and "
                "cast after reading",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
    return stream.select(columns.names)


def _plans_filters() -> bool:
    """Return whether this worker plans a read with filters, that is, filter pushdown is on.

    A planning worker does not see the session's settings. But each kind of planning runs its own
    module: either the daemon has imported it, or Python was started with it.
    """
    started = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _FILTERS_WORKER in sys.modules or (started is not None and started.name == _FILTERS_WORKER)
