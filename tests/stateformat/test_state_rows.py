"""Rows of states of every mode and kind: all of them, some columns, some keys, in parts.

Keys that users name: each type in Python, as JSON and as a table, and what is no such key. The
Arrow C stream of our rows: lazy, scanned by any tool, any number of times, from any thread; errors
reach the tool, and a stream that is dropped leaves nothing behind.
"""

from __future__ import annotations

import datetime
import gc
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.model import Mode, State
from stateformat.reading import Checkpoint, StateRows, key_table, keys_from_json
from stateformat.states import declare
from stateformat.store import CheckpointStore
from stateformat.tables import ArrowStream, SizedCall, prefetch
from tests.worlds.data import NAMES, ROW_KEYS, Name, data_store, expected, same_rows
from tests.worlds.stores import flights_store, refused


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


NOON = datetime.datetime.fromisoformat("2026-11-22T12:00:00.000250")
UTC = datetime.UTC
PAIR = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.binary())])


def keyed(**keys: Any) -> State:
    return declare.value_state("op", "counts", keys=keys, values={"v": pa.int64()})


# Type, the value in Python, JSON texts that mean it.
VALUES: list[tuple[Any, Any, tuple[str, ...]]] = [
    (pa.bool_(), True, ("true",)),
    (pa.int8(), -128, ("-128",)),
    (pa.int64(), 2**63 - 1, ("9223372036854775807",)),
    (pa.float64(), 1.5, ("1.5", "15e-1")),
    (pa.float64(), 2, ("2", "2.0")),
    (pa.float64(), math.inf, ('"Infinity"', "Infinity")),
    (pa.float32(), 0.1, ("0.1",)),
    (pa.string(), "ä\n", ('"ä\\n"',)),
    (pa.binary(), b"\x00\xff", ('"00ff"', '"00FF"')),
    (pa.date32(), datetime.date(2026, 11, 22), ('"2026-11-22"',)),
    (pa.timestamp("us"), NOON, ('"2026-11-22T12:00:00.000250"', '"2026-11-22 12:00:00.00025"')),
    (
        pa.timestamp("us", tz="UTC"),
        NOON.replace(tzinfo=UTC),
        ('"2026-11-22T12:00:00.00025Z"', '"2026-11-22T13:00:00.00025+01:00"'),
    ),
    (pa.decimal128(20, 2), Decimal("12.30"), ('"12.30"', "12.30", "12.3", '"12.3"')),
    (pa.decimal128(20, 2), 12, ("12", '"12"')),
    (PAIR, {"a": 1, "b": None}, ('{"a": 1, "b": null}', '{"k": {"a": 1, "b": null}}')),
    (pa.int32(), None, ("null", "[null]")),
]


@pytest.mark.parametrize(("kind", "value", "texts"), VALUES, ids=lambda item: repr(item)[:30])
def test_a_key_is_the_same_in_python_as_a_table_and_as_json(kind: Any, value: Any, texts: tuple[str, ...]) -> None:
    state = keyed(k=kind)
    wanted = pa.table({"k": pa.array([value], kind)})
    found = key_table(state, {"k": value})
    assert [field.type for field in found.schema] == [kind]
    for same in (found, key_table(state, [{"k": value}]), key_table(state, wanted)):
        assert same.to_pylist() == wanted.to_pylist()
    for text in texts:
        assert keys_from_json(state, text).to_pylist() == wanted.to_pylist()
        assert keys_from_json(state, f"[{text}]", many=True).to_pylist() in (wanted.to_pylist(), [{"k": None}])


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        *((pa.string(), text, text) for text in ("u17", "17", "true", " a b", "it's", 'a"b', "NaN", "null and void")),
        (pa.string(), "null", None),
        (pa.string(), '"null"', "null"),
        (pa.binary(), "00ff", b"\x00\xff"),
        (pa.binary(), "12", b"\x12"),
        (pa.date32(), "2026-11-22", datetime.date(2026, 11, 22)),
        (pa.timestamp("us"), "2026-11-22 12:00:00.00025", NOON),
    ],
)
def test_the_text_of_a_key_that_is_text_needs_no_quotes(kind: Any, text: str, value: Any) -> None:
    assert keys_from_json(keyed(k=kind), text).to_pylist() == [{"k": value}]


