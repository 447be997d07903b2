"""Text for people: numbers, sizes, times and names, wherever they are shown.

A name from a checkpoint goes through :func:`label` first: untrusted text must neither break a line
nor control a terminal. Imports only the standard library.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final


def label(text: object) -> str:
    """Return untrusted text on one line; unprintable characters, as line ends, are escaped."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def lines_label(text: str) -> str:
    """Return our own text of several lines (help, stack traces), each through :func:`label`."""
    return "\n".join(map(label, text.split("\n")))


def named(main: str, other: str) -> str:
    """Return ``main (other)``, safe to print; only ``main`` if the other name adds nothing."""
    return label(main if other in ("", main) else f"{main} ({other})")


def count(number: int | None) -> str:
    """Return a count with thousands separators; a dash if it is unknown."""
    return "-" if number is None else f"{number:,}"


def size(byte_count: int) -> str:
    """Return a number of bytes with a binary unit and one decimal."""
    if byte_count < 1024:
        return f"{byte_count} B"
    value = float(byte_count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1023.95 or unit == "PiB":
            break
    return f"{value:,.1f} {unit}"


def plural(number: int, noun: str, many: str = "") -> str:
    """Return a number and its noun: ``1 segment``, ``2 segments``."""
    return f"{count(number)} {noun if number == 1 else many or noun + 's'}"


def cell(value: Any) -> str:
    """Return a value of a row as text: JSON for nested values, ``null`` for null, text as it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return label(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def sentence(text: object) -> str:
    """Return untrusted text as a sentence: on one line, capital and full stop added if missing.

    A leading path or name stays as it is: `state/0` does not become `State/0`.
    """
    safe = label(text)
    first = safe.partition(" ")[0].rstrip(".,:;")
    start = safe[:1].upper() if first.replace("-", "").replace("'", "").isalpha() else safe[:1]
    return start + safe[1:] + ("" if safe.endswith((".", "?", "!")) else ".")


def ranges(pairs: Sequence[Sequence[int]]) -> str:
    """Return inclusive ranges as ``0-2, 5``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def status_of(operator: Mapping[str, Any]) -> str:
    """Return an operator's status in words: ``running``, ``finished``, ``3 of 4 finished: 0-2``."""
    if operator["status"] == "fully_finished":
        return "finished"
    for what in ("finished", "finishing"):
        if operator[what]:
            ended = sum(last - first + 1 for first, last in operator[what])
            return f"{ended} of {operator['parallelism']} {what}: {ranges(operator[what])}"
    return "running"


def edge_of(edge: Mapping[str, Any]) -> str:
    """Return an incoming edge: its source, and how records choose their channel."""
    by = f" by {', '.join(map(label, edge['key_columns']))}" if edge["key_columns"] else ""
    return f"{label(edge['from'])} {edge['partitioner']}{by}{' (feedback)' if edge['feedback'] else ''}"


def operator_of(operator: Mapping[str, Any]) -> str:
    """Return an operator's name, and its uid if that differs."""
    return named(operator["name"] or operator["uid"], operator["uid"])


def mode_of(state: Mapping[str, Any]) -> str:
    """Return the mode and kind of a state, and what its timers fire by if it is not event time."""
    if state.get("clock") == "processing_time":
        return f"processing-time {state['kind']}"
    return f"{state['mode']} {state['kind']}" if state.get("kind") else str(state["mode"])


_IS_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z?")
_OF_RUNTIMES: Final = frozenset(("coordinator", "committables", "progress", "in_flight"))
_OF_SOURCES: Final = frozenset(("SourceReaderState", "dropped", "enumerator_log", "splits"))


def is_bookkeeping(state: Mapping[str, Any]) -> bool:
    """Return whether a state is a runtime's own: what a source has read, barriers, commits."""
    name = state.get("name", state.get("state"))
    return state["mode"] in _OF_RUNTIMES or (state["mode"] != "keyed" and name in _OF_SOURCES)


def window_of(value: Any) -> str | None:
    """Return a window of time, which is a struct of two times, in short; None for other values."""
    if (
        not isinstance(value, Mapping)
        or [*value] != ["start", "end"]
        or not all(map(_IS_TIME.fullmatch, map(str, value.values())))
    ):
        return None
    first, last = (str(time).replace("T", " ").removesuffix("Z").removesuffix(".000000") for time in value.values())
    if first.endswith(":00") and last.endswith(":00"):
        first, last = first[:-3], last[:-3]
    return f"{first} to {last.removeprefix(first[:11])}"


def field(item: Mapping[str, Any]) -> str:
    """Return a column of a schema: its name, its type, and what is unusual about it."""
    default = f" = {label(item['default'])}" if "default" in item else ""
    return f"{label(item['name'])} {type_text(item['type'])}{'' if item['nullable'] else ' not null'}{default}"


def type_text(kind: Any) -> str:
    """Return a type of SPEC.md section 3.7 as ``list<int64>`` or ``struct<a int64, b utf8>``."""
    if isinstance(kind, str):
        return kind
    if "list" in kind:
        return f"list<{type_text(kind['list']['type'])}>"
    if "map" in kind:
        return f"map<{', '.join(type_text(item['type']) for item in kind['map'])}>"
    return f"struct<{', '.join(field(item) for item in kind['struct'])}>"


def skew(values: Sequence[int]) -> float:
    """Return the greatest value over the mean; 1.0 for no values."""
    total = sum(values)
    return round(max(values) * len(values) / total, 2) if total else 1.0


_LAST: Final = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)


