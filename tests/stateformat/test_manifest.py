"""The manifest: identity of encode and decode, every rule of SPEC.md section 4, damage, cutting,
sorting.

What plans need of a manifest is what the whole of it says, whatever its row groups are.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

import stateformat as sf
from stateformat.backends.rewrite import publish_rescaled
from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.manifest import (
    Manifest,
    codec as manifest_module,
    cut_handles,
    decode_columns,
    decode_manifest,
    decode_outline,
    encode_manifest,
    handles_table,
    manifest_ref,
    sort_handles,
    spill_inline,
    totals,
)
from stateformat.manifest.codec import PLANNING_SCHEMA
from stateformat.model import Handle, ManifestRef, Totals
from stateformat.redistribution import plan_restore
from stateformat.schema import MANIFEST_SCHEMA, PLANNING_COLUMNS, SLICE_SCHEMA
from stateformat.states import broadcast_state, even_split_state, in_flight_state, union_state, value_state
from stateformat.storage import check_path

PATH = "manifests/00000000000000000001-a.parquet"


def keyed(subtask: int = 0, counts: tuple[int, ...] = (2, 0, 3), first: int = 0, **changes: Any) -> Handle:
    """A handle of a keyed state with these rows per group."""
    rows = sum(counts)
    handle = Handle(
        "count",
        "counts",
        "keyed",
        subtask,
        0,
        None,
        1,
        f"segments/00000000000000000001/s{subtask}-{first}.parquet",
        rows=rows,
        segment_rows=rows,
        size_bytes=5000,
        uncompressed_bytes=6000,
        footer_bytes=800,
        digest=bytes([subtask % 256] * 16),
        footer_digest=b"f" * 16,
        first_group=first,
        last_group=first + len(counts) - 1,
        rows_per_group=list(counts),
    )
    return handle._replace(**changes)


def plain(mode: str, subtask: int | None = 0, rows: int = 7, **changes: Any) -> Handle:
    """A handle of a state without groups."""
    handle = keyed(0)._replace(
        operator="other",
        state=mode,
        mode=mode,
        subtask=subtask,
        rows=rows,
        segment_rows=rows,
        first_group=None,
        last_group=None,
        rows_per_group=None,
        path=f"segments/00000000000000000001/{mode}{subtask}",
    )
    return handle._replace(**changes)


def nothing(**changes: Any) -> Handle:
    return Handle("count", "counts", "keyed", 0, 0, None, 1)._replace(**changes)


def round_trip(table: pa.Table) -> Manifest:
    data = encode_manifest(table)
    return decode_manifest(data, manifest_ref(PATH, data))


SOME = [
    keyed(0, inline=b"x" * 100, size_bytes=100, footer_bytes=50),
    keyed(1),
    keyed(1, layer=1, path="segments/1/d"),
    nothing(subtask=2),
    plain("coordinator", None),
    plain("even_split", 0),
    plain("in_flight", 3, edge="e1", first_group=4, last_group=4, rows_per_group=[7]),
]


# ---- identity ------------------------------------------------------------------------------------


def test_decode_gives_back_what_encode_was_given() -> None:
    table = handles_table(SOME)
    found = round_trip(table)
    assert found.handles.schema == table.select(PLANNING_COLUMNS).schema
    assert found.handles.equals(table.select(PLANNING_COLUMNS))
    assert found.full().equals(table)
    assert [Handle(**row) for row in found.full().to_pylist()] == SOME


def test_no_handles_at_all_are_a_manifest_too() -> None:
    found = round_trip(handles_table([]))
    assert found.full().equals(MANIFEST_SCHEMA.empty_table())
    assert found.inline("segments/x") is None


def test_inline_bytes_are_read_only_when_asked_for_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_manifest(handles_table(SOME))
    opened: list[bool] = []
    real = manifest_module.open_file

    def spied(*arguments: Any, **options: Any) -> Any:
        opened.append("inline" in options.get("read_dictionary", ()))
        return real(*arguments, **options)

    monkeypatch.setattr(manifest_module, "open_file", spied)
    found = decode_manifest(data, manifest_ref(PATH, data))
    assert sum(opened) == 0
    assert found.inline(str(SOME[0].path)) == pa.py_buffer(b"x" * 100)
    assert found.inline(str(SOME[1].path)) is None
    assert found.full()["inline"].to_pylist()[0] == b"x" * 100
    assert sum(opened) == 1


def test_a_manifest_in_memory_gives_what_the_stored_one_gives() -> None:
    table = handles_table(SOME)
    here, stored = Manifest(table), round_trip(table)
    assert here.full().equals(stored.full())
    assert here.inline(str(SOME[0].path)) == stored.inline(str(SOME[0].path))
    chosen = pa.array([4, 0, 1])
    assert here.rows(chosen).equals(stored.rows(chosen))
    assert stored.rows(chosen)["inline"].to_pylist() == [None, b"x" * 100, None]
    assert Manifest(table.select(PLANNING_COLUMNS)).inline(str(SOME[0].path)) is None


def test_equal_inline_bytes_are_stored_once() -> None:
    def stored(count: int) -> int:
        shared = [random.Random(seed).randbytes(16_000) for seed in range(20)]
        inline = [shared[i % 20] for i in range(count)]
        table = handles_table([keyed(i, path=f"segments/1/{i % 20}", inline=of) for i, of in enumerate(inline)])
        assert round_trip(table).full()["inline"].to_pylist() == inline
        return encode_manifest(table).size

    few, many = stored(40), stored(1000)
    assert many - few < 16_000 * 3


def test_four_mebibytes_of_distinct_inline_bytes_keep_their_dictionary() -> None:
    shared = [random.Random(seed).randbytes(16_384) for seed in range(256)]
    handles = [keyed(i // 2, path=f"segments/1/{i % 256}", inline=shared[i % 256]) for i in range(512)]
    assert encode_manifest(handles_table(handles)).size < 1.1 * 256 * 16_384


def test_shared_inline_bytes_cannot_fill_the_memory() -> None:
    big = b"z" * (1 << 20)
    table = handles_table([keyed(i) for i in range(300)]).drop_columns("inline")
    codes = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array([big]))
    bomb = Manifest(table.append_column("inline", codes))
    with pytest.raises(DamagedCheckpoint, match="314,572,800 bytes of memory") as caught:
        bomb.full()
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED
    assert bomb.rows(pa.array([5])).num_rows == 1


def test_row_groups_and_encodings_are_those_of_the_specification() -> None:
    table = pa.concat_tables([handles_table([keyed(0)])] * 140_000).combine_chunks()
    data = encode_manifest(table)
    metadata = pq.read_metadata(pa.BufferReader(data))
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [131_072, 8_928]
    columns = [metadata.row_group(0).column(j) for j in range(metadata.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    assert {name for column in columns for name in column.encodings} <= {"PLAIN", "RLE", "RLE_DICTIONARY"}
    assert [column.path_in_schema for column in columns if column.statistics] == ["operator", "state"]
    assert b"ARROW:schema" not in (metadata.metadata or {})


# ---- order and sums ------------------------------------------------------------------------------

handles_strategy = st.lists(
    st.builds(
        plain("union")._replace,
        operator=st.sampled_from(["a", "ab", "b", "é", "z", "\U0001f680", "\uffff"]),
        state=st.sampled_from(["s", "S", "ß"]),
        subtask=st.none() | st.integers(0, 3),
        layer=st.integers(0, 2),
        path=st.integers(0, 99).map("segments/{}".format),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(handles_strategy, st.integers(1, 9))
def test_handles_are_sorted_by_bytes_with_null_first_and_equal_ones_keep_their_order(
    handles: list[Handle], cut: int
) -> None:
    def place(handle: Handle) -> tuple[Any, ...]:
        subtask = (0, 0) if handle.subtask is None else (1, handle.subtask)
        return handle.operator.encode(), handle.state.encode(), subtask, handle.layer

    chunks = [handles_table(handles[i : i + cut]) for i in range(0, len(handles), cut)]
    found = sort_handles(pa.concat_tables(chunks or [handles_table([])]))
    assert [Handle(**row) for row in found.to_pylist()] == sorted(handles, key=place)
    assert sort_handles(found) is found


def test_an_unsorted_table_is_not_encoded() -> None:
    with pytest.raises(AssertionError):
        encode_manifest(handles_table([keyed(1), keyed(0)]))


def test_totals_count_shared_segments_once() -> None:
    shared = [keyed(i, path="segments/1/shared", size_bytes=70) for i in range(3)]
    assert totals(handles_table([*shared, keyed(5, size_bytes=30), nothing(subtask=6)])) == Totals(5, 20, 2, 100)
    assert totals(handles_table([])) == Totals(0, 0, 0, 0)


def test_the_largest_inline_segments_are_spilled_until_the_rest_fits() -> None:
    sizes = {"a": 500, "b": 900, "c": 100, "d": 700}
    handles = [keyed(i, path=f"segments/{name}", inline=b"x" * size) for i, (name, size) in enumerate(sizes.items())]
    table = handles_table([*handles, keyed(9)])
    for limit, spilled in ((2200, ""), (2199, "b"), (600, "bd"), (599, "bda"), (0, "bdac")):
        assert spill_inline(table, limit) == [f"segments/{name}" for name in spilled]
    assert spill_inline(handles_table([keyed(0)])) == []


def test_sharing_does_not_count_against_the_limit_until_memory_is_at_stake() -> None:
    def shared(count: int) -> pa.Table:
        return handles_table([keyed(i, path="segments/s", inline=b"x" * 50) for i in range(count)])

    assert spill_inline(shared(64), 50) == []
    assert spill_inline(shared(65), 50) == ["segments/s"]


# ---- damage --------------------------------------------------------------------------------------


def refused(data: pa.Buffer, ref: ManifestRef) -> DamagedCheckpoint:
    with pytest.raises(DamagedCheckpoint) as caught:
        decode_manifest(data, ref)
    with pytest.raises(DamagedCheckpoint, match=re.escape(str(caught.value))):
        decode_outline(data, ref)
    assert str(caught.value).startswith(f"manifest {PATH} is damaged: ")
    return caught.value


def test_every_flipped_byte_is_noticed_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    good = encode_manifest(handles_table(SOME))
    ref = manifest_ref(PATH, good)
    monkeypatch.setattr(manifest_module, "open_file", lambda *_, **__: pytest.fail("parsed"))
    data = bytearray(good)
    for position in range(len(data)):
        data[position] ^= 0x10
        assert refused(pa.py_buffer(bytes(data)), ref).kind is ErrorKind.OBJECT_DIGEST_DIFFERS
        data[position] ^= 0x10
    for torn in (b"", bytes(data[:-1]), bytes(data) + b"\0"):
        assert refused(pa.py_buffer(torn), ref).kind is ErrorKind.OBJECT_SIZE_DIFFERS


def test_bytes_whose_digest_is_right_and_whose_content_is_not_are_damage_and_no_other_error() -> None:
    # Every byte of the footer flipped, with size and digest to match.
    good = encode_manifest(handles_table(SOME))
    ref = manifest_ref(PATH, good)
    data = bytearray(good)
    footer = int.from_bytes(data[-8:-4], "little") + 8
    refusals = 0
    for position in range(len(data) - footer, len(data), 3):
        data[position] ^= 0x21
        bad = bytes(data)
        forged = ManifestRef(PATH, len(bad), xxhash.xxh3_128_hexdigest(bad), ref.uncompressed_bytes)
        try:
            assert decode_manifest(pa.py_buffer(bad), forged).handles.num_rows <= len(SOME)
        except DamagedCheckpoint:
            refusals += 1
        data[position] ^= 0x21
    assert refusals > footer // 12


@pytest.mark.parametrize("claimed", [0, 1, 10**15])
def test_a_footer_that_claims_other_sizes_than_the_record_is_refused_before_decompressing(claimed: int) -> None:
    data = encode_manifest(handles_table(SOME))
    error = refused(data, ManifestRef(PATH, data.size, xxhash.xxh3_128_hexdigest(data), claimed))
    assert "uncompressed bytes" in str(error)
    assert error.kind is ErrorKind.DAMAGED_MANIFEST


def written(table: pa.Table, **options: Any) -> tuple[pa.Buffer, ManifestRef]:
    """A table as a foreign writer would write it, with a record that vouches for it."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **{"compression": "zstd", "store_schema": False, **options})
    data = sink.getvalue()
    return data, manifest_ref(PATH, data)


