"""What queries answer: every state of every checkpoint, merged and evolved, by name."""

from __future__ import annotations

import decimal
from collections import Counter
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pytest

from stateformat.backends.querying import query
from stateformat.backends.querying.connection import folded, told_apart
from stateformat.errors import CheckpointExpired, DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.graph import JobGraph
from stateformat.inspecting import METADATA_TABLES, metadata_table
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore
from tests.worlds import stores
from tests.worlds.data import NAMES, NEWEST, PARALLELISMS, data_store, expected, same_rows
from tests.worlds.stores import Job, operator


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return data_store(str(tmp_path_factory.mktemp("answers") / "store"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each state is opened, and which columns are decoded."""
    from stateformat.reading import Checkpoint, StateRows

    seen: Counter[str] = Counter()
    state, select = Checkpoint.state, StateRows.select

    def opened(self: Checkpoint, *name: Any) -> StateRows:
        seen[f"open {name[0].name if len(name) == 1 else name[1]} of {self.id}"] += 1
        return state(self, *name)

    def selected(self: StateRows, columns: Any) -> StateRows:
        seen[",".join(columns)] += 1
        return select(self, columns)

    monkeypatch.setattr(Checkpoint, "state", opened)
    monkeypatch.setattr(StateRows, "select", selected)
    return seen


@pytest.mark.parametrize("name", NAMES, ids="/".join)
def test_every_state_of_every_checkpoint_is_a_table_in_its_types(store: CheckpointStore, name: tuple[str, str]) -> None:
    for checkpoint_id in PARALLELISMS:
        found = query(store, f"from {'.'.join(name)}", checkpoint_id=checkpoint_id)
        wanted = expected(*name, checkpoint_id)
        assert found.schema == wanted.schema
        assert same_rows(found.table(), wanted)
        assert found.notes == ()


@pytest.mark.parametrize("name", NAMES, ids="/".join)
def test_a_state_over_all_checkpoints_has_their_ids_and_the_newest_columns(
    store: CheckpointStore, name: tuple[str, str]
) -> None:
    found = query(store, f"from {'.'.join(name)}", all_checkpoints=True).table()

    parts = [expected(*name, one, columns_of=NEWEST) for one in PARALLELISMS]
    numbers = pa.array([one for one, part in zip(PARALLELISMS, parts, strict=True) for _ in range(len(part))])
    wanted = pa.concat_tables(parts).add_column(0, "_checkpoint_id", numbers)
    assert same_rows(found, wanted)
    assert found.column_names == wanted.column_names


def test_answers_can_be_scanned_again_by_any_arrow_tool(store: CheckpointStore) -> None:
    found = query(store, "select city, count(*) as users from totals.spent group by city order by city")

    counts = Counter(row["city"] for row in expected("totals", "spent").to_pylist())
    wanted = sorted(counts.items(), key=lambda one: (one[0] is None, one[0]))
    for _ in range(2):
        assert polars.DataFrame(found).rows() == wanted
    assert [(row["city"], row["users"]) for row in found.table().to_pylist()] == wanted


def test_states_are_joined_with_each_other_and_with_themselves(store: CheckpointStore) -> None:
    found = query(
        store,
        "select count(*) from totals.spent a join totals.spent b using (user) left join totals.by_day c using (user)",
    ).table()

    users = Counter(row["user"] for row in expected("totals", "spent").to_pylist())
    days = Counter(row["user"] for row in expected("totals", "by_day").to_pylist())
    wanted = sum(n * n * max(1, days[user]) for user, n in users.items() if user is not None)
    assert found.column(0).to_pylist() == [wanted]


@pytest.mark.parametrize("name", METADATA_TABLES)
def test_metadata_is_a_table_of_the_whole_history(store: CheckpointStore, name: str) -> None:
    for more in ({}, {"checkpoint_id": 3}, {"all_checkpoints": True}):
        found = query(store, f"from {name}", **more).table()
        assert repr(found.to_pylist()) == repr(metadata_table(store, name).to_pylist())
        assert found.column_names == METADATA_TABLES[name].names


# ---- names


def test_an_operator_is_found_by_its_name_where_only_one_has_it(store: CheckpointStore) -> None:
    [by_name, by_uid, folded_name] = [
        query(store, f"select sum(orders) from {operator}.spent").table()
        for operator in ('"Totals per user"', "totals", '"TOTALS PER USER"')
    ]
    assert by_name.equals(by_uid)
    assert by_uid.equals(folded_name)


def test_a_state_is_found_without_its_operator_where_only_one_has_it(store: CheckpointStore) -> None:
    for text in ("select sum(orders) from {}", "select sum({0}.orders) from {0}", "select sum(s.orders) from {} as s"):
        alone, named = (query(store, text.format(name)).table() for name in ("SPENT", "totals.spent"))
        assert alone.column(0).to_pylist() == named.column(0).to_pylist()


NAMED = {
    "from totals.spend": "did you mean 'totals.spent'?",
    "from default.spent": "has no table 'default.spent'; did you mean 'totals.spent'?",
    "from total.spent": "has no table 'total.spent'; did you mean 'totals.spent'?",
    "from other.totals.spent": "has no table 'other.totals.spent'; did you mean 'totals.spent'?",
    "from orders.spent": "did you mean 'totals.spent'?",
    "from nothing": "it has 'checkpoints', 'operators', 'states', 'handles', 'orders.positions'",
    "from state": "did you mean 'states'?",
    "from 'spent.parquet'": "has no table 'spent.parquet'; files cannot be read here",
    "select\n  euro\nfrom totals.spent": '"euro" not found in FROM clause; candidate bindings: "euros", "user", "seen", "tier" (line 2, column 3)',
    "select 1,\n\n   + from totals.spent": 'syntax error at or near "from" (line 3, column 6)',
    "select usr from totals.spent, totals.baskets": "(line 1, column 8)",
    "select user from totals.spent, totals.baskets": "mbiguous",
    "select " + "'" + "x" * 400 + "', foo from totals.spent": "(line 1, column 412)",
    "select no_such(1)": "no_such does not exist",
    "select sum(user) from totals.spent": "sum(",
    "select * from totals.spent where user = 1 group by 2": "GROUP BY",
    "select 'ü', foo from totals.spent": "(line 1, column",
}


@pytest.mark.parametrize("text", NAMED)
def test_what_there_is_not_is_named_with_what_there_is(store: CheckpointStore, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        query(store, text)
    assert NAMED[text] in str(caught.value)


def test_names_are_told_apart_by_suffixes_that_nothing_else_has() -> None:
    assert told_apart(["a", "A", "b"]) == ["a", "A_2", "b"]
    assert told_apart(["a", "A", "A_2", "á", "Á"]) == ["a", "A_3", "A_2", "á", "Á"]
    assert told_apart(["main", "x"], ["main"]) == ["main_2", "x"]
    assert told_apart(["a", "a", "A"], fold=str) == ["a", "a_2", "A"]
    assert folded("ÄbC") == "Äbc"


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """Operators, states and columns whose names differ only in case, and names of DuckDB's own."""
    uids = ("Counts", "counts", "main", "temp", "checkpoints", 'a "b".c', "select")
    declared, rows = [], {}
    for number, uid in enumerate(uids):
        for place, name in enumerate(("Total", "total", "order") if uid == "counts" else ("total",)):
            state = declare.even_split_state(uid, name, columns={"n": pa.int64(), "N": pa.string(), "N_2": pa.int32()})
            declared.append(state)
            table = pa.table({"n": pa.array([10 * number + place]), "N": ["x"], "N_2": pa.array([7], pa.int32())})
            rows[uid, name] = lambda _, table=table: table
    job = Job("twins", JobGraph(tuple(operator(uid, 1, name="same") for uid in uids)), tuple(declared), rows)
    store = CheckpointStore(stores.open_store(str(tmp_path_factory.mktemp("twins") / "store")).storage)
    job.publish(store, None)
    return store


def test_names_that_differ_only_in_case_are_told_apart_and_said(twins: CheckpointStore) -> None:
    tables = {
        "Counts.total": 0,
        "COUNTS_2.total": 10 + 1,
        "counts_2.TOTAL_2": None,
        'counts_2."order"': 10 + 2,
        "main_2.total": 20,
        "temp_2.total": 30,
        "checkpoints.total": 40,
        '"a ""b"".c".total': 50,
        '"select".total': 60,
    }
    tables["counts_2.TOTAL_2"] = 11
    tables["COUNTS_2.total"] = 10
    for name, number in tables.items():
        found = query(twins, f"select n, N_3, N_2 from {name}")
        assert [tuple(row.values()) for row in found.table().to_pylist()] == [(number, "x", 7)], name
        assert any("column 'N' of" in note and "is N_3 here" in note for note in found.notes)
    notes = query(twins, "select 1").notes
    assert [note.split(" here:")[0] for note in notes] == [
        "operator 'counts' is counts_2",
        "state 'total' of 'counts' is total_2",
        "operator 'main' is main_2",
        "operator 'temp' is temp_2",
    ]
    assert query(twins, "from checkpoints").table()["checkpoint_id"].to_pylist() == [1]
    with pytest.raises(InvalidInput, match=r"no table 'same\.total'"):
        query(twins, "from same.total")


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """Names that SQL takes only in quotes, as a query of Spark and a job of Flink have them."""
    places = {("operator-0", "default"): 1, ("by-string", "count-it"): 2, ("by-long", "count-it"): 3, ("all", "end"): 4}
    declared = [declare.even_split_state(*place, columns={"window": pa.int64()}) for place in places]
    rows = {place: lambda _, n=n: pa.table({"window": [n]}) for place, n in places.items()}
    names = {"operator-0": "stateStoreSave", "by-string": "by string"}
    graph = JobGraph(tuple(operator(uid, 1, name=names.get(uid, "")) for uid, _ in places))
    store = CheckpointStore(stores.open_store(str(tmp_path_factory.mktemp("awkward") / "store")).storage)
    Job("awkward", graph, tuple(declared), rows).publish(store, None)
    return store


AS_SHOWN = {
    "select window from default": [1],
    "SELECT window FROM OPERATOR-0.Default": [1],
    "select window from stateStoreSave.default": [1],
    "select d.window from operator-0.default as d where d.window in (1)": [1],
    "select window + 1 from by-string.count-it where 'from default' <> '-- from end'": [3],
    "select a.window + b.window from by string.count-it a, by-long.count-it b": [5],
    "select window /* from default */ from all.end -- join default": [4],
    'select "window" from "operator-0"."default"': [1],
    "select sum(window) over w from end window w as (partition by 1)": None,
    "select windw from default": None,
    "select window from count-it": None,
}


@pytest.mark.parametrize("text", AS_SHOWN)
def test_names_are_taken_as_they_are_shown_where_sql_wants_quotes(awkward: CheckpointStore, text: str) -> None:
    wanted = AS_SHOWN[text]
    if wanted is not None:
        assert query(awkward, text).table().column(0).to_pylist() == wanted
        return
    with pytest.raises(InvalidInput) as caught:
        query(awkward, text)
    assert "the query cannot be run" in str(caught.value) or "did you mean" in str(caught.value)


@pytest.mark.parametrize("also", ["", ", (select count(*) >= 0 from information_schema.tables) seen"])
def test_two_tables_of_one_dotted_name_are_two_tables(tmp_path: Path, also: str) -> None:
    places = {("a", "b.c"): 111, ("a.b", "c"): 222, ("a.b", "c.d"): 333, ("a.b.c", "d"): 444}
    declared = [declare.even_split_state(*place, columns={"n": pa.int64()}) for place in places]
    rows = {place: lambda _, n=n: pa.table({"n": [n]}) for place, n in places.items()}
    graph = JobGraph(tuple(operator(uid, 1) for uid in dict.fromkeys(uid for uid, _ in places)))
    store = CheckpointStore(stores.open_store(str(tmp_path / "store")).storage)
    Job("dots", graph, tuple(declared), rows).publish(store, None)
    names = ['a."b.c"', '"a.b".c', '"a.b"."c.d"', '"a.b.c".d']
    for turn in range(len(names)):
        asked = names[turn:] + names[:turn]
        found = query(
            store, "select " + ", ".join(f"(select n from {one}) as n{i}" for i, one in enumerate(asked)) + also
        )
        values = list(found.table().to_pylist()[0].values())[: len(names)]
        assert dict(zip(asked, values, strict=True)) == dict(zip(names, places.values(), strict=True))
    with pytest.raises(InvalidInput, match=r'no table .a\."b\.d"'):
        query(store, 'from a."b.d"')


def test_show_tables_lists_names_as_a_query_writes_them(twins: CheckpointStore) -> None:
    listed = query(twins, "show tables").table().to_pylist()
    assert [row["name"] for row in listed] == [
        *METADATA_TABLES,
        "Counts.total",
        "counts_2.Total",
        "counts_2.total_2",
        'counts_2."order"',
        "main_2.total",
        "temp_2.total",
        "checkpoints.total",
        '"a ""b"".c".total',
        '"select".total',
    ]
    assert listed[4] == {"name": "Counts.total", "mode": "even_split", "columns": ["n", "N_3", "N_2"]}
    for row in listed:
        assert query(twins, f"describe {row['name']}").table()["column_name"].to_pylist() == row["columns"]


# ---- what is read


def test_only_states_that_are_named_are_opened_and_only_by_scanning(
    store: CheckpointStore, reads: Counter[str]
) -> None:
    found = query(store, "with totals as (select 1) select count(*) from totals.refunds")
    query(store, "describe totals.spent").table()
    query(store, "explain from totals.spent").table()
    query(store, "show tables").table()
    query(store, "from information_schema.tables").table()
    query(store, "select count(*) from checkpoints").table()
    assert not reads

    found.table()
    assert {one for one in reads if one.startswith("open")} == {"open refunds of 6"}


NARROW = {
    "select sum(orders) from totals.spent": "orders",
    "select count(*) from totals.spent": "user",
    "select max(city) from totals.spent where orders > 3": "orders,city",
    "select euros from totals.spent where user = 'u2000'": "user,euros",
    "select amount from totals.by_day where user in ('u2000', 'u2001')": "user,amount",
}


@pytest.mark.parametrize("text", NARROW)
def test_only_the_columns_that_a_query_uses_are_read(store: CheckpointStore, reads: Counter[str], text: str) -> None:
    query(store, text).table()
    assert [one for one in reads if not one.startswith("open")] == [NARROW[text]]


KEYS = {
    "user = 'u2000'": ("spent", [("u2000",)]),
    "user in ('u2000', 'u2001', 'nobody')": ("spent", [("u2000",), ("u2001",), ("nobody",)]),
    "user = 'u2000' and user in ('u2000', 'u2001')": ("spent", [("u2000",)]),
    "user = 'u2000' and orders >= 0": ("spent", [("u2000",)]),
    "user = 'u2000' or orders = 1": ("spent", None),
    "user is null": ("spent", None),
    "user > 'u5000'": ("spent", None),
    "lower(user) = 'u2000'": ("spent", None),
    "user = 'u0003' and day in ('2026-03-02', '2026-03-03')": ("by_day", 2),
    "user = 'u0003'": ("by_day", None),
    "day = date '2026-03-02'": ("by_day", None),
    '"order" = 3': ("refunds", [(3,)]),
    '"order" in (1, 2)': ("refunds", [(1,), (2,)]),
    "\"order\"::varchar = '3'": ("refunds", None),
    "user = 'u0009' and _map_key = 'bread'": ("baskets", [("u0009",)]),
}


@pytest.mark.parametrize("condition", KEYS)
def test_a_condition_on_all_key_columns_looks_for_these_keys(
    store: CheckpointStore, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle filters what plain Python says, by a DuckDB of its own."""
    import duckdb

    from stateformat.reading import StateRows

    asked: list[Any] = []
    at_keys = StateRows.at_keys

    def looked(self: StateRows, keys: Any) -> StateRows:
        asked.append(keys)
        return at_keys(self, keys)

    monkeypatch.setattr(StateRows, "at_keys", looked)
    name, keys = KEYS[condition]
    for columns in ("*", "count(*) as n"):
        found = query(store, f"select {columns} from totals.{name} where {condition}").table()
        rows = expected("totals", name)  # noqa: F841 - DuckDB finds it by its name
        assert same_rows(found, duckdb.sql(f"select {columns} from rows where {condition}").to_arrow_table())
    if keys is None:
        assert not asked
    else:
        looked_for = [tuple(row.values()) for row in asked[0].to_pylist()]
        assert (len(looked_for) if isinstance(keys, int) else sorted(looked_for)) == (
            keys if isinstance(keys, int) else sorted(keys)
        )


TWICE = {
    "a.user = 'u2000' and b.user = 'u2001'": ["u2000", "u2001"],
    "a.user = 'u2000' and b.user = a.user": ["u2000"],
    "a.user = 'u2000' and b.orders > 1": None,
    "a.user = 'u2000'": None,
}


@pytest.mark.parametrize("condition", TWICE)
def test_keys_are_looked_for_where_every_scan_of_a_state_names_some(
    store: CheckpointStore, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import duckdb

    from stateformat.reading import StateRows

    asked: list[list[str]] = []
    at_keys = StateRows.at_keys
    monkeypatch.setattr(
        StateRows, "at_keys", lambda self, keys: asked.append(sorted(keys["user"].to_pylist())) or at_keys(self, keys)
    )
    text = f"select count(*), sum(a.orders), sum(b.orders) from {{0}} a, {{0}} b where {condition}"
    rows = expected("totals", "spent")  # noqa: F841 - DuckDB finds it by its name
    found = query(store, text.format("totals.spent")).table()
    assert found.to_pylist() == duckdb.sql(text.format("rows")).to_arrow_table().to_pylist()
    assert {*map(tuple, asked)} == ({tuple(keys)} if (keys := TWICE[condition]) else set())


def test_a_condition_that_nothing_can_meet_opens_nothing(store: CheckpointStore, reads: Counter[str]) -> None:
    found = query(store, "from totals.spent where user = 'u2000' and user = 'u2001'").table()
    assert len(found) == 0
    assert not reads


def test_of_all_checkpoints_those_are_read_that_a_query_asks_for(store: CheckpointStore, reads: Counter[str]) -> None:
    text = "select _checkpoint_id, count(*) as n from totals.spent where _checkpoint_id in (2, 5, 99) group by 1 order by 1"
    found = query(store, text, all_checkpoints=True).table().to_pylist()
    assert found == [{"_checkpoint_id": one, "n": len(expected("totals", "spent", one))} for one in (2, 5)]
    assert {one for one in reads if one.startswith("open")} == {"open spent of 2", "open spent of 5"}


# ---- types


TYPES = {
    "select interval 90 minute as v": (pa.string(), "01:30:00"),
    "select uuid '7ba7b810-9dad-11d1-80b4-00c04fd430c8' as v": (pa.string(), "7ba7b810-9dad-11d1-80b4-00c04fd430c8"),
    "select 'a'::enum('a', 'b') as v": (pa.string(), "a"),
    "select '101'::bit as v": (pa.string(), "101"),
    "select union_value(k := 1) as v": (pa.string(), "1"),
    "select [interval 1 day] as v": (pa.string(), "[1 day]"),
    "select [1, 2]::int[2] as v": (pa.list_(pa.field("element", pa.int32())), [1, 2]),
    "select ['a'::enum('a')] as v": (pa.list_(pa.field("element", pa.string())), ["a"]),
    "select sum(x) as v from (values (1), (2)) t(x)": (pa.decimal128(38, 0), decimal.Decimal(3)),
    "select 18446744073709551615::uhugeint as v": (pa.string(), "18446744073709551615"),
    "select {'a': 1, 'b': [true]} as v": (
        pa.struct([("a", pa.int32()), pa.field("b", pa.list_(pa.field("element", pa.bool_())))]),
        {"a": 1, "b": [True]},
    ),
    "select map {'a': 1.5} as v": (pa.map_(pa.string(), pa.decimal128(2, 1)), [("a", decimal.Decimal("1.5"))]),
    "select 'a'::blob as v": (pa.binary(), b"a"),
    "select time '10:00:00' as v": (pa.time64("us"), None),
    "select timestamptz '2024-01-01 00:00:00+00' as v": (pa.timestamp("us", "UTC"), None),
    "select '{}'::json as v": (pa.string(), "{}"),
}


@pytest.mark.parametrize("text", TYPES)
def test_types_that_states_lack_become_those_that_files_have(store: CheckpointStore, text: str) -> None:
    found = query(store, text)
    kind, value = TYPES[text]
    assert found.schema == pa.schema([("v", kind)])
    [row] = found.table().to_pylist()
    assert value is None or row == {"v": value}


def test_columns_of_one_name_are_told_apart(store: CheckpointStore) -> None:
    found = query(store, "select 1 as a, 2 as a, 3 as A, interval 1 day as b, 5 as b").table()
    assert found.to_pylist() == [{"a": 1, "a_2": 2, "A": 3, "b": "1 day", "b_2": 5}]
    assert query(store, "select null as n").table().to_pylist() == [{"n": None}]


# ---- what goes wrong while it is read


def test_damage_is_told_as_by_any_reader(tmp_path: Path) -> None:
    store = stores.counts_store(str(tmp_path), keys=500)
    job = stores.counts_job(keys=500)
    job.publish(store, store.start(job.job_id), options=WriteOptions(inline_bytes_max=0))
    for path in tmp_path.glob("segments/**/*.parquet"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(data)

    found = query(store, "select count(*) from counter.counts where n > 3 group by word order by 1")
    with pytest.raises(DamagedCheckpoint) as caught:
        found.table()
    with pytest.raises(DamagedCheckpoint) as direct:
        store.open().state("counter", "counts").table()
    assert str(caught.value) == str(direct.value)
    assert query(store, "select count(*) from checkpoints").table()["count_star()"].to_pylist() == [2]


def test_a_checkpoint_that_is_deleted_while_it_is_read_has_expired(tmp_path: Path) -> None:
    store, job = stores.counts_store(str(tmp_path)), stores.counts_job()
    found = query(store, "from counter.counts")
    for _ in range(3):
        job.publish(store, store.start(job.job_id))
    store.expire(1)
    with pytest.raises(CheckpointExpired, match="checkpoint 1"):
        found.table()


def test_a_checkpoint_that_is_not_there_is_named(store: CheckpointStore) -> None:
    with pytest.raises(LookupError, match="99"):
        query(store, "select 1", checkpoint_id=99)


def test_states_that_only_share_a_name_are_refused_where_they_are_read_together(tmp_path: Path) -> None:
    store, permit = stores.open_store(str(tmp_path)), None
    for mode in (declare.even_split_state, declare.union_state):
        states = (
            mode("a", "s", columns={"x": pa.int64()}),
            declare.even_split_state("a", "t", columns={"x": pa.int64()}),
        )
        rows = {("a", name): lambda _: pa.table({"x": pa.array([1])}) for name in "st"}
        permit = Job("j", JobGraph((operator("a", 1),)), states, rows).publish(store, permit)
    assert len(query(store, "from a.t", all_checkpoints=True).table()) == 2
    with pytest.raises(InvalidInput, match="has mode even_split in checkpoint 1 and union later") as caught:
        query(store, "from a.s", all_checkpoints=True)
    assert caught.value.kind is ErrorKind.SCHEMA_MISMATCH


def test_a_query_that_is_given_up_ends_its_threads(store: CheckpointStore) -> None:
    import threading

    batches = query(store, "select a.user from totals.spent a, totals.spent b").batches()
    next(batches)
    assert any(one.name == "stateformat-sql" for one in threading.enumerate())
    batches.close()  # type: ignore[attr-defined]
    assert not any(one.name == "stateformat-sql" for one in threading.enumerate())
