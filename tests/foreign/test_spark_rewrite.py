"""Rows of a Spark query corrected and deleted in a copy, from which Spark goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.foreign.spark.repartition.editing import leader
from stateformat.backends.foreign.spark.repartition.plan import RepartitionPlan
from stateformat.backends.foreign.spark.repartition.run import Outcome, repartition
from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.backends.rewrite import Transform, plan_query_rewrite
from stateformat.backends.spark.rewrite import SparkRepartition
from stateformat.errors import DamagedCheckpoint, InvalidInput, NotFound, StorageError
from stateformat.storage import Storage
from tests.ckpt.ckpt_runs import document
from tests.foreign.spark_queries import CHANGELOG, IDS, QUERIES, ROCKSDB, go_on, partitions, write_batch
from tests.foreign.test_spark_copy import Failing
from tests.foreign.test_spark_goes_on import contents, without_partitions
from tests.foreign.test_spark_repartition import ALL, FIXTURES, bytes_of, content, folder, problems, rows
from tests.tally import Tally

FEW = ("aggregate", "totals-row-checksum", "join-outer-rocksdb-v4", "transform-ttl-rocksdb-changelog")
Place = tuple[str, str]
Function = Callable[[pa.Table], pa.Table]


def states(source: SparkSource) -> list[Place]:
    """Those with rows of their own."""
    return [place for place in source.shapes if leader(place[1]) is None]


def planned(path: Path, target: Path, functions: Mapping[Place, Function], *, rekey: bool = False) -> RepartitionPlan:
    transforms = {place: Transform(function, rekey=rekey, name="fix") for place, function in functions.items()}
    return plan_query_rewrite(SparkSource(folder(path)), folder(target).url, transforms)


def rewritten(path: Path, target: Path, functions: Mapping[Place, Function], *, rekey: bool = False) -> Outcome:
    return repartition(folder(path), folder(target), planned(path, target, functions, rekey=rekey))


def same(table: pa.Table) -> pa.Table:
    return table


def test_the_command_says_which_states_have_other_rows(tmp_path: Path) -> None:
    query = FIXTURES / "spark-4.3.0" / "two" / "checkpoint"
    operator, state = states(SparkSource(folder(query)))[0]
    chosen = ["--operator", operator, "--state", state, "--where", "true"]
    found = document("rewrite", query, "--to", tmp_path / "copy", *chosen)
    (changed,) = found["transformed"]
    assert (changed["operator"], changed["state"], changed["rows_after"]) == (operator, state, 0)
    assert changed["rows_before"] > 0
    assert found["untouched"]
    assert {"operator": operator, "state": state} not in found["untouched"]


def test_a_query_whose_source_has_lost_its_log_is_not_rewritten(tmp_path: Path) -> None:
    query = Path(shutil.copytree(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint", tmp_path / "query"))
    (query / "sources/0/1").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"sources/0/1: it is missing, or a link"):
        rewritten(query, tmp_path / "copy", dict.fromkeys(states(SparkSource(folder(query))), same))
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "name",
    [
        name
        if name.startswith("spark-4.3.0") and name.partition("/")[2] in FEW
        else pytest.param(name, marks=pytest.mark.truth)
        for name in ALL
    ],
)
def test_a_function_that_changes_nothing_leaves_every_byte_of_every_entry(name: str, tmp_path: Path) -> None:
    path = FIXTURES / name / "checkpoint"
    before = bytes_of(path)
    rewritten(path, tmp_path / "to", dict.fromkeys(states(SparkSource(folder(path))), same))
    assert content(tmp_path / "to") == content(path)
    assert rows(tmp_path / "to") == rows(path)
    assert problems(tmp_path / "to") == problems(path)
    assert bytes_of(path) == before


def the_key(source: SparkSource, store: Any) -> list[Any]:
    """The first grouping column of each entry of a store: decoded from its key alone."""
    found = []
    for partition in range(store.partitions):
        files = source.reader.files(store, partition, source.listing)
        keys = source.reader.entries(source.folder, store, partition, files).keys
        found += source.reader.key_columns(store, keys, "")[0].to_pylist()
    return found


def stores_of(source: SparkSource) -> dict[Place, Any]:
    """All stores, also those of Spark's own."""
    return {**source.stores, **{place: store for place, (store, _) in source.hidden.items()}}


