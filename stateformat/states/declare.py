"""How a runtime declares its states: one function per mode or kind, each returning a :class:`~stateformat.model.State`.

Columns are given as users of Arrow give them: a ``pa.Schema``, a list of ``pa.field``, or a mapping name → type. Passing
``previous`` (the state as the parent checkpoint declares it) evolves it by SPEC.md section 5.7: ids follow names,
``renames`` says which column was called what, ``defaults`` fills rows written before a column existed.

Names beginning with ``_`` belong to the format. Every function raises ``InvalidInput`` for a name, type or key type that
the format does not hold; the fault is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypedDict, Unpack

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..graph import OperatorId
from ..keys import check_key_types
from ..model import Kind, Mode, SchemaVersion, State
from ..schema import make_fields
from .evolution import evolve

Columns: TypeAlias = "pa.Schema | Mapping[str, pa.DataType] | Iterable[pa.Field]"


class Evolution(TypedDict, total=False):
    """How a state has changed, as every function here that takes columns is given it."""

    defaults: Mapping[str, str] | None
    """What rows hold that are older than a column, by its name, as text (SPEC.md section 3.7)."""
    previous: State | None
    """The state as the parent checkpoint declares it."""
    renames: Mapping[str, str] | None
    """New names of columns by their old ones."""


def value_state(operator: str, name: str, *, keys: Columns, values: Columns, **evolution: Unpack[Evolution]) -> State:
    """Keyed state with one row per key."""
    return _declare(operator, name, Mode.KEYED, values, keys=keys, kind=Kind.VALUE, **evolution)


def map_state(
    operator: str, name: str, *, keys: Columns, map_key: pa.DataType, values: Columns, **evolution: Unpack[Evolution]
) -> State:
    """Keyed state with one row per key and ``_map_key``, which is of the type ``map_key``."""
    columns = pa.schema([pa.field("_map_key", map_key), *as_schema(values)])
    return _declare(operator, name, Mode.KEYED, columns, keys=keys, kind=Kind.MAP, **evolution)


def list_state(operator: str, name: str, *, keys: Columns, values: Columns, **evolution: Unpack[Evolution]) -> State:
    """Keyed state with a list per key: rows carry ``_index`` (int64), unique within the key."""
    return _declare(operator, name, Mode.KEYED, values, keys=keys, kind=Kind.LIST, **evolution)


def timers(operator: str, name: str, *, keys: Columns, values: Columns = (), **evolution: Unpack[Evolution]) -> State:
    """Event-time timers: rows carry ``_timestamp`` (int64, µs) and ``_tag`` (utf8)."""
    return _declare(operator, name, Mode.KEYED, values, keys=keys, kind=Kind.TIMERS, **evolution)


def even_split_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """A list of entries, dealt out in contiguous chunks at another parallelism."""
    return _declare(operator, name, Mode.EVEN_SPLIT, columns, **evolution)


def union_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """A list of entries, all of which every subtask gets at restore. Not allowed in a partially finished operator."""
    return _declare(operator, name, Mode.UNION, columns, **evolution)


def broadcast_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """Rows of which every subtask holds the same; each gets exactly one copy at restore."""
    return _declare(operator, name, Mode.BROADCAST, columns, **evolution)


def coordinator_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """What the operator's coordinator keeps: one handle per operator, handed over whole."""
    return _declare(operator, name, Mode.COORDINATOR, columns, **evolution)


def committables_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """What a two-phase-commit sink has prepared. ``_checkpoint_id`` and ``_attempt_id`` are added by the writer."""
    return _declare(operator, name, Mode.COMMITTABLES, columns, **evolution)


def progress_state(operator: str, name: str = "progress") -> State:
    """Per input: rows of ``_edge`` (utf8), ``_watermark`` (int64, µs) and ``_ended`` (bool)."""
    return _declare(operator, name, Mode.PROGRESS, pa.schema([]))


def in_flight_state(
    operator: str, name: str, *, edge: str, columns: Columns, keys: Columns = (), **evolution: Unpack[Evolution]
) -> State:
    """Records that a barrier overtook on ``edge``: ``_sender``, ``_receiver`` (int32), ``_seq`` (int64), then columns.

    ``keys`` are the key columns of a hash edge, and stand before ``columns``; none for other edges.
    """
    return _declare(operator, name, Mode.IN_FLIGHT, columns, keys=keys, edge=edge, **evolution)


def as_schema(columns: Columns) -> pa.Schema:
    """Columns, however they were given, as a schema; ``InvalidInput`` for what are none."""
    if isinstance(columns, pa.Schema):
        return columns
    try:
        if isinstance(columns, Mapping):
            return pa.schema([pa.field(name, dtype) for name, dtype in columns.items()])
        return pa.schema(list(columns))
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"{columns!r} are no columns: {error}; give a pa.Schema, a list of pa.field, or a mapping from names to types"
        ) from error


def _declare(
    operator: str,
    name: str,
    mode: Mode,
    columns: Columns,
    *,
    keys: Columns = (),
    kind: Kind | None = None,
    edge: str | None = None,
    defaults: Mapping[str, str] | None = None,
    previous: State | None = None,
    renames: Mapping[str, str] | None = None,
) -> State:
    key_schema, value_schema = as_schema(keys), as_schema(columns)
    schema = pa.schema([*key_schema, *value_schema])
    _check_names(operator, name, schema)
    if mode is Mode.KEYED and not len(key_schema):
        raise InvalidInput(f"keyed state {name!r} of {operator!r} has no key columns; give at least one")
    check_key_types([*key_schema, *(item for item in value_schema if item.name == "_map_key")])
    if previous is not None:
        if (previous.operator, previous.name) != (operator, name):
            raise InvalidInput(
                f"state {name!r} of {operator!r} is declared as what has become of state {previous.name!r} of "
                f"{previous.operator!r}, which is another state; give the previous of its own"
            )
        shape = (mode, kind, tuple(key_schema.names), edge)
        if (previous.mode, previous.kind, previous.key_columns, previous.edge) != shape:
            raise InvalidState(
                f"state {name!r} of {operator!r} was {previous.mode} {previous.kind or ''} by "
                f"{list(previous.key_columns)} and would be {mode} {kind or ''} by {key_schema.names}; that is a "
                "different state: give it another name",
                kind=ErrorKind.SCHEMA_CANNOT_EVOLVE,
            )
        return evolve(previous, schema, defaults=defaults, renames=renames)
    fields, last = make_fields(schema, defaults=defaults or {})
    return State(
        operator=OperatorId(operator),
        name=name,
        mode=mode,
        schemas=(SchemaVersion(1, fields),),
        kind=kind,
        key_columns=tuple(key_schema.names),
        edge=edge,
        last_field_id=last,
    )


def _check_names(operator: str, name: str, schema: pa.Schema) -> None:
    if not operator or not name:
        raise InvalidInput(f"state {name!r} of operator {operator!r}: neither name may be empty")
    seen: set[str] = set()
    for column in schema.names:
        if not column or (column.startswith("_") and column != "_map_key"):
            raise InvalidInput(
                f"column {column!r} of state {name!r}: names are not empty and those beginning with '_' belong to the "
                "format; rename it",
                column=column,
            )
        if column in seen:
            raise InvalidInput(f"column {column!r} stands twice in state {name!r}; rename one", column=column)
        seen.add(column)