def test_what_another_writer_wrote_is_read_the_same() -> None:
    table = handles_table(SOME)
    loose = pa.schema([field.with_nullable(True) for field in MANIFEST_SCHEMA])
    counts = loose.get_field_index("rows_per_group")
    foreign = table.cast(loose.set(counts, pa.field("rows_per_group", pa.list_(pa.int64()))))
    for options in (
        {},
        {"use_dictionary": False},
        {"compression": "none"},
        {"store_schema": True},
        {"row_group_size": 2},
    ):
        assert decode_manifest(*written(foreign, **options)).full().equals(table)


def retyped(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, table[name].cast(kind))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["edge"]), "its columns are"),
        (lambda t: t.append_column("extra", t["rows"]), "its columns are"),
        (lambda t: t.select(["state", "operator", *t.column_names[2:]]), "its columns are"),
        (retyped("row_start", pa.int32()), "row_start is int32; it must be int64"),
        (retyped("digest", pa.binary()), "digest is binary"),
        (retyped("rows_per_group", pa.list_(pa.int32())), "rows_per_group is"),
    ],
    ids=range(6),
)
def test_other_columns_or_types_are_refused(change: Callable[[pa.Table], pa.Table], message: str) -> None:
    assert message in str(refused(*written(change(handles_table(SOME)))))


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (1, {"compression": "snappy"}, "SNAPPY.*SPEC 4.5"),
        (
            1,
            {"use_dictionary": False, "column_encoding": {"rows": "DELTA_BINARY_PACKED"}},
            "DELTA_BINARY_PACKED.*SPEC 4.5",
        ),
        (131_073, {"row_group_size": 1 << 20}, "131,073 rows"),
    ],
    ids=range(3),
)
def test_other_codecs_encodings_and_row_groups_are_refused(count: int, options: dict[str, Any], message: str) -> None:
    table = pa.concat_tables([handles_table([keyed(0)])] * count).combine_chunks()
    assert re.search(message, str(refused(*written(table, **options))))


