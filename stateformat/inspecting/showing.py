"""A store as notebooks show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from ..documents import history_document
from ..html import store_html

if TYPE_CHECKING:
    from ..history import Survey
    from ..storage import Storage

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
        return {
            "checkpoints": [history_document(record) for record in found.checkpoints[:SHOWN]],
            "older": max(0, len(found.listed) - SHOWN),
            "fault": None if fault is None else str(fault),
        }

    return store_html(store.storage.url, document)
