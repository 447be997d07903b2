"""Feeds and ranges of every mode of state, of other systems' checkpoints, and refusals.

The change feed: what changed in a state from one checkpoint to another. What the change feed reads
and holds: nothing that metadata shows to be equal, and bounded. When two values are equal: by their
bits, with one NaN, in nested types too.
"""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointError, CheckpointExpired, DamagedCheckpoint, InvalidInput, NotFound
from stateformat.graph import JobGraph, Operator
from stateformat.inspecting import StateChanges, comparing, matching as comparing_rows, metadata_table
from stateformat.inspecting.matching import equal_values, value_buckets, value_codes
from stateformat.keys import hash_keys, key_groups
from stateformat.model import State
from stateformat.publication import CommitPermit
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.servers.server import BUCKET, S3Server
from tests.stateformat.changing_histories import KEYS, OWN, History, joined, random_history
from tests.worlds import data as data_world
from tests.worlds.data import data_store, expected_changes, same_rows
from tests.worlds.segments import CountingStorage
from tests.worlds.stores import counts_store, flights_job, flights_store, owned, refused, rescale_newest

SPARK = Path(__file__).parents[1] / "foreign" / "fixtures" / "spark-4.3.0"
FLINK = Path(__file__).parents[1] / "foreign" / "fixtures" / "flink-2.3.0"
WITHOUT_KEYS = [("orders", "positions"), ("orders", "shards"), ("orders", "unassigned"), ("totals", "rates")]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return data_world.data_store(str(tmp_path_factory.mktemp("shop")))


def texts(rows: pa.Table) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows.to_pylist())


def signed(changes: pa.Table) -> Counter[str]:
    """How often each row came, or went if below 0."""
    found = texts(changes.filter(pa.compute.equal(changes["_change"], "insert")).drop_columns(["_change"]))
    found.subtract(texts(changes.filter(pa.compute.equal(changes["_change"], "delete")).drop_columns(["_change"])))
    return found


@pytest.mark.parametrize("name", data_world.ROW_KEYS)
@pytest.mark.parametrize(("start", "end"), [(1, 2), (2, 3), (3, 5), (5, 6), (1, 6)])
def test_keyed_state_of_the_shop(shop: CheckpointStore, name: tuple[str, str], start: int, end: int) -> None:
    found = shop.changes(*name, start, end).table()
    wanted = data_world.expected_changes(*name, start, end)
    assert same_rows(found, pa.Table.from_pylist(wanted, found.schema))


@pytest.mark.parametrize(("operator", "state"), WITHOUT_KEYS)
@pytest.mark.parametrize(("start", "end"), [(1, 2), (3, 4), (1, 6), (5, 6)])
def test_rows_without_a_key_come_and_go_as_often_as_one_side_has_them_more(
    shop: CheckpointStore, operator: str, state: str, start: int, end: int
) -> None:
    found = shop.changes(operator, state, start, end).table().drop_columns(["_checkpoint_id"])
    wanted = texts(data_world.expected(operator, state, end))
    wanted.subtract(texts(data_world.expected(operator, state, start)))
    assert signed(found) == {row: count for row, count in wanted.items() if count}


