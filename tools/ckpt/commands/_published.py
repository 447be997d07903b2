"""What commands say that have published a checkpoint: which one, from which, and what is different about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..output import Document
from ..text import Look, count, facts, heading, label, paragraph, plural, size

if TYPE_CHECKING:
    from stateformat.graph import JobGraph
    from stateformat.model import Record


def published(store: str, record: Record, source: Document, graph_before: JobGraph, notes: Sequence[str]) -> Document:
    """The document: the new checkpoint, its source (store, id, attempt), the operators that changed, notes."""
    from ..documents import operator_size, published_document

    before = {operator.uid: operator for operator in graph_before.operators}
    changes = []
    for operator in record.graph.operators:
        old, new = before.get(operator.uid), operator_size(operator)
        if old is None or operator_size(old) != new:
            changes.append({"uid": operator.uid, "before": None if old is None else operator_size(old), "after": new})
    return {**published_document(store, record), "source": source, "changes": changes, "notes": list(notes)}


def draw_published(document: Document, look: Look) -> Iterator[str]:
    """The page: what now stands where, and each operator that changed."""
    source = document["source"]
    yield heading(f"Published checkpoint {document['checkpoint_id']}", look)
    yield ""
    elsewhere = f" of {label(source['store'])}" if source["store"] != document["store"] else ""
    totals = document["totals"]
    yield from facts(
        [
            ("store", label(document["store"])),
            ("kind", document["kind"]),
            ("content of", f"checkpoint {source['checkpoint_id']}{elsewhere}"),
            ("parent", str(document["parent"]["checkpoint_id"]) if document["parent"] else "none"),
            (
                "size",
                f" {look['dot']} ".join(
                    [plural(totals["rows"], "row"), size(totals["bytes"]), plural(totals["segments"], "segment")]
                ),
            ),
            *((("operators" if i == 0 else ""), text) for i, text in enumerate(_changes(document["changes"], look))),
        ],
        look,
    )
    for note in document["notes"]:
        yield ""
        yield from paragraph(note[:1].upper() + note[1:] + ("" if note.endswith(".") else "."), look)


CHANGES_SHOWN: Final = 20
"""Operators that changed on a page; JSON lists all."""


def _changes(changes: Sequence[Document], look: Look) -> Iterator[str]:
    yield from (_change(change, look) for change in changes[:CHANGES_SHOWN])
    if len(changes) > CHANGES_SHOWN:
        yield f"{look['ellipsis']} and {count(len(changes) - CHANGES_SHOWN)} more (--format json lists all)"


def _change(change: Document, look: Look) -> str:
    """One operator before and after."""

    def one(entry: Any) -> str:
        return f"{entry['parallelism']} of {entry['max_parallelism']} {entry['status'].replace('_', ' ')}"

    name, before = label(change["uid"]), change["before"]
    return f"{name}: {one(before) if before else 'new name'} {look['arrow']} {one(change['after'])}"


__all__ = ["draw_published", "published"]
