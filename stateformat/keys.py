"""Which key group a key is in, and which subtask owns it (SPEC.md section 5.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import ErrorKind, InvalidInput
from .graph import Operator

# ---- groups --------------------------------------------------------------------------------------
#
# Key-group arithmetic: the key group of a hash, and its owner, as in Flink (SPEC.md section 5.3).


MAX_PARALLELISM_LIMIT: Final = 32_768
"""The greatest max parallelism, and so the greatest parallelism (SPEC.md section 3.4)."""

_MIN_DEFAULT: Final = 128

Groups = TypeVar("Groups", int, npt.NDArray[Any])


def check_parallelism(parallelism: int, max_parallelism: int, *, operator: str = "") -> None:
    """Raise ``InvalidInput`` unless 1 ≤ parallelism ≤ max parallelism ≤ 32768."""
    of = f" of operator {operator!r}" if operator else ""
    if not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT:
        problem = f"max parallelism {max_parallelism}{of} is not between 1 and {MAX_PARALLELISM_LIMIT}; choose another"
    elif parallelism < 1:
        problem = f"parallelism {parallelism}{of} is below 1; choose 1 to {max_parallelism}, its max parallelism"
    elif parallelism > max_parallelism:
        problem = (
            f"parallelism {parallelism}{of} is above its max parallelism {max_parallelism}; "
            "choose a lower parallelism, or rewrite the state with a higher max parallelism"
        )
    else:
        return
    raise InvalidInput(
        problem,
        kind=ErrorKind.INVALID_PARALLELISM,
        operator=operator,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
    )


def default_max_parallelism(parallelism: int) -> int:
    """Return Flink's default: the least power of two ≥ 1.5 × ``parallelism``, in 128 … 32768."""
    check_parallelism(parallelism, MAX_PARALLELISM_LIMIT)
    power = 1 << (parallelism + parallelism // 2 - 1).bit_length()
    return min(max(power, _MIN_DEFAULT), MAX_PARALLELISM_LIMIT)


def key_group_count(operator: Operator) -> int:
    """Return the operator's number of key groups: its max parallelism, or the default."""
    if operator.max_parallelism is not None:
        return operator.max_parallelism
    return default_max_parallelism(operator.parallelism)


def key_groups(
    hashes: npt.NDArray[Any], max_parallelism: int, *, out: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[np.int32]:
    """Return the key group of each int32 hash: floor-mod by ``max_parallelism``, into ``out``."""
    check_parallelism(1, max_parallelism)
    if hashes.dtype != np.int32:
        raise InvalidInput(f"hashes are {hashes.dtype}; key groups are defined on signed values: give int32")
    if max_parallelism & (max_parallelism - 1) == 0:
        # In two's complement the low bits are the floor-mod, many times cheaper than a division.
        groups: npt.NDArray[np.int32] = np.bitwise_and(hashes, np.int32(max_parallelism - 1), out=out)
    else:
        groups = np.remainder(hashes, np.int32(max_parallelism), out=out)
    return groups


def key_group_range(subtask: int, *, parallelism: int, max_parallelism: int) -> tuple[int, int]:
    """Return the first and last key group of one subtask, both inclusive; at least one group."""
    check_parallelism(parallelism, max_parallelism)
    if not 0 <= subtask < parallelism:
        raise InvalidInput(
            f"there is no subtask {subtask} at parallelism {parallelism}; subtasks are 0 to {parallelism - 1}",
            kind=ErrorKind.INVALID_PARALLELISM,
        )
    first = -(-subtask * max_parallelism // parallelism)
    return first, -(-(subtask + 1) * max_parallelism // parallelism) - 1


def range_bounds(parallelism: int, max_parallelism: int) -> npt.NDArray[np.int64]:
    """Return the first key group of each subtask, then ``max_parallelism``; int64, ascending."""
    check_parallelism(parallelism, max_parallelism)
    return -(-np.arange(parallelism + 1, dtype=np.int64) * max_parallelism // parallelism)


def subtask_of_key_group(group: Groups, *, parallelism: int, max_parallelism: int) -> Groups:
    """Return the owner of a key group: an int, or for an array of groups an int64 array."""
    check_parallelism(parallelism, max_parallelism)
    groups = np.asarray(group, np.int64)
    if groups.size and not (groups.min() >= 0 and groups.max() < max_parallelism):
        raise InvalidInput(
            f"key groups {groups.min()} to {groups.max()} do not all exist at max parallelism {max_parallelism}, which "
            f"has 0 to {max_parallelism - 1}; hash the keys with the max parallelism of their operator",
            kind=ErrorKind.INVALID_PARALLELISM,
        )
    subtasks: npt.NDArray[Any] = groups * parallelism // max_parallelism
    return subtasks if isinstance(group, np.ndarray) else int(subtasks)


# ---- hashing -------------------------------------------------------------------------------------
#
# Key hashes: from key columns to one signed 32-bit value per row (SPEC.md section 5.3).
#
# Theory of operation of the default, Spark SQL's ``hash(c1, c2, ...)`` in numpy. Rows are hashed in
# chunks that fit in the processor's cache; the hash of one column seeds the next. Strings are
# sorted by their number of whole blocks, most first, so the rows that have a block *w* are a
# prefix. Nulls are hashed like values, then masked out: branches cost more. Arrow's data is
# little-endian.


DEFAULT_KEY_HASH: Final = "spark-murmur3-seed42"
"""Spark's Murmur3_x86_32 over the key columns in order, seed 42."""

KeyHash = Callable[[Sequence[Any]], npt.NDArray[np.int32]]
"""From key columns (``pa.ChunkedArray``) to one int32 per row, in any thread; −0.0 equals 0.0."""

_U32 = npt.NDArray[np.uint32]
_Mask = npt.NDArray[np.bool_]

_CHUNK_ROWS: Final = 65_536
# Above this a chunk of strings is halved, so that the copy of its bytes stays small, unless few
# rows would be left.
_CHUNK_BYTES: Final = 16 << 20
# With fewer rows left than this, the ten or so array operations of a step cost more than a scalar
# step for each row.
_SCALAR_ROWS: Final = 32
_SCALAR_BLOCKS: Final = 1 << 16

# How the values of each type are laid out in memory. Floats: as integers of their width, then, as
# such integers, the bits of −0.0, of infinity and of the canonical NaN. Strings and binary: the
# integers of their offsets.
_INTEGERS = {
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.date32(): np.int32,
    pa.int64(): np.int64,
}
_FLOATS: Final = {
    pa.float32(): (np.uint32, *np.array([0x80000000, 0x7F800000, 0x7FC00000], np.uint32)),
    pa.float64(): (np.uint64, *np.array([1 << 63, 0x7FF << 52, 0x7FF8 << 48], np.uint64)),
}
_OFFSETS: Final = {
    pa.string(): np.int32,
    pa.binary(): np.int32,
    pa.large_string(): np.int64,
    pa.large_binary(): np.int64,
}
_PLAIN_TYPES: Final = {pa.bool_(), *_INTEGERS, *_FLOATS, *_OFFSETS}
_SUPPORTED: Final = (
    "bool, int8, int16, int32, int64, date32, timestamp[us] with or without a time zone, float, double, utf8, binary, "
    "decimal128 and structs of these"
)


def check_key_types(fields: Iterable[Any]) -> None:
    """Raise ``InvalidInput`` (UNSUPPORTED_KEY_TYPE) for fields that cannot be keys (SPEC 5.3)."""
    refused = [found for field in fields for found in _unsupported(field.name, field.type)]
    if refused:
        listed = ", ".join(f"{name!r} of type {type_}" for name, type_ in refused)
        raise InvalidInput(
            f"key column {listed} cannot be hashed; cast it to one of the types of key columns: {_SUPPORTED}",
            kind=ErrorKind.UNSUPPORTED_KEY_TYPE,
            columns={name: str(type_) for name, type_ in refused},
        )


def _unsupported(name: str, type_: Any) -> Iterator[tuple[str, Any]]:
    # A struct without fields has nothing to hash and cannot be stored in Parquet, so the struct
    # itself is refused.
    if pa.types.is_struct(type_) and type_.num_fields:
        for field in type_:
            yield from _unsupported(f"{name}.{field.name}", field.type)
        return
    microseconds = pa.types.is_timestamp(type_) and type_.unit == "us"
    if not (microseconds or pa.types.is_decimal128(type_) or type_ in _PLAIN_TYPES):
        yield name, type_


def hash_keys(columns: Sequence[Any], name: str = DEFAULT_KEY_HASH) -> npt.NDArray[np.int32]:
    """Return one int32 per row: the hash of the key columns in order, by the function ``name``.

    Columns may be normalized or not. Raises ``InvalidInput`` for no column, different lengths, an
    unsupported type, an unknown name, or a registered function that returns something else.
    """
    function = key_hash(name)
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise InvalidInput(f"key columns must be at least one and of equal length; their lengths are {lengths}")
    check_key_types(pa.field(str(index), column.type) for index, column in enumerate(columns))
    chunked = [column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column]) for column in columns]
    hashes = function(chunked)
    if not (isinstance(hashes, np.ndarray) and hashes.dtype == np.int32 and hashes.shape == (lengths[0],)):
        found = f"{getattr(hashes, 'dtype', type(hashes).__name__)}, shape {np.shape(hashes)}"
        raise InvalidInput(f"key hash {name!r} must give a numpy int32 array of {lengths[0]} rows; it gave {found}")
    return hashes


def register_key_hash(name: str, function: KeyHash) -> None:
    """Register a key hash under a name, permanently.

    ``function`` takes the key columns, ``pa.ChunkedArray`` of equal length, and returns a numpy
    int32 array with one hash per row. Raises ``InvalidInput`` for an empty name, and for a name
    that belongs to another function.
    """
    if not name or _registry.setdefault(name, function) is not function:
        raise InvalidInput(f"key hash name {name!r} is empty or belongs to another function; choose another name")


def key_hash(name: str) -> KeyHash:
    """Return the function named ``name``. Raises ``InvalidInput`` (UNKNOWN_KEY_HASH) if none is."""
    if name not in _registry:
        _register_installed(name)
    try:
        return _registry[name]
    except KeyError:
        raise InvalidInput(
            f"unknown key hash {name!r}; known are {', '.join(sorted(_registry))}; "
            "register the function with stateformat.keys.register_key_hash before the checkpoint is used",
            kind=ErrorKind.UNKNOWN_KEY_HASH,
        ) from None


def _register_installed(name: str) -> None:
    """Register what an installed package provides by entry points ``stateformat.key_hashes``."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="stateformat.key_hashes", name=name):
        register_key_hash(name, entry.load())


def normalize_key_column(array: Any) -> Any:
    """Give equal keys equal bits, in structs too: −0.0 becomes 0.0, every NaN the same.

    Returns the same object if nothing changes, and copies only the chunks that change.
    """
    if isinstance(array, pa.ChunkedArray):
        parts = array.chunks
    elif pa.types.is_struct(array.type):
        parts = [array.field(index) for index in range(array.type.num_fields)]
    else:
        return _normalize_floats(array) if len(array) and array.type in _FLOATS else array
    normal = [normalize_key_column(part) for part in parts]
    if all(new is old for new, old in zip(normal, parts, strict=True)):
        return array
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array(normal, type=array.type)
    # Built from buffers because the usual constructor refuses nulls that a null struct hides in a
    # field that is not nullable.
    return pa.Array.from_buffers(array.type, len(array), [_bitmap(_validity(array))], children=normal)


def _normalize_floats(array: Any) -> Any:
    old = _values(array, _FLOATS[array.type][0])
    new = None
    for start in range(0, len(old), _CHUNK_ROWS):
        window = slice(start, start + _CHUNK_ROWS)
        normal = _normal_bits(old[window], array.type)
        if not np.array_equal(normal, old[window]):
            new = old.copy() if new is None else new
            new[window] = normal
    if new is None:
        return array
    return pa.Array.from_buffers(array.type, len(array), [_bitmap(_validity(array)), pa.py_buffer(new)])


def _normal_bits(bits: npt.NDArray[Any], type_: Any) -> npt.NDArray[Any]:
    _, sign, infinity, nan = _FLOATS[type_]
    normal = bits.copy()
    magnitude = bits & ~sign
    normal[magnitude == 0] = 0
    normal[magnitude > infinity] = nan
    return normal


def _values(array: Any, dtype: Any) -> npt.NDArray[Any]:
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * np.dtype(dtype).itemsize)


def _bits(bitmap: Any, offset: int, length: int) -> _Mask:
    packed = np.frombuffer(bitmap, np.uint8)[offset >> 3 : (offset + length + 7) >> 3]
    return np.unpackbits(packed, bitorder="little")[offset & 7 :][:length].view(np.bool_)


def _bitmap(bits: _Mask | None) -> Any:
    return None if bits is None else pa.py_buffer(np.packbits(bits, bitorder="little"))


def _validity(array: Any, parent: _Mask | None = None) -> _Mask | None:
    """Return True where neither ``array`` nor a struct around it is null; None if nothing is."""
    if not array.null_count:
        return parent
    own = _bits(array.buffers()[0], array.offset, len(array))
    return own if parent is None else own & parent


def _spark_murmur3(columns: Sequence[Any]) -> npt.NDArray[np.int32]:
    table = pa.Table.from_arrays(list(columns), names=[str(index) for index in range(len(columns))])
    # Streams often leave columns in many tiny chunks, each of which would cost a round of calls.
    if max(column.num_chunks for column in columns) > 1 + len(table) // 4096:
        table = table.combine_chunks()
    hashes = np.full(len(table), 42, np.uint32)
    scratch = np.empty((2, min(len(table), _CHUNK_ROWS)), np.uint32)
    row = 0
    for batch in table.to_batches(max_chunksize=_CHUNK_ROWS):
        for column in batch.columns if len(batch) else ():
            _mix_column(column, None, hashes[row : row + len(batch)], scratch)
        row += len(batch)
    return hashes.view(np.int32)


_registry: Final[dict[str, KeyHash]] = {DEFAULT_KEY_HASH: _spark_murmur3}


def _mix_column(array: Any, parent: _Mask | None, h: _U32, scratch: _U32) -> None:
    """Mix the values of ``array`` into ``h``, the running hashes, where no struct is null.

    ``scratch``, here and below, is two rows as long as the chunk.
    """
    valid = _validity(array, parent)
    if pa.types.is_struct(array.type):
        for index in range(array.type.num_fields):
            _mix_column(array.field(index), valid, h, scratch)
    elif valid is None:
        _mix_values(array, h, scratch)
    else:
        mixed = h.copy()
        _mix_values(array, mixed, scratch)
        _replace(h, mixed, valid)


def _mix_values(array: Any, h: _U32, scratch: _U32) -> None:
    """Mix the values of an array that is not a struct into ``h``, and nulls like values."""
    type_ = array.type
    if type_ in _OFFSETS:
        _, offset_buffer, data = array.buffers()
        width = np.dtype(_OFFSETS[type_]).itemsize
        offsets = np.frombuffer(offset_buffer, _OFFSETS[type_], len(array) + 1, array.offset * width).astype(np.int64)
        _mix_spans(np.frombuffer(data or b"", np.uint8), offsets[:-1], np.diff(offsets), h, scratch)
    elif pa.types.is_decimal128(type_):
        limbs = _values(array, np.dtype((np.uint64, 2)))
        if type_.precision > 18:
            _mix_spans(*_shortest_bytes(limbs), h, scratch)
        else:
            _mix_fixed(limbs[:, 0].copy(), h, scratch)
    elif type_ in _FLOATS:
        _mix_fixed(_normal_bits(_values(array, _FLOATS[type_][0]), type_), h, scratch)
    elif pa.types.is_boolean(type_):
        _mix_fixed(_bits(array.buffers()[1], array.offset, len(array)), h, scratch)
    else:
        _mix_fixed(_values(array, _INTEGERS.get(type_, np.int64)), h, scratch)


def _mix_fixed(values: npt.NDArray[Any], h: _U32, scratch: _U32) -> None:
    """Hash 64-bit values as two blocks, low one first; shorter ones, sign-extended, as one."""
    k, t = scratch[:, : len(h)]
    blocks = values.view(np.uint32).reshape(-1, 2).T if values.itemsize == 8 else (values,)
    for block in blocks:
        np.copyto(k, block, casting="unsafe")
        _mix(h, k, t)
    _finish(h, 4 * len(blocks), t)


def _shortest_bytes(limbs: npt.NDArray[np.uint64]) -> tuple[Any, Any, Any]:
    """Convert 128-bit integers, low half first, as Java's ``BigInteger.toByteArray()`` does.

    The bytes are big-endian.
    """
    low, high = limbs[:, 0], limbs[:, 1]
    sign = (high.view(np.int64) >> 63).view(np.uint64)
    # Apart from its sign, a value of k bytes is below 2**(8k - 1), so it takes one byte, and one
    # more for each limit that it reaches.
    limits = np.left_shift(np.uint64(1), np.arange(7, 64, 8, dtype=np.uint64))
    above = np.searchsorted(limits, high ^ sign, "right")
    lengths = 1 + np.where(high == sign, np.searchsorted(limits, low ^ sign, "right"), 8 + above)
    big_endian = np.ascontiguousarray(limbs.view(np.uint8)[:, ::-1]).reshape(-1)
    return big_endian, np.arange(16, 16 * len(lengths) + 1, 16) - lengths, lengths


def _mix_spans(data: npt.NDArray[np.uint8], starts: Any, lengths: Any, h: _U32, scratch: _U32) -> None:
    """Hash byte strings ``data[starts[i] : starts[i] + lengths[i]]``; starts ascend."""
    first, stop = int(starts[0]), int(starts[-1] + lengths[-1])
    if stop - first > _CHUNK_BYTES and len(h) > 4 * _SCALAR_ROWS:
        middle = len(h) // 2
        _mix_spans(data, starts[:middle], lengths[:middle], h[:middle], scratch)
        _mix_spans(data, starts[middle:], lengths[middle:], h[middle:], scratch)
        return
    # The word at every byte, in a copy with room for the word at the end of the last row.
    room = np.zeros(stop - first + 4, np.uint8)
    room[:-4] = data[first:stop]
    words = np.ndarray(len(room) - 3, np.uint32, room, strides=(1,))
    starts = starts - first
    _mix_blocks(words, starts, lengths >> 2, h, scratch)
    _mix_tails(words[starts + (lengths & ~3)], lengths & 3, h, scratch)
    _finish(h, lengths.astype(np.uint32), scratch[1, : len(h)])


def _mix_blocks(words: _U32, starts: Any, blocks: Any, h: _U32, scratch: _U32) -> None:
    """Mix the first ``blocks[i]`` whole blocks of each row, from ``starts[i]``, into ``h``."""
    most = int(blocks.max())
    missing = most - blocks
    # numpy sorts integers of up to 16 bits by radix, in a tenth of the time.
    order = np.argsort(missing.astype(np.uint16) if most < 1 << 16 else missing, kind="stable")
    missing, starts, running = missing[order], starts[order], h[order]
    rows = len(h)
    for block in range(most):
        rows = int(np.searchsorted(missing[:rows], most - block))
        if rows < _SCALAR_ROWS:
            _mix_few(words, starts[:rows], most - block - missing[:rows], running)
            break
        _mix(running[:rows], words[starts[:rows]], scratch[0, :rows])
        starts[:rows] += 4
    h[order] = running


def _mix_few(words: _U32, starts: Any, counts: Any, h: _U32) -> None:
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        value = int(h[row])
        for begin in range(0, count, _SCALAR_BLOCKS):
            k = words[start + 4 * begin : start + 4 * min(count, begin + _SCALAR_BLOCKS) : 4].copy()
            _scramble(k, np.empty_like(k))
            for block in k.tolist():
                value ^= block
                value = (((value << 13) & 0xFFFFFFFF | value >> 19) * 5 + 0xE6546B64) & 0xFFFFFFFF
        h[row] = value


def _mix_tails(words: _U32, tails: Any, h: _U32, scratch: _U32) -> None:
    """Mix the first ``tails[i]`` bytes of ``words[i]`` (0 to 3) into ``h``, each as a block."""
    k, t = scratch[:, : len(h)]
    for number in range(int(tails.max())):
        # Shift left to the top, then right as a signed number: the byte, sign-extended.
        np.left_shift(words, 24 - 8 * number, out=k)
        np.right_shift(k.view(np.int32), 24, out=k.view(np.int32))
        mixed = h.copy()
        _mix(mixed, k, t)
        _replace(h, mixed, tails > number)


def _replace(old: _U32, new: _U32, where: _Mask) -> None:
    """``old[where] = new[where]`` without branches; overwrites ``new``."""
    mask = where.astype(np.uint32)
    np.negative(mask, out=mask)
    np.bitwise_xor(new, old, out=new)
    np.bitwise_and(new, mask, out=new)
    np.bitwise_xor(old, new, out=old)


def _scramble(k: _U32, t: _U32) -> None:
    np.multiply(k, np.uint32(0xCC9E2D51), out=k)
    np.right_shift(k, 17, out=t)
    np.left_shift(k, 15, out=k)
    np.bitwise_or(k, t, out=k)
    np.multiply(k, np.uint32(0x1B873593), out=k)


def _mix(h: _U32, k: _U32, t: _U32) -> None:
    """Mix one block ``k`` per row into ``h``, in place; overwrites ``k``."""
    _scramble(k, t)
    np.bitwise_xor(h, k, out=h)
    np.right_shift(h, 19, out=t)
    np.left_shift(h, 13, out=h)
    np.bitwise_or(h, t, out=h)
    np.multiply(h, 5, out=h)
    np.add(h, np.uint32(0xE6546B64), out=h)


def _finish(h: _U32, length_bytes: Any, t: _U32) -> None:
    """Mix the lengths of the values into ``h`` and avalanche, in place."""
    np.bitwise_xor(h, length_bytes, out=h)
    for shift, factor in ((16, np.uint32(0x85EBCA6B)), (13, np.uint32(0xC2B2AE35))):
        np.right_shift(h, shift, out=t)
        np.bitwise_xor(h, t, out=h)
        np.multiply(h, factor, out=h)
    np.right_shift(h, 16, out=t)
    np.bitwise_xor(h, t, out=h)


def mixed_hashes(hashes: npt.NDArray[np.int32], level: int = 0) -> npt.NDArray[np.uint32]:
    """Return the hashes with all bits mixed, by ``level``.

    Hashes of one key group share a remainder.
    """
    found: npt.NDArray[np.uint32] = hashes.view(np.uint32) ^ np.uint32(0x9E3779B9 * (level + 1) & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found ^= found >> np.uint32(shift)
        found *= np.uint32(factor)
    found ^= found >> np.uint32(16)
    return found