def test_what_a_row_twice_becomes_when_it_is_there_three_times(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    state = declare.union_state("op", "list", columns={"n": pa.list_(pa.float64())})
    for rows in ([[1.0], [1.0], [0.0], None], [[1.0], None, [1.0], [-0.0], [1.0]]):
        write(store, {state: pa.table({"n": pa.array(rows, pa.list_(pa.float64()))})})
    assert store.changes("op", "list", 1, 2).table().to_pylist() == [
        {"n": [0.0], "_change": "delete", "_checkpoint_id": 2},
        {"n": [-0.0], "_change": "insert", "_checkpoint_id": 2},
        {"n": [1.0], "_change": "insert", "_checkpoint_id": 2},
    ]


def write(store: CheckpointStore, rows: dict[State, pa.Table]) -> None:
    permit = store.start("job")
    graph = JobGraph((Operator("op", 1, 128),))
    pending = store.begin(job_id="job", graph=graph, states=[*rows], parent=permit)
    with pending.context.subtask("op", 0) as writer:
        for state, table in rows.items():
            writer.write(state.name, table)
    pending.add(writer)
    pending.publish()


@pytest.mark.parametrize(
    ("operator", "state"),
    [("sink", "prepared"), ("delays", "progress"), ("delays", "overtaken"), ("alerts", "overtaken")],
)
def test_state_of_a_runtime(tmp_path: Path, operator: str, state: str) -> None:
    store = flights_store(str(tmp_path))
    job = flights_job()
    fewer = {**job.rows, (operator, state): lambda subtask: job.rows[operator, state](subtask).slice(1)}
    type(job)(job.job_id, job.graph, job.states, fewer).publish(store, store.start(job.job_id))
    for start, end in ((1, 2), (2, 3), (1, 3)):
        rows = {at: store.open(at).state(operator, state).table() for at in (start, end)}
        found = store.changes(operator, state, start, end).table().drop_columns(["_checkpoint_id"])
        found = found.rename_columns([name.replace("_prepared_", "_") for name in found.column_names])
        wanted = texts(rows[end])
        wanted.subtract(texts(rows[start]))
        assert signed(found) == {row: count for row, count in wanted.items() if count}
    over = store.states_over(operator, state)
    assert over.schema.names[0] == "_checkpoint_id"
    assert len(set(over.schema.names)) == len(over.schema.names)
    assert over.table().num_rows == sum(len(store.open(at).state(operator, state).table()) for at in (1, 2, 3))


def test_a_state_that_comes_and_goes(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    first = declare.value_state("op", "first", keys={"k": pa.int64()}, values={"v": pa.string()})
    second = declare.value_state("op", "second", keys={"k": pa.int64()}, values={"v": pa.string()})
    rows = pa.table({"k": [1, 2], "v": ["a", None]})
    for states in ([first], [first, second], [second]):
        write(store, dict.fromkeys(states, rows))

    def came(state: str, start: int, end: int, **more: Any) -> Counter[tuple[str, int]]:
        table = store.changes("op", state, start, end, **more).table()
        return Counter(zip(table["_change"].to_pylist(), table["_checkpoint_id"].to_pylist(), strict=True))

    assert came("first", 1, 3) == {("delete", 3): 2}
    assert came("second", 1, 3) == {("insert", 3): 2}
    assert came("second", 1, 3, every=True) == {("insert", 2): 2}
    assert came("first", 1, 3, every=True) == {("delete", 3): 2}
    assert came("first", 2, 2) == {}
    over = store.states_over("op", "first")
    assert Counter(over.table()["_checkpoint_id"].to_pylist()) == {1: 2, 2: 2}
    assert over.split(5)[0].schema == over.schema


REFUSALS: dict[str, tuple[Callable[[CheckpointStore], object], type[CheckpointError], str]] = {
    "operator": (
        lambda store: store.changes("total", "spent", 1, 2),
        InvalidInput,
        "has no operator 'total', by uid or by name; did you mean 'totals'",
    ),
    "state": (
        lambda store: store.changes("totals", "spend", 1, 2),
        InvalidInput,
        "operator 'totals' has no state 'spend'; did you mean 'spent'",
    ),
    "order": (
        lambda store: store.changes("totals", "spent", 3, 2),
        InvalidInput,
        "from checkpoint 3 to 2, which is older; give the older one first",
    ),
    "text": (
        lambda store: store.changes("totals", "spent", "1", "2"),  # type: ignore[arg-type]
        InvalidInput,
        r"given as \['1', '2'\]; give whole numbers",
    ),
    "one text": (lambda store: store.open("2"), InvalidInput, "give whole numbers"),  # type: ignore[arg-type]
    "one number": (
        lambda store: store.states_over("totals", "spent", 2),  # type: ignore[arg-type]
        InvalidInput,
        "given as 2; give whole numbers",
    ),
    "checkpoint": (lambda store: store.changes("totals", "spent", 1, 9), NotFound, "no checkpoint 9 .*the newest is 6"),
    "first checkpoint": (
        lambda store: store.changes("totals", "spent", 0, 2, every=True),
        NotFound,
        "no checkpoint 0 ",
    ),
    "column": (
        lambda store: store.changes("totals", "spent", 1, 2).select(["usr"]),
        InvalidInput,
        "has no column 'usr'; did you mean 'user'",
    ),
    "no column": (
        lambda store: store.changes("totals", "spent", 1, 2).select([]),
        InvalidInput,
        "no column of state 'spent' of 'totals' is named; name at least one",
    ),
    "column twice": (
        lambda store: store.states_over("totals", "spent").select(["user", "user"]),
        InvalidInput,
        "name one twice",
    ),
    "parts": (lambda store: store.states_over("totals", "spent").split(0), InvalidInput, "into 0 parts"),
    "checkpoint of a range": (lambda store: store.states_over("totals", "spent", [2, 7]), NotFound, "no checkpoint 7"),
    "no checkpoints": (lambda store: store.states_over("totals", "spent", []), InvalidInput, "give at least one"),
}


@pytest.mark.parametrize(("ask", "error", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_answered_is_a_sentence(
    shop: CheckpointStore, ask: Callable[[CheckpointStore], object], error: type[CheckpointError], words: str
) -> None:
    refused(error, lambda: ask(shop), words=words)


def test_states_that_only_share_a_name_are_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    write(
        store,
        {
            declare.value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()}): pa.table(
                {"k": [1], "v": [1]}
            )
        },
    )
    write(store, {declare.even_split_state("op", "other", columns={"v": pa.int64()}): pa.table({"v": [1]})})
    write(
        store,
        {
            declare.value_state("op", "s", keys={"k": pa.string()}, values={"v": pa.int64()}): pa.table(
                {"k": ["1"], "v": [1]}
            )
        },
    )
    words = "has key columns k int64 in checkpoint 1 and k string later"
    refused(InvalidInput, lambda: store.changes("op", "s", 1, 3), words=words)
    refused(InvalidInput, lambda: store.states_over("op", "s"), words=words)
    assert store.states_over("op", "s", [3]).table().to_pylist() == [{"_checkpoint_id": 3, "k": "1", "v": 1}]


def test_rows_that_cannot_be_brought_to_the_later_columns_are_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    first = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()})
    write(store, {first: pa.table({"k": [1], "v": [1]})})
    write(store, {declare.union_state("op", "other", columns={"v": pa.int64()}): pa.table({"v": [1]})})
    late = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.list_(pa.int64())})
    write(store, {late: pa.table({"k": [1], "v": [[1]]})})
    words = "in checkpoint 1 cannot be brought to its later columns: column 'v' was int64 and cannot be list"
    refused(InvalidInput, lambda: store.changes("op", "s", 1, 3), words=words)
    refused(InvalidInput, lambda: store.states_over("op", "s"), words=words)


