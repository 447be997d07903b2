"""Runs a dataflow on Spark until it ends, fails or is stopped (``ckpt stop``); for spark-submit.

    spark-submit --master yarn tools/jobs/run.py flights.py:flights s3://bucket/store

The function ``flights()`` in ``flights.py`` returns the ``Dataflow``; one with a parameter is given
the SparkSession. The file goes to the executors with the job. An installed module is
``package.module:flights``.

Standard error gets a line per checkpoint (on a terminal one line that changes), standard output a
sentence about how the job ended. With ``--progress json`` all of it is JSON lines on standard
output (docs/json.md). Exit status: 0 the job ended or was stopped; 1 it failed or was refused; 2
misuse; 3 the storage failed. Run again, it goes on from the newest checkpoint.

``spark-submit`` puts both streams on its own standard output, and its log on standard error: ``2>
spark.log`` separates the two. An unconfigured log begins at warnings
(``stateformat.backends.spark.sessions``).
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import stateformat as sf
from stateformat.backends.dataflow.flow import Dataflow
from stateformat.backends.runtime import JobFailed, JobOutcome, Keep, Progress, ProgressLine, ProgressLog, starting
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.sessions import lent_session
from stateformat.errors import CheckpointError, InvalidInput, StorageError
from stateformat.tools.ckpt.exit_status import FINE, PROBLEMS, UNAVAILABLE, Failure, failure_of, in_options
from stateformat.tools.ckpt.functions import FunctionName, function_of, module_of
from stateformat.tools.ckpt.options import (
    STORAGE_OPTIONS,
    Address,
    AddressType,
    SecondsType,
    is_local,
    options_for,
    storage_options,
)
from stateformat.tools.ckpt.output import complain
from stateformat.words import label

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class JobType(click.ParamType[FunctionName]):
    """Parses ``FILE.py:FUNCTION`` and ``MODULE:FUNCTION``. The file must exist."""

    name = "JOB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FunctionName:
        try:
            return FunctionName.parse(str(value), "flights.py:flights")
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Microseconds(SecondsType):
    """Parses a number of seconds to µs."""

    def __init__(self, least_seconds: float) -> None:
        super().__init__(min=least_seconds)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return int(1e6 * super().convert(value, param, ctx))


class KeepType(click.ParamType["int | Keep | None"]):
    """Parses a number of checkpoints, and ``all``, which is None."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Keep | None:
        if isinstance(value, Keep):
            return value
        if value == "all":
            return None
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r} is no number of checkpoints; give one from 1 on, or all", param, ctx)
        return int(value)


