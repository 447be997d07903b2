"""Where Flink puts what: metadata, key groups, files on the heap and of RocksDB."""

from __future__ import annotations

import random
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from flink_streams import WINDOW, State, Stream, canonical, heap, savepoint
from flink_written import BASE, DOUBLE, INT, LONG, NULL_TEXT, TEXT, Kind, composite, pack, top, utf, versioned
from hypothesis import given, settings, strategies as some

from stateformat.backends.foreign.flink import FLINK_KEY_HASH, USER_KEY_HASH, FlinkSource, check_source, keyed
from stateformat.backends.foreign.flink.headers import read_keyed_header
from stateformat.backends.foreign.flink.keyed import Database, TableSource, open_database
from stateformat.backends.foreign.flink.metadata import (
    CANONICAL,
    Changelog,
    EmptySegment,
    File,
    Incremental,
    Inline,
    KeyGroups,
    OperatorPartitions,
    OperatorStates,
    Relative,
    Segment,
    decode_metadata,
    encode_metadata,
)
from stateformat.backends.foreign.source import FLINK_VERSIONS, SPARK_VERSIONS
from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, UnsupportedFormat
from stateformat.model import Kind as StateKind
from stateformat.storage import open_storage
from tests.foreign.rocks_tables import DELETE, MERGE, PUT, Record, model, table

CODES = {"canonical": 7, "canonical, compressed": 7, "heap": 3, "heap, compressed": 3}
LAYOUTS = pytest.mark.parametrize("layout", CODES)
WINDOWS = some.tuples(some.integers(-(10**12), 10**12), some.integers(0, 10**6)).map(lambda two: (two[0], sum(two)))
WINDOW_KIND = Kind("window", versioned(WINDOW, 3), WINDOWS, lambda two: pack("qq", *two))
FEW = settings(max_examples=4, deadline=None)


def written(layout: str, key: Kind, states: list[State], groups: int, *, fixed_key: bool) -> Stream:
    compressed = layout.endswith("compressed")
    if layout.startswith("heap"):
        return heap(key, states, groups, compressed=compressed)
    return canonical(key, states, groups, fixed_key=fixed_key, compressed=compressed)


def opened(folder: Path) -> FlinkSource:
    found = open_storage(str(folder)).folder()
    assert found is not None
    return FlinkSource(found)


def table_of(source: FlinkSource, name: str) -> pa.Table:
    part = next(part for part in source.parts if part.state == name)
    batches = list(source.read(part))
    counted = source.group_rows(part)
    assert not isinstance(counted, int)
    groups = [group for batch in batches for group in batch.column("_key_group").to_pylist()]
    assert [groups.count(group) for group in range(len(counted))] == counted.tolist()
    assert groups == sorted(groups)
    schema = next(state for state in source.record.states if state.name == name)
    assert schema.operator == "op"
    return pa.Table.from_batches(batches) if batches else pa.table({})


def window_of(two: tuple[int, int]) -> dict[str, int]:
    return {"window_start": two[0], "window_end": two[1]}


def expected(state: State) -> list[dict[str, Any]]:
    """The rows of a state as our formats have them."""
    rows = []
    for group, key, namespace, content in state.entries:
        row = {"_key_group": group, "key": key}
        window = state.namespace is WINDOW_KIND
        space = window_of(namespace) if window else namespace
        if state.layout == "timers":
            tag = state.name.removeprefix("_timer_state/").replace("_", "/", 1)
            shown = f"{namespace[0]}-{namespace[1]}" if window else namespace
            row |= {"_timestamp": content * 1000, "_tag": tag if state.namespace is None else f"{tag}/{shown}"}
            rows.append(row)
        elif state.layout == "map":
            inner, value = content
            if state.namespace is None:
                row["_map_key"] = inner
            else:
                row["_map_key"] = {**(space if window else {"namespace": space}), "key": inner}
            rows.append(row | {"value": value})
        elif state.layout == "list" and state.namespace is None:
            rows += [row | {"_index": place, "value": value} for place, value in enumerate(content)]
        else:
            rows.append(row | ({} if state.namespace is None else {"_map_key": space}) | {"value": content})
    return rows


