"""What the rows of a runtime's own states contain: timers, watermarks, committables, in-flight
records; and how many rows of a user's state have expired.

Unlike row counts, this needs the segments. So only a page limited to a few states shows it, and
only up to :data:`ROWS_MAX` rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from .. import words
from ..documents import Document
from ..errors import CheckpointError
from ..model import Kind, Mode, State
from ..reading import Wanted
from ..ttl import TTL_COLUMN, Ttl

if TYPE_CHECKING:
    from ..reading import Checkpoint

ROWS_MAX: Final = 1_000_000
WATERMARK_NONE: Final = -(2**63)
WATERMARK_END: Final = 2**63 - 1
MESSAGE_COLUMNS: Final = {"message_from", "message"}
"""Columns of a coordinator's state in which a runtime keeps messages not yet received."""


def contents(checkpoint: Checkpoint, state: State, rows: int) -> Document | None:
    """Return what a runtime's own state holds, by its mode; for a user's state, how many rows have
    expired, or None if its rows never do.

    ``rows`` is the number of stored rows. ``unread`` in the result says why rows were not read: too
    many, or damaged.
    """
    edges = [edge.id for edge in checkpoint.graph.edges if edge.target == state.operator and not edge.feedback]
    reader = _reader(state, edges)
    if reader is None:
        return None
    if rows > ROWS_MAX:
        return {"unread": f"{rows:,} rows are too many to read here; `ckpt export` writes them to a file"}
    columns, describe = reader
    try:
        task = checkpoint.read(state.operator, state.name).with_expired()
        parts = [*task.batches(wanted=Wanted(tuple(columns)))]
    except CheckpointError as error:
        return {"unread": str(error)}
    return describe(pa.Table.from_batches(parts, parts[0].schema if parts else pa.schema(columns.items())))


def _reader(
    state: State, edges: Sequence[str]
) -> tuple[Mapping[str, pa.DataType], Callable[[pa.Table], Document]] | None:
    """Return the columns to read, and a function from them to the document.

    ``edges`` are the inputs of the state's operator.
    """
    if state.ttl is not None:
        return {TTL_COLUMN: pa.timestamp("us")}, partial(_expired, ttl=state.ttl, now_us=state.ttl_now_us)
    if state.mode is Mode.KEYED and state.kind is Kind.TIMERS:
        return {"_timestamp": pa.int64()}, _timers
    if state.mode is Mode.PROGRESS:
        return {"_edge": pa.string(), "_watermark": pa.int64(), "_ended": pa.bool_()}, partial(_progress, edges=edges)
    if state.mode is Mode.COMMITTABLES:
        return {"_checkpoint_id": pa.int64(), "_attempt_id": pa.string()}, _committables
    if state.mode is Mode.IN_FLIGHT:
        return {"_sender": pa.int32(), "_receiver": pa.int32()}, _in_flight
    if state.mode is Mode.COORDINATOR and {field.name for field in state.schemas[-1].fields} >= MESSAGE_COLUMNS:
        return {"message": pa.binary()}, _messages
    return None


def _expired(table: pa.Table, ttl: Ttl, now_us: int | None) -> Document:
    expired = 0 if now_us is None else int(ttl.expired(table[TTL_COLUMN], now_us).sum())
    return {"rows": table.num_rows, "expired": expired}


def _timers(table: pa.Table) -> Document:
    due = pc.min_max(table["_timestamp"]).as_py()
    return {"timers": table.num_rows, **_times("first", due["min"]), **_times("last", due["max"])}


def _progress(table: pa.Table, edges: Sequence[str]) -> Document:
    """Return the inputs, in the order of the graph; one without a row has seen nothing (SPEC.md
    6.2).
    """
    # The reader merges subtasks: the least watermark, and ended only if ended for all.
    seen = {row["_edge"]: row for row in table.to_pylist()}
    nothing = {"_watermark": WATERMARK_NONE, "_ended": False}
    rows = [(edge, seen.get(edge, nothing)) for edge in edges]
    return {
        "inputs": [
            {"edge": edge, **_times("watermark", row["_watermark"]), "ended": row["_ended"]} for edge, row in rows
        ]
    }


def _committables(table: pa.Table) -> Document:
    keys = ["_checkpoint_id", "_attempt_id"]
    found = table.group_by(keys, use_threads=False).aggregate([([], "count_all")])
    ordered = found.sort_by([(key, "ascending") for key in keys]).to_pylist()
    return {
        "prepared": [
            {"checkpoint_id": row["_checkpoint_id"], "attempt_id": row["_attempt_id"], "rows": row["count_all"]}
            for row in ordered
        ]
    }


def _in_flight(table: pa.Table) -> Document:
    channels = table.group_by(["_sender", "_receiver"], use_threads=False).aggregate([])
    return {
        "channels": channels.num_rows,
        "senders": len(pc.unique(table["_sender"])),
        "receivers": len(pc.unique(table["_receiver"])),
    }


def _messages(table: pa.Table) -> Document:
    return {"messages": table.num_rows - table["message"].null_count}


def _times(name: str, event_time_us: int | None) -> Document:
    """Return an event time as text and as an integer; null for "none" and "end", which are not
    times.
    """
    if event_time_us is None:
        return {f"{name}_at": None, f"{name}_us": None}
    if event_time_us in (WATERMARK_NONE, WATERMARK_END):
        return {f"{name}_at": "none" if event_time_us == WATERMARK_NONE else "end", f"{name}_us": None}
    return {f"{name}_at": words.precise_moment(event_time_us), f"{name}_us": event_time_us}
