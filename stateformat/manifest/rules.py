"""Rules for the rows of a manifest, and columns of handles as numpy arrays (SPEC.md 4.1 to 4.5).

Helpers for columns come first; the planner, the readers and the validator use them too. Then come
the rules for each row, and those for rows that name one segment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ..errors import ErrorKind
from ..findings import Finding
from ..model import Mode
from ..paths import SEGMENTS
from ..schema import MANIFEST_SCHEMA

if TYPE_CHECKING:
    import numpy.typing as npt

# ---- columns -------------------------------------------------------------------------------------
#
# Columns of handles as numpy arrays: runs, integers, lists, and rows taken from tables.


BATCH_ROWS: Final = 65_536
Ints: TypeAlias = "npt.NDArray[np.int64]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"


def runs(column: pa.ChunkedArray) -> tuple[pa.Array, Ints]:
    """Return runs of equal strings: their values, the first row of each, and the number of rows.

    The column may be a dictionary.
    """
    if len(column) == 0:
        return pa.array([], pa.string()), np.zeros(1, np.int64)
    if len(column) == 1:
        one = one_chunk(column)
        return one.dictionary_decode() if pa.types.is_dictionary(one.type) else one, np.array([0, 1])
    if pa.types.is_dictionary(column.type):
        # Each chunk may have a dictionary of its own.
        encoded = [pc.run_end_encode(chunk.indices, run_end_type=pa.int64()) for chunk in column.chunks if len(chunk)]
        dictionaries = [chunk.dictionary for chunk in column.chunks if len(chunk)]
        values = pa.concat_arrays([texts.take(part.values) for texts, part in zip(dictionaries, encoded, strict=True)])
    else:
        encoded = [pc.run_end_encode(chunk, run_end_type=pa.int64()) for chunk in column.chunks if len(chunk)]
        values = pa.concat_arrays([part.values for part in encoded])
    starts = np.concatenate(
        [np.zeros(1, np.int64), *(np.diff(part.run_ends.to_numpy(), prepend=0) for part in encoded)]
    ).cumsum()
    if len(encoded) > 1:
        # A run may continue in the next chunk.
        again = pc.run_end_encode(values, run_end_type=pa.int64())
        values, starts = again.values, starts[np.append(0, again.run_ends.to_numpy())]
    return values, starts


def state_runs(handles: pa.Table) -> Iterator[tuple[tuple[str, str], int, int]]:
    """Yield runs of handles of one state: (operator, state), first row, row after the last.

    In a sorted table a run is a state. Bytes that are not UTF-8 are shown with replacements.
    """
    operators, operator_starts = runs(handles["operator"])
    names, name_starts = runs(handles["state"])
    # The rows where either begins, in order. np.union1d would import numpy.ma.
    begins = np.zeros(handles.num_rows + 1, bool)
    begins[operator_starts] = begins[name_starts] = True
    starts = np.flatnonzero(begins)
    of_operator = (np.searchsorted(operator_starts, starts, side="right") - 1).tolist()
    of_name = (np.searchsorted(name_starts, starts, side="right") - 1).tolist()
    operator_list, name_list = texts(operators), texts(names)
    bounds = starts.tolist()
    for i in range(len(bounds) - 1):
        yield (operator_list[of_operator[i]], name_list[of_name[i]]), bounds[i], bounds[i + 1]


def texts(values: pa.Array) -> list[str]:
    """Return strings to show to people; bytes that are not UTF-8 are replaced."""
    return [value.decode("utf-8", "replace") for value in values.cast(pa.binary()).to_pylist()]


def integers(column: pa.ChunkedArray | pa.Array, *, null: int = -1) -> Ints:
    """Return an integer column as int64, nulls as ``null``."""
    filled = pc.fill_null(column, null) if column.null_count else column
    found: Ints = filled.to_numpy(zero_copy_only=False) if isinstance(filled, pa.Array) else filled.to_numpy()
    return found.astype(np.int64, copy=False)


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat positions by their counts and number them: [2, 1] gives [0, 0, 1] and [0, 1, 0]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner]


def group_rows(handles: pa.Table) -> tuple[Ints, Ints, Ints]:
    """Return the rows of each handle in each of its key groups: the handle, the group, how many."""
    starts, ends, counts = lists(one_chunk(handles["rows_per_group"]))
    owner, nth = spread(ends - starts)
    return owner, integers(handles["first_group"])[owner] + nth, counts[starts[owner] + nth]


def before(values: Ints) -> Ints:
    """Return the sum of everything before each position, and the total as one more entry."""
    sums = np.empty(len(values) + 1, dtype=np.int64)
    sums[0] = 0
    np.cumsum(values, out=sums[1:])
    return sums


def take_rows(table: pa.Table, indices: pa.Array) -> pa.Table:
    """Return the rows at these positions, ten times as fast as ``table.take``; null gives nulls."""
    batches = table.to_batches()
    if len(batches) == 1 and not isinstance(indices, pa.ChunkedArray):
        return pa.Table.from_batches([batches[0].take(indices)], schema=table.schema)
    columns = [one_chunk(column).take(indices) for column in table.columns]
    return pa.table(columns, schema=table.schema)


def one_chunk(column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return a column as one array, without a copy if it is one; over 2 GiB it stays chunked."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def lists(column: pa.Array) -> tuple[Ints, Ints, Ints]:
    """Return (start, end, values) of a list<int64> array; row i is values[start[i]:end[i]]."""
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = integers(column.values.slice(offsets[0], offsets[-1] - offsets[0]) if len(offsets) else column.values)
    offsets = offsets - offsets[0]
    starts, ends = offsets[:-1], offsets[1:].copy()
    if column.null_count:
        ends = np.where(as_numpy(pc.is_valid(column)), ends, starts)
    return starts, ends, values


def as_numpy(mask: Any) -> Mask:
    """Return an Arrow mask as a numpy mask."""
    found: Mask = mask.to_numpy(zero_copy_only=False) if isinstance(mask, pa.Array) else mask.to_numpy()
    return found


# ---- single handles ------------------------------------------------------------------------------
#
# Rules for each row of a manifest, by itself and with its neighbors (SPEC.md 4.1 to 4.5).
#
# Opening a checkpoint raises at the first fault (``manifest.decode_manifest``); validation collects
# all of them. The rules do not see the record: ``stateformat.rules`` compares handles with
# operators and states, and :func:`sharing_faults` compares handles of one segment. A rule is a
# mask of the rows that break it, computed for one batch of rows at a time, small enough for the
# processor's cache.


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


# ---- handles of one segment ----------------------------------------------------------------------
#
# Rules for the handles of one segment: the facts they must share, and the rows that they name.
#
# A thousand handles may name parts of one segment. They must agree on its facts (SPEC.md sections
# 4.1, 4.4 and 5.6). Their rows and key groups are compared with the segment (sections 4.3 and 5.5)
# as arrays, a few hundred handles at a time, with their positions laid end to end on one axis.


_STATE: Final = ("operator", "state", "schema_id")
_OF_SEGMENT: Final = ("segment_rows", "size_bytes", "uncompressed_bytes", "footer_bytes", "digest", "footer_digest")
_TOGETHER: Final = 256
"""Handles checked at once. Each has fewer than 2**53 rows, so their sum fits int64."""


def first_uses(codes: Ints) -> Ints:
    """Return the row at which each code of :func:`codes_of` first appears."""
    if not len(codes):
        return codes
    highest = np.maximum.accumulate(codes)
    found: Ints = np.flatnonzero(np.append(codes[0] >= 0, highest[1:] > highest[:-1]))
    return found


def codes_of(column: pa.ChunkedArray) -> tuple[Ints, int]:
    """Number the distinct values in order of appearance, null as -1, and count them."""
    encoded = pc.dictionary_encode(column)
    codes = np.concatenate([np.zeros(0, np.int64), *(integers(chunk.indices) for chunk in encoded.chunks)])
    return codes, len(encoded.chunk(encoded.num_chunks - 1).dictionary) if encoded.num_chunks else 0


def sharing_faults(handles: pa.Table) -> list[Finding]:
    """Return where handles of one segment disagree in sizes, digests, state, schema or bytes."""
    codes, count = codes_of(handles["path"])
    if count == np.count_nonzero(codes >= 0):
        return []
    first = first_uses(codes)
    faults = []
    for name in (name for name in (*_STATE, *_OF_SEGMENT, "inline") if name in handles.column_names):
        differing = _unlike_first(one_chunk(handles[name]), codes, first)
        if len(differing):
            clause = "SPEC 4.4" if name == "inline" else "SPEC 5.6" if name in _STATE else "SPEC 4.1"
            message = f"handles of one segment agree in {name}"
            faults.append(Broken(clause, message, int(differing[0]), len(differing)).finding(handles))
    return faults


def _unlike_first(column: pa.Array, codes: Ints, first: Ints) -> Ints:
    """Return the rows whose value differs from that of the first row with the same code."""
    found = [np.zeros(0, np.int64)]
    for start in range(0, len(codes), BATCH_ROWS):
        rows = start + np.flatnonzero(codes[start : start + BATCH_ROWS] >= 0)
        beside = first[codes[rows]]
        rows, beside = rows[beside < rows], beside[beside < rows]
        one, other = column.take(pa.array(beside)), column.take(pa.array(rows))
        if not one.equals(other):
            same = pc.or_kleene(pc.equal(one, other), pc.and_(pc.is_null(one), pc.is_null(other)))
            found.append(rows[~pc.fill_null(same, False).to_numpy(zero_copy_only=False)])
    return np.concatenate(found)


def inline_faults(handles: pa.Table, codes: Ints, values: pa.Array) -> list[Finding]:
    """Compare inline bytes with paths (SPEC 4.4); ``codes`` index ``values``, -1 for none."""
    inline = codes >= 0
    if not inline.any():
        return []
    faults = []
    named = pc.is_valid(handles["path"]).to_numpy()
    if (inline & ~named).any():
        row, count = int((inline & ~named).argmax()), int((inline & ~named).sum())
        faults.append(Broken("SPEC 4.1", "inline is null where path is", row, count).finding(handles))
    # A foreign writer's dictionary may hold equal bytes twice, so compare digests.
    digests = pa.array([xxhash.xxh3_128_digest(value.as_buffer()) for value in values], pa.binary())
    same = np.append(integers(pc.dictionary_encode(digests).indices), -1)[codes]
    paths, _ = codes_of(handles["path"])
    order = np.lexsort((same, paths))
    differs = (paths[order][1:] == paths[order][:-1]) & (same[order][1:] != same[order][:-1]) & named[order][1:]
    if differs.any():
        row = int(order[1:][differs.argmax()])
        message = "handles of one segment agree in inline"
        faults.append(Broken("SPEC 4.4", message, row, int(differs.sum())).finding(handles))
    return faults


@dataclass(frozen=True, slots=True)
class HandleRows:
    """The handles of one segment that have groups, one entry each.

    ``counts[begin:end]`` are the rows of the groups from ``first_group`` on. ``subtask`` may be -1.
    """

    subtask: Ints
    row_start: Ints
    rows: Ints
    first_group: Ints
    begin: Ints
    end: Ints
    counts: Ints

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: Any) -> HandleRows:
        """Return some handles, by mask, slice or positions."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        return HandleRows(**{name: part if name == "counts" else part[chosen] for name, part in parts.items()})

    def batches(self) -> Iterator[HandleRows]:
        """Yield a few handles at a time, in order."""
        for start in range(0, len(self), _TOGETHER):
            yield self.take(slice(start, start + _TOGETHER))

    def spread(self) -> tuple[Ints, Ints, Ints]:
        """Return every group of every handle: the handle's position, the group, its rows."""
        owner, nth = spread(self.end - self.begin)
        return owner, self.first_group[owner] + nth, self.counts[self.begin[owner] + nth]


