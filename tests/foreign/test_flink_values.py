"""Values that Flink wrote, read by their serializers, against what Flink itself says of them.

Key groups are cut into entries here by a small reader of its own, entry by entry.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.foreign.byte_strings import from_arrow
from stateformat.backends.foreign.cursor import Cursor
from stateformat.backends.foreign.flink import binary_rows, compound, scalars
from stateformat.backends.foreign.flink.headers import KEY_VALUE, KeyedHeader, StateInfo, read_keyed_header
from stateformat.backends.foreign.flink.lanes import Lanes, Serializer
from stateformat.backends.foreign.flink.metadata import (
    CANONICAL,
    Inline,
    KeyGroups,
    Relative,
    decode_metadata,
    encode_metadata,
)
from stateformat.backends.foreign.flink.snapshots import read_top
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = sorted(found.parent.relative_to(FIXTURES) for found in FIXTURES.glob("flink-*/*/savepoint"))
DESCRIBED = [folder for folder in FOLDERS if (FIXTURES / folder / "expected_metadata.jsonl").exists()]
CANONICALS = [folder for folder in FOLDERS if "-canonical" in folder.name and "snappy" not in folder.name]
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
UNDECODED = {"base-pojo"}
"""States with values of subclasses that the savepoint does not describe."""
OPAQUE = {"holder", "nested-pojo"}
"""States that may be opaque as a whole: something follows what only Kryo can end, as lists and maps
in POJOs of Flink 1.
"""


def metadata(folder: Path) -> Path:
    return next((FIXTURES / folder).glob("savepoint/**/_metadata"))


def streams(folder: Path) -> Iterator[tuple[str, KeyGroups, bytes]]:
    """The canonical keyed streams of a savepoint, with their operators."""
    path = metadata(folder)
    for operator in decode_metadata(path.read_bytes()).operators:
        for subtask in operator.subtasks:
            handle = subtask.managed_keyed
            if isinstance(handle, KeyGroups) and handle.code == CANONICAL:
                stream = handle.stream
                assert isinstance(stream, Inline | Relative)
                data = stream.data if isinstance(stream, Inline) else (path.parent / stream.path).read_bytes()
                yield operator.uid or operator.id.hex(), handle, data


def entries(handle: KeyGroups, data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """The entries of a canonical stream: number of the state, key, value."""
    for offset in filter(None, handle.offsets.tolist()):
        at = offset + 2
        state = int.from_bytes(data[offset:at], "big")
        while state != 0xFFFF:
            size = int.from_bytes(data[at : at + 4], "big")
            key = bytearray(data[at + 4 : at + 4 + size])
            at += 4 + size
            size = int.from_bytes(data[at : at + 4], "big")
            value = data[at + 4 : at + 4 + size]
            at += 4 + size
            last = key[0] >= 0x80
            key[0] &= 0x7F
            yield state, bytes(key), value
            if last:
                state = int.from_bytes(data[at : at + 2], "big")
                at += 2


def listed(array: pa.Array) -> list[Any]:
    """The values; dates, which may lie before Python's first, as text."""
    if pa.types.is_date32(array.type):
        days = array.cast(pa.int32()).to_pylist()
        texts = [None if day is None else str(np.datetime64(day, "D")) for day in days]
        return [text and ("-" + text[1:].zfill(10) if text[0] == "-" else text) for text in texts]
    if pa.types.is_struct(array.type):
        columns = {item.name: listed(array.field(item.name)) for item in array.type}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]
    return array.to_pylist()


def clock(nanos: int) -> str:
    seconds, nanos = divmod(nanos, 10**9)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}"
    if seconds % 60 or nanos:
        text += f":{seconds % 60:02d}"
    return text + (f".{nanos:09d}".removesuffix("000").removesuffix("000") if nanos else "")


def scaled(value: decimal.Decimal) -> str:
    sign, digits, exponent = value.as_tuple()
    return f"{'-' if sign else ''}{int(''.join(map(str, digits)))}E{exponent}"


