"""What a checkpoint has lost, and what continuing would give up, as a JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..documents import Document
from ..storage import Storage
from .elsewhere import listed_in
from .losing import Losses
from .without import Loss, Scope


def losses_document(losses: Losses, places: Iterable[Storage] = ()) -> Document:
    """Return the lost segments, which of ``places`` have some, and both ways to give them up.

    Places are listed, not read: only the names and sizes of their objects are checked.
    """
    found = listed_in(losses.segments, places)
    sizes = {each.path: each.size_bytes for each in losses.segments}
    return {
        "checkpoint_id": losses.record.checkpoint_id,
        "attempt_id": losses.record.attempt_id,
        "segments": [
            {"path": each.path, "size_bytes": each.size_bytes, "missing": not each.is_there} for each in losses.segments
        ],
        "copies": [
            {"url": url, "segments": len(paths), "bytes": sum(sizes[path] for path in paths)}
            for url, paths in found.items()
        ],
        "give_up": {scope: given_up_document(losses.losses(scope)) for scope in _SCOPES},
    }


_SCOPES: tuple[Scope, Scope] = ("rows", "keys")


def given_up_document(given: Sequence[Loss]) -> list[Document]:
    """Return what is given up of each state."""
    return [
        {
            "operator": loss.operator,
            "state": loss.state,
            "mode": loss.mode.value,
            "effect": loss.effect,
            "segments": loss.segments,
            "rows": loss.rows,
            "rows_besides": loss.rows_besides,
            "rows_kept": loss.rows_kept,
            "subtasks": [list(pair) for pair in loss.subtasks.ranges],
            "key_groups": [list(pair) for pair in loss.key_groups.ranges],
            "delta_only": loss.delta_only,
            "needed": loss.needed,
        }
        for loss in given
    ]


def put_back_document(again: Iterable[str], moved: Mapping[str, str]) -> list[Document]:
    """Return the segments that were put back, under their own paths or new ones."""
    found = [{"path": path, "new_path": None} for path in again]
    return [*found, *({"path": path, "new_path": new_path} for path, new_path in moved.items())]
