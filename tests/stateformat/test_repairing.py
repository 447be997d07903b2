"""Going on from a checkpoint that has lost segments: what is left is right, what is given up is
counted, and nothing is written over.

What stays is worked out here in plain Python, from the rows that were written and the manifest's
counts, and compared with what the new checkpoint holds.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat import repairing
from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidState, PublishConflict, StorageError
from stateformat.keys import hash_keys, key_groups
from stateformat.model import GIVEN_UP_PROPERTY, CheckpointKind, Mode
from stateformat.reading import Checkpoint
from stateformat.repairing import GoneOn, Losses, Scope, go_on, losses_of
from stateformat.segments import WriteOptions
from stateformat.storage import Storage
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import validate
from tests import stores
from tests.ckpt.ckpt_runs import fingerprint

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
    [*(("rows", *name) for name in DISPENSABLE), *(("keys", "delays", state) for state in KEYED)],
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


def flip(path: Path) -> None:
    unlinked(path)
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 4]) + data[41:])


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
