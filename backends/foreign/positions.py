"""Where the sources of a foreign query are, as positions of stateformat sources that read the same.

A user gives them as ``UID=KIND[:NUMBER][@POSITION]``: the uid of the source in the dataflow that
continues, how it reads, and the number of the source in the foreign query (0 by default). Kinds:

- ``files``: ``ParquetSource`` or ``CsvSource`` over a directory that ``grows``. It has seen the
  files that the query has read, according to the log of Spark's file source.
- ``rate``: ``RateSource`` with one shard. ``rate-micro-batch`` gives the row; for ``rate`` only the
  user knows the rows per second, and gives the position.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.graph import Operator
from stateformat.model import State
from stateformat.storage import Storage

from ..bootstrap import source_states
from ..connectors.sources.files import files_behind
from ..connectors.sources.rate import rate_behind
from ..dataflow.api import StartingPoint
from .framing import json_value

OFFSETS: Final = "spark.offsets."
"""Properties of a Spark checkpoint: its line of the offset log, for each source by its number."""
KINDS: Final = ("files", "rate")
_FORM: Final = re.compile(r"(?P<kind>[a-z]+)(?::(?P<number>[0-9]{1,4}))?(?:@(?P<position>[0-9]{1,18}))?")
LOG_BYTES_MAX: Final = 256 << 20
"""The most bytes of one file of a source's log: some million names."""


class Start(NamedTuple):
    """Where a source of the dataflow continues."""

    uid: str
    kind: str
    number: int
    """The number of the source in the foreign query."""
    position: int | None
    """Given by the user; None: taken from the foreign query."""


class SourceState(NamedTuple):
    """The state of a source in the new checkpoint: one reader, and the enumerator."""

    operator: Operator
    states: tuple[State, State]
    start: StartingPoint


def parse_start(uid: str, text: str) -> Start:
    """Parse ``KIND[:NUMBER][@POSITION]`` of a source. Raises ``InvalidInput`` for anything else."""
    match = _FORM.fullmatch(text)
    if match is None or match["kind"] not in KINDS:
        raise InvalidInput(
            f"source {uid!r} is to go on as {text!r}; give {' or '.join(KINDS)}, with :NUMBER for another source of "
            "the query than 0, and @POSITION if you know it"
        )
    position = None if match["position"] is None else int(match["position"])
    if match["kind"] == "files" and position is not None:
        raise InvalidInput(f"source {uid!r} reads files, which have no number as position; leave @{position} out")
    return Start(uid, match["kind"], int(match["number"] or 0), position)


def source_state(start: Start, properties: Mapping[str, str], folder: Storage) -> SourceState:
    """Return the state with which a source continues.

    Raises ``InvalidInput`` if the foreign query has no such source or it reads differently, and
    ``DamagedCheckpoint`` for a log that is incomplete.
    """
    begins = _files(start, properties, folder) if start.kind == "files" else _rate(start, properties)
    return SourceState(Operator(start.uid, 1, 128, coordinator=True), source_states(start.uid, begins), begins)


def known_offsets(properties: Mapping[str, str]) -> dict[int, str]:
    """Return the offsets of the foreign query, as text, by the number of its source."""
    found = {name.removeprefix(OFFSETS): text for name, text in properties.items() if name.startswith(OFFSETS)}
    return {int(number): text for number, text in sorted(found.items()) if number.isdigit()}


def _offset(start: Start, properties: Mapping[str, str]) -> Any:
    offsets = known_offsets(properties)
    if start.number not in offsets:
        raise InvalidInput(
            f"source {start.uid!r} is to go on as source {start.number} of the query, which has "
            f"{', '.join(map(str, offsets)) or 'none that says where it is'}"
        )
    try:
        return json_value(offsets[start.number])
    except ValueError:
        return None


def _unfit(start: Start, properties: Mapping[str, str], wanted: str, advice: str) -> InvalidInput:
    text = known_offsets(properties)[start.number]
    return InvalidInput(
        f"source {start.number} of the query is at {text[:200]!r}, and {start.uid!r} is to read {start.kind}, whose "
        f"position there is {wanted}. {advice}"
    )


def _rate(start: Start, properties: Mapping[str, str]) -> StartingPoint:
    row = start.position
    if row is None:
        offset = _offset(start, properties)
        row = offset.get("offset") if isinstance(offset, dict) else None
        if type(row) is not int or row < 0:
            advice = f"Rows a second × seconds is the row: {start.uid}=rate@ROW"
            raise _unfit(start, properties, 'that of rate-micro-batch, {"offset":ROW,…}', advice)
    return rate_behind([row])


def _files(start: Start, properties: Mapping[str, str], folder: Storage) -> StartingPoint:
    offset = _offset(start, properties)
    newest = offset.get("logOffset") if isinstance(offset, dict) else None
    if type(newest) is not int:
        advice = f"Begin {start.uid!r} where the query is, with a position of its own"
        raise _unfit(start, properties, '{"logOffset":N}', advice)
    return files_behind([_local(path, start) for path in files_read(folder, start.number, newest)])


def _local(path: str, start: Start) -> str:
    parts = urlsplit(path)
    if parts.scheme not in ("", "file") or parts.netloc:
        raise InvalidInput(
            f"source {start.number} of the query has read {path!r}, which is not on a local disk; sources over files "
            f"read local disks. Begin {start.uid!r} where the query is, with a position of its own"
        )
    return unquote(parts.path)


def files_read(folder: Storage, number: int, newest: int) -> list[str]:
    """Return the paths that Spark's file source had read up to batch ``newest`` of its own log, in
    order.

    The log has a file for each batch; ``N.compact`` has all up to N. Raises ``DamagedCheckpoint``
    if one is missing or is not as Spark writes it.
    """
    place = f"sources/{number}/"
    names = {item.path.removeprefix(place) for item in folder.list(place)}
    compact = [int(name.removesuffix(".compact")) for name in names if re.fullmatch(r"[0-9]{1,18}\.compact", name)]
    base = max((batch for batch in compact if batch <= newest), default=-1)
    wanted = [f"{base}.compact"] if base >= 0 else []
    found: list[str] = []
    for name in chain(wanted, map(str, range(base + 1, newest + 1))):
        if name not in names:
            raise _damaged(
                f"{place}{name}", f"is missing, and the query had come to {newest}", ErrorKind.OBJECT_MISSING
            )
        found += _paths_of(folder, f"{place}{name}")
    return found


def _paths_of(folder: Storage, path: str) -> list[str]:
    size = folder.size(path)
    if size > LOG_BYTES_MAX:
        raise _damaged(path, f"has {size} bytes, more than {LOG_BYTES_MAX} for names of files")
    try:
        version, *lines = folder.read(path).to_pybytes().decode().split("\n")
        entries = [json_value(line) for line in lines if line]
        if version != "v1" or not all(isinstance(entry["path"], str) for entry in entries):
            raise ValueError(version)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "is no log of files: v1, then a JSON object with a path in each line") from error
    return [entry["path"] for entry in entries]


def _damaged(path: str, what: str, kind: ErrorKind = ErrorKind.DAMAGED_SEGMENT) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}, of the log of files that the query has read, {what}", kind=kind, path=path)
