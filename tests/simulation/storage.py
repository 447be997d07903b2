"""A storage that fails as storages do, and knows the truth about what was published.

Theory of operation. A :class:`Disk` holds the objects; it never fails and is asked by the checks.
Every run works through its own :class:`FaultyStorage` over the disk. Each of its requests draws a
:class:`Do` from the run's random numbers: the request is refused, or carried out and its answer
lost, or dropped, or carried out later, or the process dies there. After a death nothing from that
process reaches the disk any more, whatever its handlers try. An object that was begun and not
finished is a leftover and never has its final name, as with all our storages.

The disk decodes each record as it appears: a record that was created as the newest is in the chain
from then on, whether its publisher ever hears of it or not (``publish-protocol``). That chain is
the truth that the model is checked against.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pyarrow as pa

from stateformat import paths as layout
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import StorageError
from stateformat.model import ParentRef, Record
from stateformat.record import decode_record
from stateformat.storage import CreateOutcome, Leftover, ObjectInfo, Storage
from tests.simulation.witness import Violation


class Crash(BaseException):
    """The process dies here. No handler of the product catches it."""


class Do(Enum):
    """What happens to a request."""

    IT = "carry it out and answer"
    FAIL = "an error, and nothing was done"
    LOSE = "carry it out, and lose the answer"
    LATE = "lose the answer; it is carried out some requests later"
    REFUSE = "answer a create with a conflict that is none"
    DIE = "the process dies before"
    DIE_AFTER = "the process dies after"


@dataclass(frozen=True)
class Faults:
    """How often, per thousand requests. ``budget``: most faults in all, deaths included."""

    fail: int = 0
    lose: int = 0
    late: int = 0
    refuse: int = 0
    die: int = 0
    budget: int = 0

    def draw(self, rng: random.Random, verb: str) -> Do:
        """Draw what happens to one request. Only a create can be late or be answered wrongly.

        Faults of a create are five times as frequent: a record is created only once in hundreds of
        requests, and everything depends on it.
        """
        dice = rng.randrange(200 if verb == "create" else 1000)
        for share, do in (
            (self.die, rng.choice((Do.DIE, Do.DIE_AFTER))),
            (self.fail, Do.FAIL),
            (self.lose, Do.LOSE),
            (self.late, Do.LATE),
            (self.refuse, Do.REFUSE),
        ):
            if dice < share:
                return do if verb == "create" or do not in (Do.LATE, Do.REFUSE) else Do.IT
            dice -= share
        return Do.IT


NO_FAULTS = Faults()


@dataclass
class Disk:
    """The objects of one store, and the truth about its history."""

    name: str
    chain: list[Record] = field(default_factory=list)
    """Every record that was the newest when it was created, in order."""
    strays: list[ParentRef] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    standing: set[ParentRef] = field(default_factory=set)
    """Checkpoints of the chain whose records have not been deleted."""

    def __post_init__(self) -> None:
        MemoryStorage.reset(self.name)
        self.storage = MemoryStorage(self.name)

    def forget(self) -> None:
        """Free the memory."""
        MemoryStorage.reset(self.name)

    def newest_id(self) -> int:
        """Return the greatest id of a record that exists."""
        return max((int(item.path.split("/")[1][:20]) for item in self.storage.list(layout.RECORDS)), default=0)

    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Create an object; if it is a record, note it."""
        newest = self.newest_id() if path.startswith(layout.RECORDS) else 0
        outcome = self.storage.create(path, data)
        if outcome is CreateOutcome.CREATED and path.startswith(layout.RECORDS):
            record = decode_record(bytes(data), path=path)
            if record.checkpoint_id > newest:
                self.chain.append(record)
                self.standing.add(record.ref)
            else:
                self.strays.append(record.ref)
        return outcome

    def delete(self, path: str) -> None:
        """Delete an object. Only retention removes a checkpoint of the chain, so never before an
        older one (SPEC 9).
        """
        checkpoint_id = layout.record_id(path)
        gone = {ref for ref in self.standing if ref.checkpoint_id == checkpoint_id}
        if gone and self.storage.exists() and any(item.path == path for item in self.storage.list(layout.RECORDS)):
            attempt = decode_record(bytes(self.storage.read(path)), path=path).attempt_id
            gone = {ref for ref in gone if ref.attempt_id == attempt}
            beneath = sorted(ref.checkpoint_id for ref in self.standing if gone and ref.checkpoint_id < checkpoint_id)
            if beneath:
                raise Violation(f"record {checkpoint_id} is deleted, and those beneath it stand: {beneath}")
            self.standing -= gone
        self.storage.delete([path])