class Reporter:
    """What the program prints: text for people, or JSON lines for programs."""

    def __init__(self, form: str) -> None:
        self._json = form == "json"
        self._line = ProgressLine(sys.stderr)
        shown: Mapping[str, Callable[[Progress], None]] = {"text": self._line, "json": ProgressLog(sys.stdout)}
        self.progress = shown.get(form)
        handler = logging.StreamHandler(sys.stdout if self._json else sys.stderr)
        handler.setFormatter(_JsonLog() if self._json else logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
        # Copying a savepoint may take long, and comes before the first progress.
        logging.getLogger(starting.__name__).setLevel(logging.INFO)

    def outcome(self, outcome: JobOutcome) -> int:
        """Print how the job ended; returns the exit status."""
        self._line.end()
        sentence = in_options(outcome.sentence)
        document = {"kind": "JobOutcome", **asdict(outcome), "sentence": sentence}
        click.echo(json.dumps(document) if self._json else sentence)
        return FINE

    def failure(self, error: BaseException) -> int:
        """Print why there is no outcome; returns the exit status."""
        self._line.end()
        if isinstance(error, JobFailed):
            storage_failed = isinstance(error.__cause__, (StorageError, OSError))
            failure = Failure(UNAVAILABLE if storage_failed else PROBLEMS, "job_failed", str(error))
        else:
            failure = failure_of(error)
        if self._json:
            click.echo(json.dumps({"kind": "Failure", **failure.to_json()}))
        complain(f"error: {label(in_options(failure.message))}")
        return failure.status


class _JsonLog(logging.Formatter):
    """A record of Python's log as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        document = {"kind": "Log", "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            document["trace"] = self.formatException(record.exc_info)
        return json.dumps(document)


@click.command(
    help=__doc__.split("\n\n")[0] if __doc__ else None, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument("job", type=JobType())
@click.argument("store", type=AddressType("never"))
@click.option("--parallelism", type=click.IntRange(min=1), help="Of every operator without one of its own.")
@click.option("--rows-per-epoch", "checkpoint_rows", type=click.IntRange(min=1), help="The most rows of an epoch.")
@click.option(
    "--seconds-per-epoch", "checkpoint_interval_us", type=Microseconds(1e-3), help="The longest. [default: 10]"
)
@click.option("--least-seconds-per-epoch", "least_epoch_us", type=Microseconds(0), help="The shortest. [default: 0]")
@click.option("--idle-seconds", "idle_us", type=Microseconds(0), help="The wait after an empty epoch. [default: 1]")
@click.option("--keep", type=KeepType(), default=Keep.DEFAULT, help="Checkpoints kept. [default: 10 in a new store]")
@click.option("--max-restarts", type=click.IntRange(min=0), help="Failures allowed in ten checkpoints. [default: 3]")
@click.option("--from", "start_from", type=AddressType(), help="Begin an empty STORE with this checkpoint's content.")
@click.option("--claim", is_flag=True, help="STORE is a savepoint: run in it, and let it expire in time.")
@click.option("--resume", is_flag=True, help="Go on after a stop without drain.")
@click.option("--record-origin", "origin", is_flag=True, help="Records also say the driver's host and user.")
@click.option("--drop", multiple=True, metavar="OPERATOR[/STATE[.COLUMN]]", help="State or a column to give up.")
@click.option("--progress", type=click.Choice(["text", "json", "none"]), default="text", show_default=True)
def command(
    job: FunctionName,
    store: Address,
    *,
    progress: str,
    start_from: Address | None,
    endpoint_url: str | None,
    option: tuple[tuple[str, Any], ...],
    keep: int | Keep | None,
    **chosen: Any,
) -> int:
    """Run it; returns the exit status."""
    reporter = Reporter(progress)
    storage = storage_options(endpoint_url, option)
    options = {name: value for name, value in chosen.items() if value is not None}
    # By default savepoints lie below the store.
    options |= {"keep": keep, "savepoint_options": {} if is_local(store.url) else storage, "program": str(job)}
    others = () if start_from is None else (start_from.url,)
    if start_from is not None:
        options["start_from"] = str(start_from)
        options["start_from_options"] = options_for(start_from.url, storage, (store.url,))
    try:
        opened = sf.open(store.url, **options_for(store.url, storage, others))
        with lent_session(f"stateformat {job}") as spark:
            runtime = SparkRuntime(spark, opened, progress=reporter.progress, **options)
            return reporter.outcome(runtime.run(dataflow_of(job, spark)))
    except (CheckpointError, OSError, KeyboardInterrupt) as error:
        return reporter.failure(error)


command.params += STORAGE_OPTIONS


def dataflow_of(job: FunctionName, spark: SparkSession) -> Dataflow:
    """The dataflow that the job's function makes; ``InvalidInput`` if it makes none.

    If the job's own code raised, its stack trace goes to standard error.
    """
    module = module_of(job, _call)
    if job.is_file:
        spark.sparkContext.addPyFile(str(Path(job.where).resolve()))
    make = function_of(module, job)
    flow = _call(f"{job}", lambda: make(spark) if inspect.signature(make).parameters else make())
    if not isinstance(flow, Dataflow):
        raise InvalidInput(f"{job} returned {type(flow).__name__}; it must return a Dataflow")
    return flow


def _call(what: str, code: Callable[[], Any]) -> Any:
    """What code of the job returns. Shows the stack trace of an exception: it is the user's."""
    try:
        return code()
    except CheckpointError:
        raise
    except Exception as error:
        frames = error.__traceback__
        ours = {__name__, FunctionName.__module__}
        while frames is not None and frames.tb_frame.f_globals.get("__name__") in ours and frames.tb_next:
            frames = frames.tb_next
        click.echo("".join(traceback.format_exception(type(error), error, frames)), err=True, nl=False)
        hint = "; install it, or give it to spark-submit: --py-files" if isinstance(error, ModuleNotFoundError) else ""
        raise InvalidInput(f"{what} raised {type(error).__name__}: {error}{hint}") from error


def main(arguments: list[str]) -> int:
    """Run the program; an error becomes a sentence and an exit status."""
    try:
        return int(command.main(arguments, prog_name="run.py", standalone_mode=False) or FINE)
    except (click.ClickException, click.Abort) as error:
        failure = failure_of(error)
        complain(f"error: {label(failure.message)}" + (f" ({failure.hint})" if failure.hint else ""))
        return failure.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
