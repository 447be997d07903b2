"""Segments that a checkpoint has lost: which they are, and putting them back from other stores.

All checkpoints of a store validated at once, and the search for the newest that is whole.

What they find of a checkpoint is what validating it alone finds; what several share is read once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from stateformat import repairing
from stateformat.backends.storage import MemoryStorage
from stateformat.documents import store_report_document
from stateformat.errors import DamagedCheckpoint, ErrorKind, NotFound, StorageError
from stateformat.findings import Level, StoreReport
from stateformat.repairing import Losses, losses_of
from stateformat.segments import WriteOptions
from stateformat.storage import Stats, Storage
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import check_checkpoint, newest_whole, validate, validate_all
from tests.ckpt.ckpt_runs import fingerprint
from tests.servers.server import BUCKET, S3Server
from tests.worlds import stores

OBJECTS = WriteOptions(inline_bytes_max=0)


@pytest.fixture(scope="module")
def _flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repairing") / "store"
    store, job, permit = open_store(str(folder)), stores.flights_job(), None
    for _ in range(3):
        permit = job.publish(store, permit, options=OBJECTS)
    return folder


@pytest.fixture
def flights(_flights: Path, tmp_path: Path) -> Path:
    """Three checkpoints with something of everything."""
    return Path(shutil.copytree(_flights, tmp_path / "store"))


@pytest.fixture
def pinned(flights: Path) -> Storage:
    """The savepoint ``safe`` of checkpoint 3, below the store."""
    store = open_store(str(flights))
    store.pin(3, "safe")
    (place,) = repairing.savepoints_of(store.storage)
    return place


def paths_of(store: CheckpointStore, operator: str, state: str) -> list[str]:
    every = store.open().handles.to_pylist()
    return [each["path"] for each in every if (each["operator"], each["state"]) == (operator, state)]


def lost(store: CheckpointStore, source: int | None = None) -> Losses:
    found = losses_of(store.storage, store.diagnose(source, level="full"), source)
    assert found is not None
    return found


def remove(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).unlink()


def unlinked(path: Path, data: bytes) -> None:
    """Make a file another one than what may be linked to it."""
    path.unlink()
    path.write_bytes(data)


def flip(path: Path, at: int = 40) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    unlinked(path, bytes(data))


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    unlinked(one, second)
    unlinked(other, first)


DAMAGES: dict[str, tuple[Callable[[Path, Path, Path], object], list[bool]]] = {
    "missing": (lambda one, _, __: one.unlink(), [False]),
    "truncated": (lambda one, _, __: unlinked(one, one.read_bytes()[:-10]), [True]),
    "empty": (lambda one, _, __: unlinked(one, b""), [True]),
    "a bit of a row": (lambda one, _, __: flip(one), [True]),
    "a bit of the footer": (lambda one, _, __: flip(one, -30), [True]),
    "swapped with another subtask's": (lambda one, mine, _: swap(one, mine), [True, True]),
    "swapped with another state's": (lambda one, _, other: swap(one, other), [True, True]),
    "another's at its place": (lambda one, mine, _: unlinked(one, mine.read_bytes()), [True]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_lost_and_is_put_back_once_it_is_moved_away(
    name: str, flights: Path, pinned: Storage
) -> None:
    damage, there = DAMAGES[name]
    store, before = open_store(str(flights)), fingerprint(flights)
    one, mine = (flights / path for path in paths_of(store, "delays", "last")[:2])
    damage(one, mine, flights / paths_of(store, "delays", "by_month")[2])
    found = lost(store)
    assert [each.is_there for each in found.segments] == there
    torn = fingerprint(flights)
    for each in found.segments:
        if each.is_there:
            stores.refused(
                DamagedCheckpoint,
                lambda: repairing.put_back(store.storage, lost(store), [pinned]),
                words="Move that object away",
                kind=ErrorKind.DAMAGED_SEGMENT,
            )
            assert fingerprint(flights) == torn
            break
    for each in found.segments:
        (flights / each.path).unlink(missing_ok=True)
    assert repairing.put_back(store.storage, lost(store), [pinned]) == [each.path for each in found.segments]
    assert fingerprint(flights) == before


@pytest.mark.parametrize(
    ("operator", "state", "positions"),
    [
        ("planes", "splits", True),
        ("flights", "unassigned", True),
        ("rates", "limits", True),
        ("delays", "sums", False),
        ("sink", "prepared", False),
    ],
)
def test_states_that_hold_positions_of_a_source_are_told_from_others(
    operator: str, state: str, positions: bool, flights: Path
) -> None:
    store = open_store(str(flights))
    remove(flights, *paths_of(store, operator, state))
    found = lost(store)
    assert found.states == ((operator, state),)
    assert bool(found.positions) is positions


def test_missing_segments_of_any_checkpoint_are_written_again(flights: Path, pinned: Storage) -> None:
    store, before = open_store(str(flights)), fingerprint(flights)
    gone = paths_of(store, "delays", "last")
    remove(flights, *gone)
    assert repairing.listed_in(lost(store).segments, [pinned]) == {pinned.url: sorted(gone)}
    steps: list[tuple[int, int]] = []
    again = repairing.put_back(store.storage, lost(store), [pinned], progress=lambda *step: steps.append(step))
    assert (again, steps[-1][0]) == (sorted(gone), steps[-1][1])
    assert validate(store, level="full").ok
    assert fingerprint(flights) == before
    older = next((flights / "segments" / f"{1:020}").glob("delays-last-0-*"))
    store.pin(1, "older")
    older.unlink()
    places = repairing.savepoints_of(store.storage)
    assert repairing.put_back(store.storage, lost(store, 1), places) == [str(older.relative_to(flights))]


def test_a_copy_that_is_damaged_too_is_not_believed(flights: Path, pinned: Storage) -> None:
    store = open_store(str(flights))
    here, nowhere = sorted(paths_of(store, "delays", "last"))[:2]
    flip(flights / "savepoints/safe" / nowhere)
    remove(flights, here, nowhere)
    error = stores.refused(
        DamagedCheckpoint,
        lambda: repairing.put_back(store.storage, lost(store), [pinned]),
        words="put 1 of 2 lost segments",
        kind=ErrorKind.OBJECT_MISSING,
    )
    assert error.details["path"] == nowhere
    assert [each.path for each in lost(store).segments] == [nowhere]
    assert not list(flights.glob("**/*.tmp"))


def test_what_cannot_be_read_now_is_not_lost(flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(flights))
    path, read_range = paths_of(store, "delays", "last")[0], type(store.storage).read_range

    def silent(self: object, name: str, *more: int) -> pa.Buffer:
        if name == path:
            raise StorageError("no answer", path=name)
        return read_range(self, name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.storage), "read_range", silent)
    diagnosis = store.diagnose(level="full")
    assert diagnosis.undecided
    assert losses_of(store.storage, diagnosis) is None


@pytest.mark.s3
def test_requests_on_s3_to_put_a_segment_back_are_few(moto: S3Server) -> None:
    store, job = open_store(f"s3://{BUCKET}/repairing", **moto.options()), stores.counts_job(keys=50)
    job.publish(store, None, options=OBJECTS)
    store.pin(1, "safe")
    places = repairing.savepoints_of(store.storage)
    store.storage.delete([min(paths_of(store, "counter", "counts"))])
    found = lost(store)
    before = store.stats.copy()
    assert len(repairing.put_back(store.storage, found, places)) == 1
    calls = {name: counts.calls for name, counts in store.stats.since(before).operations.items() if counts.calls}
    assert calls == {"open_input": 1, "open_output": 1}
    assert validate(store, level="full").ok


LEVELS: tuple[Level, Level] = ("quick", "full")
RECORD = "checkpoints/{:020d}.json"
DELTA = {("counter", "counts"): lambda subtask: delta(subtask)}


def delta(subtask: int) -> pa.Table:
    """A few words' new counts."""
    rows = stores.counts_job(keys=50).rows["counter", "counts"](subtask).slice(0, 3)
    return rows.append_column("_op", pa.array([0] * rows.num_rows, pa.int8()))


