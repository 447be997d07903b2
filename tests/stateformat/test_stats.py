"""What a store counts of its own work is what a storage was asked."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat import storage as st, validate
from stateformat.backends.storage.local import LocalStorage
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import NotFound, OutcomeUnknown, PublishConflict, StorageError
from stateformat.publication.protocol import RETRIES
from stateformat.segments import WriteOptions
from stateformat.storage.instrumented import InstrumentedStorage
from stateformat.storage.stats import EVENTS, OPERATIONS, Counts
from stateformat.store import CheckpointStore
from stateformat.validation import segments as validation_segments
from tests.worlds.stores import counts_job, flights_job, flights_store, rescale_newest

NAME = "stats"
PATH = "segments/00000000000000000001/one"
OBJECTS = WriteOptions(inline_bytes_max=0)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for name in (NAME, f"{NAME}-target"):
        MemoryStorage.reset(name)


class Witness:
    """The memory storage, with a list of what it was asked: operation, objects and bytes of each
    call.
    """

    def __init__(self, name: str = NAME) -> None:
        self.inner = MemoryStorage(name)
        self.url = self.inner.url
        self.seen: list[tuple[str, int, int]] = []

    def note(self, operation: str, call: Callable[[], Any], measure: Callable[[Any], tuple[int, int]]) -> Any:
        """The answer of a call; one that fails has moved nothing."""
        self.seen.append((operation, 0, 0))
        at = len(self.seen) - 1
        answer = call()
        self.seen[at] = (operation, *measure(answer))
        return answer

    def open_output(self, path: str) -> Any:
        output, sizes = self.inner.open_output(path), []
        write, close = output.write, output.close
        output.write = lambda data: sizes.append(write(data)) or sizes[-1]  # type: ignore[method-assign]
        output.close = lambda: self.note("open_output", close, lambda _: (1, sum(sizes)))  # type: ignore[method-assign]
        return output

    def sums(self) -> dict[str, tuple[int, ...]]:
        """Calls, objects and bytes of each operation that was asked."""
        by_name = defaultdict(list)
        for operation, *counts in self.seen:
            by_name[operation].append((1, *counts))
        return {operation: tuple(map(sum, zip(*calls, strict=True))) for operation, calls in by_name.items()}


def noted(operation: str, measure: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
    def call(self: Witness, *given: Any) -> Any:
        given = tuple([*item] if operation == "delete" else item for item in given)
        plain = getattr(self.inner, operation)
        return self.note(operation, lambda: plain(*given), lambda answer: measure(answer, *given))

    return call


MEASURES: dict[str, Callable[..., tuple[int, int]]] = {
    "exists": lambda _: (0, 0),
    "read": lambda data, _: (1, data.size),
    "read_range": lambda data, *_: (1, data.size),
    # Whoever opens a file here reads all of it, once.
    "open_input": lambda file, _: (1, file.size()),
    "size": lambda *_: (1, 0),
    "create": lambda outcome, _, data: (int(outcome is st.CreateOutcome.CREATED), len(data)),
    "list": lambda found, _: (len(found), 0),
    "delete": lambda _, paths: (len(paths), 0),
}
for _name, _measure in MEASURES.items():
    setattr(Witness, _name, noted(_name, _measure))


def told(stats: st.Stats) -> dict[str, tuple[int, ...]]:
    """The same as :meth:`Witness.sums`, as the library tells it."""
    return {name: counts[:3] for name, counts in stats.operations.items() if counts.calls}


def restore(store: CheckpointStore) -> None:
    checkpoint = store.open()
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism=6))
    tasks = [task for subtask in range(6) for task in checkpoint.restore(plan, "delays", subtask).values()]
    assert sum(len(task.table()) for task in tasks) > 60


def copy(store: CheckpointStore) -> None:
    target = Witness(f"{NAME}-target")
    there = CheckpointStore(target)
    for _ in range(2):  # The second finds everything there, and reads it.
        store.copy(store.open(), there)
    assert told(there.stats) == target.sums()
    assert there.stats["open_input"].size_bytes == there.stats["open_output"].size_bytes > 0


def check(store: CheckpointStore) -> None:
    assert validate(store, level="full").ok


def miss(store: CheckpointStore) -> None:
    with pytest.raises(NotFound):
        store.open(7)


ACTIONS: dict[str, Callable[[CheckpointStore], Any]] = {
    "publish": lambda store: flights_job().publish(store, store.start("flights-job")),
    "restore": restore,
    "plan": lambda store: store.open().plan_restore(store.open().graph.at(parallelism=3)),
    "rescale": lambda store: rescale_newest(store, 3),
    "history": lambda store: store.history(),
    "open one that is not there": miss,
    "expire": lambda store: store.expire(1),
    "gc": lambda store: store.collect_garbage(delete=True),
    "rollback": lambda store: store.rollback(1),
    "copy": copy,
    "validate": check,
}


@pytest.fixture(scope="module")
def written() -> dict[str, bytes]:
    """The objects of a store of three checkpoints: part finished, in layers, inline and not."""
    flights_store(f"memory://{NAME}")
    storage, job = MemoryStorage(NAME), flights_job()
    store = CheckpointStore(storage)
    job.publish(store, store.start(job.job_id), options=OBJECTS)
    return {item.path: storage.read(item.path).to_pybytes() for top in st.TOP_LEVEL for item in storage.list(f"{top}/")}


@pytest.mark.parametrize("action", ACTIONS)
def test_the_counts_are_those_of_a_storage_that_writes_down_what_it_is_asked(
    action: str, written: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Segments of a few bytes as if they were large: read by the file, not at once.
    monkeypatch.setattr(validation_segments, "WHOLE_BYTES_MAX", 0)
    witness = Witness()
    for path, data in written.items():
        witness.inner.create(path, data)
    store = CheckpointStore(witness)
    assert told(store.stats) == {}
    ACTIONS[action](store)
    stats = store.stats
    assert told(stats) == witness.sums()
    assert stats.total.calls == len(witness.seen) > 0
    assert stats.total.failures == stats.as_dict()["retries"] == stats.waits == stats.unknown_outcomes == 0
    assert all(0 < stats[name].seconds < 60 for name in witness.sums())


# --- what does not go at once
# ----------------------------------------------------------------------------------------


class Forgetful(MemoryStorage):
    """Does what it is asked, and fails to answer the first so many requests of each kind."""

    def __init__(self, *, creates: int = 0, lists: int = 0) -> None:
        super().__init__(NAME)
        self.creates, self.lists = creates, lists

    def create(self, path: str, data: bytes) -> st.CreateOutcome:
        outcome = super().create(path, data)
        self.creates -= 1
        return st.CreateOutcome.UNKNOWN if self.creates >= 0 else outcome

    def list(self, prefix: str) -> list[st.ObjectInfo]:
        self.lists -= 1
        if self.lists >= 0:
            raise StorageError("no answer")
        return super().list(prefix)


def test_answers_that_are_lost_are_counted_as_tries_waits_and_unknown_outcomes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slept: list[float] = []
    store = CheckpointStore(Forgetful(creates=1, lists=3), sleep=slept.append)
    with caplog.at_level(logging.INFO):
        counts_job().publish(store, None)
    stats, place = store.stats, f"checkpoint 1 of memory://{NAME}"
    assert (stats.retries, stats.waits, len(slept)) == (3, 3, 3)
    assert stats.wait_seconds == pytest.approx(sum(slept))
    assert (stats.unknown_outcomes, stats.conflicts) == (1, 0)
    create, listed = stats["create"], stats["list"]
    assert (create[:2], create.failures, listed.calls, listed.failures) == ((1, 0), 0, 5, 3)
    lines = {level: [r.getMessage() for r in caplog.records if r.levelname == level] for level in ("WARNING", "INFO")}
    assert len([line for line in lines["WARNING"] if "whether it was created is unknown" in line]) == 1
    retries = [f"{place}: retry {n} of {RETRIES} (list) in {pause:.2f} s" for n, pause in enumerate(slept, 1)]
    assert [line for line in lines["WARNING"] if "retry" in line] == retries
    assert lines["INFO"][0].startswith(f"published {place}: 20 rows, 2 segments, ")


def test_a_publication_that_nobody_answers_has_waited_before_every_try_but_the_first() -> None:
    slept: list[float] = []
    store = CheckpointStore(Forgetful(lists=1000), sleep=slept.append)
    with pytest.raises(OutcomeUnknown):
        counts_job().publish(store, None)
    assert store.stats.retries == store.stats.waits == len(slept) == RETRIES
    assert store.stats["list"].failures == RETRIES + 1
    assert store.stats.wait_seconds == pytest.approx(sum(slept))


class Stuttering(MemoryStorage):
    """Sends every request again, once, on an event loop in another thread, as clients of S3 do."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(NAME)
        self.loop = loop

    def read(self, path: str) -> pa.Buffer:
        async def send() -> pa.Buffer:
            await asyncio.sleep(0)
            st.retried(0.25)
            return super(Stuttering, self).read(path)

        return asyncio.run_coroutine_threadsafe(send(), self.loop).result(20)


