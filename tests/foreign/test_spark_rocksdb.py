"""Stores of Spark in RocksDB: files, keys and tables."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.framing import crc32c, spark_decode, spark_encode
from stateformat.backends.foreign.source import Part
from stateformat.backends.foreign.spark import rocksdb_keys, rocksdb_store
from stateformat.backends.foreign.spark.checks import check_source
from stateformat.backends.foreign.spark.rocksdb_store import read_changes
from stateformat.backends.foreign.spark.schemas import SparkField, StoreSchema, parse_struct
from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.backends.foreign.spark.stores import Entries, Store
from stateformat.backends.foreign.sst import blocks, table as table_module
from stateformat.backends.foreign.sst.merge import merged
from stateformat.backends.foreign.sst.table import Table
from stateformat.errors import DamagedCheckpoint, ErrorKind, UnsupportedFormat
from stateformat.schema import segment_schema
from stateformat.storage import open_storage
from tests.foreign.rocks_tables import DELETE, MERGE, PUT, SINGLE_DELETE, model, opened, table
from tests.foreign.spark_queries import distinct

FIXTURES = Path(__file__).parent / "fixtures"
ROCKSDB = sorted(path for path in FIXTURES.glob("spark-*/*rocksdb*"))
AVRO = [path for path in ROCKSDB if "avro" in path.name]
READ = [path for path in ROCKSDB if path not in AVRO]


def source(path: Path) -> SparkSource:
    folder = open_storage(str(path)).folder()
    assert folder is not None
    return SparkSource(folder)


def jsonable(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {kind.field(at).name: jsonable(value[at][1], kind.field(at).type) for at in range(kind.num_fields)}
    if pa.types.is_map(kind):
        pairs = [[jsonable(key, kind.key_type), jsonable(item, kind.item_type)] for key, item in value]
        return sorted(pairs, key=json.dumps)
    if pa.types.is_list(kind):
        return [jsonable(item, kind.value_type) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if pa.types.is_decimal(kind):
        return format(value, "f")
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return str(value)
    return value


def values(column: pa.Array) -> list[Any]:
    """Times as numbers, structs as pairs: names may repeat."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.int64()).to_pylist()
    if pa.types.is_date(kind):
        return column.cast(pa.int32()).to_pylist()
    if pa.types.is_struct(kind):
        parts = [values(column.field(at)) for at in range(kind.num_fields)]
        names = [kind.field(at).name for at in range(kind.num_fields)]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)]
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist(), strict=True)]
    return [jsonable(value, kind) for value in column.to_pylist()]


def rows(some: SparkSource, part: Part) -> Iterator[str]:
    """The rows of a part as the fixtures' lines have them."""
    store, shape = some.stores[part.operator, part.state], some.shapes[part.operator, part.state]
    keys, others = ([one.name for one in fields] for fields in (store.schema.key, store.schema.value))
    grouping = keys[: shape.hashed] if store.layout is not None or shape.kind != "value" else keys
    for _, columns in some.columns(part):
        found = [values(column) for column in columns]
        for at in range(len(columns[0]) if columns else 0):
            row = [column[at] for column in found]
            key = dict(zip(distinct(grouping), row, strict=False))
            rest = dict(zip(keys[len(grouping) :], row[len(grouping) :], strict=False))
            value = dict(zip(distinct(others), row[len(keys) :], strict=True))
            yield json.dumps({"key": key, "partition": part.subtask} | _told(shape.kind, rest, value), sort_keys=True)


