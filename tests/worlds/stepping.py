"""Drivers that a test steps request by request, a job for them to run, and what must hold whatever
the order.

A :class:`Driver` is a function in a thread of its own, over a storage that stops at every request
until the test lets it go on. Only one thread ever runs: ``step`` lets one request through and
returns when the driver stands at its next one, so an interleaving is a sequence of calls in the
test, and the same every time. An answer can be lost, a request dropped, refused or landed late, a
listing torn, a driver killed. :func:`explore` runs every interleaving of a few drivers.

:class:`Run` is the smallest job that can lose or repeat something: it counts intervals, prepares
one output per interval under its attempt, and commits when it has the permit. Its keyed state is a
base with deltas on top, so a checkpoint refers to the objects of those before it. Segments are a
few bytes of JSON: nothing of the protocol ever looks into one.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pyarrow as pa
import xxhash

import stateformat as sf
from stateformat import paths as layout
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.graph import OperatorId
from stateformat.history import manifests_under
from stateformat.manifest import decode_manifest, manifest_ref
from stateformat.model import ON_TOP, CheckpointId, Handle, ParentRef, Record, new_write_id
from stateformat.reading import StoreCheckpoint, load_manifest, load_record
from stateformat.states import committables_state, even_split_state, value_state
from stateformat.storage import CreateOutcome, ObjectInfo, Storage

PATIENCE_S = 20.0
"""A driver that neither asks nor ends for so long is stuck: a fault of the test, reported instead
of hanging.
"""


class Do(Enum):
    """What becomes of a request."""

    IT = "carry it out and answer"
    LOSE = "carry it out, and lose the answer"
    DROP = "lose the request"
    LATE = "lose the answer; the request lands when the test says so"
    REFUSE = "answer a create with a conflict that is none"
    FORBID = "refuse a create for want of rights"
    KILL = "the driver dies here; nothing is carried out"
    KILL_AFTER = "carry it out, and the driver dies before it hears of it"


class Killed(BaseException):
    """Ends a driver's thread wherever it stands; no handler of the library catches it."""


@dataclass(frozen=True)
class Request:
    """What a driver asks next: ``read``, ``write`` (closing an output), ``create``, ``list``,
    ``delete`` …
    """

    verb: str
    path: str

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"

    @property
    def place(self) -> str:
        """The path without its random part, which is another in every run: for records all of
        it.
        """
        return self.path[: len("manifests/") + 20] if self.path.startswith("manifests/") else self.path


def every_request(request: Request) -> bool:
    return True


def no_segments(request: Request) -> bool:
    """Scheduling points for long runs: segments are named at random, so no order of theirs can
    matter.
    """
    return not request.path.startswith(layout.SEGMENTS) or request.verb in ("list", "delete")