BROKEN: list[tuple[Handle, str]] = [
    (keyed(0, mode="magic"), "mode is one of the format's"),
    (keyed(0)._replace(subtask=None), "subtask is null for mode coordinator"),
    (plain("coordinator", 0), "subtask is null for mode coordinator"),
    (keyed(-1), "subtask is not negative"),
    (keyed(0, layer=-1), "layer is above 0 only for mode keyed"),
    (plain("union", layer=1), "layer is above 0 only for mode keyed"),
    (keyed(0, edge="e"), "edge is set exactly for mode in_flight"),
    (plain("in_flight", first_group=0, last_group=0, rows_per_group=[7]), "edge is set exactly for mode in_flight"),
    (keyed(0, schema_id=0), "schema_id is from 1"),
    (keyed(0, rows=-1), "rows is from 0 to"),
    (keyed(0, size_bytes=2**53), "size_bytes is from 0 to"),
    (keyed(0, row_start=2**63 - 1), "row_start is from 0 to"),
    (nothing(path="segments/a"), "path is null where rows is 0"),
    (nothing(digest=b"d" * 16), "digest is null where rows is 0"),
    (nothing(first_group=1), "first_group is null where rows is 0"),
    (nothing(rows_per_group=[]), "rows_per_group is null where rows is 0"),
    (nothing(segment_rows=3), "segment_rows is 0 where rows is 0"),
    (nothing(footer_bytes=3), "footer_bytes is 0 where rows is 0"),
    (keyed(0, path=None), "path is set where rows is not 0"),
    (keyed(0, footer_digest=None), "footer_digest is set where rows is not 0"),
    (keyed(0, row_start=1), "the rows of a handle lie within its segment"),
    (keyed(0, footer_bytes=8), "footer_bytes is above 8 and within size_bytes"),
    (keyed(0, footer_bytes=4997), "footer_bytes is above 8 and within size_bytes"),
    (keyed(0, first_group=None), "first_group is set exactly"),
    (plain("union", rows_per_group=[7]), "rows_per_group is set exactly"),
    (keyed(0, rows_per_group=None), "rows_per_group is set exactly"),
    (keyed(0, first_group=3), "groups go from first to last"),
    (keyed(0, first_group=-1, last_group=1), "groups go from first to last"),
    (keyed(0, first_group=32767, last_group=32769), "groups go from first to last"),
    (keyed(0, last_group=3), "one count for each group"),
    (keyed(0, rows_per_group=[2, 4, -1]), "are row counts"),
    (keyed(0, rows_per_group=[2**62, 2**62, 2**62]), "are row counts"),
    (keyed(0, rows_per_group=[0, 2, 3]), "the first and last group have rows"),
    (keyed(0, rows_per_group=[2, 3, 0]), "the first and last group have rows"),
    (keyed(0, rows_per_group=[2, 1, 3]), "rows_per_group adds up to rows"),
]


