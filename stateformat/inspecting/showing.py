"""A store as notebooks show it, and the savepoints below it as JSON: pins, and those of jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..documents import fault_document, history_document
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


def shown(store: Surveyed) -> str:
    """Return the newest checkpoints of a store as HTML. Never raises, reads no manifest."""

    def document() -> dict[str, Any]:
        found = store.survey(SHOWN)
        fault = found.fault(store.storage)
        entries = [history_document(record) for record in found.checkpoints[:SHOWN]]
        return {
            "store": store.storage.url,
            **{name: entries[0][name] if entries else "" for name in ("job_id", "job_name")},
            "checkpoints": entries,
            "older": max(0, len(found.listed) - SHOWN),
            "ended_by": None if fault is None else fault_document(fault),
            **dict.fromkeys(("cut_off", "damaged", "lost", "savepoints", "strays"), ()),
        }

    return notebook(f"Store {store.storage.url}", lambda: history_page(document(), time.time_ns() // 1000))
