"""Spark's default state store: ``V.snapshot`` and ``V.delta`` files of (key, value) rows.

The state at version V is the greatest snapshot up to V and the deltas after it; the last write of a
key (compared by its bytes) wins. A value of size −1 is a deletion.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind
from stateformat.storage import ObjectInfo, Storage

from ..byte_strings import ByteStrings, Positions
from ..framing import crc32c, damaged, spark_decode, spark_encode
from ..limits import Decoded
from ..source import Level
from .chains import Chain, parse_chains
from .stores import Entries, Listing, Store, read_whole
from .unsafe_row import decode_rows, row_size

FILE: Final = re.compile(r"([1-9]\d{0,17})\.(delta|snapshot)")
"""Names of the store's files; version 0 is the empty state and has none."""


_HASHED_WORDS: Final = 16
_PRIMES: Final = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def versions(files: Sequence[str]) -> dict[int, set[str]]:
    """Return the kinds of files by version."""
    found: dict[int, set[str]] = {}
    for name in files:
        if match := FILE.fullmatch(name):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


def chain_names(files: Sequence[str], version: int, folder: str) -> list[str]:
    """Return the names of the files that make up a version, the oldest first.

    Raises ``DamagedCheckpoint`` (``OBJECT_MISSING``) that names the first missing delta.
    """
    found = versions(files)
    snapshot = max((v for v, kinds in found.items() if v <= version and "snapshot" in kinds), default=0)
    for wanted in range(version, snapshot, -1):
        if "delta" not in found.get(wanted, ()):
            raise damaged(
                f"{folder}/{wanted}.delta",
                "it is missing, and no later snapshot makes it needless",
                kind=ErrorKind.OBJECT_MISSING,
            )
    names = [f"{snapshot}.snapshot"] if snapshot else []
    return names + [f"{wanted}.delta" for wanted in range(snapshot + 1, version + 1)]


def files(store: Store, partition: int, listing: Listing) -> list[ObjectInfo]:
    """Return the files that make up a partition at the version, the oldest first."""
    folder = store.folder(partition)
    found = listing.files(folder)
    return [ObjectInfo(f"{folder}/{name}", found[name]) for name in chain_names(list(found), store.version, folder)]


def entries(folder: Storage, store: Store, partition: int, files: Sequence[ObjectInfo]) -> Entries:  # noqa: ARG001
    """Read a partition whole: its live entries, each key once."""
    if not files:
        nothing = ByteStrings(np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64))
        return Entries(nothing, nothing)
    paths = [item.path for item in files]
    decoded = Decoded(sum(item.size_bytes for item in files))
    contents = [spark_decode(store.codec, read_whole(folder, item), item.path, decoded) for item in files]
    data = contents[0] if len(contents) == 1 else np.concatenate(contents)
    ends = np.cumsum([len(content) for content in contents]).astype(np.int64)
    deletes = np.array([path.endswith(".delta") for path in paths])
    least = (row_size(len(store.schema.key)), row_size(len(store.schema.value)))
    chain = parse_chains(data, ends, deletes, paths, least)
    if store.has_row_checksums:
        chain = _checked(chain, ends, paths)
    if len(files) == 1 and not deletes[0]:
        return Entries(chain.keys, chain.values)
    return _last_writes(chain)


def count(store: Store, entries: Entries) -> int:  # noqa: ARG001
    """Return how many rows the entries decode to: one each."""
    return len(entries.keys)


def columns(store: Store, entries: Entries, path: str) -> list[pa.Array]:
    """Decode entries: the key's columns, then the value's."""
    return [
        *decode_rows(entries.keys, store.schema.key, path),
        *decode_rows(entries.values, store.schema.value, path),
    ]


def problems(
    folder: Storage, store: Store, partition: int, files: Sequence[ObjectInfo], listing: Listing, level: Level
) -> Iterable[CheckpointError]:
    """Return nothing: anything wrong with these files is found when they are read."""
    del folder, store, partition, files, listing, level
    return ()


def encode_file(store: Store, entries: Entries) -> bytes:
    """Return a snapshot of the entries as Spark writes it: rows are copied as bytes, not encoded
    again.
    """
    values = entries.values
    if store.has_row_checksums:
        sums = _row_checksums(entries.keys, values).astype("<u4")
        framed = _join([_fixed(sums.view(np.uint8), 4), values])
        values = framed
    sizes = [some.length.astype(">i4").view(np.uint8) for some in (entries.keys, values)]
    rows = _join([_fixed(sizes[0], 4), entries.keys, _fixed(sizes[1], 4), values])
    return spark_encode(store.codec, np.concatenate([rows.data, np.full(4, 0xFF, np.uint8)]))


def _fixed(data: npt.NDArray[np.uint8], width: int) -> ByteStrings:
    count = len(data) // width
    return ByteStrings(data, np.arange(count, dtype=np.int64) * width, np.full(count, width, np.int64))