@pytest.mark.parametrize(("handle", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_each_rule_of_section_4_is_kept(handle: Handle, message: str) -> None:
    # Between good rows, so that the row is named.
    before = [keyed(0, operator="a") for _ in range(3)]
    table = sort_handles(handles_table([*before, handle, keyed(2, operator="zz")]))
    error = refused(*written(table))
    assert message in str(error)
    assert f"handle 3 (operator {handle.operator!r}" in str(error)
    assert error.kind is ErrorKind.DAMAGED_MANIFEST


ILLEGAL = ["", "/etc/passwd", "segments/../x", "segments/a/../../x", "segments//x", "segments/x/", "segments/", "segments", "other/x",
           "segments/.hidden", "segments/a\\b", "segments/a\nb", "segments/a\x7f", "segments/a/./b", "manifests/x", "./segments/x"]  # fmt: skip


@pytest.mark.parametrize("path", ILLEGAL, ids=repr)
def test_paths_that_leave_the_store_are_refused(path: str) -> None:
    error = refused(*written(handles_table([keyed(0), keyed(1, path=path), keyed(2)])))
    assert error.kind is ErrorKind.INVALID_PATH
    assert "handle 1 (" in str(error)


@pytest.mark.parametrize(
    "path", ["segments/x", "segments/a.b/c.parquet", "segments/é/\U0001f680-~ .x", "segments/a..b"]
)
def test_other_legal_paths_are_read(path: str) -> None:
    assert decode_manifest(*written(handles_table([keyed(0, path=path)]))).handles["path"].to_pylist() == [path]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("se/.\\a\x00é", max_size=6).map("segments/".__add__), min_size=1, max_size=6))
