"""The digest of the format, XXH3-128 (SPEC.md section 1), and the sink that computes it for a
segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa
import xxhash

from ..storage import OutputObject


def digest(data: bytes | memoryview | pa.Buffer) -> bytes:
    """Return the digest of ``data``: 16 bytes."""
    return xxhash.xxh3_128_digest(data)


class SinkResult(NamedTuple):
    """Size and digests of a finished segment (SPEC.md 4.1), and its bytes if it is inline."""

    size_bytes: int
    digest: bytes
    footer_bytes: int
    footer_digest: bytes
    inline: bytes | None


class SegmentSink:
    """A write-only file for Parquet writers, ended by :meth:`finish` or :meth:`abort`.

    It opens its object once it reaches ``inline_bytes_max``: a smaller segment costs no request.
    """

    def __init__(self, open_output: Callable[[], OutputObject], inline_bytes_max: int) -> None:
        self._open_output = open_output
        self._inline_bytes_max = inline_bytes_max
        self._held: list[bytes] = []
        self._size_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._tail: list[bytes] | None = None
        self._output: OutputObject | None = None
        self._ended = False
        self.muted = False
        """Whether what is written is discarded."""
        self.error: BaseException | None = None
        """An error of the storage: the Parquet writer may lose it."""

    @property
    def closed(self) -> bool:
        return False

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; return how many. Ignored after the end: a failed writer may flush."""
        if self._ended or self.muted:
            return len(data)
        try:
            self._digest.update(data)
            self._size_bytes += len(data)
            if self._tail is not None:
                self._tail.append(bytes(data))
            if self._output is not None:
                self._output.write(data)
            else:
                self._held.append(bytes(data))
                if self._size_bytes >= self._inline_bytes_max:
                    self._begin_object()
        except BaseException as error:
            self.error = error
            raise
        return len(data)

    def tell(self) -> int:
        return self._size_bytes

    def flush(self) -> None:
        """Does nothing; pyarrow calls it."""

    def close(self) -> None:
        """Does nothing; pyarrow calls it before the segment is known to be good."""

    def expect_footer(self) -> None:
        """Keep what is written from now on: buffered pages and the footer."""
        self._tail = []

    def tail(self) -> pa.Buffer:
        """Return what was written since :meth:`expect_footer`."""
        return pa.py_buffer(b"".join(self._tail or []))

    def finish(self) -> SinkResult:
        """Make the object visible, or keep it inline. The bytes must end in a Parquet footer."""
        tail = self.tail().to_pybytes()
        footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
        inline = b"".join(self._held) if self._output is None else None
        if self._output is not None:
            self._output.close()
        self._ended = True
        footer_digest = digest(tail[-footer_bytes:])
        return SinkResult(self._size_bytes, self._digest.digest(), footer_bytes, footer_digest, inline)

    def abort(self) -> None:
        """Discard everything; nothing becomes visible. Does nothing after :meth:`finish`."""
        if not self._ended:
            self._ended = True
            if self._output is not None:
                self._output.abort()

    def _begin_object(self) -> None:
        self._output = self._open_output()
        for data in self._held:
            self._output.write(data)
        self._held = []
