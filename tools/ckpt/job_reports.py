"""What a program that runs a job prints: text for people, or JSON lines for programs."""

from __future__ import annotations

import json
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from stateformat.backends.dataflow.flow import Dataflow
from stateformat.backends.runtime import (
    GraceExceeded,
    JobFailed,
    JobOutcome,
    Progress,
    ProgressLine,
    ProgressLog,
    Runtime,
    starting,
    stop_soon_on_sigterm,
)
from stateformat.errors import RestoreRefused, StorageError
from stateformat.words import label

from .exit_status import FINE, PROBLEMS, TERMINATED, UNAVAILABLE, Failure, failure_of, in_options, interrupted
from .output import complain
from .watch import OnStandardError


class Reporter:
    """Prints progress, log and end of a job. ``form`` is ``text``, ``json`` or ``none``.

    ``name``: how the program is called in front of an error. :attr:`handler` is for the log, with
    ``whole_traces``, or only what is not ours of the trace of an error.
    """

    def __init__(self, form: str, name: str, *, whole_traces: bool = False) -> None:
        self.as_json = form == "json"
        self._name = name
        self._line = ProgressLine(sys.stderr)
        shown: Mapping[str, Callable[[Progress], None]] = {"text": self._line, "json": ProgressLog(sys.stdout)}
        self.progress = shown.get(form)
        self.handler: logging.Handler = logging.StreamHandler(sys.stdout) if self.as_json else OnStandardError()
        self.handler.setFormatter(_JsonLog() if self.as_json else _TextLog(whole_traces))
        # Copying a savepoint may take long, and comes before the first progress.
        logging.getLogger(starting.__name__).setLevel(logging.INFO)

    def end(self) -> None:
        """Leave the line that changes, before anything else is printed."""
        self._line.end()

    def run(self, runtime: Runtime[Any], flow: Dataflow, grace: float) -> JobOutcome:
        """Run a job, which SIGTERM ends after a checkpoint, or after ``grace`` seconds."""
        with stop_soon_on_sigterm(runtime, grace=grace, last_words=self._last_words):
            return runtime.run(flow)

    def _last_words(self, sentence: str) -> None:
        """Say why the process is ended now; its main thread may be in the middle of a line."""
        document = {"kind": "Failure", **Failure(TERMINATED, "time_is_up", sentence).to_json()}
        if self.as_json:
            os.write(sys.stdout.fileno(), f"{json.dumps(document)}\n".encode())
        os.write(sys.stderr.fileno(), f"{self._name}: {sentence}\n".encode())

    def outcome(self, outcome: JobOutcome) -> int:
        """Print how the job ended; returns the exit status."""
        self.end()
        document = outcome_document(outcome)
        click.echo(json.dumps(document) if self.as_json else document["sentence"])
        return FINE

    def failure(self, error: BaseException, effect: str | None = None) -> int:
        """Print why there is no outcome; returns the exit status.

        ``effect``: what an interruption leaves behind, as the end of a sentence.
        """
        self.end()
        if isinstance(error, JobFailed):
            storage_failed = isinstance(error.__cause__, (StorageError, OSError))
            failure = Failure(UNAVAILABLE if storage_failed else PROBLEMS, "job_failed", str(error))
        elif isinstance(error, GraceExceeded):
            failure = Failure(TERMINATED, str(error.kind), str(error), error.details)
        elif isinstance(error, KeyboardInterrupt) and effect is not None:
            failure = interrupted(effect)
        else:
            failure = failure_of(error)
        if self.as_json:
            click.echo(json.dumps({"kind": "Failure", **failure.to_json()}))
        # Reasons of a refusal are lines of ours, which quote names; others have strangers' text.
        said = failure.message if isinstance(error, RestoreRefused) else label(failure.message)
        complain(f"{self._name}: {in_options(said)}")
        return failure.status


def outcome_document(outcome: JobOutcome) -> dict[str, Any]:
    """How a job ended, as JSON."""
    return {"kind": "JobOutcome", **asdict(outcome), "sentence": in_options(outcome.sentence)}


class _TextLog(logging.Formatter):
    """A record of Python's log for people: only of loggers that are not ours the name."""

    def __init__(self, whole_traces: bool) -> None:
        super().__init__()
        self._whole_traces = whole_traces

    def format(self, record: logging.LogRecord) -> str:
        name = "" if record.name.partition(".")[0] == "stateformat" else f"{record.name}: "
        said = f"{record.levelname.lower()}: {name}{record.getMessage()}"
        if not record.exc_info or record.exc_info[1] is None:
            return said
        whole = self.formatException(record.exc_info)
        return f"{said}\n{whole if self._whole_traces else own_trace(record.exc_info[1]) or whole}"


def own_trace(error: BaseException) -> str:
    """Return the part of an error's trace that is the user's: the frames outside of this package
    and of what is installed, of the innermost error that has some; empty where none has.
    """
    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    for one in reversed(chain):
        frames = [
            frame for frame in traceback.extract_tb(one.__traceback__) if not frame.filename.startswith(_INSTALLED)
        ]
        if frames:
            lines = [*traceback.format_list(frames), *traceback.format_exception_only(one)]
            return f"Traceback of the job's own code (-v shows all):\n{''.join(lines).rstrip()}"
    return ""


_INSTALLED: Final = ("<", str(Path(__file__).parents[2]), *(f"{path}/" for path in sysconfig.get_paths().values()))
"""How the names of files begin that are not a user's."""


class _JsonLog(logging.Formatter):
    """A record of Python's log as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        document = {"kind": "Log", "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            document["trace"] = self.formatException(record.exc_info)
        return json.dumps(document)
