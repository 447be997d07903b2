"""The storage protocol and what is built on any storage.

``protocol`` says what a storage promises; ``addresses`` parses URLs; ``stats`` and ``instrumented``
count requests.
"""

from __future__ import annotations

from .addresses import (
    check_no_secrets,
    check_outside,
    checkpoint_address,
    is_id,
    split_id,
    stores_around,
    without_secrets,
)
from .instrumented import instrumented, read_input
from .protocol import (
    REFUSALS,
    TOP_LEVEL,
    CreateOutcome,
    Leftover,
    ListsNames,
    MakesDurable,
    ObjectInfo,
    OutputObject,
    ReadsAtOnce,
    Storage,
    TellsLeftovers,
    as_url,
    check_path,
    is_object_name,
    is_object_path,
    make_durable,
    names,
    names_after,
    open_storage,
    reads_at_once,
)
from .stats import Stats, retried, stats_of

__all__ = [
    "REFUSALS",
    "TOP_LEVEL",
    "CreateOutcome",
    "Leftover",
    "ListsNames",
    "MakesDurable",
    "ObjectInfo",
    "OutputObject",
    "ReadsAtOnce",
    "Stats",
    "Storage",
    "TellsLeftovers",
    "as_url",
    "check_no_secrets",
    "check_outside",
    "check_path",
    "checkpoint_address",
    "instrumented",
    "is_id",
    "is_object_name",
    "is_object_path",
    "make_durable",
    "names",
    "names_after",
    "open_storage",
    "read_input",
    "reads_at_once",
    "retried",
    "split_id",
    "stats_of",
    "stores_around",
    "without_secrets",
]