class Driver:
    """A function ``body(storage)`` that runs one request at a time. Use as ``driver.until(...)``,
    ``step``, ``finish``.
    """

    def __init__(
        self,
        name: str,
        storage: MemoryStorage,
        body: Callable[[Any], Any],
        *,
        stops: Callable[[Request], bool] = every_request,
    ) -> None:
        self.name = name
        self.request: Request | None = None
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.trace: list[str] = []
        self._stops = stops
        self._do, self._hide = Do.IT, frozenset[str]()
        self._late: list[Callable[[], Any]] = []
        self._asking, self._go, self._standing = threading.Lock(), threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body, SteppedStorage(storage, self)), daemon=True)
        self._thread.start()
        self._wait()

    def _run(self, body: Callable[[Any], Any], storage: SteppedStorage) -> None:
        try:
            self.result = body(storage)
        except BaseException as error:
            self.error = error
        self.done, self.request = True, None
        self._standing.release()

    def _wait(self) -> None:
        assert self._standing.acquire(timeout=PATIENCE_S), f"{self.name} is stuck after {self.trace[-5:]}"

    def ask(self, request: Request, carry_out: Callable[[], Any]) -> Any:
        """Called by the driver's storage: stand still, then do what the test has said."""
        if self.done or not self._stops(request):
            return carry_out()
        with self._asking:
            self.request = request
            self._standing.release()
            self._go.acquire()
            do, hide = self._do, self._hide
            self.trace.append(f"{request}: {do.name}")
            if do is Do.KILL:
                raise Killed
            if do is Do.LATE:
                self._late.append(carry_out)
            answer = None if do in (Do.DROP, Do.LATE, Do.REFUSE, Do.FORBID) else carry_out()
            if do is Do.KILL_AFTER:
                raise Killed
            if do is Do.REFUSE:
                return CreateOutcome.CONFLICT
            if do is Do.FORBID:
                raise sf.StorageError(f"not permitted to {request}", kind=sf.ErrorKind.STORAGE_REFUSED)
            if do is not Do.IT:
                if request.verb == "create":
                    return CreateOutcome.UNKNOWN
                raise sf.StorageError(f"no answer to {request}")
            return [item for item in answer if item.path not in hide] if hide else answer

    def step(self, do: Do = Do.IT, *, hide: Collection[str] = ()) -> Driver:
        """Let the request that the driver stands at be carried out so; ``hide`` leaves names out of
        a listing's answer.
        """
        assert not self.done, f"{self.name} has ended: {self.error or self.result}"
        self._do, self._hide = do, frozenset(hide)
        self._go.release()
        self._wait()
        return self

    def until(self, verb: str, path: str = "") -> Driver:
        """Step until the driver stands at such a request."""
        while not self.stands_at(verb, path):
            assert not self.done, f"{self.name} ended before {verb} {path}: {self.error or self.result}; {self.trace}"
            self.step()
        return self

    def stands_at(self, verb: str, path: str = "") -> bool:
        return self.request is not None and self.request.verb == verb and path in self.request.path

    def finish(self) -> Any:
        """Let it run to its end; its result, or its error raised."""
        while not self.done:
            self.step()
        if self.error is not None:
            raise self.error
        return self.result

    def fail(self) -> BaseException:
        """Let it run to its end, which must be an error; that error."""
        while not self.done:
            self.step()
        assert self.error is not None, f"{self.name} did not fail: {self.result}"
        return self.error

    def kill(self) -> None:
        """Kill it where it stands."""
        while not self.done:
            self.step(Do.KILL)
        self._thread.join(PATIENCE_S)

    def land(self) -> None:
        """Carry out what was sent and is late."""
        for carry_out in self._late:
            carry_out()
        self._late.clear()


class SteppedStorage(Storage):
    """The memory storage as one driver sees it: each method asks the driver first."""

    def __init__(self, inner: MemoryStorage, driver: Driver) -> None:
        self.inner, self._driver = inner, driver

    @property
    def url(self) -> str:
        return self.inner.url

    def exists(self) -> bool:
        return self.inner.exists()

    def read(self, path: str) -> pa.Buffer:
        return self._driver.ask(Request("read", path), lambda: self.inner.read(path))

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        return self._driver.ask(Request("read", path), lambda: self.inner.read_range(path, offset, length))

    def open_input(self, path: str) -> Any:
        return self._driver.ask(Request("read", path), lambda: self.inner.open_input(path))

    def size(self, path: str) -> int:
        return self._driver.ask(Request("size", path), lambda: self.inner.size(path))

    def open_output(self, path: str) -> SteppedOutput:
        return SteppedOutput(self.inner.open_output(path), path, self._driver)

    def create(self, path: str, data: bytes) -> CreateOutcome:
        return self._driver.ask(Request("create", path), lambda: self.inner.create(path, data))

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._driver.ask(Request("list", prefix), lambda: self.inner.list(prefix))

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._driver.ask(Request("delete", path), lambda path=path: self.inner.delete([path]))


class SteppedOutput:
    """An output whose closing is a request."""

    def __init__(self, inner: Any, path: str, driver: Driver) -> None:
        self._inner, self._path, self._driver = inner, path, driver

    def write(self, data: Any) -> int:
        return self._inner.write(data)

    def close(self) -> None:
        self._driver.ask(Request("write", self._path), self._inner.close)

    def abort(self) -> None:
        self._inner.abort()

    def __enter__(self) -> SteppedOutput:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.abort() if kind is not None else self.close()


# --- a job ----------------------------------------------------------------------------------------

JOB = "job"
GRAPH = sf.JobGraph((sf.Operator(OperatorId("count"), 1, 128),))
TOTAL = value_state("count", "total", keys={"key": pa.int64()}, values={"count": pa.int64()})
POSITION = even_split_state("count", "position", columns={"interval": pa.int64()})
PREPARED = committables_state("count", "prepared", columns={"interval": pa.int64()})
STATES = (TOTAL, POSITION, PREPARED)


