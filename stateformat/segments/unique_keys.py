"""Row keys as numbers, and the check that each row key occurs once (SPEC.md section 5.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidState
from ..keys import hash_keys, normalize_key_column
from ..model import State
from ..schema import CLEAR, KEY_GROUP, OP
from ..tables import Spill, buckets_of, python_rows, split_by_bucket
from .sort import one_array

_CODES_MAX: Final = 2**62
KEYS_BYTES_MAX: Final = 32 << 20
"""Row keys of one key group that take more are set aside in a file."""
REPEATED_SHOWN: Final = 3
"""How many repeated row keys an error names."""
_BUCKETS: Final = 64
_BUCKET_BYTES_MAX: Final = 8 << 20
"""A bucket is larger only if one key has very many rows, or one key group very many keys."""
# Values of these types are equal exactly if these integers are.
_PLAIN_TYPES: Final = {
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.date32()), pa.int32()),
    **dict.fromkeys((pa.int64(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")), pa.int64()),
}


def row_key_codes(columns: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return a number per row, equal exactly for rows equal in all ``columns``; from 0, no gaps."""
    codes, count, dense = _column_codes(columns[0])
    for column in columns[1:]:
        more, more_count, _ = _column_codes(column)
        codes, count, dense = *_combine(codes, count, more, more_count), False
    return codes if dense else _dense(codes)[0]


