"""Values of Flink's states: of each serializer, text, with times of expiry, and timers."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from flink_streams import VOID, WINDOW
from flink_written import LONG, TEXT as STRING, Kind, opaque, pack, utf, versioned
from hypothesis import given, settings, strategies as some
from test_flink_source import code_of, murmur_of

import stateformat
import stateformat as sf
from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.cursor import Cursor
from stateformat.backends.foreign.flink import binary_rows, compound, scalars
from stateformat.backends.foreign.flink.headers import KEY_VALUE, KeyedHeader, StateInfo, read_keyed_header, read_top
from stateformat.backends.foreign.flink.lanes import Lanes, Serializer
from stateformat.backends.foreign.flink.metadata import (
    CANONICAL,
    Inline,
    KeyGroups,
    Metadata,
    Operator,
    Relative,
    Subtask,
    decode_metadata,
    encode_metadata,
)
from stateformat.backends.foreign.flink.scalars import CHARACTER, TEXT
from stateformat.backends.foreign.flink.writing.savepoint import write_savepoint
from stateformat.backends.importing import ImportSpec, import_checkpoint, prove_import
from stateformat.backends.rewrite import ThreadEngine
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from stateformat.states import Changes, evolve_state
from stateformat.ttl import TTL_COLUMN, Ttl
from tests.ckpt.ckpt_runs import document, run
from tests.foreign.test_flink_written import folder, opened

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = sorted(found.parent.relative_to(FIXTURES) for found in FIXTURES.glob("flink-*/*/savepoint"))
CANONICALS = [folder for folder in FOLDERS if "-canonical" in folder.name and "snappy" not in folder.name]
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
UNDECODED = {"base-pojo"}
"""States with values of subclasses that the savepoint does not describe."""
OPAQUE = {"holder", "nested-pojo", "everything"}
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


# ---- strings as Flink's serializer writes them, read many at once


def number_of_text(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def written(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    pairs = text.encode("utf-16-be", "surrogatepass")
    units = [int.from_bytes(pairs[at : at + 2], "big") for at in range(0, len(pairs), 2)]
    return number_of_text(len(units) + 1) + b"".join(map(number_of_text, units))


def strings(values: list[bytes]) -> ByteStrings:
    return from_arrow(pa.array(values, pa.binary()))


@settings(max_examples=100, deadline=None)
@given(some.lists(some.none() | some.text(some.characters(codec="utf-8"), max_size=300), max_size=20))
def test_strings_are_read_as_they_were_written(texts: list[str | None]) -> None:
    assert TEXT.read_all(strings([written(text) for text in texts])).to_pylist() == texts


@settings(max_examples=100, deadline=None)
@given(some.lists(some.text(some.characters(codec="utf-8"), max_size=9), min_size=1, max_size=9))
def test_skipping_ends_where_reading_ends(texts: list[str]) -> None:
    packed = strings([written(text) * 2 for text in texts])
    read, skipped = Lanes.of(packed), Lanes.of(packed)
    TEXT.read(read)
    TEXT.skip(skipped)
    assert np.array_equal(read.position, skipped.position)
    assert TEXT.read(skipped).to_pylist() == texts
    skipped.finish()


@pytest.mark.parametrize("text", ["a\ud800", "\udc00b", "\udc00\ud800", "\ud800\ud800\udc00"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedFormat, match=r"byte \d+ has half a surrogate pair \(U\+D"):
        TEXT.read_all(strings([written("fine"), written(text)]))


@pytest.mark.parametrize("text", ["", "plain", "naïve", "日本語", "a😀b", "x" * 300])
def test_every_truncation_of_a_string_is_an_error(text: str) -> None:
    whole = written(text)
    for size in range(len(whole)):
        for act in (TEXT.read_all, lambda cut: TEXT.skip(Lanes.of(cut))):
            with pytest.raises(DamagedCheckpoint):
                act(strings([whole[:size]]))


@pytest.mark.parametrize(
    "octets", [b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x7f", b"\x02\xff\xff\x04", b"\x03aab"]
)
def test_a_string_that_cannot_be_is_an_error(octets: bytes) -> None:
    with pytest.raises(DamagedCheckpoint):
        TEXT.read_all(strings([octets]))


def test_characters_are_text_of_one_character() -> None:
    packed = strings([ord(text).to_bytes(2, "big") for text in "aéあ\0"])
    assert CHARACTER.read_all(packed).to_pylist() == ["a", "é", "あ", "\0"]


# ---- Flink's TTL: the times become ours, with a ttl where the import names one, and go back

SAVED = FIXTURES / "flink-2.3.0" / "ttl-hashmap-canonical"
YEARS = 365 * 86_400_000_000


def kept(path: Path) -> dict[str, list[int]]:
    """The last accesses of each state with a TTL, in milliseconds, as Flink's own program read
    them.
    """
    found: dict[str, list[int]] = {}
    for line in (path / "expected.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "ttl_last_access" in entry:
            found.setdefault(f"{entry['operator']}/{entry['state']}", []).append(entry["ttl_last_access"])
    return {state: sorted(times) for state, times in found.items()}


def times_of(checkpoint: sf.Checkpoint, name: str) -> list[int]:
    """The last accesses of every row, in microseconds."""
    uid, _, state = name.partition("/")
    found = checkpoint.with_expired().state(uid, state).table()[TTL_COLUMN]
    return sorted(found.cast(pa.int64()).to_pylist())


@pytest.mark.parametrize("version", ["flink-1.13.6", "flink-1.20.5", "flink-2.3.0"])
def test_the_times_of_every_kind_of_state_are_a_column_of_ours(version: str) -> None:
    path = FIXTURES / version / SAVED.name
    checkpoint = opened(path / "savepoint")
    known = kept(path)
    assert known
    for name, milliseconds in known.items():
        uid, _, state = name.partition("/")
        declared = checkpoint.record.state(uid, state)
        last = declared.current.fields[-1]
        assert (last.name, last.type, last.nullable) == (TTL_COLUMN, "timestamp_us", False)
        assert declared.ttl is None
        assert times_of(checkpoint, name) == [1000 * one for one in milliseconds]


def imported(tmp_path: Path, ttl: Mapping[str, Ttl]) -> sf.Checkpoint:
    checkpoint = opened(SAVED / "savepoint")
    spec = ImportSpec(key_hash="keep", ttl=ttl)
    done = import_checkpoint(checkpoint, sf.open(str(tmp_path / "store")), spec, engine=ThreadEngine())
    result = done.rewritten.permit.checkpoint()
    assert prove_import(checkpoint, result, spec).same
    return result


@pytest.mark.parametrize(("duration", "hidden"), [(YEARS * 100, False), (1000, True)])
def test_an_import_says_how_long_rows_live_and_they_go_back_all(tmp_path: Path, duration: int, hidden: bool) -> None:
    known = kept(SAVED)
    ttl = Ttl(duration, "processing_time")
    result = imported(tmp_path, dict.fromkeys(known, ttl))
    for name, milliseconds in known.items():
        uid, _, state = name.partition("/")
        assert result.record.state(uid, state).ttl == ttl
        assert times_of(result, name) == [1000 * one for one in milliseconds]
        assert (result.state(uid, state).table().num_rows == 0) is hidden
    (tmp_path / "back").mkdir()
    write_savepoint(result, folder(tmp_path / "back"))
    back = opened(tmp_path / "back")
    for name, milliseconds in known.items():
        assert times_of(back, name) == [1000 * one for one in milliseconds]


def test_a_program_goes_on_with_the_times_though_the_import_named_no_ttl(tmp_path: Path) -> None:
    result = imported(tmp_path, {})
    for name in kept(SAVED):
        uid, _, state = name.partition("/")
        saved = result.record.state(uid, state)
        assert saved.ttl is None
        declared = replace(saved, ttl=Ttl(YEARS, "processing_time"))
        found = evolve_state(saved, declared, Changes(), ttl_start_us=5).state
        assert (found.ttl, found.schemas) == (declared.ttl, saved.schemas)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("numbers/SourceReaderState", "does not say when its rows were accessed"),
        ("ttl/nothing", "no state 'ttl/nothing' whose rows could expire"),
    ],
)
def test_a_ttl_of_a_state_without_times_is_refused(tmp_path: Path, name: str, message: str) -> None:
    checkpoint = opened(SAVED / "savepoint")
    with pytest.raises(sf.InvalidInput, match=message):
        import_checkpoint(checkpoint, sf.open(str(tmp_path)), ImportSpec(ttl={name: Ttl(1)}), engine=ThreadEngine())


def test_the_command_takes_lengths_of_time(tmp_path: Path) -> None:
    name = next(iter(kept(SAVED)))
    arguments: list[Any] = [
        "import",
        SAVED / "savepoint",
        "--to",
        tmp_path / "store",
        "--ttl",
        f"{name}=90s",
        "--prove",
    ]
    found = run(*arguments)
    assert found.status == 0, found
    uid, _, state = name.partition("/")
    (entry,) = document("inspect", tmp_path / "store", "--operator", uid, "--state", state)["states"]
    assert (entry["ttl"]["duration_us"], entry["ttl"]["clock"]) == (90_000_000, "processing_time")
    assert entry["contents"]["expired"] == entry["contents"]["rows"] > 0
    assert run(*arguments[:4], "--ttl", f"{name}=soon").status == 2


# ---- timers that jobs on RocksDB keep on the heap, in raw keyed state written by hand

GROUPS = 128
WINDOWS = Kind("window", versioned(WINDOW, 3), LONG.values, lambda two: pack("qq", *two))
NONE = Kind("no namespace", VOID, LONG.values, lambda _: b"\0")


class Service(NamedTuple):
    name: str
    key: Kind
    namespace: Kind
    timers: dict[str, list[tuple[int, Any, Any, int]]]
    """By domain: key group, key, namespace, moment in ms."""


def head(service: Service) -> bytes:
    return utf(service.name) + service.key.snapshot + service.namespace.snapshot


def stream(services: Sequence[Service], groups: Sequence[int]) -> tuple[bytes, list[int]]:
    """Raw keyed state with some key groups, as Flink lays it out; the others have no offset."""
    out, offsets = bytearray(), [-1] * GROUPS
    for group in groups:
        offsets[group] = len(out)
        out += b"\xf1\xcd\x85\x9f" + pack("ii", 2, len(services))
        for service in services:
            out += head(service)
            for domain in ("event", "processing"):
                mine = [one for one in service.timers.get(domain, []) if one[0] == group]
                out += pack("i", len(mine))
                for _, key, namespace, moment in mine:
                    out += service.key.write(key) + service.namespace.write(namespace) + pack("q", moment)
    return bytes(out), offsets


def checkpoint(folder: Path, data: bytes, offsets: Sequence[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stream").write_bytes(data)
    handle = KeyGroups(12, 0, np.array(offsets, np.int64), Relative("stream", len(data)), "id")
    operator = Operator(b"\7" * 16, "operator", "op", 1, GROUPS, None, False, (Subtask(0, raw_keyed=handle),))
    (folder / "_metadata").write_bytes(encode_metadata(Metadata(6, 1, (), (operator,), b"")))
    return folder


def timers(namespace: Any, *keys: str) -> list[tuple[int, Any, Any, int]]:
    """Timers in the key groups that Flink gives the keys, at moments of every size and sign."""
    return [
        (murmur_of(code_of(key)) % GROUPS, key, namespace and (n, n + 10), (-1) ** n * 7**n)
        for n, key in enumerate(keys)
    ]


MANY = [
    Service(
        "window-timers", STRING, WINDOWS, {"event": timers(True, *"abcdefghé"), "processing": timers(True, "late")}
    ),
    Service("user-timers", STRING, NONE, {"processing": timers(None, "", "😀")}),
]


def test_all_timers_of_all_services_are_read_and_go_back(tmp_path: Path) -> None:
    source = stateformat.open(str(checkpoint(tmp_path / "s", *stream(MANY, range(GROUPS))))).open()
    expected = {
        f"_timer_state/{domain}_{service.name}": sorted(
            (group, key, moment * 1000, f"{domain}/{service.name}" + (f"/{two[0]}-{two[1]}" if two else ""))
            for group, key, two, moment in service.timers.get(domain, [])
        )
        for service in MANY
        for domain in ("event", "processing")
    }
    store = stateformat.open(str(tmp_path / "store"))
    import_checkpoint(source, store, ImportSpec(key_hash="keep"))
    document("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back")
    for found in (source, store.open(), stateformat.open(str(tmp_path / "back")).open()):
        for name, rows in expected.items():
            table = found.read("op", name).table()
            said = zip(*(table[column].to_pylist() for column in ("_key_group", "key")), strict=True)
            moments = table["_timestamp"].cast("int64").to_pylist()
            assert (
                sorted((*one, at, tag) for one, at, tag in zip(said, moments, table["_tag"].to_pylist(), strict=True))
                == rows
            )


def test_timers_whose_ends_are_not_known_are_refused_by_name_with_their_class(tmp_path: Path) -> None:
    custom = Kind("custom", opaque("a.Custom"), LONG.values, LONG.write)
    unknown = Kind("unknown", versioned("a.b.OwnSnapshot", 1), LONG.values, LONG.write)
    for number, (key, name) in enumerate([(custom, "a.Custom"), (unknown, "a.b.OwnSnapshot")]):
        service = Service("own-timers", key, NONE, {"event": [(3, 1, None, 5)]})
        place = checkpoint(tmp_path / f"s{number}", *stream([service, *MANY], range(4)))
        problems = document("validate", place, "--level", "full", status=1)["problems"]
        assert {problem["kind"] for problem in problems} <= {"unsupported_feature", "unknown_key_hash"}
        assert name in str(problems)
        dropped = sorted(
            {
                problem["advice"].split("--drop ")[1].split(" ")[0]
                for problem in problems
                if "--drop" in problem["advice"]
            }
        )
        source = stateformat.open(str(place)).open()
        spec = ImportSpec(key_hash="keep", drop=dropped)
        done = import_checkpoint(source, stateformat.open(str(tmp_path / f"t{number}")), spec)
        assert prove_import(source, done.rewritten.permit.checkpoint(), spec).same


@pytest.mark.parametrize("where", ["name", "count", "end"])
def test_bytes_that_are_none_of_these_timers_are_damage(where: str, tmp_path: Path) -> None:
    data, offsets = stream(MANY, range(GROUPS))
    first = data.index(b"user-timers", offsets[30])
    count = offsets[30] + 12 + len(head(MANY[0]))
    spoiled = {
        "name": data[:first] + b"X" + data[first + 1 :],
        "count": data[:count] + b"\x7f" + data[count + 1 :],
        "end": data[:-3],
    }[where]
    place = str(checkpoint(tmp_path / "s", spoiled, offsets))
    with pytest.raises(DamagedCheckpoint):
        stateformat.open(place).open().read("op", "_timer_state/processing_user-timers").table()