def test_json_names_several_columns_by_object_or_array_and_several_keys_in_a_list() -> None:
    state = keyed(user=pa.string(), day=pa.date32())
    one = {"user": "u1", "day": datetime.date(2026, 1, 2)}
    for text in ('{"day": "2026-01-02", "user": "u1"}', '["u1", "2026-01-02"]'):
        assert keys_from_json(state, text).to_pylist() == [one]
        assert keys_from_json(state, f'[{text}, ["u2", null]]', many=True).to_pylist() == [
            one,
            {"user": "u2", "day": None},
        ]
    assert keys_from_json(state, {"user": "u1", "day": "2026-01-02"}).to_pylist() == [one]
    assert keys_from_json(state, "[]", many=True).num_rows == 0
    assert key_table(state, []).schema.names == ["user", "day"]


def test_keys_are_normalized_as_stored_ones_are() -> None:
    found = key_table(keyed(k=pa.float64()), [{"k": -0.0}, {"k": -math.nan}])
    assert found["k"].combine_chunks().buffers()[1].to_pybytes() == np.array([0.0, math.nan]).tobytes()


def test_a_table_of_keys_may_have_types_whose_values_are_kept() -> None:
    found = key_table(keyed(k=pa.int32()), pa.table({"k": pa.array([1, 2], pa.int64())}))
    assert found.schema.field("k").type == pa.int32()
    assert found["k"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "keys",
    [
        pl.DataFrame({"k": ["a", None]}),
        pd.DataFrame({"k": ["a", None]}),
        duckdb.sql("from (values ('a'), (null)) t(k)"),
    ],
    ids=["polars", "pandas", "duckdb"],
)
def test_keys_are_tables_of_any_library_that_speaks_arrow(keys: Any) -> None:
    found = key_table(keyed(k=pa.string()), keys)
    assert found.schema == pa.schema([pa.field("k", pa.string())])
    assert found.to_pylist() == [{"k": "a"}, {"k": None}]


