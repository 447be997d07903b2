"""What handles that name the same segment must agree in (SPEC.md sections 4.1, 4.4 and 5.6).

Paths become codes in order of appearance, so the first handle of a segment is found without a sort.
Every other handle is compared with it, some rows at a time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from .rules import BATCH_ROWS, HandleFault, Ints, integers, one_chunk

_STATE: Final = ("operator", "state", "schema_id")
_OF_SEGMENT: Final = ("segment_rows", "size_bytes", "uncompressed_bytes", "footer_bytes", "digest", "footer_digest")


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


def sharing_faults(handles: pa.Table) -> list[HandleFault]:
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
            faults.append(HandleFault(clause, message, int(differing[0]), len(differing)))
    return faults


def _unlike_first(column: pa.Array, codes: Ints, first: Ints) -> Ints:
    """Return the rows whose value differs from that of the first row with their code."""
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


def inline_faults(handles: pa.Table, codes: Ints, values: pa.Array) -> list[HandleFault]:
    """Compare inline bytes with paths (SPEC 4.4); ``codes`` index ``values``, -1 for none."""
    inline = codes >= 0
    faults = []
    named = pc.is_valid(handles["path"]).to_numpy()
    if (inline & ~named).any():
        row, count = int((inline & ~named).argmax()), int((inline & ~named).sum())
        faults.append(HandleFault("SPEC 4.1", "inline is null where path is", row, count))
    # A foreign writer's dictionary may hold equal bytes twice, so compare digests.
    digests = pa.array([xxhash.xxh3_128_digest(value.as_buffer()) for value in values], pa.binary())
    same = np.append(integers(pc.dictionary_encode(digests).indices), -1)[codes]
    paths = integers(pc.dictionary_encode(handles["path"].combine_chunks()).indices)
    order = np.lexsort((same, paths))
    differs = (paths[order][1:] == paths[order][:-1]) & (same[order][1:] != same[order][:-1]) & named[order][1:]
    if differs.any():
        row = int(order[1:][differs.argmax()])
        faults.append(HandleFault("SPEC 4.4", "handles of one segment agree in inline", row, int(differs.sum())))
    return faults