def test_paths_are_judged_alike_whether_scanned_together_or_alone(paths: list[str]) -> None:
    def legal(path: str) -> bool:
        try:
            return check_path(path) == path
        except CheckpointError:
            return False

    table = handles_table([keyed(i, path=path) for i, path in enumerate(paths)])
    if all(map(legal, paths)):
        assert decode_manifest(*written(table)).handles["path"].to_pylist() == paths
    else:
        first = next(i for i, path in enumerate(paths) if not legal(path))
        assert f"handle {first} (" in str(refused(*written(table)))


def test_text_that_is_not_utf8_is_refused() -> None:
    table = handles_table([keyed(0), keyed(1)])
    bad = pa.array([b"\xff\xfe", b"\xff\xfe"]).view(pa.string())
    for name in ("operator", "state", "mode", "path"):
        position = table.schema.get_field_index(name)
        refused(*written(table.set_column(position, table.schema.field(position), bad)))


def test_an_unsorted_manifest_is_refused() -> None:
    error = refused(*written(handles_table([keyed(0), keyed(2), keyed(1)])))
    assert "handles are sorted" in str(error)
    assert "handle 2 (" in str(error)


def test_faults_are_found_in_any_batch() -> None:
    handles = [keyed(i // 9, operator=f"op{i % 9}") for i in range(900)]
    table = sort_handles(pa.concat_tables([handles_table(handles)] * 150)).combine_chunks()
    wrong = handles_table([keyed(0, operator="zz", rows=4)])
    error = refused(*written(pa.concat_tables([table, wrong]), row_group_size=50_000))
    assert "handle 135000 (operator 'zz'" in str(error)


# ---- cutting -------------------------------------------------------------------------------------


def slice_row(handle: int, like: Handle, /, **changes: Any) -> dict[str, Any]:
    names = ("operator", "state", "mode", "subtask", "layer", "row_start", "rows", "first_group", "last_group")
    return {**{name: getattr(like, name) for name in names}, "handle": handle, "bytes": 0, **changes}


def cut(handles: list[Handle], rows: list[dict[str, Any]]) -> list[Handle]:
    found = cut_handles(handles_table(handles), pa.Table.from_pylist(rows, SLICE_SCHEMA))
    assert found.schema == MANIFEST_SCHEMA
    return [Handle(**row) for row in found.to_pylist()]


def test_a_slice_of_everything_is_the_handle_itself() -> None:
    assert cut(SOME, [slice_row(i, handle) for i, handle in enumerate(SOME)]) == SOME
    assert cut(SOME, []) == []


def test_a_cut_handle_has_the_rows_and_groups_of_its_slice_without_empty_ends() -> None:
    whole = keyed(0, (2, 0, 3, 0, 0, 4), first=10, segment_rows=9 + 7, row_start=7)
    cases = [
        # row_start, rows, first and last group of the slice; first group and counts of the cut
        # handle
        (7, 2, 8, 11, 10, [2]),
        (9, 3, 11, 14, 12, [3]),
        (12, 4, 13, 99, 15, [4]),
        (9, 7, 12, 15, 12, [3, 0, 0, 4]),
    ]
    names = ("row_start", "rows", "first_group", "last_group")
    rows = [slice_row(1, whole, subtask=5, **dict(zip(names, case, strict=False))) for case in cases]
    found = cut([keyed(9), whole], rows)
    assert [(h.subtask, h.row_start, h.rows, h.first_group, h.last_group, h.rows_per_group) for h in found] == [
        (5, start, count, first, first + len(counts) - 1, counts) for start, count, _, _, first, counts in cases
    ]
    assert {(h.path, h.segment_rows, h.size_bytes, h.digest) for h in found} == {(whole.path, 16, 5000, whole.digest)}


def test_a_slice_without_rows_is_nothing_known_to_be_nothing() -> None:
    inline = keyed(0, inline=b"abc")
    none = slice_row(0, inline, subtask=4, rows=0, first_group=1, last_group=1, row_start=2)
    assert cut([inline], [none]) == [nothing(subtask=4)]
    split = plain("even_split")
    wanted = nothing(operator="other", state="even_split", mode="even_split", subtask=1)
    assert cut([split], [slice_row(0, split, subtask=1, rows=0)]) == [wanted]


def test_planning_columns_are_cut_the_same_way() -> None:
    table = handles_table(SOME)
    slices = pa.Table.from_pylist([slice_row(0, SOME[0], rows=2, last_group=1)], SLICE_SCHEMA)
    found = cut_handles(table.select(PLANNING_COLUMNS), slices)
    assert found.equals(cut_handles(table, slices).select(PLANNING_COLUMNS))


def test_entries_without_groups_are_cut_by_rows() -> None:
    union = plain("even_split", 0, 10)
    (found,) = cut([union], [slice_row(0, union, subtask=3, row_start=4, rows=5)])
    assert found == union._replace(subtask=3, row_start=4, rows=5)


def test_a_channel_in_flight_may_be_cut_within_its_group_and_key_groups_may_not() -> None:
    mail = plain("in_flight", 3, 9, edge="e1", first_group=4, last_group=6, rows_per_group=[2, 0, 7])
    part = slice_row(0, mail, subtask=0, row_start=3, rows=4, first_group=6, last_group=6)
    (found,) = cut([mail], [part])
    assert found == mail._replace(subtask=0, row_start=3, rows=4, first_group=6, last_group=6, rows_per_group=[4])
    for beyond in ({"row_start": 1}, {"rows": 7}, {"first_group": 4}):
        with pytest.raises(InvalidInput, match="slice 0 is"):
            cut([mail], [{**part, **beyond}])
    whole = keyed(0, (2, 0, 7), first=4)
    with pytest.raises(InvalidInput, match="its groups are"):
        cut([whole], [slice_row(0, whole, row_start=3, rows=4, first_group=6, last_group=6)])


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 6},
        {"row_start": 1},
        {"rows": 2, "last_group": 2},
        {"rows": 3, "first_group": 2, "row_start": 1},
        {"handle": 1},
        {"handle": -1},
    ],
    ids=repr,
)
def test_a_slice_that_is_no_part_of_its_handle_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="slice"):
        cut([keyed(0)], [slice_row(0, keyed(0), **change)])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_cuts_agree_with_a_row_by_row_model(counts: list[list[int]], data: st.DataObject) -> None:
    handles = [keyed(i, (1, *c, 1), first=10 * i) for i, c in enumerate(counts)]
    rows, expected = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(handles) - 1))
        whole = handles[at]
        groups = [g for g, n in enumerate(whole.rows_per_group or [], whole.first_group or 0) for _ in range(n)]
        first = data.draw(st.integers((whole.first_group or 0) - 2, (whole.last_group or 0) + 2))
        last = data.draw(st.integers(first, (whole.last_group or 0) + 3))
        mine = [i for i, group in enumerate(groups) if first <= group <= last]
        rows.append(
            slice_row(at, whole, row_start=min(mine, default=0), rows=len(mine), first_group=first, last_group=last)
        )
        held = [groups[i] for i in mine]
        expected.append([held.count(g) for g in range(held[0], held[-1] + 1)] if held else None)
    found = cut(handles, rows)
    assert [handle.rows_per_group for handle in found] == expected
    assert decode_manifest(*written(sort_handles(handles_table(found)))).handles.num_rows == len(rows)


