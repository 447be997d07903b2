"""Which failures a job tries again: unlucky ones, and none that another try cannot help."""

from __future__ import annotations

import errno

import pytest

from stateformat.backends.dataflow.chain.errors import OperatorError, is_for_good, may_pass
from stateformat.backends.local import JobFailed
from stateformat.backends.runtime.reports import RestartPolicy, RunDiscarded
from stateformat.errors import ErrorKind, OutcomeUnknown, StorageError
from tests.local_jobs import Line, rows


def refused(kind: ErrorKind = ErrorKind.STORAGE_REFUSED) -> StorageError:
    return StorageError("cannot create the record: not permitted", kind=kind)


def full() -> StorageError:
    error = refused()
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


def of(hook: str, raised: Exception) -> OperatorError:
    error = OperatorError.of(raised, operator="out", subtask=None, hook=hook)
    error.__cause__ = raised
    return error


@pytest.mark.parametrize(
    ("error", "at_once", "may_help"),
    [
        (ImportError("no module named 'mine'"), True, False),
        (refused(), True, True),
        (refused(ErrorKind.STORAGE_UNSUITABLE), True, True),
        (of("commit", refused()), True, True),
        (full(), False, True),
        (StorageError("no connection"), False, True),
        (OutcomeUnknown("it may exist"), False, True),
        (of("commit", TimeoutError("no answer")), False, True),
        (of("commit", RuntimeError("the other system is busy")), False, True),
        (of("commit", PermissionError("no right")), False, False),
        (of("commit", TypeError("'int' is not iterable")), False, False),
        (of("commit", KeyError("b")), False, False),
        (of("process", ValueError("no such luck")), False, False),
        (of("process", MemoryError()), False, True),
    ],
    ids=str,
)
def test_hopeless_is_told_from_unlucky(error: Exception, at_once: bool, may_help: bool) -> None:
    assert (is_for_good(error), at_once or may_pass(error)) == (at_once, at_once or may_help)
    policy = RestartPolicy("job", max_restarts=9)
    tries = 1
    while policy.on_failure(error, 0) is None:
        tries += 1
    # What is not said to be unlucky is tried twice: the same once more with nothing in between.
    assert tries == (1 if at_once else 10 if may_help else 2)


def test_a_store_that_refuses_the_record_fails_the_job_at_once() -> None:
    line = Line([rows(1), rows(2)])
    line.bench.storage.inner.create = lambda *_: (_ for _ in ()).throw(refused())  # type: ignore[method-assign]
    with pytest.raises(JobFailed, match=r"retrying cannot help: .*cannot create the record: not permitted"):
        line.run(max_restarts=9)


def test_a_discarded_run_is_judged_by_what_was_raised() -> None:
    discarded = RunDiscarded("cannot create the record", counted=True)
    discarded.__cause__ = refused()
    assert RestartPolicy("job", max_restarts=9).on_failure(discarded, 0) is not None
