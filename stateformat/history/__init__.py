"""The checkpoints of a store: which exist, which are damaged, and what may be deleted.

Read ``records``, then ``retention``; ``below`` searches a folder that is none.
"""

from __future__ import annotations

from .below import Below as Below, Place as Place, places_below as places_below
from .records import (
    NO_RECORDS as NO_RECORDS,
    UNREADABLE as UNREADABLE,
    Ids as Ids,
    Survey as Survey,
    chain_down_to as chain_down_to,
    find_record as find_record,
    ids_from as ids_from,
    newest_record as newest_record,
    record_exists as record_exists,
    record_ids as record_ids,
    record_lost as record_lost,
    record_of as record_of,
    require_records as require_records,
    survey as survey,
)
from .retention import (
    Came as Came,
    Follower as Follower,
    Garbage as Garbage,
    Passed as Passed,
    RememberedUses as RememberedUses,
    Seen as Seen,
    Unreadable as Unreadable,
    Uses as Uses,
    Wanted as Wanted,
    Withdrawn as Withdrawn,
    carried_committables as carried_committables,
    collect_garbage as collect_garbage,
    expire as expire,
    manifests_under as manifests_under,
    reachable as reachable,
    record_and_columns as record_and_columns,
)
