"""Which state is meant, in several checkpoints, and which of its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..model import Mode, State, known_names
from ..reading import bare_field, evolve_table
from ..schema import KEY_GROUP, segment_schema

if TYPE_CHECKING:
    from ..reading import Checkpoint

CHECKPOINT_ID: Final = pa.field("_checkpoint_id", pa.int64(), nullable=False)
"""The checkpoint that a row is of, or in which a change shows."""
PREPARED_ID: Final = "_prepared_checkpoint_id"
"""The name of committables' own ``_checkpoint_id`` beside :data:`CHECKPOINT_ID`."""


def newest_declaration(checkpoints: Iterable[Checkpoint], operator: str, state: str) -> State:
    """The state in the first of the checkpoints that has it; they come newest first.

    ``operator``: a uid, or the name of one operator. Raises ``InvalidInput`` where no checkpoint
    has the state: the error of the first one that has the operator.
    """
    unknown: InvalidInput | None = None
    lacking: InvalidInput | None = None
    for checkpoint in checkpoints:
        try:
            uid = checkpoint.operator_uid(operator)
        except InvalidInput as error:
            unknown = unknown or error
            continue
        try:
            return checkpoint.record.state(uid, state)
        except InvalidInput as error:
            lacking = lacking or error
    raise lacking or unknown or InvalidInput("no checkpoint was given; give at least one")


def declared_in(checkpoint: Checkpoint, state: State) -> State | None:
    """The state as a checkpoint declares it; None where it has none of that name.

    Raises ``InvalidInput`` where the two are different states that share a name, and where the rows
    cannot be brought to the later schema.
    """
    found = checkpoint.record.by_state.get((state.operator, state.name))
    if found is None:
        return None
    for what, here, there in (
        ("mode", found.mode, state.mode),
        ("kind", found.kind, state.kind),
        ("key columns", _keys(found), _keys(state)),
    ):
        if here != there:
            raise InvalidInput(
                f"state {state.name!r} of {state.operator!r} has {what} {_text(here)} in checkpoint {checkpoint.id} "
                f"and {_text(there)} later: its rows cannot be brought together. Read each checkpoint by itself",
                kind=ErrorKind.SCHEMA_MISMATCH,
                checkpoint_id=checkpoint.id,
            )
    try:
        evolve_table(segment_schema(found).empty_table(), found.current, state.current)
    except InvalidState as error:
        raise InvalidInput(
            f"the rows of state {state.name!r} of {state.operator!r} in checkpoint {checkpoint.id} cannot be brought "
            f"to its later columns: {error}. Read each checkpoint by itself",
            kind=error.kind,
            checkpoint_id=checkpoint.id,
        ) from error
    return found


def _keys(state: State) -> tuple[str, ...]:
    types = segment_schema(state)
    return tuple(f"{name} {types.field(name).type}" for name in state.key_columns)


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def own_columns(state: State) -> Mapping[str, pa.Field]:
    """The columns of a state's rows as users see them beside :data:`CHECKPOINT_ID`, by our name."""
    fields = [bare_field(field) for field in segment_schema(state) if field.name != KEY_GROUP.name]
    if state.mode is not Mode.COMMITTABLES:
        return {field.name: field for field in fields}
    return {
        field.name: field.with_name(PREPARED_ID if field.name == CHECKPOINT_ID.name else field.name) for field in fields
    }


def checked_parts(parts: int) -> int:
    """A number of parts. Raises ``InvalidInput`` for less than one."""
    if parts < 1:
        raise InvalidInput(f"rows cannot be split into {parts} parts; give at least 1")
    return parts


def chosen_columns(state: State, known: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """The columns that a caller selects. Raises ``InvalidInput`` for unknown and repeated ones, and
    for none.
    """
    if not columns:
        raise InvalidInput(f"no column of state {state.name!r} of {state.operator!r} is named; name at least one")
    for name in columns:
        if name not in known:
            raise InvalidInput(
                f"state {state.name!r} of {state.operator!r} has no column {name!r} here; {known_names(known, name)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
                column=name,
            )
    if len(set(columns)) < len(columns):
        raise InvalidInput(f"columns {', '.join(columns)} name one twice; name each once")
    return tuple(columns)
