"""Savepoints that are written for Flink: their bytes, the command, and what Flink restores."""

from __future__ import annotations

import datetime as dt
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flink_streams import State, canonical, savepoint
from flink_written import LONG, TEXT, Kind as Written, pack, top, utf, versioned
from test_flink_source import code_of, murmur_of

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource, ParquetSource, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.foreign.byte_strings import from_arrow
from stateformat.backends.foreign.checkpoint import ForeignCheckpoint
from stateformat.backends.foreign.flink.binary_rows import RowData
from stateformat.backends.foreign.flink.compound import (
    Characters,
    Either,
    Enumeration,
    ListOf,
    MapOf,
    MaskedList,
    Nullable,
    Octets,
    Pojo,
    Row,
    Sequential,
)
from stateformat.backends.foreign.flink.contents import KeyedPart
from stateformat.backends.foreign.flink.keyed import CanonicalReader
from stateformat.backends.foreign.flink.lanes import Serializer
from stateformat.backends.foreign.flink.metadata import (
    Inline,
    Metadata,
    Operator,
    OperatorPartitions,
    OperatorStates,
    Subtask,
    encode_metadata,
)
from stateformat.backends.foreign.flink.scalars import (
    BigDecimal,
    BigInteger,
    Character,
    LocalDate,
    LocalDateTime,
    LocalTime,
    Milliseconds,
    Moment,
    Number,
    Text,
)
from stateformat.backends.foreign.flink.source import FlinkSource
from stateformat.backends.foreign.flink.sql_types import Logical, decimal, list_of, map_of, row, timestamp
from stateformat.backends.foreign.flink.writing.savepoint import write_savepoint
from stateformat.backends.foreign.flink.writing.template import TEMPLATE_OPERATOR
from stateformat.backends.foreign.flink.writing.values import encode
from stateformat.backends.foreign.formats import flink
from stateformat.backends.importing import ImportSpec, import_checkpoint
from stateformat.backends.local import LocalRuntime
from stateformat.backends.rewrite import RewriteSpec, publish_rescaled, rewrite
from stateformat.errors import InvalidInput, UnsupportedFormat
from stateformat.graph import JobGraph
from stateformat.model import Kind
from stateformat.storage import Storage, open_storage
from stateformat.store import CheckpointStore
from tests.ckpt.ckpt_runs import document, failure, page, run
from tests.foreign.foreign_fakes import WORDS, flink_like, spark_like
from tests.foreign.import_runs import DROPPED, NAMES, file_log, foreign, more, wanted
from tests.rewrite.rewrite_jobs import new_store

FIXTURES = Path(__file__).parent / "fixtures"
JOBS = ("core", "brief", "keys", "namespaces", "shared", "sink", "sql", "ttl", "wide", "windows", "finished")
SAVED = [
    path.parent
    for path in sorted(FIXTURES.glob("flink-*/*/savepoint"))
    if path.parent.name.partition("-")[0] in JOBS and "changelog" not in path.parent.name
]
NAMES_OF_SAVED = [f"{path.parent.name.removeprefix('flink-')}/{path.name}" for path in SAVED]


def folder(path: Path) -> Storage:
    found = open_storage(str(path)).folder()
    assert found is not None
    return found


def opened(path: Path) -> ForeignCheckpoint:
    """Open the savepoint in a folder, or the newest checkpoint below it."""
    if not (path / "_metadata").exists():
        path = next(path.glob("*/chk-*/_metadata")).parent.parent
    found = flink(folder(path), None)
    assert found is not None
    return found.open()


def rows(checkpoint: ForeignCheckpoint, operator: str, state: str) -> list[str]:
    """Return the rows of a state with their subtasks, in an order of their own."""
    found = []
    for subtask in sorted({part.subtask for part in checkpoint.source.parts}, key=str):
        task = checkpoint.read(operator, state, subtask)
        found += [repr((subtask, row)) for row in task.table().to_pylist()]
    return sorted(found)


@pytest.mark.parametrize("path", SAVED, ids=NAMES_OF_SAVED)
def test_what_is_written_reads_as_what_it_was_written_from(path: Path, tmp_path: Path) -> None:
    before = opened(path / "savepoint")
    written = write_savepoint(before, folder(tmp_path))
    after = opened(tmp_path)
    assert written.left_out == ()
    assert written.rows > 0
    assert after.graph == before.graph
    # What is written has all its files beside it.
    assert after.notes == tuple(note for note in before.notes if note.kind != "elsewhere")
    assert [(state.operator, state.name, state.mode, state.kind) for state in after.states] == [
        (state.operator, state.name, state.mode, state.kind) for state in before.states
    ]
    for state in before.states:
        assert rows(after, state.operator, state.name) == rows(before, state.operator, state.name)