@pytest.mark.parametrize(("operator", "state"), [*data_world.ROW_KEYS, *WITHOUT_KEYS])
def test_a_range_has_the_rows_of_each_checkpoint_in_the_newest_columns(
    shop: CheckpointStore, operator: str, state: str
) -> None:
    newest = data_world.NEWEST
    over = shop.states_over(operator, state)
    table = over.table()
    assert over.schema.names == ["_checkpoint_id", *data_world.schema(operator, state).names]
    for at in range(1, newest + 1):
        mine = table.filter(pa.compute.equal(table["_checkpoint_id"], at)).drop_columns(["_checkpoint_id"])
        assert same_rows(mine, data_world.expected(operator, state, at, columns_of=newest)), at
    parts = [pickle.loads(pickle.dumps(part)).table() for part in over.split(4)]
    assert len(parts) <= 4
    assert same_rows(pa.concat_tables(parts), table)
    assert table["_checkpoint_id"].to_pylist() == sorted(table["_checkpoint_id"].to_pylist())
    some = shop.states_over("Totals per user" if operator == "totals" else operator, state, [4, 2])
    assert set(some.table()["_checkpoint_id"].to_pylist()) <= {2, 4}
    assert some.select([over.schema.names[1], "_checkpoint_id"]).table().column_names[1] == "_checkpoint_id"


def test_duckdb_scans_a_feed_and_a_range_as_often_as_it_likes(shop: CheckpointStore) -> None:
    feed, over = shop.changes("totals", "spent", 1, 6, every=True), shop.states_over("totals", "spent")
    with duckdb.connect() as connection:
        connection.register("feed", feed)
        connection.register("over", over)
        counted = connection.sql(
            "select a._change, count(*) from feed a join feed b "
            "on (a.user, a._checkpoint_id, a._change) is not distinct from (b.user, b._checkpoint_id, b._change) "
            "group by 1"
        ).to_arrow_table()
        rows = connection.sql("select _checkpoint_id, count(*) n from over group by 1 order by 1").to_arrow_table()
    assert dict(zip(*counted.to_pydict().values(), strict=True)) == Counter(feed.table()["_change"].to_pylist())
    assert rows["n"].to_pylist() == [len(data_world.expected("totals", "spent", at)) for at in range(1, 7)]