def fake_segment(storage: Any, ref: ParentRef, content: Any, *, inline: bool) -> dict[str, Any]:
    """The columns of a handle for one row, whose segment is the JSON of ``content``."""
    # As long as the least that a manifest takes for a Parquet file.
    data = json.dumps(content).encode().ljust(64)
    path = layout.segment_path(ref.checkpoint_id, new_write_id(), label="fake")
    if not inline:
        with storage.open_output(path) as output:
            output.write(data)
    digest = xxhash.xxh3_128_digest(data)
    return {
        "path": path,
        "rows": 1,
        "segment_rows": 1,
        "size_bytes": len(data),
        "uncompressed_bytes": len(data),
        "footer_bytes": 12,
        "digest": digest,
        "footer_digest": xxhash.xxh3_128_digest(data[-12:]),
        "inline": data if inline else None,
    }


def contents(checkpoint: sf.Checkpoint) -> dict[str, list[Any]]:
    """What the segments of each state hold, in manifest order, every object read and its digest
    verified.
    """
    return held(checkpoint.storage, checkpoint.manifest.full())


def held(storage: Any, handles: pa.Table) -> dict[str, list[Any]]:
    """The same of the handles of a manifest."""
    found: dict[str, list[Any]] = {"total": [], "position": [], "prepared": []}
    for row in handles.select(["state", "rows", "path", "digest", "inline"]).to_pylist():
        if row["rows"]:
            data = row["inline"] if row["inline"] is not None else storage.read(row["path"]).to_pybytes()
            assert xxhash.xxh3_128_digest(data) == row["digest"], f"{row['path']} is not what was written"
            found[row["state"]].append(json.loads(data))
    return found


def carried_attempts(storage: Any, newest: Record) -> set[str] | None:
    """The attempts whose output may still be committed: of all records and of manifests under
    newest + 1.

    None where a record cannot be read: then nobody knows.
    """
    tables = []
    for item in storage.list(layout.RECORDS):
        try:
            record = load_record(storage, CheckpointId(int(item.path[12:32])))
            tables.append(load_manifest(storage, record).full())
        except sf.NotFound:
            continue
        except sf.DamagedCheckpoint:
            return None
    for path in manifests_under(storage, CheckpointId(newest.checkpoint_id + 1)):
        data = storage.read(path)
        tables.append(decode_manifest(data, manifest_ref(path, data)).full())
    prepared = [items for handles in tables for items in held(storage, handles)["prepared"]]
    return {item["attempt"] for items in prepared for item in items}


def whole(checkpoint: sf.Checkpoint) -> dict[str, list[Any]]:
    """The same, and the base that the layers lie on is there."""
    held = contents(checkpoint)
    assert held["total"][0].keys() == {"full"}, "the base of the layers is not there"
    return held


