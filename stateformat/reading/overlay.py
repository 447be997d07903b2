"""Merge layers that do not fit in memory together (SPEC.md section 5.4).

Theory of operation. The lowest layer of a large key group is never held whole. The layers above are
merged into an :class:`Overlay`; from each piece of the lowest it removes the rows that it names or
clears; its upserts come last. If the upper layers are too large as well, all layers are split into
buckets by the hash of the key (``spill``) and merged bucket by bucket. A bucket that is still large
is split by the row key; clears then go to every bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..schema import CLEAR, OP, UPSERT
from ..segments import row_key_codes
from ..tables import HELD_BYTES, SizedCall, Spill, buckets_of, split_by_bucket
from .merge import KeyFilter, merge_layers

_Piece = SizedCall[pa.Table]
_BUCKET_BYTES = HELD_BYTES // 4
# A bucket this many times larger than expected has a key with many rows.
_LARGE_BUCKET = 4


@dataclass(frozen=True)
class Keys:
    """The columns that identify rows of a keyed state."""

    row_key: Sequence[str]
    key_columns: Sequence[str]


class Overlay:
    """The layers above the lowest one, merged. Thread-safe."""

    def __init__(self, layers: Sequence[pa.Table], keys: Keys) -> None:
        merged = merge_layers(layers, keys.row_key, keys.key_columns, includes_base=False)
        operations = merged[OP.name].to_numpy()
        columns = list(dict.fromkeys([*keys.key_columns, *keys.row_key]))
        self._keys = keys
        self._named = merged.select(columns).filter(pa.array(operations != CLEAR))
        self._cleared = merged.select(list(keys.key_columns)).filter(pa.array(operations == CLEAR))
        self.upserts = merged.filter(pa.array(operations == UPSERT)).drop_columns([OP.name])
        self._is_named = KeyFilter(self._named, keys.row_key)
        self._is_cleared = KeyFilter(self._cleared, keys.key_columns)

    def untouched(self, piece: _Piece) -> pa.Table:
        """Return the rows of a piece of the lowest layer that stand, without ``_op``."""
        rows = piece()
        if OP.name in rows.column_names:
            rows = rows.filter(pc.equal(rows[OP.name], UPSERT)).drop_columns([OP.name])
        gone = self.touches(rows)
        return rows.filter(pa.array(~gone)) if gone.any() else rows

    def may_touch(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Tell which rows have such a key, and a few others: sooner than :meth:`touches`."""
        found = np.zeros(len(rows), np.bool_)
        for named, marks in ((self._named, self._is_named), (self._cleared, self._is_cleared)):
            if len(named):
                found |= marks.may_have(rows)
        return found

    def touches(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Tell which rows have a row key that the layers name, or a key that they clear."""
        gone = np.zeros(len(rows), np.bool_)
        for named, marks, names in (
            (self._named, self._is_named, self._keys.row_key),
            (self._cleared, self._is_cleared, self._keys.key_columns),
        ):
            if len(named):
                suspects = np.flatnonzero(marks.may_have(rows))
                gone[suspects[_stand_in(rows.select(list(names)).take(pa.array(suspects)), named)]] = True
        return gone


def _stand_in(keys: pa.Table, named: pa.Table) -> npt.NDArray[np.bool_]:
    if not len(keys):
        return np.zeros(0, np.bool_)
    both = pa.concat_tables([keys, named.select(keys.column_names)])
    codes = row_key_codes(both.columns)
    present = np.zeros(int(codes.max()) + 1, np.bool_)
    present[codes[len(keys) :]] = True
    found: npt.NDArray[np.bool_] = present[codes[: len(keys)]]
    return found


def merged_piecewise(layers: Sequence[Sequence[_Piece]], keys: Keys) -> Generator[_Piece, None, None]:
    """The rows that stand in one key group, as calls that make a piece each, in no order.
    ``layers`` has the calls that read each layer, lowest first; the upper ones are made here.
    """
    lowest, *upper = layers
    if sum(piece.size_bytes for pieces in upper for piece in pieces) > HELD_BYTES:
        yield from _merged_in_buckets(layers, keys)
        return
    overlay = Overlay([pa.concat_tables(piece() for piece in pieces) for pieces in upper], keys)
    for piece in lowest:
        yield SizedCall(partial(overlay.untouched, piece), piece.size_bytes)
    yield SizedCall(lambda: overlay.upserts, 0)


_Buckets = Spill[tuple[int, int]]
_Numbered = Iterable[tuple[pa.Table, npt.NDArray[np.int64]]]


def _merged_in_buckets(layers: Sequence[Sequence[_Piece]], keys: Keys) -> Iterator[_Piece]:
    size_bytes = sum(piece.size_bytes for pieces in layers for piece in pieces)
    count = 1 + size_bytes // _BUCKET_BYTES
    # Calls already given out may still read after this has ended: a file exists as long as someone
    # has it open.
    buckets = _spilled(layers, lambda rows: [(rows, buckets_of([rows[name] for name in keys.key_columns], count, 0))])
    for bucket, size_bytes in _sizes(buckets).items():
        if size_bytes <= _LARGE_BUCKET * _BUCKET_BYTES or list(keys.row_key) == list(keys.key_columns):
            yield SizedCall(partial(_bucket_merged, buckets, bucket, len(layers), keys), size_bytes)
            continue
        again = 1 + size_bytes // _BUCKET_BYTES
        stored = [
            (partial(pa.Table.from_batches, [batch]) for batch in buckets.read((bucket, layer)))
            for layer in range(len(layers))
        ]
        finer = _spilled(stored, partial(_by_row_key, keys=keys, count=again))
        for part, part_bytes in _sizes(finer).items():
            yield SizedCall(partial(_bucket_merged, finer, part, len(layers), keys), part_bytes)


def _sizes(buckets: _Buckets) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for (bucket, _), size_bytes in sorted(buckets.sizes.items()):
        sizes[bucket] = sizes.get(bucket, 0) + size_bytes
    return sizes


def _by_row_key(rows: pa.Table, keys: Keys, count: int) -> _Numbered:
    if OP.name in rows.column_names:
        is_clear = pc.equal(rows[OP.name], CLEAR)
        clears, rows = rows.filter(is_clear), rows.filter(pc.invert(is_clear))
        yield from ((clears, np.full(len(clears), bucket, np.int64)) for bucket in range(count))
    yield rows, buckets_of([rows[name] for name in keys.row_key], count, 1)


def _spilled(layers: Iterable[Iterable[Callable[[], pa.Table]]], numbered: Callable[[pa.Table], _Numbered]) -> _Buckets:
    """Return all rows in buckets (number, layer)."""
    buckets: _Buckets = Spill()
    for layer, pieces in enumerate(layers):
        for piece in pieces:
            for rows, numbers in numbered(piece()):
                for number, chosen in split_by_bucket(rows, numbers):
                    buckets.add((number, layer), chosen)
    return buckets


def _bucket_merged(buckets: _Buckets, bucket: int, layer_count: int, keys: Keys) -> pa.Table:
    found = [[*buckets.read((bucket, layer))] for layer in range(layer_count)]
    tables = [pa.Table.from_batches(batches) for batches in found if batches]
    return merge_layers(tables, keys.row_key, keys.key_columns, includes_base=True)
