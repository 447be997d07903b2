"""Going on from a checkpoint that has lost segments: what is left is right, what is given up is
counted, and nothing is written over.

What stays is worked out here in plain Python, from the rows that were written and the manifest's
counts, and compared with what the new checkpoint holds.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat import repairing
from stateformat.backends.storage import MemoryStorage
from stateformat.errors import (
    CheckpointError,
    DamagedCheckpoint,
    ErrorKind,
    InvalidState,
    PublishConflict,
    StorageError,
)
from stateformat.keys import hash_keys, key_groups
from stateformat.model import GIVEN_UP_PROPERTY, CheckpointKind, Mode
from stateformat.publication import CommitPermit
from stateformat.reading import Checkpoint
from stateformat.repairing import GoneOn, Losses, Scope, go_on, losses_of
from stateformat.segments import WriteOptions
from stateformat.storage import Storage
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import validate
from tests import stores
from tests.ckpt.ckpt_runs import fingerprint
from tests.servers.server import BUCKET, S3Server

OBJECTS = WriteOptions(inline_bytes_max=0)
KEYED = ("sums", "by_month", "last", "wake")
Name = tuple[str, str]
Rows = Counter[str]


def sums_delta(subtask: int) -> pa.Table:
    names = [stores.tail(i) for i in range(11)]
    columns = {
        "tailnum": names,
        "_op": pa.array([0] * 10 + [1], pa.int8()),
        "n": pa.array([*range(1000, 1010), None], pa.int64()),
        "minutes": pa.array([0.5] * 10 + [None], pa.float64()),
    }
    return stores.owned(pa.table(columns), ["tailnum"], stores.operator("delays"), subtask)


@pytest.fixture(scope="module")
def _flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repairing") / "store"
    store, job, permit = open_store(str(folder)), stores.flights_job(), None
    for deltas in (None, {("delays", "sums"): sums_delta}, {("delays", "sums"): sums_delta}):
        permit = job.publish(store, permit, deltas=deltas, options=OBJECTS, properties={"owner": "ann"})
    return folder


@pytest.fixture
def flights(_flights: Path, tmp_path: Path) -> Path:
    """Three checkpoints with something of everything; ``sums`` has a base and two deltas."""
    return Path(shutil.copytree(_flights, tmp_path / "store"))


def state_rows(checkpoint: Checkpoint) -> dict[Name, Rows]:
    """The rows of every state of a checkpoint, merged, as texts."""
    found = {}
    for state in checkpoint.states:
        # Progress is read together as the least; here each subtask's counts.
        alone = range(stores.PARALLELISM) if state.mode is Mode.PROGRESS else [None]
        rows = [checkpoint.read(state.operator, state.name, one).table().to_pylist() for one in alone]
        found[str(state.operator), state.name] = Counter(repr(row) for each in rows for row in each)
    return found


def handles(checkpoint: Checkpoint, operator: str, state: str) -> list[dict[str, Any]]:
    every = checkpoint.manifest.handles.to_pylist()
    return [each for each in every if (each["operator"], each["state"]) == (operator, state)]


def group_of(text: str) -> int:
    """The key group of a row in a state of ``delays``."""
    name = text.split("'tailnum': '")[1].split("'")[0]
    return int(key_groups(hash_keys([pa.array([name])]), stores.MAX_PARALLELISM)[0])


def groups_with_rows(lost: Sequence[dict[str, Any]]) -> set[int]:
    return {
        each["first_group"] + at for each in lost for at, rows in enumerate(each["rows_per_group"] or ()) if rows > 0
    }


def remove(folder: Path, paths: Sequence[str]) -> None:
    for path in paths:
        (folder / path).unlink()


def lost(store: CheckpointStore, source: int | None = None) -> Losses:
    diagnosis = store.diagnose(source, level="full")
    found = losses_of(store.storage, diagnosis, source)
    assert found is not None
    return found


def give_up(store: CheckpointStore, scope: Scope = "rows", source: int | None = None, **more: Any) -> GoneOn:
    diagnosis = store.diagnose(source, level="full")
    found = losses_of(store.storage, diagnosis, source)
    assert found is not None
    return go_on(store.storage, diagnosis, found, give_up=scope, sleep=lambda _: None, **more)


DISPENSABLE = [*(("delays", state) for state in (*KEYED, "progress", "overtaken"))]
DISPENSABLE += [("alerts", "overtaken"), ("sink", "prepared")]


@pytest.mark.parametrize(
    ("scope", "operator", "state"),
    [
        *(("rows", *name) for name in DISPENSABLE),
        ("keys", "delays", "sums"),
        *(pytest.param("keys", "delays", state, marks=pytest.mark.truth) for state in KEYED[1:]),
    ],
)
def test_what_is_left_is_all_but_the_lost_segment(scope: Scope, operator: str, state: str, flights: Path) -> None:
    store, subtask = open_store(str(flights)), 1
    newest = store.open()
    before, files = state_rows(newest), fingerprint(flights)
    gone = [each for each in handles(newest, operator, state) if each["subtask"] == subtask and each["path"]]
    mine = Counter(map(repr, newest.read(operator, state, subtask).table().to_pylist()))
    # Of the three layers of ``sums`` the one in the middle.
    gone = gone[len(gone) // 2 :][:1]
    remove(flights, [each["path"] for each in gone])
    result = give_up(store, scope)
    assert result.permit is not None
    after = store.open()
    assert validate(store, level="full").ok
    expected = dict(before)
    if state in KEYED:
        groups = groups_with_rows(gone)
        for name in KEYED if scope == "keys" else [state]:
            rows = before["delays", name]
            expected["delays", name] = Counter({text: n for text, n in rows.items() if group_of(text) not in groups})
    else:
        expected[operator, state] = before[operator, state] - mine
    assert state_rows(after) == expected
    assert {path: digest for path, digest in fingerprint(flights).items() if path in files} == {
        path: digest for path, digest in files.items() if path not in {each["path"] for each in gone}
    }
    check_told(result, newest, gone, scope)


def check_told(result: GoneOn, source: Checkpoint, gone: list[dict[str, Any]], scope: str) -> None:
    """What was given up stands in the record, in rows that plain counting finds, too."""
    assert result.permit is not None
    record = result.permit.record
    assert (record.kind, record.parent) == (CheckpointKind.REWRITE, source.record.ref)
    assert record.properties["owner"] == "ann"
    told = json.loads(record.properties[GIVEN_UP_PROPERTY])
    assert (told["checkpoint_id"], told["attempt_id"], told["scope"]) == (*source.record.ref, scope)
    (first,) = (each for each in told["states"] if each["rows"])
    assert first["rows"] == sum(each["rows"] for each in gone)
    assert first["subtasks"] == [[1, 1]]
    assert told["rows"] == source.record.totals.rows - record.totals.rows


def test_a_lost_base_takes_its_key_groups_in_every_layer(flights: Path) -> None:
    store = open_store(str(flights))
    layers = [each for each in handles(store.open(), "delays", "sums") if each["subtask"] == 0]
    base = next(each for each in layers if each["layer"] == 0)
    remove(flights, [base["path"]])
    (loss,) = lost(store).losses("rows")
    groups = groups_with_rows([base])
    assert set(loss.key_groups) == groups
    above = sum(
        rows
        for each in layers
        if each["layer"]
        for at, rows in enumerate(each["rows_per_group"] or ())
        if each["first_group"] + at in groups
    )
    assert (loss.rows, loss.rows_besides, loss.delta_only) == (base["rows"], above, False)


def test_another_subtasks_copy_of_broadcast_state_loses_nothing(flights: Path) -> None:
    store = open_store(str(flights))
    before, mine = state_rows(store.open()), handles(store.open(), "airlines", "names")
    # As a consumer of broadcasts has it: an operator with an input may give it up, and needs not.
    remove(flights, [each["path"] for each in mine[:3]])
    (loss,) = lost(store).losses("rows")
    assert (loss.effect, loss.rows, loss.needed, list(loss.subtasks)) == ("copied", 0, False, [0, 1, 2])
    result = give_up(store)
    assert result.permit is not None
    assert GIVEN_UP_PROPERTY not in result.permit.record.properties
    assert validate(store, level="full").ok
    assert {each["path"] for each in handles(store.open(), "airlines", "names")} == {mine[3]["path"]}
    assert state_rows(store.open()) == before


@pytest.mark.parametrize(
    ("operator", "state"), [("planes", "splits"), ("flights", "unassigned"), ("rates", "limits"), ("airlines", "names")]
)
def test_positions_of_a_source_are_not_given_up(operator: str, state: str, flights: Path) -> None:
    store = open_store(str(flights))
    remove(flights, [each["path"] for each in handles(store.open(), operator, state)])
    assert all(loss.needed for loss in lost(store).losses("rows"))
    before = fingerprint(flights)
    stores.refused(InvalidState, lambda: give_up(store), words="positions of a source")
    assert fingerprint(flights) == before


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path, Path, Path], object], int]] = {
    "missing": (lambda one, _, __: one.unlink(), 1),
    "truncated": (lambda one, _, __: one.write_bytes(one.read_bytes()[:-10]), 1),
    "empty": (lambda one, _, __: one.write_bytes(b""), 1),
    "a bit of a row": (lambda one, _, __: flip(one), 1),
    "a bit of the footer": (lambda one, _, __: flip(one, -30), 1),
    "swapped with another subtask's": (lambda one, mine, _: swap(one, mine), 2),
    "swapped with another state's": (lambda one, _, other: swap(one, other), 2),
    "another's at its place": (lambda one, mine, _: one.write_bytes(mine.read_bytes()), 1),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_given_up_and_nothing_else(name: str, flights: Path) -> None:
    damage, count = DAMAGES[name]
    store = open_store(str(flights))
    before, newest = state_rows(store.open()), store.open()
    one, mine = (flights / handles(newest, "delays", "last")[at]["path"] for at in (0, 1))
    other = flights / handles(newest, "delays", "by_month")[2]["path"]
    by_path = {each["path"]: each for each in newest.manifest.handles.to_pylist()}
    damage(one, mine, other)
    torn = {path: path.read_bytes() for path in (one, mine, other) if path.exists()}
    gone = [by_path[each.path] for each in lost(store).segments]
    assert len(gone) == count
    give_up(store)
    assert validate(store, level="full").ok
    assert {path: path.read_bytes() for path in torn} == torn
    expected = dict(before)
    for state in {each["state"] for each in gone}:
        groups = groups_with_rows([each for each in gone if each["state"] == state])
        rows = before["delays", state]
        expected["delays", state] = Counter({text: n for text, n in rows.items() if group_of(text) not in groups})
    assert state_rows(store.open()) == expected


def test_an_older_checkpoint_is_gone_on_from_as_a_rollback(flights: Path) -> None:
    store = open_store(str(flights))
    remove(flights, [each["path"] for each in handles(store.open(2), "delays", "last")[:1]])
    remove(flights, [next(path for path in files_of(flights, 3) if "planes" in path)])
    result = give_up(store, source=2)
    assert result.permit is not None
    record = result.permit.record
    assert (record.checkpoint_id, record.kind, record.parent and record.parent.checkpoint_id) == (4, "rollback", 3)
    assert json.loads(record.properties[GIVEN_UP_PROPERTY])["checkpoint_id"] == 2
    assert validate(store, level="full").ok


def files_of(folder: Path, checkpoint_id: int) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob(f"segments/{checkpoint_id:020d}/*"))


def test_beneath_an_unreadable_record_it_is_a_repair(flights: Path) -> None:
    store = open_store(str(flights))
    remove(flights, [each["path"] for each in handles(store.open(2), "delays", "last")[:1]])
    (flights / "checkpoints" / f"{3:020d}.json").write_bytes(b"{")
    result = give_up(store, source=2)
    assert result.permit is not None
    record = result.permit.record
    assert (record.checkpoint_id, record.content_of and record.content_of.checkpoint_id) == (4, 2)
    assert {"stateformat.repaired_id", GIVEN_UP_PROPERTY} < set(record.properties)
    assert validate(store, level="full").ok


def test_the_next_checkpoint_and_a_rollback_do_not_take_over_what_was_given_up(flights: Path) -> None:
    store = open_store(str(flights))
    remove(flights, [each["path"] for each in handles(store.open(), "delays", "last")[:1]])
    result = give_up(store)
    stores.flights_job().publish(store, result.permit)
    assert GIVEN_UP_PROPERTY not in store.open().record.properties
    assert GIVEN_UP_PROPERTY not in store.rollback(4).record.properties


# ---- who may still have it -----------------------------------------------------------------------


def put_back(store: CheckpointStore, *places: Storage, **more: Any) -> GoneOn:
    diagnosis = store.diagnose(level="full")
    found = losses_of(store.storage, diagnosis)
    assert found is not None
    return go_on(store.storage, diagnosis, found, places=places, sleep=lambda _: None, **more)


@pytest.fixture
def pinned(flights: Path) -> Storage:
    """The savepoint ``safe`` of checkpoint 3, below the store."""
    store = open_store(str(flights))
    store.pin(3, "safe")
    (place,) = repairing.savepoints_of(store.storage)
    return place


def unlinked(path: Path) -> None:
    """Make a file another one than what may be linked to it."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def flip(path: Path, at: int = 40) -> None:
    unlinked(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    unlinked(path)
    path.write_bytes(path.read_bytes()[:-10])


def test_missing_segments_are_made_again_and_nothing_is_published(flights: Path, pinned: Storage) -> None:
    store, before = open_store(str(flights)), fingerprint(flights)
    gone = [*files_of(flights, 1)[::3], *files_of(flights, 3)[::2]]
    remove(flights, gone)
    assert sorted(repairing.listed_in(lost(store).segments, [pinned])[pinned.url])
    result = put_back(store, pinned)
    assert (result.permit, dict(result.moved), result.given_up) == (None, {}, ())
    assert set(result.again) <= set(gone)
    assert validate(store, level="full").ok
    after = fingerprint(flights)
    assert {path: after[path] for path in result.again} == {path: before[path] for path in result.again}


@pytest.mark.parametrize("damage", [flip, truncate])
def test_damaged_segments_get_a_new_path_and_stay_as_they_are(
    damage: Callable[[Path], None], flights: Path, pinned: Storage
) -> None:
    store = open_store(str(flights))
    before = state_rows(store.open())
    broken, gone = files_of(flights, 3)[0], files_of(flights, 3)[5]
    damage(flights / broken)
    remove(flights, [gone])
    torn = (flights / broken).read_bytes()
    result = put_back(store, pinned)
    assert result.permit is not None
    assert (list(result.moved), result.again, result.given_up) == ([broken], (gone,), ())
    assert result.permit.record.kind is CheckpointKind.REWRITE
    assert GIVEN_UP_PROPERTY not in result.permit.record.properties
    assert validate(store, level="full").ok
    assert state_rows(store.open()) == before
    assert (flights / broken).read_bytes() == torn


def test_a_copy_that_is_damaged_too_is_not_believed(flights: Path, pinned: Storage) -> None:
    store, path = open_store(str(flights)), files_of(flights, 3)[0]
    flip(flights / "savepoints/safe" / path)
    remove(flights, [path])
    before = fingerprint(flights)
    stores.refused(
        DamagedCheckpoint, lambda: put_back(store, pinned), words="found nowhere", kind=ErrorKind.OBJECT_MISSING
    )
    assert fingerprint(flights) == before


def test_what_is_found_is_put_back_and_the_rest_is_given_up(flights: Path, pinned: Storage) -> None:
    store = open_store(str(flights))
    here, nowhere = (handles(store.open(), "delays", "last")[at]["path"] for at in (0, 1))
    remove(flights, [here, nowhere])
    unlinked(flights / "savepoints/safe" / here)
    (flights / "savepoints/safe" / nowhere).unlink()
    result = put_back(store, pinned, give_up="rows")
    assert result.again == (here,)
    assert [list(loss.subtasks) for loss in result.given_up] == [[1]]
    assert validate(store, level="full").ok


# ---- while others work ---------------------------------------------------------------------------


def test_what_cannot_be_read_now_is_not_lost(flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(flights))
    path, read_range = files_of(flights, 3)[0], type(store.storage).read_range

    def silent(self: object, name: str, *more: int) -> pa.Buffer:
        if name == path:
            raise StorageError("no answer", path=name)
        return read_range(self, name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.storage), "read_range", silent)
    diagnosis = store.diagnose(level="full")
    assert diagnosis.undecided
    assert losses_of(store.storage, diagnosis) is None