def test_rows_per_group_take_a_dictionary_where_they_repeat_and_none_where_they_do_not() -> None:
    def encodings(counts: list[int]) -> set[str]:
        data = encode_manifest(handles_table([keyed(0, tuple(counts))]))
        column = pq.read_metadata(pa.BufferReader(data)).row_group(0).column(18)
        assert column.path_in_schema == "rows_per_group.list.element"
        assert decode_manifest(data, manifest_ref(PATH, data)).handles["rows_per_group"].to_pylist() == [counts]
        return set(column.encodings)

    assert "RLE_DICTIONARY" in encodings([1, 2, 1] * 20)
    assert "RLE_DICTIONARY" not in encodings(list(range(1, 61)))


OPERATORS, SUBTASKS = 7, 5
MODES = ("keyed", "in_flight", "union", "broadcast", "even_split")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> sf.CheckpointStore:
    """Every operator has one state of each mode; records in flight share segments."""
    store = sf.open(str(tmp_path_factory.mktemp("outline") / "store"), durable=False)
    operators = [sf.Operator(f"op{number}", 1, 64) for number in range(OPERATORS)]
    loops = [
        sf.Edge(f"loop{number}", f"op{number}", f"op{number}", "rebalance", feedback=True)
        for number in range(OPERATORS)
    ]
    columns = {"value": pa.int64()}
    states = []
    for number in range(OPERATORS):
        uid = f"op{number}"
        states += [
            value_state(uid, "keyed", keys={"key": pa.int64()}, values=columns),
            in_flight_state(uid, "in_flight", edge=f"loop{number}", columns=columns),
            union_state(uid, "union", columns=columns),
            broadcast_state(uid, "broadcast", columns=columns),
            even_split_state(uid, "even_split", columns=columns),
        ]
    graph = sf.JobGraph(tuple(operators), tuple(loops))
    pending = store.begin(job_id="job", graph=graph, states=states, parent=None)
    numbers = np.arange(200)
    sender = np.zeros(200, np.int32)
    for operator in operators:
        with pending.context.subtask(operator.uid, 0) as writer:
            writer.write("keyed", pa.table({"key": numbers, "value": numbers}))
            writer.write(
                "in_flight", pa.table({"_sender": sender, "_receiver": sender, "_seq": numbers, "value": numbers})
            )
            for name in MODES[2:]:
                writer.write(name, pa.table({"value": numbers}))
        pending.add(writer)
    pending.publish()
    checkpoint = store.open()
    publish_rescaled(checkpoint, checkpoint.graph.at(SUBTASKS), store=store)
    return store