def test_a_request_that_a_storage_sends_again_counts_for_the_store_that_asked() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        inner = Stuttering(loop)
        inner.create(PATH, b"1")
        one, two = st.instrumented(inner), st.instrumented(inner)
        with ThreadPoolExecutor(4) as pool:
            assert len([*pool.map(one.read, [PATH] * 20), two.read(PATH), inner.read(PATH)]) == 22
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
    found = [(stats.retries, stats.waits, stats.wait_seconds) for stats in (one.stats, two.stats)]
    assert found == [(20, 20, 5.0), (1, 1, 0.25)]


def test_a_rivals_record_is_a_conflict_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = (CheckpointStore(MemoryStorage(NAME)) for _ in range(2))
    counts_job().publish(theirs, None)
    with pytest.raises(PublishConflict):
        counts_job().publish(ours, None)
    assert (ours.stats.conflicts, theirs.stats.conflicts, ours.stats["create"][:2]) == (1, 0, (1, 0))
    told = [record.getMessage() for record in caplog.records if record.name == "stateformat.publication.protocol"]
    assert told == [f"checkpoint 1 of memory://{NAME}: lost"], "only what is known"


def test_a_reading_of_the_history_that_starts_over_is_counted() -> None:
    class Late(MemoryStorage):
        """Shows the newest record only from the second listing on: as if it were published just
        then.
        """

        late = True

        def list(self, prefix: str) -> list[st.ObjectInfo]:
            found = super().list(prefix)
            self.late, hidden = False, self.late
            return found[:-1] if hidden else found

    store = CheckpointStore(MemoryStorage(NAME))
    counts_job().publish(store, counts_job().publish(store, None))
    late = CheckpointStore(Late(NAME))
    assert late.open().id == 2
    assert (store.stats.history_restarts, late.stats.history_restarts) == (0, 1)