def shown(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(str(sorted(row.items())) for row in rows)


def unique(entries: list[tuple[int, Any, Any, Any]], layout: str) -> list[tuple[int, Any, Any, Any]]:
    """Leave out entries whose whole key stands there before."""
    found: dict[str, tuple[int, Any, Any, Any]] = {}
    for group, key, space, content in entries:
        inner = content[0] if layout == "map" else content if layout == "timers" else None
        # One key has one key group.
        group = zlib.crc32(str(key).encode()) % 3 * 60
        found.setdefault(str((key, space, inner)), (group, key, space, content))
    return list(found.values())


@some.composite
def drawn(draw: some.DrawFn, key: Kind) -> list[State]:
    """States of every layout, with and without namespaces, in any order."""
    spaces = [(None, True), (WINDOW_KIND, True), (TEXT, False)]
    contents = {
        "value": NULL_TEXT.values,
        "map": some.tuples(LONG.values, NULL_TEXT.values),
        "list": some.lists(TEXT.values | some.just(",,"), min_size=1, max_size=5),
        "timers": some.integers(-(10**13), 10**13),
    }
    states = []
    for layout in ("value", "map", "list", "timers"):
        for number, (space, fixed) in enumerate(spaces):
            own = some.none() if space is None else space.values
            entry = some.tuples(some.just(0), key.values, own, contents[layout])
            entries = unique(draw(some.lists(entry, max_size=6)), layout)
            name = f"_timer_state/event_{layout}-{number}" if layout == "timers" else f"{layout}-{number}"
            value = {"value": NULL_TEXT, "map": NULL_TEXT, "list": TEXT}.get(layout)
            map_key = LONG if layout == "map" else None
            states.append(State(name, layout, value, map_key, space, fixed, entries))
    return list(draw(some.permutations(states)))


@pytest.mark.parametrize(("groups", "filled"), [(1, 1), (2, 1), (2, 2), (128, 1), (128, 128), (300, 300)])
@pytest.mark.parametrize("layout", CODES)
def test_the_handles_of_checkpoints_do_not_say_which_layout_a_stream_has(layout, groups, filled, tmp_path):
    """Up to Flink 1.14 those of a full checkpoint of RocksDB have the code of a heap."""
    # Keys whose length looks like the number of a key group.
    texts = [(group, f"{group}" * (70_000 if groups == 2 else 1), None, "") for group in range(groups - filled, groups)]
    # A hash map has its states in any order: those with entries are the last, and the first.
    states = [State("texts", "value", TEXT, entries=texts), *(State(f"no-{n}", "value", TEXT) for n in range(8))]
    for order in (states, states[::-1]):
        stream = written(layout, TEXT, order, groups, fixed_key=False)
        source = opened(savepoint(tmp_path / "s", stream, 3, groups))
        assert shown(table_of(source, "texts").to_pylist()) == shown(expected(states[0]))


@pytest.mark.parametrize(
    ("layout", "groups"), [*((layout, 128) for layout in CODES), ("canonical", 300), ("heap", 300)]
)
@pytest.mark.parametrize(("key", "fixed"), [(LONG, True), (TEXT, False)], ids=["long keys", "string keys"])
def test_every_layout_gives_every_kind_of_state_back(layout, key, fixed, groups):
    @FEW
    @given(states=drawn(key))
    def check(states):
        with tempfile.TemporaryDirectory() as folder:
            stream = written(layout, key, states, groups, fixed_key=fixed)
            source = opened(savepoint(Path(folder) / "s", stream, CODES[layout], groups))
            assert {note.kind for note in source.notes} == set()
            for state in states:
                assert shown(table_of(source, state.name).to_pylist()) == shown(expected(state))

    check()


@LAYOUTS
def test_what_users_do_not_name_has_names_of_ours(layout, tmp_path):
    entries = [(5, 1, None, 2), (5, 2, None, 3), (90, 3, None, 4)]
    states = [State("counts", "value", INT, entries=entries)]
    source = opened(savepoint(tmp_path / "s", written(layout, LONG, states, 128, fixed_key=True), CODES[layout], 128))
    (state,) = source.record.states
    assert (state.kind, state.key_columns) == (StateKind.VALUE, ("key",))
    assert source.record.graph.operator("op").key_hash == FLINK_KEY_HASH
    (part,) = source.parts
    assert (part.first_group, part.last_group, part.path, part.rows) == (0, 127, "stream", None)
    assert [row["value"] for batch in source.read(part, 5, 89) for row in batch.to_pylist()] == [2, 3]


KRYO = versioned(
    "org.apache.flink.api.java.typeutils.runtime.kryo.KryoSerializerSnapshot",
    2,
    b"\0\x0bexample.Odd" + 3 * pack("qi", 0x4F2C69A3D70, 0),
)
ODD = Kind("kryo", KRYO, some.binary(), lambda value: value)
ADAPTED = (
    # A serializer as Java writes objects, behind its length, and the version of its own.
    versioned("example.OwnSerializer$LegacySnapshot", 0x7A53C4F0, pack("ii", 1, 5) + b"bytes" + pack("i", 1))
)
"""What Flink makes of a snapshot from before Flink 1.7, as Beam's are."""
CUSTOM = versioned("example.OwnSerializer$Snapshot", 1, b"whatever it wrote")


def opaque_states() -> list[State]:
    return [
        State("plain", "value", DOUBLE, entries=[(1, 7, None, 0.5), (2, 8, None, 1.5)]),
        State("odd", "value", ODD, entries=[(1, 7, None, b"\xff,\0"), (2, 8, None, b"")]),
        State("odd-map", "map", ODD, TEXT, entries=[(1, 7, None, ("a", b"x")), (1, 7, None, ("b", None))]),
        State("odd-list", "list", ODD, entries=[(2, 8, None, [b"x", b"y,z"])]),
        State("odd-window", "value", ODD, namespace=WINDOW_KIND, entries=[(2, 8, (5, 9), b"z")]),
    ]


@pytest.mark.parametrize("layout", ["canonical", "canonical, compressed"])
def test_opaque_values_are_kept_where_they_are_framed(layout, tmp_path):
    stream = written(layout, LONG, opaque_states(), 128, fixed_key=True)
    source = opened(savepoint(tmp_path / "s", stream, 7, 128))
    assert {note.subject for note in source.notes if note.kind == "opaque"} == {
        f"op/odd{kind}" for kind in ("", "-map", "-list", "-window")
    }
    assert all("example.Odd" in note.message or "commas" in note.message for note in source.notes)
    assert table_of(source, "plain")["value"].to_pylist() == [0.5, 1.5]
    assert table_of(source, "odd")["value"].to_pylist() == [b"\xff,\0", b""]
    assert table_of(source, "odd-map").select(["_map_key", "value"]).to_pylist() == [
        {"_map_key": "a", "value": b"x"},
        {"_map_key": "b", "value": None},
    ]
    assert table_of(source, "odd-list")["value"].to_pylist() == [b"x,y,z"]
    assert table_of(source, "odd-window").select(["_map_key", "value"]).to_pylist() == [
        {"_map_key": {"window_start": 5, "window_end": 9}, "value": b"z"}
    ]


def test_a_heap_with_opaque_values_is_refused_as_a_whole_and_compressed_state_by_state(tmp_path):
    stream = heap(LONG, opaque_states(), 128, compressed=False)
    source = opened(savepoint(tmp_path / "plain", stream, 3, 128))
    assert source.record.states == ()
    assert {note.subject for note in source.notes if note.kind == "refused"} == {
        f"op/{state.name}" for state in opaque_states()
    }
    assert all("--type canonical" in note.message for note in source.notes)
    stream = heap(LONG, opaque_states(), 128, compressed=True)
    source = opened(savepoint(tmp_path / "compressed", stream, 3, 128))
    assert [state.name for state in source.record.states] == ["plain"]
    assert table_of(source, "plain")["value"].to_pylist() == [0.5, 1.5]


@pytest.mark.parametrize("layout", ["canonical", "canonical, compressed"])
def test_opaque_keys_are_kept_as_bytes(layout, tmp_path):
    key = Kind("kryo", KRYO, some.binary(), lambda value: value)
    states = [
        State("value", "value", LONG, entries=[(1, b"k1", None, 10), (2, b"", None, 20)]),
        State("window", "value", LONG, namespace=WINDOW_KIND, entries=[(1, b"k1", (5, 9), 30)]),
        State("map", "map", LONG, TEXT, entries=[(1, b"k1", None, ("a", 40))]),
        State("_timer_state/event_t", "timers", entries=[(1, b"k1", None, 50)]),
    ]
    source = opened(savepoint(tmp_path / "s", written(layout, key, states, 128, fixed_key=False), 7, 128))
    assert source.record.graph.operator("op").key_hash == USER_KEY_HASH
    assert table_of(source, "value").select(["key", "value"]).to_pylist() == [
        {"key": b"k1", "value": 10},
        {"key": b"", "value": 20},
    ]
    assert table_of(source, "window").select(["key", "_map_key", "value"]).to_pylist() == [
        {"key": b"k1", "_map_key": {"window_start": 5, "window_end": 9}, "value": 30}
    ]
    # The key, the byte of no namespace, and the map's key, which nobody can tell apart.
    assert table_of(source, "map").select(["key", "value"]).to_pylist() == [{"key": b"k1\0\x02a", "value": 40}]
    (timer,) = table_of(source, "_timer_state/event_t").to_pylist()
    assert (timer["_timestamp"], timer["key"][:2]) == (50_000, b"k1")


LISTS = Kind(
    "list of ints",
    composite(f"{BASE}ListSerializerSnapshot", [INT.snapshot]),
    some.lists(INT.values),
    lambda items: pack("i", len(items)) + b"".join(map(INT.write, items)),
)


@LAYOUTS
def test_map_keys_that_cannot_be_ours_are_kept_as_bytes(layout, tmp_path):
    entries = [(1, 7, None, ([1, 2], "a")), (1, 7, None, ([], None)), (2, 8, None, ([3], "b"))]
    spaced = [(1, 7, (5, 9), ([1], "a")), (1, 7, (6, 9), ([1], "b"))]
    states = [
        State("plain", "map", NULL_TEXT, LISTS, entries=entries),
        State("spaced", "map", NULL_TEXT, LISTS, WINDOW_KIND, entries=spaced),
    ]
    source = opened(savepoint(tmp_path / "s", written(layout, LONG, states, 128, fixed_key=True), CODES[layout], 128))
    assert {(note.kind, note.subject) for note in source.notes} == {("opaque", "op/plain"), ("opaque", "op/spaced")}
    found = table_of(source, "plain").select(["key", "_map_key", "value"]).to_pylist()
    assert found == [{"key": key, "_map_key": LISTS.write(own), "value": value} for _, key, _, (own, value) in entries]
    found = table_of(source, "spaced").select(["_map_key", "value"]).to_pylist()
    assert found == [
        {"_map_key": WINDOW_KIND.write(space) + LISTS.write(own), "value": value}
        for _, _, space, (own, value) in spaced
    ]


@LAYOUTS
def test_keys_that_cannot_be_ours_are_kept_as_bytes(layout, tmp_path):
    states = [
        State("value", "value", LONG, entries=[(1, [1, 2], None, 5), (2, [], None, 6)]),
        State("spaced", "list", TEXT, namespace=TEXT, fixed=False, entries=[(1, [1, 2], "x", ["a", ","])]),
        State("_timer_state/processing_t", "timers", entries=[(2, [9], None, 4)]),
    ]
    source = opened(savepoint(tmp_path / "s", written(layout, LISTS, states, 128, fixed_key=False), CODES[layout], 128))
    assert source.record.graph.operator("op").key_hash == USER_KEY_HASH
    found = table_of(source, "value").select(["key", "value"]).to_pylist()
    assert found == [{"key": LISTS.write([1, 2]), "value": 5}, {"key": LISTS.write([]), "value": 6}]
    (row,) = table_of(source, "spaced").to_pylist()
    assert row == {"_key_group": 1, "key": LISTS.write([1, 2]), "_map_key": "x", "value": ["a", ","]}
    (timer,) = table_of(source, "_timer_state/processing_t").to_pylist()
    assert (timer["key"], timer["_timestamp"], timer["_tag"]) == (LISTS.write([9]), 4000, "processing/t")
    assert source.record.state("op", "_timer_state/processing_t").clock == "processing_time"
    found = list(check_source(source, "full", lambda done, total: None))
    assert [(item.severity, item.operator) for item in found] == [("warning", "op")]


@pytest.mark.parametrize("layout", ["canonical", "canonical, compressed"])
def test_opaque_namespaces_are_kept_as_bytes(layout, tmp_path):
    odd = Kind("kryo", KRYO, some.binary(), lambda value: value)
    states = [
        State("value", "value", LONG, namespace=odd, entries=[(1, 7, b"space", 5)]),
        State("list", "list", TEXT, namespace=odd, entries=[(1, 7, b"space", ["a", "b"])]),
        State("map", "map", TEXT, INT, odd, entries=[(1, 7, b"space", (3, "v"))]),
        State("_timer_state/event_t", "timers", namespace=odd, entries=[(1, 7, b"\x0f\xa0", 4)]),
    ]
    source = opened(savepoint(tmp_path / "s", written(layout, LONG, states, 128, fixed_key=True), 7, 128))
    rows = {name: table_of(source, name).to_pylist() for name in ("value", "list", "map", "_timer_state/event_t")}
    assert [(row["_map_key"], row["value"]) for row in rows["value"]] == [(b"space", 5)]
    assert [(row["_map_key"], row["value"]) for row in rows["list"]] == [(b"space", ["a", "b"])]
    assert [(row["_map_key"], row["value"]) for row in rows["map"]] == [(b"space\0\0\0\3", "v")]
    assert [(row["_tag"], row["key"]) for row in rows["_timer_state/event_t"]] == [("event/t/0fa0", 7)]


def test_states_behind_an_unknown_class_are_refused_by_name_and_those_before_it_read(tmp_path):
    states = [
        State("before", "value", LONG, entries=[(1, 7, None, 10)]),
        State("own", "value", ODD, snapshot=CUSTOM, entries=[(1, 7, None, b"abc")]),
        State("behind", "value", LONG, entries=[(1, 7, None, 30)]),
    ]
    source = opened(savepoint(tmp_path / "s", canonical(LONG, states, 128, fixed_key=True, compressed=False), 7, 128))
    assert [state.name for state in source.record.states] == ["before", "own"]
    assert table_of(source, "before")["value"].to_pylist() == [10]
    assert table_of(source, "own")["value"].to_pylist() == [b"abc"]
    (refused,) = [note for note in source.notes if note.kind == "refused"]
    assert refused.subject == "op/keyed-states-without-names"
    assert "at least 1, in " in refused.message
    assert "example.OwnSerializer$Snapshot" in refused.message
    source = opened(savepoint(tmp_path / "heap", heap(LONG, states, 128, compressed=False), 3, 128))
    assert source.record.states == ()


@pytest.mark.parametrize(
    ("kind", "entries", "change", "message"),
    [
        (LONG, [1, 2, 3], (b"\0\0\0\0\0\0\0\2", b"\0\0\0\0\0\0\0\2\0"), "3 state|list of|key group"),
        (LONG, [1, 2, 3], (b",\0\0\0\0\0\0\0\2", b";\0\0\0\0\0\0\0\2"), "joined by commas"),
        (TEXT, ["a", "bc"], (b",\3bc", b";\3bc"), "where a comma joins"),
    ],
)
def test_lists_that_are_not_joined_by_commas_are_damage(kind, entries, change, message, tmp_path):
    states = [State("items", "list", kind, entries=[(1, 7, None, entries)])]
    data, offsets = canonical(LONG, states, 128, fixed_key=True, compressed=False)
    assert change[0] in data
    source = opened(savepoint(tmp_path / "s", (data.replace(*change), offsets), 7, 128))
    with pytest.raises(DamagedCheckpoint, match=message):
        table_of(source, "items")


def test_lengths_behind_keys_are_compared(tmp_path):
    states = [State("value", "value", LONG, namespace=TEXT, fixed=False, entries=[(1, "abc", "space", 5)])]
    data, offsets = canonical(TEXT, states, 128, fixed_key=False, compressed=False)
    assert table_of(opened(savepoint(tmp_path / "s", (data, offsets), 7, 128)), "value").num_rows == 1
    broken = data.replace(b"\4abc\4", b"\4abc\5")
    with pytest.raises(DamagedCheckpoint, match="the length behind it is another"):
        table_of(opened(savepoint(tmp_path / "t", (broken, offsets), 7, 128)), "value")


def test_timers_beyond_our_clock_stay_at_its_ends(tmp_path):
    moments = [-(1 << 63), -(1 << 62), 0, (1 << 63) - 1]
    states = [
        State("_timer_state/event_t", "timers", entries=[(1, number, None, at) for number, at in enumerate(moments)])
    ]
    stream = canonical(LONG, states, 128, fixed_key=True, compressed=False)
    found = table_of(opened(savepoint(tmp_path / "s", stream, 7, 128)), "_timer_state/event_t")
    assert found["_timestamp"].to_pylist() == [-(1 << 63), -(1 << 63), 0, (1 << 63) - 1]


def test_operator_state_of_the_name_of_a_keyed_one_gets_a_name_of_its_own(tmp_path):
    states = [State("same", "value", LONG, entries=[(1, 7, None, 10)])]
    folder = savepoint(tmp_path / "s", canonical(LONG, states, 128, fixed_key=True, compressed=False), 7, 128)
    head = pack("i", 5) + pack("H", 1) + utf("same") + pack("ii", 1, 1)
    head += utf("OPERATOR_STATE_DISTRIBUTION_MODE") + utf("SPLIT_DISTRIBUTE") + pack("i", 1)
    head += utf("VALUE_SERIALIZER") + top(TEXT.snapshot) + pack("H", 0)
    offsets = np.array([len(head), len(head) + 3], np.int64)
    stream = Inline("x", head + TEXT.write("ab") + TEXT.write("c"))
    old = decode_metadata((folder / "_metadata").read_bytes())
    (saved,) = old.operators
    handle = OperatorStates((OperatorPartitions("same", 0, offsets),), stream)
    subtask = replace(saved.subtasks[0], managed_operator=handle)
    operator = replace(saved, subtasks=(subtask,), coordinator=Inline("c", b"of all"))
    (folder / "_metadata").write_bytes(encode_metadata(replace(old, operators=(operator,))))
    source = opened(folder)
    assert [(note.kind, note.subject) for note in source.notes] == [("renamed", "op/same_2")]
    assert table_of(source, "same")["value"].to_pylist() == [10]
    parts = {part.state: part for part in source.parts}
    assert [row["value"] for batch in source.read(parts["same_2"]) for row in batch.to_pylist()] == ["ab", "c"]
    assert source.group_rows(parts["same_2"]) == parts["same_2"].rows == 2
    assert [batch["value"].to_pylist() for batch in source.read(parts["coordinator"])] == [[b"of all"]]


@LAYOUTS
@pytest.mark.parametrize("unknown", ["key", "value"])
def test_nothing_that_was_not_understood_is_called_damaged(unknown, layout, tmp_path):
    for number, snapshot in enumerate((KRYO, CUSTOM, ADAPTED, ADAPTED + b"more of its own")):
        own = Kind("own", snapshot, some.binary(), lambda value: value)
        key, value = (own, LONG) if unknown == "key" else (LONG, own)
        entry = (113, b"key" if unknown == "key" else 7, None, 10 if unknown == "key" else b"abc")
        states = [
            State("before", "value", TEXT, entries=[(*entry[:3], "x")]),
            State("own", "value", value, entries=[entry]),
            State("behind", "value", TEXT, entries=[(*entry[:3], "y")]),
        ]
        stream = written(layout, key, states, 128, fixed_key=unknown == "value")
        source = opened(savepoint(tmp_path / f"s{number}", stream, CODES[layout], 128))
        problems = [*check_source(source, "full", lambda done, total: None)]
        assert {problem.kind for problem in problems} <= {"unsupported_feature", "unknown_key_hash"}
        told = [*source.notes, *problems]
        assert any("Odd" in one.message or "Own" in one.message for one in told), told
        assert not any("bytes: unknown" in one.message or "$example" in one.message for one in told), told
        known = {state.name for state in source.record.states}
        framed = layout.startswith("canonical") or (layout == "heap, compressed" and unknown == "value")
        if framed and snapshot in (KRYO, ADAPTED):
            assert known >= {"before", "behind"}
        for name in {"before", "behind"} & known:
            assert table_of(source, name)["value"].to_pylist() == ["x" if name == "before" else "y"]


def test_a_key_of_an_unknown_class_refuses_all_keyed_state_of_the_operator(tmp_path):
    key = Kind("own", CUSTOM, some.binary(), lambda value: value)
    states = [State("value", "value", LONG, entries=[(1, b"k", None, 10)])]
    stream = canonical(key, states, 128, fixed_key=False, compressed=False)
    source = opened(savepoint(tmp_path / "s", stream, 7, 128))
    assert source.record.states == ()
    (note,) = source.notes
    assert (note.kind, note.subject) == ("refused", "op/keyed-states-without-names")
    assert "example.OwnSerializer$Snapshot" in note.message


@pytest.mark.parametrize("change", ["equal", "behind the end", "negative", "in the header"])
def test_key_groups_that_cannot_begin_where_the_metadata_says_are_damage(change, tmp_path):
    entries = [(group, group, None, 10) for group in (1, 2, 3)]
    states = [State("value", "value", LONG, entries=entries)]
    data, offsets = canonical(LONG, states, 128, fixed_key=True, compressed=False)
    offsets[2] = {"equal": offsets[1], "behind the end": len(data) + 1, "negative": -5, "in the header": 7}[change]
    source = opened(savepoint(tmp_path / "s", (data, offsets), 7, 128))
    with pytest.raises(DamagedCheckpoint):
        table_of(source, "value")
    assert any(item.severity == "error" for item in check_source(source, "full", lambda done, total: None))


@LAYOUTS
def test_states_that_share_a_stream_are_read_apart_and_by_ranges_of_bytes(layout, tmp_path, monkeypatch):
    monkeypatch.setattr("stateformat.backends.foreign.flink.keyed.RANGE_BYTES", 64)
    many = [
        (group, group * 1000 + number, None, f"{number}" * (number % 5)) for group in range(128) for number in range(4)
    ]
    states = [
        State("texts", "value", TEXT, entries=many),
        State("few", "value", TEXT, entries=many[::37]),
        State("none", "value", TEXT),
    ]
    source = opened(savepoint(tmp_path / "s", written(layout, LONG, states, 128, fixed_key=True), CODES[layout], 128))
    for state in states:
        assert shown(table_of(source, state.name).to_pylist()) == shown(expected(state))


# ---- the tables of a subtask of Flink, as entries by key groups: against a model in a dict

GROUPS = range(40, 60)


@dataclass(frozen=True)
class Slices:
    octets: bytes

    def __call__(self, at: int, length: int) -> bytes:
        return self.octets[at : at + length]


def database(files: list[bytes], prefix: int, first: int = GROUPS[0], last: int = GROUPS[-1]) -> Database:
    sources = [TableSource(f"{number:06}.sst", len(octets), Slices(octets)) for number, octets in enumerate(files)]
    return open_database(sources, prefix, first, last)


def records(prefix: int, groups: range) -> list[Record]:
    rng = random.Random(prefix)
    found = []
    for sequence in range(1, 600):
        group = rng.choice(groups)
        key = group.to_bytes(prefix, "big") + b"key-%d" % rng.randrange(12)
        kind = rng.choice([PUT, MERGE, MERGE, DELETE])
        found.append((key, sequence, kind, b"" if kind == DELETE else b"%d" % sequence))
    return found


def contents(some: Database, state: str, first: int | None = None, last: int | None = None) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for entries in some.entries(state, first, last):
        keys = entries.keys.to_arrow().to_pylist()
        assert entries.groups.tolist() == [int.from_bytes(key[: some.prefix], "big") for key in keys]
        assert not found or max(found) < min(keys)
        found |= dict(zip(keys, entries.values.to_arrow().to_pylist(), strict=True))
    return found


@pytest.mark.parametrize("prefix", [1, 2])
@pytest.mark.parametrize("budget", [1, 2000, 1 << 24])
def test_entries_come_by_key_group_and_only_those_of_the_handle(
    prefix: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "BLOCKS_BYTES", budget)
    # Files of a rescaled operator hold foreign key groups too.
    mine = records(prefix, range(30, 70))
    other = records(prefix, GROUPS)
    files = [table(mine[part::3], family="counts", per_block=5) for part in range(3)]
    files += [table(other, family="other state")]
    some = database(files, prefix)
    want = {key: value for key, value in model(mine).items() if int.from_bytes(key[:prefix], "big") in GROUPS}
    assert contents(some, "counts") == want
    assert contents(some, "other state") == model(other)
    assert contents(some, "no such state") == {}
    part = {key: value for key, value in want.items() if 45 <= int.from_bytes(key[:prefix], "big") <= 50}
    assert contents(some, "counts", 45, 50) == part
    some.verify()


def test_what_lies_outside_of_the_handle_by_range_deletions_is_not_read() -> None:
    # As Flink 2 clips a restored database to its key groups.
    every = records(1, range(30, 70))
    stones = [(bytes([0]), bytes([GROUPS[0]]), 9001), (bytes([GROUPS[-1] + 1]), bytes([128]), 9002)]
    some = database([table(every, family="s"), table([], family="s", ranges=stones)], 1, 0, 127)
    want = {key: value for key, value in model(every).items() if key[0] in GROUPS}
    assert contents(some, "s") == want


def test_the_last_key_group_of_all_is_read() -> None:
    every = [(group.to_bytes(2, "big") + b"k", group, PUT, b"v") for group in (0, 255, 256, 32767)]
    some = database([table(every, family="s")], 2, 0, 32767)
    assert contents(some, "s") == model(every)
    assert contents(some, "s", 32767, 32767) == {b"\x7f\xffk": b"v"}


def test_wrong_numbers_are_found_by_verify() -> None:
    some = database([table(records(1, GROUPS), family="s", says={"merge.operands": 1})], 1)
    with pytest.raises(DamagedCheckpoint, match="merge operands, its properties say 1"):
        some.verify()


def test_values_merged_by_something_else_are_refused() -> None:
    octets = table(records(1, GROUPS), family="s", merge="MaxOperator")
    with pytest.raises(UnsupportedFormat, match="merged by MaxOperator"):
        contents(database([octets], 1), "s")


# ---- Flink's ``_metadata``: what stands in it, and what becomes of every cut and flipped bit

# Written from the table of the layout, not from the decoder: plain concatenation.
b1, b2, b4, b8 = (lambda value, size=size: value.to_bytes(size, "big", signed=value < 0) for size in (1, 2, 4, 8))


def text_of(text: str) -> bytes:
    return b2(len(text)) + text.encode("ascii")


def blob(data: bytes) -> bytes:
    return b4(len(data)) + data


NULL = b"\0"
INLINE = b1(1) + text_of("inline-1") + blob(b"bytes")
FILE = b1(2) + b8(1000) + text_of("s3://bucket/job/chk-7/a")
RELATIVE = b1(6) + text_of("b-file") + b8(2000)
SEGMENT = b1(15) + b8(10) + b8(20) + b4(1) + text_of("file:/tmp/merged") + text_of("logical")
EMPTY = b1(16)


def key_groups(code: int, stream: bytes, offsets: list[int], first: int = 0) -> bytes:
    ending = text_of("handle") if code == 12 else b""
    return b1(code) + b4(first) + b4(len(offsets)) + b"".join(map(b8, offsets)) + stream + ending


def incremental(code: int) -> bytes:
    files = b4(2) + text_of("000012.sst") + FILE + text_of("000013.sst") + RELATIVE
    size, ending = (b8(77), text_of("handle")) if code == 11 else (b"", b"")
    return (
        b1(code)
        + b8(7)
        + text_of("backend")
        + b4(0)
        + b4(4)
        + size
        + INLINE
        + files
        + b4(1)
        + text_of("CURRENT")
        + EMPTY
        + ending
    )


def changelog(code: int) -> bytes:
    in_bytes = b1(9) + b4(0) + b4(4) + b8(1) + b8(2) + b4(1) + b4(-1) + blob(b"change") + text_of("id")
    old = b1(10) + b4(0) + b4(4) + b4(1) + b8(3) + FILE + b8(4) + b8(5) + text_of("id")
    new = b1(13) + old[1:] + text_of("filesystem")
    materialized = b4(1) + key_groups(12, RELATIVE, [5, 6, 7, 8])
    ending = b8(9) + (b8(8) if code == 14 else b"") + text_of("id")
    return b1(code) + b4(0) + b4(4) + b8(6) + materialized + b4(3) + in_bytes + old + new + ending


def operator_state(code: int) -> bytes:
    states = b4(2) + text_of("offsets") + b1(1) + b4(2) + b8(40) + b8(50) + text_of("rules") + b1(2) + b4(0)
    folders = text_of("file:/owned") + text_of("file:/shared") + b1(0) if code == 17 else b""
    return b4(1) + b1(code) + states + folders + (SEGMENT if code == 17 else RELATIVE)


def channels(version: int) -> bytes:
    one = b4(1) + b4(2) + b4(3) + b4(2) + b8(10) + b8(20) + b8(30) + INLINE
    if version < 3:
        return b""
    if version < 6:
        return b4(1) + one + b4(0)
    return b4(2) + b1(1) + one + b1(3) + b4(1) + b8(9) + FILE + blob(b"offsets") + b4(1) + b1(2) + one


def subtask(version: int, index: int, *, operator: bytes = b4(0), keyed: bytes = NULL) -> bytes:
    old = b8(-1) + b4(0) if version == 2 else b""
    return b4(index) + old + operator + b4(0) + keyed + NULL + channels(version)


def operator(version: int, number: int, subtasks: list[bytes], *, finished: bool = False) -> bytes:
    names = text_of("Map") + text_of(f"uid-{number}" if number else "") if version >= 5 else b""
    middle = b4(1) if version == 2 else NULL if finished else INLINE
    listed = b4(-1) if finished else b4(len(subtasks)) + b"".join(subtasks)
    return names + bytes([number] * 16) + b4(4) + b4(128) + middle + listed


def metadata(version: int) -> bytes:
    keyed = [key_groups(3, RELATIVE, [1, 2]), incremental(5)]
    operators = [
        operator(version, 1, [subtask(version, i, keyed=found) for i, found in enumerate(keyed)]),
        operator(version, 2, [subtask(version, 3, operator=operator_state(4))]),
    ]
    if version >= 3:
        newer = [key_groups(CANONICAL, RELATIVE, [0, 90]), key_groups(12, FILE, [1]), incremental(11), changelog(14)]
        operators.append(operator(version, 3, [subtask(version, i, keyed=found) for i, found in enumerate(newer)]))
        merged = [subtask(version, 0, operator=operator_state(17)), subtask(version, 1, keyed=changelog(8)), b4(-4)]
        operators.append(operator(version, 0, merged))
        operators.append(operator(version, 5, [], finished=True))
    master = b4(3) + text_of("hook") + blob(b"state")
    masters = b4(1) + bytes.fromhex("c96b1696") + blob(master)
    properties = b"\xac\xed\0\5properties" if version >= 4 else b""
    return (
        bytes.fromhex("4960672d")
        + b4(version)
        + b8(42)
        + masters
        + b4(len(operators))
        + b"".join(operators)
        + properties
    )


VERSIONS = pytest.mark.parametrize("version", [2, 3, 4, 5, 6])


@VERSIONS
def test_what_was_decoded_is_encoded_to_the_same_bytes(version: int) -> None:
    assert encode_metadata(decode_metadata(metadata(version))) == metadata(version)


@VERSIONS
def test_operators_and_subtasks_are_found(version: int) -> None:
    found = decode_metadata(metadata(version))
    assert (found.version, found.checkpoint_id) == (version, 42)
    assert [(state.name, state.version, state.data) for state in found.master_states] == [("hook", 3, b"state")]
    assert found.properties == (b"\xac\xed\0\5properties" if version >= 4 else b"")
    first = found.operators[0]
    assert first.id == b"\1" * 16
    assert (first.parallelism, first.max_parallelism) == (4, 128)
    assert (first.name, first.uid) == (("Map", "uid-1") if version >= 5 else (None, None))
    assert [subtask.index for subtask in first.subtasks] == [0, 1]
    assert first.coordinator == (Inline("inline-1", b"bytes") if version >= 3 else None)


def test_every_handle_of_keyed_state_is_found() -> None:
    old, new = decode_metadata(metadata(6)).operators[0].subtasks, decode_metadata(metadata(6)).operators[2].subtasks
    heap, rocks = old[0].managed_keyed, old[1].managed_keyed
    assert isinstance(heap, KeyGroups)
    assert (heap.code, heap.offsets.tolist()) == (3, [1, 2])
    assert isinstance(rocks, Incremental)
    assert rocks.meta == Inline("inline-1", b"bytes")
    assert rocks.shared == (
        ("000012.sst", File("s3://bucket/job/chk-7/a", 1000)),
        ("000013.sst", Relative("b-file", 2000)),
    )
    assert rocks.private == (("CURRENT", EmptySegment()),)
    assert rocks.size == 3005
    canonical, heap, newer, changes = (subtask.managed_keyed for subtask in new)
    assert isinstance(canonical, KeyGroups)
    assert canonical.code == CANONICAL
    assert canonical.stream == Relative("b-file", 2000)
    assert isinstance(heap, KeyGroups)
    assert heap.handle_id == "handle"
    assert isinstance(newer, Incremental)
    assert (newer.checkpointed_size, newer.handle_id) == (77, "handle")
    assert isinstance(changes, Changelog)
    assert len(changes.materialized) == 1
    assert len(changes.changes) == 3


def test_operator_state_and_statuses_are_found() -> None:
    found = decode_metadata(metadata(6))
    states = found.operators[1].subtasks[0].managed_operator
    assert states is not None
    assert [(state.name, state.mode, state.offsets.tolist()) for state in states.states] == [
        ("offsets", 1, [40, 50]),
        ("rules", 2, []),
    ]
    merged = found.operators[3].subtasks
    assert merged[0].managed_operator is not None
    assert merged[0].managed_operator.stream == Segment("file:/tmp/merged", 10, 20, 1, "logical")
    assert [(subtask.index, subtask.finished) for subtask in merged] == [(0, False), (1, False), (3, True)]
    assert found.operators[4].fully_finished
    assert not found.operators[4].subtasks


def test_channel_state_is_found() -> None:
    inputs = decode_metadata(metadata(6)).operators[0].subtasks[0].inputs
    assert [(channel.code, channel.channel, channel.merged) for channel in inputs] == [
        (1, (2, 3), None),
        (3, None, b"offsets"),
    ]


@VERSIONS
def test_truncations_are_named(version: int) -> None:
    whole = metadata(version)
    properties = len(b"\xac\xed\0\5properties") if version >= 4 else 0
    for size in range(0, len(whole) - properties, 1 if version in (2, 6) else 7):
        with pytest.raises(DamagedCheckpoint) as caught:
            decode_metadata(whole[:size], "sp/_metadata")
        assert caught.value.details["path"] == "sp/_metadata"
        assert caught.value.kind is ErrorKind.DAMAGED_RECORD


@VERSIONS
def test_a_flipped_bit_in_every_byte_is_named_or_read_as_what_it_says(version: int) -> None:
    whole = metadata(version)
    named = 0
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at * 5 & 7)
        try:
            found = decode_metadata(bytes(flipped))
        except CheckpointError:
            named += 1
        else:
            assert encode_metadata(found) == flipped
    assert named > len(whole) // 4


