"""Sends exceptions from Spark's workers to the driver."""

from __future__ import annotations

import pickle
import traceback
from itertools import pairwise

from ...dataflow.chained_operator import chain_of


class RemoteError(Exception):
    """Replaces an exception of a worker that cannot be pickled, and names its type."""


def pack_error(error: BaseException) -> bytes:
    """Return an error, its causes and its trace as bytes. What cannot be pickled becomes text."""
    trace = "".join(traceback.format_exception(error))
    return pickle.dumps(([_pickle(each) for each in chain_of(error)], trace), protocol=5)


def _pickle(error: BaseException) -> tuple[bytes | None, str]:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        data = pickle.dumps(error, protocol=5)
        pickle.loads(data)  # noqa: S301 - pickled just now. Many exceptions can be pickled but not unpickled.
    except Exception:
        return None, text
    return data, text


def unpack_error(data: bytes) -> BaseException:
    """Return the error that was packed; its innermost cause has the worker's trace as a note."""
    pickled, trace = pickle.loads(data)  # noqa: S301 - from our own workers
    found = [_unpickle(*each) for each in pickled]
    for error, cause in pairwise(found):
        error.__cause__ = cause
    found[-1].add_note(f"In the worker:\n{trace.rstrip()}")
    return found[0]


def _unpickle(data: bytes | None, text: str) -> BaseException:
    try:
        error = None if data is None else pickle.loads(data)  # noqa: S301 - from our own workers
    except Exception:  # Its class can be imported only in the worker.
        error = None
    return error if isinstance(error, BaseException) else RemoteError(text)
