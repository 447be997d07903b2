"""What the format asks of a storage, how a URL finds one, and how its requests are counted.

Read ``protocol`` first, then ``addresses``, ``stats``, ``instrumented`` and ``remembered``.
"""

from __future__ import annotations

from .addresses import (
    as_url,
    check_no_secrets,
    check_outside,
    checkpoint_address,
    is_id,
    lies_in,
    open_storage,
    split_id,
    split_name,
    stores_around,
    without_secrets,
)
from .instrumented import instrumented, read_input
from .protocol import (
    REFUSALS,
    TOP_LEVEL,
    CreateOutcome,
    HasFolder,
    HoldsSavepoints,
    Leftover,
    ListsNames,
    MakesDurable,
    ObjectInfo,
    OutputObject,
    ReadsAtOnce,
    Storage,
    TellsLeftovers,
    check_path,
    check_relative,
    folder_of,
    is_object_name,
    is_object_path,
    make_durable,
    names,
    names_after,
    reads_at_once,
)
from .remembered import remembered
from .stats import Stats, retried, stats_of

__all__ = [
    "REFUSALS",
    "TOP_LEVEL",
    "CreateOutcome",
    "HasFolder",
    "HoldsSavepoints",
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
    "check_relative",
    "checkpoint_address",
    "folder_of",
    "instrumented",
    "is_id",
    "is_object_name",
    "is_object_path",
    "lies_in",
    "make_durable",
    "names",
    "names_after",
    "open_storage",
    "read_input",
    "reads_at_once",
    "remembered",
    "retried",
    "split_id",
    "split_name",
    "stats_of",
    "stores_around",
    "without_secrets",
]