class FaultyStorage(Storage):
    """The disk as one process sees it. Implements :class:`stateformat.storage.protocol.Storage`."""

    def __init__(self, disk: Disk, faults: Faults, rng: random.Random) -> None:
        self.disk, self.faults = disk, faults
        self.dead = False
        self.budget = faults.budget
        self.trace: list[str] = []
        """The faults that were drawn, for the story of a failure."""
        self.requests = 0
        self.meanwhile: Callable[[str, str], None] | None = None
        """Called with verb and path before a request goes out: the process stalls there, and others
        go on.
        """
        self._rng = rng
        self._late: list[tuple[int, Callable[[], Any]]] = []

    @property
    def url(self) -> str:
        return self.disk.storage.url

    def exists(self) -> bool:
        return self.disk.storage.exists()

    def read(self, path: str) -> pa.Buffer:
        return self._ask("read", path, lambda: self.disk.storage.read(path))

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        return self._ask("read", path, lambda: self.disk.storage.read_range(path, offset, length))

    def open_input(self, path: str) -> Any:
        return self._ask("read", path, lambda: self.disk.storage.open_input(path))

    def size(self, path: str) -> int:
        return self._ask("size", path, lambda: self.disk.storage.size(path))

    def open_output(self, path: str) -> FaultyOutput:
        return FaultyOutput(self, path, self.disk.storage.open_output(path))

    def create(self, path: str, data: bytes) -> CreateOutcome:
        return self._ask("create", path, lambda: self.disk.create(path, bytes(data)))

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._ask("list", prefix, lambda: self.disk.storage.list(prefix))

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._ask("delete", path, lambda path=path: self.disk.delete(path))

    def leftovers(self) -> list[Leftover]:
        return self._ask("list", "leftovers", lambda: sorted(self.disk.leftovers))

    def discard(self, leftovers: Iterable[Leftover]) -> None:
        for leftover in leftovers:
            if leftover in self.disk.leftovers:
                self.disk.leftovers.remove(leftover)

    def _ask(self, verb: str, path: str, carry_out: Callable[[], Any]) -> Any:
        """Draw what happens to a request, and let it happen."""
        if self.dead:
            raise Crash
        self.requests += 1
        self._land()
        if self.meanwhile is not None and threading.current_thread() is threading.main_thread():
            self.meanwhile(verb, path)
        # The order of requests from several threads does not follow from the seed: no faults there.
        spared = self.budget <= 0 or threading.current_thread() is not threading.main_thread()
        do = Do.IT if spared else self.faults.draw(self._rng, verb)
        if do is Do.IT:
            return carry_out()
        self.budget -= 1
        self.trace.append(f"request {self.requests}, {verb} {path}: {do.value}")
        if do is Do.DIE:
            self.die()
        if do is Do.REFUSE:
            return CreateOutcome.CONFLICT
        if do is Do.LATE:
            self._late.append((self.requests + self._rng.randrange(1, 6), carry_out))
        elif do is not Do.FAIL:
            carry_out()
        if do is Do.DIE_AFTER:
            self.die()
        if verb == "create":
            return CreateOutcome.UNKNOWN
        raise StorageError(f"no answer to {verb} {path} (a fault of the simulator)", path=path)

    def die(self) -> None:
        """The process dies."""
        self.dead = True
        raise Crash

    def _land(self) -> None:
        """Carry out late requests that are due."""
        due = [carry_out for at, carry_out in self._late if at <= self.requests]
        self._late = [late for late in self._late if late[0] > self.requests]
        for carry_out in due:
            carry_out()


class FaultyOutput:
    """A new object. Closing it is the request; one that is never closed is left behind."""

    def __init__(self, storage: FaultyStorage, path: str, inner: Any) -> None:
        self._storage, self._path, self._inner = storage, path, inner
        self._size_bytes = 0

    def write(self, data: Any) -> int:
        self._size_bytes += len(data)
        written: int = self._inner.write(data)
        return written

    def close(self) -> None:
        leftover = Leftover(self._path, self._size_bytes, f"part of {self._path}")
        self._storage.disk.leftovers.append(leftover)
        self._storage._ask("write", self._path, lambda: self._end(leftover))

    def _end(self, leftover: Leftover) -> None:
        self._inner.close()
        self._storage.disk.leftovers.remove(leftover)

    def abort(self) -> None:
        self._inner.abort()

    def __enter__(self) -> FaultyOutput:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.abort() if kind is not None else self.close()