def _told(kind: str, rest: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """What Spark's reader calls the rest of a key, and the value."""
    if kind == "list":
        return {"list_element": value}
    if kind == "timers":
        return {"expiration_timestamp_ms": rest["expiryTimestampMs"]}
    return {"user_map_key": rest, "user_map_value": value} if rest else {"value": value}


def expected(path: Path, operator: int, state: str) -> list[str]:
    found = [path / f"expected-{operator}-{name}.jsonl" for name in (state, f"default-{state}")]
    lines = next(one for one in found if one.exists()).read_text().splitlines()
    return sorted(json.dumps(json.loads(line), sort_keys=True) for line in lines)


def label(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


@pytest.mark.parametrize("path", [path for path in READ if "-v4" not in path.name], ids=label)
def test_state_is_what_sparks_own_reader_says(path: Path) -> None:
    some = source(path / "checkpoint")
    assert some.stores
    for (operator, state), store in some.stores.items():
        if state == "timers" and "ttl" in path.name:
            # Spark's reader wants a time that nothing was registered for.
            continue
        parts = [part for part in some.parts if (part.operator, part.state) == (operator, state)]
        assert sorted(row for part in parts for row in rows(some, part)) == expected(path, store.operator, state)


@pytest.mark.parametrize("path", READ, ids=label)
def test_all_is_well_and_every_key_is_in_its_partition(path: Path) -> None:
    some = source(path / "checkpoint")
    assert not [
        problem for problem in check_source(some, "full", lambda done, total: None) if problem.severity == "error"
    ]
    for part in some.parts:
        shape = some.shapes[part.operator, part.state]
        found = pa.Table.from_batches(some.read(part), segment_schema(shape.state))
        assert len(found) == some.group_rows(part).sum()
        if shape.kind == "list" and len(found):
            keys = found.select([field.name for field in found.schema if field.name not in ("_index", "_key_group")])
            by_key: dict[str, list[int]] = {}
            for key, index in zip(keys.column(0).to_pylist(), found["_index"].to_pylist(), strict=True):
                by_key.setdefault(str(key), []).append(index)
            assert all(one == list(range(len(one))) for one in by_key.values())


@pytest.mark.parametrize("path", [path for path in READ if path.name.endswith("-v4")], ids=label)
def test_a_join_of_the_newest_format_has_the_rows_of_the_one_before(path: Path) -> None:
    older, newer = source(path.with_name("join-outer-rocksdb-v3") / "checkpoint"), source(path / "checkpoint")
    for side in ("left", "right"):
        found = []
        for some, state in ((older, "keyWithIndexToValue"), (newer, "keyWithTsToValues")):
            parts = [part for part in some.parts if part.state == f"{side}-{state}"]
            tables = [pa.Table.from_batches(some.read(part), _schema(some, part)) for part in parts]
            names = [name for name in tables[0].column_names if name not in ("_map_key", "matched")]
            # Which rows have matched is kept of the outer side alone since format 4.
            found.append(sorted(map(str, pa.concat_tables(tables).select(names).to_pylist())))
        assert found[0] == found[1]
        assert found[0]


def _schema(some: SparkSource, part: Part) -> pa.Schema:
    return segment_schema(some.shapes[part.operator, part.state].state)


@pytest.mark.parametrize("path", AVRO, ids=label)
def test_state_encoded_as_avro_is_refused_by_name(path: Path) -> None:
    some = source(path / "checkpoint")
    assert not some.stores
    refused = [note for note in some.notes if note.kind == "refused"]
    assert refused
    assert all("encoded as 'avro'" in note.message for note in refused)


def test_there_are_fixtures_of_every_kind() -> None:
    assert {path.name.partition("-rocksdb")[0] for path in READ} >= {"aggregate", "session", "two", "whole", "window"}
    assert {path.parent.name for path in READ} >= {"spark-3.5.9", "spark-4.3.0"}


AGGREGATE = FIXTURES / "spark-4.3.0" / "aggregate-rocksdb"
CHANGELOG = FIXTURES / "spark-4.3.0" / "aggregate-rocksdb-changelog"


def broken(path: Path, into: Path, pattern: str, change: Any) -> SparkSource:
    """A copy in which the files of a pattern are changed, and its source."""
    shutil.copytree(path / "checkpoint", into)
    found = sorted(into.glob(pattern))
    assert found
    for file in found:
        change(file)
    return source(into)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    octets = bytearray(file.read_bytes())
    octets[len(octets) // 3] ^= 16
    file.write_bytes(bytes(octets))


@pytest.mark.parametrize(
    ("fixture", "pattern", "change", "kind"),
    [
        (AGGREGATE, "state/0/0/5.zip", Path.unlink, ErrorKind.OBJECT_MISSING),
        (AGGREGATE, "state/0/0/5.zip", cut, ErrorKind.DAMAGED_SEGMENT),
        (AGGREGATE, "state/0/0/SSTs/*", Path.unlink, ErrorKind.OBJECT_MISSING),
        (AGGREGATE, "state/0/0/SSTs/*", cut, ErrorKind.OBJECT_SIZE_DIFFERS),
        (AGGREGATE, "state/0/0/SSTs/*", flip, ErrorKind.DAMAGED_SEGMENT),
        (CHANGELOG, "state/0/0/5.changelog", Path.unlink, ErrorKind.OBJECT_MISSING),
        (CHANGELOG, "state/0/0/5.changelog", cut, ErrorKind.DAMAGED_SEGMENT),
        (CHANGELOG, "state/0/0/5.changelog", flip, ErrorKind.DAMAGED_SEGMENT),
    ],
)
def test_files_that_are_damaged_or_gone_are_named(
    fixture: Path, pattern: str, change: Any, kind: ErrorKind, tmp_path: Path
) -> None:
    some = broken(fixture, tmp_path / "copy", pattern, change)
    with pytest.raises(DamagedCheckpoint) as caught:
        some.entries(some.parts[0])
    assert caught.value.kind is kind
    assert caught.value.details["path"].startswith("state/0/0/")
    assert len(some.entries(some.parts[1]).keys)


def saying(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Change the metadata in a zip."""

    def change(file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
        assert old in contents["metadata"]
        contents["metadata"] = contents["metadata"].replace(old, new)
        with zipfile.ZipFile(file, "w") as archive:
            for name, octets in contents.items():
                archive.writestr(name, octets)

    return change


@pytest.mark.parametrize(
    ("old", "new", "error", "what"),
    [
        (b'"numKeys":', b'"numKeys":1', DamagedCheckpoint, "keys, its metadata says 1"),
        (b'"numKeys":', b'"numKeys":null,"x":', DamagedCheckpoint, "are none"),
        (b'"columnFamilyMapping":{}', b'"columnFamilyMapping":[1]', DamagedCheckpoint, "are none"),
        (b'"columnFamilyMapping":{}', b'"columnFamilyMapping":{"a":-1}', DamagedCheckpoint, "are none"),
        (b'"columnFamilyMapping":{}', b'"columnFamilyMapping":{"a":1}', DamagedCheckpoint, "column family 'default'"),
        (b'"dfsSstFileName":"', b'"dfsSstFileName":"../', DamagedCheckpoint, "lists the table file"),
        (b'"sstFiles":[', b'"sstFiles":[7,', DamagedCheckpoint, "lists the table file 7"),
        (b'"sizeBytes":', b'"sizeBytes":9', DamagedCheckpoint, "bytes, state/0/0/5.zip says 9"),
        (b'"numKeys"', b'"logFiles":[{"localFileName":"1.log"}],"numKeys"', UnsupportedFormat, "lists logs"),
        (b"v1", b"v2", UnsupportedFormat, "metadata is of version 'v2'"),
        (b"{", b"[", DamagedCheckpoint, "no JSON"),
    ],
)
def test_a_zip_that_says_otherwise_is_named(
    old: bytes, new: bytes, error: type[Exception], what: str, tmp_path: Path
) -> None:
    some = broken(AGGREGATE, tmp_path / "copy", "state/0/0/5.zip", saying(old, new))
    with pytest.raises(error, match=what):
        some.entries(some.parts[0])


def its_table(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Change the first table file that a zip lists."""

    def change_it(file: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            found = json.loads(archive.read("metadata").partition(b"\n")[2])
        change(file.parent / "SSTs" / found["sstFiles"][0]["dfsSstFileName"])

    return change_it


def manifest_of_zip(file: Path) -> None:
    """Flip a bit of RocksDB's own list of tables, which nothing here reads."""
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        (item,) = (one for one in archive.infolist() if one.filename.startswith("MANIFEST"))
    data[item.header_offset + 30 + len(item.filename) + item.compress_size // 2] ^= 1
    file.write_bytes(data)


TRANSFORM = FIXTURES / "spark-4.3.0" / "transform-rocksdb"


@pytest.mark.parametrize(
    ("fixture", "pattern", "change", "level", "what"),
    [
        (AGGREGATE, "state/0/0/5.zip", its_table(Path.unlink), "quick", "sst: it is missing, and .*5.zip lists it"),
        (AGGREGATE, "state/0/0/5.zip", its_table(cut), "quick", "bytes, .*5.zip says"),
        (AGGREGATE, "state/0/0/5.zip", manifest_of_zip, "full", "5.zip: .*(checksum|no zip that can be read)"),
        (TRANSFORM, "state/0/0/10.zip", saying(b'"numKeys":', b'"numKeys":1'), "full", "keys, its metadata says 1"),
        (TRANSFORM, "state/0/0/10.zip", saying(b'"numInternalKeys":', b'"numInternalKeys":1'), "full", "Spark's own"),
        (TRANSFORM, "state/0/0/10.zip", saying(b'"by":5', b'"by":9'), "full", "column family 5, which it does not"),
        (TRANSFORM, "state/0/0/10.zip", saying(b'"by":', b'"bye":'), "quick", "no column family 'by'"),
    ],
)
def test_checks_find_what_is_wrong_with_a_database(
    fixture: Path, pattern: str, change: Any, level: Any, what: str, tmp_path: Path
) -> None:
    some = broken(fixture, tmp_path / "copy", pattern, change)
    found = [problem for problem in check_source(some, level, lambda done, total: None) if problem.severity == "error"]
    assert len(found) == 1
    assert re.search(what, found[0].message)
    assert found[0].subtask == 0


def test_parts_tell_about_what_they_take() -> None:
    some = source(TRANSFORM / "checkpoint")
    there = sum(file.stat().st_size for file in (TRANSFORM / "checkpoint/state/0").glob("[0-9]/**/*.*"))
    assert 0.3 * there < sum(part.size_bytes for part in some.parts) <= there


def test_hidden_families_follow_from_those_that_are_shown() -> None:
    some = source(TRANSFORM / "checkpoint")
    assert {name for _, name in some.hidden} == {"$eventTimers_timestampToKey", "$rowCounter_notes"}
    index, hashed = some.hidden["operator-0", "$eventTimers_timestampToKey"]
    assert hashed == 1
    for partition in range(3):
        timers = next(part for part in some.parts if part.state == "timers" and part.subtask == partition)
        want = [[column.to_pylist() for column in columns[:2]] for _, columns in some.columns(timers)]
        files = rocksdb_store.files(index, partition, some.listing)
        entries = rocksdb_store.entries(some.folder, index, partition, files)
        got = [column.to_pylist() for column in rocksdb_store.columns(index, entries, "x")[:2]]
        assert sorted(map(str, zip(*got, strict=True))) == sorted(map(str, zip(*want[0], strict=True)) if want else [])
        # They come in the order of their times.
        assert got[1] == sorted(got[1])


def test_what_another_attempt_left_is_passed_over(tmp_path: Path) -> None:
    fixture = FIXTURES / "spark-4.3.0" / "aggregate-rocksdb-ids"

    def leave(file: Path) -> None:
        version = file.name.partition("_")[0]
        file.with_name(f"{version}_another-attempt.changelog").write_bytes(file.read_bytes()[:-9] or b"x")

    want = source(fixture / "checkpoint")
    some = broken(fixture, tmp_path / "copy", "state/0/*/*.changelog", leave)
    for one, other in zip(some.parts, want.parts, strict=True):
        assert list(rows(some, one)) == list(rows(want, other))


# Changelogs


def text(string: str) -> bytes:
    return len(string).to_bytes(2, "big") + string.encode()


def change(kind: int, key: bytes, value: bytes | None) -> bytes:
    size = -1 if value is None else len(value)
    return bytes([kind]) + len(key).to_bytes(4, "big") + key + size.to_bytes(4, "big", signed=True) + (value or b"")


CHANGES = [(1, b"k" * (n % 90), b"v" * (n * 7 % 130)) for n in range(700)]
CHANGES += [(0x10, b"gone", None), (0x11, b"list", b"item"), (0x20, b"a", b"b"), (1, b"", b"")]
LINEAGE = text('[{"version":3,"checkpointUniqueId":"a-b"},{"version":4,"checkpointUniqueId":"c"}]')


@pytest.mark.parametrize("changes", [CHANGES, CHANGES[:1], CHANGES[-4:], []], ids=len)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_changes_are_read_in_order(version: int, changes: list[tuple[int, bytes, bytes | None]]) -> None:
    if version in (1, 3):
        changes = [item for item in changes if item[0] in (1, 0x10)]
    marked = version in (2, 4)
    body = b"".join(change(*item)[0 if marked else 1 :] for item in changes) + (b"\0" if marked else b"\xff" * 4)
    octets = (b"" if version == 1 else text(f"v{version}")) + (LINEAGE if version > 2 else b"") + body
    found = read_changes(np.frombuffer(octets, np.uint8), "7.changelog")
    got = zip(found.kind.tolist(), found.key.to_arrow().to_pylist(), found.value.to_arrow().to_pylist(), strict=True)
    assert list(got) == [(kind, key, value or b"") for kind, key, value in changes]
    assert found.lineage == (((3, "a-b"), (4, "c")) if version > 2 else ())
    for size in range(max(0, len(octets) - 300), len(octets)):
        with pytest.raises(DamagedCheckpoint):
            read_changes(np.frombuffer(octets[:size], np.uint8), "7.changelog")


@pytest.mark.parametrize(
    ("octets", "error", "what"),
    [
        (text("v5") + b"\0", UnsupportedFormat, "version 5; 1 to 4 are known"),
        (text("v2") + change(0x12, b"k", b"v") + b"\0", DamagedCheckpoint, "unknown type 0x12"),
        (text("v2") + change(1, b"k", None) + b"\0", DamagedCheckpoint, "has none and does not"),
        (text("v2") + change(0x10, b"k", b"v") + b"\0", DamagedCheckpoint, "has a value and deletes"),
        (text("v4") + text("[1]") + b"\0", DamagedCheckpoint, "its lineage cannot be read"),
        (text("v2"), DamagedCheckpoint, "no end mark"),
    ],
)
def test_changes_that_cannot_be_are_refused(octets: bytes, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        read_changes(np.frombuffer(octets, np.uint8), "7.changelog")


def test_changelogs_alone_make_a_state(tmp_path: Path) -> None:
    # As a copy that was dealt anew has them: one full changelog, and empty ones before it.
    def full(file: Path) -> None:
        some = source(AGGREGATE / "checkpoint").entries(source(AGGREGATE / "checkpoint").parts[0])
        pairs = zip(some.keys.to_arrow().to_pylist(), some.values.to_arrow().to_pylist(), strict=True)
        body = b"".join(change(1, b"\0" + key, b"\0" + value)[1:] for key, value in pairs)
        for version in range(1, 6):
            octets = (body if version == 5 else b"") + b"\xff" * 4
            (file.parent / f"{version}.changelog").write_bytes(spark_encode("lz4", octets))
        for zipped in file.parent.glob("*.zip"):
            zipped.unlink()

    some = broken(AGGREGATE, tmp_path / "copy", "state/0/0/5.zip", full)
    want = source(AGGREGATE / "checkpoint")
    assert list(rows(some, some.parts[0])) == list(rows(want, want.parts[0]))


def spoiled(rng: random.Random, octets: bytes) -> bytes:
    found = bytearray(octets)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(found))
        found[at] = rng.choice((0, 255, 128, 127, rng.randrange(256), found[at] ^ 1 << rng.randrange(8)))
    return bytes(found[: rng.randrange(len(found))] if rng.random() < 0.1 else found)


def test_spoiled_changes_end_in_a_named_error_or_in_none() -> None:
    rng = random.Random(12)
    files = sorted(FIXTURES.glob("spark-4.3.0/*/checkpoint/state/0/0/*.changelog"))[::4]
    whole = [spark_decode("lz4", file.read_bytes(), file.name).tobytes() for file in files]
    refused = 0
    for _ in range(1500):
        try:
            read_changes(np.frombuffer(spoiled(rng, rng.choice(whole)), np.uint8), "x")
        except (DamagedCheckpoint, UnsupportedFormat):
            refused += 1
    assert refused > 300


def test_spoiled_entries_end_in_a_named_error_or_in_none() -> None:
    rng = random.Random(13)
    some = source(TRANSFORM / "checkpoint")
    parts = [(part, some.entries(part)) for part in some.parts]
    refused = 0
    for _ in range(1500):
        part, entries = rng.choice([one for one in parts if len(one[1].keys)])
        texts = [strings.to_arrow().to_pylist() for strings in (entries.keys, entries.values)]
        side, at = rng.randrange(2), rng.randrange(len(texts[0]))
        texts[side][at] = spoiled(rng, texts[side][at]) if texts[side][at] else b"\1"
        # The number of the family and the version lie before each key.
        changed = Entries(*(from_arrow(pa.array([bytes(3) + one for one in text])).without_prefix(3) for text in texts))
        store = some.stores[part.operator, part.state]
        try:
            rocksdb_store.columns(store, changed, "x")
        except (DamagedCheckpoint, UnsupportedFormat):
            refused += 1
    assert refused > 150


# ---- keys and lists as Spark lays them out in RocksDB: against an encoder for one row at a time

CONF = "spark.sql.streaming.stateStore."


def fields(**kinds: str) -> tuple[SparkField, ...]:
    listed = ",".join(
        f'{{"name":"{name}","type":"{kind}","nullable":true,"metadata":{{}}}}' for name, kind in kinds.items()
    )
    return parse_struct(f'{{"type":"struct","fields":[{listed}]}}', "x")


def store(key: Sequence[SparkField], encoder: dict[str, Any] | None = None, **conf: str) -> Store:
    schema = StoreSchema(tuple(key), fields(v="long"), "f", encoder or {})
    return Store(
        0, "f", 1, 1, schema, {CONF + name.replace("_", "."): value for name, value in conf.items()}, family="f"
    )


def strings(some: list[bytes]) -> ByteStrings:
    return from_arrow(pa.array(some, pa.binary()))


def row(*values: int | bytes | None) -> bytes:
    """An UnsafeRow after its version: longs, and bytes behind the fixed part."""
    nulls = sum(1 << at for at, value in enumerate(values) if value is None)
    head, tail = struct.pack("<q", nulls), b""
    for value in values:
        if isinstance(value, bytes):
            head += struct.pack("<q", (8 * (len(values) + 1) + len(tail)) << 32 | len(value))
            tail += value + bytes(-len(value) % 8)
        else:
            head += struct.pack("<q", value or 0)
    return b"\0" + head + tail


def ordered(kind: str, value: Any) -> bytes:
    """A mark and the number, so that bytes sort as numbers do (negative, positive, null)."""
    form = {"byte": ">b", "short": ">h", "integer": ">i", "long": ">q", "float": ">f", "double": ">d"}[kind]
    if value is None:
        return b"\2" + bytes(struct.calcsize(form))
    octets = struct.pack(form, value)
    if kind in ("float", "double") and octets[0] & 0x80:
        return b"\0" + bytes(255 - one for one in octets)
    return (b"\0" if value < 0 else b"\1") + octets


NUMBERS: dict[str, list[Any]] = {
    "byte": [-128, -1, 0, 1, 127, None],
    "short": [-32768, -2, 0, 32767, None],
    "integer": [-(2**31), -1, 0, 2**31 - 1, None],
    "long": [-(2**63), -1, 0, 1, 2**63 - 1, None],
    "float": [-math.inf, -1.5, -0.0, 0.0, 2.5, math.inf, None],
    "double": [-math.inf, -1e300, -0.0, 0.0, 1e-300, math.inf, None],
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_ordered_columns_are_decoded_and_their_bytes_sort_as_they_do(kind: str) -> None:
    octets = [ordered(kind, value) for value in NUMBERS[kind]]
    assert octets == sorted(octets)
    # The ordered column is the second; the first and the third are a row behind it.
    some = store(
        fields(a="long", n=kind, b="long"), {"keyStateEncoderType": rocksdb_keys.RANGE, "orderingOrdinals": [1]}
    )
    keys = [struct.pack("<i", len(row(one))) + row(one) + row(7, None) for one in octets]
    found = [column.to_pylist() for column in rocksdb_keys.key_columns(some, strings(keys), "x")]
    assert found == [[7] * len(octets), NUMBERS[kind], [None] * len(octets)]
    assert [str(value) for value in found[1]] == [str(value) for value in NUMBERS[kind]]


def test_keys_may_be_ordered_by_all_their_columns() -> None:
    some = store(fields(a="long", b="short"), {"keyStateEncoderType": rocksdb_keys.RANGE, "orderingOrdinals": [1, 0]})
    head = row(ordered("short", -4), ordered("long", 9))
    found = rocksdb_keys.key_columns(some, strings([struct.pack("<i", len(head)) + head]), "x")
    assert [column.to_pylist() for column in found] == [[9], [-4]]


def test_keys_with_a_prefix_are_put_together() -> None:
    some = store(fields(a="string", b="long"), {"keyStateEncoderType": rocksdb_keys.PREFIX, "numColsPrefixKey": 1})
    heads = [row(b"long enough"), row(b""), row(None)]
    keys = [struct.pack("<i", len(head)) + head + row(at) for at, head in enumerate(heads)]
    found = rocksdb_keys.key_columns(some, strings(keys), "x")
    assert [column.to_pylist() for column in found] == [["long enough", "", None], [0, 1, 2]]


@pytest.mark.parametrize("encoder", [rocksdb_keys.TIME_FIRST, rocksdb_keys.TIME_LAST])
def test_times_beside_keys_are_decoded(encoder: str) -> None:
    some = store(fields(a="long", at="long"), {"keyStateEncoderType": encoder})
    times = [-(2**63), -1, 0, 1, 2**63 - 1]
    marks = [struct.pack(">Q", time + 2**63) for time in times]
    keys = [mark + row(5) if encoder == rocksdb_keys.TIME_FIRST else row(5) + mark for mark in marks]
    found = rocksdb_keys.key_columns(some, strings(keys), "x")
    assert [column.to_pylist() for column in found] == [[5] * 5, times]


@pytest.mark.parametrize(
    ("encoder", "key", "error", "what"),
    [
        ({"keyStateEncoderType": "Newer"}, b"", UnsupportedFormat, "laid out by Newer"),
        ({"keyStateEncoderType": rocksdb_keys.PREFIX, "numColsPrefixKey": 1}, b"\0\0", DamagedCheckpoint, "two parts"),
        ({"keyStateEncoderType": rocksdb_keys.PREFIX, "numColsPrefixKey": 1}, b"\x7f\0\0\0\0\0", DamagedCheckpoint, "a first part of 127"),
        ({"keyStateEncoderType": rocksdb_keys.PREFIX, "numColsPrefixKey": 1}, b"\1\0\0\0\1\0", UnsupportedFormat, "encoded by version 1"),
        ({"keyStateEncoderType": rocksdb_keys.RANGE, "orderingOrdinals": [2]}, b"", DamagedCheckpoint, "orders keys by columns"),
        ({"keyStateEncoderType": rocksdb_keys.TIME_LAST}, b"\0" * 8, DamagedCheckpoint, "no row and time"),
        (
            {"keyStateEncoderType": rocksdb_keys.RANGE, "orderingOrdinals": [0]},
            struct.pack("<i", len(row(b"\1ab"))) + row(b"\1ab") + row(1),
            DamagedCheckpoint,
            "no mark and 8 bytes",
        ),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_are_refused(
    encoder: dict[str, Any], key: bytes, error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        rocksdb_keys.key_columns(store(fields(a="long", b="long"), encoder), strings([key]), "x")


# Lists


def listed(rows: list[bytes], gap: bytes, key: bytes | None = None) -> bytes:
    """Several values of a key, with checksums if a key is given."""
    found = []
    for one in rows:
        framed = struct.pack("<i", len(one)) + one
        if key is not None:
            whole = np.frombuffer(key + framed, np.uint8)
            framed = struct.pack("<Ii", int(crc32c(whole, np.array([len(whole)]))[0]), len(framed)) + framed
        found.append(framed)
    return gap.join(found)


@pytest.mark.parametrize("sums", ["false", "true"])
@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("few", [0, 16])
def test_lists_are_parted(version: str, sums: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb_keys, "_FEW", few)
    some = store(fields(a="long"), rocksdb_mergeOperatorVersion=version, rowChecksum_enabled=sums)
    rng = random.Random(7)
    lists = [[row(rng.randbytes(rng.randrange(40))) for _ in range(rng.randrange(9))] for _ in range(40)]
    lists += [[row(at) for at in range(500)], []]
    keys = [b"key %d" % at for at in range(len(lists))]
    gap = b"," if version == "1" else b""
    values = [listed(rows, gap, key if sums == "true" else None) for key, rows in zip(keys, lists, strict=True)]
    counts, rows = rocksdb_keys.split_values(some, strings(keys), strings(values), "x")
    assert counts.tolist() == [len(one) for one in lists]
    assert rows.to_arrow().to_pylist() == [one[1:] for rows in lists for one in rows]
    for cut in (1, 3, 6):
        torn = [values[0], values[-2][:-cut]]
        with pytest.raises(DamagedCheckpoint):
            rocksdb_keys.split_values(some, strings(keys[:1] + keys[-2:-1]), strings(torn), "x")


def test_values_with_checksums_of_others_are_damaged() -> None:
    some = store(fields(a="long"), rocksdb_mergeOperatorVersion="2", rowChecksum_enabled="true")
    octets = bytearray(listed([row(1), row(2)], b"", b"key"))
    octets[-1] ^= 1
    with pytest.raises(DamagedCheckpoint, match="a checksum of another"):
        rocksdb_keys.split_values(some, strings([b"key"]), strings([bytes(octets)]), "x")


def test_state_in_avro_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="encoded as 'avro'"):
        rocksdb_keys.encoder_of(store(fields(a="long"), encodingFormat="avro"))


# ---- tables of RocksDB: what RocksDB 9.8.4 wrote against what it read, and a model of its rules

TABLES = Path(__file__).parent / "fixtures" / "rocksdb-9.8.4"
REFUSED = {
    "compression-bzip2": "compressed by bzip2",
    "outside-untold": "its sequence number stands in the manifest only",
}
READERS = sorted(path.name for path in TABLES.iterdir() if path.name not in REFUSED)


def tables_of(name: str) -> list[Table]:
    return [opened(path.read_bytes(), path.name) for path in sorted((TABLES / name).glob("*.sst"))]


def contents(tables: list[Table], low: bytes | None = None, high: bytes | None = None) -> dict[bytes, bytes]:
    keys, values = merged(tables, low, high)
    found = keys.to_arrow().to_pylist()
    assert found == sorted(set(found))
    return dict(zip(found, values.to_arrow().to_pylist(), strict=True))


def expected_entries(name: str) -> dict[bytes, bytes]:
    lines = (TABLES / name / "expected.txt").read_text().splitlines()
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in (line.split(" ") for line in lines)}


def test_the_fixtures_are_of_every_kind() -> None:
    assert len(READERS) >= 25
    seen = {(table.file.version, table.file.checksum) for name in READERS for table in tables_of(name)}
    assert {version for version, _ in seen} == {2, 3, 4, 5, 6}
    assert {checksum for _, checksum in seen} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("name", READERS)
def test_what_rocksdb_wrote_is_read_as_rocksdb_reads_it(name: str) -> None:
    assert contents(tables_of(name)) == expected_entries(name)


@pytest.mark.parametrize("name", READERS)
def test_a_range_of_keys_is_what_the_whole_has_there(name: str) -> None:
    tables, whole = tables_of(name), expected_entries(name)
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
    first = min((TABLES / name).glob("*.sst"))
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
    monkeypatch.setattr(blocks, "_STEPS_MAX", 20)
    assert contents([opened(table(RECORDS, per_block=40, interval=20))]) == model(RECORDS)
    with pytest.raises(DamagedCheckpoint, match="more than 20 entries"):
        merged([opened(table(RECORDS, per_block=40, interval=21))])


def test_no_tables_hold_nothing() -> None:
    assert contents([]) == {}
    assert contents([opened(table([]))]) == {}
