"""Rows as the state of a job: the first checkpoint of a store, made from a batch of history.

Users call ``bootstrap``, with ``Rows`` if the rows of a state need options. Read ``declared`` (the
states of a dataflow, by name), ``inputs`` (which rows fit a state, and what identifies them),
``latest``, ``work`` (what one task does), ``threads`` (the engine in this process), ``sources`` and
``bootstrap``. ``stateformat.backends.spark.bootstrap`` is the same function for Spark DataFrames.
"""

from __future__ import annotations

from .bootstrap import Bootstrapped, Engine, bootstrap
from .declared import columns_of
from .inputs import OnDuplicate, Rows, StateInput
from .sources import source_snapshots, source_states
from .threads import ThreadEngine
from .work import Written, conformed, deal, write_place

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