@pytest.mark.parametrize(
    "name",
    [
        "transform-rocksdb", "transform-ttl-rocksdb-changelog", "join-outer-rocksdb-v4", "join-outer-rocksdb-v3", "join-outer",
        *(pytest.param(one, marks=pytest.mark.truth) for one in ("transform-rocksdb-ids", "join-inner-rocksdb-ids")),
    ],
)  # fmt: skip
def test_a_key_that_is_deleted_is_in_no_store_and_no_family_any_more(name: str, tmp_path: Path) -> None:
    path = FIXTURES / "spark-4.3.0" / name / "checkpoint"
    source = SparkSource(folder(path))
    stores = stores_of(source)
    key = max(the_key(source, stores[states(source)[-1]]), key=str)

    def without(table: pa.Table) -> pa.Table:
        return table.filter(pc.not_equal(table["k" if "k" in table.column_names else "field0"], key).fill_null(True))

    rewritten(path, tmp_path / "to", dict.fromkeys(states(source), without))
    after = SparkSource(folder(tmp_path / "to"))
    before, now = content(path), content(tmp_path / "to")
    gone = 0
    for place in before:
        assert now[place].items() <= before[place].items()
        had, has = the_key(source, stores[place]), the_key(after, stores_of(after)[place])
        assert has == [one for one in has if one != key]
        assert len(before[place]) - len(now[place]) == had.count(key)
        gone += had.count(key)
    assert gone > 2
    assert problems(tmp_path / "to") == problems(path)


def test_rows_of_a_join_are_numbered_without_gaps_and_counted(tmp_path: Path) -> None:
    path = FIXTURES / "spark-4.3.0" / "join-inner" / "checkpoint"
    place = ("operator-0", "left-keyWithIndexToValue")

    def first_of_many(table: pa.Table) -> pa.Table:
        return table.filter(pc.not_equal(table["_map_key"], 0)) if len(table) else table

    rewritten(path, tmp_path / "to", {place: first_of_many})
    source = SparkSource(folder(tmp_path / "to"))
    found: dict[Any, list[int]] = {}
    counts: dict[Any, int] = {}
    for part in source.parts:
        for row in (row for batch in source.read(part) for row in batch.to_pylist()):
            key = (row["field0"], row["field1"])
            if part.state == place[1]:
                found.setdefault(key, []).append(row["_map_key"])
            elif part.state == "left-keyToNumValues":
                counts[key] = row["value"]
    assert found
    assert {key: sorted(some) for key, some in found.items()} == {key: [*range(counts[key])] for key in counts}


def test_rows_of_another_key_lie_where_spark_looks_for_them(tmp_path: Path) -> None:
    path = FIXTURES / "spark-4.3.0" / "transform-rocksdb" / "checkpoint"

    def renamed(table: pa.Table) -> pa.Table:
        named = pc.binary_join_element_wise("user", table["k"].fill_null("none"), "-")
        return table.set_column(table.column_names.index("k"), "k", named)

    functions = dict.fromkeys(states(SparkSource(folder(path))), renamed)
    rewritten(path, tmp_path / "to", functions, rekey=True)
    # Validation hashes each key.
    assert problems(tmp_path / "to") == []
    assert all("'k': 'user-" in row for some in rows(tmp_path / "to").values() for row in some)
    with pytest.raises(InvalidInput, match="changed keys"):
        rewritten(path, tmp_path / "other", functions)
    assert not (tmp_path / "other").exists()


TOTALS = FIXTURES / "spark-4.3.0" / "totals-with-crc" / "checkpoint"
DEFAULT = ("operator-0", "default")