def _join(parts: list[ByteStrings]) -> ByteStrings:
    """Join strings row by row: row i is the i-th string of every part, one after another."""
    count = len(parts[0])
    data = np.concatenate([part.data for part in parts])
    offsets = np.cumsum([0] + [len(part.data) for part in parts])
    starts = np.stack([part.start + at for part, at in zip(parts, offsets[:-1], strict=True)], axis=1).reshape(-1)
    lengths = np.stack([part.length for part in parts], axis=1).reshape(-1)
    whole = gather(ByteStrings(data, starts, lengths))
    ends = np.cumsum(lengths.reshape(count, len(parts)).sum(axis=1))
    return ByteStrings(whole, ends - np.diff(ends, prepend=0), np.diff(ends, prepend=0))


def gather(strings: ByteStrings) -> npt.NDArray[np.uint8]:
    """Return the strings' bytes one after another."""
    total = int(strings.length.sum())
    pieces = []
    # Arrow's offsets have 32 bits.
    rounds = np.searchsorted(np.cumsum(strings.length), np.arange(0, total, 1 << 30), "left").tolist()
    bounds = [*dict.fromkeys([0, *rounds]), len(strings)]
    for first, stop in pairwise(bounds):
        some = ByteStrings(strings.data, strings.start[first:stop], strings.length[first:stop]).to_arrow()
        if len(some) and some.buffers()[2] is not None:
            ends = np.frombuffer(some.buffers()[1], np.int32, len(some) + 1, some.offset * 4)
            pieces.append(np.frombuffer(some.buffers()[2], np.uint8)[int(ends[0]) : int(ends[-1])])
    return np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)


def _row_checksums(keys: ByteStrings, values: ByteStrings) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each key and value together."""
    rows = _join([keys, values])
    return crc32c(rows.data, rows.length)


def _checked(chain: Chain, ends: Positions, paths: list[str]) -> Chain:
    """Compare the checksums of entries and remove them (Spark 4.2: ``rowChecksum``).

    A value has four bytes before it, the checksum of key and value; for a deletion the key has
    them.
    """
    keys, values = chain.keys, chain.values
    deleted = values.length < 0
    holder = np.where(deleted, keys.start, values.start)
    short = np.where(deleted, keys.length, values.length) < 4
    if not short.any():
        stored = ByteStrings(keys.data, holder, np.full(len(holder), 4, np.int64)).fixed(0, "<u4")
        keys = ByteStrings(keys.data, keys.start + 4 * deleted, keys.length - 4 * deleted)
        values = ByteStrings(values.data, values.start + 4 * ~deleted, values.length - 4 * ~deleted)
        plain = ByteStrings(values.data, values.start, np.maximum(values.length, 0))
        short = stored != _row_checksums(keys, plain)
    if short.any():
        at = int(holder[np.argmax(short)])
        raise damaged(
            paths[int(np.searchsorted(ends, at, "right"))],
            f"the row {int(np.argmax(short))} of what it and the files before it hold has a checksum of another row",
            offset=at,
        )
    return Chain(keys, values)


def _last_writes(chain: Chain) -> Entries:
    """Keep the last write of each key, unless it deletes."""
    alive = chain.values.length >= 0
    # Few keys are written twice, and a key whose hash no other has was not.
    again = np.flatnonzero(_shared_hash(chain.keys))
    codes = key_codes(chain.keys.take(again))
    last = np.zeros(int(codes.max()) + 1 if len(again) else 0, np.int64)
    # For repeated indexes numpy keeps the last value.
    last[codes] = np.arange(len(again))
    alive[again] &= last[codes] == np.arange(len(again))
    kept = np.flatnonzero(alive)
    return Entries(chain.keys.take(kept), chain.values.take(kept))


def key_codes(keys: ByteStrings) -> npt.NDArray[np.int64]:
    """Return one number per key, equal exactly if the bytes are equal."""
    if not len(keys):
        return np.zeros(0, np.int64)
    binary = keys.to_arrow()
    return np.asarray(binary.dictionary_encode().indices, np.int64)


def _shared_hash(keys: ByteStrings) -> npt.NDArray[np.bool_]:
    """Return the keys whose hash another key has: all that are written twice, and few more."""
    found = np.zeros(len(keys), np.bool_)
    if len(keys) < 2:
        return found
    mixed = keys.length.astype(np.uint64) * _PRIMES[0]
    words = keys.length >> 3
    view: npt.NDArray[np.uint64] = np.ndarray(max(0, len(keys.data) - 7), "<u8", keys.data, 0, (1,))
    # The first words, and the last: the bytes between are left to the exact comparison.
    for word in range(min(int(words.max()), _HASHED_WORDS)):
        places = keys.start + 8 * word
        short = words <= word
        some = short.any()
        found_word = np.where(short, np.uint64(0), view[np.where(short, 0, places)]) if some else view[places]
        if not some and word + 1 < int(words.max()) and not found_word.any():
            # The null bits of most keys.
            continue
        mixed ^= found_word
        mixed *= _PRIMES[1]
        mixed ^= mixed >> np.uint64(29)
    if int(words.max()) > _HASHED_WORDS or np.any(keys.length & 7):
        long = keys.length >= 8
        places = np.where(long, keys.start + keys.length - 8, 0)
        mixed = (mixed ^ np.where(long, view[places] if len(view) else np.uint64(0), np.uint64(0))) * _PRIMES[2]
        mixed ^= mixed >> np.uint64(31)
    order = np.argsort(mixed)
    same = mixed[order[1:]] == mixed[order[:-1]]
    found[order[1:][same]] = True
    found[order[:-1][same]] = True
    return found