def handle_rows(handles: pa.Table) -> HandleRows:
    """Return the handles of one segment (a manifest's planning columns) that have groups."""
    begin, end, counts = lists(handles["rows_per_group"].combine_chunks())
    first = integers(handles["first_group"])
    row_start, rows, subtask = (integers(handles[name]) for name in ("row_start", "rows", "subtask"))
    found = HandleRows(subtask, row_start, rows, first, begin, end, counts)
    return found.take((end > begin) & (first >= 0))


def row_group_faults(group_rows: Sequence[int], handles: HandleRows) -> Iterator[str]:
    """Yield the first row group that holds parts of several key groups (SPEC.md section 5.5).

    ``group_rows`` are the rows of the file's row groups, in order.
    """
    stops = np.cumsum(np.asarray(group_rows, np.int64))
    starts = stops - np.asarray(group_rows, np.int64)
    for some in handles.batches():
        at = _mixed_row_group(starts, stops, some)
        if at is not None:
            yield f"row group {at}, rows {starts[at]} to {stops[at] - 1}, holds a part of a key group and more"
            return


def _mixed_row_group(starts: Ints, stops: Ints, handles: HandleRows) -> int | None:
    """Return the first row group that begins or ends within a key group and holds others too."""
    owner, _, counts = handles.spread()
    held = np.bincount(owner, counts, len(handles)).astype(np.int64)
    # Positions of group ends on one axis, on which each handle begins after the one before it.
    lift = np.cumsum(held + 1) - (held + 1)
    before = np.cumsum(counts) - counts
    opens = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    ends = before + counts - before[opens][owner] + lift[owner]
    bounds = np.sort(np.concatenate([lift, ends]), kind="stable")
    # Every pair of a handle and a row group that holds some of its rows.
    first = np.searchsorted(stops, handles.row_start, "right")
    pairs = np.maximum(np.searchsorted(starts, handles.row_start + held, "left") - first, 0)
    mine, nth = spread(pairs)
    group = first[mine] + nth
    base = lift[mine] - handles.row_start[mine]
    low = np.maximum(starts[group], handles.row_start[mine]) + base
    high = np.minimum(stops[group], (handles.row_start + held)[mine]) + base
    whole = _among(bounds, low) & _among(bounds, high)
    alone = np.searchsorted(bounds, low, "right") == np.searchsorted(bounds, high - 1, "right")
    wrong = (low < high) & ~whole & ~alone
    return int(group[wrong.argmax()]) if wrong.any() else None