@pytest.mark.parametrize("query", ["aggregate", "dedupe-watermark-rocksdb", "join-outer", "group-state"])
def test_batches_of_a_spark_query(query: str) -> None:
    store = open_store(str(SPARK / query / "checkpoint"))
    ids = [record.checkpoint_id for record in store.history()]
    for state in store.open().states:
        if not state.key_columns:
            continue
        name = (state.operator, state.name)
        rows = {at: store.open(at).state(*name).table() for at in ids}
        for start, end in {(ids[1], ids[0]), (ids[-1], ids[0])}:
            feed = store.changes(*name, start, end)
            assert same_rows(feed.table().drop_columns(["_checkpoint_id"]), by_key(state, rows[start], rows[end]))
            parts = [pickle.loads(pickle.dumps(part)).table() for part in feed.split(3)]
            assert repr(pa.concat_tables(parts).to_pylist()) == repr(feed.table().to_pylist())
        every = store.changes(*name, ids[-1], ids[0], every=True).table()
        steps = zip(ids[:0:-1], ids[-2::-1], strict=True)
        assert every.num_rows == sum(len(by_key(state, rows[start], rows[end])) for start, end in steps)
        assert store.states_over(*name).table().num_rows == sum(map(len, rows.values()))


def by_key(state: State, old: pa.Table, new: pa.Table) -> list[dict[str, Any]]:
    before, after = (
        {repr([row[key] for key in state.row_key]): row for row in table.to_pylist()} for table in (old, new)
    )
    found = [{**row, "_change": "delete"} for key, row in before.items() if key not in after]
    found += [{**row, "_change": "insert"} for key, row in after.items() if key not in before]
    for key in before.keys() & after.keys():
        if repr(before[key]) != repr(after[key]):
            found += [{**before[key], "_change": "update_before"}, {**after[key], "_change": "update_after"}]
    return found


def test_a_flink_savepoint_is_a_range_of_one_checkpoint_without_changes() -> None:
    made = next(FLINK.joinpath("core-hashmap-canonical").rglob("_metadata")).parent
    store = open_store(str(made))
    newest = store.open()
    state = next(state for state in newest.states if state.key_columns)
    over = store.states_over(state.operator, state.name)
    assert over.table().drop_columns(["_checkpoint_id"]).num_rows == newest.state(state).table().num_rows
    assert store.changes(state.operator, state.name, newest.id, newest.id).table().num_rows == 0
    refused(NotFound, lambda: store.changes(state.operator, state.name, newest.id, newest.id + 1))


def test_a_checkpoint_on_the_way_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path), checkpoints=4)
    record = next((tmp_path / "checkpoints").glob("*2.json"))
    record.write_bytes(record.read_bytes()[:-30])
    assert store.changes("counter", "counts", 1, 4).table().num_rows == 0
    refused(DamagedCheckpoint, lambda: store.changes("counter", "counts", 1, 4, every=True), words="0002.json")
    store = counts_store(str(tmp_path / "other"), checkpoints=4)
    store.expire(3)
    refused(CheckpointExpired, lambda: store.changes("counter", "counts", 1, 4, every=True), words="the oldest that")
    assert store.changes("counter", "counts", 2, 4, every=True).table().num_rows == 0


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(2, 12))]


@pytest.fixture(scope="module")
def history_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], History]:
    folder = tmp_path_factory.mktemp("histories")
    return cache(lambda seed: random_history(str(folder / str(seed)), seed))


def without_id(changes: pa.Table) -> pa.Table:
    return changes.drop_columns(["_checkpoint_id"])


def counted(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(repr(sorted(row.items())) for row in rows)


def is_paired(changes: pa.Table, row_key: list[str]) -> bool:
    """Whether each update's rows stand next to each other, the earlier first."""
    rows = changes.select([*row_key, "_change"]).to_pylist()
    pairs = [(rows[at - 1], row) for at, row in enumerate(rows) if row["_change"] == "update_after"]
    befores = sum(row["_change"] == "update_before" for row in rows)
    return befores == len(pairs) and all(
        {**before, "_change": "update_after"} == after
        for before, after in pairs
        if before["_change"] != after["_change"]
    )


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_feed_equals_a_full_outer_join(history_of: Callable[[int], History], seed: int, kind: str) -> None:
    history = history_of(seed)
    newest = max(history.truth)
    pairs = [*itertools.combinations(range(1, newest + 1), 2)]
    pairs = [*random.Random(f"{seed}{kind}").sample(pairs, 2), (1, newest)]
    for start, end in pairs:
        found = history.store.changes("op", kind, start, end)
        before = history.rows(kind, start, as_of=end)
        wanted = joined(before, history.rows(kind, end, as_of=end), (*KEYS, *OWN[kind]))
        table = found.table()
        assert same_rows(without_id(table), wanted), (start, end)
        assert set(table["_checkpoint_id"].to_pylist()) <= {end}
        assert is_paired(table, [*KEYS, *OWN[kind]])
        parts = [pickle.loads(pickle.dumps(part)).table() for part in found.split(3)]
        assert len(parts) <= 3
        assert same_rows(pa.concat_tables(parts), table)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_change_on_the_way_makes_the_last_of_the_first(
    history_of: Callable[[int], History], seed: int, kind: str
) -> None:
    history = history_of(seed)
    newest = max(history.truth)
    feed = history.store.changes("Operator", kind, 1, newest, every=True)
    rows = counted(history.rows(kind, 1, as_of=newest).to_pylist())
    seen = [0]
    for change in feed.table().to_pylist():
        seen.append(change.pop("_checkpoint_id"))
        gone = change.pop("_change") in ("delete", "update_before")
        text = repr(sorted(change.items()))
        rows[text] += -1 if gone else 1
        assert rows[text] >= 0
    assert seen == sorted(seen)
    assert +rows == counted(history.rows(kind, newest, as_of=newest).to_pylist())
    parts = pa.concat_tables(part.table() for part in feed.split(4))
    assert repr(parts.to_pylist()) == repr(feed.table().to_pylist())


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
    monkeypatch.setattr(comparing, "CHUNK_BYTES", 1)
    if bound != "layers":
        monkeypatch.setattr(comparing, "HELD_BYTES", 1)
    if bound != "group":
        monkeypatch.setattr(comparing_rows, "_SIDE_BYTES", 100)
        monkeypatch.setattr(comparing, "_ABOVE_BYTES", 100)
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


NAN = float(np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0])
POINT = pa.struct([pa.field("x", pa.float64()), pa.field("names", pa.list_(pa.string()))])
COUNTS = pa.map_(pa.string(), pa.int64())

