"""From an exception to a sentence and an exit status. A user of ``ckpt`` never sees a stack trace.

========  ==========================================================================================
status    meaning
========  ==========================================================================================
0         fine
1         the checkpoint has problems, or a restore, a publication or a stop was refused (or a bug in ckpt)
2         misuse: the command line asks for something that cannot be
3         the store, checkpoint or running job is not there, or the storage failed
130, 141  interrupted; the reader of standard output went away
========  ==========================================================================================

Classes are matched by name along the exception's bases, so that this module, which every call of ``ckpt`` imports,
needs nothing of the library.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import click

FINE: Final = 0
PROBLEMS: Final = 1
MISUSE: Final = 2
UNAVAILABLE: Final = 3
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

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
"""Every class of ``stateformat.errors`` that stands for itself; a subclass counts as its nearest base."""


@dataclass(frozen=True)
class Failure:
    """What went wrong, ready to be shown. ``kind`` is a stable code; ``details`` are the values of the message."""

    status: int
    kind: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """The document that stands on standard output instead of a result (docs/json.md)."""
        return {
            "error": {
                "kind": self.kind,
                "message": self.message,
                "exit_status": self.status,
                "details": {name: _plain(value) for name, value in self.details.items()},
            }
        }


def _plain(value: Any) -> Any:
    """A detail as JSON: containers kept, everything that JSON does not know as text."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def interrupted(effect: str = "nothing was changed") -> Failure:
    """The failure of a command that Ctrl-C has ended; ``effect`` says what it may have done by then."""
    return Failure(INTERRUPTED, "interrupted", f"interrupted; {effect}")


def failure_of(error: BaseException) -> Failure:
    """The failure that an exception stands for; whatever is not known by name is a bug of ours, and is called so."""
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return interrupted()
    if isinstance(error, click.ClickException):
        return _usage(error)
    for base in type(error).__mro__:
        if base.__name__ in STATUS_OF_CLASS and base.__module__ == "stateformat.errors":
            return Failure(
                STATUS_OF_CLASS[base.__name__],
                str(getattr(error, "kind", "")),
                str(error),
                getattr(error, "details", {}),
            )
    if isinstance(error, OSError):
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return Failure(UNAVAILABLE, "storage_failed", f"{what} ({type(error).__name__})")
    return Failure(
        PROBLEMS,
        "internal_error",
        f"this is a bug in ckpt, not in your checkpoint: {type(error).__name__}: {error}; please report it with what "
        "--verbose shows",
    )


def _usage(error: click.ClickException) -> Failure:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return Failure(MISUSE, "help", error.format_message())
    context = getattr(error, "ctx", None)
    hint = f"`{context.command_path} --help` tells how to use it" if context is not None else ""
    return Failure(MISUSE, "usage", error.format_message(), hint=hint)


def in_options(sentence: str) -> str:
    """A sentence of the library in the words of a command line: its keyword arguments are our options."""
    for name, option in (("drop", "--drop"), ("start_from", "--from")):
        sentence = re.sub(rf"\b{name}=('[^']*'|\"[^\"]*\")", rf"{option} \1", sentence)
    return sentence.replace("resume=True", "--resume").replace("claim=True", "--claim")


def trace_of(error: BaseException) -> str:
    """The stack trace, for ``--verbose`` only."""
    return "".join(traceback.format_exception(error))


__all__ = [
    "FINE",
    "MISUSE",
    "PROBLEMS",
    "STATUS_OF_CLASS",
    "UNAVAILABLE",
    "Failure",
    "failure_of",
    "in_options",
    "interrupted",
    "trace_of",
]
