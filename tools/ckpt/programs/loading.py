"""The dataflow that a function of the user's makes: ``flights.py:flights``, ``module:flights``."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from stateformat.errors import CheckpointError, InvalidInput

from ..functions import FunctionName, add_to_path, function_of, module_of

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
