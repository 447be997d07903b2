"""Runs a dataflow on Spark until it ends, fails or is stopped (``ckpt stop``); for spark-submit.

    spark-submit --master yarn tools/jobs/run.py flights.py:flights s3://bucket/store

The function ``flights()`` in ``flights.py`` returns the ``Dataflow``; one with a parameter is given
the SparkSession. The file goes to the executors with the job. An installed module is
``package.module:flights``.

Standard error gets a line per checkpoint (on a terminal one line that changes), standard output a
sentence about how the job ended. With ``--progress json`` all of it is JSON lines on standard
output (docs/json.md). Exit status: 0 the job ended or was stopped; 1 it failed or was refused; 2
misuse; 3 the storage failed; 143 it was told to end (SIGTERM) and got no checkpoint in time. Run
again, it goes on from the newest checkpoint. SIGTERM, also to spark-submit, takes a checkpoint
first: status 0.

``spark-submit`` puts both streams on its own standard output, and its log on standard error: ``2>
spark.log`` separates the two. An unconfigured log begins at warnings
(``stateformat.backends.spark.sessions``).
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import stateformat as sf
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.sessions import lent_session
from stateformat.errors import CheckpointError
from stateformat.tools.ckpt.exit_status import FINE, failure_of
from stateformat.tools.ckpt.functions import FunctionName
from stateformat.tools.ckpt.job_reports import Reporter
from stateformat.tools.ckpt.options import STORAGE_OPTIONS, Address, AddressType, options_for, storage_options
from stateformat.tools.ckpt.output import complain
from stateformat.tools.ckpt.programs import JobType, Microseconds, dataflow_of, run_options, runtime_options
from stateformat.words import label

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@click.command(
    help=__doc__.split("\n\n")[0] if __doc__ else None, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument("job", type=JobType())
@click.argument("store", type=AddressType("never"))
@run_options(
    click.option(
        "--least-seconds-per-epoch", "least_epoch_us", type=Microseconds(0), help="The shortest epoch. [default: 0]"
    ),
    click.option("--idle-seconds", "idle_us", type=Microseconds(0), help="The wait after an empty epoch. [default: 1]"),
)
def command(
    job: FunctionName,
    store: Address,
    *,
    progress: str,
    grace: float,
    start_from: Address | None,
    endpoint_url: str | None,
    option: tuple[tuple[str, Any], ...],
    **chosen: Any,
) -> int:
    """Run it; returns the exit status."""
    reporter = Reporter(progress, "error", whole_traces=True)
    logging.basicConfig(level=logging.WARNING, handlers=[reporter.handler])
    storage = storage_options(endpoint_url, option)
    others = () if start_from is None else (start_from.url,)
    try:
        opened = sf.open(store.url, **options_for(store.url, storage, others))
        options = runtime_options(store.url, job, storage, chosen, start_from)
        with lent_session(f"stateformat {job}") as spark:
            runtime = SparkRuntime(spark, opened, progress=reporter.progress, **options)
            imported = partial(_send_file, job, spark)
            flow = dataflow_of(job, spark=spark, imported=imported, hint=_MISSING, show_trace=True)
            return reporter.outcome(reporter.run(runtime, flow, grace))
    except (CheckpointError, OSError, KeyboardInterrupt) as error:
        return reporter.failure(error)


_MISSING: Final = "; install it, or give it to spark-submit: --py-files"
command.params += STORAGE_OPTIONS


def _send_file(job: FunctionName, spark: SparkSession) -> None:
    """Send the job's own file to the executors."""
    if job.is_file:
        spark.sparkContext.addPyFile(str(Path(job.where).resolve()))


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
