"""States as programs declare them, and what users call them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeAlias, TypedDict, Unpack

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..graph import Operator, OperatorId
from ..keys import check_key_types
from ..model import Kind, Mode, SchemaVersion, State, TimerClock
from ..schema import make_fields
from ..ttl import CLOCKS, TTL_COLUMN, Ttl
from .evolution import evolve, full_names

# ---- names ---------------------------------------------------------------------------------------
#
# What a user's text names: ``UID``, ``UID/STATE`` or ``UID/STATE.COLUMN``.
#
# Uids, states and columns may themselves have slashes and dots. So a text may name several things:
# then it is refused with all of them, and nothing is decided by chance.


class Named(NamedTuple):
    """An operator by its uid, a state of it, or a column of that state."""

    operator: str
    state: str | None = None
    column: str | None = None

    def __str__(self) -> str:
        operator = f"operator {str(self.operator)!r}"
        if self.state is None:
            return operator
        state = f"state {self.state!r} of {operator}"
        return state if self.column is None else f"column {self.column!r} of {state}"


def named(text: str, states: Iterable[State], labels: Mapping[str, str] | None = None) -> Named | None:
    """Return what a text names; None for nothing that there is.

    ``labels``: what else operators are called, and their uids. A column may also be one that the
    state has not: only if the text names nothing else, and then of the state with the longest name.
    Raises ``InvalidInput`` for a text that names several things.
    """
    by_operator: dict[str, list[State]] = {}
    for state in states:
        by_operator.setdefault(state.operator, []).append(state)
    uids = {uid: uid for uid in by_operator}
    found: dict[Named, None] = {}
    unknown: list[Named] = []
    for label, uid in {**(labels or {}), **uids}.items():
        if text == label:
            found[Named(uid)] = None
        if not text.startswith(f"{label}/"):
            continue
        rest = text[len(label) + 1 :]
        for state in by_operator.get(uid, ()):
            if rest == state.name:
                found[Named(uid, state.name)] = None
            elif rest.startswith(f"{state.name}."):
                column = rest[len(state.name) + 1 :]
                if any(column in full_names(schema.fields) for schema in state.schemas):
                    found[Named(uid, state.name, column)] = None
                else:
                    unknown.append(Named(uid, state.name, column))
    if len(found) > 1:
        raise ambiguous(text, found)
    return next(iter(found), None) or max(unknown, key=lambda one: len(one.state or ""), default=None)


def ambiguous(text: str, found: Collection[Named]) -> InvalidInput:
    """Return the refusal of a text that names several things."""
    several = len({one.operator for one in found}) > 1
    advice = (
        "Give one of the operators another uid first (`ckpt rewrite STORE --rename UID=NEW`)"
        if several
        else "Declare one of the two under another name"
    )
    return InvalidInput(f"{text!r} may be {' or '.join(map(str, found))}. {advice}", name=text)


def labels_of(operators: Iterable[Operator]) -> dict[str, str]:
    """Return what users may call each operator, with its uid: that, or a name that only one has."""
    operators = list(operators)
    names = [operator.name for operator in operators]
    by_name = {
        operator.name: operator.uid for operator in operators if operator.name and names.count(operator.name) == 1
    }
    return {**by_name, **{operator.uid: operator.uid for operator in operators}}


def split_drop(
    drop: Iterable[str], states: Collection[State], uids: Iterable[str] = ()
) -> tuple[list[str], dict[tuple[str, str], frozenset[str]]]:
    """Split ``drop`` into names of operators and states, and columns by (operator, state).

    ``uids``: operators, if not only those of the states. Raises ``InvalidInput`` for a text that
    names several things.
    """
    labels = {uid: uid for uid in uids}
    others: list[str] = []
    columns: dict[tuple[str, str], frozenset[str]] = {}
    for text in drop:
        found = named(text, states, labels)
        if found is None or found.state is None or found.column is None:
            others.append(text)
        else:
            key = (found.operator, found.state)
            columns[key] = columns.get(key, frozenset()) | {found.column}
    return others, columns


def column_name(state: State, column: str) -> str:
    """Return a column as ``drop`` names it: ``UID/STATE.COLUMN``."""
    return f"{state.operator}/{state.name}.{column}"


# ---- declarations --------------------------------------------------------------------------------
#
# How a runtime declares its states: one function per mode or kind, each returning a
# :class:`~stateformat.model.State`.
#
# Columns are a ``pa.Schema``, a list of ``pa.field``, or a mapping name → type. Names beginning
# with ``_`` belong to the format. With ``previous``, the parent checkpoint's declaration, a state
# evolves (SPEC.md section 5.7); field ids follow names. Every function raises ``InvalidInput`` for
# names, types and key types that the format does not allow.
#
# With ``ttl``, rows of value, map and list state expire (section 6.5): the state gets the last
# column ``ttl_last_access``, which writers fill. If that is new to a state with rows, ``defaults``
# sets the time for the existing rows: ``{"ttl_last_access": "1790000000000000"}``, in µs.


Columns: TypeAlias = "pa.Schema | Mapping[str, pa.DataType] | Iterable[pa.Field]"


class Evolution(TypedDict, total=False):
    """How a state has changed since the parent checkpoint. See SPEC.md section 5.7."""

    defaults: Mapping[str, str] | None
    """By column name, the value for rows older than the column, as text (SPEC.md section 3.7)."""
    previous: State | None
    """The state as the parent checkpoint declares it."""
    renames: Mapping[str, str] | None
    """New names of columns by their old ones."""


class Expiring(Evolution, total=False):
    """The same for states whose rows may expire."""

    ttl: Ttl | None
    """How long rows live; None: for ever."""


def value_state(operator: str, name: str, *, keys: Columns, values: Columns, **options: Unpack[Expiring]) -> State:
    """Declare keyed state with one row per key. Columns: ``keys``, then ``values``.

    With ``ttl``, the last column is ``ttl_last_access``. Raises ``InvalidInput``, like all these
    functions, for names, types and key types that the format does not allow.
    """
    return _declare(operator, name, Mode.KEYED, values, keys=keys, kind=Kind.VALUE, **options)


def map_state(
    operator: str, name: str, *, keys: Columns, map_key: pa.DataType, values: Columns, **options: Unpack[Expiring]
) -> State:
    """Declare keyed state with one row per key and map key.

    Columns: ``keys``, ``_map_key`` of the type ``map_key``, then ``values``; with ``ttl`` also
    ``ttl_last_access``.
    """
    try:
        entry = pa.field("_map_key", map_key)
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"map state {name!r} of operator {operator!r} has the map_key {map_key!r}: {error}; give one Arrow type"
        ) from error
    return _declare(operator, name, Mode.KEYED, [entry, *as_schema(values)], keys=keys, kind=Kind.MAP, **options)


def list_state(operator: str, name: str, *, keys: Columns, values: Columns, **options: Unpack[Expiring]) -> State:
    """Declare keyed state with a list of rows per key.

    Columns: ``_index`` (int64, unique within the key), ``keys``, then ``values``; with ``ttl`` also
    ``ttl_last_access``.
    """
    return _declare(operator, name, Mode.KEYED, values, keys=keys, kind=Kind.LIST, **options)


def timers(
    operator: str,
    name: str,
    *,
    keys: Columns,
    values: Columns = (),
    clock: TimerClock = "event_time",
    **evolution: Unpack[Evolution],
) -> State:
    """Declare timers. Columns: ``_timestamp`` (int64, µs), ``_tag`` (utf8), ``keys``, ``values``.

    ``clock``: what ``_timestamp`` measures, ``"event_time"`` or ``"processing_time"``, which is µs
    since 1970, UTC.
    """
    if clock not in CLOCKS:
        raise InvalidInput(
            f"timers {name!r} of operator {operator!r} have the clock {clock!r}. Choose {CLOCKS[0]!r} or {CLOCKS[1]!r}."
        )
    return _declare(operator, name, Mode.KEYED, values, keys=keys, kind=Kind.TIMERS, clock=clock, **evolution)


def even_split_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """Declare a list of entries, split into contiguous chunks at another parallelism."""
    return _declare(operator, name, Mode.EVEN_SPLIT, columns, **evolution)


def union_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """Declare a list of entries that every subtask restores whole.

    No checkpoint can be taken while the operator is partially finished.
    """
    return _declare(operator, name, Mode.UNION, columns, **evolution)


def broadcast_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """Declare rows that are the same in every subtask; each restores one copy."""
    return _declare(operator, name, Mode.BROADCAST, columns, **evolution)


def coordinator_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """Declare the state of the operator's coordinator: one handle, restored whole."""
    return _declare(operator, name, Mode.COORDINATOR, columns, **evolution)