def moment(serializer: scalars.Moment, value: Any) -> Any:
    if serializer.millis:
        return {"ms": value["seconds"] * 1000 + value["nanos"] // 10**6, "nanos": value["nanos"]}
    at = EPOCH + dt.timedelta(seconds=value["seconds"])
    return f"{at.date()}T{clock((at - at.replace(hour=0, minute=0, second=0)).seconds * 10**9 + value['nanos'])}Z"


def said(serializer: Serializer, value: Any) -> Any:
    """The value as the fixture's lines write it."""
    if value is None:
        return None
    match serializer:
        case scalars.Milliseconds():
            return int((value - EPOCH) / dt.timedelta(milliseconds=1))
        case scalars.Moment():
            return moment(serializer, value)
        case scalars.LocalDate():
            return str(value)
        case scalars.LocalTime():
            return clock(value)
        case scalars.LocalDateTime():
            return f"{value['date']}T{clock(value['nanos'])}"
        case binary_rows.Framed() | binary_rows.TimestampData():
            return plain(serializer.arrow_type, value)
        case compound.Nullable():
            return said(serializer.child, value)
        case compound.Either():
            side = "left" if value["right"] is None else "right"
            return {side: said(serializer.children[side == "right"], value[side])}
        case compound.Pojo() if serializer.columns:
            return subclass(serializer, value)
        case compound.Pojo() | compound.Sequential():
            return {k: said(child, value[k]) for k, child in zip(serializer.names, serializer.children, strict=True)}
        case compound.Row():
            found = {f"f{i}": said(child, value[f"f{i}"]) for i, child in enumerate(serializer.children)}
            return found if value["row_kind"] == "+I" else {**found, "$kind": value["row_kind"]}
    kind = type(serializer).__name__
    if kind in ("ListOf", "MaskedList"):
        return [said(serializer.element, item) for item in value]  # type: ignore[attr-defined]
    if kind == "MapOf":
        return sorted([k, said(serializer.value, v)] for k, v in value)  # type: ignore[attr-defined]
    if kind == "BigDecimal":
        return scaled(decimal.Decimal(value))
    if kind == "Characters":
        return list(value)
    if kind == "Opaque":
        return {"$opaque": value.hex()}
    return value.hex() if isinstance(value, bytes) else number(serializer.arrow_type, value)


def subclass(serializer: compound.Pojo, value: Any) -> Any:
    """A POJO that may be of a subclass: the fields that its class has."""
    assert serializer.columns is not None
    columns = serializer.columns[0][value["class"]]
    found = {name: value[column] for name, column in columns.items()}
    return found if value["class"] == serializer.class_name else {**found, "$class": value["class"]}


def number(kind: pa.DataType, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if value != value or abs(value) == float("inf"):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return float(f"{value:.9g}") if kind == pa.float32() else value


def plain(kind: pa.DataType, value: Any) -> Any:
    """A SQL value as the fixture's lines write it; RAW values are opaque."""
    if value is None:
        return None
    if pa.types.is_struct(kind) and kind.names == ["timestamp", "nanos"]:
        at = plain(kind.field(0).type, value["timestamp"])
        return {**at, "nanos": at["nanos"] + value["nanos"]}
    if pa.types.is_struct(kind):
        # Flink's side shows the fields of nested rows by their place.
        named = [item for item in kind if item.name != "row_kind"]
        found = {f"f{i}": plain(item.type, value[item.name]) for i, item in enumerate(named)}
        return found if value.get("row_kind", "+I") == "+I" else {**found, "$kind": value["row_kind"]}
    if pa.types.is_list(kind):
        return [plain(kind.value_type, item) for item in value]
    if pa.types.is_map(kind):
        return sorted([plain(kind.key_type, k), plain(kind.item_type, v)] for k, v in value)
    if pa.types.is_decimal(kind):
        return scaled(value)
    if pa.types.is_timestamp(kind):
        micros = int((value.replace(tzinfo=dt.UTC) - EPOCH) / dt.timedelta(microseconds=1))
        return {"ms": micros // 1000, "nanos": micros % 1000 * 1000}
    if pa.types.is_date32(kind):
        return int(np.datetime64(value).astype(int))
    return {"$opaque": value.hex()} if isinstance(value, bytes) else number(kind, value)


def exact(value: Any) -> Any:
    """Floats of 32 bits are written with the fewest digits that tell them apart."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


@cache
def expected(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Values by operator and state, each with its key group, as sorted text."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in (FIXTURES / folder / "expected.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] in ("VALUE", "REDUCING", "AGGREGATING") and "ttl_last_access" not in entry:
            text = json.dumps([entry["key_group"], entry["value"]], sort_keys=True)
            found.setdefault((entry["operator"], entry["state"]), []).append(text)
    return {state: sorted(texts) for state, texts in found.items()}


def simple(state: StateInfo) -> bool:
    return (
        state.kind == KEY_VALUE
        and state.options["KEYED_STATE_TYPE"] in ("VALUE", "REDUCING", "AGGREGATING")
        and not isinstance(state.value, compound.Ttl)
    )


def values(header: KeyedHeader, handle: KeyGroups, data: bytes) -> Iterator[tuple[StateInfo, list[tuple[int, Any]]]]:
    found: dict[int, list[tuple[int, bytes]]] = {}
    two = handle.first_group + handle.groups > 128 or any(len(state.name) > 1000 for state in header.states)
    for number_, key, value in entries(handle, data):
        found.setdefault(number_, []).append((int.from_bytes(key[: 2 if two else 1], "big"), value))
    for place, state in enumerate(header.states):
        if simple(state) and place in found:
            groups, raw = zip(*found[place], strict=True)
            assert state.value is not None
            read = state.value.read_all(from_arrow(pa.array(raw, pa.binary())), state.name)
            read.validate(full=True)
            yield state, list(zip(groups, listed(read), strict=True))


@pytest.mark.parametrize("folder", [f for f in CANONICALS if not f.name.startswith("wide")], ids=str)
def test_values_are_what_flink_says(folder: Path) -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for operator, handle, data in streams(folder):
        header = read_keyed_header(data, "header")
        for name in UNDECODED & {state.name for state in header.states}:
            header = without(header, name)
        for state, pairs in values(header, handle, data):
            texts = found.setdefault((operator, state.name), [])
            assert state.value is not None
            texts += [json.dumps([group, said(state.value, value)], sort_keys=True) for group, value in pairs]
    wanted = {state: texts for state, texts in expected(folder).items() if state[1] not in UNDECODED}
    assert set(found) == set(wanted)
    for state, texts in wanted.items():
        if state[1] in OPAQUE and '"$opaque"' in found[state][0]:
            assert [json.loads(text)[0] for text in sorted(found[state])] == [json.loads(text)[0] for text in texts]
            continue
        if state[1] == "long-value":
            # Flink's side shows it by its toString.
            texts = [text.replace('"', "") for text in texts]
        assert [json.loads(text, parse_float=lambda v: exact(float(v))) for text in sorted(found[state])] == [
            json.loads(text, parse_float=lambda v: exact(float(v))) for text in texts
        ], state


SERIALIZERS = [
    json.loads(line) for line in (FIXTURES / "flink-2.3.0/serializers/values.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("line", SERIALIZERS, ids=lambda line: line["name"])
def test_values_of_other_serializers_are_what_flink_says(line: dict[str, Any]) -> None:
    at = Cursor(bytes.fromhex(line["snapshot"]), "snapshot")
    serializer = read_top(at)
    at.finish("the snapshot")
    raw = pa.array([bytes.fromhex(value["bytes"]) for value in line["values"]], pa.binary())
    found = serializer.read_all(from_arrow(raw))
    found.validate(full=True)
    wanted = [value["said"] for value in line["values"]]
    if line["name"] == "SQL row":
        # Bytes of a row are shown as RAW values are.
        wanted = [{**row, "f16": row["f16"] and {"$opaque": row["f16"]}} for row in wanted]
    assert [said(serializer, value) for value in listed(found)] == wanted


def without(header: KeyedHeader, name: str) -> KeyedHeader:
    """A header in which a state is not simple any more, at the same place."""
    states = tuple(
        state if state.name != name else StateInfo(name, 3, {}, state.serializers, 0, 0) for state in header.states
    )
    return KeyedHeader(header.compressed, header.key, header.declared, states, header.end, header.stopped)


def test_values_of_subclasses_that_are_not_described_are_refused() -> None:
    folder = next(f for f in CANONICALS if f.name == "types-hashmap-canonical")
    for _, handle, data in streams(folder):
        header = read_keyed_header(data, "header")
        only = [state.name for state in header.states if state.name != "base-pojo"]
        for name in only:
            header = without(header, name)
        with pytest.raises(UnsupportedFormat, match=r"of the subclass fixtures\.Pojos\$(Derived|Registered)"):
            list(values(header, handle, data))


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_metadata_is_encoded_to_the_same_bytes(folder: Path) -> None:
    data = metadata(folder).read_bytes()
    assert encode_metadata(decode_metadata(data)) == data


@pytest.mark.parametrize("folder", DESCRIBED, ids=str)
def test_operators_are_what_flink_says(folder: Path) -> None:
    found = decode_metadata(metadata(folder).read_bytes())
    first, *lines = map(json.loads, (FIXTURES / folder / "expected_metadata.jsonl").read_text().splitlines())
    assert found.checkpoint_id == first["checkpoint_id"]
    assert {operator.id.hex() for operator in found.operators} == {line["operator"] for line in lines}
    by_id = {operator.id.hex(): operator for operator in found.operators}
    for line in lines:
        operator = by_id[line["operator"]]
        assert (operator.parallelism, operator.max_parallelism) == (line["parallelism"], line["max_parallelism"])
        if found.version >= 5:
            assert (operator.uid, operator.name) == (line["uid"], line["name"])


@pytest.mark.parametrize("folder", CANONICALS, ids=str)
def test_headers_of_flink_are_read_whole(folder: Path) -> None:
    for _, handle, data in streams(folder):
        header = read_keyed_header(data, "header")
        assert header.stopped is None
        assert len(header.states) == header.declared
        assert header.end == min(filter(None, handle.offsets.tolist()), default=len(data))


def test_every_truncation_of_a_header_is_an_error() -> None:
    folder = next(f for f in CANONICALS if f.name.startswith("sql"))
    _, _, data = max(streams(folder), key=lambda found: read_keyed_header(found[2], "h").end)
    end = read_keyed_header(data, "header").end
    for size in [*range(0, end, 61), *range(end - 40, end)]:
        with pytest.raises(DamagedCheckpoint):
            read_keyed_header(data[:size], "header")


def test_flipped_bits_of_a_header_are_read_or_named() -> None:
    for name in ("sql-hashmap-canonical", "types-hashmap-canonical"):
        folder = next(f for f in CANONICALS if f.name == name)
        _, _, data = max(streams(folder), key=lambda found: read_keyed_header(found[2], "h").end)
        end = read_keyed_header(data, "header").end
        for at in range(0, end, 61):
            flipped = bytearray(data[:end])
            flipped[at] ^= 1 << (at * 3 & 7)
            try:
                found = read_keyed_header(bytes(flipped), "header")
            except (DamagedCheckpoint, UnsupportedFormat):
                continue
            assert found.end <= end


def test_rows_of_sql_with_flipped_bits_are_read_or_named() -> None:
    folder = next(f for f in CANONICALS if f.name == "sql-hashmap-canonical")
    for _, handle, data in streams(folder):
        header = read_keyed_header(data, "header")
        for number_, _, value in list(entries(handle, data))[:3]:
            state = header.states[number_]
            if not simple(state) or not isinstance(state.value, binary_rows.RowData):
                continue
            for at in range(0, len(value) * 8, 3):
                flipped = bytearray(value)
                flipped[at >> 3] ^= 1 << (at & 7)
                lanes = Lanes.of(from_arrow(pa.array([bytes(flipped)], pa.binary())))
                try:
                    state.value.read(lanes).validate(full=True)
                except (DamagedCheckpoint, UnsupportedFormat):
                    continue
