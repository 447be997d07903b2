"""Exceptions of Spark's workers on their way to the driver."""

from __future__ import annotations

import pickle
import traceback
from itertools import pairwise

from backends.dataflow.failures import chain_of


class RemoteError(Exception):
    """Stands for an exception of a worker that cannot be pickled. Its message names the type of that one."""


def pack(error: BaseException) -> bytes:
    """An error and its causes as they go to another process: each pickled, if that is possible, and the trace as text."""
    trace = "".join(traceback.format_exception(error))
    return pickle.dumps(([_packed(one) for one in chain_of(error)], trace), protocol=5)


def _packed(error: BaseException) -> tuple[bytes | None, str]:
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        data = pickle.dumps(error, protocol=5)
        pickle.loads(data)  # noqa: S301 - what this process has pickled. Many exceptions can be pickled and not be read again.
    except Exception:
        return None, said
    return data, said


def unpack(data: bytes) -> BaseException:
    """The error that :func:`pack` of our own worker has packed, with its causes; the innermost has the worker's trace as a note."""
    packed, trace = pickle.loads(data)  # noqa: S301 - from our own workers
    found = [_unpacked(*one) for one in packed]
    for error, cause in pairwise(found):
        error.__cause__ = cause
    found[-1].add_note(f"In the worker:\n{trace.rstrip()}")
    return found[0]


def _unpacked(data: bytes | None, said: str) -> BaseException:
    if data is not None:
        try:
            error = pickle.loads(data)  # noqa: S301 - from our own workers
        except Exception:  # Its class can be imported in the worker only.
            return RemoteError(said)
        if isinstance(error, BaseException):
            return error
    return RemoteError(said)


__all__ = ["RemoteError", "pack", "unpack"]
