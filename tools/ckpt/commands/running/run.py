"""``ckpt run``: runs a dataflow in this process until it ends, fails or is stopped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from stateformat.pages.blocks import Under

from ...exit_status import FINE, trace_of
from ...options import Address, Session, command
from ...output import complain
from ...programs import JobType, dataflow_of, run_options, runtime_options

if TYPE_CHECKING:
    from stateformat.store import CheckpointStore

    from ...functions import FunctionName
    from ...job_reports import Reporter


@command("run", checkpoint="never", pandas=True, behind="job")
@click.argument("job", type=JobType())
@run_options(
    click.option("--unaligned", is_flag=True, help="Barriers overtake records on hash and rebalance edges."),
)
def run(
    session: Session,
    address: Address,
    *,
    job: FunctionName,
    progress: str,
    grace: float,
    start_from: Address | None,
    **chosen: Any,
) -> int:
    """Run a dataflow in this process.

    It runs until it ends, fails or is stopped.

    JOB is FILE.py:FUNCTION or MODULE:FUNCTION; the function returns the Dataflow. The job goes on
    from the newest checkpoint of STORE, which need not exist. An epoch here is the time between two
    checkpoints.

    Standard error gets a line per checkpoint (on a terminal one line that changes), standard output
    a sentence about how the job ended. With --progress json all of it is JSON lines on standard
    output. `ckpt stop` stops the job; so does Ctrl-C, without a checkpoint. On SIGTERM it takes one
    first; run again, the job goes on from there.

    Exit status: 0 the job ended or was stopped; 1 it failed or was refused; 2 misuse; 3 the storage
    failed; 130 interrupted; 143 SIGTERM, and no new checkpoint in time.
    """
    from stateformat.backends.local import LocalRuntime
    from stateformat.errors import CheckpointError

    from ...job_reports import Reporter, outcome_document

    reporter = Reporter(progress, "ckpt")
    store: CheckpointStore | None = None
    with _logged(reporter, session):
        try:
            store = session.store(address, *(() if start_from is None else (start_from.url,)))
            options = runtime_options(address.url, job, session.storage_options, chosen, start_from)
            flow = dataflow_of(job, show_trace=not session.verbose)
            runtime = LocalRuntime(store, progress=reporter.progress, **options)
            outcome = reporter.run(runtime, flow, grace)
        except (CheckpointError, OSError, KeyboardInterrupt) as error:
            if session.verbose and not isinstance(error, KeyboardInterrupt):
                complain(trace_of(error))
            return reporter.failure(error, None if store is None else _left_behind(store))
        if reporter.as_json:
            return reporter.outcome(outcome)
        reporter.end()
        session.output.show(outcome_document(outcome), lambda document: [Under(document["sentence"], (), top=True)])
    return FINE


@contextlib.contextmanager
def _logged(reporter: Reporter, session: Session) -> Iterator[None]:
    """Show warnings of the runtime meanwhile; with --verbose they are on standard error anyway."""
    logger = logging.getLogger("stateformat")
    shown = reporter.as_json or not session.verbose
    if shown:
        logger.addHandler(reporter.handler)
    try:
        yield
    finally:
        logger.removeHandler(reporter.handler)


def _left_behind(store: CheckpointStore) -> str:
    """What an interruption leaves: the end of a sentence."""
    from stateformat.errors import CheckpointError
    from stateformat.history import record_ids

    newest = 0
    with contextlib.suppress(CheckpointError, OSError):
        newest = max(record_ids(store.storage), default=0)
    if not newest:
        return "no checkpoint was published; run again, the job begins anew"
    return f"the newest checkpoint is {newest}; run again, the job goes on from it"
