"""Two checkpoints compared as a whole: :func:`diff_checkpoints`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...errors import CheckpointError, ErrorKind, InvalidInput
from ...model import known_names
from .counting import SAMPLE_ROWS
from .difference import CheckpointDiff
from .graphs import graph_diff
from .states import Pair, Renames, pairs_of

if TYPE_CHECKING:
    from ...reading import Checkpoint

Progress = Callable[[int, int], None]
"""Called with the stored bytes read so far, and all that will be read."""


def diff_checkpoints(
    before: Checkpoint,
    after: Checkpoint,
    *,
    operator: str | None = None,
    state: str | None = None,
    rows: int = SAMPLE_ROWS,
    renames: Renames | None = None,
    whole: bool = False,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compare two checkpoints, of one store or two, stateformat's or another system's.

    Rows are compared in the columns of ``after``. Keyed rows are matched by row key, progress by
    input; all others are compared with their multiplicity, and union and even_split state also in
    order, over all subtasks. Values are equal if their bits are, except that every NaN equals every
    other. What metadata shows to be equal is not read.

    Args:
        before: the earlier checkpoint, or the source of a copy.
        after: the later one.
        operator: compare only this operator, by uid or name.
        state: compare only states of this name.
        rows: how many of the added, removed and changed rows of each state to keep.
        renames: what was renamed on purpose; by default nothing.
        whole: also compare each subtask's copy of broadcast state, and its progress.
        progress: called with how much has been read.

    Raises ``InvalidInput`` for an operator or state that neither checkpoint has, and what reading
    raises: ``DamagedCheckpoint``, ``CheckpointExpired``, ``StorageError``.
    """
    renames = renames or Renames()
    uid = None if operator is None else _uid(before, after, operator, renames)
    pairs = _chosen(pairs_of(before, after, renames, whole=whole), uid, state)
    total = sum(pair.plan() for pair in pairs)
    done = 0

    def read(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(min(done, total), total)

    found = []
    for number, pair in enumerate(pairs):
        found.append(pair.diff(rows, read))
        pairs[number] = None  # type: ignore[call-overload]  # what it planned is not needed any more
    graph = None
    if state is None:
        graph = graph_diff(before.record, after.record, renames.operators, renames.apart, uid)
    return CheckpointDiff(before, after, graph, tuple(found), done, uid, state)


def _uid(before: Checkpoint, after: Checkpoint, operator: str, renames: Renames) -> str:
    """Return the uid, as the later checkpoint has it, of an operator that either has."""
    try:
        return after.operator_uid(operator)
    except CheckpointError:
        try:
            uid = before.operator_uid(operator)
        except CheckpointError:
            pass
        else:
            return renames.operators.get(uid, uid)
        raise


def prove_checkpoints(
    before: Checkpoint,
    after: Checkpoint,
    *,
    renames: Renames | None = None,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compare a checkpoint with what was made of it, rows that have expired and all copies
    included.
    """
    sides = before.with_expired(), after.with_expired()
    return diff_checkpoints(*sides, rows=0, renames=renames, whole=True, progress=progress)


def _chosen(pairs: Iterable[Pair], operator: str | None, state: str | None) -> list[Pair]:
    of_operator = [pair for pair in pairs if operator in (None, pair.place[0])]
    found = [pair for pair in of_operator if state in (None, pair.place[1])]
    if state is not None and not found:
        where = "the checkpoints have" if operator is None else f"operator {operator!r} has"
        names = [pair.place[1] for pair in of_operator]
        raise InvalidInput(
            f"{where} no state {state!r}; {known_names(names, state)}", kind=ErrorKind.UNKNOWN_STATE, state=state
        )
    return found