def stored(handles: pa.Table, row_group_size: int) -> tuple[pa.Buffer, ManifestRef]:
    sink = pa.BufferOutputStream()
    pq.write_table(
        handles.cast(MANIFEST_SCHEMA),
        sink,
        compression="zstd",
        row_group_size=row_group_size,
        write_page_checksum=True,
        store_schema=False,
    )
    return sink.getvalue(), manifest_ref("manifests/m", sink.getvalue())


@pytest.mark.parametrize("row_group_size", [1, 3, 64, 1000])
def test_an_outline_says_what_the_handles_say(store: sf.CheckpointStore, row_group_size: int) -> None:
    data, ref = stored(store.open().manifest.full(), row_group_size)
    whole = decode_manifest(data, ref).handles

    found = decode_outline(data, ref)

    names = [name for name in found.column_names if name != "path"]
    plain = pa.schema([PLANNING_SCHEMA.field(name).with_nullable(True) for name in names])
    assert found.select(names).cast(plain).to_pylist() == whole.select(names).to_pylist()
    moved = [mode == "in_flight" for mode in whole["mode"].to_pylist()]
    paths = [path if is_moved else None for path, is_moved in zip(whole["path"].to_pylist(), moved, strict=True)]
    assert found["path"].to_pylist() == paths


