"""The savepoints below a store as JSON: pins, and those of jobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..documents import fault_document, history_document

if TYPE_CHECKING:
    from ..pins import Savepoint


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
