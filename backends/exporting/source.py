"""What is exported: the rows of a state, in one checkpoint or in several; the columns that a table
has for them; and which of the checkpoints a table holds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

import pyarrow as pa

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, StorageError
from stateformat.inspecting import StateRange
from stateformat.model import Field, Mode, ParentRef, Record, State
from stateformat.reading import Checkpoint, StateRows
from stateformat.schema import children
from stateformat.store import CheckpointStore
from stateformat.tables import ArrowStream

from .files import Place

Step = Callable[[int], None]
"""Called with the number of rows read, after each batch."""
Stream = Callable[[Sequence[int]], ArrowStream]
"""From the ids of checkpoints to the rows of a state in them."""


@dataclass(frozen=True)
class Source:
    """The rows of one state; :func:`one_checkpoint` and :func:`several_checkpoints` make it."""

    state: State
    job_id: str
    checkpoints: tuple[ParentRef, ...]
    """The ids ascend."""
    rows_of: Stream
    several: bool = False
    """Whether rows have ``_checkpoint_id``, and a table may hold those of several checkpoints."""
    subtask: int | None = None
    where: str | None = None
    with_expired: bool = False
    beside: frozenset[tuple[str, str]] = frozenset()
    """Operator and name of all states of the checkpoints, which may get the same folder."""

    def __str__(self) -> str:
        return f"{self.state.operator}/{self.state.name}"

    def stream(self, checkpoint_ids: Sequence[int] | None = None) -> ArrowStream:
        """Return the rows of all the checkpoints, or of some of them.

        Raises ``InvalidInput`` for a condition that is not valid on the columns of the state.
        """
        ids = [int(ref.checkpoint_id) for ref in self.checkpoints] if checkpoint_ids is None else checkpoint_ids
        rows = self.rows_of(ids)
        if self.where is None:
            return rows
        from ..querying import where_rows

        try:
            return where_rows(rows, self.where)
        except InvalidInput as error:
            if error.kind is ErrorKind.MISSING_DEPENDENCY:
                raise
            raise InvalidInput(f"{self}: {error}", kind=error.kind, **error.details) from error

    @property
    def rows(self) -> int | None:
        """How many rows there are; None if only reading them would show it."""
        rows = None if self.several or self.where is not None else self.stream()
        if not isinstance(rows, StateRows):
            return None
        counts = rows.task.slices["rows"].to_pylist()
        # Other systems do not record how many rows they have, and no system how many have expired.
        return None if None in counts or rows.state.ttl_now_us is not None else sum(counts)

    @property
    def selection(self) -> str:
        """Which of the rows of the state these are, as JSON: the same text for the same
        selection.
        """
        chosen: dict[str, object] = {"subtask": self.subtask, "where": self.where}
        # Tables that an older release began have only these members.
        return json.dumps({**chosen, "with_expired": True} if self.with_expired else chosen)

    @property
    def selection_digest(self) -> str:
        """A short name of :attr:`selection`."""
        return hashlib.sha256(self.selection.encode(errors="surrogateescape")).hexdigest()[:12]


def one_checkpoint(
    checkpoint: Checkpoint,
    state: State,
    *,
    subtask: int | None = None,
    where: str | None = None,
    with_expired: bool = False,
) -> Source:
    """Return the rows of a state of a checkpoint, or the part of them that one subtask owns.

    ``with_expired``: also rows that had expired at the checkpoint.

    Raises ``InvalidInput`` for a subtask that the operator does not have.
    """
    parallelism = checkpoint.graph.operator(state.operator).parallelism
    if subtask is not None and subtask >= parallelism and state.mode is not Mode.COMMITTABLES:
        raise InvalidInput(
            f"operator {state.operator!r} has subtasks 0 to {parallelism - 1}; there is no subtask {subtask}",
            kind=ErrorKind.INVALID_PARALLELISM,
            operator=state.operator,
        )

    shown = checkpoint.with_expired() if with_expired else checkpoint

    def rows_of(checkpoint_ids: Sequence[int]) -> ArrowStream:
        assert list(checkpoint_ids) == [checkpoint.id]
        if subtask is None:
            return shown.state(state)
        return StateRows.of(shown.read(state.operator, state.name, subtask))

    record = checkpoint.record
    beside = _names_in([record])
    return Source(
        state,
        record.job_id,
        (record.ref,),
        rows_of,
        subtask=subtask,
        where=where,
        with_expired=with_expired,
        beside=beside,
    )


def several_checkpoints(
    store: CheckpointStore,
    records: Sequence[Record],
    newest: Record,
    operator: str,
    state: str,
    *,
    where: str | None = None,
    with_expired: bool = False,
) -> Source:
    """Return the rows of a state in several checkpoints of a history, with ``_checkpoint_id``.

    ``records`` are from ``store.history()``. The rows have the columns that the state has in
    ``newest``, or, if that does not have the state, in the newest of the others that does. Raises
    as ``CheckpointStore.states_over``; no record is read again.
    """

    def rows_of(checkpoint_ids: Sequence[int]) -> StateRange:
        wanted = set(checkpoint_ids)
        chosen = [record for record in records if record.checkpoint_id in wanted]
        if newest.checkpoint_id not in wanted:
            chosen.append(newest)
        opened = [store.checkpoint_of(record) for record in chosen]
        found = StateRange.of(opened, operator, state, with_expired=with_expired)
        return replace(found, sources=tuple(one for one in found.sources if one.checkpoint_id in wanted))

    refs = tuple(sorted(record.ref for record in records))
    declared = rows_of([int(ref.checkpoint_id) for ref in refs]).state
    beside = _names_in([*records, newest])
    return Source(
        declared, newest.job_id, refs, rows_of, several=True, where=where, with_expired=with_expired, beside=beside
    )


def _names_in(records: Sequence[Record]) -> frozenset[tuple[str, str]]:
    return frozenset((state.operator, state.name) for record in records for state in record.states)


def folder_names(sources: Sequence[Source]) -> Iterator[tuple[str, str]]:
    """Return a folder for each operator and state, distinct on every file system.

    A name that cannot be that of a folder, that looks like an option (``-x``), or that differs from
    another of the checkpoints in case only, gets the digest of the original name: the same in every
    export of them, also of one state.
    """
    names = {(source.state.operator, source.state.name) for source in sources}
    names.update(*(source.beside for source in sources))
    operators = _safe({operator for operator, _ in names})
    for source in sources:
        mine = {name for operator, name in names if operator == source.state.operator}
        yield operators[source.state.operator], _safe(mine)[source.state.name]


_NAME_LENGTH = 80
_PLAIN_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


def _safe(names: set[str]) -> dict[str, str]:
    folded = [name.lower() for name in names]
    found: dict[str, str] = {}
    for name in names:
        plain = "".join(char if char.lower() in _PLAIN_NAME else "_" for char in name)[:_NAME_LENGTH]
        alone = folded.count(name.lower()) == 1 or name == name.lower()
        if plain != name or not alone or name[:1] in ("", "_", "-"):
            digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
            short = f"{plain.lstrip('_-') or 'state'}_{digest[:8]}"
            # Names can be made up that have the same eight digits, or are such a name themselves.
            plain = short if short.lower() not in (*folded, *found.values()) else f"{short}{digest[8:]}"
        found[name] = plain
    return found


def digest63(*parts: object) -> int:
    """Return a number below 2^63 for some values."""
    text = json.dumps([str(part) for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def batches_of(stream: ArrowStream, step: Step) -> Iterator[pa.RecordBatch]:
    """Stream the rows; ``step`` is called with the number of each batch."""
    for batch in stream.batches():
        yield batch
        step(batch.num_rows)


class Format(StrEnum):
    """The format of tables."""

    ICEBERG = "iceberg"
    DELTA = "delta"


@dataclass(frozen=True)
class Note:
    """A column that is not in the table as it is in the state."""

    column: str
    """Its name in the state; nested ones with dots."""
    message: str


@dataclass(frozen=True)
class Column:
    """A column of a table, or a field in one."""

    key: str
    """Its permanent name: ``#7`` for the field with id 7 of the state, else its name."""
    name: str
    type: pa.DataType
    """With the names in the table, without field ids."""
    children: tuple[Column, ...] = ()


