"""How much of another system's files is taken into memory: one set of limits for all formats.

SPEC.md 7.4 has the limits of our own files. Whoever made a foreign folder may be hostile too, with
checksums that are right. So what bytes declare is compared with these limits before memory is taken
for it, and a refusal names the limit, what was asked for, and where.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from stateformat.errors import ErrorKind, UnsupportedFormat
from stateformat.storage import Storage

FILE_BYTES: Final = 1 << 36
"""Of a file, or a range of one, that is read at once; also what it is decompressed to.

``docs/foreign.md`` repeats these numbers.
"""
STATE_BYTES: Final = (1 << 53) - 1
"""Of all files of a checkpoint, by what is said of them: the largest number of a record."""
METADATA_BYTES: Final = 1 << 30
"""Of Flink's ``_metadata``."""
SMALL_BYTES: Final = 1 << 26
"""Of a log, a schema, a list of table files, and the header of a stream."""
DECODED_FLOOR, DECODED_RATIO = 1 << 28, 2048
"""Bytes are decompressed to at most so many, or so many times their size where that is more."""
META_FLOOR: Final = 1 << 24
"""Instead of ``DECODED_FLOOR`` for the index and the properties of a table file."""
ENTRIES, SUBTASKS = 1 << 21, 1 << 19
"""Streams of one checkpoint, and states of all subtasks; and subtasks of all operators."""
ZIP_ENTRIES: Final = 10_000
NODES: Final = 1 << 16
"""Columns and fields, at all depths, that one schema file declares."""
KRYO_FLOOR, KRYO_RATIO = 1 << 20, 64
"""Bytes that the references within one value of Kryo's may repeat, or so many times its size."""
SHARED_NODES: Final = 1 << 13
"""The same for the types of one header of Flink's, or as many as it has bytes if it has more."""


def too_large(path: str, what: str, count: int, limit: int, unit: str = "bytes") -> UnsupportedFormat:
    """Return the refusal of ``what``, which takes ``count``; at most ``limit`` are taken."""
    by_memory = unit == "bytes" and limit == memory_bytes()
    return UnsupportedFormat(
        f"{path}: {what} would take {count:,} {unit}, and at most {limit:,} are read; if that is what the engine "
        f"wrote, {'use a machine with more memory' if by_memory else 'read it with the engine'}, or take another "
        "checkpoint or savepoint",
        kind=ErrorKind.LIMIT_EXCEEDED,
        path=path,
        limit=limit,
    )


def check(path: str, what: str, count: int, limit: int, unit: str = "bytes") -> None:
    """Raise :func:`too_large` above the limit or, in bytes, above this machine's memory."""
    if unit == "bytes":
        limit = min(limit, memory_bytes())
    if count > limit:
        raise too_large(path, what, count, limit, unit)


def read_whole(folder: Storage, path: str, limit: int = FILE_BYTES, size: int | None = None) -> Any:
    """Return a file's bytes. ``size`` is what a listing says of it, if it is known.

    Raises ``FileNotFoundError``, and ``UnsupportedFormat`` for one that is too large.
    """
    check(path, "the file", folder.size(path) if size is None else size, limit)
    return folder.read(path)


class Decoded:
    """What bytes of one or of several files may be decompressed to, together."""

    def __init__(self, stored: int, floor: int | None = None) -> None:
        floor = DECODED_FLOOR if floor is None else floor
        self.limit = min(FILE_BYTES, max(floor, DECODED_RATIO * stored))
        self.taken = 0

    def take(self, path: str, size: int) -> None:
        """Count ``size`` bytes more. Raises ``UnsupportedFormat`` if that is too many."""
        self.taken += size
        check(path, "what it holds, decompressed,", self.taken, self.limit)


class Nodes:
    """How many columns and fields types may have together, at all depths.

    A description may name one type many times, level upon level: a few bytes describe 2 ** 30
    columns. So they are counted as often as they are there.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    def take(self, count: int = 1) -> bool:
        """Count more of them, and return whether they are within the limit."""
        self.taken += count
        return self.taken <= self.limit


@cache
def memory_bytes() -> int:
    """Return this machine's memory, or its container's if that is less."""
    found = [FILE_BYTES]
    with suppress(AttributeError, ValueError, OSError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(ValueError, OSError):
            found.append(int(Path(name).read_text("ascii")))
    return min(size for size in found if size > 0)


@contextmanager
def memory_named(where: str) -> Iterator[None]:
    """Raise ``UnsupportedFormat`` instead of ``MemoryError``; ``where`` is the folder or file."""
    try:
        yield
    except MemoryError as error:
        raise UnsupportedFormat(
            f"{where}: there is not enough memory to read it ({str(error) or 'an allocation failed'}); use a machine "
            "with more, or read fewer states and key groups at once",
            kind=ErrorKind.LIMIT_EXCEEDED,
            path=where,
        ) from error