def committables_state(operator: str, name: str, *, columns: Columns, **evolution: Unpack[Evolution]) -> State:
    """Declare what a two-phase-commit sink prepares.

    The writer adds the columns ``_checkpoint_id`` (int64) and ``_attempt_id`` (utf8) in front.
    """
    return _declare(operator, name, Mode.COMMITTABLES, columns, **evolution)


def progress_state(operator: str, name: str = "progress") -> State:
    """Declare the progress of each input: a row with ``_edge`` (utf8), ``_watermark`` (int64, µs;
    −2⁶³: none yet, 2⁶³ − 1: the end) and ``_ended`` (bool), all not nullable.
    """
    return _declare(operator, name, Mode.PROGRESS, pa.schema([]))


def in_flight_state(
    operator: str, name: str, *, edge: str, columns: Columns, keys: Columns = (), **evolution: Unpack[Evolution]
) -> State:
    """Declare the records that a barrier overtook on ``edge``.

    Columns: ``_sender`` and ``_receiver`` (int32, subtasks), ``_seq`` (int64, ascending along a
    channel), the ``keys`` of a hash edge, then ``columns``.
    """
    return _declare(operator, name, Mode.IN_FLIGHT, columns, keys=keys, edge=edge, **evolution)


def as_schema(columns: Columns) -> pa.Schema:
    """Return columns in any of their forms as a schema. Raises ``InvalidInput`` for others."""
    if isinstance(columns, pa.Schema):
        return columns
    try:
        if isinstance(columns, Mapping):
            return pa.schema([pa.field(name, dtype) for name, dtype in columns.items()])
        return pa.schema(list(columns))
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"{columns!r} are no columns: {error}; give a pa.Schema, a list of pa.field, or a mapping from names to "
            "types"
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
    clock: TimerClock = "event_time",
    defaults: Mapping[str, str] | None = None,
    previous: State | None = None,
    renames: Mapping[str, str] | None = None,
    ttl: Ttl | None = None,
) -> State:
    key_schema, value_schema = as_schema(keys), as_schema(columns)
    if ttl is not None:
        value_schema = _with_ttl(operator, name, key_schema, value_schema, ttl)
    schema = pa.schema([*key_schema, *value_schema])
    _check_names(operator, name, schema)
    if mode is Mode.KEYED and not len(key_schema):
        raise InvalidInput(f"keyed state {name!r} of {operator!r} has no key columns; give at least one")
    check_key_types([*key_schema, *(item for item in value_schema if item.name == "_map_key")])
    if previous is not None:
        if (previous.operator, previous.name) != (operator, name):
            raise InvalidInput(
                f"state {name!r} of {operator!r} is declared as the successor of state {previous.name!r} of "
                f"{previous.operator!r}, which is another state; give its own previous declaration"
            )
        shape = (mode, kind, tuple(key_schema.names), edge)
        if (previous.mode, previous.kind, previous.key_columns, previous.edge) != shape:
            raise InvalidState(
                f"state {name!r} of {operator!r} was {previous.mode} {previous.kind or ''} by "
                f"{list(previous.key_columns)} and would be {mode} {kind or ''} by {key_schema.names}; that is a "
                "different state: give it another name",
                kind=ErrorKind.SCHEMA_CANNOT_EVOLVE,
            )
        if previous.clock != clock:
            raise InvalidState(
                f"timers {name!r} of {operator!r} were of {previous.clock} and would be of {clock}; that is a "
                "different state: give it another name",
                kind=ErrorKind.SCHEMA_CANNOT_EVOLVE,
            )
        return evolve(previous, schema, defaults=defaults, renames=renames, ttl=ttl)
    fields, last = make_fields(schema, defaults=defaults or {})
    return State(
        operator=OperatorId(operator),
        name=name,
        mode=mode,
        schemas=(SchemaVersion(1, fields),),
        kind=kind,
        key_columns=tuple(key_schema.names),
        edge=edge,
        clock=clock,
        last_field_id=last,
        ttl=ttl,
    )


def _with_ttl(operator: str, name: str, keys: pa.Schema, values: pa.Schema, ttl: Ttl) -> pa.Schema:
    """Return the values followed by the column of the last access."""
    if not isinstance(ttl, Ttl):
        raise InvalidInput(f"the ttl of state {name!r} of {operator!r} is {ttl!r}; give stateformat.Ttl(microseconds)")
    if TTL_COLUMN in (*keys.names, *values.names):
        raise InvalidInput(
            f"state {name!r} of {operator!r} has a ttl and declares a column {TTL_COLUMN!r}; the ttl adds that column "
            "itself: leave it out, or rename yours",
            column=TTL_COLUMN,
        )
    return values.append(pa.field(TTL_COLUMN, pa.timestamp("us"), nullable=False))


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
            raise InvalidInput(f"column {column!r} appears twice in state {name!r}; rename one", column=column)
        seen.add(column)