@pytest.fixture(scope="module")
def _history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validate-all") / "store"
    store, job = open_store(str(folder)), stores.counts_job(keys=50)
    permit = job.publish(store, None, options=OBJECTS)
    for _ in range(3):
        permit = job.publish(store, permit, deltas=DELTA, options=OBJECTS)
    stores.rescale_newest(store, 3)
    wide = stores.counts_job(parallelism=3, keys=50)
    permit = wide.publish(store, store.start("counts"), options=OBJECTS)
    wide.publish(store, permit)
    store.rollback(2)
    return folder


@pytest.fixture
def history(_history: Path, tmp_path: Path) -> Path:
    """1: a base. 2 to 4: deltas on it. 5: 4 at three subtasks. 6: whole. 7: inline. 8: 2 again."""
    return Path(shutil.copytree(_history, tmp_path / "store"))


def segment(folder: Path, checkpoint_id: int, number: int = 0) -> Path:
    return sorted((folder / "segments" / f"{checkpoint_id:020d}").iterdir())[number]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_40(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 4]) + data[41:])


def swap_names(folder: Path, one: Path, other: Path) -> None:
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


DAMAGES_OF_MANY: dict[str, tuple[Callable[[Path], object], set[int], int]] = {
    "none": (lambda _: None, set(), 8),
    "the base is missing": (lambda f: segment(f, 1).unlink(), {1, 2, 3, 4, 5, 8}, 7),
    "a delta is cut short": (lambda f: truncate(segment(f, 3)), {3, 4, 5}, 8),
    "a byte of a delta has flipped": (lambda f: flip_40(segment(f, 2, 1)), {2, 3, 4, 5, 8}, 7),
    "two deltas are swapped": (lambda f: swap_names(f, segment(f, 2), segment(f, 3)), {2, 3, 4, 5, 8}, 7),
    "the base of one subtask lies at the other's place": (
        lambda f: segment(f, 1).write_bytes(segment(f, 1, 1).read_bytes()),
        {1, 2, 3, 4, 5, 8},
        7,
    ),
    "all segments are gone": (lambda f: shutil.rmtree(f / "segments"), {1, 2, 3, 4, 5, 6, 8}, 7),
    "a manifest is gone": (lambda f: next((f / "manifests").glob("*8-*")).unlink(), {8}, 7),
    "the newest record is cut": (lambda f: truncate(f / RECORD.format(8)), {8}, 7),
    "a record in the middle is cut": (lambda f: truncate(f / RECORD.format(6)), {6}, 8),
    "a record in the middle is gone": (lambda f: (f / RECORD.format(6)).unlink(), {6}, 8),
    "two things are damaged": (
        lambda f: (segment(f, 1).unlink(), flip_40(segment(f, 6)), segment(f, 2).unlink()),
        {1, 2, 3, 4, 5, 6, 8},
        7,
    ),
}


