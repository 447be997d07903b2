"""``ckpt savepoint``: asks the job of a store for a savepoint; the job goes on."""

from __future__ import annotations

from ...asking import ask_job, target_option, timeout_option
from ...options import Address, Session, command


@command("savepoint", checkpoint="never")
@target_option
@timeout_option
def savepoint(session: Session, address: Address, *, target: Address | None, timeout: float) -> int:
    """Ask a running job for a savepoint; the job keeps running.

    The job takes a checkpoint, and copies it to a store of its own while it keeps running. This
    copy is the savepoint, by default in savepoints/ below the store. The request is withdrawn on
    timeout, Ctrl-C, SIGTERM and SIGHUP; after --timeout it expires.

    A job that has finished is not asked. `ckpt pin` and `ckpt copy` make a savepoint of an existing
    checkpoint, and need no running job.

    Exit status: 0 the savepoint is made; 1 it failed, was refused, or the job has finished; 3 no
    run answered.
    """
    return ask_job(session, address, target, timeout, "savepoint", {})
