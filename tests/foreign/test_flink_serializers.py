"""Values of Flink's serializers, written by hand: they are read, many at once, and we write the
same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from foreign.flink_written import (
    AVRO,
    AVRO_SCHEMA,
    COMPOSITE,
    INT,
    LONG,
    PLAIN,
    RUNTIME,
    TEXT,
    Kind,
    avro_snapshot,
    blob,
    case_class,
    composite,
    list_of,
    map_of,
    nullable,
    opaque,
    option,
    pack,
    pojo,
    pojo_fields,
    pojo_snapshot,
    row_of,
    top,
    tuple_of,
    utf,
    versioned,
)
from hypothesis import given, settings, strategies as some

from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.cursor import Cursor
from stateformat.backends.foreign.flink.compound import MapOf
from stateformat.backends.foreign.flink.headers import UnknownClass, read_top
from stateformat.backends.foreign.flink.lanes import Lanes, Serializer
from stateformat.backends.foreign.flink.writing.values import encode
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from stateformat.schema import make_fields

KINDS = pytest.mark.parametrize("kind", [*PLAIN, *COMPOSITE], ids=lambda kind: kind.name)


def serializer(snapshot: bytes) -> Serializer:
    at = Cursor(top(snapshot), "header")
    found = read_top(at)
    at.finish("the snapshot")
    return found


def strings(values: list[bytes]) -> ByteStrings:
    return from_arrow(pa.array(values, pa.binary()))


@KINDS
@settings(max_examples=25, deadline=None)
@given(data=some.data())
def test_values_are_read_as_they_were_written(kind: Kind, data: Any) -> None:
    values = data.draw(some.lists(kind.values, max_size=8))
    found = serializer(kind.snapshot).read_all(strings([kind.write(value) for value in values]))
    found.validate(full=True)
    assert found.type == serializer(kind.snapshot).arrow_type
    assert found.to_pylist() == [kind.read(value) for value in values]


@pytest.mark.parametrize(
    "kind", [kind for kind in (*PLAIN, *COMPOSITE) if kind is not AVRO], ids=lambda kind: kind.name
)
@settings(max_examples=25, deadline=None)
@given(data=some.data())
def test_values_are_written_as_flink_writes_them(kind: Kind, data: Any) -> None:
    values = data.draw(some.lists(kind.values, min_size=1, max_size=8))
    written = [kind.write(value) for value in values]
    found = serializer(kind.snapshot)
    assert encode(found, found.read_all(strings(written))).to_pylist() == written


def test_texts_of_avro_are_not_written() -> None:
    found = serializer(
        avro_snapshot({"type": "record", "name": "a.Word", "fields": [{"name": "text", "type": "string"}]})
    )
    with pytest.raises(
        UnsupportedFormat, match="are read from Flink, and not written; import the savepoint again without it"
    ):
        encode(found, found.read_all(strings([pack("i", 2) + b"no"])))


@KINDS
@settings(max_examples=10, deadline=None)
@given(data=some.data())
def test_skipping_ends_where_reading_ends(kind: Kind, data: Any) -> None:
    values = data.draw(some.lists(kind.values, min_size=1, max_size=8))
    packed = strings([kind.write(value) * 2 for value in values])
    found = serializer(kind.snapshot)
    read, skipped = Lanes.of(packed), Lanes.of(packed)
    found.read(read)
    found.skip(skipped)
    assert np.array_equal(read.position, skipped.position)
    assert found.read(skipped).to_pylist() == [kind.read(value) for value in values]
    skipped.finish()


@KINDS
@settings(max_examples=10, deadline=None)
@given(data=some.data())
def test_a_truncated_value_is_an_error(kind: Kind, data: Any) -> None:
    written = kind.write(data.draw(kind.values))
    whole = kind.write(data.draw(kind.values))
    cut = written[: data.draw(some.integers(0, len(written) - 1))]
    with pytest.raises(DamagedCheckpoint):
        serializer(kind.snapshot).read_all(strings([whole, cut]))


@KINDS
@settings(max_examples=15, deadline=None)
@given(data=some.data())
def test_a_flipped_bit_gives_a_value_or_an_error(kind: Kind, data: Any) -> None:
    written = bytearray(kind.write(data.draw(kind.values)))
    at = data.draw(some.integers(0, len(written) * 8 - 1))
    written[at >> 3] ^= 1 << (at & 7)
    try:
        found = serializer(kind.snapshot).read_all(strings([bytes(written)]))
    except (DamagedCheckpoint, UnsupportedFormat):
        return
    found.validate(full=True)
    assert len(found) == 1


@KINDS
def test_every_type_is_one_that_the_format_holds(kind: Kind) -> None:
    fields, _ = make_fields(pa.schema([("value", serializer(kind.snapshot).arrow_type)]), defaults={})
    assert fields[0].name == "value"


@KINDS
def test_every_truncation_of_a_snapshot_is_an_error(kind: Kind) -> None:
    whole = top(kind.snapshot)
    for size in range(len(whole)):
        with pytest.raises(DamagedCheckpoint, match="header is damaged at byte"):
            read_top(Cursor(whole[:size], "header"))


@pytest.mark.parametrize("kind", COMPOSITE[3:11] + COMPOSITE[-4:], ids=lambda kind: kind.name)
def test_flipped_bits_of_a_snapshot_are_read_or_named(kind: Kind) -> None:
    for at in range(len(top(kind.snapshot))):
        flipped = bytearray(top(kind.snapshot))
        flipped[at] ^= 1 << (at * 5 & 7)
        try:
            found = read_top(Cursor(bytes(flipped), "header"))
        except (DamagedCheckpoint, UnsupportedFormat):
            continue
        assert isinstance(found, Serializer)


@pytest.mark.parametrize(
    ("kind", "length", "java_hash"),
    [
        (LONG, 8, "Long"),
        (TEXT, None, "String"),
        (tuple_of(LONG, INT), 12, "Tuple"),
        (tuple_of(LONG, TEXT), None, "Tuple"),
        (case_class(LONG, LONG), 16, None),
        (option(LONG), None, None),
        (nullable(LONG, 8), 9, "Long"),
        (nullable(LONG), None, "Long"),
        (PLAIN[12], 1, None),
        (pojo("a.B", x=LONG), None, None),
        (row_of(LONG), None, None),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_lengths_and_hashes_are_known(kind: Kind, length: int | None, java_hash: str | None) -> None:
    found = serializer(kind.snapshot)
    assert (found.fixed_length, found.java_hash) == (length, java_hash)


def test_an_unknown_class_ends_a_snapshot_and_is_named() -> None:
    snapshot = composite(
        RUNTIME + "TupleSerializerSnapshot", [LONG.snapshot, versioned("com.example.Mine", 7, b"?")], utf("a"), 2
    )
    with pytest.raises(UnknownClass, match=r"com\.example\.Mine") as caught:
        serializer(snapshot)
    assert caught.value.details["java_class"] == "com.example.Mine"


@pytest.mark.parametrize(
    "name", ["LongSerializer$LongSerializerSnapshot", "com.example.LongSerializer$LongSerializerSnapshot"]
)
def test_only_classes_of_flink_are_known(name: str) -> None:
    with pytest.raises(UnknownClass):
        serializer(versioned(name, 3))


def test_an_unknown_class_in_a_pojo_is_opaque() -> None:
    fields = {"a": LONG.snapshot, "b": versioned("com.example.Mine", 7, b"any bytes")}
    found = serializer(pojo_snapshot("a.B", fields))
    assert found.takes_rest
    assert found.opaque == ("com.example.Mine",)
    written = b"\2\0" + pack("q", 5) + b"\0opaque"
    assert found.read_all(strings([written, b"\1"])).to_pylist() == [{"a": 5, "b": b"opaque"}, None]


@pytest.mark.parametrize(
    "snapshot",
    [
        pojo_snapshot("a.B", {"a": opaque("a.C"), "b": LONG.snapshot}),
        list_of(Kind("opaque", opaque("a.C"), some.nothing(), bytes)).snapshot,
        tuple_of(Kind("opaque", opaque("a.C"), some.nothing(), bytes), LONG).snapshot,
        row_of(Kind("opaque", opaque("a.C"), some.nothing(), bytes), LONG).snapshot,
        opaque("a.C"),
    ],
)
def test_what_holds_an_opaque_value_before_others_is_opaque_as_a_whole(snapshot: bytes) -> None:
    found = serializer(snapshot)
    assert found.takes_rest
    assert found.arrow_type == pa.binary()
    assert found.opaque == ("a.C",)
    assert found.read_all(strings([b"any", b""])).to_pylist() == [b"any", b""]


def test_an_opaque_value_at_the_end_leaves_what_is_before_it_typed() -> None:
    found = serializer(tuple_of(LONG, nullable(Kind("opaque", opaque(), some.nothing(), bytes))).snapshot)
    assert found.takes_rest
    assert found.read_all(strings([pack("q", 1) + b"\0any", pack("q", 2) + b"\1"])).to_pylist() == [
        {"f0": 1, "f1": b"any"},
        {"f0": 2, "f1": None},
    ]


def test_a_map_of_opaque_values_still_has_its_key() -> None:
    found = serializer(map_of(Kind("opaque", opaque("a.C"), some.nothing(), bytes)).snapshot)
    assert isinstance(found, MapOf)
    assert (found.key.arrow_type, found.value.arrow_type, found.arrow_type) == (pa.string(), pa.binary(), pa.binary())


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "record", "name": "Tree", "fields": [{"name": "child", "type": ["null", "Tree"]}]},
        {"type": "array", "items": "null"},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": "null"}]},
        {"type": "record", "name": "R", "fields": "x"},
        {"type": "fixed", "name": "F", "size": -1},
        {"type": "enum", "name": "E"},
        ["null"],
        ["long", "long"],
        "unknown",
        7,
    ],
)
def test_avro_without_an_arrow_type_is_opaque(schema: Any) -> None:
    found = serializer(avro_snapshot(schema))
    assert found.takes_rest
    assert found.opaque == ("a.Record",)


JSON = some.recursive(
    some.none()
    | some.integers()
    | some.sampled_from(["null", "long", "string", "record", "array", "enum", "fixed", "R"]),
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.dictionaries(
            some.sampled_from(["type", "name", "fields", "items", "values", "symbols", "size", "logicalType"]), inner
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(schema=JSON)
def test_no_schema_of_avro_breaks_the_parse(schema: Any) -> None:
    found = serializer(avro_snapshot(schema))
    make_fields(pa.schema([("value", found.arrow_type)]), defaults={})


@pytest.mark.parametrize(("depth", "opaque"), [(8, False), (9, True), (20, True)])
def test_types_that_are_nested_too_deep_are_opaque(depth: int, opaque: bool) -> None:
    kind = LONG
    for _ in range(depth):
        kind = list_of(kind)
    found = serializer(kind.snapshot)
    make_fields(pa.schema([("value", found.arrow_type)]), defaults={})
    assert found.takes_rest == opaque


def test_avro_of_the_first_version_has_no_class() -> None:
    found = serializer(avro_snapshot(AVRO_SCHEMA, 1))
    assert found.arrow_type == serializer(AVRO.snapshot).arrow_type


BASE_FIELDS = {"id": LONG}
CIRCLE = {"id": LONG, "radius": INT}
SQUARE = {"id": LONG, "radius": TEXT}


def shape(fields: dict[str, Kind], name: str) -> bytes:
    return pojo_snapshot(name, {field: child.snapshot for field, child in fields.items()})


def test_subclasses_are_read_into_the_fields_of_all() -> None:
    snapshot = pojo_snapshot(
        "a.Shape",
        {"id": LONG.snapshot},
        {"a.Circle": shape(CIRCLE, "a.Circle")},
        {"a.Square": shape(SQUARE, "a.Square")},
    )
    found = serializer(snapshot)
    assert found.arrow_type == pa.struct(
        [("class", pa.string()), ("id", pa.int64()), ("radius", pa.int32()), ("radius_2", pa.string())]
    )
    written = [
        pojo_fields(BASE_FIELDS, {"id": 1}),
        b"\x08\0" + pojo_fields(CIRCLE, {"id": 2, "radius": 7}),
        b"\4" + utf("a.Square") + pojo_fields(SQUARE, {"id": 3, "radius": "wide"}),
        b"\1",
        b"\x08\0" + pojo_fields(CIRCLE, {"id": 4, "radius": None}),
    ]
    expected = [
        {"class": "a.Shape", "id": 1, "radius": None, "radius_2": None},
        {"class": "a.Circle", "id": 2, "radius": 7, "radius_2": None},
        {"class": "a.Square", "id": 3, "radius": None, "radius_2": "wide"},
        None,
        {"class": "a.Circle", "id": 4, "radius": None, "radius_2": None},
    ]
    assert found.read_all(strings(written)).to_pylist() == expected
    skipped = Lanes.of(strings(written))
    found.skip(skipped)
    skipped.finish()


@pytest.mark.parametrize("written", [b"\4" + utf("a.Other") + b"\2", b"\x08\5\2"])
def test_a_subclass_that_is_not_described_is_refused(written: bytes) -> None:
    with pytest.raises(UnsupportedFormat, match=r"of the subclass (a\.Other|with tag 5), whose fields"):
        serializer(shape(BASE_FIELDS, "a.Shape")).read_all(strings([written]))


def test_keys_have_no_row_kind_and_only_inserts() -> None:
    kind = row_of(LONG, TEXT)
    found = serializer(kind.snapshot).as_key()
    assert found.read_all(strings([kind.write((0, 5, "x"))])).to_pylist() == [{"f0": 5, "f1": "x"}]
    with pytest.raises(UnsupportedFormat, match="a row of kind -D"):
        found.read_all(strings([kind.write((3, 5, "x"))]))


@pytest.mark.parametrize("count", [-1, 3, 2**31 - 1])
def test_a_count_that_does_not_fit_takes_no_memory(count: int) -> None:
    with pytest.raises(DamagedCheckpoint, match="items should follow"):
        serializer(list_of(LONG).snapshot).read_all(strings([pack("i", count) + bytes(16)]))


@pytest.mark.parametrize("name", ["X" * 2000, "a\nb", "\x1b[31m"])
def test_names_that_are_none_are_damaged(name: str) -> None:
    # A long constant would make gigabytes of values of four bytes.
    body = utf("a.B") + pack("i", 1) + utf(name)
    with pytest.raises(DamagedCheckpoint, match="a constant is none that a name can be"):
        serializer(
            versioned("org.apache.flink.api.common.typeutils.base.EnumSerializer$EnumSerializerSnapshot", 3, body)
        )


def test_serializers_in_serializers_have_a_limit() -> None:
    snapshot = LONG.snapshot
    for _ in range(2000):
        snapshot = composite("org.apache.flink.api.common.typeutils.base.ListSerializerSnapshot", [snapshot])
    with pytest.raises(UnsupportedFormat, match="33 levels, and at most 32"):
        serializer(snapshot)


def test_blobs_in_blobs_have_a_limit() -> None:
    snapshot = LONG.snapshot
    for _ in range(100):
        snapshot = pojo_snapshot("a.B", {"x": snapshot})
    with pytest.raises(UnsupportedFormat, match="33 levels, and at most 32"):
        serializer(snapshot)
    assert blob(b"") == bytes(4)