def entries(source: FlinkSource) -> Iterator[tuple[str, str, int | None, dict[bytes, bytes]]]:
    """The entries of keyed states as their bytes, by operator, state and subtask."""
    for part, content in source.contents.parts.values():
        if not isinstance(content, KeyedPart) or not isinstance(content.reader, CanonicalReader):
            continue
        number = content.reader.numbers.get(part.state)
        found: dict[bytes, bytes] = {}
        for some in content.reader.extents.between(content.first, content.last).ranges():
            stored = content.reader.frames(some).of(-1 if number is None else number)
            keys, values = (strings.to_arrow().to_pylist() for strings in (stored.keys, stored.values))
            # The top bit says that a state ends here.
            found |= {bytes([key[0] & 0x7F]) + key[1:]: value for key, value in zip(keys, values, strict=True)}
        if found:
            yield part.operator, part.state, part.subtask, found


CANONICAL = [
    path for path in SAVED if "canonical" in path.name and path.name.partition("-")[0] not in ("shared", "sink")
]


@pytest.mark.parametrize("path", CANONICAL, ids=[f"{path.parent.name}/{path.name}" for path in CANONICAL])
def test_entries_have_the_bytes_that_flink_wrote(path: Path, tmp_path: Path) -> None:
    source = opened(path / "savepoint")
    write_savepoint(source, folder(tmp_path))
    kinds = {(state.operator, state.name): state.kind for state in source.states}
    wanted, found = ([*entries(one.source)] for one in (source, opened(tmp_path)))
    assert wanted
    assert [one[:3] for one in found] == [one[:3] for one in wanted]
    for (operator, state, _, mine), (*_, theirs) in zip(found, wanted, strict=True):
        if kinds[operator, state] is Kind.MAP:
            # Heaps, and RocksDB up to Flink 1.13, write a null's own bytes behind its mark.
            theirs = {key: b"\1" if value[:1] == b"\1" else value for key, value in theirs.items()}
        assert mine == theirs


UNKNOWN = versioned("example.OwnSerializer$Snapshot", 1, b"of any length")


def lists(version: int, names: list[str], snapshots: list[bytes], broadcasts: list[str]) -> bytes:
    """The header of operator state: of a class that is not known, nothing tells where it ends."""

    def state(name: str, kind: int, roles: dict[str, bytes]) -> bytes:
        described = b"".join(utf(role) + top(snapshot) for role, snapshot in roles.items())
        return utf(name) + pack("iii", kind, 0, len(roles)) + described

    head = pack("ib", 6, 0) if version == 6 else pack("i", 5)
    found = [state(name, 1, {"VALUE_SERIALIZER": snapshot}) for name, snapshot in zip(names, snapshots, strict=True)]
    shared = {"KEY_SERIALIZER": TEXT.snapshot, "VALUE_SERIALIZER": UNKNOWN}
    others = [state(name, 2, shared) for name in broadcasts]
    return head + pack("H", len(found)) + b"".join(found) + pack("H", len(others)) + b"".join(others)


@pytest.mark.parametrize("drop", [(), ("plain",), ("own",), ("own", "behind", "shared")])
@pytest.mark.parametrize("unknown", [0, 1, 2, None])
@pytest.mark.parametrize("version", [5, 6])
def test_operator_state_of_unknown_classes_goes_back_as_its_bytes(version, unknown, drop, tmp_path: Path) -> None:
    names = ["plain", "own", "behind"]
    snapshots = [UNKNOWN if place == unknown else TEXT.snapshot for place in range(3)]
    header = lists(version, names, snapshots, ["shared"])
    content = [TEXT.write("a"), TEXT.write("bc"), TEXT.write("d"), TEXT.write("e"), b"\0\0\0\0"]
    begin = np.cumsum([len(header), *map(len, content)])
    partitions = [
        OperatorPartitions(name, 0, begin[[at, at + 1]] if at == 0 else begin[[at + 1]])
        for at, name in enumerate(names)
    ]
    partitions.append(OperatorPartitions("shared", 2, begin[[4]]))
    stream = Inline("x", header + b"".join(content))
    subtasks = tuple(Subtask(index, managed_operator=OperatorStates(tuple(partitions), stream)) for index in range(2))
    operator = Operator(b"\7" * 16, "operator", "op", 2, 128, None, False, subtasks)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "_metadata").write_bytes(encode_metadata(Metadata(6, 1, (), (operator,), b"")))

    store = stateformat.open(str(tmp_path / "store"))
    spec = ImportSpec(key_hash="keep", drop=[f"op/{name}" for name in drop])
    import_checkpoint(opened(tmp_path / "s"), store, spec)
    written = write_savepoint(store.open(), folder(tmp_path / "back"))
    assert sorted(written.left_out) == sorted(f"op/{name}" for name in drop)
    after = opened(tmp_path / "back").source
    for subtask in after.metadata.operators[0].subtasks:
        handle = subtask.managed_operator
        assert {one.name for one in handle.states} == {*names, "shared"} - {*drop}
        data = after.places.of(handle.stream).read(0, handle.stream.size).tobytes()
        if not drop:
            assert data == stream.data
            assert [one.offsets.tolist() for one in handle.states] == [one.offsets.tolist() for one in partitions]
        for one in handle.states:
            kept = content[[*names, "shared"].index(one.name) + (one.name != "plain")]
            assert data[int(one.offsets[-1]) :].startswith(TEXT.write("bc") if one.name == "plain" else kept)


