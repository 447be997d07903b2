"""``ckpt stop``: asks the job of a store to stop with a savepoint."""

from __future__ import annotations

import click

from ...asking import ask_job, target_option, timeout_option
from ...options import Address, Session, command


@command("stop", checkpoint="never")
@click.option("--drain", is_flag=True, help="End the job for good: fire all timers, finish every operator.")
@target_option
@timeout_option
@click.option(
    "--even-if-stopped",
    is_flag=True,
    help="Ask even if the newest checkpoint is a stop: the job was resumed, and has not published yet.",
)
def stop(
    session: Session, address: Address, *, drain: bool, target: Address | None, timeout: float, even_if_stopped: bool
) -> int:
    """Ask a running job to stop with a savepoint, and wait.

    The job stops at its next checkpoint, which is copied to a store of its own: the savepoint, by
    default in savepoints/ below the store. Without --drain nothing is flushed, and the job can go
    on from there. The request is withdrawn on timeout, Ctrl-C, SIGTERM and SIGHUP. After --timeout
    it expires: a run that starts later does not obey it.

    A job that has already stopped or finished is not asked.

    Exit status: 0 stopped or finished; 1 it failed, was refused, or is not what was asked for; 3 no
    run answered, or the savepoint is missing.
    """
    from stateformat.model import StopMode

    mode = StopMode.DRAIN if drain else StopMode.NO_DRAIN
    return ask_job(session, address, target, timeout, "stop", {"mode": mode}, if_stopped=even_if_stopped)
