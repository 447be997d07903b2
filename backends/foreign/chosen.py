"""A foreign checkpoint as its import requests it: without some states, with rows that expire."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import Record, State, known_names
from stateformat.problems import Problem
from stateformat.states import named
from stateformat.ttl import TTL_COLUMN, Ttl

from .checkpoint import ForeignCheckpoint
from .source import ForeignSource, Level, Note, Part, Progress, unreadable


def chosen_of(checkpoint: ForeignCheckpoint, drop: Sequence[str], ttl: Mapping[str, Ttl]) -> ForeignCheckpoint:
    """Return the checkpoint without some operators and states, of which nothing is then read.

    Rows of the states that ``ttl`` names expire, by the time that Flink kept. Raises
    ``InvalidInput`` for a name that matches nothing, for a state that cannot be read and is not
    named in ``drop``, and for a state with a ttl that has no such times.
    """
    record = checkpoint.record
    subjects = [note.subject for note in checkpoint.notes if note.kind == "refused"]
    labels = {uid: uid for uid in record.graph.by_uid}
    for note in checkpoint.notes:
        if note.kind == "refused" and not _dropped(note, labels, drop):
            raise InvalidInput(unreadable(note.subject, note.message), kind=ErrorKind.UNSUPPORTED_TYPE)
    known = [*record.graph.by_uid, *(f"{state.operator}/{state.name}" for state in record.states), *subjects]
    for name in drop:
        found = named(name, record.states, labels)
        if found is not None and found.state is not None and found.column is None and name in subjects:
            raise InvalidInput(f"{name!r} may be {found} or a state that cannot be read; leave out all of its operator")
        if name not in known:
            raise InvalidInput(
                f"nothing to drop under {name!r}; {known_names(known, name)}", kind=ErrorKind.UNKNOWN_OPERATOR
            )
    for name in ttl:
        _check_times(record, name)
    if not drop and not ttl:
        return checkpoint
    source = _Chosen(checkpoint.source, frozenset(drop), dict(ttl), time.time_ns() // 1000)
    return ForeignCheckpoint(checkpoint.storage, source, checkpoint.system)


def _dropped(note: Note, uids: Iterable[str], drop: Collection[str]) -> bool:
    # A uid may have slashes, so that several operators may be meant: each must be named.
    owners = {uid for uid in uids if note.subject == uid or note.subject.startswith(f"{uid}/")}
    return note.subject in drop or (bool(owners) and owners <= {*drop})


def _check_times(record: Record, name: str) -> None:
    found = named(name, record.states)
    if found is None or found.state is None or found.column is not None:
        states = [f"{state.operator}/{state.name}" for state in record.states]
        raise InvalidInput(
            f"no state {name!r} whose rows could expire; {known_names(states, name)}", kind=ErrorKind.UNKNOWN_STATE
        )
    fields = record.state(found.operator, found.state).current.fields
    if not any(item.name == TTL_COLUMN and item.type == "timestamp_us" for item in fields):
        raise InvalidInput(
            f"state {name} does not say when its rows were accessed, as a state of Flink with a TTL does; import it "
            "without, and let the program declare the ttl: its rows then count from the restore",
            kind=ErrorKind.STATE_NOT_ALLOWED,
        )


@dataclass(frozen=True)
class _Chosen:
    """A source without some operators and states, whose rows may expire; picklable."""

    source: ForeignSource
    drop: frozenset[str]
    ttl: Mapping[str, Ttl]
    now_us: int

    def _kept(self, operator: str, state: str) -> bool:
        return {operator, f"{operator}/{state}"}.isdisjoint(self.drop)

    def _expiring(self, state: State) -> State:
        ttl = self.ttl.get(f"{state.operator}/{state.name}")
        return state if ttl is None else replace(state, ttl=ttl, ttl_now_us=self.now_us)

    @property
    def record(self) -> Record:
        found = self.source.record
        graph = replace(found.graph, operators=tuple(one for one in found.graph.operators if one.uid not in self.drop))
        states = tuple(self._expiring(state) for state in found.states if self._kept(state.operator, state.name))
        return replace(found, graph=graph, states=states)

    @property
    def parts(self) -> Sequence[Part]:
        return [part for part in self.source.parts if self._kept(part.operator, part.state)]

    @property
    def notes(self) -> Sequence[Note]:
        """What is left out is not told of, except why it could not be read."""
        uids = self.source.record.graph.by_uid
        return [note for note in self.source.notes if note.kind == "refused" or not _dropped(note, uids, self.drop)]

    def group_rows(self, part: Part) -> npt.NDArray[np.int64] | int:
        return self.source.group_rows(part)

    def read(
        self, part: Part, first_group: int | None = None, last_group: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        return self.source.read(part, first_group, last_group)

    def check(self, level: Level, progress: Progress) -> Iterable[Problem]:
        return self.source.check(level, progress)
