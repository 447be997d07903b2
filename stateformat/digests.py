"""Digests, and the sink that takes them while a segment is written.

The digest of the format is XXH3-128 with seed 0 in its canonical order (SPEC.md section 1): 16 bytes in the manifest. A
:class:`SegmentSink` sees every byte of a segment once, so nothing is read back: it feeds the digest, keeps the footer for
a digest of its own, and holds back what is small enough to stand in the manifest (section 4.4). Only when a segment grows
beyond that an object is begun, so a small state costs no request at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from stateformat.storage import OutputObject


def digest(data: bytes | memoryview | pa.Buffer) -> bytes:
    """The digest of ``data``: 16 bytes."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, slots=True)
class SinkResult:
    """What a finished sink knows: the size in bytes, the digests of SPEC.md section 4.1, the bytes if they are inline."""

    size_bytes: int
    digest: bytes
    footer_bytes: int
    footer_digest: bytes
    inline: bytes | None


class SegmentSink:
    """A write-only file for Parquet writers. Exactly one of :meth:`finish` and :meth:`abort` ends it.

    ``inline_bytes_max``: a segment that stays below it is given back and never becomes an object. ``open_output`` begins
    the object. An error of the storage is kept in :attr:`error`, because the way through the Parquet writer may lose it.
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
        self.error: BaseException | None = None

    @property
    def closed(self) -> bool:
        """False: pyarrow asks. What ends the sink is not the Parquet writer."""
        return False

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; returns how many. After the end they are ignored: a writer that failed may still flush."""
        if self._ended:
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
                    self._spill()
        except BaseException as error:
            self.error = error
            raise
        return len(data)

    def tell(self) -> int:
        """Bytes taken so far."""
        return self._size_bytes

    def flush(self) -> None:
        """Nothing; pyarrow calls it."""

    def close(self) -> None:
        """Nothing; pyarrow calls it. A segment is closed by :meth:`finish`, when all of it is known to be good."""

    def expect_footer(self) -> None:
        """Say that all rows were handed to the writer: what it has not passed on yet, and the footer, are kept too."""
        self._tail = []

    def tail(self) -> pa.Buffer:
        """What was written since :meth:`expect_footer`: it ends in the footer."""
        return pa.py_buffer(b"".join(self._tail or []))

    def finish(self) -> SinkResult:
        """Make the object visible (or keep it inline) and say what was written. The file ends in a Parquet footer."""
        tail = self.tail().to_pybytes()
        footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
        footer = tail[-footer_bytes:]
        inline = None
        if self._output is None:
            inline = b"".join(self._held)
        else:
            self._output.close()
        self._ended = True
        return SinkResult(self._size_bytes, self._digest.digest(), footer_bytes, digest(footer), inline)

    def abort(self) -> None:
        """Forget everything; nothing becomes visible. Does nothing after :meth:`finish`."""
        if not self._ended:
            self._ended = True
            if self._output is not None:
                self._output.abort()

    def _spill(self) -> None:
        self._output = self._open_output()
        for data in self._held:
            self._output.write(data)
        self._held = []
