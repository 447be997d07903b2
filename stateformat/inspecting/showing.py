"""A store as notebooks show it, and the savepoints below it as JSON: pins, and those of jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..documents import fault_document, history_document, reference
from ..pages.checkpoint import history_page
from ..pages.html import notebook

if TYPE_CHECKING:
    from ..history import Survey
    from ..pins import Savepoint
    from ..storage import Storage


def savepoints_document(found: Iterable[Savepoint]) -> list[dict[str, Any]]:
    """Return the savepoints of ``store.pins()``, each with its newest checkpoint."""
    return [_document(one) for one in found]


def _document(one: Savepoint) -> dict[str, Any]:
    fault = one.fault
    return {
        "name": one.name,
        "url": one.url,
        "claimed": one.is_claimed,
        "records": one.checkpoints,
        "checkpoint": None if one.record is None else history_document(one.record),
        "fault": None if fault is None else fault_document(fault),
    }


SHOWN: Final = 10
"""How many checkpoints are read and shown."""


class Surveyed(Protocol):
    """A ``CheckpointStore``, which this module may not import."""

    storage: Storage

    def survey(self, limit: int | None = None) -> Survey:
        """Return its records."""


def survey_document(url: str, storage: Storage, found: Survey, limit: int | None) -> dict[str, Any]:
    """Return what ``ckpt history`` says of a store, without its savepoints."""
    fault = found.fault(storage)
    records = found.checkpoints[:limit]
    return {
        "store": url,
        "job_id": records[0].job_id if records else "",
        "job_name": records[0].job_name if records else "",
        "checkpoints": [history_document(record) for record in found.chain[:limit]],
        "cut_off": [history_document(record) for record in records[len(found.chain) :]],
        "damaged": [{"checkpoint_id": one, **fault_document(found.unreadable[one])} for one in found.damaged],
        "lost": [reference(ref) for ref in found.lost],
        "strays": None if limit is not None else [reference(stray) for stray in found.strays],
        "savepoints": [],
        "ended_by": None if fault is None else fault_document(fault),
    }


def shown(store: Surveyed) -> str:
    """Return the newest checkpoints of a store as HTML. Never raises, reads no manifest."""

    def document() -> dict[str, Any]:
        found = store.survey(SHOWN)
        older = max(0, len(found.listed) - SHOWN)
        return {**survey_document(store.storage.url, store.storage, found, SHOWN), "older": older}

    return notebook(f"Store {store.storage.url}", lambda: history_page(document(), time.time_ns() // 1000))