@dataclass
class Sink:
    """A two-phase-commit sink: idempotent by the attempt that prepared an output, as SPEC.md
    section 6.3 demands.
    """

    prepared: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By attempt: the checkpoint id under which it was prepared, and the interval."""
    known: set[str] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)

    def commit(self, permit: sf.CommitPermit, committables: list[dict[str, Any]]) -> None:
        assert isinstance(permit, sf.CommitPermit)
        for item in committables:
            key = self.key(permit, item)
            if key not in self.known:
                self.known.add(key)
                if item["attempt"] in self.prepared:
                    self.outputs.append(item["interval"])

    def key(self, permit: sf.CommitPermit, item: dict[str, Any]) -> str:
        return item["attempt"]

    def clean_up(self, newest: Record, carried: Iterable[str]) -> None:
        """Remove what attempts prepared under ids up to the newest that no checkpoint carries."""
        kept = {*carried, newest.attempt_id, *self.known}
        for attempt, (checkpoint_id, _) in list(self.prepared.items()):
            if self.may_go(checkpoint_id, newest) and attempt not in kept:
                del self.prepared[attempt]

    def may_go(self, checkpoint_id: int, newest: Record) -> bool:
        return checkpoint_id <= newest.checkpoint_id


class Run:
    """One run of the job, from ``restart`` to its end."""

    def __init__(self, storage: Any, sink: Sink, permit: sf.CommitPermit | None = None, *, sink_is_down: bool = False):
        self.storage, self.sink, self.permit = storage, sink, permit
        self.store = sf.CheckpointStore(storage, sleep=lambda seconds: None)
        self.interval = 0
        self.sink_is_down = sink_is_down
        self.uncommitted: list[dict[str, Any]] = []

    def restart(self, *, clean_up: bool = False) -> Run:
        self.permit = self.store.start(JOB)
        if self.permit is None:
            return self
        checkpoint = self.permit.checkpoint()
        try:
            held = contents(checkpoint)
            self.interval = held["position"][0]["interval"]
            self.uncommitted = [item for found in held["prepared"] for item in found]
        except sf.CheckpointExpired:
            # Whoever holds a checkpoint as the newest and misses an object is told so, if there is
            # a newer one.
            return self.restart(clean_up=clean_up)
        self.commit()
        if clean_up:
            carried = carried_attempts(self.storage, self.permit.record)
            if carried is not None:
                self.sink.clean_up(self.permit.record, carried)
        return self

    def commit(self) -> None:
        assert self.permit is not None
        if not self.sink_is_down:
            self.sink.commit(self.permit, self.uncommitted)
            self.uncommitted = []

    def publish(self, *, full: bool = False) -> Run:
        """Consume one interval, prepare its output, publish, and commit what has become permanent.

        ``full`` writes the keyed state whole; otherwise a delta lies on top of what the parent has.
        After a rescale it is written whole in any case, for the job goes on at its own parallelism.
        """
        pending = self.store.begin(job_id=JOB, graph=GRAPH, states=STATES, parent=self.permit)
        interval = self.interval + 1
        self.sink.prepared[pending.attempt_id] = (pending.checkpoint_id, interval)
        prepared = [*self.uncommitted, {"attempt": pending.attempt_id, "interval": interval}]

        def handle(state: str, mode: sf.Mode, held: Any, *, layer: int = 0, inline: bool = True, **more: Any) -> Handle:
            columns = fake_segment(self.storage, pending.ref, held, inline=inline)
            return Handle("count", state, mode, 0, layer, None, 1, **columns, **more)

        whole = full or self.permit is None or self.permit.record.graph.operators[0].parallelism != 1
        groups = {"first_group": 0, "last_group": 0, "rows_per_group": [1]}
        total = {"full" if whole else "plus": interval}
        handles = (
            handle("total", sf.Mode.KEYED, total, layer=0 if whole else ON_TOP, inline=False, **groups),
            handle("position", sf.Mode.EVEN_SPLIT, {"interval": interval}),
            handle("prepared", sf.Mode.COMMITTABLES, prepared),
        )
        assert pending.add(sf.Snapshot("count", 0, handles, () if whole else ("total",)))
        self.permit = pending.publish()
        self.interval, self.uncommitted = interval, prepared
        self.commit()
        return self


# --- a world of drivers ---------------------------------------------------------------------------


class World:
    """One store in memory, one sink, and the drivers that work on them. As a context manager it
    ends every driver.
    """

    numbers = itertools.count()

    def __init__(self, *, stops: Callable[[Request], bool] = every_request) -> None:
        self.name = f"stepping-{next(self.numbers)}"
        self.storage = MemoryStorage(self.name)
        self.store = sf.CheckpointStore(self.storage, sleep=lambda seconds: None)
        self.sink = Sink()
        self.drivers: list[Driver] = []
        self._stops = stops

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        for driver in self.drivers:
            driver.kill()
        MemoryStorage.reset(self.name)

    def driver(self, name: str, body: Callable[[Any], Any]) -> Driver:
        self.drivers.append(Driver(name, self.storage, body, stops=self._stops))
        return self.drivers[-1]

    def publisher(self, name: str, permit: sf.CommitPermit | None = None, *, interval: int = 0, **how: Any) -> Driver:
        """A driver that publishes one checkpoint on a permit that it holds (None: the first of the
        job).
        """

        def body(storage: Any) -> Run:
            run = Run(storage, self.sink, permit)
            run.interval = interval
            return run.publish(**how)

        return self.driver(name, body)

    def restarter(self, name: str, publish: int = 0, *, clean_up: bool = False) -> Driver:
        """A driver that restarts from the newest, and then publishes so many checkpoints."""

        def body(storage: Any) -> Run:
            run = Run(storage, self.sink).restart(clean_up=clean_up)
            for _ in range(publish):
                run.publish()
            return run

        return self.driver(name, body)

    def gc(self) -> Driver:
        return self.driver("gc", lambda storage: sf.CheckpointStore(storage).collect_garbage(delete=True))

    def expiring(self) -> Driver:
        return self.driver("expire", lambda storage: sf.CheckpointStore(storage).expire(1))

    def rolling_back(self, checkpoint_id: int) -> Driver:
        return self.driver("rollback", lambda storage: sf.CheckpointStore(storage).rollback(checkpoint_id))

    def run(self) -> Run:
        """A run that nobody steps: from the newest, at once."""
        return Run(self.storage, self.sink).restart()

    def expire(self, keep: int = 1) -> Any:
        return self.store.expire(keep)

    def ids(self) -> list[int]:
        return [int(layout.record_id(item.path) or 0) for item in self.storage.list(layout.RECORDS)]

    def attempts(self) -> dict[int, str]:
        return {ref.checkpoint_id: ref.attempt_id for ref in (self._ref(i) for i in self.ids())}

    def _ref(self, checkpoint_id: int) -> ParentRef:
        data = json.loads(self.storage.read(f"checkpoints/{checkpoint_id:020d}.json").to_pybytes())
        return ParentRef(data["checkpoint_id"], data["attempt_id"])

    def check(self, *, rolled_back: bool = False) -> None:
        """One history, every checkpoint of it whole, and a fresh run leaves every interval in the
        output exactly once.

        After a rollback the output may repeat what was left behind; then only the first two are
        asked.
        """
        if not self.ids():
            assert self.sink.outputs == []
            return
        chain = self.store.history()
        assert [record.checkpoint_id for record in chain] == sorted(
            (record.checkpoint_id for record in chain), reverse=True
        )
        for record in chain:
            whole(StoreCheckpoint(self.storage, record))
        run = self.run()
        if not rolled_back:
            assert sorted(self.sink.outputs) == list(range(1, run.interval + 1)), self.sink.outputs
        before = run.permit
        run.publish()
        assert run.permit is not None
        assert before is not None
        assert run.permit.record.parent == before.ref


@dataclass(frozen=True)
class Step:
    """A step that was or may be taken: which driver, its request, and what becomes of it."""

    driver: int
    request: Request
    do: Do = Do.IT

    def commutes(self, other: Step) -> bool:
        """Whether both orders of two steps give the same: two looks, or requests that cannot
        meet.
        """
        if self.driver == other.driver or Do.IT is not self.do or Do.IT is not other.do:
            return False
        if self._looks() and other._looks():
            return True
        mine, others = self.request.place, other.request.place
        return not (mine.startswith(others) or others.startswith(mine))

    def _looks(self) -> bool:
        return self.request.verb in ("read", "list", "size")


Options = Callable[[World, list[Step]], list[Step]]


def any_order(world: World, taken: list[Step]) -> list[Step]:
    """Every driver that has not ended may be next."""
    return [Step(i, driver.request) for i, driver in enumerate(world.drivers) if driver.request is not None]


@dataclass
class _Point:
    """A point of a run: the steps that can still tell something new here, and those whose order was
    tried elsewhere.
    """

    steps: list[Step]
    asleep: list[Step]
    index: int = 0

    def asleep_after(self) -> list[Step]:
        chosen = self.steps[self.index]
        return [step for step in (*self.asleep, *self.steps[: self.index]) if step.commutes(chosen)]


def explore(make: Callable[[], World], options: Options = any_order) -> Iterator[tuple[World, list[Step]]]:
    """Every interleaving that can end differently: yields each world when its drivers have ended,
    with the steps taken.

    A depth-first search without stored states: a prefix of choices is run again in a new world; the
    last point with an untried step is where the next run differs. Sleep sets leave out orders of
    steps that commute (Godefroid 1996): once a step was tried at a point, it is not tried after
    another one there until something has happened that it can meet.
    """
    points: list[_Point] = []
    while True:
        with make() as world:
            taken: list[Step] = []
            for point in points:
                _take(world, point, taken)
            while steps := options(world, taken):
                asleep = points[-1].asleep_after() if points else []
                # A driver that sleeps stands at the same request still, so who and what says it
                # all.
                awake = [step for step in steps if (step.driver, step.do) not in {(s.driver, s.do) for s in asleep}]
                if not awake:
                    break
                points.append(_Point(awake, asleep))
                _take(world, points[-1], taken)
            # A run that ends with everything asleep is the same as another one.
            if all(driver.done for driver in world.drivers):
                yield world, taken
        while points and points[-1].index + 1 == len(points[-1].steps):
            points.pop()
        if not points:
            return
        points[-1].index += 1


def _take(world: World, point: _Point, taken: list[Step]) -> None:
    step = point.steps[point.index]
    request = world.drivers[step.driver].request
    assert request is not None
    assert request.verb == step.request.verb
    taken.append(Step(step.driver, request, step.do))
    world.drivers[step.driver].step(step.do)
