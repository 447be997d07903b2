"""The checkpoints of a store: which exist, which are damaged, and what may be deleted.

Read ``records``, ``surveying``, ``retention``. ``committables`` says what may still be committed,
``following`` what is new since the last look.
"""

from __future__ import annotations

from .committables import Wanted as Wanted, carried_committables as carried_committables
from .following import (
    Came as Came,
    Follower as Follower,
    Passed as Passed,
    Seen as Seen,
    Unreadable as Unreadable,
    Withdrawn as Withdrawn,
)
from .records import (
    NO_RECORDS as NO_RECORDS,
    UNREADABLE as UNREADABLE,
    Ids as Ids,
    find_record as find_record,
    ids_from as ids_from,
    newest_record as newest_record,
    record_exists as record_exists,
    record_ids as record_ids,
    require_records as require_records,
)
from .retention import (
    Garbage as Garbage,
    RememberedUses as RememberedUses,
    Uses as Uses,
    collect_garbage as collect_garbage,
    expire as expire,
    manifests_under as manifests_under,
    reachable as reachable,
    record_and_manifest as record_and_manifest,
)
from .surveying import (
    Survey as Survey,
    chain_down_to as chain_down_to,
    record_lost as record_lost,
    record_of as record_of,
    survey as survey,
)
