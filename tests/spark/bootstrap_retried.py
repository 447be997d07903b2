"""A program: bootstrap on a Spark that kills every task that writes, once, after it has written.

First the driver fails before it publishes; then it is run again. Prints how many segments are
there, and how many the checkpoint names. Run by ``test_bootstrap_on_spark``, in a process of its
own.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from pyspark import TaskContext

from stateformat.backends.connectors import CollectSink
from stateformat.backends.spark import bootstrap, local_session
from stateformat.errors import StorageError
from stateformat.segments import WriteOptions
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from tests.bootstrap.history_jobs import orders, shop_flow, shop_states
from tests.rewrite.rewrite_retried import ClosesWithAnError


class Killed(ClosesWithAnError):
    """An object that is written, whole and visible, before its writer is killed."""

    def close(self) -> None:
        self.inner.close()
        os.kill(os.getpid(), signal.SIGKILL)


class KillsOnce:
    """A storage that kills the first attempt of every Spark task at its first segment.

    With ``fails`` no manifest can be written.
    """

    def __init__(self, inner: Any, *, fails: bool) -> None:
        self.inner = inner
        self.fails = fails

    def __reduce__(self) -> Any:
        return _again, (self.inner, self.fails)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open_output(self, path: str) -> Any:
        if self.fails and path.startswith("manifests/"):
            raise StorageError("the driver is interrupted")
        task = TaskContext.get()
        made = self.inner.open_output(path)
        return Killed(made) if task is not None and task.attemptNumber() == 0 else made


def _again(inner: Any, fails: bool) -> KillsOnce:
    return KillsOnce(inner, fails=fails)


def main(url: str) -> None:
    """Fail, then succeed."""
    spark = local_session("retried", **{"spark.master": "local[2,3]"})
    spark.sparkContext.setLogLevel("OFF")
    states = {
        name: spark.createDataFrame(rows) for name, rows in shop_states(orders(300)).items() if name != "shop/ours"
    }
    for fails in (True, False):
        store = CheckpointStore(KillsOnce(open_storage(url), fails=fails))
        try:
            bootstrap(store, shop_flow(orders(300), CollectSink()), states, options=WriteOptions(inline_bytes_max=0))
        except StorageError as error:
            print(error, [*store.storage.list("checkpoints/")])
    written = {one.path for one in store.storage.list("segments/")}
    named = {path for path in store.open().handles["path"].to_pylist() if path}
    print(len(written), len(named), named <= written)


if __name__ == "__main__":
    # Spark's workers must find KillsOnce under its module's name.
    from tests.spark.bootstrap_retried import main as run

    run(sys.argv[1])