def _instant(epoch_us: int) -> datetime.datetime | None:
    """Return a time in UTC; None beyond the calendar."""
    try:
        return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=epoch_us)
    except OverflowError:
        return None


def moment(epoch_us: int) -> str:
    """Return a record's time as ISO 8601 in UTC, to the second."""
    return (_instant(epoch_us) or _LAST).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock(epoch_us: int, *, seconds: bool = True) -> str:
    """Return a record's time in UTC, for people."""
    return (_instant(epoch_us) or _LAST).strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M")


def precise_moment(epoch_us: int) -> str:
    """Return an event time as ISO 8601 in UTC, to the µs; beyond the calendar the number of µs."""
    found = _instant(epoch_us)
    return f"{epoch_us} us" if found is None else found.isoformat().removesuffix("+00:00") + "Z"


_UNITS: Final = (
    (86_400_000_000, "day"),
    (3_600_000_000, "hour"),
    (60_000_000, "minute"),
    (1_000_000, "second"),
    (1_000, "millisecond"),
)


def duration(length_us: int) -> str:
    """Return an exact length of time in the largest unit that divides it: ``90 minutes``."""
    for unit, name in _UNITS:
        if length_us % unit == 0:
            return plural(length_us // unit, name)
    return f"{length_us:,} µs"


def elapsed(seconds: float) -> str:
    """Return seconds for people: ``0.5 s``, ``42 s``, ``3 min``, ``2 h``, ``5 d``."""
    text = f"{seconds:.1f} s"
    for unit, length, least in (("s", 1, 9.95), ("min", 60, 100), ("h", 3600, 6000), ("d", 86_400, 172_800)):
        if seconds >= least:
            text = f"{seconds / length:.0f} {unit}"
    return text


def ttl_of(ttl: Mapping[str, Any]) -> list[str]:
    """Return how long rows live (``documents``): ``1 hour``, ``event time``, ``now …``."""
    refreshed = ["refreshed by reading too"] if ttl["refresh"] == "read_and_write" else []
    now = "no time yet" if ttl["now_at"] == "none" else f"now {str(ttl['now_at']).replace('T', ' ').removesuffix('Z')}"
    return [duration(ttl["duration_us"]), ttl["clock"].replace("_", " "), *refreshed, now]


def age(epoch_us: int, now_us: int) -> str:
    """Return how long ago, in the largest unit; empty for a time in the future."""
    seconds = (now_us - epoch_us) // 1_000_000
    if seconds < 0:
        return ""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def published(epoch_us: int, now_us: int) -> str:
    """Return when a checkpoint was published: ``2026-11-22 20:15:00 UTC, 3 min ago``."""
    ago = age(epoch_us, now_us)
    return f"{clock(epoch_us)} UTC{f', {ago} ago' if ago else ''}"


def stopped(stop: Mapping[str, Any]) -> str:
    """Return what a job did at the checkpoint of a stop (``documents``): ``stopped (no drain)``."""
    if stop["goes_on_at"] is not None:
        return f"stopped to go on at {stop['goes_on_at']}"
    return f"stopped ({stop['mode'].replace('_', ' ')})"


def folder_of(name: str, system: str | None) -> str:
    """Return what a folder of a store, or of another system's checkpoint, is called."""
    return name or ("begun, not ended" if system is None else "the folder itself")


def operators_finished(entry: Mapping[str, Any]) -> str:
    """Return how many operators of a checkpoint in a history have finished, wholly or partly."""
    partly = f", {entry['partially_finished']} partly" if entry["partially_finished"] else ""
    return f"{entry['finished']} of {entry['operators']}{partly}"
