"""Rows as the state of a job: the first checkpoint of a store, made from a batch of history.

Users call ``bootstrap``, with ``Rows`` if the rows of a state need options. Read ``inputs`` (which
rows fit a state, and what identifies them), then ``bootstrap``.
``stateformat.backends.spark.bootstrap`` is the same function for Spark DataFrames.
"""

from __future__ import annotations

from .bootstrap import (
    Bootstrapped,
    Engine,
    ThreadEngine,
    Written,
    bootstrap,
    conformed,
    deal,
    source_snapshots,
    source_states,
    write_place,
)
from .inputs import OnDuplicate, Rows, StateInput, columns_of

__all__ = [
    "Bootstrapped",
    "Engine",
    "OnDuplicate",
    "Rows",
    "StateInput",
    "ThreadEngine",
    "Written",
    "bootstrap",
    "columns_of",
    "conformed",
    "deal",
    "source_snapshots",
    "source_states",
    "write_place",
]


def __dir__() -> list[str]:
    return __all__
