"""Checkpoints that Spark wrote are read to the values that Spark says are in them, and are found
whole.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.foreign.spark.key_columns import partitions_of, spark_hashes
from stateformat.backends.foreign.spark.logs import recognises
from stateformat.backends.foreign.spark.schemas import SparkField, has_values
from stateformat.backends.foreign.spark.source import SparkSource, sources
from stateformat.keys import DEFAULT_KEY_HASH, hash_keys, key_groups
from stateformat.model import Kind
from stateformat.schema import segment_schema
from stateformat.storage import Storage, folder_of, open_storage

FIXTURES = Path(__file__).parent / "fixtures"
PROVIDER = "HDFSBackedStateStoreProvider"


def on_default_store() -> Iterator[str]:
    for path in sorted(FIXTURES.glob("spark-*/*/made.json")):
        newest = path.parent / "checkpoint" / "offsets" / str(json.loads(path.read_text())["newest_commit"])
        if PROVIDER in newest.read_text():
            yield f"{path.parent.parent.name}/{path.parent.name}"


DEFAULT_STORE = list(on_default_store())
every_fixture = pytest.mark.parametrize("name", DEFAULT_STORE)


def folder(name: str) -> Storage:
    found = folder_of(open_storage(str(FIXTURES / name / "checkpoint")))
    assert found is not None
    return found


def plain(value: Any, kind: pa.DataType) -> Any:
    """A value of ours as the expected files write it."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        pairs = [[plain(k, kind.key_type), plain(v, kind.item_type)] for k, v in value]
        return sorted(pairs, key=lambda pair: json.dumps(pair[0]))
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if pa.types.is_decimal(kind):
        return format(value, "f")
    if pa.types.is_binary(kind):
        return value.hex()
    if pa.types.is_floating(kind) and (value != value or value in (float("inf"), float("-inf"))):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


def as_integers(column: pa.Array) -> pa.Array:
    """Times as µs, days as days, at any depth: Arrow's integers of them."""

    def integers(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_timestamp(kind):
            return pa.int64()
        if pa.types.is_date(kind):
            return pa.int32()
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(field.name, integers(field.type)) for field in kind])
        if pa.types.is_map(kind):
            return pa.map_(integers(kind.key_type), integers(kind.item_type))
        if pa.types.is_list(kind):
            return pa.list_(pa.field("element", integers(kind.value_type)))
        return kind

    return column.cast(integers(column.type))


def rows_of(columns: list[pa.Array]) -> list[list[Any]]:
    lists = [
        [plain(value, found.type) for value in found.to_pylist()] for found in (as_integers(item) for item in columns)
    ]
    return [list(row) for row in zip(*lists, strict=True)]


def kept(row: dict[str, Any], fields: tuple[SparkField, ...]) -> list[Any]:
    return [value for value, item in zip(row.values(), fields, strict=True) if has_values(item.type)]


def lines(rows: Any) -> list[str]:
    return sorted(json.dumps(row, ensure_ascii=False) for row in rows)


def test_there_are_fixtures_of_the_oldest_and_of_the_newest_spark() -> None:
    assert len(DEFAULT_STORE) >= 20
    assert {name.split("/")[0] for name in DEFAULT_STORE} == {"spark-3.5.9", "spark-4.0.5", "spark-4.3.0"}