@pytest.mark.parametrize("name", DAMAGES_OF_MANY)
def test_each_checkpoint_has_the_problems_that_it_has_alone(name: str, history: Path) -> None:
    damage, broken, whole = DAMAGES_OF_MANY[name]
    damage(history)
    store = open_store(str(history))
    report = validate_all(store, level="full")
    alone = {number: check_checkpoint(store.storage, number, level="full") for number in range(1, 9)}
    results = {result.checkpoint_id: result for result in report.checkpoints}
    assert list(results) == list(range(8, 0, -1))
    assert {number for number, result in results.items() if result.standing != "whole"} == broken
    assert {number for number, problems in alone.items() if problems} == broken
    for number, result in results.items():
        assert result.problems == len(alone[number])
    listed = {(path, number) for path, ids in findings(report) for number in ids}
    assert listed == {(each.path, number) for number, problems in alone.items() for each in problems}
    assert (report.newest_whole, report.ok) == (whole, not broken)
    assert newest_whole(store, level="full").newest_whole == whole


def findings(report: StoreReport) -> list[tuple[str, set[int]]]:
    return [
        (each.problem.path, {number for low, high in each.ids for number in range(low, high + 1)})
        for each in report.findings
    ]


def test_a_segment_that_many_name_is_one_finding_with_their_ids(history: Path) -> None:
    segment(history, 1).unlink()
    (found,) = store_report_document(validate_all(open_store(str(history))))["problems"]
    assert (found["kind"], found["checkpoints"]) == ("object_missing", [[1, 5], [8, 8]])


