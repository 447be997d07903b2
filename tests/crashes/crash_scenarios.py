"""Scenarios that use a local store while it crashes, and what must hold afterwards.

A scenario prepares a base directory, then acts on a store in it while its system calls are
recorded. It marks every object whose writing has returned, by its path: such an object must
survive. :class:`Judge` looks at a tree that a crash may have left: no object is torn under its
final name, every checkpoint is whole, marked objects still exist, leftovers are found and removed,
and a new run goes on.

Run as a module (``python -m tests.crashes.crash_scenarios <name> <base>``) it acts once, for a
recorder that watches from outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stateformat import paths as layout, validate
from stateformat.backends.storage import local
from stateformat.backends.storage.local import LocalStorage
from stateformat.history import record_ids
from stateformat.model import CheckpointId
from stateformat.publication import CommitPermit, copying as copied_objects
from stateformat.reading import load_manifest, load_record
from stateformat.segments import WriteOptions, write as segment_writer
from stateformat.storage import Storage
from stateformat.store import CheckpointStore
from tests.crashes.crash_calls import STORE
from tests.crashes.crash_disk import Call, Disk, Tree, put
from tests.worlds.stores import Job, counts_job

Mark = Callable[[str], None]

JOB = "counts"
BUFFER_BYTES = 250
"""Small, so that a segment is several write calls."""
TEMPORARY = re.compile(r"(?:segments/(\d{20})/|manifests/|checkpoints/)\.tmp-[0-9a-f]{16}-(?:(\d{20})[.-])?[^/]*")


def job() -> Job:
    """Return a job with two small segments in each checkpoint."""
    return counts_job(parallelism=2, keys=40)


def storage_at(place: Path, *, durable: bool = True) -> LocalStorage:
    """Return the storage at a place."""
    return LocalStorage(place, durable=durable)


def publish(storage: Storage, permit: CommitPermit | None, mark: Mark = str) -> CommitPermit:
    """Publish one checkpoint on the permit held, with every segment in a separate object."""
    store = CheckpointStore(storage, sleep=lambda seconds: None)
    permit = job().publish(store, permit, options=WriteOptions(inline_bytes_max=0))
    mark(layout.record_path(permit.ref.checkpoint_id))
    return permit


@contextlib.contextmanager
def in_small_steps(mark: Mark) -> Iterator[None]:
    """Within the block, write a segment by several calls, and mark every object that is closed or
    made durable.
    """

    def close_and_mark(output: Any) -> None:
        close(output)
        mark(output._path)

    def make_durable_and_mark(storage: LocalStorage, paths: Iterable[str]) -> None:
        given = [*paths]
        make_durable(storage, given)
        for path in given:
            mark(path)

    close, make_durable = local._LocalOutput._publish, LocalStorage.make_durable
    with pytest.MonkeyPatch.context() as patch:
        # The sizes of buffers are read when a file is opened. Small ones only make more system
        # calls.
        patch.setattr(local, "_WRITE_BUFFER_BYTES", BUFFER_BYTES)
        patch.setattr(segment_writer, "_SINK_BUFFER_BYTES", BUFFER_BYTES)
        # Copy objects one after the other, so that every run makes the same calls.
        patch.setattr(copied_objects, "STREAMS", 1)
        patch.setattr(local._LocalOutput, "_publish", close_and_mark)
        patch.setattr(LocalStorage, "make_durable", make_durable_and_mark)
        yield


def restart(storage: Storage, mark: Mark = str) -> CommitPermit | None:
    """Start as a run does. With the permit it may commit, so from now on the checkpoint must not
    vanish.
    """
    permit = CheckpointStore(storage).start(JOB)
    if permit is not None:
        mark(layout.record_path(permit.ref.checkpoint_id))
    return permit


def go_on(storage: Storage, mark: Mark = str) -> None:
    """Run from the newest checkpoint and publish once."""
    publish(storage, restart(storage, mark), mark)


def _prepare_nothing(base: Path) -> None:
    (base / "run").mkdir()


def _prepare(base: Path, checkpoints: int = 1) -> None:
    storage = storage_at(base / STORE, durable=False)
    permit = None
    for _ in range(checkpoints):
        permit = publish(storage, permit)


def _prepare_garbage(base: Path) -> None:
    _prepare(base, 2)
    storage = storage_at(base / STORE, durable=False)
    for number in (1, 2):
        for path in (f"segments/{number:020}/dead-1.parquet", f"manifests/{number:020}-dead.parquet"):
            with storage.open_output(path) as output:
                output.write(b"dead" * 100)
            # And what a writer that died has left half-written.
            directory, _, name = path.rpartition("/")
            (base / STORE / directory / f".tmp-{number:016x}-{name}").write_bytes(b"half")
        (base / STORE / f"checkpoints/.tmp-{number:016x}-{number:020}.json").write_bytes(b"")


def _prepare_source(base: Path) -> None:
    _prepare_nothing(base)
    publish(storage_at(base / "source", durable=False), None)


def _link(base: Path, storage: LocalStorage, mark: Mark) -> None:
    source = CheckpointStore(storage_at(base / "source"))
    record = source.copy(source.open(), CheckpointStore(storage))
    mark(layout.record_path(record.checkpoint_id))


def _copy(base: Path, storage: LocalStorage, mark: Mark) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # As if between two file systems.
        patch.setattr(LocalStorage, "link_from", lambda *_: None)
        _link(base, storage, mark)


def _rollback(base: Path, storage: LocalStorage, mark: Mark) -> None:
    permit = CheckpointStore(storage).rollback(1)
    mark(layout.record_path(permit.ref.checkpoint_id))


@dataclass(frozen=True)
class Scenario:
    """``prepare(base)``; ``act(base, storage, mark)``, which is recorded; and ``again``, called
    like ``act`` after a crash.

    The recorders call both within :func:`in_small_steps`.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path, LocalStorage, Mark], Any]
    again: Callable[[Path, LocalStorage, Mark], Any] = lambda base, storage, mark: go_on(storage, mark)


