"""Checkpoints of other systems become ours, here and on Spark, and it is proved."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import stateformat
from stateformat.backends.connectors import FileSink, MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.foreign.checkpoint import ForeignCheckpoint
from stateformat.backends.foreign.source import Note
from stateformat.backends.importing import (
    PROPERTY_CHARS,
    ImportSpec,
    KeyHash,
    bounded,
    files_read,
    import_checkpoint,
    prove_import,
)
from stateformat.backends.rewrite import ThreadEngine
from stateformat.backends.spark import SparkRuntime
from stateformat.backends.spark.rewrite import SparkEngine
from stateformat.errors import CheckpointError, DamagedCheckpoint, InvalidInput, RestoreRefused, UnsupportedFormat
from stateformat.graph import Operator, OperatorId, Status, SubtaskSet
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.model import CheckpointKind
from stateformat.reading import Checkpoint, StateRows
from stateformat.states import declare
from stateformat.store import open as open_store
from stateformat.validation import validate
from tests.foreign.foreign_fakes import WORDS, FakeSource, fake_record, flink_like, spark_like
from tests.foreign.import_runs import (
    DROPPED,
    LOG,
    NAMES,
    assert_same_rows,
    assert_valid,
    file_log,
    finished,
    folder,
    foreign,
    imported,
    more,
    rows,
    wanted,
)
from tests.rewrite.rewrite_jobs import new_store
from tests.worlds.stores import refused

UNKNOWN = "flink-user-hashcode"


@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
@pytest.mark.parametrize("make", [spark_like, flink_like])
def test_an_import_is_checkpoint_1_of_an_empty_store_with_every_row_of_every_state(
    tmp_path: Path, make: Callable[[], FakeSource], key_hash: Any
) -> None:
    source = make()
    store, done = imported(source, tmp_path, key_hash=key_hash)
    record = store.open().record
    assert (record.checkpoint_id, record.kind, record.parent) == (1, CheckpointKind.CHECKPOINT, None)
    assert (record.job_id, record.job_name) == (source.record.job_id, source.record.job_name)
    assert done.record == record
    assert_same_rows(store, source)
    assert_valid(store)
    assert {operator.key_hash for operator in record.graph.operators} == {DEFAULT_KEY_HASH}


def test_spark_gets_128_key_groups_and_keeps_its_parallelism_up_to_that(tmp_path: Path) -> None:
    store, _ = imported(spark_like(5), tmp_path / "a")
    assert {(one.parallelism, one.max_parallelism) for one in store.open().graph.operators} == {(5, 128)}
    store, _ = imported(spark_like(200), tmp_path / "b")
    assert {(one.parallelism, one.max_parallelism) for one in store.open().graph.operators} == {(128, 128)}
    assert_same_rows(store, spark_like(200))
    assert_valid(store)
    store, _ = imported(spark_like(200), tmp_path / "c", max_parallelism=1024)
    assert {(one.parallelism, one.max_parallelism) for one in store.open().graph.operators} == {(200, 1024)}
    store, _ = imported(spark_like(7), tmp_path / "d", key_hash="keep")
    assert {(one.parallelism, one.max_parallelism) for one in store.open().graph.operators} == {(7, 7)}


def test_keys_whose_hash_is_unknown_keep_their_groups_and_can_be_hashed_anew(tmp_path: Path) -> None:
    source = flink_like(UNKNOWN, hashed=False)
    store, _ = imported(source, tmp_path / "kept", key_hash="keep")
    found = store.open().read("counts", "accState").table()
    assert sorted(zip(found["_key_group"].to_pylist(), found["key"].to_pylist(), strict=True)) == sorted(
        (i % 128, word) for i, word in enumerate(WORDS)
    )
    assert store.open().graph.operator("counts").key_hash == UNKNOWN
    store, _ = imported(source, tmp_path / "hashed")
    assert store.open().graph.operator("counts").key_hash == DEFAULT_KEY_HASH
    assert_same_rows(store, source)
    assert_valid(store)


def test_keys_whose_hash_only_the_program_knows_are_not_compared(tmp_path: Path) -> None:
    source = flink_like("test-user-hashcode", hashed=False)
    store, _ = imported(source, tmp_path, key_hash="keep")
    assert store.open().graph.operator("counts").key_hash == "test-user-hashcode"
    assert_same_rows(store, source)


@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
def test_a_key_that_lies_in_another_group_than_its_hash_says_is_named_and_nothing_is_published(
    tmp_path: Path, key_hash: Any
) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"key \{'word': 'word \d+'\} of state 'default' of operator"):
        imported(spark_like(moved=1, rows={("operator-1", "default"): spark_like().rows["operator-1", "default"]}),
                 tmp_path, key_hash=key_hash)  # fmt: skip
    assert list((tmp_path / "store").glob("checkpoints/*")) == []


def opaque() -> FakeSource:
    state = declare.value_state("op", "users", keys={"key": pa.binary()}, values={"value": pa.binary()})
    record = fake_record([Operator("op", 1, 128, key_hash=UNKNOWN)], [state])
    return FakeSource(record, {("op", "users"): [{"key": b"k", "value": b"v"}]}, hashed=False)


def test_opaque_keys_are_refused_by_name_unless_their_groups_are_kept(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"keys of state 'users' of 'op' are kept as bytes, .* --key-hash keep"):
        imported(opaque(), tmp_path)
    store, _ = imported(opaque(), tmp_path, key_hash="keep")
    assert rows(store, "op", "users") == [{"key": b"k", "value": b"v"}]


def test_what_is_dropped_is_left_out(tmp_path: Path) -> None:
    store, _ = imported(flink_like(), tmp_path, drop=["source", "counts/perDay"], max_parallelism=32)
    record = store.open().record
    assert list(record.graph.by_uid) == ["counts", "sink"]
    assert [state.name for state in record.states if state.operator == "counts"] == [
        *("accState", "last", "_timer_state/event_user-timers", "rules")
    ]
    assert record.properties["import.dropped"] == "source; counts/perDay"
    assert_valid(store)
    with pytest.raises(InvalidInput, match="nothing to drop under 'count'"):
        imported(flink_like(), tmp_path / "other", drop=["count"])


def test_a_state_that_cannot_be_read_is_not_lost_in_silence(tmp_path: Path) -> None:
    source = flink_like(
        notes=(Note("refused", "counts/session", "its values are of Kryo: take a canonical savepoint"),)
    )
    with pytest.raises(InvalidInput, match=r"counts/session cannot be read: its values .* --drop counts/session"):
        imported(source, tmp_path)
    store, _ = imported(source, tmp_path, drop=["counts/session"])
    assert_same_rows(store, source)
    assert store.open().record.properties["import.refused"].startswith("counts/session: its values")
    store, _ = imported(source, tmp_path / "whole", drop=["counts"])
    assert list(store.open().graph.by_uid) == ["source", "sink"]


def test_dropping_an_operator_leaves_no_state_of_another_one_out_whose_uid_begins_so(tmp_path: Path) -> None:
    """`counts/perDay` is a state of `counts`, and `counts/more/odd` may be one of `counts/more`."""
    whole = flink_like()
    more = replace(whole.record.graph.operator("sink"), uid=OperatorId("counts/more"))
    graph = replace(whole.record.graph, operators=(*whole.record.graph.operators, more))
    notes = (Note("refused", "counts/more/odd", "its values are of Kryo"),)
    source = replace(whole, record=replace(whole.record, graph=graph), notes=notes)
    with pytest.raises(InvalidInput, match="counts/more/odd cannot be read"):
        imported(source, tmp_path, drop=["counts"])
    imported(source, tmp_path, drop=["counts", "counts/more"])
    imported(source, tmp_path / "both", drop=["counts/more/odd"])


def test_opaque_keys_that_are_dropped_are_in_nobodys_way(tmp_path: Path) -> None:
    store, _ = imported(opaque(), tmp_path, drop=["op/users"])
    assert store.open().states == ()


def test_who_had_finished_wholly_stays_so_and_who_had_in_part_runs_and_is_remembered(tmp_path: Path) -> None:
    source = flink_like()
    keys = ("source", "SourceReaderState"), ("sink", "writer")
    full = finished(finished(source, "sink", SubtaskSet.all(2)), "source", SubtaskSet.of([1]))
    full = replace(full, rows={place: given for place, given in source.rows.items() if place not in keys})
    full = replace(
        full, record=replace(full.record, states=tuple(s for s in full.record.states if s.operator != "sink"))
    )
    store, _ = imported(full, tmp_path)
    record = store.open().record
    assert record.graph.operator("sink").status is Status.FULLY_FINISHED
    assert record.graph.operator("source").status is Status.RUNNING
    assert record.properties["import.finished"] == "source: subtasks 1 of 2; sink: subtasks 0-1 of 2"
    assert record.rescaled_from is not None
    assert [(former.uid, str(former.finished)) for former in record.rescaled_from.operators] == [("source", "1")]
    assert_valid(store)


def test_union_state_of_a_partly_finished_operator_is_refused(tmp_path: Path) -> None:
    state = declare.union_state("op", "u", columns={"value": pa.int64()})
    operator = Operator("op", 2, 128, key_hash=DEFAULT_KEY_HASH, finished=SubtaskSet.of([1]))
    source = FakeSource(fake_record([operator], [state]), {("op", "u"): [{"value": 1, "subtask": 0}]})
    with pytest.raises(RestoreRefused, match="union"):
        imported(source, tmp_path)


def test_names_follow_the_map_and_the_job_is_the_users(tmp_path: Path) -> None:
    names = {
        "Counts": "totals",
        "counts/accState": "totals/sums",
        "counts/accState.key": "word",
        "counts/accState.value.count": "rows",
        "counts/accState.value.total": "sum",
        "counts/last": "recent",
        "sink": "files",
    }
    store, _ = imported(flink_like(), tmp_path, names=names, job_id="words", job_name="Words")
    record = store.open().record
    assert (record.job_id, record.job_name) == ("words", "Words")
    assert list(record.graph.by_uid) == ["source", "totals", "files"]
    state = record.state("totals", "sums")
    assert (state.key_columns, [item.name for item in state.current.fields]) == (("word",), ["word", "rows", "sum"])
    assert rows(store, "totals", "sums")[0] == {"word": "word 0", "rows": 0, "sum": 0.0}
    assert record.state("totals", "recent").kind is not None
    assert "counts/accState.key=word" in record.properties["import.names"]
    assert_valid(store)


WRONG_NAMES = [
    ({"count": "x"}, "no operator 'count' to rename; did you mean 'counts'"),
    ({"counts/acc": "x"}, "no state 'counts/acc' to rename; did you mean 'counts/accState'"),
    ({"counts/accState.keys": "x"}, "has no column 'keys'; did you mean 'key'"),
    ({"counts/accState.value.counts": "x"}, "has no column 'value.counts'; did you mean 'value.count'"),
    ({"counts/accState": "sink/accState"}, "a state stays with its operator"),
    ({"counts/accState": "last"}, "two states 'last'"),
    ({"counts": "sink"}, "two operators would be called 'sink'"),
    ({"counts/accState.key": "value"}, "two columns 'value'"),
]


@pytest.mark.parametrize(("names", "said"), WRONG_NAMES, ids=[said for _, said in WRONG_NAMES])
def test_names_that_are_not_there_or_cannot_be_are_refused(tmp_path: Path, names: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        imported(flink_like(), tmp_path, names=names)
    assert said in str(refused.value)


def test_a_key_is_not_split_where_key_groups_are_kept(tmp_path: Path) -> None:
    names = {"operator-0/default.window.start": "window_start"}
    with pytest.raises(InvalidInput, match="key groups are kept"):
        imported(spark_like(), tmp_path, names=names, key_hash="keep")
    imported(spark_like(), tmp_path, names=names)


def test_what_must_be_known_stands_in_properties_and_they_are_bounded(tmp_path: Path) -> None:
    store, done = imported(flink_like(), tmp_path)
    properties = store.open().record.properties
    assert properties["flink.version"] == "6"
    assert properties["import.system"] == "a fake"
    assert properties["import.checkpoint_id"] == "12"
    assert properties["import.key_hash"] == "rehash"
    assert properties["import.opaque"].startswith("source/SourceReaderState: the state of the source")
    assert [note.kind for note in done.notes] == ["opaque", "renamed"]
    many = [f"state {i} is kept as it is" for i in range(1000)]
    assert len(bounded(many)) <= PROPERTY_CHARS
    assert bounded(many).endswith("more")
    assert bounded(many).startswith("state 0 is kept as it is; state 1 ")
    assert bounded(["x" * 2000]) == "1 more"


def test_targets_that_hold_something_or_lie_in_the_foreign_folder_are_refused(tmp_path: Path) -> None:
    source = flink_like()
    store, _ = imported(source, tmp_path)
    with pytest.raises(InvalidInput, match="holds checkpoint 1; an import goes to an empty store"):
        import_checkpoint(foreign(source, tmp_path), store)
    inside = new_store(tmp_path / "foreign" / "store")
    with pytest.raises(InvalidInput, match="another system's and stays as it is"):
        import_checkpoint(foreign(source, tmp_path), inside)
    assert list((tmp_path / "foreign").iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"max_parallelism": 0}, "not within 1 to 32768"),
        ({"max_parallelism": 64, "key_hash": "keep"}, "key groups are kept"),
        ({"sources": {"in": "kafka"}}, "give files or rate"),
        ({"sources": {"in": "files@3"}}, "have no number as position"),
        ({"sources": {"in": "files:4"}}, "source 4 of the query, which has 0"),
        ({"sources": {"in": "rate"}}, "rate-micro-batch"),
        ({"sources": {"operator-0": "rate@3"}}, "uid of an operator"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path, spec: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        imported(spark_like(), tmp_path, **spec)
    assert said in str(refused.value)
    assert list((tmp_path / "store").rglob("*")) == []


def test_a_source_of_files_has_seen_those_that_the_query_has_read(tmp_path: Path) -> None:
    file_log(tmp_path, LOG)
    store, done = imported(spark_like(), tmp_path, sources={"lines": "files"})
    assert done.positions == (("lines", "behind 4 files"),)
    assert done.left == ()
    found = store.open().read("lines", "enumerator").table()
    assert found["file"].to_pylist() == ["/in/a", "/in/b", "/in/c d", "/in/e"]
    assert found["id"].null_count == 4
    assert store.open().read("lines", "splits").table().num_rows == 0
    assert store.open().record.properties["import.source.lines"] == "spark.offsets.0 as files"
    assert_valid(store)


def test_a_compacted_log_of_files_is_whole(tmp_path: Path) -> None:
    file_log(tmp_path, {"1.compact": ["a", "b"], "2": ["c"], "3": ["d"], "0": ["old"]})
    assert files_read(folder(tmp_path / "foreign"), 0, 2) == ["a", "b", "c"]
    assert files_read(folder(tmp_path / "foreign"), 0, 0) == ["old"]


@pytest.mark.parametrize(
    ("entries", "first", "said"),
    [
        ({"0": ["a"], "2": ["b"]}, "v1", "sources/0/1, .* is missing"),
        ({}, "v1", "sources/0/0, .* is missing, and the query had come to 2"),
        ({"0": ["a"], "1": ["b"], "2": ["c"]}, "v2", "is no log of files"),
    ],
)
def test_a_log_of_files_that_is_not_whole_is_damage(
    tmp_path: Path, entries: dict[str, list[str]], first: str, said: str
) -> None:
    file_log(tmp_path, entries, first=first)
    with pytest.raises(DamagedCheckpoint, match=said):
        files_read(folder(tmp_path / "foreign"), 0, 2)


def test_a_source_that_makes_rows_goes_on_behind_the_last(tmp_path: Path) -> None:
    source = spark_like()
    properties = {**source.record.properties, "spark.offsets.0": '{"offset":120,"timestamp":7}', "spark.offsets.1": "9"}
    source = replace(source, record=replace(source.record, properties=properties))
    store, done = imported(source, tmp_path, sources={"ticks": "rate", "seconds": "rate:1@90"})
    assert done.positions == (("ticks", "behind row 119"), ("seconds", "behind row 89"))
    assert store.open().read("ticks", "splits").table()["position"].to_pylist() == [120]
    assert store.open().read("seconds", "splits").table()["position"].to_pylist() == [90]


def test_offsets_that_nobody_goes_on_with_are_told(tmp_path: Path) -> None:
    _, done = imported(spark_like(), tmp_path)
    assert done.left == ((0, '{"logOffset":2}'),)


KINDS: Final = ("renamed", "opaque", "refused", "omitted", "elsewhere")


def test_notes_are_kept_whatever_their_kind(tmp_path: Path) -> None:
    notes = tuple(Note(kind, f"a/{kind}", f"it is {kind}") for kind in KINDS)
    store, done = imported(flink_like(notes=notes), tmp_path, drop=["a/refused"])
    properties = store.open().record.properties
    assert done.notes == notes
    assert {kind: properties[f"import.{kind}"] for kind in KINDS} == {
        note.kind: f"{note.subject}: it is {note.kind}" for note in notes
    }


def test_of_what_was_dropped_nothing_is_told_but_why_it_had_to_be(tmp_path: Path) -> None:
    notes = (Note("opaque", "counts/last", "it is opaque"), Note("refused", "counts/other", "it ends nowhere"))
    _, done = imported(flink_like(notes=notes), tmp_path, drop=["counts/last", "counts/other"])
    assert done.notes == notes[1:]


# ---- every fixture is imported

FIXTURES = Path(__file__).parent / "fixtures"
METADATA = FIXTURES.glob("*/*/savepoint/**/_metadata")
FOLDERS = sorted(
    [
        *FIXTURES.glob("*/*/checkpoint"),
        # A checkpoint names files beside its own folder.
        *(path.parent.parent if path.parent.name.startswith("chk-") else path.parent for path in METADATA),
    ]
)


NEWEST = ("flink-2.3.0", "spark-4.3.0")
"""Fixtures of older versions are read among the tests that take longer."""


def named(folder: Path) -> str:
    return "/".join(folder.relative_to(FIXTURES).parts[:2])


EACH = [
    pytest.param(folder, id=named(folder), marks=[] if named(folder).startswith(NEWEST) else [pytest.mark.truth])
    for folder in FOLDERS
]


def contents(checkpoint: Checkpoint, operator: str, state: str) -> Counter[str]:
    """The rows of a state without their key groups, each as text."""
    rows = checkpoint.read(operator, state).table()
    kept = rows.drop_columns([name for name in ("_key_group",) if name in rows.column_names])
    return Counter(map(repr, zip(*map(plain, kept.columns), strict=True)))


def plain(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_date(column.type):
        # Java has days that Python has not.
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_struct(column.type):
        flat = [plain(part) for part in column.flatten()]
        return list(zip(column.is_valid().to_pylist(), *flat, strict=True))
    elif pa.types.is_list(column.type):
        lengths = pc.list_value_length(column).to_pylist()
        values = iter(plain(pc.list_flatten(column)))
        return [None if length is None else [next(values) for _ in range(length)] for length in lengths]
    elif pa.types.is_map(column.type):
        entries = pa.list_(pa.struct([column.type.key_field, column.type.item_field]))
        return plain(pa.chunked_array([chunk.cast(entries) for chunk in column.chunks], entries))
    return column.to_pylist()


def is_readable(checkpoint: Checkpoint, operator: str, state: str) -> bool:
    try:
        contents(checkpoint, operator, state)
    except UnsupportedFormat:
        return False
    return True


def unhashable(checkpoint: Checkpoint) -> list[str]:
    """States with a key column of bytes whose operator has a hash that is not ours."""
    return [
        f"{state.operator}/{state.name}"
        for state in checkpoint.states
        if any(item.type == "binary" for item in state.current.fields if item.name in state.key_columns)
        and checkpoint.graph.operator(state.operator).key_hash != DEFAULT_KEY_HASH
    ]


@pytest.mark.parametrize("key_hash", ["rehash", pytest.param("keep", marks=pytest.mark.truth)])
@pytest.mark.parametrize("folder", EACH)
def test_an_imported_fixture_has_every_row_of_every_state(folder: Path, key_hash: Any, tmp_path: Path) -> None:
    source = stateformat.open(folder).open()
    assert isinstance(source, ForeignCheckpoint)
    drop = [note.subject for note in source.notes if note.kind == "refused"]
    states = [state for state in source.states if state.operator not in drop]
    unreadable = [f"{one.operator}/{one.name}" for one in states if not is_readable(source, one.operator, one.name)]
    store = new_store(tmp_path / "store")
    if unreadable:
        with pytest.raises(UnsupportedFormat):
            import_checkpoint(source, store, ImportSpec(key_hash="keep", drop=drop))
    opaque = unhashable(source) if key_hash == "rehash" else []
    if opaque:
        with pytest.raises(InvalidInput, match="kept as bytes") as refused:
            import_checkpoint(source, store, ImportSpec(drop=[*drop, *unreadable]))
        assert refused.value.details["states"] == opaque
    left_out = [*drop, *unreadable, *opaque]
    import_checkpoint(source, store, ImportSpec(key_hash=key_hash, drop=left_out))
    assert [problem.message for problem in validate(store, level="full").problems] == []
    found = store.open()
    # Where the names of an operator's states cannot be read, nothing of it is imported.
    wanted = [state for state in states if f"{state.operator}/{state.name}" not in left_out]
    # With its key groups a savepoint keeps what it needs to be written again.
    kept = [state for state in found.states if state.operator != "flink-savepoint"]
    assert {(state.operator, state.name) for state in kept} == {(one.operator, one.name) for one in wanted}
    for state in wanted:
        assert contents(found, state.operator, state.name) == contents(source, state.operator, state.name), state.name


# ---- importing with Spark's engine, and going on from it with ``SparkRuntime``

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import spark_query_moves

    yield spark_query_moves
    del sys.modules["spark_query_moves"]


@pytest.mark.truth
@pytest.mark.usefixtures("spark")
def test_a_structured_streaming_query_is_finished_here_with_the_totals_of_all_its_input(
    moves: ModuleType, tmp_path: Path
) -> None:
    assert moves.move(tmp_path)
    assert moves.committed(tmp_path / "out") == moves.wanted()


@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
def test_both_engines_import_the_same_rows(spark: Any, tmp_path: Path, key_hash: Any) -> None:
    found = []
    for name, engine in (("threads", ThreadEngine()), ("spark", SparkEngine(spark))):
        checkpoint = stateformat.open(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint").open()
        store = new_store(tmp_path / name)
        import_checkpoint(checkpoint, store, ImportSpec(key_hash=key_hash), engine=engine)
        assert [problem.message for problem in validate(store, level="full").problems] == []
        found.append(rows(store, "operator-0", "default"))
    assert found[0] == found[1]
    assert found[0]


def test_an_imported_savepoint_is_gone_on_with(spark: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    store, out = new_store(tmp_path / "store"), tmp_path / "out"
    import_checkpoint(foreign(flink_like(), tmp_path), store, ImportSpec(names=NAMES, job_id="words"))
    flow = Dataflow("words", parallelism=2)
    words = flow.source(MemorySource(more()), uid="words")
    kept = {"rows": ("*", "count"), "sum": ("x", "sum")}
    words.key_by("word").aggregate(kept, emit="end", uid="totals").apply(FileSink(out), uid="out")
    SparkRuntime(spark, store, drop=[*DROPPED, "source", "sink"]).run(flow)
    found = pq.read_table(out).sort_by("word").to_pylist()
    assert found == wanted({word: i for i, word in enumerate(WORDS)}, {word: i / 2 for i, word in enumerate(WORDS)})


# ---- every fixture that can be imported is proved to be the same content as its import

FLINK = sorted(path.parent for path in FIXTURES.glob("flink-*/*/*/_metadata") if path.is_file())
SPARK = sorted(path.parent for path in FIXTURES.glob("spark-*/*/*/metadata") if (path.parent / "offsets").exists())
FEW = {"finished-hashmap-canonical", "core-rocksdb-canonical", "join-outer", "transform-rocksdb"}


def cases() -> list[object]:
    found = []
    for path in (*FLINK, *SPARK):
        few = path.parent.name in FEW and path.parts[-3] in ("flink-2.3.0", "spark-4.3.0")
        name = "/".join(path.parts[-3:-1])
        found.append(pytest.param(path, id=name, marks=[] if few else [pytest.mark.truth]))
    return found


@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
@pytest.mark.parametrize("path", cases())
def test_an_import_has_lost_nothing(tmp_path: Path, path: Path, key_hash: KeyHash) -> None:
    checkpoint = open_store(str(path), allow_outside=True).open()
    refused = sorted({note.subject for note in checkpoint.notes if note.kind == "refused"})
    spec = ImportSpec(key_hash=key_hash, drop=refused)
    try:
        done = import_checkpoint(checkpoint, open_store(str(tmp_path)), spec)
    except CheckpointError:
        # What cannot be imported, other tests tell of; most can.
        assert path.parent.name not in FEW
        return
    proof = prove_import(checkpoint, done.rewritten.permit.checkpoint(), spec)
    assert proof.same, [state for state in proof.states if not state.same]


def test_there_are_fixtures() -> None:
    assert len(FLINK) > 30
    assert len(SPARK) > 30


# ---- rows of another system's state: of every fixture columns, keys and parts are the whole's

KEYS_TRIED = 2


def texts(table: pa.Table) -> list[str]:
    """Each row as text: NaN is itself, and days that Python has not are numbers."""
    columns = [plain(column) for column in table.columns]
    return list(map(repr, zip(*columns, strict=True))) if columns else [""] * table.num_rows


def joined(parts: list[StateRows]) -> list[str]:
    return [text for part in parts for text in texts(part.table())]


def at_some_keys(rows: StateRows, whole: pa.Table) -> None:
    """Every few keys, alone and together; the oracle compares texts of the key columns."""
    keys = whole.select(list(rows.state.key_columns))
    labels = texts(keys)
    chosen = sorted({labels.index(label) for label in labels[:: max(1, len(labels) // KEYS_TRIED)]})
    for at in (chosen[:1], chosen):
        wanted = {labels[number] for number in at}
        right = [text for text, label in zip(texts(whole), labels, strict=True) if label in wanted]
        found = rows.at_keys(pa.concat_tables(keys.slice(number, 1) for number in at))
        assert sorted(texts(found.table())) == sorted(right), (rows, at)
        assert found.select([]).table().num_rows == len(right)


@pytest.mark.parametrize("folder", EACH)
def test_columns_keys_and_parts_are_those_of_the_whole(folder: Path) -> None:
    checkpoint: Checkpoint = stateformat.open(folder).open()
    for state in checkpoint.states:
        if not is_readable(checkpoint, state.operator, state.name):
            continue
        rows = checkpoint.state(state)
        whole = rows.table()
        assert whole.num_rows == rows.select([]).table().num_rows
        backwards = rows.columns[:0:-1]
        assert texts(rows.select(backwards).table()) == texts(whole.select(backwards)), state
        split = [pickle.loads(pickle.dumps(part)) for part in rows.split(3)]
        assert len(split) <= 3
        assert joined(split) == texts(whole), state
        if state.key_columns and whole.num_rows:
            at_some_keys(rows, whole)


def opened(path: str) -> Checkpoint:
    checkpoint: Checkpoint = stateformat.open(FIXTURES / path).open()
    return checkpoint


def test_a_key_of_flink_or_spark_reads_its_key_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, operator, name in (
        ("spark-4.3.0/aggregate/checkpoint", "operator-0", "default"),
        ("flink-2.3.0/core-rocksdb-canonical/savepoint", "by-string", "mean"),
    ):
        rows = opened(path).state(operator, name)
        key = rows.table().select(list(rows.state.key_columns)).slice(3, 1)
        found = rows.at_keys(key)
        spans = found.task.slices.select(["first_group", "last_group"]).to_pylist()
        assert len(spans) == 1
        assert spans[0]["first_group"] == spans[0]["last_group"]
        groups: list[Any] = found.task.table()["_key_group"].unique().to_pylist()
        assert groups == [spans[0]["first_group"]]


def test_duckdb_reads_foreign_state_and_is_told_of_a_wrong_key() -> None:
    rows = opened("spark-4.3.0/aggregate/checkpoint").state("operator-0", "default")
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        assert connection.execute("select count(*) from rows").fetchall() == [(rows.table().num_rows,)]
    words = f"a key of state 'default' of 'operator-0': .* is none of its key columns; it has '{rows.columns[0]}'"
    refused(InvalidInput, lambda: rows.at_keys({"no such": 1}), words)