def reads(store: CheckpointStore, call: Callable[[], object]) -> dict[str, int]:
    """The requests of a call."""
    before: Stats = store.stats.copy()
    call()
    return {name: counts.calls for name, counts in store.stats.since(before).operations.items() if counts.calls}


@pytest.mark.parametrize("level", LEVELS)
def test_what_checkpoints_share_is_read_once(level: Level, history: Path) -> None:
    store = open_store(str(history))
    report: list[StoreReport] = []
    found = reads(store, lambda: report.append(validate_all(store, level=level)))
    files = list(history.glob("segments/*/*"))
    # A read for each segment, each record and each manifest; 7 has two inline segments.
    assert found["read_range"] == len(files) + 8 + 8
    assert report[0].counts.segments == len(files) + 3
    if level == "full":
        size_bytes = sum(path.stat().st_size for path in files)
        assert size_bytes < report[0].counts.bytes < size_bytes + 60_000
        assert report[0].counts.rows == 50 + 3 * 6 + 50 + 50


def test_the_search_ends_at_the_first_that_is_whole(history: Path) -> None:
    next((history / "manifests").glob("*8-*")).unlink()
    store = open_store(str(history))
    found = reads(store, lambda: newest_whole(store))
    # The segments of 7 are inline. The record of 8 is read again: has it expired, or is it damaged?
    assert found["read_range"] == 8 + 2 + 1
    assert [each.checkpoint_id for each in newest_whole(store).checkpoints] == [8, 7]


def test_many_checkpoints_that_share_segments_read_each_once() -> None:
    store, job = CheckpointStore(MemoryStorage("validate-all")), stores.counts_job(keys=50)
    permit = job.publish(store, None, options=OBJECTS)
    for _ in range(39):
        pending = store.begin(job_id=job.job_id, graph=job.graph, states=job.states, parent=permit)
        pending.add_handles(permit.checkpoint().manifest.full())
        permit = pending.publish()
    found = reads(store, lambda: validate_all(store, level="full"))
    assert found == {"list": 3, "read_range": 40 + 40 + 2}
    MemoryStorage.reset("validate-all")


def test_what_cannot_be_read_now_is_not_called_damage(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(history))
    path = str(segment(history, 2).relative_to(history))
    before = type(store.storage).read_range

    def read_range(self: object, name: str, *more: int) -> pa.Buffer:
        if name == path:
            raise StorageError("no answer", kind=ErrorKind.STORAGE_FAILED, path=name)
        return before(self, name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.storage), "read_range", read_range)
    standing = {each.checkpoint_id: each.standing for each in validate_all(store).checkpoints}
    assert standing == dict.fromkeys((8, 5, 4, 3, 2), "undecided") | dict.fromkeys((7, 6, 1), "whole")


def test_a_checkpoint_that_may_be_a_stray_is_not_the_answer(history: Path) -> None:
    truncate(history / RECORD.format(8))
    for number in (1, 2, 3, 4, 5, 6):
        (history / RECORD.format(number)).unlink()
    report = newest_whole(open_store(str(history)))
    assert [(each.checkpoint_id, each.certain) for each in report.checkpoints] == [(8, True), (7, False)]
    assert report.newest_whole is None


def test_no_store_is_a_sentence(tmp_path: Path) -> None:
    for call in (validate_all, newest_whole):
        with pytest.raises(NotFound, match="no store"):
            call(open_store(str(tmp_path / "nothing")))


@pytest.mark.s3
def test_requests_on_s3_are_records_manifests_and_distinct_segments(moto: S3Server) -> None:
    store, job = open_store(f"s3://{BUCKET}/validate-all", **moto.options()), stores.counts_job(keys=50)
    permit = job.publish(store, None, options=OBJECTS)
    for _ in range(3):
        permit = job.publish(store, permit, deltas=DELTA, options=OBJECTS)
    assert reads(store, lambda: validate_all(store)) == {"list": 3, "read_range": 4 + 4 + 8}
    assert reads(store, lambda: newest_whole(store)) == {"list": 3, "read_range": 4 + 1 + 8}