def test_a_segment_that_is_back_ends_the_repair(flights: Path) -> None:
    store, path = open_store(str(flights)), flights / files_of(flights, 3)[0]
    aside = path.rename(flights / "aside")
    diagnosis = store.diagnose(level="full")
    found = losses_of(store.storage, diagnosis)
    assert found is not None
    aside.rename(path)
    stores.refused(PublishConflict, lambda: go_on(store.storage, diagnosis, found, give_up="rows"), words="whole now")
    assert store.open().id == 3


def test_a_checkpoint_published_meanwhile_ends_the_repair(flights: Path) -> None:
    store, job = open_store(str(flights)), stores.flights_job()
    remove(flights, [handles(store.open(), "delays", "last")[0]["path"]])
    diagnosis = store.diagnose(level="full")
    found = losses_of(store.storage, diagnosis)
    assert found is not None
    job.publish(store, store.start(job.job_id))
    stores.refused(
        PublishConflict, lambda: go_on(store.storage, diagnosis, found, give_up="rows"), words="not the newest"
    )
    assert store.open().id == 4


def test_a_repair_that_was_interrupted_is_run_again(flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(flights))
    store.pin(3, "safe")
    places = repairing.savepoints_of(store.storage)
    broken, gone = files_of(flights, 3)[0], files_of(flights, 3)[5]
    flip(flights / broken)
    remove(flights, [gone])
    create, calls = type(store.storage).create, [0]

    def fail_once(self: object, path: str, data: bytes) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise StorageError("no room", kind=ErrorKind.STORAGE_REFUSED, path=path)
        return create(self, path, data)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.storage), "create", fail_once)
    stores.refused(StorageError, lambda: put_back(store, *places), words="not published")
    result = put_back(store, *places)
    assert (result.again, list(result.moved)) == ((), [broken])
    assert validate(store, level="full").ok
    garbage = store.collect_garbage(delete=True)
    assert len(garbage.segments) == 1
    assert validate(store, level="full").ok