def test_keyed_state_of_an_unknown_class_goes_back_as_its_bytes(tmp_path: Path) -> None:
    own = Written("own", UNKNOWN, None, lambda value: value)
    entries = [(murmur_of(code_of(key)) % 128, key, None, f"bytes {key}".encode()) for key in range(20)]
    states = [
        State("plain", "value", TEXT, entries=[(group, key, None, str(key)) for group, key, _, _ in entries]),
        State("own", "value", own, entries=entries),
    ]
    stream = canonical(LONG, states, 128, fixed_key=True, compressed=False)
    savepoint(tmp_path / "s", stream, 7, 128)
    store = stateformat.open(str(tmp_path / "store"))
    import_checkpoint(opened(tmp_path / "s"), store, ImportSpec(key_hash="keep"))
    write_savepoint(store.open(), folder(tmp_path / "back"))
    (name,) = [path for path in (tmp_path / "back").iterdir() if path.name.startswith("keyed")]
    header = stream[1][min(range(128), key=lambda group: stream[1][group] or 1 << 30)]
    assert name.read_bytes()[:header] == stream[0][:header]
    assert rows(opened(tmp_path / "back"), "op", "own") == rows(opened(tmp_path / "s"), "op", "own")


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidInput, match="holds mine; a savepoint goes to an empty folder"):
        write_savepoint(opened(SAVED[0] / "savepoint"), folder(tmp_path))