def with_column(name: str, make: Callable[[pa.Table], Any]) -> Function:
    return lambda table: table.set_column(table.column_names.index(name), name, make(table))


def nulls(name: str) -> Function:
    return with_column(name, lambda table: pa.nulls(len(table), table[name].type))


def all_of(name: str, value: Any) -> Function:
    return with_column(name, lambda table: pa.repeat(pa.scalar(value, table[name].type), len(table)))


TTL = "transform-ttl-rocksdb-changelog"


@pytest.mark.parametrize(
    ("name", "place", "function", "message"),
    [
        ("totals-with-crc", DEFAULT, lambda t: pa.concat_tables([t, t]), "two rows with the key"),
        ("totals-with-crc", DEFAULT, with_column("k", lambda t: pa.repeat("a", len(t))), "two rows with the key"),
        ("../spark-3.5.9/whole", DEFAULT, with_column("count", lambda t: pa.nulls(len(t), pa.int64())), "without nulls"),
        ("totals-with-crc", DEFAULT, with_column("count", lambda t: t["count"].cast(pa.string())), "retyped"),
        ("totals-with-crc", DEFAULT, lambda t: t.append_column("more", t["count"]), "'more' of operator-0/default added"),
        ("totals-with-crc", DEFAULT, lambda t: t.drop_columns(["sum"]), "'sum' of operator-0/default dropped"),
        ("join-inner", ("operator-0", "left-keyToNumValues"), same, "left-keyWithIndexToValue, and follows"),
        (
            "transform-rocksdb",
            ("operator-0", "timers"),
            with_column("_timestamp", lambda t: pc.add(t["_timestamp"], 1)),
            "timers of Spark are at whole milliseconds",
        ),
        ("../spark-3.5.9/session", DEFAULT, nulls("_map_key"), "'sessionStartTime' would have 8 nulls"),
        *((TTL, ("operator-0", one), nulls("ttlExpirationMs"), "'ttlExpirationMs' would have") for one in ("by", "notes", "seen")),
        ("join-outer-rocksdb-v4", ("operator-0", "left-keyWithTsToValues"), nulls("_map_key"), "'index' would have"),
        ("transform-rocksdb", ("operator-0", "timers"), all_of("_tag", "zap"), "'_tag' would be 'zap', and it is 'event'"),
        ("dedupe", DEFAULT, all_of("present", False), "'present' would be False, and it is True in every row"),
        ("dedupe", DEFAULT, nulls("present"), "'present' would be None, and it is True in every row"),
        ("limit", DEFAULT, all_of("no_key", 1), "'no_key' would be 1, and it is 0 in every row"),
    ],
)  # fmt: skip
def test_rows_that_spark_cannot_have_are_refused_and_nothing_is_written(
    name: str, place: Place, function: Function, message: str, tmp_path: Path
) -> None:
    path = FIXTURES / "spark-4.3.0" / name / "checkpoint"
    with pytest.raises(InvalidInput, match=message):
        rewritten(path, tmp_path / "to", {place: function}, rekey="whole" not in name)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("store", ["aggregate", "aggregate-rocksdb"])
def test_rows_of_two_partitions_do_not_get_one_key(store: str, tmp_path: Path) -> None:
    path = FIXTURES / "spark-4.3.0" / store / "checkpoint"

    def one(table: pa.Table) -> pa.Table:
        return with_column("n", lambda t: pa.repeat(1, len(t)))(
            with_column("k", lambda t: pa.repeat("a", len(t)))(table).slice(0, 1)
        )

    with pytest.raises(InvalidInput, match=r"the key \{'k': 'a', 'n': 1\}, which rows of two partitions got"):
        rewritten(path, tmp_path / "to", {DEFAULT: one}, rekey=True)
    # The same folder takes the function that is corrected.
    assert [one for one in (tmp_path / "to").rglob("*") if one.is_file()] == []
    rewritten(path, tmp_path / "to", {DEFAULT: same}, rekey=True)
    assert rows(tmp_path / "to") == rows(path)


