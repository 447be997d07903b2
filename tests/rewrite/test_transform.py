"""A rewrite applies a user's function to the rows of a state: what comes out, against plain Python;
what is refused, and what a program makes of it.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.rewrite import RewriteSpec, Transform, plan_rewrite, rewrite
from stateformat.errors import ErrorKind, InvalidInput, RestoreRefused
from stateformat.keys import subtask_of_key_group
from stateformat.model import CheckpointId
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tables import BATCH_BYTES
from stateformat.validation import validate
from tests.local.test_local_states import Job
from tests.rewrite import rewrite_jobs as jobs
from tests.rewrite.transform_cases import CASES, Case, check_case, put, rewritten_to
from tests.worlds import data as world

SPENT = ("totals", "spent")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """The data world. Tests leave it as it is."""
    return world.data_store(str(tmp_path_factory.mktemp("transform") / "shop"))


@pytest.fixture
def own_shop(shop: CheckpointStore, tmp_path: Path) -> CheckpointStore:
    """A copy of it to write to."""
    return open_store(shutil.copytree(shop.url.removeprefix("file://"), tmp_path / "own"))


@pytest.fixture
def small(tmp_path: Path) -> CheckpointStore:
    """A job of 64 keys with a state of every mode."""
    made = jobs.new_store(tmp_path / "small")
    jobs.publish(made, ended=())
    return made


def of(place: tuple[str, str], function: Any, **more: Any) -> RewriteSpec:
    return RewriteSpec(transforms={place: Transform(function, **more)})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_becomes_what_plain_python_makes_of_it(shop: CheckpointStore, tmp_path: Path, case: Case) -> None:
    done = rewritten_to(tmp_path / "to", shop, None, RewriteSpec(transforms={case.state: case.transform}))
    after = open_store(str(tmp_path / "to")).open()
    check_case(case, done, after)
    assert done.rehashed == ((case.state,) if case.rekey else ())
    assert done.record.rescaled_from == (
        shop.open().record.rescaled_from if not case.rekey else done.record.rescaled_from
    )


@pytest.mark.parametrize(
    "more",
    [
        {"parallelism": 2},
        {"parallelism": 5, "max_parallelism": 33},
        {"max_parallelism": 16, "renames": {"totals": "t"}},
    ],
)
@pytest.mark.parametrize("rekey", [False, True])
def test_a_transform_goes_together_with_all_else_that_a_rewrite_does(
    shop: CheckpointStore, tmp_path: Path, rekey: bool, more: dict[str, Any]
) -> None:
    case = next(case for case in CASES if case.state == SPENT and case.rekey == rekey)
    baskets = next(case for case in CASES if case.state == ("totals", "baskets"))
    both = {SPENT: case.transform, baskets.state: baskets.transform}
    done = rewritten_to(tmp_path / "to", shop, None, RewriteSpec(transforms=both, **more))
    after = open_store(str(tmp_path / "to")).open()
    uid = more.get("renames", {}).get("totals", "totals")
    for one in (case, baskets):
        assert world.same_rows(after.state(uid, one.state[1]).table(), one.expected())
    assert [(one.state.operator, one.state.rekeyed) for one in done.transformed] == [(uid, rekey), (uid, False)]
    if "parallelism" in more:
        assert after.graph.operator(uid).parallelism == more["parallelism"]


def test_rows_stay_in_their_subtask_where_keys_are_left_alone_and_move_where_they_change(
    shop: CheckpointStore, tmp_path: Path
) -> None:
    def handles(folder: str) -> dict[int, int]:
        checkpoint = open_store(str(tmp_path / folder)).open()
        found = {}
        for handle in jobs.handles_of(checkpoint):
            if (handle["operator"], handle["state"]) == SPENT:
                found[handle["subtask"]] = handle["rows"]
                groups = checkpoint.read(*SPENT, handle["subtask"]).table()["_key_group"].to_numpy()
                operator = checkpoint.graph.operator("totals")
                owners = subtask_of_key_group(
                    groups, parallelism=operator.parallelism, max_parallelism=operator.max_parallelism or 0
                )
                assert set(owners.tolist()) == {handle["subtask"]}
        return found

    rewritten_to(tmp_path / "as-it-is", shop, None, RewriteSpec())
    rewritten_to(tmp_path / "same", shop, None, of(SPENT, lambda rows: put(rows, "euros", pc.negate(rows["euros"]))))
    upper = next(case for case in CASES if case.rekey).transform
    rewritten_to(tmp_path / "moved", shop, None, RewriteSpec(transforms={SPENT: upper}))
    assert handles("same") == handles("as-it-is") != handles("moved")
    assert sum(handles("moved").values()) == sum(handles("same").values())


def test_the_function_is_called_with_no_rows_first_and_then_with_pieces(shop: CheckpointStore, tmp_path: Path) -> None:
    seen: list[pa.Table] = []

    def look(rows: pa.Table) -> pa.Table:
        seen.append(rows)
        return rows

    done = rewritten_to(tmp_path / "to", shop, None, of(SPENT, look))
    assert len(seen[0]) == 0
    assert all(rows.num_rows > 0 and rows.nbytes <= BATCH_BYTES for rows in seen[1:])
    assert all(rows.schema.equals(world.schema(*SPENT), check_metadata=True) for rows in seen)
    assert world.same_rows(pa.concat_tables(seen), world.expected(*SPENT))
    # What nothing was done to keeps its schema.
    assert done.record.state(*SPENT) == shop.open().record.state(*SPENT)


def by_polars(rows: pa.Table) -> Any:
    return polars.from_arrow(rows)


def by_duckdb(rows: pa.Table) -> Any:
    return duckdb.connect().from_arrow(rows).to_arrow_table()


def by_python(rows: pa.Table) -> pa.Table:
    return pa.Table.from_pylist(rows.to_pylist(), schema=rows.schema)


def by_pandas(rows: pa.Table) -> pa.Table:
    return pa.Table.from_pandas(rows.to_pandas(), schema=rows.schema)


def encoded(rows: pa.Table) -> pa.Table:
    """Strings as dictionaries and views."""
    for number, item in enumerate(rows.schema):
        if pa.types.is_string(item.type):
            values = rows[item.name]
            rows = rows.set_column(
                number, item.name, values.cast(pa.string_view()) if number else values.dictionary_encode()
            )
    return rows


@pytest.mark.parametrize("way", [by_polars, by_duckdb, by_python, by_pandas, encoded])
@pytest.mark.parametrize("name", ["recent", "baskets", "reminders", "rates"])
def test_rows_may_go_through_any_library_and_come_back_as_they_were(
    shop: CheckpointStore, tmp_path: Path, name: str, way: Any
) -> None:
    done = rewritten_to(tmp_path / "to", shop, None, of(("totals", name), way))
    found = open_store(str(tmp_path / "to")).open().state("totals", name).table()
    assert world.same_rows(found, world.expected("totals", name))
    assert done.record.state("totals", name).schemas == shop.open().record.state("totals", name).schemas


def test_every_subtask_gets_the_same_copy_of_broadcast_state(small: CheckpointStore) -> None:
    calls = itertools.count()

    def number(rows: pa.Table) -> pa.Table:
        call = next(calls)
        return rows.append_column("call", pa.array([call] * len(rows), pa.int64()))

    done = rewrite(small, small.open(), of(("names", "table"), number))
    copies = [small.open().read("names", "table", subtask).table().to_pylist() for subtask in range(3)]
    assert copies == [[{"code": code, "call": 1} for code in "xyz"]] * 3
    assert (done.transformed[0].read, done.transformed[0].written) == (3, 3)
    assert validate(small, level="full").problems == ()


def test_a_function_may_drop_all_rows_of_a_subtask(small: CheckpointStore) -> None:
    first = small.open().read("sums", "total", 0).table()["key"]

    def others(rows: pa.Table) -> pa.Table:
        return rows.filter(pc.invert(pc.is_in(rows["key"], value_set=first)))

    rewrite(small, small.open(), of(("sums", "total"), others))
    assert validate(small, level="full").problems == ()
    rows = {h["subtask"]: h["rows"] for h in jobs.handles_of(small.open()) if h["state"] == "total"}
    assert rows[0] == 0
    assert sum(rows.values()) == len(jobs.KEYS) - len(first)


# ---- schemas -------------------------------------------------------------------------------------


def fields_of(store: CheckpointStore) -> tuple[dict[str, tuple[int, bool, str | None]], list[int]]:
    """Id, nullability and default of each column of ``spent``, and the schemas that are kept."""
    state = store.open().record.state(*SPENT)
    return {f.name: (f.id, f.nullable, f.default) for f in state.current.fields}, [s.id for s in state.schemas]


def test_columns_keep_their_field_ids_and_the_history_of_names_where_they_can(own_shop: CheckpointStore) -> None:
    before, schemas = fields_of(own_shop)
    assert schemas == [1, 2]
    assert before["vip"][2] == "false"
    rewrite(own_shop, own_shop.open(), of(SPENT, None, renames={"city": "town"}))
    renamed, schemas = fields_of(own_shop)
    assert renamed == {("town" if name == "city" else name): facts for name, facts in before.items()}
    assert schemas == [1, 2, 3]
    rewrite(own_shop, own_shop.open(), of(SPENT, lambda rows: rows.drop_columns(["tier"])))
    dropped, schemas = fields_of(own_shop)
    assert dropped == {name: facts for name, facts in renamed.items() if name != "tier"}
    assert schemas == [1, 2, 3, 4]
    # A column that comes back is another one, and from a new name on, history begins anew.
    rewrite(own_shop, own_shop.open(), of(SPENT, lambda rows: rows.append_column("tier", rows["town"])))
    added, schemas = fields_of(own_shop)
    assert added["tier"][0] > max(facts[0] for facts in before.values())
    assert {name: facts for name, facts in added.items() if name != "tier"} == dropped
    assert schemas == [5]
    assert validate(own_shop, level="full").problems == ()


def without_nulls(rows: pa.Table) -> pa.Table:
    field = pa.field("euros", pa.float64(), nullable=False)
    return rows.set_column(rows.column_names.index("euros"), field, pc.fill_null(rows["euros"], 0.0))


def test_a_column_holds_no_nulls_from_then_on_if_its_field_says_so(own_shop: CheckpointStore) -> None:
    rewrite(own_shop, own_shop.open(), of(SPENT, without_nulls))
    fields, schemas = fields_of(own_shop)
    assert fields["euros"][1] is False
    assert schemas == [3]
    # And what held none stays so, whatever Arrow says of what the function returns.
    rewrite(own_shop, own_shop.open(), of(SPENT, lambda rows: put(rows, "euros", pc.negate(rows["euros"]))))
    assert fields_of(own_shop) == (fields, schemas)
    with pytest.raises(InvalidInput, match=r"made of \d+ rows of state 'spent'.*'euros' is declared without nulls"):
        rewrite(
            own_shop, own_shop.open(), of(SPENT, lambda rows: put(rows, "euros", pa.nulls(len(rows), pa.float64())))
        )


def test_only_a_rename_that_is_told_is_no_change_to_who_compares_checkpoints(own_shop: CheckpointStore) -> None:
    city = world.schema(*SPENT).names

    def town(rows: pa.Table) -> pa.Table:
        return rows.rename_columns(["town" if name == "city" else name for name in city])

    rewrite(own_shop, own_shop.open(), of(SPENT, town, renames={"city": "town"}))
    assert own_shop.changes(*SPENT, 6, 7).table().num_rows == 0
    own_shop.rollback(CheckpointId(6))
    rewrite(own_shop, own_shop.open(), of(SPENT, town))
    named = sum(row["city"] is not None for row in world.expected_rows(*SPENT))
    found = own_shop.changes(*SPENT, 6, 9).table()
    assert found["_change"].to_pylist() == ["update_before", "update_after"] * named
    assert own_shop.open().state(*SPENT).schema.names == ["town" if name == "city" else name for name in city]


# ---- refusals ------------------------------------------------------------------------------------


def rows_only(change: Callable[[pa.Table], Any]) -> Callable[[pa.Table], Any]:
    """A function that behaves as long as there are no rows."""
    return lambda rows: change(rows) if len(rows) else rows


def divide(rows: pa.Table) -> pa.Table:
    raise ZeroDivisionError("by\nnothing")


def leave(rows: pa.Table) -> pa.Table:
    raise SystemExit(3)


TOTAL, LAST = ("sums", "total"), ("sums", "last")
WITH_ROWS = r"\d+ rows of state 'total' of operator 'sums' \(first key \{'key': "
NO_ROWS = "no rows of state 'total' of operator 'sums'"


@pytest.mark.parametrize(
    ("place", "function", "more", "kind", "told"),
    [
        (
            TOTAL,
            divide,
            {},
            "transform_failed",
            f"divide raised ZeroDivisionError: by nothing, called with {NO_ROWS}.*too",
        ),
        (TOTAL, rows_only(divide), {}, "transform_failed", f"ZeroDivisionError: by nothing, called with {WITH_ROWS}"),
        (TOTAL, rows_only(leave), {}, "transform_failed", "raised SystemExit: 3, called with"),
        (TOTAL, lambda _: None, {}, "transform_failed", f"returned nothing, called with {NO_ROWS}"),
        (
            TOTAL,
            rows_only(lambda rows: rows.to_pylist()),
            {},
            "transform_failed",
            f"an object of type list, called with {WITH_ROWS}",
        ),
        (TOTAL, lambda rows: rows.select(["amount"]), {}, "schema_mismatch", "without key column 'key'; .*renames"),
        (TOTAL, lambda rows: pa.Table.from_pylist(rows.to_pylist()), {}, "schema_mismatch", "returned columns none"),
        (
            LAST,
            lambda rows: rows.drop_columns(["_index"]),
            {},
            "schema_mismatch",
            "without column '_index', which every row of a list",
        ),
        (TOTAL, lambda rows: rows.append_column("key", rows["key"]), {}, "schema_mismatch", "two columns 'key'"),
        (
            TOTAL,
            lambda rows: rows.append_column("_op", rows["key"]),
            {},
            "schema_mismatch",
            "a column '_op'.*the format",
        ),
        (
            TOTAL,
            lambda rows: put(rows, "amount", pc.cast(rows["amount"], pa.uint8())),
            {},
            "unsupported_type",
            "uint8, which the format does not hold",
        ),
        (
            TOTAL,
            lambda rows: rows.append_column("x", pa.nulls(len(rows))),
            {},
            "unsupported_type",
            r"'x' of no type \(null\)",
        ),
        (
            TOTAL,
            rows_only(lambda rows: put(rows, "amount", pc.cast(rows["amount"], pa.float64()))),
            {},
            "schema_mismatch",
            f"returned amount double for {WITH_ROWS}.*but amount int64 for no rows",
        ),
        (
            TOTAL,
            rows_only(lambda rows: rows.drop_columns(["amount"])),
            {},
            "schema_mismatch",
            f"returned key for {WITH_ROWS}.*but key, amount for no rows",
        ),
        (
            TOTAL,
            lambda rows: put(rows, "key", pc.utf8_upper(rows["key"])),
            {},
            "transform_failed",
            r"of \d+ rows .*, \d+ came back with a key that none of them had, \{'key': .*rekey=True",
        ),
        (
            TOTAL,
            lambda rows: put(rows, "key", pc.cast(rows["key"], pa.binary())),
            {},
            "schema_mismatch",
            "key column 'key' .* is string, and .* returned binary.*rekey=True",
        ),
        (
            TOTAL,
            lambda rows: put(rows, "key", pc.cast(pc.binary_length(rows["key"]), pa.int32())),
            {"rekey": True},
            "duplicate_row_key",
            r"after .*: row key \{'key': 3\} stands on 50 rows, .*Nothing was published",
        ),
        (
            TOTAL,
            lambda rows: pa.concat_tables([rows, rows]),
            {},
            "duplicate_row_key",
            r"row key \{.*\} stands on 2 rows, \{.*\} on 2, \{.*\} on 2, and",
        ),
        (
            TOTAL,
            lambda rows: put(rows, "key", pa.array([[1]] * len(rows), pa.list_(pa.int8()))),
            {"rekey": True},
            "unsupported_key_type",
            "cannot be applied to state 'total'",
        ),
        (
            TOTAL,
            None,
            {"renames": {"amout": "x"}},
            "schema_mismatch",
            "no column 'amout' to be renamed; did you mean 'amount'",
        ),
        (
            TOTAL,
            lambda rows: rows.drop_columns(["amount"]),
            {"renames": {"amount": "x"}},
            "invalid_argument",
            "cannot rename 'amount' to 'x'",
        ),
        (("sums", "seen"), None, {"rekey": True}, "invalid_argument", "is union and has no keys to hash again"),
        (("sink", "prepared"), None, {}, "state_not_allowed", "is committables and cannot be transformed: .*sink"),
        (("sums", "progress"), None, {}, "state_not_allowed", "is progress and cannot be transformed"),
        (("sums", "overtaken"), None, {}, "state_not_allowed", "is in_flight and cannot be transformed"),
        (("sums", "totl"), None, {}, "unknown_state", "no state 'totl'; did you mean 'total'"),
        (("smus", "total"), None, {}, "unknown_operator", "smus"),
    ],
)
def test_what_cannot_be_ends_in_a_sentence_and_nothing_is_published(
    small: CheckpointStore, place: tuple[str, str], function: Any, more: dict[str, Any], kind: str, told: str
) -> None:
    before = jobs.all_rows(small.open(), *TOTAL)
    with pytest.raises(InvalidInput, match=told) as refused:
        rewrite(small, small.open(), of(place, function, **more))
    assert refused.value.kind is ErrorKind(kind)
    assert "\n" not in str(refused.value)
    assert [record.checkpoint_id for record in small.history()] == [1]
    # Run again with nothing to do, it goes well.
    rewrite(small, small.open(), of(TOTAL, lambda rows: rows))
    assert jobs.all_rows(small.open(), *TOTAL) == before
    small.collect_garbage(delete=True)
    assert validate(small, level="full").problems == ()


def test_new_names_of_columns_and_a_transform_of_one_state_are_not_both_given(small: CheckpointStore) -> None:
    spec = RewriteSpec(columns={TOTAL: {"amount": "x"}}, transforms={TOTAL: Transform(None, {"amount": "y"})})
    with pytest.raises(InvalidInput, match="as renames of the transform"):
        plan_rewrite(small.open(), spec)


# ---- programs go on ------------------------------------------------------------------------------

LONG, TEXT = pa.int64(), pa.string()


@pytest.mark.parametrize("kind", ["value", "map", "list", "timers", "split", "union", "broadcast"])
def test_a_program_that_declares_the_new_columns_goes_on_and_one_with_the_old_is_refused(kind: str) -> None:
    job = Job(kind)
    job.start({"v": LONG, "w": LONG})
    job.start({"v": LONG, "w": LONG})
    store = job.bench.store

    def change(rows: pa.Table) -> pa.Table:
        rows = put(rows, "v", pc.add(rows["v"], 100))
        return put(rows, "w", pc.cast(rows["w"], TEXT)).append_column("x", rows["v"])

    rewrite(store, store.open(), of(("op", "s"), change, renames={"v": "n"}))
    with pytest.raises(RestoreRefused, match=r"has the columns? 'n'.*which the program does not declare"):
        job.start({"v": LONG, "w": LONG})
    new = {"n": LONG, "w": TEXT, "x": LONG}
    found = job.start(new, said={"renames": {"v": "n"}, "defaults": {"x": "7"}})
    assert found == [{"n": 100 + v, "w": str(v), "x": 100 + v} for v in (0, 1)]
    again = job.start(new, said={"renames": {"v": "n"}, "defaults": {"x": "7"}})
    assert len(again) == 3
    assert all(row in again for row in found)
    assert validate(store, level="full").problems == ()


def test_names_that_were_exchanged_are_not_exchanged_again_by_the_program_that_says_so() -> None:
    job = Job()
    job.start({"v": LONG, "w": TEXT})
    job.start({"v": LONG, "w": TEXT})
    store = job.bench.store
    rewrite(store, store.open(), of(("op", "s"), None, renames={"v": "w", "w": "v"}))
    said = {"renames": {"v": "w", "w": "v"}}
    assert job.start({"v": TEXT, "w": LONG}, said=said) == [{"v": "0", "w": 0}, {"v": "1", "w": 1}]