def test_state_that_cannot_be_read_is_not_left_out_in_silence(tmp_path: Path) -> None:
    source = opened(FIXTURES / "flink-2.3.0" / "brief-hashmap-checkpoint-changelog" / "savepoint")
    with pytest.raises(
        InvalidInput,
        match=r"would lose it: its keyed state lies in a changelog.*`ckpt import SAVEPOINT --key-hash keep --drop",
    ):
        write_savepoint(source, folder(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_of_ours_without_a_template_is_refused(tmp_path: Path) -> None:
    import stateformat
    from stateformat.graph import JobGraph, Operator
    from stateformat.states import value_state

    store = stateformat.open("memory://no-template")
    state = value_state("count", "total", keys={"key": pa.int64()}, values={"value": pa.int64()})
    pending = store.begin(job_id="job", graph=JobGraph((Operator("count", 1, 128),)), states=[state], parent=None)
    with pending.context.subtask("count", 0) as writer:
        writer.write("total", pa.table({"key": [1], "value": [2]}))
    pending.add(writer)
    pending.publish()
    with pytest.raises(InvalidInput, match="has no template of a savepoint"):
        write_savepoint(store.open(), folder(tmp_path))


def test_lists_kept_as_the_bytes_of_a_heap_are_refused() -> None:
    from stateformat.backends.foreign.flink.compound import ListOf
    from stateformat.backends.foreign.flink.layouts import Layout, Parts, form_of
    from stateformat.backends.foreign.flink.scalars import Text
    from stateformat.backends.foreign.flink.writing.savepoint import check_bytes

    nested: Serializer = Text()
    for _ in range(80):
        nested = ListOf(nested)
    form, _ = form_of("op", Parts("deep", Layout.LIST, Text(), None, None, nested))
    assert form.raw_value
    with pytest.raises(InvalidInput, match="state 'deep' of operator 'op' was kept as bytes of the hash-map backend"):
        check_bytes("op", form)
    plain, _ = form_of("op", Parts("plain", Layout.LIST, Text(), None, None, Text()))
    check_bytes("op", plain)


# ---- values of every type as Flink encodes them

NUMBER = Number(">i8", pa.int64(), "Long")
INT = Number(">i4", pa.int32(), "Integer")
SHAPE = Pojo("Shape", ["area"], [NUMBER])
CIRCLE = Pojo("Circle", ["area", "radius"], [NUMBER, INT])
SQUARE = Pojo("Square", ["area", "text"], [NUMBER, Text()])
BIGINT, STRING = Logical("number", pa.int64(), "<i8"), Logical("text", pa.string())
BYTE, BOOL = Logical("number", pa.int8(), "<i1"), Logical("bool", pa.bool_())


def known(kind: Logical | None) -> Logical:
    assert kind is not None
    return kind


def sql_row(*kinds: Logical | None) -> RowData:
    return RowData(row([f"f{i}" for i in range(len(kinds))], [known(kind) for kind in kinds]))


def sql_rows(*rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Rows by position; the last value is the kind."""
    return [{f"f{i}": value for i, value in enumerate(one[:-1])} | {"row_kind": one[-1]} for one in rows]


CASES: dict[str, tuple[Serializer, list[Any]]] = {
    "text": (Text(), ["", None, "a", "x" * 126, "x" * 127, "y" * 20_000, "nul \0", "\u00e9", "\u20ac" * 200, "\U0001f600b"]),
    "string value": (Text(nullable=False), ["", "abc", "\u20ac"]),
    "character": (Character(), ["a", "\u20ac"]),
    "characters": (Characters(), ["", "ab\u20ac", "\U0001f600"]),
    "octets": (Octets(), [b"", b"\0\xff", b"x" * 300]),
    "whole numbers": (BigInteger(), ["0", "1", "10", "-1", "127", "128", "-128", "-129", str(2**200), str(-(2**300)), None, "9" * 5000]),
    "decimal numbers": (BigDecimal(), ["0", "0.00", "1E+3", "-1.50", "1", None, "123456789012345678901234567890.5", "1E-400"]),
    "dates": (LocalDate(), [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(2024, 2, 29), None, dt.date(9999, 12, 31)]),
    "times of day": (LocalTime(), [0, 86_399_999_999_999, None, 3_723_000_000_001]),
    "dates and times": (LocalDateTime(), [{"date": dt.date(2000, 1, 2), "nanos": 5}, None]),
    "milliseconds": (Milliseconds(), [dt.datetime(1969, 1, 1, tzinfo=dt.UTC), None]),
    "instants": (Moment(millis=False), [{"seconds": -5, "nanos": 999_999_999}, None]),
    "SQL timestamps of JDBC": (Moment(millis=True), [{"seconds": -5, "nanos": 123_000_000}, None]),
    "enums": (Enumeration("Colour", ["RED", "GREEN"]), ["GREEN", "RED"]),
    "nullable": (Nullable(NUMBER, 0), [1, None]),
    "padded": (Nullable(INT, 4), [None, 7]),
    "either": (Either(NUMBER, Text()), [{"left": 1, "right": None}, {"left": None, "right": "r"}]),
    "lists": (ListOf(ListOf(Text())), [[], [[]], [["a", None], ["b"]]]),
    "arrays": (ListOf(INT, flagged=True), [[1, None], [], [None]]),
    "linked lists": (MaskedList(INT), [[1, None, 3, 4, 5, 6, 7, 8, None], [], [None]]),
    "maps": (MapOf(Text(), NUMBER), [[("a", 1), ("", None)], []]),
    "maps with null keys": (MapOf(Text(), NUMBER, nullable_keys=True), [[{"key": None, "value": 1}], []]),
    "tuples": (Sequential(("a", "b"), (NUMBER, Text())), [{"a": 1, "b": None}]),
    "rows": (Row([NUMBER, Text()], kinds=True), [{"f0": None, "f1": "x", "row_kind": "-U"}, {"f0": 1, "f1": None, "row_kind": "+I"}]),
    "rows of old": (Row([NUMBER] * 9, kinds=False), [{f"f{i}": None if i == 8 else i for i in range(9)}]),
    "POJOs": (Pojo("P", ["a", "b"], [NUMBER, ListOf(Text())]), [{"a": None, "b": ["x"]}, None, {"a": 1, "b": None}]),
    "subclasses": (
        Pojo("Shape", ["area"], [NUMBER], [("Circle", CIRCLE)], {"Square": SQUARE}),
        [
            {"class": "Shape", "area": 1, "radius": None, "text": None},
            {"class": "Circle", "area": None, "radius": 2, "text": None},
            None,
            {"class": "Square", "area": 3, "radius": None, "text": "t"},
        ],
    ),
    "SQL rows": (
        sql_row(BIGINT, STRING, decimal(30, 3), timestamp(9), timestamp(3), decimal(10, 2), BOOL, BYTE),
        sql_rows(
            (1, "seven c", Decimal("-1.500"), {"timestamp": 946_684_800_000_001, "nanos": 9}, -315_619_200_000_000, Decimal("1.25"), True, -1, "+I"),
            (None, None, None, None, None, None, None, None, "-D"),
            (-1, "more than seven", Decimal("9" * 27), None, None, Decimal("-0.01"), False, 127, "+U"),
        ),
    ),
    "SQL rows of 70 columns": (sql_row(*[BIGINT] * 70), sql_rows((*[None if i % 3 else i for i in range(70)], "+I"))),
    "nested SQL": (
        sql_row(list_of(BYTE), map_of(STRING, list_of(STRING)), row(["f0"], [STRING])),
        sql_rows(
            ([1, None, 3], [("a longer key", ["x", None, "longer than a word"]), ("", [])], {"f0": "inside of a row"}, "+I"),
            ([], [], None, "+I"),
            (None, None, {"f0": None}, "+I"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_encoded_is_decoded_as_it_was(name: str) -> None:
    serializer, values = CASES[name]
    array = pa.array(values, serializer.arrow_type)
    for given in (array, array.slice(1), array.slice(0, 0), pa.concat_arrays([array, array])):
        found = encode(serializer, given)
        assert found.type == pa.binary()
        assert found.null_count == 0
        assert serializer.read_all(from_arrow(found)).equals(given)


def test_bytes_are_those_of_flink() -> None:
    def hexes(serializer: Serializer, *values: Any) -> list[str]:
        return [one.hex() for one in encode(serializer, pa.array(values, serializer.arrow_type)).to_pylist()]

    assert hexes(Text(), None, "", "ab", "\u20ac") == ["00", "01", "036162", "02ac41"]
    assert hexes(BigInteger(), None, "0", "10", "128") == ["00000000", "00000001", "00000003", "000000060080"]
    assert hexes(BigDecimal(), "1.28") == ["00000006008000000002"]
    assert hexes(Nullable(INT, 4), None, 1) == ["0100000000", "0000000001"]
    # A group aggregation's key (STRING, INT) of Flink 2.3.
    key = RowData(row(["f0", "f1"], [STRING, Logical("number", pa.int32(), "<i4")]), as_key=True)
    assert hexes(key, {"f0": "key-3", "f1": 3}) == [
        "00000018" + "00" * 8 + b"key-3".hex() + "000085" + "0300000000000000"
    ]


REFUSED: dict[str, tuple[Serializer, list[Any], str]] = {
    "a null number": (NUMBER, [1, None], "has no form for null"),
    "a null list": (ListOf(NUMBER), [None], "has no form for null"),
    "an unknown constant": (Enumeration("Colour", ["RED"]), ["BLUE"], "'BLUE' is no constant of Colour"),
    "an unknown class": (
        Pojo("Shape", ["area"], [NUMBER], [("Circle", CIRCLE)]),
        [{"class": "Cube", "area": 1, "radius": 1}],
        "class 'Cube', which the state's serializer does not know",
    ),
    "no number": (BigDecimal(), ["1.5", "one"], "'one' is no number as Java writes it"),
    "both of two": (Either(NUMBER, NUMBER), [{"left": 1, "right": 1}], "each value has exactly one"),
    "two characters": (Character(), ["ab"], "is one UTF-16 unit"),
    "microseconds": (Milliseconds(), [dt.datetime(2000, 1, 1, microsecond=1, tzinfo=dt.UTC)], "round them first"),
    "a day of 25 hours": (LocalTime(), [90_000_000_000_000], "beyond 24 hours"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_flink_cannot_hold_is_refused(name: str) -> None:
    serializer, values, said = REFUSED[name]
    with pytest.raises(InvalidInput, match=said):
        encode(serializer, pa.array(values, serializer.arrow_type))


def test_a_serializer_that_is_derived_from_a_known_one_is_not_taken_for_it() -> None:
    class Backwards(Text):
        """Not as Flink writes text."""

    with pytest.raises(UnsupportedFormat, match="values of Backwards are read from Flink, and not written"):
        encode(Backwards(), pa.array(["a"]))


def test_many_values_are_encoded_as_each_alone() -> None:
    random = np.random.default_rng(12)
    sizes = random.integers(0, 40, 500)
    letters = np.array(list("ab\u00e9\u20ac\U0001f600\0"))
    texts = ["".join(letters[random.integers(0, len(letters), size)]) for size in sizes]
    serializer = ListOf(Text())
    array = pa.array([texts[i : i + i % 7] for i in range(500)], serializer.arrow_type)
    alone = [encode(serializer, array.slice(i, 1))[0].as_py() for i in range(len(array))]
    assert encode(serializer, array).to_pylist() == alone


# ---- going on with an imported state: totals and positions as if nothing had happened


def totals(
    source: Any, parallelism: int, *, operator: str = "totals", uid: str = "words"
) -> tuple[Dataflow, CollectSink]:
    """A dataflow that counts words and adds numbers up, and where its totals go in the end."""
    flow, out = Dataflow("words", parallelism=parallelism), CollectSink()
    rows = flow.source(source, uid=uid)
    kept = {"rows": ("*", "count"), "sum": ("x", "sum")}
    rows.key_by("word").aggregate(kept, emit="end", uid=operator).apply(out, uid="out")
    return flow, out


@pytest.mark.parametrize("parallelism", [3, 2, 5])
@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
def test_a_dataflow_goes_on_from_an_imported_savepoint_at_any_parallelism(
    tmp_path: Path, key_hash: Any, parallelism: int
) -> None:
    store = new_store(tmp_path / "store")
    spec = ImportSpec(key_hash=key_hash, names=NAMES, job_id="words")
    import_checkpoint(foreign(flink_like(), tmp_path), store, spec)
    flow, out = totals(MemorySource(more()), parallelism)
    LocalRuntime(store, drop=[*DROPPED, "source", "sink"]).run(flow)
    found = out.table().sort_by("word").to_pylist()
    assert found == wanted({word: i for i, word in enumerate(WORDS)}, {word: i / 2 for i, word in enumerate(WORDS)})


def spark_totals(path: Path, **spec: Any) -> CheckpointStore:
    """The fake query's aggregation by window and word, imported under the names of ``totals``."""
    store = new_store(path / "store")
    names = {
        "operator-0": "totals",
        "operator-0/default": "totals",
        "operator-0/default.count": "rows",
        "operator-0/default.sum": "sum",
    }
    import_checkpoint(foreign(spark_like(), path), store, ImportSpec(names=names, job_id="words", **spec))
    return store


def test_files_that_the_query_has_read_are_not_read_again(tmp_path: Path) -> None:
    inbox = tmp_path / "in"
    inbox.mkdir()
    window = pa.struct([pa.field("start", pa.timestamp("us", "UTC")), pa.field("end", pa.timestamp("us", "UTC"))])

    def write(name: str, words: list[str]) -> None:
        windows = [
            {"start": 3_600_000_000 * (WORDS.index(word) % 3), "end": 3_600_000_000 * (WORDS.index(word) % 3 + 1)}
            for word in words
        ]
        pq.write_table(
            pa.table({"window": pa.array(windows, window), "word": words, "x": [0.25] * len(words)}), inbox / name
        )

    for number in range(3):
        write(f"{number}.parquet", WORDS)
    file_log(tmp_path, {str(n): [(inbox / f"{n}.parquet").as_uri()] for n in range(3)})
    store = spark_totals(tmp_path, sources={"words": "files"})
    write("3.parquet", WORDS[:10])
    (inbox / "_END").touch()
    flow, out = Dataflow("words", parallelism=2), CollectSink()
    rows = flow.source(ParquetSource(inbox, grows=True, until="_END"), uid="words")
    kept = {"rows": ("*", "count"), "sum": ("x", "sum")}
    rows.key_by("window", "word").aggregate(kept, emit="end", uid="totals").apply(out, uid="out")
    LocalRuntime(store, drop=["operator-1"]).run(flow)
    found = {row["word"]: (row["rows"], row["sum"]) for row in out.table().to_pylist()}
    assert found == {word: (i + (i < 10), i / 4 + 0.25 * (i < 10)) for i, word in enumerate(WORDS)}


def test_a_source_that_makes_rows_up_goes_on_at_its_row(tmp_path: Path) -> None:
    store = spark_totals(tmp_path, sources={"ticks": "rate@7"})
    flow, out = Dataflow("words", parallelism=1), CollectSink()
    ticks = flow.source(RateSource(rows_per_read=10), uid="ticks")
    ticks.apply(out, uid="out")
    runtime = LocalRuntime(store, drop=["operator-1", "totals"], checkpoint_rows=10)
    run = runtime.begin(flow)
    while not out.table().num_rows:
        run.step()
    assert out.table()["n"].to_pylist()[:3] == [7, 8, 9]


# ---- ``ckpt export --as flink-savepoint``: a checkpoint goes back to Flink

CORE_SAVEPOINT = FIXTURES / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"


def values(address: Path, operator: str, state: str) -> dict[object, object]:
    table = stateformat.open(str(address)).open().read(operator, state).table()
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_an_import_that_keeps_key_groups_goes_back(tmp_path: Path) -> None:
    page("import", CORE_SAVEPOINT, "--to", tmp_path / "store", "--key-hash", "keep", COLUMNS="120")
    found = document("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back")
    assert (found["format"], found["path"]) == ("flink-savepoint", str(tmp_path / "back"))
    assert (found["operators"], found["left_out"]) == (3, [])
    assert found["files"] == len([*(tmp_path / "back").iterdir()])
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "back").iterdir())
    assert values(tmp_path / "back", "by-string", "count") == values(CORE_SAVEPOINT, "by-string", "count")


def test_a_checkpoint_of_flinks_becomes_a_canonical_savepoint_without_an_import(tmp_path: Path) -> None:
    refused = failure("export", CORE_SAVEPOINT, "--as", "flink-savepoint", "--to", "-", status=2)["message"]
    assert "a savepoint is a folder; give a path or a URL" in refused
    text = page("export", CORE_SAVEPOINT, "--as", "flink-savepoint", "--to", tmp_path / "back")
    assert "Savepoint of checkpoint 1" in text
    assert "3 operators" in text
    assert values(tmp_path / "back", "by-long", "sum") == values(CORE_SAVEPOINT, "by-long", "sum")


def test_what_an_import_dropped_is_said(tmp_path: Path) -> None:
    options = ["--key-hash", "keep", "--drop", "by-long", "--drop", "by-string/seen"]
    page("import", CORE_SAVEPOINT, "--to", tmp_path / "store", *options, COLUMNS="120")
    found = document("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back")
    assert sorted(found["left_out"]) == ["by-long", "by-string/seen"]
    operators = stateformat.open(str(tmp_path / "back")).open().graph.by_uid
    assert sorted(operators) == ["by-string", "numbers"]


def test_keys_that_were_hashed_anew_cannot_go_back(tmp_path: Path) -> None:
    page("import", CORE_SAVEPOINT, "--to", tmp_path / "store", COLUMNS="120")
    found = failure("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back", status=2)
    assert "`ckpt import SAVEPOINT --key-hash keep --to STORE`" in found["message"]
    assert not (tmp_path / "back").exists()


def test_an_import_that_leaves_no_way_back_says_so_once_and_another_leaves_one(tmp_path: Path) -> None:
    said = "what Flink needs to take this state back is not kept"
    assert (
        " ".join(page("import", CORE_SAVEPOINT, "--to", tmp_path / "rehashed", COLUMNS="120").split()).count(said) == 1
    )
    assert said not in " ".join(
        page("import", CORE_SAVEPOINT, "--to", tmp_path / "store", "--key-hash", "keep").split()
    )
    page("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back")


def test_renamed_operators_and_states_are_refused_by_name(tmp_path: Path) -> None:
    for number, (renamed, said) in enumerate(
        [("by-long=mine", "operator 'mine' is none of Flink's"), ("by-long/sum=total", "state 'total' of operator")]
    ):
        store = tmp_path / f"store-{number}"
        page("import", CORE_SAVEPOINT, "--to", store, "--key-hash", "keep", "--map", renamed, COLUMNS="120")
        found = failure("export", store, "--as", "flink-savepoint", "--to", tmp_path / "back", status=2)
        assert said in found["message"]
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("options", [["--operator", "by-long"], ["--state", "sum"], ["--subtask", "0"], ["--force"]])
def test_a_savepoint_has_all_operators(tmp_path: Path, options: list[str]) -> None:
    found = run("export", CORE_SAVEPOINT, "--as", "flink-savepoint", "--to", tmp_path / "back", *options)
    assert found.status == 2
    assert "writes all operators into an empty folder" in found.err


@pytest.mark.parametrize("options", [["--operator", "by-long"], ["--state", "sum"]])
def test_a_file_holds_one_state(tmp_path: Path, options: list[str]) -> None:
    found = run("export", CORE_SAVEPOINT, "--to", tmp_path / "rows.csv", *options)
    assert found.status == 2
    assert "Missing option" in found.err


# ---- Flink restores what was written for it

HERE = Path(__file__).parent
FIXTURES_OF_FLINK = HERE / "fixtures"

RESTORED = (
    # Fixture, what is left out of it, Flink's state backend.
    ("flink-2.3.0/core-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/core-rocksdb-canonical", (), "rocksdb"),
    ("flink-2.3.0/brief-rocksdb-checkpoint", (), "rocksdb"),
    ("flink-2.3.0/brief-hashmap-native-snappy", (), "hashmap"),
    ("flink-2.3.0/keys-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/namespaces-hashmap-canonical", (), "rocksdb"),
    ("flink-2.3.0/shared-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/sql-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/ttl-hashmap-native", (), "hashmap"),
    ("flink-2.3.0/types-hashmap-canonical", ("types/base-pojo",), "hashmap"),
    ("flink-2.3.0/wide-rocksdb-canonical", (), "rocksdb"),
    ("flink-2.3.0/windows-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/finished-hashmap-canonical", (), "hashmap"),
    ("flink-1.13.6/core-hashmap-canonical", (), "hashmap"),
    ("flink-1.20.5/ttl-hashmap-canonical", (), "rocksdb"),
)
PARALLELISMS = (0, 2, 5)
"""0 is that of the savepoint."""


def making() -> ModuleType:
    """The program that makes the fixtures."""
    spec = importlib.util.spec_from_file_location("make_flink", HERE / "making" / "make_flink.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["make_flink"] = found
    spec.loader.exec_module(found)
    return found


def imported(name: str, drop: tuple[str, ...], into: Path) -> stateformat.Checkpoint:
    """Import a fixture into a store of ours, with its key groups."""
    saved = FIXTURES_OF_FLINK / name / "savepoint"
    if not (saved / "_metadata").exists():
        saved = next(saved.glob("*/chk-*/_metadata")).parent.parent
    store = stateformat.open(str(into))
    import_checkpoint(stateformat.open(str(saved)).open(), store, ImportSpec(key_hash="keep", drop=drop))
    return store.open()


def export(checkpoint: stateformat.Checkpoint, into: Path) -> Path:
    folder = open_storage(str(into)).folder()
    assert folder is not None
    write_savepoint(checkpoint, folder)
    return into


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[dict[str, Any]]]:
    """What Flink says of each savepoint at each parallelism: all of them in one process of Java."""
    try:
        maker = making()
        classpath = maker.compiled("2.3.0")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Flink 2.3.0 cannot be installed from PyPI and compiled against here: {error}")
    home = tmp_path_factory.mktemp("restores")
    orders = []
    for name, drop, backend in RESTORED:
        plain = name.replace("/", "-")
        checkpoint = imported(name, drop, home / f"store-{plain}")
        savepoint = export(checkpoint, home / plain)
        orders += [f"dump {savepoint} {backend} {number} {home}/{plain}-{number}.jsonl" for number in PARALLELISMS]
    rescaled = stateformat.open(str(home / "rescaled"))
    source = stateformat.open(str(home / "store-flink-2.3.0-core-hashmap-canonical"))
    topology = JobGraph(
        tuple(
            replace(operator, parallelism=1 if operator.uid == TEMPLATE_OPERATOR else 5)
            for operator in source.open().graph.operators
        )
    )
    publish_rescaled(source.open(), topology, store=source, target=rescaled)
    rewritten = stateformat.open(str(home / "rewritten"))
    rewrite(source, source.open(), RewriteSpec(parallelism=3, max_parallelism=60), target=rewritten)
    for store, name in ((rescaled, "rescaled"), (rewritten, "rewritten")):
        savepoint = export(store.open(), home / f"{name}-savepoint")
        orders.append(f"dump {savepoint} hashmap 0 {home}/{name}-0.jsonl")
    maker.run(classpath, orders)

    def lines(name: str, number: int) -> list[dict[str, Any]]:
        path = home / f"{name.replace('/', '-')}-{number}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    return lines


def expected(name: str, drop: tuple[str, ...]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (FIXTURES_OF_FLINK / name / "expected.jsonl").read_text().splitlines()]
    return [line for line in found if f"{line['operator']}/{line['state']}" not in drop]


def comparable(lines: list[dict[str, Any]], *, placed: bool) -> list[str]:
    """Lines in an order of their own, without what a restore changes.

    Keyed state stays with its subtask where ``placed``. Lists are dealt anew where a subtask had
    finished; all subtasks have all of union and broadcast state: once is enough.
    """
    found = []
    once = set()
    for line in lines:
        kept = dict(line)
        if "key_group" not in kept or not placed:
            kept.pop("subtask")
        if line["kind"] in ("SPLIT_DISTRIBUTE", "UNION"):
            kept.pop("index")
        text = json.dumps(kept, sort_keys=True)
        if line["kind"] in ("UNION", "BROADCAST"):
            once.add(text)
        else:
            found.append(text)
    return sorted([*found, *once])


@pytest.mark.truth
@pytest.mark.parametrize("number", PARALLELISMS)
@pytest.mark.parametrize(("name", "drop"), [one[:2] for one in RESTORED], ids=[one[0] for one in RESTORED])
def test_flink_restores_every_entry(
    said: Callable[[str, int], list[dict[str, Any]]], name: str, drop: tuple[str, ...], number: int
) -> None:
    wanted = comparable(expected(name, drop), placed=number == 0)
    assert len(wanted) > 10
    assert comparable(said(name, number), placed=number == 0) == wanted


@pytest.mark.truth
def test_flink_restores_what_was_rescaled_in_our_store(said: Callable[[str, int], list[dict[str, Any]]]) -> None:
    found = said("rescaled", 0)
    assert {line["subtask"] for line in found if line["operator"] == "by-long"} == {0, 1, 2, 3, 4}
    wanted = expected("flink-2.3.0/core-hashmap-canonical", ())
    assert comparable(found, placed=False) == comparable(wanted, placed=False)


@pytest.mark.truth
def test_flink_restores_what_was_hashed_to_other_key_groups(
    said: Callable[[str, int], list[dict[str, Any]]],
) -> None:
    def without_groups(lines: list[dict[str, Any]]) -> list[str]:
        return comparable([{**line, "key_group": 0} if "key_group" in line else line for line in lines], placed=False)

    found = said("rewritten", 0)
    assert max(line["key_group"] for line in found if "key_group" in line) < 60
    assert without_groups(found) == without_groups(expected("flink-2.3.0/core-hashmap-canonical", ()))
