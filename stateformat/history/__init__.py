"""The checkpoints of a store: which there are, which are damaged, and what may be deleted.

Read ``records``, ``survey``, ``retention``; ``committables`` says what may still be committed.
"""

from __future__ import annotations

from .committables import Wanted, carried_committables
from .records import (
    UNREADABLE,
    Ids,
    chain_down_to,
    find_record,
    ids_from,
    newest_record,
    record_exists,
    record_ids,
    record_of,
    require_records,
)
from .retention import Garbage, collect_garbage, expire, manifests_under, reachable
from .survey import Survey, record_lost, survey

__all__ = [
    "UNREADABLE",
    "Garbage",
    "Ids",
    "Survey",
    "Wanted",
    "carried_committables",
    "chain_down_to",
    "collect_garbage",
    "expire",
    "find_record",
    "ids_from",
    "manifests_under",
    "newest_record",
    "reachable",
    "record_exists",
    "record_ids",
    "record_lost",
    "record_of",
    "require_records",
    "survey",
]