def _among(bounds: Ints, values: Ints) -> Mask:
    found: Mask = bounds[np.minimum(np.searchsorted(bounds, values), len(bounds) - 1)] == values
    return found


def group_faults(counts: Ints, handles: HandleRows, *, whole: bool) -> Iterator[tuple[int, str]]:
    """Yield handles whose rows are in groups other than they say (SPEC.md section 4.3).

    ``counts``: the rows of every group in the segment, which is sorted by group.
    ``whole``: a handle has all rows of its groups or none.

    Yields the subtask, and the rest of a sentence that begins with the segment.
    """
    ends = np.cumsum(counts)
    starts = ends - counts
    for some in handles.batches():
        for one in np.flatnonzero(_suspects(starts, ends, some, whole=whole)).tolist():
            yield from _fault(starts, ends, some.take(slice(one, one + 1)), whole=whole)


def _suspects(starts: Ints, ends: Ints, handles: HandleRows, *, whole: bool) -> Mask:
    owner, group, said = handles.spread()
    beyond = group >= len(ends)
    group = np.where(beyond, 0, group)
    first, stop = handles.row_start, handles.row_start + handles.rows
    held = np.maximum(np.minimum(ends[group], stop[owner]) - np.maximum(starts[group], first[owner]), 0)
    wrong = beyond | (held != said)
    if whole:
        wrong |= (held > 0) & (held != ends[group] - starts[group])
    found = np.bincount(owner, wrong, len(handles)) > 0
    # Rows beyond those are in groups that the handle does not name.
    rows = np.maximum(np.minimum(stop, ends[-1]) - np.maximum(first, 0), 0)
    found |= np.bincount(owner, held, len(handles)).astype(np.int64) != rows
    return found


def _fault(starts: Ints, ends: Ints, handle: HandleRows, *, whole: bool) -> Iterator[tuple[int, str]]:
    row_start, rows, first = (int(column[0]) for column in (handle.row_start, handle.rows, handle.first_group))
    stop, total = row_start + rows, ends - starts
    held = np.maximum(np.minimum(ends, stop) - np.maximum(starts, row_start), 0)
    said = np.zeros(len(held), np.int64)
    counts = handle.counts[int(handle.begin[0]) : int(handle.end[0])][: len(held) - first]
    said[first : first + len(counts)] = counts
    wrong = held != said
    if whole:
        wrong |= (held > 0) & (held != total)
    if wrong.any():
        group, subtask = int(wrong.argmax()), int(handle.subtask[0])
        what = (
            f"has {total[group]} rows of group {group}, {held[group]} of them in rows {row_start} to {stop - 1}; the "
            f"handle of subtask {None if subtask < 0 else subtask} says {said[group]}"
        )
        yield subtask, what