SCENARIOS = {
    "first publish": Scenario(_prepare_nothing, lambda base, storage, mark: publish(storage, None, mark)),
    "second publish": Scenario(_prepare, lambda base, storage, mark: go_on(storage, mark)),
    "expire": Scenario(lambda base: _prepare(base, 3), lambda base, storage, mark: CheckpointStore(storage).expire(1)),
    "gc": Scenario(_prepare_garbage, lambda base, storage, mark: CheckpointStore(storage).collect_garbage(delete=True)),
    "copy": Scenario(_prepare_source, _copy, _copy),
    "copy by links": Scenario(_prepare_source, _link, _link),
    "rollback": Scenario(lambda base: _prepare(base, 2), _rollback),
}


def promised(disk_look: Tree) -> set[str]:
    """Return the path that must exist whatever happens: the newest record of the store now."""
    records = sorted(path for path in disk_look if path.startswith(f"{STORE}/checkpoints/0"))
    return {records[-1].removeprefix(f"{STORE}/")} if records else set()


class Judge:
    """Judges what crashes have left. Trees that it has seen are not judged again."""

    def __init__(self, workspace: Path, scenario: Scenario) -> None:
        self._place = workspace / "left"
        self.scenario = scenario
        self._known: dict[tuple[Any, ...], str] = {}
        self.final: dict[str, bytes] = {}
        """By path, the bytes of every object that ever had its final name."""

    @property
    def judged(self) -> int:
        """How many different trees were judged."""
        return len(self._known)

    def learn(self, look: Tree) -> None:
        """Learn from the visible tree which bytes its objects must have."""
        for path, data in _objects(look):
            assert self.final.setdefault(path, data) == data, f"{path} has changed"

    def problem(self, tree: Tree, promises: Collection[str], *, closely: bool = True) -> str:
        """Return what is wrong with a tree; empty if nothing is.

        Unless ``closely``, compare only its files, which is quick.
        """
        for path, data in _objects(tree):
            if self.final.get(path) != data:
                return f"{path} is torn: {len(data)} bytes"
        gone = [path for path in promises if f"{STORE}/{path}" not in tree]
        if gone:
            return f"{gone[0]} was told to be there and is gone"
        if not closely:
            return ""
        key = tuple(sorted(tree.items()))
        if key not in self._known:
            self._known[key] = self._look_closely(tree)
        return self._known[key]

    def _look_closely(self, tree: Tree) -> str:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        put(tree, self._place)
        storage = storage_at(self._place / STORE, durable=False)
        return (
            whole(storage)
            or _broken_off(storage)
            or (self._tidy(storage) if record_ids(storage) else "")
            or self._again(storage)
            or self._tidy(storage)
        )

    def _again(self, storage: LocalStorage) -> str:
        before = record_ids(storage)
        (self._place / "run").mkdir(exist_ok=True)
        self.scenario.again(self._place, storage, str)
        after = record_ids(storage)
        return "" if after[-1:] > before[-1:] or after == before == [1] else f"nothing was published after {before}"

    def _tidy(self, storage: LocalStorage) -> str:
        """Collect garbage: only the checkpoints may be left, and what is newer than the newest."""
        store = CheckpointStore(storage)
        newest = record_ids(storage)[-1]
        hidden = sorted(path for path, id_ in temporary_files(storage) if id_ is None or id_ <= newest)
        found = store.collect_garbage(delete=True)
        if sorted(item.name for item in found.leftovers) != hidden:
            return f"gc found {found.leftovers} of the temporary files {hidden}"
        left = [path for path, id_ in temporary_files(storage) if id_ is None or id_ <= newest]
        objects = {item.path for item in storage.list("") if (layout.owner_id(item.path) or 0) <= newest}
        wrong = [*left, *(objects ^ needed(storage))]
        return f"gc left, or removed, {wrong}" if wrong else whole(storage)