# --- one storage in front of another
# ---------------------------------------------------------------------------------


def test_it_can_do_what_the_storage_behind_it_can(tmp_path: Path) -> None:
    local, memory = LocalStorage(tmp_path, durable=False), st.instrumented(MemoryStorage(NAME))
    storage = CheckpointStore(local).storage
    for wrapped in (storage, st.remembered(storage)):
        assert isinstance(wrapped, st.Storage)
        folder = wrapped.folder()
        assert folder is not None
        assert folder.look().folders == {}
    assert isinstance(storage, InstrumentedStorage)
    # What the memory storage leaves to the default is not counted, except for what that asks.
    assert (memory.leftovers(), memory.names("checkpoints/"), memory.folder()) == ([], [], None)
    assert {name: counts.calls for name, counts in memory.stats.operations.items() if counts.calls} == {"list": 1}
    assert (repr(storage), storage.url) == (repr(local), local.url)
    assert st.instrumented(storage) is storage, "and is not observed twice"
    assert CheckpointStore(storage).stats is st.stats_of(storage)
    other = st.Stats()
    assert st.stats_of(st.instrumented(storage, other)) is other


def test_what_only_some_storages_do_is_counted_too(tmp_path: Path) -> None:
    storage = st.instrumented(LocalStorage(tmp_path, durable=False))
    dropped = storage.open_output(PATH)
    dropped.write(b"abc")
    (left,) = storage.leftovers()
    assert left.path == PATH
    storage.discard(iter([left]))
    storage.create(PATH, b"x")
    storage.make_durable([PATH])
    assert [storage.stats[name][:2] for name in ("leftovers", "discard", "make_durable")] == [(1, 1)] * 3
    dropped.abort()
    # A file of a local store stays one that pyarrow reads by itself.
    with storage.open_input(PATH) as file:
        assert (type(file), file.read()) == (pa.OSFile, b"x")
    assert storage.stats["open_input"][:3] == (1, 1, 0), "its bytes are told by who reads them"


def test_an_object_that_is_not_there_is_an_answer_and_any_other_error_a_failure() -> None:
    storage = st.instrumented(Forgetful(lists=1))
    for ask in (storage.read, storage.open_input, storage.size):
        with pytest.raises(FileNotFoundError):
            ask(PATH)
    assert (storage.stats.total[:3], storage.stats.total.failures) == ((3, 0, 0), 0)
    with pytest.raises(StorageError, match=r"^no answer$"):
        storage.list("segments/")
    assert storage.list("segments/") == []
    assert (storage.stats["list"][:2], storage.stats["list"].failures) == ((2, 0), 1)


def test_an_output_counts_once_whichever_way_it_ends() -> None:
    storage = st.instrumented(MemoryStorage(NAME))

    def counted() -> tuple[float, ...]:
        calls, objects, size_bytes, _, failures = storage.stats["open_output"]
        return calls, objects, size_bytes, failures

    with storage.open_output(PATH) as output:
        output.write(b"abc")
        output.write(memoryview(b"de"))
        output.close()
    output.close()
    assert counted() == (1, 1, 5, 0)
    dropped = storage.open_output(PATH + "2")
    dropped.write(b"1234567")
    dropped.abort()
    dropped.abort()
    assert counted() == (2, 1, 12, 0)
    with pytest.raises(TypeError), storage.open_output(PATH + "3") as output:
        output.write(b"123" + 4)  # type: ignore[operator]
    assert counted() == (3, 1, 12, 0)
    with pytest.raises(StorageError, match="exists already"), storage.open_output(PATH) as output:
        output.write(b"abc")
    assert counted() == (4, 1, 15, 1)