def _dense(codes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    encoded = pa.array(codes).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def _combine(codes: Any, count: int, more: Any, more_count: int) -> tuple[npt.NDArray[np.int64], int]:
    if count * more_count > _CODES_MAX:
        # Two counts of distinct values, each at most the row count, have a product that fits again.
        codes, count = _dense(codes)
    return codes * more_count + more, count * more_count


def _column_codes(column: Any) -> tuple[npt.NDArray[np.int64], int, bool]:
    """Return the codes, a number above all of them, and whether they have no gaps."""
    if isinstance(column, pa.ChunkedArray):
        # Arrow does not unify the dictionaries of several chunks if they hold nulls.
        column = one_array(column)
    if pa.types.is_struct(column.type):
        # Flattening hides what is under a null struct; the validity distinguishes it from a struct
        # of nulls.
        codes, count = column.is_valid().cast(pa.int8()).to_numpy(zero_copy_only=False).astype(np.int64), 2
        for child in column.flatten():
            more, more_count, _ = _column_codes(child)
            codes, count = _combine(codes, count, more, more_count)
        return codes, count, False
    encoded = pc.dictionary_encode(normalize_key_column(column), null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), max(1, len(encoded.dictionary)), True


class RowKeyCheck:
    """Raises ``InvalidState`` (DUPLICATE_ROW_KEY) for row keys that occur on several rows.

    It does so once :data:`REPEATED_SHOWN` are known, or at the end. In a delta, clears count
    separately from upserts and deletes.
    """

    def __init__(self, state: State, where: str) -> None:
        self._row_key = list(state.row_key)
        self._where = where
        self._group = -1
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spill: Spill[int] | None = None
        self._repeated: list[tuple[dict[str, Any], int]] = []

    def add(self, rows: pa.Table) -> None:
        """Take the next rows, in segment order, with ``_key_group``."""
        if not len(rows):
            return
        names = [*self._row_key, *([OP.name] if OP.name in rows.column_names else [])]
        groups = one_array(rows[KEY_GROUP.name]).to_numpy()
        keys = rows.select(names)
        first, last = int(groups[0]), int(groups[-1])
        # The group that is held may continue in these rows, and their last group in the next.
        border = int(np.searchsorted(groups, self._group, "right")) if first == self._group else 0
        start = int(np.searchsorted(groups, last))
        if self._group == last:
            self._hold(keys)
            return
        if self._spill is None:
            # Small groups are cheaper to check together.
            self._check([*self._held, keys.slice(0, start)])
        else:
            self._hold(keys.slice(0, border))
            self._check_spilled(self._spill)
            self._check([keys.slice(border, start - border)])
        self._group, self._held, self._held_bytes = last, [], 0
        self._hold(keys.slice(start))

    def finish(self) -> None:
        if self._spill is None:
            self._check(self._held)
        else:
            self._check_spilled(self._spill)
        self._held = []
        if self._repeated:
            raise self._refusal()

    def _hold(self, keys: pa.Table) -> None:
        self._held.append(keys)
        self._held_bytes += keys.nbytes
        if self._held_bytes > KEYS_BYTES_MAX:
            self._spill = self._spill or Spill()
            self._set_aside(self._spill)

    def _set_aside(self, spill: Spill[int]) -> None:
        for keys in self._held:
            for bucket, chosen in split_by_bucket(
                keys, buckets_of([keys[name] for name in self._row_key], _BUCKETS, 0)
            ):
                spill.add(bucket, chosen)
        self._held, self._held_bytes = [], 0

    def _check_spilled(self, spill: Spill[int]) -> None:
        self._set_aside(spill)
        with spill:
            for bucket in range(_BUCKETS):
                self._check_bucket(spill.read(bucket))
        self._spill = None

    def _check_bucket(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Check a bucket. One key on very many rows is found among the first of them."""
        parts: list[pa.Table] = []
        size_bytes = 0
        for batch in batches:
            parts.append(pa.Table.from_batches([batch]))
            size_bytes += batch.nbytes
            if size_bytes - batch.nbytes < _BUCKET_BYTES_MAX <= size_bytes:
                self._check(parts)
                if self._repeated:
                    raise self._refusal(at_least=True)
        self._check(parts)

    def _check(self, parts: list[pa.Table]) -> None:
        rows = pa.concat_tables(parts) if parts else None
        if rows is None or len(rows) < 2:
            return
        columns = [rows[name] for name in self._row_key]
        if OP.name in rows.column_names:
            columns.append(pc.equal(rows[OP.name], CLEAR))
        suspects = _possible_duplicates(columns)
        if suspects is None:
            return
        rows = rows.take(pa.array(suspects))
        codes = row_key_codes([column.take(pa.array(suspects)) for column in columns])
        _, first, counts = np.unique(codes, return_index=True, return_counts=True)
        for found in np.flatnonzero(counts > 1)[: REPEATED_SHOWN - len(self._repeated)].tolist():
            key = python_rows(rows.select(self._row_key).slice(int(first[found]), 1))[0]
            self._repeated.append((key, int(counts[found])))
        if len(self._repeated) == REPEATED_SHOWN:
            raise self._refusal()

    def _refusal(self, *, at_least: bool = False) -> InvalidState:
        (key, count), *more = self._repeated
        others = "".join(f", {other!r} on {times}" for other, times in more)
        found = f"at least {count}" if at_least else f"{count}"
        return InvalidState(
            f"{self._where}: row key {key!r} stands on {found} rows{others}, and may appear only once in "
            "one write; keep the row that counts",
            kind=ErrorKind.DUPLICATE_ROW_KEY,
            row_key=key,
            row_keys=[one for one, _ in self._repeated],
            row_counts=[f"at least {count}" if at_least else str(count) for _, count in self._repeated],
        )


def _possible_duplicates(columns: Sequence[pa.ChunkedArray]) -> npt.NDArray[np.int64] | None:
    """Return rows that include every duplicate; None if there is none."""
    only = columns[0]
    if len(columns) == 1 and only.type in _PLAIN_TYPES and only.null_count == 0:
        numbers = only.cast(_PLAIN_TYPES[only.type]).to_numpy()
    else:
        numbers = hash_keys(columns)
    ordered = np.sort(numbers)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return None
    # A table of 16 bits finds their rows without sorting the row numbers; a few others match too
    # and are also compared.
    marked = np.zeros(1 << 16, np.bool_)
    marked[repeated & 0xFFFF] = True
    suspects: npt.NDArray[np.int64] = np.flatnonzero(marked[numbers & 0xFFFF])
    return suspects
