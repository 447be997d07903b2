"""From an exception to a sentence and an exit status. A user of ``ckpt`` never sees a stack trace.

Classes are matched by name, so that this module, which every call imports, needs no library.
"""

from __future__ import annotations

import errno
import re
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import click

FINE: Final = 0
PROBLEMS: Final = 1
MISUSE: Final = 2
UNAVAILABLE: Final = 3
PIPE_CLOSED: Final = 141
TERMINATED: Final = 143

STATUS_MEANINGS: Final = (
    ("0", "fine"),
    ("1", "the checkpoint has problems, or a restore, publication or stop was refused, or a stop failed"),
    ("2", "misuse: the command line asks for the impossible"),
    ("3", "the store or checkpoint is not there, no job answers, or the storage failed"),
    ("130, 129, 143", "ended by Ctrl-C, SIGHUP, SIGTERM; `run`, which takes a checkpoint on SIGTERM: without one"),
    ("141", "the reader of standard output went away"),
)
"""What each exit status means, for all commands."""

STATUS_OF_CLASS: Final[Mapping[str, int]] = {
    "InvalidState": PROBLEMS,
    "InvalidInput": MISUSE,
    "RestoreRefused": PROBLEMS,
    "DamagedCheckpoint": PROBLEMS,
    "UnsupportedFormat": PROBLEMS,
    "JobMismatch": PROBLEMS,
    "PublishConflict": PROBLEMS,
    "OutcomeUnknown": UNAVAILABLE,
    "NotFound": UNAVAILABLE,
    "StorageError": UNAVAILABLE,
}
"""The classes of ``stateformat.errors``; one that is not listed counts as its nearest base."""


_FULL: Final = "; free some room there, or name another disk: with --to, or TMPDIR for temporary files"
_CLOSED: Final = "; see that you may write there, or name another place"
_NEXT_STEPS: Final[Mapping[int, str]] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _CLOSED,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
}
"""What to do about an error of the system, as the end of a sentence."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, ready to be shown."""

    status: int
    kind: str
    """A stable code."""
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """The values in the message."""
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """The document that replaces the result on standard output (docs/json.md)."""
        return {
            "error": {
                "kind": self.kind,
                "message": self.message,
                "exit_status": self.status,
                "details": {name: _plain(value) for name, value in self.details.items()},
            }
        }


def _plain(value: Any) -> Any:
    """A detail as JSON; a value that JSON does not know becomes text."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def interrupted(effect: str = "nothing was changed", number: int = signal.SIGINT) -> Failure:
    """The failure of a command ended by a signal; ``effect`` says what it may have changed."""
    how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    return Failure(128 + number, "interrupted", f"{how}; {effect}")


def failure_of(error: BaseException) -> Failure:
    """The failure for an exception. An unknown class is a bug of ours, and the sentence says so."""
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return interrupted()
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return Failure(MISUSE, "help", error.format_message())
    if isinstance(error, click.NoSuchOption):
        from .synonyms import OPTIONS

        known = {name for one in (error.ctx.command.params if error.ctx else ()) for name in one.opts}
        meant = OPTIONS.get(error.option_name)
        if meant in known:
            error = click.UsageError(f"{error.message} Did you mean {meant!r}?", error.ctx)
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f"`{context.command_path} --help` shows how to use it" if context is not None else ""
        return Failure(MISUSE, "usage", error.format_message(), hint=hint)
    for base in type(error).__mro__:
        if base.__name__ in STATUS_OF_CLASS and base.__module__ == "stateformat.errors":
            status, kind = STATUS_OF_CLASS[base.__name__], str(getattr(error, "kind", ""))
            return Failure(status, kind, str(error), getattr(error, "details", {}))
    if isinstance(error, OSError):
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        if error.filename is None and _NEXT_STEPS.get(error.errno or 0) == _FULL:
            from tempfile import gettempdir

            what = f"a temporary file in {gettempdir()}: {error.strerror}"  # Others are named.
        advice = _NEXT_STEPS.get(error.errno or 0, "")
        return Failure(UNAVAILABLE, "storage_failed", f"{what} ({type(error).__name__}){advice}")
    if isinstance(error, MemoryError):
        what = f"there is not enough memory ({str(error) or 'an allocation failed'})"
        return Failure(UNAVAILABLE, "limit_exceeded", f"{what}; use a machine with more, or ask for less")
    return Failure(
        PROBLEMS,
        "internal_error",
        f"this is a bug in ckpt, not in your checkpoint: {type(error).__name__}: {error}. Please report it with the "
        "output of --verbose",
    )


def in_options(text: str) -> str:
    """A sentence of the library with its keyword arguments as options of a command line."""
    for name, option in (("drop", "--drop"), ("start_from", "--from")):
        text = re.sub(rf"\b{name}=('[^']*'|\"[^\"]*\")", rf"{option} \1", text)
    return text.replace("resume=True", "--resume").replace("claim=True", "--claim")


def trace_of(error: BaseException) -> str:
    """The stack trace, for ``--verbose`` only."""
    return "".join(traceback.format_exception(error))
