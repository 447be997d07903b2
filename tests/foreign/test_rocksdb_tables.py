"""Tables of RocksDB: what RocksDB 9.8.4 wrote against what it read, and a model of its rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.foreign.sst import lanes, table as table_module
from stateformat.backends.foreign.sst.merge import merged
from stateformat.backends.foreign.sst.table import Table
from stateformat.errors import DamagedCheckpoint, ErrorKind, UnsupportedFormat
from tests.foreign.rocks_tables import DELETE, MERGE, PUT, SINGLE_DELETE, model, opened, table

FIXTURES = Path(__file__).parent / "fixtures" / "rocksdb-9.8.4"
REFUSED = {
    "compression-bzip2": "compressed by bzip2",
    "outside-untold": "its sequence number stands in the manifest only",
}
READ = sorted(path.name for path in FIXTURES.iterdir() if path.name not in REFUSED)


def tables_of(name: str) -> list[Table]:
    return [opened(path.read_bytes(), path.name) for path in sorted((FIXTURES / name).glob("*.sst"))]


def contents(tables: list[Table], low: bytes | None = None, high: bytes | None = None) -> dict[bytes, bytes]:
    keys, values = merged(tables, low, high)
    found = keys.to_arrow().to_pylist()
    assert found == sorted(set(found))
    return dict(zip(found, values.to_arrow().to_pylist(), strict=True))


def expected(name: str) -> dict[bytes, bytes]:
    lines = (FIXTURES / name / "expected.txt").read_text().splitlines()
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in (line.split(" ") for line in lines)}


def test_the_fixtures_are_of_every_kind() -> None:
    assert len(READ) >= 25
    seen = {(table.file.version, table.file.checksum) for name in READ for table in tables_of(name)}
    assert {version for version, _ in seen} == {2, 3, 4, 5, 6}
    assert {checksum for _, checksum in seen} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", READ)
def test_what_rocksdb_wrote_is_read_as_rocksdb_reads_it(name: str) -> None:
    assert contents(tables_of(name)) == expected(name)


@pytest.mark.parametrize("name", READ)
def test_a_range_of_keys_is_what_the_whole_has_there(name: str) -> None:
    tables, whole = tables_of(name), expected(name)
    keys = sorted(whole)
    third = len(keys) // 3
    for low, high in (
        (keys[third], keys[2 * third]),
        (None, keys[third]),
        (keys[third], None),
        (b"\x05", b"k"),
        (b"z", b"a"),
    ):
        want = {key: value for key, value in whole.items() if (low or b"") <= key and (high is None or key < high)}
        assert contents(tables, low, high) == want


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_read_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFormat, match=REFUSED[name]):
        merged(tables_of(name))


keys_ = st.binary(max_size=6) | st.sampled_from([b"", b"\0", b"\0\0", b"a", b"a\0", b"a\0\0", b"ab", b"long" * 40])
records_ = st.lists(
    st.tuples(
        keys_,
        st.sampled_from([PUT, PUT, MERGE, MERGE, DELETE, SINGLE_DELETE]),
        st.binary(max_size=9) | st.just(b"v" * 200),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(
    records_,
    st.lists(st.tuples(keys_, keys_, st.integers(1, 100)), max_size=4),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 20),
    st.sampled_from([0, 1, 4, 7]),
)
def test_records_in_any_tables_are_merged_as_one_after_another(
    records: list[tuple[bytes, int, bytes]],
    ranges: list[tuple[bytes, bytes, int]],
    files: int,
    per_block: int,
    interval: int,
    compression: int,
) -> None:
    numbered = [
        (key, 2 * number + 2, kind, b"" if kind in (DELETE, SINGLE_DELETE) else value)
        for number, (key, kind, value) in enumerate(records)
    ]
    # Odd numbers: between records, and one range for each number.
    stones = list({sequence: (start, end, 2 * sequence + 1) for start, end, sequence in ranges if start < end}.values())
    tables = [
        opened(
            table(
                numbered[part::files],
                per_block=per_block,
                interval=interval,
                compression=compression,
                ranges=stones if part == 0 else (),
            ),
            f"{part}.sst",
        )
        for part in range(files)
    ]
    want = model(numbered, stones)
    assert contents(tables) == want
    low, high = b"a", b"long" * 10
    assert contents(tables, low, high) == {key: value for key, value in want.items() if low <= key < high}


def test_long_keys_and_long_lists_are_read() -> None:
    records = [(b"k" * size + bytes([size % 251]), size + 1, PUT, bytes(size)) for size in range(0, 9000, 450)]
    records += [(b"list", 100_000 + number, MERGE, b"%d" % number) for number in range(3000)]
    assert contents([opened(table(records[::2])), opened(table(records[1::2]))]) == model(records)


RECORDS = [
    (b"key-%03d" % number, number + 1, (PUT, MERGE, PUT)[number % 3], b"value %d" % number) for number in range(40)
]
SMALL = table([*RECORDS, (b"gone", 99, DELETE, b"")], ranges=[(b"key-010", b"key-012", 50)])


def test_every_flipped_bit_of_a_table_is_noticed_or_harmless() -> None:
    want = contents([opened(SMALL)])
    noticed = 0
    for bit in range(8 * len(SMALL)):
        flipped = bytearray(SMALL)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        try:
            assert contents([opened(bytes(flipped))]) == want
        except (DamagedCheckpoint, UnsupportedFormat):
            noticed += 1
    # What is harmless: the padding of the footer, and its version.
    assert 8 * len(SMALL) - noticed < 8 * 40


def test_every_cut_table_is_damaged() -> None:
    for size in range(len(SMALL)):
        with pytest.raises(DamagedCheckpoint):
            merged([opened(SMALL[:size])])


@pytest.mark.parametrize(
    "name", ["checksum-none-6", "index-two-levels-6", "index-first-keys", "data-hash", "compression-zlib"]
)
def test_a_flipped_byte_never_ends_in_another_error(name: str) -> None:
    first = min((FIXTURES / name).glob("*.sst"))
    octets = first.read_bytes()
    for at in range(0, len(octets), 3):
        flipped = bytearray(octets)
        flipped[at] ^= 0xFF if at % 2 else 1 << at % 8
        try:
            merged([opened(bytes(flipped))])
        except (DamagedCheckpoint, UnsupportedFormat):
            continue


@pytest.mark.parametrize(
    ("octets", "kind", "what"),
    [
        (b"", ErrorKind.DAMAGED_SEGMENT, "0 bytes, fewer than the footer"),
        (bytes(100), ErrorKind.DAMAGED_SEGMENT, "not as a table of RocksDB"),
        (table(RECORDS, version=7), ErrorKind.UNSUPPORTED_FEATURE, "format version 7; 2 to 6 are known"),
        (table(RECORDS, version=1), ErrorKind.UNSUPPORTED_FEATURE, "format version 1"),
        (table(RECORDS, says={"num.entries": 41}), ErrorKind.DAMAGED_SEGMENT, "40 entries, its properties say 41"),
        (table(RECORDS, says={"deleted.keys": 1}), ErrorKind.DAMAGED_SEGMENT, "0 deletions, its properties say 1"),
        (
            table(RECORDS, says={"merge.operands": 2}),
            ErrorKind.DAMAGED_SEGMENT,
            "13 merge operands, its properties say 2",
        ),
        (
            table(RECORDS, says={"num.range-deletions": 3}),
            ErrorKind.DAMAGED_SEGMENT,
            "0 range deletions, its properties say 3",
        ),
        (table([(b"k", 1, 0x11, b"blob")]), ErrorKind.UNSUPPORTED_FEATURE, "values in blob files"),
        (table([(b"k", 1, 0x16, b"wide")]), ErrorKind.UNSUPPORTED_FEATURE, "wide columns"),
        (table([(b"k", 1, 0x14, b"")]), ErrorKind.UNSUPPORTED_FEATURE, "user-defined timestamps"),
        (table([(b"k", 1, 0x55, b"")]), ErrorKind.DAMAGED_SEGMENT, "unknown type 0x55"),
        (table([(b"k", 5, PUT, b"a"), (b"k", 5, PUT, b"b")]), ErrorKind.DAMAGED_SEGMENT, "the sequence number 5"),
        (table(RECORDS, compression=3), ErrorKind.UNSUPPORTED_FEATURE, "compressed by bzip2"),
        (table(RECORDS, compression=99), ErrorKind.UNSUPPORTED_FEATURE, "compressed by number 99"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(octets: bytes, kind: ErrorKind, what: str) -> None:
    with pytest.raises((DamagedCheckpoint, UnsupportedFormat), match=what) as caught:
        merged([opened(octets)])
    assert caught.value.kind is kind
    assert caught.value.details["path"] == "000001.sst"


def test_a_range_that_is_deleted_beyond_its_file_is_refused_where_that_is_not_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points, stones = [(b"f", 20, PUT, b"kept"), (b"h", 21, PUT, b"kept too")], [(b"a", b"m", 10)]
    older = [(b"b", 5, PUT, b"gone"), (b"z", 6, PUT, b"there"), (b"g", 0, PUT, b"gone too")]
    monkeypatch.setattr(table_module, "_SPLIT_MIN", 0)
    tables = [opened(table(points, ranges=stones)), opened(table(older), "2.sst")]
    assert contents(tables) == model([*points, *older], stones)
    for key in (b"a", b"k"):
        # Perhaps newer than the deletion: compactions take numbers away where nothing is below.
        unsure = [*tables[:1], opened(table([*older, (key, 0, PUT, b"?")]), "2.sst")]
        with pytest.raises(UnsupportedFormat, match="stands in the manifest only"):
            merged(unsure)
        assert contents(unsure, b"l") == {b"z": b"there"}
    monkeypatch.setattr(table_module, "_SPLIT_MIN", 1 << 20)
    small = [opened(table(points, ranges=stones)), opened(table([*older, (b"k", 0, PUT, b"gone")]), "2.sst")]
    assert contents(small) == model([*points, *older], stones)


def test_a_restart_point_with_too_many_entries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_STEPS_MAX", 20)
    assert contents([opened(table(RECORDS, per_block=40, interval=20))]) == model(RECORDS)
    with pytest.raises(DamagedCheckpoint, match="more than 20 entries"):
        merged([opened(table(RECORDS, per_block=40, interval=21))])


def test_no_tables_hold_nothing() -> None:
    assert contents([]) == {}
    assert contents([opened(table([]))]) == {}
