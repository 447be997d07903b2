"""Rows of ours against lines of ``expected.jsonl``, by the rules of ``fixtures/README.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stateformat.backends.foreign.source import ForeignSource
from stateformat.model import Kind, Mode, State
from tests.foreign import kryo_written

_WINDOW = re.compile(r"(-?\d+)-(-?\d+)")
_MOMENT = re.compile(r"([+-]?\d{4,})-(\d\d)-(\d\d)(?:T(.*))?")
_CLOCK = re.compile(r"(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?Z?")


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, one a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(array: pa.Array) -> pa.Array:
    """Return dates and times as numbers: Python's end in the year 9999."""
    dtype = array.type
    if pa.types.is_date32(dtype):
        return array.cast(pa.int32())
    if pa.types.is_timestamp(dtype):
        return array.cast(pa.int64())
    if pa.types.is_struct(dtype):
        fields = [numbers(array.field(i)) for i in range(dtype.num_fields)]
        names = [field.name for field in dtype]
        return pa.StructArray.from_arrays(fields, names, mask=array.is_null())
    return array


def rows_of(source: ForeignSource, state: State) -> Iterator[dict[str, Any]]:
    """Return the rows of a state, with ``subtask``, and ``index`` of operator state."""
    for part in source.parts:
        if (part.operator, part.state) != (state.operator, state.name):
            continue
        index = 0
        for batch in source.read(part):
            plain = {name: numbers(batch.column(name)) for name in batch.schema.names}
            for row in pa.RecordBatch.from_pydict(plain).to_pylist():
                row["subtask"] = part.subtask
                if state.mode in (Mode.EVEN_SPLIT, Mode.UNION):
                    row["index"] = index
                    index += 1
                yield row