CASES: list[tuple[pa.DataType, Any, Any, bool]] = [
    (pa.float64(), 0.0, -0.0, False),
    (pa.float64(), math.nan, NAN, True),
    (pa.float32(), math.nan, -math.nan, True),
    (pa.float32(), -0.0, -0.0, True),
    (pa.float64(), None, None, True),
    (pa.float64(), None, 0.0, False),
    (pa.bool_(), True, False, False),
    (pa.int64(), None, 0, False),
    (pa.string(), "", None, False),
    (pa.binary(), b"\x00", b"\x00", True),
    (pa.decimal128(5, 2), Decimal("1.10"), Decimal("1.1"), True),
    (pa.list_(pa.int64()), [], None, False),
    (pa.list_(pa.int64()), [1, None], [1, None], True),
    (pa.list_(pa.int64()), [1, 2], [2, 1], False),
    (pa.list_(pa.float64()), [math.nan, 0.0], [NAN, 0.0], True),
    (pa.list_(pa.float64()), [-0.0], [0.0], False),
    (pa.list_(pa.list_(pa.string())), [["a"], []], [["a"], None], False),
    (pa.list_(pa.list_(pa.string())), [["a"], ["b"]], [["a", "b"]], False),
    (POINT, {"x": None, "names": None}, None, False),
    (POINT, {"x": math.nan, "names": ["a", None]}, {"x": NAN, "names": ["a", None]}, True),
    (COUNTS, [("a", 1), ("b", 2)], [("b", 2), ("a", 1)], False),
    (COUNTS, [("a", 1)], [("a", None)], False),
    (COUNTS, [("a", 1)], [("a", 1)], True),
]


@pytest.mark.parametrize(("kind", "left", "right", "equal"), CASES)
@pytest.mark.parametrize("sliced", [False, True])
def test_values_are_equal_by_their_bits(kind: pa.DataType, left: Any, right: Any, equal: bool, sliced: bool) -> None:
    before, after = pa.array([left, left, None], kind), pa.array([right, left, None], kind)
    wanted = [equal, True, True]
    if sliced:
        # What is hidden before a slice must not be seen.
        before, after, wanted = before.slice(1), after.slice(1), wanted[1:]
    assert equal_values(before, after).tolist() == wanted
    codes = value_codes([pa.chunked_array([before, after])])
    assert (codes[: len(before)] == codes[len(before) :]).tolist() == wanted
    buckets = value_buckets([pa.chunked_array([before, after])], 1 << 20, 0)
    assert all(buckets[row] == buckets[len(before) + row] for row in range(len(before)) if wanted[row])


def test_buckets_tell_lists_of_one_length_apart() -> None:
    nested = [[[number, 1], [1, number]] for number in range(1000)]
    lists = [[number, 1] for number in range(1000)]
    for rows, kind in ((nested, pa.list_(pa.list_(pa.int64()))), (lists, pa.list_(pa.int64()))):
        column = pa.chunked_array([pa.array(rows, kind)])
        counts = np.bincount(value_buckets([column], 16, 1), minlength=16)
        assert counts.min() > 0
