"""Where the streams of a checkpoint are, and reading parts of them.

A savepoint names its files beside its metadata. A checkpoint names them by full URIs; it may have
been moved since. Files inside the folder are read there; others are looked for in the folder by the
last parts of their paths, and only then, if the user allows it, at their URIs.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.storage import Storage, named_address, named_below

from ..byte_strings import Octets
from ..limits import FILE_BYTES, SMALL_BYTES, check
from ..source import Note
from .metadata import EmptySegment, File, Inline, KeyGroups, Relative, Segment, Stream

Outside: TypeAlias = "Callable[[str], Storage]"
"""Opens the folder at a URL that the metadata names."""

_PARTS_TRIED: Final = 4


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of one stream: in the metadata, or a range of a file."""

    path: str
    """For people: relative to the folder, or a URI."""
    size: int
    data: bytes | None = None
    storage: Storage | None = None
    name: str = ""
    start: int = 0
    whole: bool = True
    """Whether the stream is the whole file, so that the file's size must be ``size``."""

    def read(self, offset: int, length: int, padding: int = 0) -> Octets:
        """Return ``length`` bytes from ``offset`` on, followed by zeros.

        Raises ``DamagedCheckpoint`` for a file that is missing or too short.
        """
        if not 0 <= offset <= self.size - length:
            raise DamagedCheckpoint(
                f"{self.path} has {self.size} bytes by the metadata, and bytes {offset} to {offset + length} are named",
                kind=ErrorKind.DAMAGED_RECORD,
                path=self.path,
            )
        check(self.path, f"bytes {offset:,} to {offset + length:,}", length, FILE_BYTES)
        found: Any
        if self.data is not None:
            found = memoryview(self.data)[offset : offset + length]
        elif self.storage is None or not length:
            found = b""
        else:
            try:
                found = self.storage.read_range(self.name, self.start + offset, length)
            except FileNotFoundError:
                raise missing(self.path) from None
        octets = np.frombuffer(found, np.uint8)
        if len(octets) != length:
            raise DamagedCheckpoint(
                f"{self.path} should have {self.start + self.size} bytes and ends before byte "
                f"{self.start + offset + length}; it was cut, or is another file. Take another checkpoint",
                kind=ErrorKind.OBJECT_SIZE_DIFFERS,
                path=self.path,
            )
        return np.concatenate([octets, np.zeros(padding, np.uint8)]) if padding else octets

    def head(self, length: int) -> bytes:
        """Return the first bytes, which are a header."""
        check(self.path, "its header", length, SMALL_BYTES)
        return self.read(0, length).tobytes()

    def stored_size(self) -> int | None:
        """Return the size of the file; None for a stream in the metadata.

        Raises ``FileNotFoundError``.
        """
        return None if self.storage is None else self.storage.size(self.name)


def missing(path: str) -> DamagedCheckpoint:
    """Return the error for a file that does not exist."""
    return DamagedCheckpoint(
        f"{path} is missing; put it back, or take another checkpoint", kind=ErrorKind.OBJECT_MISSING, path=path
    )


@dataclass
class Places:
    """Finds the streams of one checkpoint. Picklable; lists the folder at most once."""

    folder: Storage
    home: str
    """The folder of the metadata within ``folder``: empty, or ``chk-7/``."""
    outside: Outside | None = None
    elsewhere: dict[str, str] = field(default_factory=dict)
    """By URI: where in the folder it was found."""
    _known: dict[str, int] | None = None
    _opened: dict[str, Storage] = field(default_factory=dict)

    def of(self, stream: Stream | None) -> Place:
        """Return the place of a stream. Nothing is opened.

        Raises ``DamagedCheckpoint`` for a path that leaves the folder, and ``InvalidInput`` for a
        file outside it that the user has not allowed.
        """
        if stream is None or isinstance(stream, EmptySegment):
            return Place("_metadata", 0, b"")
        if isinstance(stream, Inline):
            return Place(f"{self.home}_metadata", len(stream.data), stream.data)
        if isinstance(stream, KeyGroups):
            return self.of(stream.stream)
        if isinstance(stream, Relative):
            name = self.home + stream.path
            if any(part in ("", ".", "..") for part in stream.path.split("/")) or "\0" in name:
                raise DamagedCheckpoint(
                    f"{self.home}_metadata names the file {stream.path!r}, which does not lie beside it",
                    kind=ErrorKind.INVALID_PATH,
                    path=stream.path,
                )
            return Place(name, stream.size, None, self.folder, name)
        start = stream.start if isinstance(stream, Segment) else 0
        return self._uri(stream.uri, start, stream.size, whole=isinstance(stream, File))

    def _uri(self, uri: str, start: int, size: int, *, whole: bool) -> Place:
        name = named_below(uri, self.folder.url)
        if name is None:
            name = self.elsewhere.get(uri) or self._found(uri, start + size, whole=whole)
            if name is not None:
                self.elsewhere[uri] = name
        if name is not None:
            return Place(name, size, None, self.folder, name, start, whole)
        if self.outside is None:
            raise InvalidInput(
                f"{self.home}_metadata names {uri}, which does not lie in {self.folder.url}. Give the folder that has "
                "both, or allow files outside of it (`--allow-outside`), or take a savepoint, which has all it needs",
                kind=ErrorKind.INVALID_PATH,
                path=uri,
            )
        above, _, last = uri.rpartition("/")
        if last in ("", ".", ".."):
            raise DamagedCheckpoint(
                f"{self.home}_metadata names {uri!r}, which is no file", kind=ErrorKind.INVALID_PATH, path=uri
            )
        if above not in self._opened:
            self._opened[above] = self.outside(named_address(above))
        return Place(uri, size, None, self._opened[above], last, start, whole)

    def _found(self, uri: str, size: int, *, whole: bool) -> str | None:
        """Look in the folder for the last parts of a URI, the longest first."""
        names = [part for part in uri.split("/") if part]
        if not names or any(part in (".", "..") for part in names):
            return None
        tried = ["/".join(names[-count:]) for count in range(min(_PARTS_TRIED, len(names)), 0, -1)]
        tried += [self.home + names[-1]]
        for name in dict.fromkeys(tried):
            known = self.known.get(name)
            if known == size or (not whole and known is not None and known >= size):
                return name
        return None

    @property
    def known(self) -> dict[str, int]:
        """Sizes of all files in the folder, by name."""
        if self._known is None:
            self._known = {item.path: item.size_bytes for item in self.folder.list("")}
        return self._known

    def notes(self) -> list[Note]:
        """Return a note for each folder whose files were found elsewhere."""
        moved: dict[tuple[str, str], int] = {}
        for uri, name in self.elsewhere.items():
            where = posixpath.dirname(uri), posixpath.dirname(name)
            moved[where] = moved.get(where, 0) + 1
        return [
            Note(
                "elsewhere",
                new or ".",
                f"{count} files that the metadata names in {old} were found in {new or '.'} of this folder, by their "
                "names and sizes",
            )
            for (old, new), count in sorted(moved.items())
        ]