# ---- at every request ----------------------------------------------------------------------------


class Died(Exception):
    """The process that repaired is gone."""


HELD: dict[str, CommitPermit] = {}
"""What a job that runs on a store holds."""


def small_store(name: str) -> CheckpointStore:
    """Two checkpoints of counts in memory, the second's first segment lost."""
    store, job, permit = CheckpointStore(MemoryStorage(name), sleep=lambda _: None), stores.counts_job(keys=50), None
    for _ in range(2):
        permit = HELD[name] = job.publish(store, permit, options=OBJECTS)
    store.storage.delete([min(each["path"] for each in handles(store.open(), "counter", "counts"))])
    return store


def repair_with(
    patch: pytest.MonkeyPatch, store: CheckpointStore, number: int, at: Callable[[], None]
) -> GoneOn | None:
    """Repair, and call ``at`` before the request ``number`` that follows the diagnosis.

    Returns None where it came to no such request.
    """
    diagnosis = store.diagnose(level="full")
    found = losses_of(store.storage, diagnosis)
    assert found is not None
    calls, reached = [0], [False]
    with patch.context() as inner:
        for name in ("create", "list", "read_range", "open_output", "size"):
            before = getattr(MemoryStorage, name)

            def counted(self: object, *given: Any, before: Any = before) -> Any:
                calls[0] += 1
                if calls[0] == number and not reached[0]:
                    reached[0] = True
                    at()
                return before(self, *given)

            inner.setattr(MemoryStorage, name, counted)
        result = go_on(store.storage, diagnosis, found, give_up="keys", sleep=lambda _: None)
    return result if reached[0] else None


