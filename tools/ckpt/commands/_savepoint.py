"""``ckpt export --as flink-savepoint``: a checkpoint goes back to Flink."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import click

from ..options import Address, Session
from ..output import Document
from ..text import Look, label, render

SAVEPOINT: Final = "flink-savepoint"


def export_savepoint(session: Session, address: Address, target: str) -> None:
    """Write a checkpoint as a canonical savepoint into an empty folder; show what was written."""
    from stateformat.backends.foreign.flink.writing import write_savepoint
    from stateformat.storage import folder_of, open_storage

    store, checkpoint = session.checkpoint(address)
    folder = folder_of(open_storage(target)) if target != "-" else None
    if folder is None:
        raise click.UsageError(f"{target!r} is no folder that files of Flink's can lie in; give a path or a URL")
    session.changes(f"{label(target)} has no savepoint, for its _metadata comes last")
    with session.output.progress(f"Writing a savepoint of checkpoint {checkpoint.id}", unit="rows"):
        done = write_savepoint(checkpoint, folder)
    document = {
        "store": store.url,
        "checkpoint_id": checkpoint.id,
        "format": SAVEPOINT,
        "path": target,
        "operators": done.operators,
        "files": done.files,
        "rows": done.rows,
        "bytes": done.bytes,
        "left_out": list(done.left_out),
    }
    session.output.show(document, draw)


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: what was written where, and what Flink's savepoint had that is left out."""
    facts = [
        ("store", label(document["store"])),
        ("savepoint", label(document["path"])),
        ("size", look.dotted(render.plural(document["rows"], "row"), render.plural(document["operators"], "operator"),
                             render.plural(document["files"], "file"), render.size(document["bytes"]))),
    ]  # fmt: skip
    if document["left_out"]:
        facts.append(("left out", ", ".join(label(name) for name in document["left_out"])))
    return render.page_head(f"Savepoint of checkpoint {document['checkpoint_id']}", facts, look)
