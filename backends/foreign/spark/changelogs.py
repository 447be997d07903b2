"""Changelogs of Spark's RocksDB store: the changes of one version, one after another.

Version 1 is a chain like the default store's deltas. Version 2 begins with the text ``v2``, and
each change with a byte for its kind; it ends with the byte 0. Versions 3 and 4 are 1 and 2 with a
*lineage* before the changes: which files the version is based on (checkpoint format 2).
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..byte_strings import ByteStrings, Octets
from ..framing import damaged, json_value, modified_utf8
from .chains import parse_chains

DELETE, PUT, MERGE, DELETE_RANGE = 0x10, 0x01, 0x11, 0x20
_KINDS: Final = (DELETE, PUT, MERGE, DELETE_RANGE)
_VERSION: Final = re.compile(r"v(\d{1,4})")
_END: Final = np.full(4, 0xFF, np.uint8)


class Changes(NamedTuple):
    """The changes of one version of a partition, in their order."""

    path: str
    version: int
    """Of the file's format."""
    lineage: tuple[tuple[int, str], ...]
    """The versions before it, back to the newest zip, with their ids."""
    kind: npt.NDArray[np.uint8]
    """``DELETE``, ``PUT``, ``MERGE`` or ``DELETE_RANGE``."""
    key: ByteStrings
    value: ByteStrings
    """Empty for deletes; for a deleted range of keys its end, which is not deleted."""


def read_changes(data: Octets, path: str) -> Changes:
    """Parse one changelog, decompressed. Raises ``DamagedCheckpoint``, ``UnsupportedFormat``."""
    version, at = _version(data)
    if not 1 <= version <= 4:
        raise UnsupportedFormat(
            f"{path}: the changelog is of version {version}; 1 to 4 are known. Use a newer stateformat",
            kind=ErrorKind.UNSUPPORTED_VERSION,
            path=path,
            version=version,
        )
    lineage: tuple[tuple[int, str], ...] = ()
    if version >= 3:
        size = int.from_bytes(data[at : at + 2].tobytes(), "big")
        if at + 2 + size > len(data):
            raise damaged(path, f"its lineage has {size} bytes, {len(data) - at - 2} are left")
        lineage = _lineage(modified_utf8(data[at + 2 : at + 2 + size], path), path)
        at += 2 + size
    if version in (1, 3):
        ends = np.array([len(data) - at], np.int64)
        chain = parse_chains(data[at:], ends, np.array([True]), [path])
        kind = np.where(chain.values.length < 0, DELETE, PUT).astype(np.uint8)
    else:
        if len(data) == at:
            raise damaged(path, "it holds no end mark")
        # The byte before an entry counts as following the previous one; an end mark is added to the
        # chain.
        body = np.concatenate([data[at + 1 :], _END])
        chain = parse_chains(body, np.array([len(body)]), np.array([True]), [path], gap=1)
        kinds = np.append(data[at : at + 1], body[chain.values.start + np.maximum(chain.values.length, 0)])
        kind = kinds[:-1]
        if kinds[-1] != 0:
            raise damaged(path, f"byte {int(kinds[-1]):#x} stands where 0 ends it")
        known = np.isin(kind, _KINDS)
        if not known.all():
            raise damaged(path, f"a change is of the unknown type {int(kind[np.argmin(known)]):#x}")
        if ((kind == DELETE) != (chain.values.length < 0)).any():
            raise damaged(path, "a change has a value and deletes, or has none and does not")
    values = chain.values
    plain = ByteStrings(values.data, values.start, np.maximum(values.length, 0))
    return Changes(path, version, lineage, kind, chain.keys, plain)


def _version(data: Octets) -> tuple[int, int]:
    """Return the version and where the rest begins. Version 1 has no mark; Spark reads it the same
    way.
    """
    size = int.from_bytes(data[:2].tobytes(), "big")
    text = data[2 : 2 + size].tobytes()
    found = _VERSION.fullmatch(text.decode("ascii", "replace")) if size <= 8 else None
    return (int(found[1]), 2 + size) if found else (1, 0)


def _lineage(text: str, path: str) -> tuple[tuple[int, str], ...]:
    try:
        return tuple((int(item["version"]), str(item["checkpointUniqueId"])) for item in json_value(text))
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(path, f"its lineage cannot be read ({text[:60]!r})") from error
