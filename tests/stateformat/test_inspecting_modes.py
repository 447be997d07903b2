"""Feeds and ranges of every mode of state, of other systems' checkpoints, and refusals."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from stateformat.errors import CheckpointError, CheckpointExpired, DamagedCheckpoint, InvalidInput, NotFound
from stateformat.graph import JobGraph, Operator
from stateformat.model import State
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests import data_world
from tests.data_world import same_rows
from tests.stores import counts_store, flights_job, flights_store, refused

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