LARGE = pa.table({"k": pa.array([2**31], pa.int64())})
# Type, how the key is given, words of the error.
REFUSED: list[tuple[Any, Callable[[State], Any], str]] = [
    (pa.int32(), lambda s: key_table(s, {"k": "7"}), "'k' is int32, and '7' is str; give an integer from -2147483648"),
    (pa.int32(), lambda s: key_table(s, {"k": True}), "'k' is int32, and True is bool"),
    (pa.int32(), lambda s: key_table(s, {"k": 7.0}), "'k' is int32, and 7.0 is float"),
    (pa.int32(), lambda s: key_table(s, {"k": 2**31}), "'k' is int32, and 2147483648 is int; give an integer from"),
    (pa.int32(), lambda s: key_table(s, LARGE), "column 'k' is int64, and not every value of it is a int32"),
    (pa.int32(), lambda s: key_table(s, pa.table({"k": ["7"]})), "column 'k' is string and should be int32"),
    (pa.int32(), lambda s: key_table(s, pa.table({"x": [7]})), "'x' is none of its key columns; it has 'k'"),
    (pa.int32(), lambda s: key_table(s, {"K": 7}), "'K' is none of its key columns"),
    (pa.int32(), lambda s: key_table(s, {"k": 7, "v": 1}), "'v' is none of its key columns"),
    (pa.int32(), lambda s: key_table(s, {}), "the key has no value for key column 'k'"),
    (pa.int32(), lambda s: key_table(s, 7), r"7 is no key; give a value for each of k \(int32\): \{'k': …\}"),  # type: ignore[arg-type]
    (pa.int32(), lambda s: key_table(s, "k"), "'k' is no key"),  # type: ignore[arg-type]
    (pa.int32(), lambda s: key_table(s, pl.Series([7])), "is no key; give a value for each of k"),
    (pa.int32(), lambda s: key_table(s, [7]), "7 is no key"),  # type: ignore[list-item]
    (pa.int32(), lambda s: keys_from_json(s, "1.5"), "'k' is int32, and Decimal..1.5.. is Decimal; give an integer"),
    (
        pa.int32(),
        lambda s: keys_from_json(s, "{k: 1}"),
        'is not JSON .* write text in double quotes: "{k: 1}"$',
    ),
    (pa.int32(), lambda s: keys_from_json(s, "[1, 2]"), "has 2 values; give one for each of k .int32."),
    (pa.int32(), lambda s: keys_from_json(s, '{"k": 1, "k": 2}'), "names a member twice"),
    (pa.int32(), lambda s: keys_from_json(s, '{"u": 1}'), "'u' is none of its key columns"),
    (pa.string(), lambda s: keys_from_json(s, "[17]"), "'k' is string, and 17 is int; give text"),
    (pa.string(), lambda s: keys_from_json(s, '"u17'), "'\"u17' is not JSON"),
    (pa.string(), lambda s: key_table(s, {"k": "\ud800"}), "'k' is string, and a value is not"),
    (pa.bool_(), lambda s: key_table(s, {"k": 1}), "'k' is bool, and 1 is int; give true or false"),
    (pa.float32(), lambda s: key_table(s, {"k": 1e39}), "give a number that a float holds"),
    (pa.float64(), lambda s: key_table(s, {"k": 2**53 + 1}), "give a number that a double holds exactly"),
    (pa.float64(), lambda s: keys_from_json(s, '"1.5"'), "'k' is double, and '1.5' is str; give a number"),
    (pa.binary(), lambda s: key_table(s, {"k": "00"}), "'k' is binary, and '00' is str; give bytes"),
    (pa.binary(), lambda s: keys_from_json(s, '"0g"'), "'0g' is str; give hexadecimal text"),
    (pa.binary(), lambda s: keys_from_json(s, "7"), "'7' is str; give hexadecimal text"),
    (pa.date32(), lambda s: key_table(s, {"k": NOON}), "'k' is date32.day., and datetime.* give a date"),
    (pa.date32(), lambda s: keys_from_json(s, '"2026-13-01"'), 'give a date, like "2026-11-22"'),
    (pa.timestamp("us"), lambda s: key_table(s, {"k": NOON.replace(tzinfo=UTC)}), "give a time without a time zone"),
    (pa.timestamp("us", tz="UTC"), lambda s: keys_from_json(s, '"2026-11-22T12:00:00"'), "a time with a time zone"),
    (pa.timestamp("us"), lambda s: keys_from_json(s, '"2026-11-22T12:00:00.1234567"'), "give a time, like"),
    (pa.decimal128(4, 2), lambda s: key_table(s, {"k": Decimal("1.234")}), "4 digits, 2 of them behind the point"),
    (pa.decimal128(4, 2), lambda s: key_table(s, {"k": 1.5}), "1.5 is float; give a decimal"),
    (pa.decimal128(4, 2), lambda s: keys_from_json(s, '"NaN"'), "4 digits, 2 of them behind the point"),
    (PAIR, lambda s: key_table(s, {"k": {"a": 1}}), "give an object of a, b"),
    (PAIR, lambda s: key_table(s, {"k": {"a": "1", "b": None}}), "give an integer"),
]


