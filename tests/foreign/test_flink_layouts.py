"""Keyed state of every kind, written by hand in both layouts, comes back as it was."""

from __future__ import annotations

import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from flink_streams import WINDOW, State, Stream, canonical, heap, savepoint
from flink_written import BASE, DOUBLE, INT, LONG, NULL_TEXT, TEXT, Kind, composite, pack, top, utf, versioned
from hypothesis import given, settings, strategies as some

from stateformat.backends.foreign.flink import FLINK_KEY_HASH, USER_KEY_HASH, FlinkSource
from stateformat.backends.foreign.flink.metadata import (
    Inline,
    OperatorPartitions,
    OperatorStates,
    decode_metadata,
    encode_metadata,
)
from stateformat.errors import DamagedCheckpoint
from stateformat.model import Kind as StateKind
from stateformat.storage import folder_of, open_storage

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
    found = folder_of(open_storage(str(folder)))
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
    found = list(source.check("full", lambda done, total: None))
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
        problems = [*source.check("full", lambda done, total: None)]
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
    assert any(item.severity == "error" for item in source.check("full", lambda done, total: None))


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