def test_a_pickled_copy_counts_for_itself() -> None:
    store = CheckpointStore(MemoryStorage(NAME))
    store.storage.create(PATH, b"12345")
    copied: CheckpointStore = pickle.loads(pickle.dumps(store))
    assert isinstance(copied.storage, InstrumentedStorage)
    assert told(copied.stats) == {}
    assert copied.storage.read(PATH).size == 5
    assert (told(copied.stats), told(store.stats)) == ({"read": (1, 1, 5)}, {"create": (1, 1, 5)})
    store.stats.include(pickle.loads(pickle.dumps(copied.stats)))
    assert told(store.stats) == {"read": (1, 1, 5), "create": (1, 1, 5)}


def test_no_count_is_lost_between_threads() -> None:
    storage = st.instrumented(MemoryStorage(NAME))
    storage.create(PATH, b"1234567")

    def work(_: int) -> None:
        for _ in range(1000):
            storage.read(PATH)
            storage.stats.event(waits=1, wait_seconds=0.5)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(work, range(8)):
            read = storage.stats.copy()["read"]
            # Calls, objects and bytes are replaced together, so a look in between shows them agree.
            assert read.size_bytes == 7 * read.calls == 7 * read.objects
    assert storage.stats["read"][:3] == (8000, 8000, 56_000)
    assert (storage.stats.waits, storage.stats.wait_seconds) == (8000, 4000.0)


# --- the object itself
# -----------------------------------------------------------------------------------------------


def test_a_storage_in_front_of_another_passes_every_method_and_the_operations_are_among_them() -> None:
    methods = {name for name in vars(st.Storage) if not name.startswith("_")}
    assert methods <= {*vars(st.InFront)}
    assert {*OPERATIONS} <= methods


def test_the_example_of_the_docs_exports_every_number_once(capsys: pytest.CaptureFixture[str]) -> None:
    (page_path,) = (Path(__file__).resolve().parents[2] / "docs").rglob("observability.md")
    page = page_path.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    printed = capsys.readouterr().out.splitlines()
    MemoryStorage.reset("example")
    exported = dict(line.rsplit(" ", 1) for line in printed)
    assert len(exported) == len(printed) == len(OPERATIONS) * len(Counts._fields) + len(EVENTS)
    listed = namespace["store"].stats["list"].calls
    assert exported['checkpoint_store_calls_total{operation="list"}'] == str(listed) != "0"
    assert all(f"`{name}`" in page for name in (*OPERATIONS, *EVENTS, *Counts._fields))


def test_the_table_fits_eighty_columns_and_names_what_was_asked() -> None:
    stats = st.Stats()
    assert str(stats) == "no storage calls were made"
    for operation in OPERATIONS:
        stats.count(operation, calls=10**6, objects=10**8, size_bytes=10**12, seconds=12345.678, failures=10**5)
    stats.event(retries=8, waits=8, wait_seconds=12.75, conflicts=1, unknown_outcomes=2, history_restarts=3)
    lines = str(stats).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["operation", *OPERATIONS, "all", "retries"]
    assert lines[1].split() == ["exists", "1,000,000", "100,000,000", "1,000,000,000,000", "12345.6780", "100,000"]
    assert lines[-1] == "retries 8, waits 8 (12.75 s), conflicts 1, unknown 2, restarts 3"


def test_every_operation_is_a_line_of_the_log_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    storage = st.instrumented(Forgetful(lists=1))
    with caplog.at_level(logging.INFO):
        storage.exists()
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "stateformat.storage.instrumented"):
        with pytest.raises(StorageError):
            storage.list("segments/")
        with storage.open_output(PATH) as output:
            output.write(b"123")
        storage.create(PATH, b"123")
        storage.read(PATH)
        storage.delete([PATH, PATH + "2"])
        storage.exists()
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.endswith(" ms") for line in lines)
    assert [line.rsplit(" ", 2)[0].replace(f" of memory://{NAME}:", " |") for line in lines] == [
        "list segments/ | raised StorageError,",
        f"open_output {PATH} | 3 bytes,",
        f"create {PATH} | nothing was created,",
        f"read {PATH} | 3 bytes,",
        f"delete {PATH} and 1 more | 2 objects,",
        "exists |",
    ]
