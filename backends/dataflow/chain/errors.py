"""What user code raises, with the place where it was raised."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final

from stateformat.errors import CheckpointError, ErrorKind, OutcomeUnknown, StorageError
from stateformat.storage import REFUSALS


class OperatorError(CheckpointError):
    """A hook of an operator or source raised; ``__cause__`` is what it raised.

    The fault is in the user's code, or in what it met. An executor makes it a failure of the task.
    ``details`` has ``operator``, ``subtask`` (None: in the driver) and ``hook``.
    """

    default_kind = ErrorKind.OPERATOR_FAILED

    @classmethod
    def of(cls, error: BaseException, *, operator: str, subtask: int | None, hook: str) -> OperatorError:
        """Return the error of a hook. Raise it ``from`` what the hook raised."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        place = "" if subtask is None else f", subtask {subtask},"
        message = f"{hook} of {operator!r}{place} failed: {said}"
        return cls(message, operator=operator, subtask=subtask, hook=hook)

    @property
    def operator(self) -> str:
        """The uid of the operator or source."""
        return str(self.details["operator"])

    @property
    def hook(self) -> str:
        """The name of the method that raised."""
        return str(self.details["hook"])


class Guard:
    """Turns what user code raises in a ``with`` into :class:`OperatorError`. Not thread-safe."""

    def __init__(self, operator: str, subtask: int | None) -> None:
        self._operator = operator
        self._subtask = subtask
        self._hook = ""

    def __call__(self, hook: str) -> Guard:
        """Guard a call of this hook."""
        self._hook = hook
        return self

    def __enter__(self) -> None:
        """Do nothing: no preparation is needed."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the error with its place."""
        if isinstance(error, Exception):
            raise OperatorError.of(error, operator=self._operator, subtask=self._subtask, hook=self._hook) from error


class FailsAgain(CheckpointError):
    """Something failed and would fail again: another try cannot help."""

    default_kind = ErrorKind.OPERATOR_FAILED


_OF_PICKLES: Final = frozenset({"PicklingError", "UnpicklingError"})
_OF_FILES: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_OF_DATABASES: Final = frozenset({"OperationalError", "InterfaceError"})
"""What database drivers raise for a lost connection (PEP 249)."""
_OUTSIDE: Final = frozenset({"commit", "clean"})
"""Hooks that talk to another system, whose errors may be of any type."""
_OF_CODE: Final = (TypeError, AttributeError, NameError, AssertionError, LookupError, ArithmeticError)
"""What a fault in the code raises. Errors of a storage or database are never among these."""
_CHAIN_MAX: Final = 16


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on."""
    found: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def is_for_good(error: BaseException) -> bool:
    """Return whether trying again cannot help.

    Something cannot be imported or pickled, or a storage refuses: there is no permission, no
    bucket, no such request.
    """
    return any(
        isinstance(one, FailsAgain | ImportError) or _is_named(one, _OF_PICKLES) or _is_refusal(one)
        for one in chain_of(error)
    )


def may_pass(error: BaseException) -> bool:
    """Return whether another try may help.

    The cause was the storage, the network, memory, or a sink's system.
    """
    raised = next((one for one in chain_of(error) if not isinstance(one, OperatorError)), error)
    if isinstance(raised, (*_OF_CODE, *_OF_FILES)) and not isinstance(raised, CheckpointError):
        return False
    return any(
        isinstance(one, StorageError | OutcomeUnknown | MemoryError)
        or (isinstance(one, OSError) and not isinstance(one, _OF_FILES))
        or (isinstance(one, OperatorError) and one.hook in _OUTSIDE)
        or _is_named(one, _OF_DATABASES)
        for one in chain_of(error)
    )


def _is_refusal(error: BaseException) -> bool:
    # A full disk may have room later.
    full = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, StorageError) and error.kind in REFUSALS and not full


def _is_named(error: BaseException, names: frozenset[str]) -> bool:
    return any(base.__name__ in names for base in type(error).__mro__)


def signature(error: BaseException) -> tuple[str, ...]:
    """Return the operator, and the type and message of what it raised: equal for equal failures."""
    operator = next((one.operator for one in chain_of(error) if isinstance(one, OperatorError)), "")
    raised = [one for one in chain_of(error) if not isinstance(one, OperatorError)]
    one = raised[0] if raised else error
    return (operator, f"{type(one).__module__}.{type(one).__qualname__}", str(one))