@dataclass(frozen=True)
class Columns:
    """The columns of a table, in the order of the stream, and what the user must know about
    them.
    """

    all: tuple[Column, ...]
    notes: tuple[Note, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table; all are nullable."""
        return pa.schema([pa.field(column.name, column.type) for column in self.all])

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the stream as rows of the table.

        Raises ``DamagedCheckpoint`` for text that is not UTF-8, which readers of tables would fail
        on.
        """
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DamagedCheckpoint(
                f"some values are not valid for their type and cannot be in a table: {error}. `ckpt validate --level "
                "full` says where; an export to Parquet keeps their bytes",
                kind=ErrorKind.DAMAGED_SEGMENT,
            ) from error
        schema = self.schema
        arrays = [as_type(array, item.type) for array, item in zip(batch.columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


_LABELS: Final = {Format.ICEBERG: "Iceberg", Format.DELTA: "Delta"}
_REFUSED: Final = {Format.ICEBERG: re.compile(r"[.]"), Format.DELTA: re.compile(r"[ ,;{}()\n\t=]")}
"""Characters that a name may not have. Readers of Iceberg take a dot as the path to a nested
column.
"""


def plan_columns(state: State, stream: pa.Schema, file_format: Format) -> Columns:
    """Return the columns that a table of this format has for a stream of a state's rows."""
    planner = _Planner(file_format)
    fields = {item.name: item for item in state.current.fields}
    found = planner.columns(list(stream), [fields.get(name) for name in stream.names], ())
    return Columns(found, tuple(planner.notes))


class _Planner:
    """Names and types of one table, and the notes on them."""

    def __init__(self, file_format: Format) -> None:
        self.notes: list[Note] = []
        self._format = file_format

    def columns(
        self, items: Sequence[pa.Field], fields: Sequence[Field | None], path: tuple[str, ...]
    ) -> tuple[Column, ...]:
        """Return the columns of one level."""
        names = list(self._names([item.name for item in items], path))
        return tuple(
            self._column(item, field, name, path) for item, field, name in zip(items, fields, names, strict=True)
        )

    def _names(self, given: Sequence[str], path: tuple[str, ...]) -> Iterator[str]:
        # A name that can stay is kept, wherever a name that must change is.
        used: set[str] = set()
        kept = []
        for name in given:
            stays = not _REFUSED[self._format].search(name) and name.lower() not in used
            kept.append(stays)
            if stays:
                used.add(name.lower())
        for name, stays in zip(given, kept, strict=True):
            if stays:
                yield name
                continue
            plain = _REFUSED[self._format].sub("_", name)
            new = next(option for option in _numbered(plain) if option.lower() not in used)
            used.add(new.lower())
            self.notes.append(Note(".".join((*path, name)), f"is named {new!r}: {self._why(name)}"))
            yield new

    def _why(self, name: str) -> str:
        refused = _REFUSED[self._format].search(name)
        if refused:
            return f"{_LABELS[self._format]} has no {refused[0]!r} in names"
        return "another column has this name for tools that ignore case"

    def _column(self, item: pa.Field, field: Field | None, name: str, path: tuple[str, ...]) -> Column:
        here = (*path, item.name)
        key = ".".join(here) if field is None else f"#{field.id}"
        inner = _inner(item.type)
        if not inner:
            return Column(key, name, self._widened(item.type, here))
        known = children(field) if field is not None else ()
        below = known if len(known) == len(inner) else [None] * len(inner)
        if pa.types.is_struct(item.type):
            parts = self.columns(inner, below, here)
        else:
            parts = tuple(self._column(one, of, one.name, here) for one, of in zip(inner, below, strict=True))
        return Column(key, name, nested(item.type, [part.type for part in parts], [part.name for part in parts]), parts)

    def _widened(self, kind: pa.DataType, path: tuple[str, ...]) -> pa.DataType:
        plain = _PLAIN.get(kind, kind)
        if self._format is Format.ICEBERG and plain in (pa.int8(), pa.int16()):
            self.notes.append(Note(".".join(path), f"is int instead of {plain}: Iceberg has no {plain}"))
            return pa.int32()
        if self._format is Format.DELTA and plain == pa.timestamp("us"):
            self.notes.append(Note(".".join(path), "is timestamp_ntz, which needs a reader of Delta's version 3"))
        return plain


_PLAIN: Final = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}
"""Types that another tool's stream may have in place of the format's own types."""


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1


def _inner(kind: Any) -> list[pa.Field]:
    """Return the fields of a nested type, in the order of ``schema.children``."""
    if pa.types.is_struct(kind):
        return list(kind)
    if pa.types.is_map(kind):
        return [kind.key_field.with_name("key"), kind.item_field.with_name("value")]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [kind.value_field.with_name("element")]
    return []


def nested(kind: Any, types: Sequence[pa.DataType], names: Sequence[str], ids: Sequence[int] = ()) -> pa.DataType:
    """Return a nested type of the same sort with other fields, named as in Parquet."""
    parts = [
        pa.field(name, inner, metadata={"PARQUET:field_id": str(ids[i])} if ids else None)
        for i, (name, inner) in enumerate(zip(names, types, strict=True))
    ]
    if pa.types.is_struct(kind):
        return pa.struct(parts)
    if pa.types.is_map(kind):
        return pa.map_(parts[0].with_name("key").with_nullable(False), parts[1].with_name("value"))
    return pa.list_(parts[0].with_name("element"))


def as_type(array: Any, kind: Any) -> Any:
    """Return the same values in a type that may have other names and wider integers inside.

    Raises ``InvalidInput`` for values that do not fit.
    """
    if array.type == kind and _same_names(array.type, kind):
        return array
    if pa.types.is_large_list(array.type):
        array = array.cast(pa.list_(array.type.value_field))
    if pa.types.is_struct(kind):
        parts = [as_type(array.field(i), kind.field(i).type) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind):
        return _rebuilt(array, kind, as_type(array.values, kind.value_type))
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays(
            [as_type(array.keys, kind.key_type), as_type(array.items, kind.item_type)],
            fields=[kind.key_field, kind.item_field],
        )
        return _rebuilt(array, kind, entries)
    try:
        return array.cast(kind)
    except pa.ArrowException as error:
        raise InvalidInput(
            f"values of {array.type} do not fit in {kind}: {error}", kind=ErrorKind.SCHEMA_MISMATCH
        ) from error


def _same_names(one: Any, other: Any) -> bool:
    """Return whether nested types have the same names: Arrow ignores names when it compares
    lists.
    """
    inner, there = _fields(one), _fields(other)
    return [item.name for item in inner] == [item.name for item in there] and all(
        _same_names(a.type, b.type) for a, b in zip(inner, there, strict=True)
    )


def _fields(kind: Any) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _rebuilt(array: Any, kind: Any, entries: Any) -> Any:
    """Return a list or map array with other entries."""
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        kind, len(array), [validity, offsets], null_count=array.null_count, offset=array.offset, children=[entries]
    )


def require(library: str, module: str, least: tuple[int, int], extra: str) -> None:
    """Raise ``InvalidInput`` if a library is missing, or too old to work as promised.

    ``least`` is the first suitable release, as (major, minor).
    """
    try:
        import_module(module)
    except ImportError as error:
        raise InvalidInput(
            f"tables of this format need {library}, and {error.name or module} is not installed: pip install "
            f"'stateformat[{extra}]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        ) from error
    installed = version(library)
    if tuple(int(part) for part in installed.split(".")[:2]) < least:
        raise InvalidInput(
            f"{library} {installed} is installed, and tables of this format need {'.'.join(map(str, least))} "
            f"or newer: pip install --upgrade 'stateformat[{extra}]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )


def attempt_of(source: Source, attempt_id: str) -> str:
    """Return what identifies an export among those of checkpoints with the same id."""
    return attempt_id if source.several else f"{attempt_id}/{source.selection_digest}"


def missing_of(source: Source, place: Place, has: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ids of the checkpoints that a table does not have.

    Raises ``InvalidInput`` for a table with the rows of another checkpoint of the same id.
    """
    missing = []
    for number, attempt in source.checkpoints:
        known = has.get(int(number))
        if known == attempt_of(source, attempt):
            continue
        if known is not None and source.several:
            raise InvalidInput(
                f"the table in {place} has checkpoint {number} of attempt {known}, and the store's is of attempt "
                f"{attempt}: another history; export to another folder",
                kind=ErrorKind.OTHER_JOB,
            )
        missing.append(int(number))
    return tuple(missing)


def other_table(place: Place, what: str, found: str | None, wanted: str) -> InvalidInput:
    """Return the error for a table that holds something else."""
    if found is None:
        message = f"{place} has a table that no export of a state has written"
    elif what == "rows":
        message = f"the table in {place} holds the rows {found}, and this export has those {wanted}"
    elif what == "selection":
        message = f"the table in {place} holds other rows of this state: not those of the choice {wanted}"
    else:
        message = f"the table in {place} is of {f'{what} {found!r}' if what else found}, and this export is of "
        message += repr(wanted) if what else wanted
    return InvalidInput(f"{message}; export to another folder", kind=ErrorKind.STORE_NOT_EMPTY)


def lost_race(place: Place) -> StorageError:
    """Return the error for a commit that another commit preceded."""
    return StorageError(
        f"another export or program changed the table in {place} meanwhile; nothing was added: export again"
    )