@every_fixture
def test_every_row_is_what_spark_says(name: str) -> None:
    source = SparkSource(folder(name))
    made = json.loads((FIXTURES / name / "made.json").read_text())
    assert made["newest_commit"] == source.batch
    for (uid, state), store in source.stores.items():
        file = FIXTURES / name / f"expected-{uid.removeprefix('operator-')}-{state}.jsonl"
        expected = [json.loads(line) for line in file.read_text().splitlines()]
        key, value = store.schema.key, store.schema.value
        wanted = [
            [row["partition"], *(kept(row["key"], key) or [0]), *(kept(row["value"], value) or [True])]
            for row in expected
        ]
        parts = [part for part in source.parts if (part.operator, part.state) == (uid, state)]
        found: list[list[Any]] = []
        names = [item.name for item in source.record.state(uid, state).current.fields]
        opaque = names.index("numbers") + 1 if "numbers_2" in names else None
        for part in parts:
            batches = list(source.read(part))
            for batch in batches:
                batch.validate(full=True)
                assert batch.schema.equals(segment_schema(source.record.state(uid, state)), check_metadata=True)
                found += rows_of(batch.columns)
            assert source.group_rows(part).tolist() == [sum(map(len, batches))]
        if opaque:
            # The key column of arrays is bytes, and the first value column what they say.
            typed = names.index("numbers_2") + 1
            found = [[*row[:opaque], row[typed], *row[opaque + 1 : typed], *row[typed + 1 :]] for row in found]
        assert lines(found) == lines(wanted)


@every_fixture
def test_every_key_lies_where_its_hash_says_and_nothing_is_wrong(name: str) -> None:
    source = SparkSource(folder(name))
    done: list[tuple[int, int]] = []
    found = list(source.check("full", lambda now, total: done.append((now, total))))
    uncommitted = [problem for problem in found if "has begun" in problem.message]
    assert len(uncommitted) == name.endswith("uncommitted")
    assert [str(problem) for problem in found if problem not in uncommitted] == []
    assert done[-1][0] == done[-1][1] == sum(part.size_bytes for part in source.parts)
    for part in source.parts:
        state = source.record.state(part.operator, part.state)
        for batch in source.read(part):
            operator = source.record.graph.operator(part.operator)
            assert set(batch.column("_key_group").to_pylist()) == {part.subtask}
            if operator.key_hash == DEFAULT_KEY_HASH:
                groups = key_groups(
                    hash_keys([batch.column(column) for column in state.key_columns]), operator.max_parallelism
                )
                assert set(groups.tolist()) == {part.subtask}


@every_fixture
def test_a_source_is_the_same_after_pickling_and_is_recognised(name: str) -> None:
    assert recognises(folder(name))
    source = SparkSource(folder(name))
    again = pickle.loads(pickle.dumps(source))
    assert again.record == source.record
    assert again.parts == source.parts
    assert again.notes == source.notes


@every_fixture
def test_history_is_every_committed_batch_that_can_be_opened(name: str) -> None:
    source = SparkSource(folder(name))
    ids = [found.record.checkpoint_id for found in sources(folder(name)).sources]
    assert ids == sorted(ids, reverse=True)
    assert ids[0] == source.batch + 1 == source.record.checkpoint_id
    older = SparkSource(folder(name), ids[-1])
    assert older.record.checkpoint_id == ids[-1]
    assert [str(found) for found in older.check("full", lambda now, total: None) if found.severity == "error"] == []


def operators(name: str) -> list[str]:
    return [operator.name for operator in SparkSource(folder(name)).record.graph.operators]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("aggregate", ["stateStoreSave"]),
        ("window", ["stateStoreSave"]),
        ("whole", ["stateStoreSave"]),
        ("session", ["sessionWindowStateStoreSaveExec"]),
        ("dedupe", ["dedupe"]),
        ("dedupe-watermark", ["dedupeWithinWatermark"]),
        ("join-outer", ["symmetricHashJoin"]),
    ],
)
def test_what_spark_3_does_not_write_follows_from_stores_and_schemas(query: str, expected: list[str]) -> None:
    assert operators(f"spark-3.5.9/{query}") == operators(f"spark-4.3.0/{query}") == expected


def test_a_join_has_maps_by_index_and_a_session_maps_by_its_start() -> None:
    join = SparkSource(folder("spark-4.3.0/join-outer")).record
    kinds = {state.name: state.kind for state in join.states}
    assert kinds == {
        "left-keyToNumValues": Kind.VALUE,
        "left-keyWithIndexToValue": Kind.MAP,
        "right-keyToNumValues": Kind.VALUE,
        "right-keyWithIndexToValue": Kind.MAP,
    }
    session = SparkSource(folder("spark-4.3.0/session")).record.state("operator-0", "default")
    assert session.kind is Kind.MAP
    assert segment_schema(session).field("_map_key").type == pa.timestamp("us", tz="UTC")