def every_request(
    name: str, at: Callable[[CheckpointStore], None], patch: pytest.MonkeyPatch
) -> Iterator[tuple[CheckpointStore, Any]]:
    """The store after a repair with ``at`` before one of its requests in turn, and its end."""
    for number in range(1, 100):
        store = small_store(name)
        try:
            result: Any = repair_with(patch, store, number, lambda store=store: at(store))  # type: ignore[misc]
        except (CheckpointError, Died) as error:
            result = error
        yield store, result
        MemoryStorage.reset(name)
        if result is None:
            assert number > 8
            return


def test_a_repair_that_dies_at_any_request_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: CheckpointStore) -> None:
        raise Died

    for store, result in every_request("repair-dies", die, monkeypatch):
        if isinstance(result, Died) and store.open().id == 2:
            assert give_up(store, "keys").permit is not None
        assert store.open().id == 3
        assert validate(store, level="full").ok
        store.expire(1)
        assert validate(store, level="full").ok


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("running", {"PublishConflict", "GoneOn", "NoneType"}),
        pytest.param("restarted", {"PublishConflict", "NoneType"}, marks=pytest.mark.truth),
    ],
)
def test_a_job_that_publishes_at_any_request_wins_or_loses_wholly(
    name: str, ends: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rivals: list[CommitPermit] = []

    def publish(store: CheckpointStore) -> None:
        rivals.clear()
        job = stores.counts_job(keys=50)
        held = HELD["running"] if name == "running" else store.start(job.job_id)
        with contextlib.suppress(PublishConflict):
            rivals.append(job.publish(store, held, options=OBJECTS))

    outcomes = set()
    for store, result in every_request(name, publish, monkeypatch):
        outcomes.add(type(result).__name__)
        newest = store.open()
        assert validate(store, level="full").ok
        assert len(store.history()) == newest.id
        if isinstance(result, CheckpointError):
            assert isinstance(result, PublishConflict)
            assert newest.record.ref == rivals[0].ref
        else:
            assert not rivals or result is None
        store.expire(1)
        assert validate(store, level="full").ok
    assert outcomes == ends


def test_garbage_that_is_collected_at_any_request_takes_nothing_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(store: CheckpointStore) -> None:
        store.expire(1)

    for store, result in every_request("repair-gc", collect, monkeypatch):
        assert result is None or isinstance(result, GoneOn), result
        assert store.open().id == 3
        assert validate(store, level="full").ok


# ---- on S3 ---------------------------------------------------------------------------------------


@pytest.mark.s3
def test_requests_on_s3_to_put_a_segment_back_are_few(moto: S3Server) -> None:
    store, job = open_store(f"s3://{BUCKET}/repairing", **moto.options()), stores.counts_job(keys=50)
    job.publish(store, None, options=OBJECTS)
    store.pin(1, "safe")
    places = repairing.savepoints_of(store.storage)
    store.storage.delete([min(each["path"] for each in handles(store.open(), "counter", "counts"))])
    diagnosis = store.diagnose(level="full")
    found = losses_of(store.storage, diagnosis)
    assert found is not None
    assert list(repairing.listed_in(found.segments, places)) == [places[0].url]
    before = store.stats.copy()
    result = go_on(store.storage, diagnosis, found, places=places)
    calls = {name: counts.calls for name, counts in store.stats.since(before).operations.items() if counts.calls}
    assert len(result.again) == 1
    # A listing of segments, to look again; of records before and after reading the newest. What the
    # pin has is read to be believed, and to be copied.
    assert calls == {"list": 3, "read_range": 1, "open_input": 2, "open_output": 1}
    assert validate(store, level="full").ok
