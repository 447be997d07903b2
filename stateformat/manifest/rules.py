"""Rules for each row of a manifest, by itself and with its neighbors (SPEC.md 4.1 to 4.5).

Opening a checkpoint raises at the first fault (``manifest.decode_manifest``); validation collects
all of them. The rules do not see the record: ``stateformat.rules`` compares handles with operators
and states, and ``segment_rules`` compares handles of one segment. A rule is a mask of the rows that
break it, computed for one batch of rows at a time, small enough for the processor's cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind
from ..findings import Finding
from ..model import Mode
from ..paths import SEGMENTS
from ..schema import MANIFEST_SCHEMA
from .columns import BATCH_ROWS, Ints, Mask, as_numpy, before, integers, lists, runs

_Runs: TypeAlias = "tuple[pa.Array, Ints]"
_Rules: TypeAlias = "Iterator[tuple[str, str, Mask]]"
GROUPS_MAX: Final = 32_768
"""Key groups and senders are below this (SPEC.md section 3.4)."""
_REQUIRED: Final = tuple(field.name for field in MANIFEST_SCHEMA if not field.nullable)
_SIZES: Final = ("row_start", "rows", "segment_rows", "size_bytes", "uncompressed_bytes", "footer_bytes")
_NULL_WITHOUT_ROWS: Final = ("path", "digest", "footer_digest", "first_group", "last_group", "rows_per_group")
_SIZE_MAX: Final = 2**53 - 1
# A larger count cannot be part of a legal sum; 32,768 smaller ones never overflow int64.
_COUNT_MAX: Final = 2**47
_MODE_CODES: Final = {mode: code for code, mode in enumerate(Mode)}
_BLOCK_BYTES: Final = 1 << 18


@functools.cache
def _modes() -> pa.Array:
    # Not a constant: pyarrow imports pandas at its first Python list. Typed: otherwise it imports
    # dateutil.
    return pa.array([mode.value for mode in Mode], pa.string())


class Broken(NamedTuple):
    """A rule that rows of a manifest break: clause, what holds, first such row, number of rows."""

    clause: str
    message: str
    row: int
    row_count: int
    kind: ErrorKind = ErrorKind.DAMAGED_MANIFEST

    def finding(self, handles: pa.Table) -> Finding:
        """Return which handle breaks which rule."""
        (operator, is_operator), (state, is_state) = (_text(handles[name][self.row]) for name in ("operator", "state"))
        subtask, layer = (handles[name][self.row].as_py() for name in ("subtask", "layer"))
        owner = "no subtask" if subtask is None else f"subtask {subtask}"
        who = f"handle {self.row} (operator {operator!r}, state {state!r}, {owner}, layer {layer})"
        more = f" and {self.row_count - 1:,} more break" if self.row_count > 1 else " breaks"
        found = Finding(self.kind, self.clause, f"{who}{more} {self.clause}: {self.message}")
        if not (is_operator and is_state):
            return found
        return replace(found, operator=operator or "", state=state or "", subtask=subtask)


def _text(value: pa.Scalar) -> tuple[str | None, bool]:
    """Return a text, and whether it is UTF-8: the stored bytes need not be."""
    if not value.is_valid:
        return None, True
    data = value.as_buffer().to_pybytes()
    text = data.decode("utf-8", "replace")
    return text, text.encode() == data


def first_unsorted(handles: pa.Table) -> int | None:
    """Return the first row that breaks the order of SPEC.md section 4.2, or None."""
    return _first_unsorted(handles, runs(handles["operator"]), runs(handles["state"]))


def _first_unsorted(handles: pa.Table, of_operator: _Runs, of_state: _Runs) -> int | None:
    (operators, operator_starts), (states, state_starts) = of_operator, of_state
    new_operator = np.zeros(handles.num_rows, bool)
    new_operator[operator_starts[1:-1]] = True
    new_state = new_operator.copy()
    new_state[state_starts[1:-1]] = True
    # Arrow compares strings by their bytes, as the format does.
    wrong = [operator_starts[1:-1][~as_numpy(pc.less(operators[:-1], operators[1:]))]]
    same_operator = ~new_operator[state_starts[1:-1]]
    falls = ~as_numpy(pc.less(states[:-1], states[1:]))
    wrong.append(state_starts[1:-1][same_operator & falls])
    for start in range(0, max(handles.num_rows - 1, 0), BATCH_ROWS):
        # Each batch begins with the last row of the one before it.
        batch = handles.slice(start, BATCH_ROWS + 1)
        subtask, layer = integers(batch["subtask"]), integers(batch["layer"])
        falls = (subtask[1:] < subtask[:-1]) | ((subtask[1:] == subtask[:-1]) & (layer[1:] < layer[:-1]))
        wrong.append(np.flatnonzero(falls & ~new_state[start + 1 : start + len(subtask)]) + start + 1)
    found = [int(rows.min()) for rows in wrong if len(rows)]
    return min(found) if found else None


def handle_faults(handles: pa.Table) -> list[Finding]:
    """Return every rule of SPEC.md sections 4.1 to 4.3 that the planning columns break."""
    return [broken.finding(handles) for broken in broken_rules(handles)]


def broken_rules(handles: pa.Table) -> list[Broken]:
    """Return the same, not yet said of which handle; texts may be dictionaries."""
    faults = [
        Broken("SPEC 4.1", f"column {name} holds no nulls", _first_null(handles[name]), handles[name].null_count)
        for name in _REQUIRED
        if handles[name].null_count
    ]
    found = {name: runs(handles[name]) for name in ("operator", "state", "edge")}
    faults += [
        Broken("SPEC 4.1", f"column {name} holds UTF-8", 0, handles.num_rows)
        for name, (values, _) in found.items()
        if not _is_utf8(values)
    ]
    if faults:
        return faults  # The rules below need these columns.
    collected: dict[str, Broken] = {}
    if handles["operator"].num_chunks > handles.num_rows // BATCH_ROWS + 2:
        handles = handles.combine_chunks()
    start = 0
    for batch in handles.to_batches(max_chunksize=BATCH_ROWS):
        for fault in _batch_faults(batch):
            earlier = collected.get(fault.message)
            if earlier:
                collected[fault.message] = earlier._replace(row_count=earlier.row_count + fault.row_count)
            else:
                collected[fault.message] = fault._replace(row=fault.row + start)
        start += batch.num_rows
    row = _first_unsorted(handles, found["operator"], found["state"])
    if row is not None:
        text = "handles are sorted by (operator, state, subtask with null first, layer)"
        collected[text] = Broken("SPEC 4.2", text, row, 1)
    return list(collected.values())


class _Batch:
    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.numbers = {name: integers(batch[name]) for name in (*_SIZES, "subtask", "layer", "schema_id")}
        self.present = {name: as_numpy(pc.is_valid(batch[name])) for name in (*_NULL_WITHOUT_ROWS, "edge", "subtask")}
        names, starts = runs(pa.chunked_array([batch["mode"]]))
        codes = pc.fill_null(pc.index_in(names, value_set=_modes()), -1).to_numpy(zero_copy_only=False)
        self.mode = np.repeat(codes, np.diff(starts))

    def is_mode(self, mode: Mode) -> Mask:
        found: Mask = self.mode == _MODE_CODES[mode]
        return found


def _batch_faults(batch: pa.RecordBatch) -> Iterator[Broken]:
    for clause, message, broken in _value_faults(batch):
        yield Broken(clause, message, int(broken.argmax()), int(broken.sum()))
    broken = _illegal_paths(batch["path"])
    if broken.any():
        row = int(broken.argmax())
        shown = batch["path"].slice(row, 1).cast(pa.binary())[0].as_py()
        message = f"paths are legal and lie under {SEGMENTS}, unlike {shown[:120]!r}"
        yield Broken("SPEC 2.2", message, row, int(broken.sum()), ErrorKind.INVALID_PATH)


def _value_faults(batch: pa.RecordBatch) -> _Rules:
    view = _Batch(batch)
    for clause, message, broken in (*_value_rules(view), *_segment_rules(view), *_group_rules(view)):
        if broken.any():
            yield clause, message, broken


def unusable(handles: pa.Table) -> Mask:
    """Return the mask of handles that break a rule by themselves; readers must not follow them."""
    if any(handles[name].null_count for name in _REQUIRED):
        return np.ones(handles.num_rows, bool)
    found = [np.zeros(0, bool)]
    for batch in handles.to_batches(max_chunksize=BATCH_ROWS):
        broken = _illegal_paths(batch["path"])
        for _, _, mask in _value_faults(batch):
            broken |= mask
        found.append(broken)
    return np.concatenate(found)


def _value_rules(view: _Batch) -> _Rules:
    numbers, present = view.numbers, view.present
    keyed, coordinator = view.is_mode(Mode.KEYED), view.is_mode(Mode.COORDINATOR)
    yield "SPEC 4.1", "mode is one of the format's", view.mode < 0
    owner = "subtask is null for mode coordinator, may be null for committables, and is set for all others"
    unowned = coordinator | view.is_mode(Mode.COMMITTABLES)
    yield "SPEC 4.1", owner, np.where(present["subtask"], coordinator, ~unowned)
    yield "SPEC 4.1", "subtask is not negative", present["subtask"] & (numbers["subtask"] < 0)
    yield "SPEC 4.1", "layer is above 0 only for mode keyed", (numbers["layer"] < 0) | ((numbers["layer"] > 0) & ~keyed)
    yield "SPEC 4.1", "edge is set exactly for mode in_flight", present["edge"] != view.is_mode(Mode.IN_FLIGHT)
    yield "SPEC 4.1", "schema_id is from 1", numbers["schema_id"] < 1
    for name in _SIZES:
        yield "SPEC 4.1", f"{name} is from 0 to 2**53 - 1", (numbers[name] < 0) | (numbers[name] > _SIZE_MAX)


def _segment_rules(view: _Batch) -> _Rules:
    numbers, present = view.numbers, view.present
    empty = numbers["rows"] == 0
    filled = ~empty
    for name in _NULL_WITHOUT_ROWS:
        yield "SPEC 4.1", f"{name} is null where rows is 0", empty & present[name]
    for name in _SIZES:
        if name != "rows":
            yield "SPEC 4.1", f"{name} is 0 where rows is 0", empty & (numbers[name] != 0)
    for name in ("path", "digest", "footer_digest"):
        yield "SPEC 4.1", f"{name} is set where rows is not 0", filled & ~present[name]
    beyond = numbers["row_start"] + numbers["rows"] > numbers["segment_rows"]
    yield "SPEC 4.1", "the rows of a handle lie within its segment", beyond
    footer = numbers["footer_bytes"]
    wrong = filled & ((footer <= 8) | (footer > numbers["size_bytes"] - 4))
    yield "SPEC 4.1", "footer_bytes is above 8 and within size_bytes", wrong


def _group_rules(view: _Batch) -> _Rules:
    present, rows = view.present, view.numbers["rows"]
    due = (view.is_mode(Mode.KEYED) | view.is_mode(Mode.IN_FLIGHT)) & (rows > 0)
    for name in ("first_group", "last_group", "rows_per_group"):
        message = f"{name} is set exactly for handles with rows of the modes keyed, in_flight"
        yield "SPEC 4.3", message, present[name] != due
    due &= present["first_group"] & present["last_group"] & present["rows_per_group"]
    first, last = (integers(view.batch[name], null=0) for name in ("first_group", "last_group"))
    outside = (first < 0) | (last < first) | (last >= GROUPS_MAX)
    yield "SPEC 4.3", f"groups go from first to last, below {GROUPS_MAX}", due & outside
    starts, ends, counts = lists(view.batch["rows_per_group"])
    yield "SPEC 4.3", "rows_per_group has one count for each group", due & (ends - starts != last - first + 1)
    due &= ends > starts
    if not due.any():
        return
    if counts.min() < 0 or counts.max() > _COUNT_MAX:
        illegal = (counts < 0) | (counts > _COUNT_MAX)
        illegal_before = before(illegal.astype(np.int64))
        message = "the counts of rows_per_group are row counts"
        yield "SPEC 4.3", message, due & (illegal_before[ends] > illegal_before[starts])
        return
    edges = counts[starts[due]], counts[ends[due] - 1]
    trimmed = np.zeros(len(due), bool)
    trimmed[due] = (edges[0] == 0) | (edges[1] == 0)
    yield "SPEC 4.3", "the first and last group have rows", trimmed
    unequal = np.zeros(len(due), bool)
    unequal[due] = _sums(counts, starts[due], ends[due]) != rows[due]
    yield "SPEC 4.3", "rows_per_group adds up to rows", unequal


def _sums(values: Ints, starts: Ints, ends: Ints) -> Ints:
    """Return the sum of each range; ranges are disjoint, ascending and not empty."""
    edges = np.empty(2 * len(starts), np.int64)
    edges[::2], edges[1::2] = starts, ends
    # reduceat also sums what is between two ranges, and accepts no edge at the very end.
    found: Ints = np.add.reduceat(values, edges[:-1] if ends[-1] == len(values) else edges)[::2]
    return found


def _illegal_paths(paths: pa.Array) -> Mask:
    """Return the rows with illegal paths. Scans whole buffers, and single rows if a scan hits."""
    broken = ~as_numpy(pc.fill_null(pc.starts_with(paths, SEGMENTS), True))
    _, offset_buffer, data_buffer = paths.buffers()
    if data_buffer is None or data_buffer.size == 0:
        return broken
    offsets = np.frombuffer(offset_buffer, np.int32)[paths.offset : paths.offset + len(paths) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    offsets -= offsets[0]
    filled = offsets[1:] > offsets[:-1]
    broken[filled] |= data[offsets[1:][filled] - 1] == ord("/")
    for start in range(0, len(data), _BLOCK_BYTES):
        # One byte of overlap, for pairs across blocks.
        block = data[start : start + _BLOCK_BYTES + 1]
        slash = block[:-1] == ord("/")
        # The byte after a slash is neither "." (46) nor "/" (47): no empty and no dotted part.
        pairs = slash & (block[1:] - np.uint8(46) <= 1)
        if pairs.any() or block.min() < 32 or block.max() > 126 or (block == ord("\\")).any():
            row = int(np.searchsorted(offsets, start, side="right")) - 1
            stop = int(np.searchsorted(offsets, start + len(block), side="left"))
            broken[row:stop] |= [_illegal(data[offsets[i] : offsets[i + 1]].tobytes()) for i in range(row, stop)]
    return broken


def _illegal(path: bytes) -> bool:
    try:
        text = path.decode("utf-8")
    except UnicodeDecodeError:
        return True
    bad = any(ord(char) < 32 or ord(char) == 127 or char == "\\" for char in text)
    return bad or any(not part or part.startswith(".") for part in text.split("/") if text)


def _first_null(column: pa.ChunkedArray) -> int:
    return int(as_numpy(pc.is_null(column)).argmax())


def _is_utf8(values: pa.Array) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
