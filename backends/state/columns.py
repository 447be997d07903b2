"""Columns of running state: how rows are kept in memory, and how they become Arrow again.

Theory of operation. A column of any type of SPEC.md section 3.7 is one or more *buffers*,
addressed by slot, the number of a row:

=================  ==========================================================================
``ValidityBuffer`` a bool per slot; takes no memory until the first null comes
``FixedBuffer``    values of a fixed width in a numpy array, overwritten in place
``BytesBuffer``    strings and binary: appended to one array of bytes, and pointed at
``NestedBuffer``   lists and maps: Arrow arrays, appended and pointed at
=================  ==========================================================================

A struct is its validity and the buffers of its fields. The *raw* form of a batch of rows has one
item for each buffer: a numpy array, None for "all valid", or an Arrow array. Values under a null
are zero or empty, so two values are equal exactly when their raw forms are. Keys are compared in
this form, after ``normalize_key_column`` has given equal floats equal bits (SPEC.md section 5.3).

Capacity doubles. Appended values that no slot refers to any more are dropped once they are more
than half. An array of slots may have −1, *no row*: it gets some value, and validity False.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.tables import TAKEN_BYTES, take_rows, take_table

Slots: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Raw: TypeAlias = Any
"""What one buffer holds of a batch: a numpy array, None (all valid), or an Arrow array."""
RawArray: TypeAlias = Any
"""An array that is saved in its memory layout: of numpy, or a nested one of Arrow."""

_DTYPES: Final = {
    pa.bool_(): np.bool_,
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.date32(): np.int32,
    pa.int64(): np.int64,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
}
_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BYTES: Final = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
_LARGE: Final = pa.large_binary()
_SQUEEZE_ROWS_MIN: Final = 1024
_ARRAYS_MAX: Final = 8
"""If there are more arrays of nested values, they are concatenated, since each costs a gather."""


def dtype_of(kind: pa.DataType) -> Any:
    """Return the numpy type of a fixed-width Arrow type, else None. Decimals are handled as complex
    numbers.
    """
    if pa.types.is_decimal128(kind):
        return np.complex128
    return np.int64 if pa.types.is_timestamp(kind) else _DTYPES.get(kind)


def grown(old: npt.NDArray[Any], capacity: int, used: int) -> npt.NDArray[Any]:
    """Return the first ``used`` values in an array with room for ``capacity``, padded with
    zeros.
    """
    new = np.zeros(capacity, old.dtype)
    new[:used] = old[:used]
    return new


class ColumnBuffer(Protocol):
    """One buffer of a column, addressed by slot."""

    def reserve(self, capacity: int, used: int) -> None:
        """Make room for slots below ``capacity``; those below ``used`` keep their values."""

    def put(self, slots: Slots | slice, raw: Raw) -> None:
        """Set the slots, all different, to the rows of ``raw``."""

    def get(self, slots: Slots | slice) -> Raw:
        """Return the rows of the slots. A slice of fixed-width values is a view until the next
        change.
        """

    def same(self, slots: Slots, raw: Raw) -> Any:
        """Return for each row of ``raw`` whether its slot has the same value; just True if all
        do.
        """

    def keep(self, slots: Slots) -> None:
        """Renumber: slot i gets what was in ``slots[i]``, and everything else is dropped."""

    def export_arrays(self, used: int) -> list[RawArray]:
        """Return the contents of the slots below ``used`` as arrays, the first of them by slot."""

    def import_arrays(self, arrays: list[RawArray]) -> None:
        """Take what :meth:`export_arrays` returned; the length of the first array is the
        capacity.
        """

    @property
    def size_bytes(self) -> int:
        pass


class FixedBuffer:
    """Values of a fixed width."""

    def __init__(self, dtype: Any) -> None:
        self.values: npt.NDArray[Any] = np.zeros(0, dtype)

    def reserve(self, capacity: int, used: int) -> None:
        self.values = grown(self.values, capacity, used)

    def put(self, slots: Slots | slice, raw: Raw) -> None:
        self.values[slots] = raw

    def get(self, slots: Slots | slice) -> Raw:
        return self.values[slots]

    def same(self, slots: Slots, raw: Raw) -> Any:
        return _equal(self.values[slots], raw)

    def keep(self, slots: Slots) -> None:
        self.values[: len(slots)] = self.values[slots]

    def export_arrays(self, used: int) -> list[RawArray]:
        return [self.values[:used]]

    def import_arrays(self, arrays: list[RawArray]) -> None:
        [self.values] = arrays

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes


class ValidityBuffer:
    """Whether a value is not null."""

    def __init__(self) -> None:
        self.values: Mask | None = None
        """None until a value is null."""
        self._capacity = 0

    def reserve(self, capacity: int, used: int) -> None:
        self._capacity = capacity
        if self.values is not None:
            self.values = grown(self.values, capacity, used)

    def put(self, slots: Slots | slice, raw: Raw) -> None:
        if self.values is None:
            if raw is None:
                return
            self.values = np.ones(self._capacity, np.bool_)
        self.values[slots] = True if raw is None else raw

    def get(self, slots: Slots | slice) -> Raw:
        return None if self.values is None else self.values[slots]

    def same(self, slots: Slots, raw: Raw) -> Any:
        if self.values is None:
            return True if raw is None else raw
        return self.values[slots] if raw is None else self.values[slots] == raw

    def keep(self, slots: Slots) -> None:
        if self.values is not None:
            kept = self.values[slots]
            self.values[: len(slots)] = kept
            if kept.all():
                self.values = None

    def export_arrays(self, used: int) -> list[RawArray]:
        return [] if self.values is None else [self.values[:used]]

    def import_arrays(self, arrays: list[RawArray]) -> None:
        [self.values] = arrays
        self._capacity = len(arrays[0])

    @property
    def size_bytes(self) -> int:
        return 0 if self.values is None else self.values.nbytes


class _AppendingBuffer(ABC):
    """Values that are appended, and for each slot the number of its value."""

    def __init__(self) -> None:
        self._where: Slots = np.zeros(0, np.int64)
        self._rows = 0
        """How many values were appended."""
        self._used = 0
        """How many slots were set since the last squeeze: at most so many values are in use."""

    def reserve(self, capacity: int, used: int) -> None:
        self._where = grown(self._where, capacity, used)

    def put(self, slots: Slots | slice, raw: Raw) -> None:
        count = len(raw)
        if not count:
            return
        stop = slots.stop if isinstance(slots, slice) else int(slots.max()) + 1
        # Before the new slots count: they still refer to the first value, which would be copied.
        if self._rows + count > 2 * max(self._used, stop) + _SQUEEZE_ROWS_MIN:
            self._squeeze()
        self._used = max(self._used, stop)
        self._where[slots] = np.arange(self._rows, self._rows + count)
        self._append(raw)

    def keep(self, slots: Slots) -> None:
        self._where[: len(slots)] = self._where[slots]
        self._where[len(slots) :] = 0
        self._used = len(slots)
        self._squeeze()

    @abstractmethod
    def _squeeze(self) -> None:
        """Drop the values that no slot refers to."""

    @abstractmethod
    def _append(self, raw: Raw) -> None:
        pass


class BytesBuffer(_AppendingBuffer):
    """Strings and binary: one array of bytes, and the offsets of the values in it."""

    def __init__(self) -> None:
        super().__init__()
        self._offsets: Slots = np.zeros(1, np.int64)
        self._data: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def _append(self, raw: Raw) -> None:
        _, offset_buffer, data_buffer = raw.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64, len(raw) + 1, 8 * raw.offset)
        first, size = int(offsets[0]), int(offsets[-1] - offsets[0])
        begin, rows = int(self._offsets[self._rows]), self._rows + len(raw)
        if rows >= len(self._offsets):
            self._offsets = grown(self._offsets, 2 * rows + 1, self._rows + 1)
        if begin + size > len(self._data):
            self._data = grown(self._data, 2 * (begin + size), begin)
        if size:
            self._data[begin : begin + size] = np.frombuffer(data_buffer, np.uint8, size, first)
        np.add(offsets[1:], begin - first, out=self._offsets[self._rows + 1 : rows + 1])
        self._rows = rows

    def get(self, slots: Slots | slice) -> Raw:
        where = self._where[slots]
        if not self._rows:
            return pa.repeat(pa.scalar(b"", _LARGE), len(where))
        values = pa.Array.from_buffers(
            _LARGE, self._rows, [None, pa.py_buffer(self._offsets), pa.py_buffer(self._data)]
        )
        return pc.take(values, pa.array(where), boundscheck=False)

    def same(self, slots: Slots, raw: Raw) -> Any:
        return _equal(self.get(slots), raw)

    def _squeeze(self) -> None:
        values = self.get(slice(0, self._used))
        self._offsets, self._data, self._rows = np.zeros(1, np.int64), np.zeros(0, np.uint8), 0
        self._where[: self._used] = np.arange(self._used)
        self._append(values)

    def export_arrays(self, used: int) -> list[RawArray]:
        size = int(self._offsets[self._rows])
        return [self._where[:used], np.array([self._used]), self._offsets[: self._rows + 1], self._data[:size]]

    def import_arrays(self, arrays: list[RawArray]) -> None:
        self._where, [self._used], self._offsets, self._data = arrays
        self._rows = len(self._offsets) - 1

    @property
    def size_bytes(self) -> int:
        return self._where.nbytes + self._offsets.nbytes + self._data.nbytes


class NestedBuffer(_AppendingBuffer):
    """Lists and maps with their own nulls, as Arrow arrays. They cannot be keys (SPEC.md 3.7)."""

    def __init__(self, kind: pa.DataType) -> None:
        super().__init__()
        self._kind = kind
        self._arrays: list[pa.Array] = []

    def _append(self, raw: Raw) -> None:
        self._arrays.append(raw)
        self._rows += len(raw)
        # Neighbors of similar size are concatenated, so a value is copied once for every doubling.
        while (
            len(self._arrays) > _ARRAYS_MAX
            and len(self._arrays[-2]) <= 2 * len(self._arrays[-1])
            and self._arrays[-2].nbytes + self._arrays[-1].nbytes <= TAKEN_BYTES
        ):
            self._arrays[-2:] = [pa.concat_arrays(self._arrays[-2:])]

    def get(self, slots: Slots | slice) -> Raw:
        where = self._where[slots]
        if not self._rows:
            return pa.nulls(len(where), self._kind)
        return take_rows(pa.chunked_array(self._arrays, self._kind), where)

    def same(self, slots: Slots, raw: Raw) -> Any:
        raise AssertionError(f"{self._kind} is compared as a key with {len(raw)} rows at {len(slots)} slots")

    def _squeeze(self) -> None:
        whole = pa.table([pa.chunked_array(self._arrays, self._kind)], ["values"])
        found = take_table(whole, self._where[: self._used])["values"]
        self._arrays = [chunk for chunk in found.chunks if len(chunk)]
        self._rows = self._used
        self._where[: self._used] = np.arange(self._used)

    def export_arrays(self, used: int) -> list[RawArray]:
        return [self._where[:used], np.array([self._used]), *self._arrays]

    def import_arrays(self, arrays: list[RawArray]) -> None:
        self._where, [self._used], *self._arrays = arrays
        self._rows = sum(map(len, self._arrays))

    @property
    def size_bytes(self) -> int:
        return self._where.nbytes + sum(int(array.nbytes) for array in self._arrays)


def make_buffers(kind: pa.DataType) -> list[ColumnBuffer]:
    """Return empty buffers for a column of this type."""
    if pa.types.is_struct(kind):
        return [ValidityBuffer(), *(buffer for field in kind for buffer in make_buffers(field.type))]
    if kind in _BYTES:
        return [ValidityBuffer(), BytesBuffer()]
    dtype = dtype_of(kind)
    return [NestedBuffer(kind)] if dtype is None else [ValidityBuffer(), FixedBuffer(dtype)]


def take_apart(array: pa.Array) -> list[Raw]:
    """Return the raw form of a column, an item for each buffer of :func:`make_buffers`."""
    kind = array.type
    valid = None if not array.null_count else array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_struct(kind):
        # Flattening makes the fields of a null struct null.
        return [valid, *(raw for field in array.flatten() for raw in take_apart(field))]
    if kind in _BYTES:
        filled = array if valid is None else pc.fill_null(array, pa.scalar(b"", kind))
        return [valid, filled.cast(_LARGE)]
    dtype = dtype_of(kind)
    if dtype is None:
        return [array]
    if dtype is np.bool_:
        filled = array if valid is None else array.fill_null(False)
        return [valid, filled.to_numpy(zero_copy_only=False)]
    buffer = array.buffers()[1]
    if not len(array) or buffer is None:
        return [valid, np.zeros(len(array), dtype)]
    values = np.frombuffer(buffer, dtype, len(array), array.offset * np.dtype(dtype).itemsize)
    if valid is not None:
        values = values.copy()
        values[~valid] = 0
    return [valid, values]


def put_together(
    kind: pa.DataType, raws: Iterator[Raw], found: Mask | None = None, hidden: Mask | None = None
) -> pa.Array:
    """Return the column of a raw form; takes as many of ``raws`` as it needs.

    Also null where ``found`` is False. ``hidden``: where the struct around this field is null; the
    field is not null there, since it may be declared so.
    """
    if not (pa.types.is_struct(kind) or kind in _BYTES or dtype_of(kind) is not None):
        array = next(raws)
        return array if found is None else pc.if_else(pa.array(found), array, pa.scalar(None, kind))
    valid = next(raws)
    if found is not None:
        valid = found if valid is None else valid & found
    nothing = hidden if valid is None else ~valid if hidden is None else ~valid | hidden
    if valid is not None and hidden is not None:
        valid = valid | hidden
    bitmap = None if valid is None or valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    if pa.types.is_struct(kind):
        fields = [put_together(field.type, raws, hidden=nothing) for field in kind]
        return pa.Array.from_buffers(kind, len(fields[0]), [bitmap], children=fields)
    raw = next(raws)
    if kind in _BYTES:
        narrow = raw.view(_BYTES[kind]).cast(kind)
        return narrow if bitmap is None else pa.Array.from_buffers(kind, len(raw), [bitmap, *narrow.buffers()[1:]])
    data = np.packbits(raw, bitorder="little") if raw.dtype == np.bool_ else np.ascontiguousarray(raw)
    return pa.Array.from_buffers(kind, len(raw), [bitmap, pa.py_buffer(data)])


def pick(raw: Raw, rows: Slots | slice) -> Raw:
    """Return some rows of a raw form."""
    if raw is None or isinstance(raw, np.ndarray):
        return raw if raw is None else raw[rows]
    if isinstance(rows, slice):
        return raw[rows]
    return pc.take(raw, pa.array(rows), boundscheck=False)


def same_rows(raws: Sequence[Raw], left: Slots, right: Slots) -> Mask:
    """Return whether two rows of one batch are equal, pair by pair."""
    equal = np.ones(len(left), np.bool_)
    for raw in raws:
        if raw is not None:
            equal &= _equal(pick(raw, left), pick(raw, right))
    return equal


def _equal(left: Raw, right: Raw) -> Mask:
    if not isinstance(left, np.ndarray):
        equal: Mask = pc.equal(left, right).to_numpy(zero_copy_only=False)
        return equal
    width = left.dtype.itemsize
    if width == 16:
        pairs: Mask = (left.view(np.uint64).reshape(-1, 2) == right.view(np.uint64).reshape(-1, 2)).all(axis=1)
        return pairs
    bits: Mask = left.view(_WORDS[width]) == right.view(_WORDS[width])
    return bits