def told(state: State, rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return our rows in Flink's words: namespaces apart, lists of windows an entry an element."""
    spaced = any(row.get("namespace", "GlobalWindow") != "GlobalWindow" for row in expected)
    listed = any("index" in row for row in expected) and state.mode is Mode.KEYED
    whole = any(type(row.get("namespace")) is int for row in expected)
    found = []
    for row in rows:
        line = {
            {"_key_group": "key_group", "_map_key": "map_key", "_index": "index"}.get(k, k): v for k, v in row.items()
        }
        if state.kind is Kind.TIMERS:
            line["timestamp"] = line.pop("_timestamp") // 1000
            _, _, space = line.pop("_tag").split("/", 2) if spaced else ("", "", line.pop("_tag"))
            window = _WINDOW.fullmatch(space)
            if spaced:
                space = {"window_start": int(window[1]), "window_end": int(window[2])} if window else space
                line["namespace"] = int(space) if whole else space
        elif spaced:
            key = line.pop("map_key")
            if isinstance(key, dict) and "key" in key:
                line["map_key"] = key.pop("key")
                key = key.get("namespace", key)
            line["namespace"] = key
        if listed and "index" not in line:
            found += [line | {"index": index, "value": value} for index, value in enumerate(line["value"])]
        else:
            found.append(line)
    return found


def equal(ours: Any, theirs: Any) -> bool:
    """Whether a value of ours is what Flink said."""
    if isinstance(theirs, dict):
        return _equal_struct(ours, theirs)
    if isinstance(theirs, list):
        return _equal_list(ours, theirs)
    if isinstance(ours, bytes):
        return bool(ours.hex() == theirs)
    if ours is None or theirs is None or isinstance(ours, bool):
        return ours is theirs
    if isinstance(theirs, str) and theirs in ("NaN", "Infinity", "-Infinity"):
        return bool(repr(float(ours)) == {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[theirs])
    if isinstance(theirs, float):
        # Floats are written with as few digits as tell them apart; a sign is no digit.
        same = ours == theirs or np.float32(ours) == np.float32(theirs)
        return bool(same and np.signbit(ours) == np.signbit(theirs))
    if isinstance(theirs, str) and not isinstance(ours, str):
        return _equal_text(ours, theirs)
    if isinstance(theirs, str) and ours != theirs and re.fullmatch(r"-?\d+E-?\d+", theirs):
        return Decimal(ours).as_tuple() == Decimal(theirs).as_tuple()
    # Milliseconds of dates, which are µs here.
    return bool(ours == theirs or (type(theirs) is int and ours == theirs * 1000))


def _equal_struct(ours: Any, theirs: dict[str, Any]) -> bool:
    if "$opaque" in theirs and not isinstance(ours, bytes):
        return kryo_written.is_written(bytes.fromhex(theirs["$opaque"]), ours)
    if "$opaque" in theirs:
        return bool(ours.hex() == theirs["$opaque"])
    if not isinstance(ours, dict):
        return False
    if theirs.keys() == {"ms", "nanos"} and "timestamp" in ours:
        return bool(ours["timestamp"] * 1000 + ours["nanos"] == theirs["ms"] * 10**6 + theirs["nanos"])
    if theirs.keys() == {"ms", "nanos"}:
        whole = ours["seconds"] * 10**9 + ours["nanos"]
        return bool(whole == theirs["ms"] // 1000 * 10**9 + theirs["nanos"])
    kind, named = theirs.get("$kind", "+I"), theirs.get("$class")
    rest = {name: value for name, value in ours.items() if name not in ("row_kind", "class")}
    if ours.get("row_kind", kind) != kind or (named and ours.get("class") != named):
        return False
    if not theirs.keys() & rest.keys() and len(theirs) == len(rest) and "f0" in theirs:
        # The names of an accumulator's fields, which the snapshot tells and Flink's rows do not.
        rest = {f"f{place}": value for place, value in enumerate(rest.values())}
    # What the other side of an Either, or another subclass, would have is null.
    known = {name for name in theirs if not name.startswith("$")}
    others = [value for name, value in rest.items() if name not in known]
    return (
        known <= rest.keys()
        and not any(value is not None for value in others)
        and all(equal(rest[name], theirs[name]) for name in known)
    )


def _equal_list(ours: Any, theirs: list[Any]) -> bool:
    if isinstance(ours, str):
        return ours == "".join(theirs)
    if isinstance(ours, dict) or ours is None or len(ours) != len(theirs):
        return False
    left = list(ours)
    # Sets and maps come in any order.
    for item in theirs:
        place = next((i for i, own in enumerate(left) if equal(own, item)), None)
        if place is None:
            return False
        left.pop(place)
    return True


def _equal_text(ours: Any, theirs: str) -> bool:
    """Compare a number, or date and time, with text: numbers, decimals, dates, times, moments."""
    if isinstance(ours, Decimal):
        return ours.as_tuple() == Decimal(theirs).as_tuple()
    if isinstance(ours, int) and re.fullmatch(r"-?\d+", theirs):
        return ours == int(theirs)
    clock = _CLOCK.fullmatch(theirs)
    if clock:
        return bool(ours == _nanos(clock))
    moment = _MOMENT.fullmatch(theirs)
    if not moment:
        return False
    days = _days(int(moment[1]), int(moment[2]), int(moment[3]))
    if moment[4] is None:
        return bool(ours == days)
    clock = _CLOCK.fullmatch(moment[4])
    assert clock, theirs
    if "date" in ours:
        return bool((ours["date"], ours["nanos"]) == (days, _nanos(clock)))
    return bool(ours["seconds"] * 10**9 + ours["nanos"] == days * 86_400 * 10**9 + _nanos(clock))


def _nanos(clock: re.Match[str]) -> int:
    hour, minute, second = (int(clock[i] or 0) for i in (1, 2, 3))
    return (hour * 3600 + minute * 60 + second) * 10**9 + int((clock[4] or "").ljust(9, "0"))


def _days(year: int, month: int, day: int) -> int:
    """Return days since 1970 of any year, in the calendar without an end."""
    cycles, inner = divmod(year - 2000, 400)
    inside = np.datetime64(f"{2000 + inner:04}-{month:02}-{day:02}")
    return int(inside.astype("datetime64[D]").astype(np.int64)) + cycles * 146_097
