"""Rows of states of every mode and kind: all of them, some columns, some keys, in parts."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.errors import InvalidInput
from stateformat.model import Mode
from stateformat.reading import Checkpoint, StateRows
from stateformat.store import CheckpointStore
from tests.data_world import NAMES, ROW_KEYS, Name, data_store, expected, same_rows
from tests.stores import flights_store, refused


@pytest.fixture(scope="module")
def store() -> CheckpointStore:
    return data_store("memory://state-rows")


@pytest.fixture(scope="module")
def flights() -> Checkpoint:
    return flights_store("memory://state-rows-flights").open()


def everything(store: CheckpointStore, checkpoint_id: int) -> list[tuple[StateRows, pa.Table]]:
    checkpoint = store.open(checkpoint_id)
    return [(checkpoint.state(*name), expected(*name, checkpoint_id)) for name in NAMES]


def projections(names: Sequence[str]) -> list[list[str]]:
    """Every column alone, all but one, all in reverse, and none."""
    alone = [[name] for name in names]
    others = [[other for other in names if other != name] for name in names]
    return [*alone, *others[::2], [*names][::-1], []]


def same_order(found: pa.Table, wanted: pa.Table) -> bool:
    """The same rows in the same order; NaN is itself."""
    return bool(found.schema.equals(wanted.schema)) and repr(found.to_pylist()) == repr(wanted.to_pylist())


def tables(rows: Sequence[StateRows]) -> pa.Table:
    return pa.concat_tables(part.table() for part in rows)


# ---- columns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_id", [4, 6])
def test_any_columns_of_any_state_are_those_of_the_whole(store: CheckpointStore, checkpoint_id: int) -> None:
    for rows, wanted in everything(store, checkpoint_id):
        whole = rows.table()
        assert whole.schema.equals(wanted.schema, check_metadata=True)
        assert same_rows(whole, wanted)
        for names in projections(wanted.column_names):
            found = rows.select(names)
            assert found.schema.names == names
            assert same_order(found.table(), whole.select(names)), (rows, names)
            assert sum(batch.num_rows for batch in found.batches()) == len(wanted)


def test_tables_without_columns_count_rows(store: CheckpointStore) -> None:
    for rows, wanted in everything(store, 6):
        none = rows.select([])
        assert none.table().num_rows == pa.table(none).num_rows == len(wanted)
        with duckdb.connect() as connection:
            connection.register("rows", rows)
            assert connection.execute("select count(*) from rows").fetchall() == [(len(wanted),)]


def test_states_of_every_mode_give_their_columns(flights: Checkpoint) -> None:
    assert {state.mode for state in flights.states} == {*Mode}
    for state in flights.states:
        rows = flights.state(state)
        whole = rows.table()
        for names in projections(whole.column_names):
            assert same_order(rows.select(names).table(), whole.select(names)), (state, names)


def test_every_tool_gives_the_rows(store: CheckpointStore) -> None:
    rows = store.open().state("totals", "spent")
    wanted = expected("totals", "spent")
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        join = "select count(*), count(distinct a.user) from rows a join rows b on a.user is not distinct from b.user"
        assert connection.execute(join).fetchall() == [(len(wanted), len(wanted) - 1)]
        grouped = connection.execute("select city, sum(orders) from rows group by 1 order by 1 nulls last").fetchall()
    sums = wanted.group_by("city").aggregate([("orders", "sum")]).sort_by("city")
    assert grouped == list(zip(sums["city"].to_pylist(), sums["orders_sum"].to_pylist(), strict=True))
    frame = pl.DataFrame(rows.select(["user", "orders"]))
    assert frame.height == len(wanted)
    assert frame["orders"].sum() == pc.sum(wanted["orders"]).as_py()
    assert len(pa.table(rows).to_pandas()) == len(wanted)


def test_an_empty_state_has_its_columns_in_every_tool(store: CheckpointStore) -> None:
    rows = store.open().state("totals", "refunds")
    assert pa.table(rows).schema.names == ["order", "euros"]
    assert pl.DataFrame(rows).schema == {"order": pl.Int64, "euros": pl.Float64}
    assert list(pa.table(rows).to_pandas().columns) == ["order", "euros"]
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        assert connection.execute("select sum(euros), count(*) from rows").fetchall() == [(None, 0)]
    assert len(rows.split(5)) == 1
    assert rows.at_keys({"order": 1}).table().num_rows == 0


def test_many_threads_scan_one_state_at_once(store: CheckpointStore) -> None:
    rows = store.open().state("totals", "spent")
    few = rows.at_keys([{"user": "u0018"}, {"user": None}])
    wanted, chosen = repr(rows.table().to_pylist()), repr(few.table().to_pylist())
    with ThreadPoolExecutor(6) as pool:
        every = [pool.submit(pa.table, rows) for _ in range(6)]
        some = [pool.submit(few.table) for _ in range(12)]
        assert {repr(future.result().to_pylist()) for future in every} == {wanted}
        assert {repr(future.result().to_pylist()) for future in some} == {chosen}


def test_it_says_briefly_what_it_is(store: CheckpointStore) -> None:
    rows = store.open().state("totals", "spent")
    assert repr(rows.select(["user"])).endswith(" of checkpoint 6, 'user')")
    assert repr(rows.at_keys([{"user": "u0018"}, {"user": None}])).endswith(", at 2 keys)")
    assert len(repr(rows)) < 160


# ---- keys ----------------------------------------------------------------------------------------


def with_keys(wanted: pa.Table, keys: Sequence[dict[str, object]]) -> pa.Table:
    """In plain Python; no key here is NaN."""
    names = [*keys[0]]
    rows = [row for row in wanted.to_pylist() if {name: row[name] for name in names} in keys]
    return pa.Table.from_pylist(rows, wanted.schema)


def some_keys(name: Name, wanted: pa.Table) -> list[list[dict[str, object]]]:
    columns = [column for column in ROW_KEYS[name] if not column.startswith("_")]
    keys = wanted.select(columns).group_by(columns, use_threads=False).aggregate([]).to_pylist()
    no_key = dict.fromkeys(columns)
    chosen = [[key] for key in keys[:4]]
    return [*chosen, [no_key], keys[::97] or [no_key], keys[1:60] or [no_key], [keys[0] if keys else no_key, no_key]]


@pytest.mark.parametrize("checkpoint_id", [1, 6])
def test_rows_at_keys_are_those_that_a_full_scan_finds(store: CheckpointStore, checkpoint_id: int) -> None:
    checkpoint = store.open(checkpoint_id)
    for name in ROW_KEYS:
        rows, wanted = checkpoint.state(*name), expected(*name, checkpoint_id)
        for keys in some_keys(name, wanted):
            found = rows.at_keys(keys)
            right = with_keys(wanted, keys)
            assert same_rows(found.table(), right), (name, keys)
            last = wanted.column_names[-1:]
            assert same_order(found.select(last).table(), found.table().select(last))
            assert found.select([]).table().num_rows == len(right)
            assert same_rows(tables(found.split(4)), right)
            assert same_rows(rows.select(last).at_keys(keys).table(), right.select(last))


def test_keys_of_keys_are_those_in_both(store: CheckpointStore) -> None:
    rows = store.open().state("totals", "spent")
    found = rows.at_keys([{"user": "u0018"}, {"user": "u0024"}]).at_keys([{"user": "u0024"}, {"user": "u0030"}])
    assert found.table()["user"].to_pylist() == ["u0024"]
    assert rows.at_keys([]).table().num_rows == 0


# ---- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint_id", "parts"), [(6, 1), (1, 2), (3, 3), (6, 7), (4, 60)])
def test_parts_in_order_are_the_rows_in_order(store: CheckpointStore, checkpoint_id: int, parts: int) -> None:
    for rows, wanted in everything(store, checkpoint_id):
        split = rows.split(parts)
        assert 1 <= len(split) <= parts
        assert same_order(tables(split), rows.table()), (rows, parts)
        groups = [{*part.task.table()["_key_group"].to_pylist()} for part in split if rows.state.mode is Mode.KEYED]
        assert sum(map(len, groups)) == len(set[int]().union(*groups))
        if len(wanted) > 1 and parts == 60:
            alone = rows.state.mode in (Mode.BROADCAST, Mode.PROGRESS)
            assert (len(split) == 1) is alone
        if len(wanted) > 1000 and 1 < parts < 10:
            sizes = [pc.sum(part.task.slices["bytes"]).as_py() for part in split]
            assert len(split) == parts
            assert max(sizes) < 1.5 * sum(sizes) / parts


def test_parts_of_every_mode_are_the_whole(flights: Checkpoint) -> None:
    for state in flights.states:
        rows = flights.state(state)
        for parts in (2, 5):
            split = rows.split(parts)
            assert same_order(tables(split), rows.table()), state
            assert len(split) == 1 or state.mode not in (Mode.BROADCAST, Mode.PROGRESS)


def test_a_part_is_small_when_pickled_and_reads_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = data_store(str(tmp_path_factory.mktemp("parts"))).open().state("totals", "spent")
    split = rows.split(8)
    assert len(split) == 8
    for part in split:
        data = pickle.dumps(part)
        # Handles and slices, and three layers whose segments may be inline.
        assert len(data) < 10_000 + 3 * 16_384
        assert same_order(pickle.loads(data).table(), part.table())
    # What a part does not read, it does not carry.
    assert {part.task.handles.num_rows for part in split} < {*range(rows.task.handles.num_rows)}


def test_a_part_has_a_row_at_least_however_many_are_asked_for(store: CheckpointStore) -> None:
    for rows, wanted in everything(store, 6):
        assert len(rows.split(10**12)) <= max(1, len(wanted))


def test_less_than_one_part_is_refused(store: CheckpointStore) -> None:
    rows = store.open().state("totals", "spent")
    refused(InvalidInput, lambda: rows.split(0), "cannot be split into 0 parts; give at least 1")


def test_unknown_columns_are_refused_with_those_that_there_are(store: CheckpointStore) -> None:
    rows = store.open().state("Totals per user", "spent")
    words = "state 'spent' of 'totals' has no column 'citi'; did you mean 'city'"
    refused(InvalidInput, lambda: rows.select(["citi"]), words)
    refused(InvalidInput, lambda: rows.select("user"), r"columns are the text 'user'; give a list of names: \['user'\]")
    refused(InvalidInput, lambda: rows.select(["_key_group"]), "has no column '_key_group'")
    refused(InvalidInput, lambda: rows.select(["user", "user"]), "name one twice")
    refused(InvalidInput, lambda: store.open(1).state("totals", "spent").select(["city"]), "has no column 'city'")
