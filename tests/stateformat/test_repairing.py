"""Segments that a checkpoint has lost: which they are, and putting them back from other stores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from stateformat import repairing
from stateformat.errors import DamagedCheckpoint, ErrorKind, StorageError
from stateformat.repairing import Losses, losses_of
from stateformat.segments import WriteOptions
from stateformat.storage import Storage
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import validate
from tests import stores
from tests.ckpt.ckpt_runs import fingerprint
from tests.servers.server import BUCKET, S3Server

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
