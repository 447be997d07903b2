"""What user code raises inside of a subtask, with the place where it did."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from stateformat.errors import CheckpointError, ErrorKind, StorageError


class OperatorError(CheckpointError):
    """A hook of an operator or source raised. ``__cause__`` is what it raised; ``details`` has ``operator``, ``subtask`` (None: in the
    driver), ``hook``.

    The user's code is at fault, or what it met. An executor makes it a failure of the task.
    """

    default_kind = ErrorKind.OPERATOR_FAILED

    @classmethod
    def of(cls, error: BaseException, *, operator: str, subtask: int | None, hook: str) -> OperatorError:
        """The error of a hook. Raise it ``from`` what the hook raised."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        place = "" if subtask is None else f", subtask {subtask},"
        return cls(
            f"{hook} of {operator!r}{place} failed: {said}",
            operator=operator,
            subtask=subtask,
            hook=hook,
        )

    @property
    def operator(self) -> str:
        """The uid of the operator or source."""
        return str(self.details["operator"])

    @property
    def hook(self) -> str:
        """The name of the method that raised."""
        return str(self.details["hook"])


class Guard:
    """Makes whatever user code raises within a ``with`` an :class:`OperatorError`. Used again and again; not thread-safe."""

    def __init__(self, operator: str, subtask: int | None) -> None:
        self._operator = operator
        self._subtask = subtask
        self._hook = ""

    def __call__(self, hook: str) -> Guard:
        """Guard a call of this hook."""
        self._hook = hook
        return self

    def __enter__(self) -> None:
        """Nothing is to be prepared."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise what was raised, with its place."""
        if isinstance(error, Exception):
            raise OperatorError.of(error, operator=self._operator, subtask=self._subtask, hook=self._hook) from error


class FailsAgain(CheckpointError):
    """Something failed in a way in which it would fail again: another try cannot help."""

    default_kind = ErrorKind.OPERATOR_FAILED


_FOR_GOOD: Final = (FailsAgain, ImportError, pickle.PicklingError, pickle.UnpicklingError)
"""What cannot go better another time."""
_OF_FILES: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_OF_DATABASES: Final = frozenset({"OperationalError", "InterfaceError"})
"""What drivers of databases raise for a lost connection (PEP 249)."""
_OUTSIDE: Final = frozenset({"commit", "clean"})
"""Hooks that speak with another system: what they raise may be that system's, whatever its type."""
_CHAIN_MAX: Final = 16


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    found: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def is_for_good(error: BaseException) -> bool:
    """Whether trying again cannot help: something cannot be imported or pickled."""
    return any(isinstance(one, _FOR_GOOD) for one in chain_of(error))


def may_pass(error: BaseException) -> bool:
    """Whether an error may be bad luck, so that the same may go well another time: the storage, the network, memory, or another
    system that a sink commits to.
    """
    return any(
        isinstance(one, StorageError | MemoryError)
        or (isinstance(one, OSError) and not isinstance(one, _OF_FILES))
        or (isinstance(one, OperatorError) and one.hook in _OUTSIDE)
        or any(base.__name__ in _OF_DATABASES for base in type(one).__mro__)
        for one in chain_of(error)
    )


def signature(error: BaseException) -> tuple[str, ...]:
    """What two failures have in common that are the same: the operator, the type and the message of what it raised."""
    operator = next((one.operator for one in chain_of(error) if isinstance(one, OperatorError)), "")
    raised = [one for one in chain_of(error) if not isinstance(one, OperatorError)]
    one = raised[0] if raised else error
    return (operator, f"{type(one).__module__}.{type(one).__qualname__}", str(one))


# Between processes ----------------------------------------------------------------------------------------------------------


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


__all__ = [
    "FailsAgain",
    "Guard",
    "OperatorError",
    "RemoteError",
    "chain_of",
    "is_for_good",
    "may_pass",
    "pack",
    "signature",
    "unpack",
]
