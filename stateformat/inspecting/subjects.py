"""One state in several checkpoints: its declarations, its columns, and how reading is split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..model import Mode, State
from ..reading import evolve_table
from ..schema import row_schema, segment_schema

if TYPE_CHECKING:
    from ..reading import Checkpoint

T = TypeVar("T")

CHECKPOINT_ID: Final = pa.field("_checkpoint_id", pa.int64(), nullable=False)
"""The checkpoint that a row belongs to, or in which a change appears."""
PREPARED_ID: Final = "_prepared_checkpoint_id"
"""The name of committables' own ``_checkpoint_id`` beside :data:`CHECKPOINT_ID`."""


def newest_declaration(checkpoints: Iterable[Checkpoint], operator: str, state: str) -> State:
    """Return the state in the first checkpoint that has it. Give ``checkpoints`` newest first.

    ``operator``: a uid, or the name of one operator. Raises ``InvalidInput`` if no checkpoint has
    the state: the error of the first one that has the operator.
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
    """Return the state as a checkpoint declares it; None if it has none of that name.

    Raises ``InvalidInput`` if the two are different states that share a name, or if the rows cannot
    be converted to the later schema.
    """
    found = checkpoint.record.by_state.get((state.operator, state.name))
    if found is None:
        return None
    for what, here, there in (
        ("mode", found.mode, state.mode),
        ("kind", found.kind, state.kind),
        ("clock", found.clock, state.clock),
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
    """Return the columns of a state's rows as users see them beside :data:`CHECKPOINT_ID`, by
    stateformat's name.
    """
    fields = row_schema(state)
    if state.mode is not Mode.COMMITTABLES:
        return {field.name: field for field in fields}
    return {
        field.name: field.with_name(PREPARED_ID if field.name == CHECKPOINT_ID.name else field.name) for field in fields
    }


def where_of(state: State) -> str:
    """Return how messages name a state."""
    return f"state {state.name!r} of {state.operator!r}"


def packed(sized: Sequence[tuple[T, int]], parts: int) -> list[list[T]]:
    """Distribute items, in order, over up to ``parts`` lists of about the same total size."""
    share = max(1, sum(size for _, size in sized) // parts)
    found: list[list[T]] = [[]]
    held = 0
    for item, size in sized:
        if found[-1] and held >= share and len(found) < parts:
            found.append([])
            held = 0
        found[-1].append(item)
        held += size
    return found
