"""What user code raises inside of a subtask, with the place where it did."""

from __future__ import annotations

from stateformat.errors import CheckpointError, ErrorKind


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


__all__ = ["Guard", "OperatorError"]
