"""Python batches as an Arrow C stream whose error messages are stateformat's own.

Theory of operation. pyarrow exports an iterator of batches, and owns all memory. But it appends a
stack trace to its messages, which every tool shows. So one of the four functions of the exported
structure (``ArrowArrayStream``) is replaced: the one that returns the last error.

It is one C function for all streams, made by ctypes. A consumer may move the structure anywhere,
but ``private_data`` stays the same pointer, and ``_FAILURES`` keeps by it the error of this
stream's iterator. For all other errors pyarrow's function answers. The entry is removed with the
iterator, which pyarrow drops when the consumer releases the stream; that also ends the threads of
an iterator that was not read to its end.

ctypes takes the interpreter's lock, so a consumer may call from any thread. The function is never
freed: a consumer may call it while the interpreter shuts down.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa

from ..errors import CheckpointError, InvalidInput

logger = logging.getLogger(__name__)


class _CStream(ctypes.Structure):
    """``ArrowArrayStream``: four functions and a pointer that belongs to the producer."""

    _fields_ = (
        ("get_schema", ctypes.c_void_p),
        ("get_next", ctypes.c_void_p),
        ("get_last_error", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    )


class _Failure:
    """What a stream failed with, as C text; None while it has not."""

    def __init__(self) -> None:
        self.text: Any = None

    def keep(self, error: BaseException) -> None:
        logger.debug("a scan of rows failed", exc_info=error)
        sentence = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        self.text = ctypes.create_string_buffer(sentence.replace("\0", " ").encode("utf-8", "backslashreplace"))


_FAILURES: Final[dict[int, _Failure]] = {}
"""The failures of streams that are not yet released, by their ``private_data``."""


class _Batches:
    """The iterator that pyarrow exports. It begins when the first batch is requested."""

    def __init__(self, schema: pa.Schema, begin: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self._schema = schema
        self._begin = begin
        self._batches: Iterator[pa.RecordBatch] | None = None
        self.failure = _Failure()
        self.key = 0

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            if self.failure.text is not None:
                raise InvalidInput(self.failure.text.value.decode())
            if self._batches is None:
                self._batches = self._begin()
            batch = next(self._batches, None)
            if batch is not None and not batch.schema.equals(self._schema):
                raise TypeError(f"a batch has the columns {batch.schema}, its stream {self._schema}")
        except BaseException as error:
            self.failure.keep(error)
            raise
        if batch is None:
            raise StopIteration
        return batch

    def __del__(self) -> None:
        if _FAILURES.get(self.key) is self.failure:
            del _FAILURES[self.key]


def export_stream(
    schema: pa.Schema, begin: Callable[[], Iterator[pa.RecordBatch]], requested_schema: object | None = None
) -> object:
    """Return a PyCapsule of a stream of batches that all have this schema.

    ``begin`` is called once, when the consumer asks for the first batch. A ``requested_schema``,
    the capsule of one, makes pyarrow cast the batches.
    """
    batches = _Batches(schema, begin)
    capsule = pa.RecordBatchReader.from_batches(schema, batches).__arrow_c_stream__(requested_schema)
    stream = _CStream.from_address(_pointer_of(capsule, b"arrow_array_stream"))
    batches.key = stream.private_data
    _FAILURES[batches.key] = batches.failure
    global _pyarrows_last_error
    if _pyarrows_last_error is None:
        _pyarrows_last_error = _LastError(stream.get_last_error)
    stream.get_last_error = ctypes.cast(_OURS, ctypes.c_void_p).value
    return capsule


def open_streams() -> int:
    """Return how many exported streams nobody has released yet."""
    return len(_FAILURES)


def _last_error(address: int) -> int | None:
    failure = _FAILURES.get(_CStream.from_address(address).private_data)
    if failure is not None and failure.text is not None:
        return ctypes.addressof(failure.text)
    found: int | None = _pyarrows_last_error(address) if _pyarrows_last_error is not None else None
    return found


_LastError: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_OURS: Final = _LastError(_last_error)
_pyarrows_last_error: Callable[[int], Any] | None = None
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_OURS))
_pointer_of: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
