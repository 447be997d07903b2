"""Values of Kryo 2 in what Flink 1.20 wrote, against values written by hand."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from flink_written import utf, versioned
from hypothesis import given, settings, strategies as some
from kryo_written import ARRAY_LIST, leaf, listed, mapped, named, seven, text

import stateformat
from stateformat.backends.foreign.byte_strings import from_arrow
from stateformat.backends.foreign.cursor import Cursor
from stateformat.backends.foreign.flink import kryo
from stateformat.backends.foreign.flink.headers import read_top
from stateformat.backends.foreign.flink.kryo_columns import Kryo, KryoTypes
from stateformat.backends.foreign.flink.lanes import Lanes, Opaque, Serializer
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from tests.ckpt.ckpt_runs import document, failure, page
from tests.foreign.test_flink_written import making

FIXTURES = Path(__file__).parent / "fixtures" / "flink-1.20.5"
GENERIC, WEIGHED = "4dea39c4bfa246f88b761c6cc4d829c1", "fc3d869592608b1c46217ed1fea0d67e"
SAVED = ["generic-hashmap-canonical/savepoint", "generic-hashmap-native/savepoint"]
SAVED.append("generic-rocksdb-checkpoint/savepoint/000000000000000000000000005c3e9f")
CANONICAL = FIXTURES / SAVED[0]
ODD = "\u00e9\u20ac\U0001f600"


def tagged(n: int) -> dict[str, Any]:
    """What ``Generic.java`` makes of a number."""
    tags = None if n == 2 else [ODD if i == 3 else f"tag {i}" for i in range(n)]
    return {"id": n, "name": None if n == 1 else f"name {n}", "tags": tags}


def everything(n: int) -> dict[str, Any]:
    colour = ["RED", "GREEN", "BLUE"][n % 3]
    return {
        "attributes": json.dumps({"price": "1.50", "count": n, "list": ["x", True]}),
        "codes": [n, -n - 1],
        "colour": colour,
        "colours": [colour, colour, "GREEN"],
        "counts": [("n", n), ("none", None)],
        "dates": [[dt.datetime(1970, 1, 1, 0, 0, n, tzinfo=dt.UTC)], []],
        "days": [dt.date(2024, 2, 28 + n % 2), None],
        "last": "end",
        "mixed": json.dumps(f"text {n}" if n % 2 == 0 else n),
        "pause": {"seconds": 1500 * n // 1000, "nanos": 500_000_000 * (n % 2)},
        "series": [(n, [n / 2, -1.5])],
        "tags": ["same", "same", f"t{n}"] if n % 2 == 0 else ["a", None],
        "token": f"00000000-0000-{n:04x}-"
        + (f"{(1 << 64) - n:016x}" if n else "0" * 16)[:4]
        + "-"
        + (f"{(1 << 64) - n:016x}" if n else "0" * 16)[4:],
    }


def rows(folder: Path, operator: str, state: str) -> pa.Table:
    return stateformat.open(str(folder)).open().read(operator, state).table()


def value_of(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: row[name]["json"] for name in ("attributes", "mixed")}
    return {**row, **texts, "counts": sorted(row["counts"])}


@pytest.mark.parametrize("saved", SAVED)
def test_a_pojo_of_flink_1_shows_its_lists_maps_and_sets(saved: str) -> None:
    found = rows(FIXTURES / saved, GENERIC, "tagged")
    assert dict(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True)) == {
        n: tagged(n) for n in range(6)
    }
    assert found["value"].type.field("tags").type == pa.list_(pa.field("element", pa.string()))
    found = rows(FIXTURES / saved, GENERIC, "everything")
    values = dict(zip(found["key"].to_pylist(), map(value_of, found["value"].to_pylist()), strict=True))
    assert values == {n: everything(n) for n in range(6)}


@pytest.mark.parametrize("saved", SAVED)
def test_elements_and_values_of_maps_are_shown_too(saved: str) -> None:
    found = rows(FIXTURES / saved, GENERIC, "list").sort_by([("key", "ascending"), ("_index", "ascending")])
    assert found["value"].to_pylist() == [tagged(n + more) for n in range(6) for more in (0, 1)]
    found = rows(FIXTURES / saved, GENERIC, "map").sort_by("key")
    assert found["_map_key"].to_pylist() == [f"m{n}" for n in range(6)]
    assert found["value"].to_pylist() == [[n, n + 1] for n in range(6)]


def test_a_class_that_only_the_job_knows_stays_bytes_and_is_named() -> None:
    checkpoint = stateformat.open(str(CANONICAL)).open()
    said = [note.message for note in checkpoint.notes if note.subject == f"{WEIGHED}/weighed"]
    assert said == ["not decoded, and kept as bytes: java.util.List, fixtures.Generic$Tag"]
    found = rows(CANONICAL, WEIGHED, "weighed")["value"].to_pylist()
    assert {value["first"] for value in found} == {"first"}
    assert all(b"fixtures.Generic$Ta" in value["tags"] for value in found)


def test_sql_inspect_and_get_show_the_list() -> None:
    found = document("sql", CANONICAL, f'select value.tags as t from "{GENERIC}".tagged where key = 3')
    assert found["rows"] == [{"t": ["tag 0", "tag 1", "tag 2"]}]
    assert "tags list<utf8>" in " ".join(page("inspect", CANONICAL, COLUMNS="200").split())
    assert "tag 2" in page("get", CANONICAL, "--state", "tagged", "--key", "3", COLUMNS="200")


def test_what_is_imported_goes_back_with_the_same_values(tmp_path: Path) -> None:
    page("import", CANONICAL, "--to", tmp_path / "store", "--key-hash", "keep", COLUMNS="200")
    page("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back", COLUMNS="200")
    for state in ("tagged", "list", "map", "everything", "weighed"):
        operator = WEIGHED if state == "weighed" else GENERIC
        was, now = (rows(folder, operator, state).to_pylist() for folder in (CANONICAL, tmp_path / "back"))
        assert now == was


def test_what_is_shown_as_json_keeps_its_bytes_for_the_way_back() -> None:
    value = rows(CANONICAL, GENERIC, "everything")["value"][0].as_py()
    assert value["attributes"]["kryo"].startswith(named("java.util.LinkedHashMap"))
    assert value["attributes"]["kryo"].endswith(b"\5\1")


MENDING = """
import pyarrow as pa


