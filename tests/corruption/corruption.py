"""Damage of every kind to tiny stores, and what must follow from it.

From the undamaged objects of a store (``corruption_stores``) a case makes damaged ones, in memory.
*Noticed*: full validation finds a problem, or refuses, for the newest checkpoint that uses each
damaged object. *Read*: everything that uses a damaged object (whole states, slices as another
parallelism restores them, single handles in ranges) gives the rows of the undamaged store, or an
error of the library. Anything else is *wrong*. ``corruption_runs`` tries all cases.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import pyarrow as pa

from stateformat import paths as layout
from stateformat.errors import CheckpointError
from stateformat.model import CheckpointId, Handle, Record
from stateformat.reading import Checkpoint
from stateformat.segments import SegmentReader
from stateformat.storage import ObjectInfo, Storage, check_path
from stateformat.store import CheckpointStore
from stateformat.validation import validator as validation

Stores = Mapping[str, Mapping[str, bytes]]
"""The objects of stores, by name and path."""

BLOCK_BYTES = 512

FLIP, TWO, BLOCK = "one bit of every byte flipped", "two bits flipped", "512 bytes zeroed"
CUT, REMOVE, SWAP, OLDER = "truncated", "removed", "two objects swapped", "an older object in place of a newer"


class Case(NamedTuple):
    """One damage of a ``kind`` to the object ``path``; ``first`` and ``second`` are positions, bits
    or lengths.
    """

    store: str
    kind: str
    path: str
    first: int = 0
    second: int = 0
    other: str = ""

    @property
    def line(self) -> str:
        sort = {"c": "record", "m": "manifest", "s": "segment"}[self.path[0]]
        return f"{self.kind}: {sort}" if self.kind in (FLIP, CUT, OLDER) else self.kind


class Objects(Storage):
    """A read-only store of given bytes."""

    url = "damaged://store"

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = objects

    def _get(self, path: str) -> bytes:
        try:
            return self.objects[check_path(path)]
        except KeyError:
            raise FileNotFoundError(2, "there is no such object", path) from None

    def exists(self) -> bool:
        return bool(self.objects)

    def read(self, path: str) -> pa.Buffer:
        return pa.py_buffer(self._get(path))

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        return pa.py_buffer(memoryview(self._get(path))[offset : offset + length])

    def open_input(self, path: str) -> Any:
        return pa.BufferReader(self.read(path))

    def size(self, path: str) -> int:
        return len(self._get(path))

    def list(self, prefix: str) -> list[ObjectInfo]:
        return sorted(ObjectInfo(path, len(data)) for path, data in self.objects.items() if path.startswith(prefix))

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError(f"something that only reads was to change {args}")

    open_output = create = delete = _refuse


# ---- which damage --------------------------------------------------------------------------------


def cases(store: str, objects: Mapping[str, bytes], *, stride: int = 1) -> list[Case]:
    """Return every case of a store. With a ``stride``, only every ``stride``-th of each kind, and
    at least one.
    """
    rng = random.Random(store)
    found: list[Case] = []
    for path, data in sorted(objects.items()):
        size = len(data)
        # Which bit is flipped depends on the position and on the size of the object.
        found += [Case(store, FLIP, path, at, (at + size) % 8) for at in range(size)]
        found += [Case(store, TWO, path, *rng.sample(range(8 * size), 2)) for _ in range(size // 8)]
        found += [Case(store, BLOCK, path, at) for at in range(0, size, BLOCK_BYTES // 8)]
        found += [Case(store, CUT, path, length) for length in _lengths(size)]
        found += [Case(store, REMOVE, path)]
        found += [Case(store, SWAP, path, other=other) for other in sorted(objects) if other < path]
        found += [
            Case(store, OLDER, path, other=other)
            for other in sorted(objects)
            if other < path and other[0] == path[0] and _owner(other) < _owner(path)
        ]
    pristine = dict(objects)
    real = [case for case in found if case.kind != BLOCK or damaged(pristine, case) != pristine]
    by_kind: dict[str, list[Case]] = {}
    for case in real:
        by_kind.setdefault(case.line, []).append(case)
    return [case for group in by_kind.values() for case in group[rng.randrange(min(stride, len(group))) :: stride]]


def _lengths(size: int) -> Iterable[int]:
    """Return the lengths to cut an object to: all near both ends, every seventh in between."""
    return sorted({*range(min(size, 16)), *range(size % 7, size, 7), *range(max(0, size - 16), size)})


def _owner(path: str) -> int:
    return int(layout.record_id(path) or layout.owner_id(path) or 0)


def damaged(objects: Mapping[str, bytes], case: Case) -> dict[str, bytes]:
    found = dict(objects)
    data = found[case.path]
    if case.kind == FLIP:
        found[case.path] = flipped(data, 8 * case.first + case.second)
    elif case.kind == TWO:
        found[case.path] = flipped(flipped(data, case.first), case.second)
    elif case.kind == BLOCK:
        block = data[case.first : case.first + BLOCK_BYTES]
        found[case.path] = data[: case.first] + bytes(len(block)) + data[case.first + len(block) :]
    elif case.kind == CUT:
        found[case.path] = data[: case.first]
    elif case.kind == REMOVE:
        del found[case.path]
    elif case.kind == SWAP:
        found[case.path], found[case.other] = found[case.other], data
    else:
        found[case.path] = found[case.other]
    return found


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# ---- what must follow ----------------------------------------------------------------------------


class Read(NamedTuple):
    """Something to read: a label, the objects that it is read from, and the call that reads it."""

    label: str
    paths: frozenset[str]
    run: Callable[[Storage], pa.Table]


def reads_of(opened: Checkpoint) -> Iterator[Read]:
    """Yield every way to read the rows of a checkpoint: whole states, states restored at another
    parallelism, handles in ranges.
    """
    for state in opened.states:
        task = opened.read(state.operator, state.name)
        yield _read(f"{state.operator}/{state.name}", task)
    parallelism = 2 if opened.graph.operators[-1].parallelism != 2 else 3
    plan = opened.plan_restore(opened.graph.at(parallelism))
    plan.check()
    for uid in plan.by_operator:
        for subtask in (None, *range(plan.by_operator[uid].parallelism)):
            for name, task in opened.restore(plan, uid, subtask).items():
                if task.slices.num_rows:
                    yield _read(f"{uid}/{name} for subtask {subtask} of {parallelism}", task)
    numbers = pa.array(range(opened.handles.num_rows))
    for number, row in enumerate(opened.manifest.rows(numbers).to_pylist()):
        handle = Handle(**row)
        if handle.rows and handle.inline is None:
            run = partial(read_in_ranges, record=opened.record, handle=handle)
            yield Read(f"handle {number}", frozenset([str(handle.path)]), run)


def _read(label: str, task: Any) -> Read:
    paths = frozenset(path for path in task.handles["path"].to_pylist() if path)
    return Read(label, paths, lambda storage: replace(task, storage=storage).table())


def read_in_ranges(storage: Storage, *, record: Record, handle: Handle) -> pa.Table:
    """Read all rows of a handle in ranges, where only page checksums can notice damage."""
    reader = SegmentReader(storage, record, record.state(handle.operator, handle.state), handle)
    return pa.concat_tables(call() for call in reader.calls(handle.row_start, handle.rows))


@dataclass
class Outcome:
    """How many cases of each line were tried and noticed, how reads ended, and what went wrong."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.counts.update(other.counts)
        self.wrong += other.wrong

    def of(self, line: str, what: str) -> int:
        return self.counts[line, what]

    @property
    def lines(self) -> list[str]:
        kinds = (FLIP, TWO, BLOCK, CUT, REMOVE, NEWEST, SWAP, OLDER)
        found = {line for line, _ in self.counts}
        return sorted(found, key=lambda line: (kinds.index(line.split(": ")[0]), line))