def test_a_key_that_rows_of_two_partitions_got_is_named_for_a_column_family_too(tmp_path: Path) -> None:
    path, place = FIXTURES / "spark-4.3.0" / TTL / "checkpoint", ("operator-0", "seen")
    one = all_of("k", "a")
    with pytest.raises(InvalidInput, match=r"\{'k': 'a'.*\}, which rows of two partitions got"):
        rewritten(path, tmp_path / "to", {place: lambda table: one(table).slice(0, 1)}, rekey=True)


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["join-outer", "transform-rocksdb"])
def test_spark_itself_rewrites_as_this_process_does(spark: Any, name: str, tmp_path: Path) -> None:
    path = FIXTURES / "spark-4.3.0" / name / "checkpoint"
    functions = dict.fromkeys(states(SparkSource(folder(path))), lambda table: table.slice(0, len(table) // 2))
    rewritten(path, tmp_path / "to", functions)
    plan = planned(path, tmp_path / "other", functions)
    repartition(folder(path), folder(tmp_path / "other"), plan, engine=SparkRepartition(spark))
    assert content(tmp_path / "other") == content(tmp_path / "to") != content(path)


def test_an_older_batch_is_rewritten_as_it_was(tmp_path: Path) -> None:
    source = SparkSource(folder(TOTALS), 3)
    plan = plan_query_rewrite(source, folder(tmp_path / "to").url, {DEFAULT: Transform(same)})
    repartition(folder(TOTALS), folder(tmp_path / "to"), plan)
    found = SparkSource(folder(tmp_path / "to"))
    assert (found.batch, found.batches) == (2, [0, 1, 2])
    assert sorted(path.name for path in (tmp_path / "to" / "offsets").glob("[0-9]*")) == ["0", "1", "2", "3"]
    wanted = sorted(str(row) for part in source.parts for batch in source.read(part) for row in batch.to_pylist())
    assert sorted(str(row) for part in found.parts for batch in found.read(part) for row in batch.to_pylist()) == wanted


def test_a_rewrite_that_is_interrupted_at_any_file_leaves_nothing_that_is_a_checkpoint(tmp_path: Path) -> None:
    whole = rewritten(TOTALS, tmp_path / "whole", {DEFAULT: same}).files
    for left in range(whole + 1):
        target = tmp_path / str(left)
        there: Storage = Failing(folder(target), left)
        with pytest.raises(StorageError, match="cannot write"):
            repartition(folder(TOTALS), there, planned(TOTALS, target, {DEFAULT: same}))
        with pytest.raises(NotFound, match=r"begun and not ended|has begun no batch yet"):
            SparkSource(folder(target))


# ---- Spark goes on

BY_KEY = {
    "aggregate": "v price note", "totals": "n", "window": "price note", "session": "n", "join-inner": "v price note",
    "join-outer": "v price note", "dedupe": "", "dedupe-watermark": "", "pandas-state": "note", "transform": "n v price note",
}  # fmt: skip
"""Queries whose state is by ``k``; and what of a row may be another, so that keys and watermarks
stay."""
CHANGES = {
    "v": lambda v: (v + 1) % 1000,
    "n": lambda n: (n or 0) + 3,
    "price": lambda price: price + 1,
    "note": lambda _: "corrected",
}


def with_other_input(where: Path, name: str, key: str, number: int, *, deleted: bool) -> None:
    """Change the input of a batch as if the rows of a key had been others, or had not been."""
    for file in where.glob(f"input-*/batch-{number}.json"):
        then = file.stat()
        some = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [row for row in some if not (deleted and row["k"] == key)]
        for row in kept:
            if row["k"] == key:
                row.update({column: CHANGES[column](row[column]) for column in BY_KEY[name].split()})
        file.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
        os.utime(file, (then.st_mtime, then.st_mtime))


def chosen_key(where: Path) -> str:
    """The most frequent key of which no row has the greatest time of its batch: watermarks stay."""
    counts: dict[str, int] = {}
    newest = set()
    for file in where.glob("input-*/batch-*.json"):
        some = [json.loads(line) for line in file.read_text().splitlines()]
        newest.add(max(some, key=lambda row: row["at"])["k"])
        for row in some:
            counts[row["k"]] = counts.get(row["k"], 0) + 1
    return max((key for key in counts if key and key not in newest), key=lambda key: counts[key])


def of_key(table: pa.Table, key: str) -> pa.ChunkedArray:
    return pc.equal(table["k" if "k" in table.column_names else "field0"], key).fill_null(False)


STORES = {"default": {}, "changelog": CHANGELOG, "rocksdb": ROCKSDB, "ids": IDS}
CASES = [
    (name, deleted, store)
    for name, columns in BY_KEY.items()
    for deleted in (True, False)
    for store in ("default", "changelog")
    if (deleted or columns) and (name, store) != ("transform", "default")
] + [(name, True, store) for name in ("session", "join-outer", "transform") for store in ("rocksdb", "ids")]
OF_EACH_KIND = (
    ("aggregate", False, "default"), ("totals", True, "changelog"), ("session", True, "rocksdb"), ("join-outer", True, "ids"),
    ("join-inner", False, "default"), ("transform", False, "changelog"), ("dedupe", True, "changelog"),
)  # fmt: skip


@pytest.mark.spark
@pytest.mark.timeout(1200)
@pytest.mark.truth
@pytest.mark.parametrize(
    ("name", "deleted", "store"),
    [case if case in OF_EACH_KIND else pytest.param(*case, marks=pytest.mark.engines) for case in CASES],
)
def test_spark_goes_on_as_if_the_input_had_been_another_from_the_start(
    spark: Any, tmp_path: Path, tally: Tally, name: str, deleted: bool, store: str
) -> None:
    conf = STORES[store]
    conf = {**conf, **partitions(3)}
    given, wanted = tmp_path / "given", tmp_path / "wanted"
    for number in range(3):
        write_batch(given, QUERIES[name], number)
    key = chosen_key(given)
    shutil.copytree(given, wanted)
    for number in range(3):
        with_other_input(wanted, name, key, number, deleted=deleted)
    for where in (given, wanted):
        go_on(spark, name, where, where / "query", conf)
        for number in range(3, 6):
            write_batch(where, QUERIES[name], number)
    right = SparkSource(folder(wanted / "query"))

    def function(place: Place) -> Function:
        """Leave out the rows of the key; correct them to what the other query has."""
        batches = [batch for part in right.parts if (part.operator, part.state) == place for batch in right.read(part)]
        tables = [pa.Table.from_batches([batch]) for batch in batches]
        rows_of_key = [table.filter(of_key(table, key)) for table in tables]
        keys = list(right.shapes[place].state.key_columns)

        def change(table: pa.Table) -> pa.Table:
            rest = table.filter(pc.invert(of_key(table, key)))
            if deleted or len(rest) == len(table):
                return rest
            here = set(map(str, table.select(keys).to_pylist()))
            found = pa.concat_tables(rows_of_key)
            mine = pa.array([str(row) in here for row in found.select(keys).to_pylist()])
            right_rows = found.filter(mine).select(table.column_names)
            return pa.concat_tables([rest, right_rows.cast(table.schema)])

        return change

    places = states(SparkSource(folder(given / "query")))
    before = bytes_of(given / "query")
    rewritten(given / "query", tmp_path / "copy", {place: function(place) for place in places})
    assert bytes_of(given / "query") == before
    output = go_on(spark, name, given, tmp_path / "copy", conf)
    assert any(output.values())
    assert output == go_on(spark, name, wanted, wanted / "query", conf)
    found, right_contents = (
        without_partitions(contents(spark, name, at)) for at in (tmp_path / "copy", wanted / "query")
    )
    assert found == right_contents
    tally.add("Spark queries gone on from a checkpoint with other rows", tried=1, wrong=0)
