"""How many checkpoints a run keeps if its user has not said so.

A store that the job begins keeps :data:`KEPT_BY_DEFAULT`. Every record of such a run says so in a
property, which restarts read. Any other store that holds more keeps all, since its user may count
on every checkpoint. So does a store that began as a savepoint, which belongs to the user.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from stateformat.history import find_record, record_ids
from stateformat.model import KEEP_PROPERTY, CheckpointKind
from stateformat.publication import CommitPermit
from stateformat.store import CheckpointStore

from .options import KEPT_BY_DEFAULT, Keep, Schedule

logger = logging.getLogger(__name__)

BY_DEFAULT: Final = {KEEP_PROPERTY: "default"}
"""The properties of checkpoints published under the default."""


def decide_keep(store: CheckpointStore, permit: CommitPermit | None, schedule: Schedule, *, claim: bool) -> Schedule:
    """The schedule for this start; ``keep`` is None, with a warning, if the default must not apply.

    ``claim``: a savepoint in the store was handed over to the job.
    """
    if schedule.keep is not Keep.DEFAULT or permit is None or KEEP_PROPERTY in permit.record.properties:
        return schedule
    ids = record_ids(store.storage)
    why = ""
    if len(ids) > KEPT_BY_DEFAULT:
        why = "was begun without a limit"
    elif ids and not claim:
        try:
            oldest = find_record(store.storage, ids[0])
        except (DamagedCheckpoint, UnsupportedFormat):
            why = f"holds a record that cannot be read, {ids[0]}"
        else:
            if oldest is not None and oldest.kind is CheckpointKind.SAVEPOINT:
                why = f"began as a savepoint, checkpoint {ids[0]}, which is yours"
    if not why:
        return schedule
    logger.warning(
        "%s %s, so all of its %d checkpoints are kept until you say how many (keep, None or --keep all for all); "
        "`ckpt gc %s --keep %d --delete` removes all but the newest %d",
        store.url,
        why,
        len(ids),
        store.url,
        KEPT_BY_DEFAULT,
        KEPT_BY_DEFAULT,
    )
    return replace(schedule, keep=None)


def keep_count(schedule: Schedule) -> int | None:
    """How many checkpoints a run keeps; None: all."""
    return KEPT_BY_DEFAULT if schedule.keep is Keep.DEFAULT else schedule.keep


def keep_properties(schedule: Schedule) -> dict[str, str]:
    """The properties of every record that the run publishes."""
    return dict(BY_DEFAULT) if schedule.keep is Keep.DEFAULT else {}
