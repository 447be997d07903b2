"""A program: rewrite a small job on a Spark whose every task fails once, after it has written a
segment.

Prints the rows that functions were given, as the rewrite counted them, and how many tasks failed.
Run by ``test_rewrite_spark``, in a process of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from stateformat.backends.rewrite import RewriteSpec, Transform, rewrite
from stateformat.backends.spark.rewrite import SparkEngine
from stateformat.backends.spark.sessions import local_session
from stateformat.segments import WriteOptions
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from tests.rewrite import rewrite_jobs as jobs


class ClosesWithAnError:
    """An object that is written, whole and visible, before its writer dies."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def close(self) -> None:
        self.inner.close()
        raise RuntimeError("this task dies after it has written")

    def __enter__(self) -> ClosesWithAnError:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class FailingOnce:
    """A storage that lets the first attempt of every Spark task fail at its first segment."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> Any:
        return FailingOnce, (self.inner,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open_output(self, path: str) -> Any:
        task = TaskContext.get()
        made = self.inner.open_output(path)
        return ClosesWithAnError(made) if task is not None and task.attemptNumber() == 0 else made


def same(rows: pa.Table) -> pa.Table:
    """A transform."""
    return rows


def main(url: str) -> None:
    jobs.publish(CheckpointStore(open_storage(url)))
    store = CheckpointStore(FailingOnce(open_storage(url)))
    spark = local_session("retried", **{"spark.master": "local[2,3]"})
    spark.sparkContext.setLogLevel("OFF")
    spec = RewriteSpec(
        max_parallelism=32,
        transforms={place: Transform(same) for place in (("sums", "last"), ("sums", "seen"), ("names", "table"))},
        options=WriteOptions(inline_bytes_max=0),
    )
    done = rewrite(store, store.open(), spec, engine=SparkEngine(spark))
    written = {path.path for path in store.storage.list("segments/00000000000000000002/")}
    named = {row["path"] for row in jobs.handles_of(store.open())}
    print(*(one.read for one in done.transformed))
    print(done.segments, len(written - named))


if __name__ == "__main__":
    # Spark's workers must find FailingOnce under its module's name.
    from tests.rewrite.rewrite_retried import main as run

    run(sys.argv[1])