def corrected(rows):
    made = rows.to_pylist()
    for row in made:
        if row["key"] == 3:
            for name, value in {}.items():
                row["value"][name] = {{**row["value"][name], **value}} if isinstance(value, dict) else value
    return pa.Table.from_pylist(made, rows.schema)
"""


def refused(store: Path, tmp_path: Path, **fields: Any) -> str:
    """What an export says of fields of `everything` that were corrected where the key is 3."""

    mending = tmp_path / f"{tmp_path.name}.py"
    mending.write_text(MENDING.format(fields))
    how = f"everything={mending}:corrected"
    page("rewrite", store, "--to", tmp_path / "mended", "--transform", how, COLUMNS="200")
    argv = ("export", tmp_path / "mended", "--as", "flink-savepoint", "--to", tmp_path / "back")
    said: str = failure(*argv, status=2)["message"]
    assert f"key 3 in state 'everything' of operator '{GENERIC}'" in said
    assert not list(tmp_path.glob("back/_metadata"))
    return said


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kryo") / "store"
    page("import", CANONICAL, "--to", folder, "--key-hash", "keep", COLUMNS="200")
    return folder


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"json": '{"price": "9.99"}'},
            '{"price": "9.99"}, and its `kryo`, which is what goes back to Flink, stands for {"price": "1.50", "count": 3, ',
        ),
        (
            {"json": '"new"', "kryo": None},
            'the `json` "new", and its `kryo`, which is what goes back to Flink, is null',
        ),
        ({"json": None}, 'the `json` null, and its `kryo`, which is what goes back to Flink, stands for {"price"'),
        ({"kryo": b"\2\6\6"}, "stands for no value; correct both"),
    ],
)
def test_text_that_its_bytes_do_not_say_is_not_exported(
    changed: dict[str, Any], said: str, store: Path, tmp_path: Path
) -> None:
    assert "`value.attributes` of key 3 in state" in (found := refused(store, tmp_path, attributes=changed))
    assert said in found


def test_text_goes_back_with_other_bytes_that_say_the_same() -> None:
    serializer = column([leaf("x"), leaf(7)])
    values = [{"json": "[1, null]", "kryo": listed([1, None])}, {"json": '["x",   2]', "kryo": listed(["x", 2])}, None]
    values.append({"json": None, "kryo": None})
    found = serializer.encode(pa.array(values, serializer.arrow_type)).to_pylist()
    assert found == [listed([1, None]), listed(["x", 2]), b"\0", b"\0"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pause": {"nanos": 2 * 10**9}}, "`value.pause` of key 3 in state"),
        (
            {"pause": {"seconds": None, "nanos": 5}},
            "is {'seconds': None, 'nanos': 5}, and a java.time.Duration is `seconds`, and `nanos` from 0 to 999,999,999",
        ),
        (
            {"token": "no"},
            "is 'no', and a java.util.UUID is hexadecimal digits in groups of 8, 4, 4, 4 and 12; correct the",
        ),
        ({"counts": [("a", 1), ("b", 2), ("a", 3)]}, "has the key 'a' more than once, and a java.util."),
        ({"colours": ["RED", "PINK"]}, "is 'PINK', which is no constant of "),
    ],
)
def test_a_value_that_flink_would_not_read_is_not_exported(
    changed: dict[str, Any], said: str, store: Path, tmp_path: Path
) -> None:
    found = refused(store, tmp_path, **changed)
    assert f"`value.{next(iter(changed))}` of key 3" in found
    assert said in found
    assert "--drop" not in found


# ---- single values

KNOWN = kryo.Known(kryo.registered(["java.lang.Object"]), {"P$Colour": ("RED", "GREEN")})
WRITTEN: list[tuple[str, str, Any]] = [
    ("short", "08fffe", -2),
    ("byte", "06fd", -3),
    ("char", "070078", "x"),
    ("float", "043fc00000", 1.5),
    ("emoji", "030184eda0bdedb88078", "\U0001f600x"),
    ("nul", "03016100e2", "a\0b"),
    (
        "long64",
        (
            "0301c1013031323334353637383930313233343536373839303132333435363738393031323334353637383930313233"
            "3435363738393031323334353637383930313233"
        ),
        "0123456789" * 6 + "0123",
    ),
    ("refs", "01006a6176612e7574696c2e41727261794c6973f4010403017265f00303030182620303", ["rep", "rep", "b", "rep"]),
    ("nested", "01006a6176612e7574696c2e41727261794c6973f40102010001010301826101000100", [["a"], []]),
    ("asList", "4b0102030301826103018262", ["a", "b"]),
    ("TreeSet", "01006a6176612e7574696c2e547265655365f40100020301826103018262", ["a", "b"]),
    ("TreeMap", "01006a6176612e7574696c2e547265654d61f00100020301826b090e0301826e00", [("k", 7), ("n", None)]),
    ("EnumMap", "01006a6176612e7574696c2e456e756d4d61f0010101015024436f6c6f75f201010902", [("RED", 1)]),
    ("EnumSet", "01006a6176612e7574696c2e526567756c6172456e756d5365f40101015024436f6c6f757224b10102", ["GREEN"]),
    ("enumB", "01005024436f6c6f757224b10102", "GREEN"),
    ("dow", "01006a6176612e74696d652e4461794f66576565eb0101", "MONDAY"),
    ("emptyMap", "01006a6176612e7574696c2e436f6c6c656374696f6e7324456d7074794d61f001", []),
    ("singleton", "01006a6176612e7574696c2e436f6c6c656374696f6e732453696e676c65746f6e5365f40103018261", ["a"]),
    (
        "singletonMap",
        "01006a6176612e7574696c2e436f6c6c656374696f6e732453696e676c65746f6e4d61f001030182610202",
        [("a", 1)],
    ),
    ("PriorityQueue", "4d01000202020206", [1, 3]),
    ("ts", "5101d209809dca6f", {"seconds": 1, "nanos": 234_000_000}),
    ("BigInteger", "01006a6176612e6d6174682e426967496e74656765f2010a06b14e9f812f366c35", "123456789012345678901"),
    ("BigDecimal", "01006a6176612e6d6174682e426967446563696d61ec0103009604", "1.50"),
    ("UUID", "54010204", "00000000-0000-0001-0000-000000000002"),
    ("URI", "5201687474703a2f2f782ff9", "http://x/y"),
    ("BitSet", "4c01010000000000000005", [0, 2]),
    ("Currency", "01006a6176612e7574696c2e43757272656e63f9014555d2", "EUR"),
    ("Instant", "01006a6176612e74696d652e496e7374616ef4010e0a", {"seconds": 5, "nanos": 7}),
    ("LocalDate", "01006a6176612e74696d652e4c6f63616c446174e50100030002c81f", dt.date(2020, 2, 3)),
    ("LocalTime", "01006a6176612e74696d652e4c6f63616c54696de50101020803", 3_723_000_000_004),
    (
        "LDT",
        "01006a6176612e74696d652e4c6f63616c4461746554696de5010100030002c81f0104050006",
        {"date": dt.date(2020, 2, 3), "nanos": 14_706_000_000_000},
    ),
    ("Period", "01006a6176612e74696d652e506572696fe401060402", {"years": 1, "months": 2, "days": 3}),
    (
        "Zoned",
        (
            "01006a6176612e74696d652e5a6f6e65644461746554696de501010100030002c81f010405000601a03801016a617661"
            "2e74696d652e5a6f6e65526567696fee01014575726f70652f50617269f3"
        ),
        '"2020-02-03T04:05:06+01:00[Europe/Paris]"',
    ),
    (
        "ODT",
        "01006a6176612e74696d652e4f66667365744461746554696de501010100030002c81f010405000601c070",
        '"2020-02-03T04:05:06+02:00"',
    ),
    ("OT", "01006a6176612e74696d652e4f666673657454696de50101c0700104050006", '"04:05:06+02:00"'),
    ("YM", "01006a6176612e74696d652e596561724d6f6e74e80106c81f", '"2020-03"'),
    ("MD", "01006a6176612e74696d652e4d6f6e74684461f9010806", '"--03-04"'),
    (
        "AtomicBoolean",
        "01006a6176612e7574696c2e636f6e63757272656e742e61746f6d69632e41746f6d6963426f6f6c6561ee0102",
        True,
    ),
    ("int[]", "01005bc901030203", [1, -2]),
    ("boolean[]", "01005bda010201", [True]),
    ("byte[]", "01005bc201030102", b"\1\2"),
    ("char[]", "01005bc301020061", "a"),
    ("String[]", "01005b4c6a6176612e6c616e672e537472696e67bb01040182610003", '["a", null, "a"]'),
    ("Integer[]", "01005b4c6a6176612e6c616e672e496e7465676572bb0103010200", "[1, null]"),
    (
        "Date[]",
        "01005b4c6a6176612e7574696c2e44617465bb010201016a6176612e7574696c2e446174e50105",
        '["1970-01-01T00:00:00.005000Z"]',
    ),
    ("int[][]", "01005b5bc90103010202010204", "[[1], [2]]"),
    (
        "listDates",
        (
            "01006a6176612e7574696c2e41727261794c6973f4010301016a6176612e74696d652e4c6f63616c446174e501000300"
            "02c81f01010100040002c81f00"
        ),
        [dt.date(2020, 2, 3), dt.date(2020, 2, 4), None],
    ),
    (
        "mixed",
        "01006a6176612e7574696c2e41727261794c6973f401050202090403018278000a4008000000000000",
        '[1, 2, "x", null, 3.0]',
    ),
]
"""Values, what the Kryo of Flink 1.20.5 wrote of them in Java 17, and what we read."""


def node_of(raw: bytes) -> kryo.Node:
    at = kryo.Reader(KNOWN, memoryview(raw), 0, len(raw), "stream")
    found = at.value()
    assert at.position == len(raw)
    return found


def column(raws: list[bytes]) -> Kryo:
    shape = kryo.UNSEEN
    for raw in raws:
        shape = kryo.merged(shape, kryo.shape_of(node_of(raw)))
    return Kryo("java.lang.Object", KNOWN, shape)


def lanes_of(raws: list[bytes]) -> Lanes:
    return Lanes.of(from_arrow(pa.array(raws, pa.binary())), "stream")


@pytest.mark.parametrize(("raw", "value"), [one[1:] for one in WRITTEN], ids=[one[0] for one in WRITTEN])
def test_what_kryo_wrote_is_read(raw: str, value: Any) -> None:
    whole = bytes.fromhex(raw)
    found = column([whole]).read_all(from_arrow(pa.array([whole] * 2, pa.binary())))
    found.validate(full=True)
    shown = [item["json"] if isinstance(item, dict) and "json" in item else item for item in found.to_pylist()]
    assert shown == [value] * 2
    for size in range(len(whole)):
        with pytest.raises((DamagedCheckpoint, UnsupportedFormat)):
            node_of(whole[:size])


@pytest.mark.parametrize("raw", [one[1] for one in WRITTEN], ids=[one[0] for one in WRITTEN])
def test_what_is_read_is_written_as_the_same_value(raw: str) -> None:
    whole = bytes.fromhex(raw)
    serializer = column([whole])
    values = serializer.read(lanes_of([whole]))
    again = serializer.encode(values)
    assert serializer.read(lanes_of(again.to_pylist())).to_pylist() == values.to_pylist()


@pytest.mark.parametrize(
    ("written", "value", "said"),
    [
        ("Instant", {"seconds": 1, "nanos": -1}, "and a java.time.Instant is `seconds`, and `nanos` from 0"),
        ("ts", {"seconds": 1, "nanos": 10**9}, "'nanos': 1000000000}, and a java.sql.Timestamp is `seconds`"),
        ("ts", {"seconds": 2**62, "nanos": 0}, "whose milliseconds fit into 64 bits"),
        ("LocalTime", 86_400 * 10**9, "is 86400000000000, and a java.time.LocalTime is from 0 to 86,399,999,999,999"),
        ("LocalTime", -1, "is -1, and a java.time.LocalTime"),
        ("LocalDate", 2**31 - 1, "is 2147483647, and a java.time.LocalDate is a day of the years"),
        ("LDT", {"date": None, "nanos": 0}, "and a java.time.LocalDateTime is a `date`"),
        ("LDT", {"date": 0, "nanos": -1}, "and a java.time.LocalDateTime is a `date`"),
        ("Period", {"years": 1, "months": None, "days": 1}, "none of them null"),
        ("char", "xy", "is 'xy', and a java.lang.Character is one UTF-16 unit"),
        ("UUID", "00000000-0000-0001-0000-00000000000200", "and a java.util.UUID is hexadecimal digits"),
        ("BigInteger", "1.5", "is '1.5', and a java.math.BigInteger is decimal digits"),
        ("BigDecimal", "NaN", "is 'NaN', and a java.math.BigDecimal is a decimal number"),
        ("BigDecimal", "1E+99999999999", "whose exponent fits into 32 bits"),
        ("BitSet", [-3], "and a java.util.BitSet is the numbers of its bits, from 0"),
        ("int[]", [1, None], "is None, and a java.lang.Integer is not null"),
        ("dow", "PAYDAY", "which is no constant of java.time.DayOfWeek; give one of MONDAY, "),
        ("TreeMap", [("k", 1), ("k", 2)], "has the key 'k' more than once, and a java.util.TreeMap has it once"),
    ],
)
def test_a_value_that_would_be_read_as_another_is_refused(written: str, value: Any, said: str) -> None:
    serializer = column([bytes.fromhex({one[0]: one[1] for one in WRITTEN}[written])])
    plain = pa.int32() if written == "LocalDate" else serializer.arrow_type
    if written == "LDT":
        plain = pa.struct([("date", pa.int32()), ("nanos", pa.int64())])
    with pytest.raises(kryo.WrongValueError) as found:
        serializer.encode(pa.array([None, value], plain).cast(serializer.arrow_type))
    assert said in str(found.value)


def test_dates_have_whole_milliseconds() -> None:
    serializer = column([named("java.util.Date") + b"\1\5"])
    with pytest.raises(
        kryo.WrongValueError, match=r"is 1970-01-01T00:00:00\.001500Z, and a java.util.Date is whole milli"
    ):
        serializer.encode(pa.array([1500], serializer.arrow_type))
    assert serializer.encode(pa.array([-5000], serializer.arrow_type)).to_pylist()[0].endswith(b"\xff")


def test_numbers_in_other_words_are_written_as_what_they_are() -> None:
    for written, values in {
        "UUID": ("00000000-0000-00AF-0000-000000000002",),
        "BigDecimal": ("1e3", "-0.5", "7.00"),
    }.items():
        serializer = column([bytes.fromhex({one[0]: one[1] for one in WRITTEN}[written])])
        raws = serializer.encode(pa.array(values, pa.string())).to_pylist()
        again = serializer.read(lanes_of(raws)).to_pylist()
        assert again == [str(decimal.Decimal(one)) if "." in one or "e3" in one else one.lower() for one in values]


texts = some.none() | some.text(some.characters(codec="utf-8"), max_size=80) | some.sampled_from(["", "a", "tag"])
numbers = some.none() | some.integers(-(2**31), 2**31 - 1)
longs = some.none() | some.integers(-(2**63), 2**63 - 1)


@settings(max_examples=25, deadline=None)
@given(some.data(), some.sampled_from(["texts", "numbers", "longs", "pairs", "text"]))
def test_many_everyday_values_are_read_as_each_by_itself(data: some.DataObject, kind: str) -> None:
    made = {
        "texts": some.lists(texts, max_size=5).map(listed),
        "numbers": some.lists(numbers, max_size=5).map(listed),
        "longs": some.lists(longs, max_size=5).map(lambda values: listed(values, longs=True)),
        "pairs": some.dictionaries(texts.filter(lambda value: value is not None), numbers, max_size=4).map(
            lambda pairs: mapped(list(pairs.items()))
        ),
        "text": texts.map(leaf),
    }[kind]
    raws = data.draw(some.lists(some.just(b"\0") | made, min_size=4, max_size=8)) * 10
    serializer = column(raws)
    together, skipped = lanes_of(raws), lanes_of(raws)
    found = serializer.read(together)
    found.validate(full=True)
    together.finish()
    serializer.skip(skipped)
    skipped.finish()
    assert found.to_pylist() == [serializer.read(lanes_of([raw]))[0].as_py() for raw in raws]


def test_strings_that_are_there_once_more_are_read_together() -> None:
    again = named(ARRAY_LIST) + b"\1\4" + leaf("rep") + leaf("b") + b"\3\3" + b"\3\4"
    pairs = named("java.util.HashMap") + b"\1\2" + leaf("k") + leaf("w") + b"\3\4" + b"\3\3"
    serializer = column([again])
    found, good = serializer.everyday.read(lanes_of([again] * 40))
    assert good.all()
    assert found.to_pylist() == [["rep", "b", "rep", "b"]] * 40
    assert column([pairs]).read(lanes_of([pairs] * 40)).to_pylist() == [[("k", "w"), ("w", "k")]] * 40
    wrong = named(ARRAY_LIST) + b"\1\1" + b"\3\7"
    with pytest.raises(DamagedCheckpoint, match="it is value 5 of the entry once more, which has 1 before it"):
        serializer.read(lanes_of([wrong] * 40))


# ---- what a snapshot says of classes

MAP_BEGINS = struct.pack(">q", 0x4F2C69A3D70)


def linked(entries: dict[str, bytes]) -> bytes:
    found = MAP_BEGINS + struct.pack(">i", len(entries))
    for name, blob in entries.items():
        found += utf(name) + b"\0\1" + struct.pack(">i", len(blob)) + blob
    return found


def described(classes: dict[str, bytes], defaults: dict[str, bytes] | None = None) -> Serializer:
    blobs = {name: utf(name) + own for name, own in classes.items()}
    body = utf("java.util.Map") + linked(blobs) + linked(defaults or {}) + linked({})
    snapshot = versioned("org.apache.flink.api.java.typeutils.runtime.kryo.KryoSerializerSnapshot", 2, body)
    at = Cursor(struct.pack(">i", 2) + snapshot, "header")
    at.context = KryoTypes(looking=True)
    return read_top(at)


def test_classes_that_a_job_registers_have_numbers_in_their_order() -> None:
    plain, own = struct.pack(">i", 0), struct.pack(">i", 1) + utf("a.OwnSerializer")
    names = ("java.util.Map", "a.Tag", "java.util.UUID", "java.util.HashMap", "java.lang.StringBuilder")
    found = described({name: own if "Builder" in name else plain for name in names})
    assert isinstance(found, Kryo)
    # As Flink 1.20 numbers them; that of a UUID is Flink's own.
    assert [found.known.ids[name] for name in names] == [85, 86, 82, 87, 88]
    numbered = b"\x59\1\1" + leaf("a") + leaf("b")
    assert found.known.names[0x59 - 2] == "java.util.HashMap"
    at = kryo.Reader(found.known, memoryview(numbered), 0, len(numbered), "stream")
    assert at.value() == ("java.util.HashMap", [(("java.lang.String", "a"), ("java.lang.String", "b"))])
    # A serializer of the job's own may write anything.
    with pytest.raises(kryo.UnknownKryoClass, match=r"StringBuilder, which has a serializer of its own"):
        kryo.Reader(found.known, memoryview(b"\x5a\1\x83ab"), 0, 5, "stream").value()
    assert isinstance(described({}, {"java.util.Collection": b""}), Opaque)
    assert isinstance(described({}, {"a.Tag": b""}), Kryo)


# ---- what a hostile file may say


def test_a_value_that_holds_itself_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="holds itself"):
        node_of(named(ARRAY_LIST) + b"\1\1" + b"\1\0\2")


def test_references_to_references_are_not_followed_without_end() -> None:
    # Each list has the one before it eight times: 8 ** 20 strings in a few hundred bytes.
    raw = named(ARRAY_LIST) + b"\1" + seven(21) + b"\1\0\1" + seven(1) + leaf("x" * 60)
    for level in range(20):
        raw += b"\1\0\1" + seven(8) + 8 * (b"\1\0" + seven(2 + (level + 1 if level == 0 else level + 2)))
    with pytest.raises(UnsupportedFormat, match="repeats parts of itself to more than 1,048,576"):
        node_of(raw)


def test_a_value_nested_without_end_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="nested deeper than 32 levels"):
        node_of(named(ARRAY_LIST) + b"\1\1" + b"\1\0\1\1" * 5000)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (named(ARRAY_LIST) + b"\1" + seven(1 << 31), "items should follow in 0 bytes"),
        (named("[J") + b"\1" + seven(1 << 30) + b"\1", "items should follow in 1 bytes"),
        (b"\3\1\xff\xff\xff\x7f", "characters should follow in 0 bytes"),
        (b"\1\7" + text("x.Y"), "class name 7 is used before it is there"),
        (b"\3\5", "it is value 3 of the entry once more, which has 0 before it"),
        (b"\2\xff\xff\xff\xff\xff\1", "a number has more than 32 bits"),
        (named("java.time.DayOfWeek") + b"\1\x09", "it is constant 8 of java.time.DayOfWeek, which has 7"),
        (b"\1\0\x83\7\7\1", "is no name of a class"),
        (b"\3\1\x82\xed\xa0\x80", "half a surrogate pair"),
    ],
)
def test_what_is_wrong_with_a_value_is_said(raw: bytes, said: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=said):
        node_of(raw)


@pytest.mark.parametrize("name", ["com.acme.Tag", "java.util.Locale", "[Lcom.acme.Tag;"])
def test_a_class_whose_fields_are_not_known_is_named(name: str) -> None:
    raw = named(name) + b"\1\2" + named("com.acme.Tag", 1) + b"\1\1"
    with pytest.raises(kryo.UnknownKryoClass) as found:
        node_of(raw)
    assert found.value.details["java_class"] in (name, "com.acme.Tag")
    with pytest.raises(kryo.UnknownKryoClass, match="class of number 98"):
        node_of(b"\x64\1")


def test_a_value_of_another_type_than_the_first_ones_is_refused_with_its_place() -> None:
    serializer = column([listed(["a"])])
    with pytest.raises(
        UnsupportedFormat, match="is ArrayList of Integer, and the first ones of its column are ArrayList"
    ):
        serializer.read(lanes_of([listed(["a"])] * 40 + [listed([7])]))


@settings(max_examples=60, deadline=None)
@given(some.data())
def test_a_changed_value_is_read_or_refused_alike_alone_and_among_many(data: some.DataObject) -> None:
    plain = listed(["tag", "e\u0301\u20ac", None, "x" * 70, "tag"])
    changed = bytearray(plain)
    for _ in range(data.draw(some.integers(1, 3))):
        changed[data.draw(some.integers(0, len(plain) - 1))] = data.draw(some.integers(0, 255))
    raws = [plain] * 20 + [bytes(changed)] + [plain] * 20
    serializer = column([plain])
    outcomes = []
    for some_ in ([bytes(changed)], raws):
        lanes = lanes_of(some_)
        try:
            outcomes.append(serializer.read(lanes)[20 if len(some_) > 1 else 0].as_py())
            outcomes.append(int((lanes.end - lanes.position)[20 if len(some_) > 1 else 0]))
        except (DamagedCheckpoint, UnsupportedFormat) as error:
            outcomes += [type(error), 0]
    assert outcomes[:2] == outcomes[2:]


# ---- the real Flink


@pytest.mark.truth
def test_flink_1_20_makes_it_anew_and_restores_what_we_wrote(tmp_path: Path) -> None:
    maker = making()
    try:
        classpath = maker.compiled("1.20.5")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Flink 1.20.5 cannot be installed from PyPI and compiled against here: {error}")
    made, back = tmp_path / "made", tmp_path / "back"
    maker.run(classpath, [f"make generic hashmap canonical {made}", f"dump {made} hashmap 0 {tmp_path}/was.jsonl"])
    found = rows(made, GENERIC, "everything")
    values = dict(zip(found["key"].to_pylist(), map(value_of, found["value"].to_pylist()), strict=True))
    assert values == {n: everything(n) for n in range(6)}
    page("import", made, "--to", tmp_path / "store", "--key-hash", "keep", COLUMNS="200")
    page("export", tmp_path / "store", "--as", "flink-savepoint", "--to", back, COLUMNS="200")
    maker.run(classpath, [f"dump {back} rocksdb 0 {tmp_path}/now.jsonl"])
    was, now = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("was", "now")
    )
    # References within a value are not written again: of these only the number is the same.
    assert len(was) == len(now) > 30
    for lines in (was, now):
        lines[:] = sorted(json.dumps(line) for line in lines if line["state"] != "everything")
    assert was == now