@pytest.mark.parametrize("row_group_size", [1, 64, 1000])
def test_some_columns_are_those_of_the_whole(store: sf.CheckpointStore, row_group_size: int) -> None:
    whole = store.open().manifest.full()
    data, ref = stored(whole, row_group_size)
    for names in (["path"], ["operator", "state", "path", "size_bytes", "inline"]):
        found = decode_columns(data, ref, names)
        assert found.column_names == names
        assert found.to_pylist() == whole.select(names).to_pylist()


@pytest.mark.parametrize("parallelism", [1, 3, 5, 64])
@pytest.mark.parametrize("row_group_size", [7, 1000])
def test_a_plan_to_show_is_the_plan_of_a_restore(
    store: sf.CheckpointStore, parallelism: int, row_group_size: int
) -> None:
    checkpoint = store.open()
    data, ref = stored(checkpoint.manifest.full(), row_group_size)
    outlined = SimpleNamespace(
        record=checkpoint.record,
        handles=decode_outline(data, ref),
        capabilities=checkpoint.capabilities,
        query=checkpoint.query,
    )
    topology = checkpoint.graph.at(parallelism)

    assert plan_restore(outlined, topology).to_json() == checkpoint.plan_restore(topology).to_json()
    assert store.open().plan_restore(topology, to_show=True).to_json() == checkpoint.plan_restore(topology).to_json()


def swapped(handles: pa.Table) -> pa.Table:
    rows = [*range(len(handles))]
    rows[3], rows[4] = rows[4], rows[3]
    return handles.take(rows)


def of_no_rows(handles: pa.Table) -> pa.Table:
    at = handles.schema.get_field_index("segment_rows")
    return handles.set_column(at, handles.schema.field(at), pa.array(np.zeros(len(handles), np.int64)))


@pytest.mark.parametrize("damage", [swapped, of_no_rows])
@pytest.mark.parametrize("row_group_size", [1, 2, 4, 1000])
def test_what_is_wrong_is_told_as_of_the_whole(
    store: sf.CheckpointStore, damage: Callable[[pa.Table], pa.Table], row_group_size: int
) -> None:
    data, ref = stored(damage(store.open().manifest.full()), row_group_size)

    with pytest.raises(DamagedCheckpoint) as whole:
        decode_manifest(data, ref)
    with pytest.raises(DamagedCheckpoint) as outline:
        decode_outline(data, ref)
    assert str(outline.value) == str(whole.value)


def test_bytes_that_are_no_manifest_are_told_as_such() -> None:
    data, ref = stored(handles_table([]), 10)
    torn = pa.py_buffer(data.to_pybytes()[:-4] + b"nono")
    for decode in (decode_outline, lambda data, ref: decode_columns(data, ref, ["path"])):
        assert decode(data, ref).num_rows == 0
        with pytest.raises(DamagedCheckpoint, match="digest"):
            decode(torn, ref)
        with pytest.raises(DamagedCheckpoint, match="cannot be read as Parquet"):
            decode(torn, replace(ref, digest=xxhash.xxh3_128_hexdigest(torn)))


def test_only_the_restore_keeps_the_manifest(store: sf.CheckpointStore) -> None:
    checkpoint = store.open()
    checkpoint.plan_restore(checkpoint.graph.at(2), to_show=True)
    assert checkpoint._manifest is None
    checkpoint.plan_restore(checkpoint.graph.at(2))
    assert checkpoint._manifest is not None
