"""What handles that name the same segment agree in (SPEC.md sections 4.1, 4.4 and 5.6), and which do name the same.

Theory of operation. Paths become codes, given out in order of appearance, so the first handle of a segment is found without a
sort, and every other is compared with it, some rows at a time: neighbours mostly share, so both sides are in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from .rules import BATCH_ROWS, HandleFault, integers, one_chunk

if TYPE_CHECKING:
    import numpy.typing as npt

_Ints: TypeAlias = "npt.NDArray[np.int64]"

_STATE: Final = ("operator", "state", "schema_id")
_OF_SEGMENT: Final = ("segment_rows", "size_bytes", "uncompressed_bytes", "footer_bytes", "digest", "footer_digest")


def first_uses(codes: _Ints) -> _Ints:
    """Where each code of a fresh dictionary stands first: they are given out in order of appearance, −1 for null."""
    if not len(codes):
        return codes
    highest = np.maximum.accumulate(codes)
    found: _Ints = np.flatnonzero(np.append(codes[0] >= 0, highest[1:] > highest[:-1]))
    return found


def codes_of(column: pa.ChunkedArray) -> tuple[_Ints, int]:
    """Equal values have equal codes, given out in order of appearance, −1 for null; and how many codes there are."""
    encoded = pc.dictionary_encode(column)
    codes = np.concatenate([np.zeros(0, np.int64), *(integers(chunk.indices) for chunk in encoded.chunks)])
    return codes, len(encoded.chunk(encoded.num_chunks - 1).dictionary) if encoded.num_chunks else 0


def sharing_faults(handles: pa.Table) -> list[HandleFault]:
    """Whether handles that name the same segment say the same of it (SPEC.md sections 4.1, 4.4 and 5.6).

    Sizes and digests, operator, state and schema; and, where the table has the column, the inline bytes.
    """
    codes, count = codes_of(handles["path"])
    if count == np.count_nonzero(codes >= 0):
        return []
    # Each row is compared with the first that names its segment, which is above it.
    first = first_uses(codes)
    faults = []
    for name in (name for name in (*_STATE, *_OF_SEGMENT, "inline") if name in handles.column_names):
        differing = _unlike_first(one_chunk(handles[name]), codes, first)
        if len(differing):
            clause = "SPEC 4.4" if name == "inline" else "SPEC 5.6" if name in _STATE else "SPEC 4.1"
            message = f"handles of one segment agree in {name}"
            faults.append(HandleFault(clause, message, int(differing[0]), len(differing)))
    return faults


def _unlike_first(column: pa.Array, codes: _Ints, first: _Ints) -> _Ints:
    """Rows whose value is another than that of the first row with their code."""
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


def inline_faults(handles: pa.Table, codes: _Ints, values: pa.Array) -> list[HandleFault]:
    """Inline bytes beside paths (SPEC.md section 4.4); ``codes`` are each handle's position in ``values``, −1 for none."""
    inline = codes >= 0
    faults = []
    named = pc.is_valid(handles["path"]).to_numpy()
    if (inline & ~named).any():
        row, count = int((inline & ~named).argmax()), int((inline & ~named).sum())
        faults.append(HandleFault("SPEC 4.1", "inline is null where path is", row, count))
    # Equal bytes may stand twice in a dictionary that somebody else wrote: compare digests, of 4 MiB at most.
    digests = pa.array([xxhash.xxh3_128_digest(value.as_buffer()) for value in values], pa.binary())
    same = np.append(integers(pc.dictionary_encode(digests).indices), -1)[codes]
    paths = integers(pc.dictionary_encode(handles["path"].combine_chunks()).indices)
    order = np.lexsort((same, paths))
    differs = (paths[order][1:] == paths[order][:-1]) & (same[order][1:] != same[order][:-1]) & named[order][1:]
    if differs.any():
        row = int(order[1:][differs.argmax()])
        faults.append(HandleFault("SPEC 4.4", "handles of one segment agree in inline", row, int(differs.sum())))
    return faults
