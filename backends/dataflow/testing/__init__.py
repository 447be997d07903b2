"""A harness for testing operators: one operator, driven by hand, with the machinery of a job.

::

    columns = {"city": pa.string(), "n": pa.int64()}
    harness = OperatorHarness(Totals(), columns, key_by="city", parallelism=2)
    harness.push([{"city": "Oslo", "n": 3}]).advance(1_000_000)
    assert harness.take_output().to_pylist() == [...]
    again = OperatorHarness.restore(harness.snapshot(), parallelism=3)

Every subtask of the operator lives in an
:class:`~stateformat.backends.dataflow.chain.chain.OperatorChain`, as in both executors. Records
reach the subtasks by the routing of a real edge. Snapshots are checkpoints of the format, published
to a store in memory, and a restore is planned and read as that of a job is. Nothing runs between
calls.
"""

from __future__ import annotations

from .harness import HarnessSnapshot, OperatorHarness

__all__ = ["HarnessSnapshot", "OperatorHarness"]


def __dir__() -> list[str]:
    return __all__
