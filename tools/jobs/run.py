"""Runs a dataflow on Spark as a program for spark-submit, until it ends, is stopped (``ckpt stop STORE``), or fails.

    spark-submit --master yarn tools/jobs/run.py flights.py:flights s3://bucket/store --parallelism 12

``flights.py`` defines a function ``flights()`` that returns the ``Dataflow`` (one with a parameter is given the SparkSession); a module
that is installed is named ``package.module:flights``. The file goes to the executors with the job. What the driver prints goes to
standard error: a line for each epoch, or with ``--progress json`` an object. The exit status is that of ``ckpt``: 0 the job has ended or
was stopped, 1 it failed or was refused, 2 misuse, 3 the storage failed. Run it again and it goes on from the newest checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import stateformat as sf
from backends.dataflow.api import Dataflow
from backends.running.outcome import JobFailed
from backends.running.progress import ProgressLine, ProgressLog
from backends.spark.runtime import SparkRuntime
from backends.spark.session import session
from stateformat.errors import CheckpointError, InvalidInput
from tools.ckpt.failures import FINE, MISUSE, PROBLEMS, failure_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.argument("job")
@click.argument("store")
@click.option("--parallelism", type=click.IntRange(min=1), help="Of every operator that has none of its own.")
@click.option("--rows-per-epoch", type=click.IntRange(min=1), help="How many rows sources read in an epoch at most.")
@click.option("--seconds-per-epoch", type=click.FloatRange(min=0.001), help="How long they read at most. [default: 10]")
@click.option("--idle-seconds", type=click.FloatRange(min=0), help="The wait after an epoch without rows. [default: 1]")
@click.option("--keep", type=click.IntRange(min=1), help="How many checkpoints are kept. [default: all]")
@click.option(
    "--max-restarts", type=click.IntRange(min=0), help="Failures within ten checkpoints that are allowed. [default: 3]"
)
@click.option("--resume", is_flag=True, help="Go on after a stop without drain.")
@click.option("--drop", multiple=True, metavar="OPERATOR[/STATE]", help="State of the checkpoint that is given up.")
@click.option("--endpoint-url", metavar="URL", help="The S3 server, where it is not Amazon's.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the store's storage.")
@click.option("--progress", type=click.Choice(["text", "json", "none"]), default="text", show_default=True)
def command(job: str, store: str, **chosen: Any) -> int:
    """Run it; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with_spark = session(f"stateformat {job}")
    try:
        flow = dataflow_of(job, with_spark)
        opened = sf.open(store, **_storage_options(chosen))
        line = ProgressLine(sys.stderr)
        progress: Any = {"text": line, "json": ProgressLog(sys.stderr), "none": None}[chosen["progress"]]
        outcome = SparkRuntime(with_spark, opened, progress=progress, **_runtime_options(chosen)).run(flow)
        line.end()
        click.echo(outcome.sentence)
    finally:
        with_spark.stop()
    return FINE


def _storage_options(chosen: dict[str, Any]) -> dict[str, str]:
    found = dict(option.split("=", 1) for option in chosen["options"] if "=" in option)
    if len(found) != len(chosen["options"]):
        raise InvalidInput(f"--option takes NAME=VALUE; given are {', '.join(chosen['options'])}")
    if chosen["endpoint_url"]:
        found["endpoint_url"] = chosen["endpoint_url"]
    return found


def _runtime_options(chosen: dict[str, Any]) -> dict[str, Any]:
    seconds = {"checkpoint_interval_us": "seconds_per_epoch", "idle_us": "idle_seconds"}
    plain = {
        "parallelism": "parallelism",
        "checkpoint_rows": "rows_per_epoch",
        "keep": "keep",
        "max_restarts": "max_restarts",
    }
    found = {name: chosen[option] for name, option in plain.items() if chosen[option] is not None}
    found |= {name: int(1e6 * chosen[option]) for name, option in seconds.items() if chosen[option] is not None}
    return {**found, "resume": chosen["resume"], "drop": chosen["drop"]}


def dataflow_of(job: str, spark: SparkSession) -> Dataflow:
    """The dataflow that ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION`` makes. ``InvalidInput``, the user's fault, where there is none."""
    where, _, name = job.rpartition(":")
    if not where or not name:
        raise InvalidInput(f"the job is {job!r}; name a function of a file or module, as in flights.py:flights")
    module = _file(where, spark) if where.endswith(".py") else importlib.import_module(where)
    make: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(make):
        raise InvalidInput(
            f"{where} has no function {name!r}; it has {', '.join(sorted(_functions(module))) or 'none'}"
        )
    flow = make(spark) if inspect.signature(make).parameters else make()
    if not isinstance(flow, Dataflow):
        raise InvalidInput(f"{job} returned {type(flow).__name__}; it returns a Dataflow")
    return flow


def _file(where: str, spark: SparkSession) -> Any:
    """The module of a file, which executors can import too, by the file's name."""
    path = Path(where)
    if not path.is_file():
        raise InvalidInput(f"there is no file {where}; name the file of the job, from {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    spark.sparkContext.addPyFile(str(path))
    return module


def _functions(module: Any) -> list[str]:
    return [name for name, _ in inspect.getmembers(module, inspect.isfunction) if not name.startswith("_")]


def main(arguments: list[str]) -> int:
    """Run the program; an error is a sentence on standard error, and an exit status."""
    try:
        return int(command.main(arguments, prog_name="run.py", standalone_mode=False) or FINE)
    except JobFailed as error:
        click.echo(f"error: {error}", err=True)
        return PROBLEMS
    except (CheckpointError, OSError, click.ClickException, KeyboardInterrupt) as error:
        failure = failure_of(error)
        click.echo(f"error: {failure.message}", err=True)
        return failure.status
    except ImportError as error:
        click.echo(f"error: {error}", err=True)
        return MISUSE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