def test_names_that_repeat_get_a_suffix_and_a_note() -> None:
    source = SparkSource(folder("spark-4.3.0/unnamed"))
    state = source.record.states[0]
    assert state.key_columns == ("groupingexpression", "groupingexpression_2")
    assert any(note.kind == "renamed" and "groupingexpression_2" in note.message for note in source.notes)


def test_an_operator_without_keys_has_one_column_and_one_partition() -> None:
    for query in ("whole", "limit"):
        source = SparkSource(folder(f"spark-4.3.0/{query}"))
        assert source.record.states[0].key_columns == ("no_key",)
        assert [part.subtask for part in source.parts] == [0]
        assert any("has no key" in note.message for note in source.notes)


def test_a_key_column_of_arrays_is_kept_as_bytes_beside_what_they_say() -> None:
    source = SparkSource(folder("spark-4.3.0/key-types"))
    state = source.record.states[0]
    schema = segment_schema(state)
    assert (schema.field("numbers").type, schema.field("numbers_2").type.value_type) == (pa.binary(), pa.int32())
    assert "numbers" in state.key_columns
    assert "numbers_2" not in state.key_columns
    assert [note.kind for note in source.notes] == ["renamed", "opaque"]
    assert source.record.graph.operators[0].key_hash == "spark-murmur3-seed42-nested"


def test_the_hash_of_nested_keys_is_that_of_their_items_one_after_another() -> None:
    numbers = pa.array([[1, None, 3], [], None, [2**40]], pa.list_(pa.int64()))
    flat = [pa.array(column, pa.int64()) for column in ([1, None, None, 2**40], [None] * 4, [3, None, None, None])]
    text = pa.array(["a", "b", None, "d"])
    assert spark_hashes([numbers, text]).tolist() == hash_keys([*flat, text]).tolist()
    pairs = pa.array([[("a", 1), ("b", None)], [], None, [("", 7)]], pa.map_(pa.string(), pa.int64()))
    flat_pairs = [
        pa.array(["a", None, None, ""]),
        pa.array([1, None, None, 7], pa.int64()),
        pa.array(["b", None, None, None]),
        pa.nulls(4, pa.int64()),
    ]
    assert spark_hashes([pairs]).tolist() == hash_keys(flat_pairs).tolist()
    inside = pa.StructArray.from_arrays([numbers, text], ["n", "t"], mask=pa.array([False, False, False, True]))
    within = [pa.array([*column.to_pylist()[:3], None], column.type) for column in (*flat, text)]
    assert spark_hashes([inside]).tolist() == hash_keys(within).tolist()
    assert spark_hashes([numbers.slice(3), text.slice(3)]).tolist() == hash_keys([*flat, text]).tolist()[3:]
    assert spark_hashes([numbers.slice(1, 2)]).tolist() == [42, 42]
    assert partitions_of([numbers.slice(0, 0)], 5).tolist() == []


def test_a_batch_that_was_never_committed_is_named() -> None:
    with pytest.raises(LookupError, match="no committed batch 98"):
        SparkSource(folder("spark-4.3.0/aggregate"), 99)


def test_properties_say_where_the_query_was() -> None:
    made = json.loads((FIXTURES / "spark-4.3.0/window/made.json").read_text())
    record = SparkSource(folder("spark-4.3.0/window")).record
    assert record.properties["spark.query_id"] == record.job_id
    assert record.properties["spark.batch"] == str(record.checkpoint_id - 1)
    assert (
        str(made["watermark_ms"] if "watermark_ms" in made else made["watermark"])
        == record.properties["spark.watermark_ms"]
    )
    assert json.loads(record.properties["spark.offsets.0"])
