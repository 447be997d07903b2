"""Programs that run a dataflow, `ckpt run` here and `tools/jobs/run.py` on Spark: their options,
and the dataflow that a user names (``flights.py:flights``, ``module:flights``).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stateformat.errors import CheckpointError, InvalidInput

from .functions import FunctionName, add_to_path, function_of, module_of
from .options import Address, AddressType, AgeType, SecondsType, Whole, is_local, options_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stateformat.backends.dataflow.flow import Dataflow


class JobType(click.ParamType[FunctionName]):
    """Parses ``FILE.py:FUNCTION`` and ``MODULE:FUNCTION``. The file must exist."""

    name = "JOB"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FunctionName:
        try:
            return FunctionName.parse(str(value), "flights.py:flights")
        except ValueError as error:
            self.fail(str(error), param, ctx)


def dataflow_of(
    job: FunctionName,
    *,
    spark: SparkSession | None = None,
    start_spark: Callable[[], SparkSession] | None = None,
    imported: Callable[[], None] = lambda: None,
    hint: str = "; install it",
    show_trace: bool = False,
) -> Dataflow:
    """The dataflow that the job's function makes; ``InvalidInput`` if it makes none.

    What the job's code prints meanwhile goes to standard error, since standard output is the
    program's own.

    Args:
        job: the function. Modules beside its file, or in the current directory, can be imported.
        spark: a session, given to a function that takes one.
        start_spark: makes one where there is none and the function cannot do without.
        imported: called once the job's module is there, before the function.
        hint: what to do about a module that is missing.
        show_trace: whether the stack trace of the job's own exception goes to standard error.
    """
    from stateformat.backends.dataflow.flow import Dataflow

    def call(what: str, code: Callable[[], Any]) -> Any:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return code()
        except CheckpointError:
            raise
        except (Exception, SystemExit) as error:
            if show_trace:
                _show_trace(error)
            missing = hint if isinstance(error, ModuleNotFoundError) else ""
            raise InvalidInput(f"{what} raised {type(error).__name__}: {error}{missing}") from error

    if spark is None:
        add_to_path(job)
    module = module_of(job, call)
    imported()
    make = function_of(module, job)
    session = spark if spark is not None or not _needs_argument(make) else (start_spark or _no_spark(job))()
    flow = call(f"{job}", lambda: make(session) if session is not None and _parameters(make) else make())
    if not isinstance(flow, Dataflow):
        raise InvalidInput(f"{job} returned {type(flow).__name__}; it must return a Dataflow")
    return flow


def _parameters(make: Callable[..., Any]) -> list[inspect.Parameter]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one for one in inspect.signature(make).parameters.values() if one.kind in positional]


def _needs_argument(make: Callable[..., Any]) -> bool:
    return any(one.default is one.empty for one in _parameters(make))


def _no_spark(job: FunctionName) -> Callable[[], Any]:
    def refuse() -> Any:
        raise InvalidInput(
            f"{job} has a parameter, so it is made for Spark: run it with `spark-submit tools/jobs/run.py`, which "
            "gives it the SparkSession (docs/spark.md), or give the parameter a default"
        )

    return refuse


def _show_trace(error: BaseException) -> None:
    """Write the stack trace from the user's first frame on."""
    frames = error.__traceback__
    ours = {__name__, FunctionName.__module__, contextlib.__name__, "importlib", "importlib._bootstrap"}
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in ours and frames.tb_next:
        frames = frames.tb_next
    click.echo("".join(traceback.format_exception(type(error), error, frames)), err=True, nl=False)


F = TypeVar("F", bound=Callable[..., Any])


class Microseconds(SecondsType):
    """Parses a number of seconds to µs."""

    def __init__(self, least_seconds: float) -> None:
        super().__init__(min=least_seconds)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return int(1e6 * super().convert(value, param, ctx))


class KeepType(click.ParamType["int | None"]):
    """Parses a number of checkpoints, and ``all``, which is None."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "all":
            return None
        if not str(value).isdecimal() or not 1 <= len(str(value).lstrip("0")) < 16:
            self.fail(f"{str(value)!r:.60} is not a number of checkpoints; give one from 1 on, or all", param, ctx)
        return int(value)


def run_options(*others: Callable[[Any], Any]) -> Callable[[F], F]:
    """Adds the options that both programs have to a command; ``others`` come behind the epoch's."""
    options: tuple[Callable[[Any], Any], ...] = (
        click.option("--parallelism", type=Whole(), help="For every operator without one of its own."),
        click.option("--rows-per-epoch", "checkpoint_rows", type=Whole(), help="The most rows in an epoch."),
        click.option(
            "--seconds-per-epoch",
            "checkpoint_interval_us",
            type=Microseconds(1e-3),
            help="The longest epoch. [default: 10]",
        ),
        *others,
        click.option("--keep", type=KeepType(), help="Checkpoints to keep. [default: 10 in a new store]"),
        click.option(
            "--keep-for", "keep_for_us", type=AgeType(), help="Also keep what is younger than AGE: 7d, 12h, 30m."
        ),
        click.option("--max-restarts", type=Whole(0), help="Failures allowed in ten checkpoints. [default: 3]"),
        click.option(
            "--from", "start_from", type=AddressType(), help="Begin an empty STORE with this checkpoint's content."
        ),
        click.option(
            "--grace-seconds",
            "grace",
            type=SecondsType(min=0),
            default=25,
            show_default=True,
            help="Time for the checkpoint that SIGTERM asks for.",
        ),
        click.option("--claim", is_flag=True, help="STORE is a savepoint: run in it, and let it expire in time."),
        click.option("--resume", is_flag=True, help="Go on after a stop without drain."),
        click.option(
            "--drop", multiple=True, metavar="OPERATOR[/STATE[.COLUMN]]", help="State or a column to give up."
        ),
        click.option("--record-origin", "origin", is_flag=True, help="Also record the host and user of this program."),
        click.option(
            "--progress", type=click.Choice(["text", "json", "none"]), default="text", show_default=True, help=_PROGRESS
        ),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_PROGRESS = "How each checkpoint is shown; json also reports the end."


def runtime_options(
    store: str, job: object, storage: Mapping[str, Any], chosen: Mapping[str, Any], start_from: Address | None
) -> dict[str, Any]:
    """What a runtime takes, by the values of :func:`run_options`; ``keep`` must be among them.

    Args:
        store: the URL of the job's store.
        job: what records say ran the job.
        storage: the storage options of the command line.
        chosen: the values of the options; None where the user chose nothing.
        start_from: the value of ``--from``.
    """
    options = {name: value for name, value in chosen.items() if value is not None}
    # By default savepoints lie below the store.
    options |= {"savepoint_options": {} if is_local(store) else storage, "program": str(job)}
    if _is_given("keep"):
        options["keep"] = chosen["keep"]
    if start_from is not None:
        options["start_from"] = str(start_from)
        options["start_from_options"] = options_for(start_from.url, storage, (store,))
    return options


def _is_given(name: str) -> bool:
    """Whether the user gave an option of the command that runs."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, click.core.ParameterSource.DEFAULT)