@pytest.mark.parametrize(("kind", "call", "words"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_what_is_no_key_is_refused_with_both_sides(kind: Any, call: Callable[[State], Any], words: str) -> None:
    error = refused(InvalidInput, lambda: call(keyed(k=kind)), words)
    assert "state 'counts' of 'op'" in str(error)


def test_a_state_without_keys_has_no_key() -> None:
    state = declare.union_state("op", "offsets", columns={"v": pa.int64()})
    refused(InvalidInput, lambda: keys_from_json(state, "7"), "it is union and has no keys; read its rows without")


# ---- operators by name ---------------------------------------------------------------------------


def test_an_operator_is_found_by_uid_and_by_name() -> None:
    checkpoint = flights_store("memory://rows-names").open()
    assert checkpoint.operator_uid("delays") == checkpoint.operator_uid("Delays per plane") == "delays"
    wanted = checkpoint.state("delays", "sums").table()
    assert checkpoint.state("Delays per plane", "sums").table().equals(wanted)
    assert checkpoint.read("Delays per plane", "sums").state.operator == "delays"
    words = "checkpoint 2 has no operator 'delay', by uid or by name; did you mean 'delays'. It has planes, "
    for read in (checkpoint.state, checkpoint.read):
        refused(InvalidInput, lambda read=read: read("delay", "sums"), words)  # type: ignore[misc]


@pytest.mark.parametrize("asked", [(None, "sums"), (7, "sums"), ("delays", 7)])
def test_a_state_is_asked_for_by_text(asked: tuple[Any, Any]) -> None:
    checkpoint = flights_store(f"memory://rows-asked-{asked[0]}").open()
    words = f"a state is named by {asked[0]!r} and {asked[1]!r}; give the operator and the state as text"
    refused(InvalidInput, lambda: checkpoint.state(*asked), words, ErrorKind.UNKNOWN_STATE)


SENTENCE = "segment segments/7/x.parquet is damaged: ä; `ckpt validate` says more"
SCHEMA = pa.schema({"k": pa.int64(), "s": pa.string()})


def ended(rows: Numbers) -> bool:
    """Whether every scan ends; a thread of Arrow's may let go of one a moment later."""
    for _ in range(1000):
        gc.collect()
        if rows.begun == rows.ended:
            return True
        threading.Event().wait(0.01)
    return False


class Numbers(ArrowStream):
    """Four batches of three rows; fails in place of batch ``fails_at``."""

    def __init__(self, fails_at: int | None = None, error: Callable[[], Exception] | None = None) -> None:
        self.fails_at = fails_at
        # Made anew: an error that has been raised keeps the frames that it went through.
        self.error = error or (lambda: DamagedCheckpoint(SENTENCE))
        self.begun = self.ended = 0

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def batches(self) -> Iterator[pa.RecordBatch]:
        self.begun += 1
        try:
            for number in range(4):
                if number == self.fails_at:
                    raise self.error()
                keys = [3 * number + i for i in range(3)]
                yield pa.record_batch({"k": pa.array(keys, pa.int64()), "s": [f"s{key}" for key in keys]})
        finally:
            self.ended += 1


@pytest.fixture(scope="module", autouse=True)
def what_others_left_is_not_looked_at() -> Iterator[None]:
    """These tests collect garbage again and again; behind thousands of other tests that takes
    seconds each time, unless only what is new is gone through.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def reader(rows: object) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_stream(rows)


def written(rows: object, folder: Path) -> int:
    ds.write_dataset(reader(rows), folder, format="parquet")
    return int(ds.dataset(folder).count_rows())


def query(sql: str, rows: object) -> Any:
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        return connection.execute(sql).fetchall()


TOOLS: dict[str, Callable[[Any, Path], int]] = {
    "duckdb": lambda rows, _: int(query("select sum(k - k + 1) from rows", rows)[0][0]),
    "duckdb count": lambda rows, _: int(query("select count(*) from rows", rows)[0][0]),
    "duckdb self join": lambda rows, _: int(query("select count(*) from rows a join rows b using (k)", rows)[0][0]),
    "polars": lambda rows, _: pl.DataFrame(rows).height,
    "polars from_arrow": lambda rows, _: len(pl.from_arrow(rows)),
    "pyarrow": lambda rows, _: pa.table(rows).num_rows,
    "pandas": lambda rows, _: len(pa.table(rows).to_pandas()),
    "dataset": written,
    "table": lambda rows, _: rows.table().num_rows,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_reads_all_rows_again_and_again(tool: str, tmp_path: Path) -> None:
    rows = Numbers()
    for number in range(2):
        assert TOOLS[tool](rows, tmp_path / str(number)) == 12
    assert ended(rows)
    assert rows.begun >= 2


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_error_is_told_by_every_tool(tool: str, fails_at: int, tmp_path: Path) -> None:
    rows = Numbers(fails_at)
    with pytest.raises(Exception, match="segments/7") as caught:
        TOOLS[tool](rows, tmp_path / "out")
    assert SENTENCE in str(caught.value)
    del caught
    assert ended(rows)


def test_a_batch_of_other_columns_is_refused() -> None:
    class Wrong(Numbers):
        def batches(self) -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"k": pa.array([1], pa.int32()), "s": ["x"]})

    with pytest.raises(pa.ArrowInvalid, match="a batch has the columns k: int32"):
        reader(Wrong()).read_all()


def test_asking_for_a_stream_or_its_columns_begins_nothing() -> None:
    rows = Numbers()
    capsules = [rows.__arrow_c_stream__() for _ in range(3)]
    stream = reader(rows)
    assert stream.schema.equals(SCHEMA)
    assert pa.schema(rows).equals(SCHEMA)
    assert rows.begun == 0
    stream.read_next_batch()
    assert rows.begun == 1
    del capsules, stream
    gc.collect()
    assert rows.ended == 1


def test_a_requested_schema_casts() -> None:
    narrow = pa.schema({"k": pa.int32(), "s": pa.string()})
    assert pa.table(Numbers(), schema=narrow).schema.equals(narrow)
    with pytest.raises(pa.ArrowInvalid, match="Failed to parse string: 's"):
        pa.table(Numbers(), schema=pa.schema({"k": pa.int64(), "s": pa.int64()}))


class Ahead(Numbers):
    """Reads ahead in threads, without end."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        table = Numbers().table()

        def calls() -> Iterator[SizedCall[pa.Table]]:
            while True:
                yield SizedCall(lambda: table, 1000)

        self.begun += 1
        try:
            for made in prefetch(calls(), workers=2, depth=3):  # type: ignore[arg-type]
                yield from made.to_batches()
        finally:
            self.ended += 1


def ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stateformat-ahead")]


@pytest.mark.parametrize("drop", ["release", "limit", "error", "thread"])
def test_a_stream_that_is_dropped_ends_its_threads(drop: str) -> None:
    rows = Ahead()
    if drop == "limit":
        assert len(query("select k from rows limit 5", rows)) == 5
    else:
        stream: Any = [reader(rows)]
        assert stream[0].read_next_batch().num_rows == 3
        assert ahead()
        if drop == "error":
            with pytest.raises(ZeroDivisionError):
                _raise_with(stream)
        elif drop == "thread":
            thread = threading.Thread(target=stream.clear)
            thread.start()
            thread.join()
        else:
            stream.clear()
    gc.collect()
    assert rows.begun == rows.ended == 1
    assert ahead() == []


def _raise_with(stream: list[Any]) -> None:
    held = stream.pop()
    raise ZeroDivisionError(held.schema)


def test_many_threads_scan_one_object_at_once() -> None:
    rows = Numbers()
    wanted = rows.table()
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(pa.table, rows) for _ in range(40)]
        bad = [pool.submit(reader(Numbers(n % 4, partial(InvalidInput, f"stream {n}"))).read_all) for n in range(40)]
        assert all(future.result().equals(wanted) for future in good)
        assert all(f"stream {n}" in str(future.exception()) for n, future in enumerate(bad))


def test_a_process_ends_with_streams_that_nobody_released() -> None:
    program = (
        "import pyarrow as pa\n"
        "from tests.stateformat.test_state_rows import Ahead, Numbers, reader\n"
        "whole, half, failed = Numbers().__arrow_c_stream__(), reader(Ahead()), reader(Numbers(0))\n"
        "half.read_next_batch()\n"
        "try:\n    failed.read_next_batch()\nexcept pa.ArrowException:\n    print('read')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")
