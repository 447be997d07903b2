"""What is exported: the rows of a state, in one checkpoint or in several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.inspecting import StateRange
from stateformat.model import Mode, ParentRef, Record, State
from stateformat.reading import Checkpoint, StateRows
from stateformat.store import CheckpointStore
from stateformat.tables import ArrowStream

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
        return None if -1 in counts or rows.state.ttl_now_us is not None else sum(counts)

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
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")


def _safe(names: set[str]) -> dict[str, str]:
    folded = [name.lower() for name in names]
    found: dict[str, str] = {}
    for name in names:
        plain = "".join(char if char.lower() in _PLAIN else "_" for char in name)[:_NAME_LENGTH]
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