NEWEST = "removed, the newest record"
"""A separate line: by design, the checkpoint before it is then the newest (SPEC.md section 2.3)."""


class Bench:
    """A store before the damage: what reads give, and the newest checkpoint using each object."""

    def __init__(self, objects: Mapping[str, bytes]) -> None:
        self.objects = dict(objects)
        store = CheckpointStore(Objects(objects))
        self.ids = sorted(record.checkpoint_id for record in store.history())
        self.reads = {number: list(reads_of(store.open(number))) for number in self.ids}
        self.expected = {
            number: {read.label: read.run(store.storage) for read in reads} for number, reads in self.reads.items()
        }
        self.fed: dict[str, CheckpointId] = {}
        for number in self.ids:
            record = store.open(number).record
            fed = {layout.record_path(number), record.manifest.path}
            for path in fed.union(*(read.paths for read in self.reads[number])) & set(objects):
                self.fed[path] = number
            assert validation.validate(store, number, level="full").ok
        assert set(self.fed) == set(objects), "every object feeds a checkpoint"

    def judge(self, case: Case) -> Outcome:
        found, line = Outcome(), case.line
        if case.kind == REMOVE and case.path == layout.record_path(self.ids[-1]) and len(self.ids) > 1:
            line = NEWEST
        found.counts[line, "tried"] += 1
        storage = Objects(damaged(self.objects, case))
        touched = {case.path, case.other} - {""} if case.kind == SWAP else {case.path}
        try:
            unnoticed = [
                number for number in {self.fed[path] for path in touched} if not _notices(storage, number, case)
            ]
            if line == NEWEST:
                unnoticed += [] if self._goes_back(storage) else [self.ids[-1]]
            readings = Counter(self._readings(storage, touched))
        except Exception as error:
            found.wrong.append((line, f"{case}: {type(error).__name__}: {error}"))
            return found
        found.counts[line, "noticed"] += not unnoticed
        for what, count in readings.items():
            found.counts[line, what.partition(" ")[0]] += count
        told = [what for what in readings if what.startswith("wrong")]
        if unnoticed or told:
            found.wrong.append((line, f"{case}: unnoticed in {unnoticed}; {'; '.join(told)}"))
        return found

    def _goes_back(self, storage: Storage) -> bool:
        store, before = CheckpointStore(storage), self.ids[-2]
        report = validation.validate(storage, level="full")
        return report.ok and report.checkpoint_id == before == store.open().id and not store.strays()

    def _readings(self, storage: Storage, touched: set[str]) -> Iterator[str]:
        """Yield ``right``, ``error``, or ``wrong`` and what, for each way to read the rows that use
        the damaged objects.
        """
        opened = {self.fed[path] for path in touched if not path.startswith(layout.SEGMENTS)}
        for number in opened:
            yield self._reading_anew(storage, number)
        for number in self.ids:
            # The checkpoint was opened before the damage, as by a reader that is under way.
            for read in self.reads[number]:
                if touched & read.paths and number not in opened:
                    yield self._reading(storage, number, read)

    def _reading(self, storage: Storage, number: CheckpointId, read: Read) -> str:
        try:
            table = read.run(storage)
        except CheckpointError:
            return "error"
        return "right" if table.equals(self.expected[number][read.label]) else f"wrong rows of {read.label}"

    def _reading_anew(self, storage: Storage, number: CheckpointId) -> str:
        """Open the checkpoint, plan restores, and read everything: all of it right, or an error."""
        try:
            opened = CheckpointStore(storage).open(number)
            reads = {read.label: read.run(storage) for read in reads_of(opened)}
        except CheckpointError:
            return "error"
        expected = self.expected[number]
        same = reads.keys() == expected.keys() and all(reads[label].equals(expected[label]) for label in expected)
        return "right" if same else f"wrong rows of checkpoint {number}"


def _notices(storage: Storage, number: CheckpointId, case: Case) -> bool:
    """Return whether full validation finds a problem or refuses. Quick validation may miss damage
    of a segment, but must not fail on it.
    """
    for level in ("quick", "full") if case.path.startswith(layout.SEGMENTS) else ("full",):
        try:
            noticed = not validation.validate(storage, number, level=cast("Any", level)).ok
        except CheckpointError:
            noticed = True
    return noticed