def sized(count: int) -> Callable[[bytes], bytes]:
    """Put ``count`` where the number of operators stands in an empty file."""
    return lambda empty: empty[:-4] + struct.pack(">i", count)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (sized(2**31 - 1), "2147483647 operators should follow in 0 bytes"),
        (sized(-1), "-1 operators should follow"),
        (lambda empty: b"", "it is empty: Flink did not complete this checkpoint"),
        (lambda empty: empty + b"x", "should end here, and 1 bytes are left"),
        (lambda empty: empty[:8] + b8(-5) + empty[16:], "the checkpoint's id is -5"),
    ],
)
def test_what_cannot_be_is_named(change: Callable[[bytes], bytes], said: str) -> None:
    empty = bytes.fromhex("4960672d") + b4(3) + b8(1) + b4(0) + b4(0)
    assert decode_metadata(empty).operators == ()
    with pytest.raises(DamagedCheckpoint, match=said):
        decode_metadata(change(empty))


def test_another_file_is_not_called_damaged() -> None:
    with pytest.raises(UnsupportedFormat, match="begins with 50 4b 03 04, and Flink's metadata with 49 60 67 2d"):
        decode_metadata(b"PK\3\4" + metadata(6)[4:])


@pytest.mark.parametrize("version", [0, 1, 7, -1])
def test_other_versions_are_refused(version: int) -> None:
    with pytest.raises(UnsupportedFormat, match=f"metadata of version {version} is not known"):
        decode_metadata(bytes.fromhex("4960672d") + b4(version) + metadata(6)[8:])


def test_handles_in_handles_have_a_limit() -> None:
    stream = RELATIVE
    for _ in range(5000):
        stream = b1(3) + b4(0) + b4(0) + stream
    data = bytes.fromhex("4960672d") + b4(3) + b8(1) + b4(0) + b4(1)
    data += operator(3, 1, [subtask(3, 0, keyed=key_groups(3, stream, [1]))])
    with pytest.raises(UnsupportedFormat, match="33 levels, and at most 32"):
        decode_metadata(data)


def test_messages_and_docs_name_the_same_versions() -> None:
    docs = Path(__file__).parents[2] / "docs" / "foreign.md"
    assert f"\n| | {FLINK_VERSIONS} | {SPARK_VERSIONS} |\n" in docs.read_text(encoding="utf-8")
    with pytest.raises(UnsupportedFormat, match=rf"\({FLINK_VERSIONS}\)"):
        decode_metadata(struct.pack(">iiq", 0x4960672D, 99, 1))
    with pytest.raises(UnsupportedFormat, match=rf"\({FLINK_VERSIONS}\)"):
        read_keyed_header(struct.pack(">i", 99), "stream")
