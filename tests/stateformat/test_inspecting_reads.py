"""What the change feed reads and holds: nothing that metadata shows to be equal, and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointExpired
from stateformat.graph import JobGraph, Operator
from stateformat.inspecting import StateChanges, metadata_table
from stateformat.inspecting.comparing import plan, rows as comparing_rows, steps
from stateformat.keys import hash_keys, key_groups
from stateformat.model import State
from stateformat.publication import CommitPermit
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.data_world import data_store, expected_changes, same_rows
from tests.segments import CountingStorage
from tests.servers.server import BUCKET, S3Server
from tests.stateformat.changing_histories import KEYS, OWN, History, joined, random_history
from tests.stores import counts_store, owned, refused, rescale_newest

ROWS = 60_000
VALUE = declare.value_state("op", "value", keys={"k": pa.int64()}, values={"n": pa.int64()})
ENTRIES = declare.even_split_state("op", "entries", columns={"n": pa.int64()})
OPTIONS = WriteOptions(row_group_rows=2000, inline_bytes_max=0)


class Watched(CountingStorage):
    """Keeps which segments were read, and how much."""

    def __init__(self) -> None:
        super().__init__("inspecting-reads")
        self.segments: dict[str, int] = {}

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        data = super().read_range(path, offset, length)
        if path.startswith("segments/"):
            self.segments[path] = self.segments.get(path, 0) + data.size
        return data

    def read_by(self, call: Callable[[], object]) -> dict[str, int]:
        self.segments = {}
        call()
        return self.segments


@pytest.fixture
def watched() -> Iterator[Watched]:
    yield Watched()
    MemoryStorage.reset("inspecting-reads")


def publish(store: CheckpointStore, rows: dict[State, pa.Table], *, delta: bool = False) -> CommitPermit:
    newest = store.start("job")
    graph = JobGraph((Operator("op", 2, 128),)) if newest is None else newest.checkpoint().graph
    operator = graph.operator("op")
    pending = store.begin(job_id="job", graph=graph, states=[VALUE, ENTRIES], parent=newest, options=OPTIONS)
    for subtask in range(operator.parallelism):
        with pending.context.subtask("op", subtask) as writer:
            writer.write("value", owned(rows[VALUE], ["k"], operator, subtask), delta=delta)
            entries = rows[ENTRIES]
            writer.write("entries", entries.take(np.arange(subtask, len(entries), operator.parallelism)))
        pending.add(writer)
    return pending.publish()


def values(keys: range | list[int], n: int = 0) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.int64()), "n": pa.array([n] * len(keys), pa.int64())})


def deltas(keys: list[int], n: int) -> pa.Table:
    return values(keys, n).append_column("_op", pa.array([0] * len(keys), pa.int8()))


def size_of(storage: Watched, path: str) -> int:
    return len(storage.bytes_of(path))


def test_what_metadata_shows_to_be_equal_is_not_read(watched: Watched) -> None:
    store, entries = CheckpointStore(watched), pa.table({"n": range(40_000)})
    publish(store, {VALUE: values(range(ROWS)), ENTRIES: entries})
    rescale_newest(store, 3)
    for state in ("value", "entries"):
        read = watched.read_by(lambda state=state: store.changes("op", state, 1, 2).table())
        assert read == {}
    publish(store, {VALUE: deltas([], 0), ENTRIES: entries.slice(0, 5)}, delta=True)
    assert watched.read_by(lambda: store.changes("op", "value", 1, 3).table()) == {}


def test_for_one_changed_key_the_delta_and_the_row_groups_of_its_key_group_are_read(watched: Watched) -> None:
    store, empty = CheckpointStore(watched), pa.table({"n": pa.array([], pa.int64())})
    publish(store, {VALUE: values(range(ROWS)), ENTRIES: empty})
    base = set(store.open().handles["path"].drop_null().to_pylist())
    publish(store, {VALUE: deltas([17], 1), ENTRIES: empty}, delta=True)
    found: list[pa.Table] = []
    read = watched.read_by(lambda: found.append(store.changes("op", "value", 1, 2).table()))
    assert found[0].to_pylist() == [
        {"k": 17, "n": 0, "_change": "update_before", "_checkpoint_id": 2},
        {"k": 17, "n": 1, "_change": "update_after", "_checkpoint_id": 2},
    ]
    handles = store.open().handles
    footers = dict(zip(handles["path"].to_pylist(), handles["footer_bytes"].to_pylist(), strict=True))
    below = {path: size_bytes - footers[path] for path, size_bytes in read.items() if path in base}
    assert len(below) == 1
    group = key_groups(hash_keys([pa.chunked_array([[17]], pa.int64())]), 128)[0]
    rows = np.bincount(key_groups(hash_keys([values(range(ROWS))["k"]]), 128))[group]
    path, read_bytes = below.popitem()
    # A row group has up to 2000 rows, whole key groups; that of the key is one of about 15.
    assert rows <= 2000
    assert read_bytes < size_of(watched, path) / 8


def test_a_key_that_is_deleted_and_one_that_is_new(watched: Watched) -> None:
    store, empty = CheckpointStore(watched), pa.table({"n": pa.array([], pa.int64())})
    publish(store, {VALUE: values(range(100)), ENTRIES: empty})
    rows = {"k": [5, 6, 100, 101], "n": [None, 0, 1, None], "_op": pa.array([1, 0, 0, 1], pa.int8())}
    publish(store, {VALUE: pa.table(rows), ENTRIES: empty}, delta=True)
    changes = store.changes("op", "value", 1, 2).select(["_change", "k"]).table()
    assert changes.column_names == ["_change", "k"]
    assert sorted(changes.to_pylist(), key=lambda row: row["k"]) == [
        {"_change": "delete", "k": 5},
        {"_change": "insert", "k": 100},
    ]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return random_history(str(tmp_path_factory.mktemp("history")), 5, steps=6)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("bound", ["group", "layers", "everything"])
def test_what_does_not_fit_in_memory_is_set_aside(
    history: History, monkeypatch: pytest.MonkeyPatch, kind: str, bound: str
) -> None:
    newest = max(history.truth)
    monkeypatch.setattr(steps, "CHUNK_BYTES", 1)
    if bound != "layers":
        monkeypatch.setattr(plan, "HELD_BYTES", 1)
    if bound != "group":
        monkeypatch.setattr(comparing_rows, "_SIDE_BYTES", 100)
        monkeypatch.setattr(plan, "_ABOVE_BYTES", 100)
    for start, end in ((1, newest), (newest - 1, newest)):
        found = history.store.changes("op", kind, start, end).table().drop_columns(["_checkpoint_id"])
        before, after = (history.rows(kind, at, as_of=end) for at in (start, end))
        assert same_rows(found, joined(before, after, (*KEYS, *OWN[kind])))


def test_keys_that_share_a_bucket_are_told_apart(watched: Watched) -> None:
    store, empty = CheckpointStore(watched), pa.table({"n": pa.array([], pa.int64())})
    publish(store, {VALUE: values(range(5000)), ENTRIES: empty})
    publish(store, {VALUE: pa.concat_tables([values(range(2500, 6000)), values([7], 1)]), ENTRIES: empty})
    changes = store.changes("op", "value", 1, 2).table()
    count = {one["values"]: one["counts"] for one in changes["_change"].value_counts().to_pylist()}
    assert count == {"delete": 2499, "insert": 1000, "update_before": 1, "update_after": 1}


def test_a_checkpoint_that_expires_meanwhile_is_a_sentence(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path), checkpoints=3)
    changes, over = store.changes("counter", "counts", 1, 2), store.states_over("counter", "counts")
    store.expire(1)
    for rows in (changes, over):
        refused(CheckpointExpired, rows.table, words="checkpoint [12] .* has expired")


@pytest.mark.s3
def test_requests_on_s3_are_records_manifests_and_segments(moto: S3Server) -> None:
    data_store(f"s3://{BUCKET}/inspecting", **moto.options())
    store = open_store(f"s3://{BUCKET}/inspecting", **moto.options())

    def requests(call: Callable[[], object]) -> dict[str, int]:
        before = store.stats.copy()
        call()
        return {name: counts.calls for name, counts in store.stats.since(before).operations.items() if counts.calls}

    feeds: list[StateChanges] = []
    opened = requests(lambda: feeds.append(store.changes("totals", "spent", 5, 6)))
    assert opened.pop("read_range") == 2
    assert opened == {"list": 2}
    spent = [one for one in metadata_table(store, "handles", 6).to_pylist() if one["state"] == "spent"]
    files = {found.path for found in store.storage.list("segments/")}
    handles = sum(one["path"] in files for one in spent)
    # The upper layers are inline. Below them only what has key groups of theirs is read, and once.
    first = requests(feeds[0].table)
    assert first["read_range"] - 2 <= handles - 2
    assert requests(feeds[0].table) == {"read_range": first["read_range"] - 2}
    over = store.states_over("totals", "by_day")
    assert requests(over.table) == {"read_range": 6}
    assert same_rows(feeds[0].table(), expected_changes("totals", "spent", 5, 6))