def _objects(tree: Tree) -> Iterator[tuple[str, bytes]]:
    for path, data in tree.items():
        if data is not None and path.startswith(f"{STORE}/") and not path.rpartition("/")[2].startswith("."):
            yield path, data


def whole(storage: Storage, strays: Iterable[int] = ()) -> str:
    """Validate every checkpoint in full; return what is wrong, empty if nothing is.

    ``strays`` are known: they are not validated, and findings about them do not count.
    """
    known = {layout.record_path(CheckpointId(stray)) for stray in strays}
    for number in record_ids(storage):
        if layout.record_path(number) in known:
            continue
        for finding in validate(storage, number, level="full").findings:
            if finding.path not in known:
                return f"checkpoint {number}: {finding.message}"
    return ""


def _broken_off(storage: LocalStorage) -> str:
    """Return which records the newest does not reach. With one publisher there are none: a parent
    is removed before its children.
    """
    strays = CheckpointStore(storage).strays()
    return f"{strays} are strays" if strays else ""


def temporary_files(storage: Storage) -> list[tuple[str, int | None]]:
    """Return what is below the store and was begun only, with the id in its path. On disk without
    the library.
    """
    if not isinstance(storage, LocalStorage):
        return [(item.name, layout.owner_id(item.path)) for item in storage.leftovers()]
    root = Path(storage._tree.root)
    found = []
    for path in root.rglob(".tmp-*"):
        match = TEMPORARY.fullmatch(str(path.relative_to(root)))
        assert match, path
        number = match[1] or match[2]
        found.append((str(path.relative_to(root)), int(number) if number else None))
    return found


def needed(storage: Storage) -> set[str]:
    """Return the records of a store and the objects that they need, by the rows of manifests."""
    found = set()
    for number in record_ids(storage):
        record = load_record(storage, CheckpointId(number))
        found |= {layout.record_path(CheckpointId(number)), record.manifest.path}
        rows = load_manifest(storage, record).full().to_pylist()
        found |= {row["path"] for row in rows if row["path"] is not None and row["inline"] is None}
    return found


@dataclass
class Replay:
    """Judges every state that a crash may leave at every prefix of a recording."""

    judge: Judge
    disk: Disk
    promises: set[str]
    closely: bool = True
    states: int = 0
    problems: list[str] = field(default_factory=list)
    """At most one for each prefix and kind of crash."""
    useless: set[int] = field(default_factory=set)
    """Numbers of the syncs that had nothing to do."""

    def run(
        self, calls: list[Call], draw: Any, *, stop: bool = False, only_marks: bool = False, closely: bool = True
    ) -> Replay:
        """Judge after every call, or ``only_marks``; ``stop`` at the first problem."""
        self.closely = closely
        offset = self.disk.number
        if not only_marks:
            self._look("before anything", draw)
        for number, call in enumerate(calls):
            useful = self.disk.apply(call._replace(covers=call.covers + offset))
            if call.verb == "sync" and not useful:
                self.useless.add(number)
            if call.verb == "mark" and call.path:
                self.promises.add(call.path)
            if call.verb == "mark" or not only_marks:
                self._look(f"after call {number} ({call.verb} {call.path})", draw)
            if stop and self.problems:
                break
        return self

    def _look(self, where: str, draw: Any) -> None:
        reported = set()
        for kind, tree in self.disk.crashes(draw):
            self.states += 1
            problem = self.judge.problem(tree, self.promises, closely=self.closely)
            if problem and kind not in reported:
                reported.add(kind)
                self.problems.append(f"{kind} {where}: {problem}")


def main(name: str, base: str) -> None:
    """Act once, and write marks to the file ``marks`` in the base directory."""
    marks = os.open(f"{base}/marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def mark(text: str) -> None:
        os.write(marks, f"{text}\n".encode())

    with in_small_steps(mark):
        SCENARIOS[name].act(Path(base), storage_at(Path(base) / STORE), mark)


if __name__ == "__main__":
    main(*sys.argv[1:])
