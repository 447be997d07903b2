"""The pages of ``ckpt export``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from stateformat import words
from stateformat.words import label

from . import render
from .render import Column, Look

Document = dict[str, Any]
SHOWN: Final = 20
"""States, and notes, that a page lists."""
_IDS_SHOWN: Final = 6


def draw_file(document: Document, look: Look) -> Iterator[str]:
    """The page of one file: what was written where."""
    owner = "all subtasks" if document["subtask"] is None else f"subtask {document['subtask']}"
    length = f"{words.size(document['bytes'])} of {document['format']}"
    facts = [
        ("store", label(document["store"])),
        ("state", f"{label(document['operator'])} / {label(document['state'])}, {owner}"),
        ("where", label(document["where"] or "")),
        ("file", label(document["path"])),
        ("size", look.dotted(words.plural(document["rows"], "row"), length)),
    ]
    return render.page_head(f"Exported from {_checkpoints(document['checkpoint_ids'])}", facts, look)


def draw_folder(document: Document, look: Look) -> Iterator[str]:
    """The page of a folder: what became of each state, and what is not as it was."""
    states = document["states"]
    written = sum(len(state["added"]) > 0 for state in states)
    size = look.dotted(
        words.plural(document["rows"], "row"),
        words.plural(document["files"], "file"),
        f"{words.size(document['bytes'])} of {document['format']}",
    )
    facts = [
        ("store", label(document["store"])),
        ("where", label(document["where"] or "")),
        ("folder", label(document["path"])),
        ("catalog", label(document["catalog"] or "")),
        ("added", size if written else "nothing: all of it was already there"),
    ]
    yield from render.page_head(f"Exported from {_checkpoints(document['checkpoint_ids'])}", facts, look)
    yield ""
    columns = [
        Column("state", flexible=True),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column("checkpoints added", optional=1),
        Column("in", flexible=True),
    ]
    rows = [_row(state, document["path"]) for state in states[:SHOWN]]
    # One state lies in the folder itself, and the title names its checkpoint.
    needed = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    yield from render.table(columns[:needed], [row[:needed] for row in rows], look)
    if len(states) > SHOWN:
        yield f"  {render.more(len(states) - SHOWN, look)}"
    notes = [(state, note) for state in states for note in state["notes"]]
    if notes:
        yield ""
        for state, note in notes[:SHOWN]:
            name = f"{state['operator']}/{state['state']}"
            yield from render.paragraph(label(f"{name}: {note['column']} {note['message']}"), look)
        if len(notes) > SHOWN:
            yield f"  {render.more(len(notes) - SHOWN, look)}"


def _row(state: Document, folder: str) -> list[str]:
    there = state["path"].removeprefix(folder).strip("/")
    name = label(f"{state['operator']} / {state['state']}")
    if not state["added"]:
        return [name, "", "", "was there", label(there)]
    return [name, words.count(state["rows"]), words.size(state["bytes"]), _ids(state["added"]), label(there)]


def _checkpoints(ids: list[int]) -> str:
    if len(ids) == 1:
        return f"checkpoint {ids[0]}"
    return f"checkpoints {ids[0]} to {ids[-1]}"


def _ids(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:_IDS_SHOWN]))
    return shown if len(ids) <= _IDS_SHOWN else f"{len(ids)}, {ids[0]} to {ids[-1]}"


def draw_savepoint(document: Document, look: Look) -> Iterator[str]:
    """The page: what was written where, and what Flink's savepoint had that is left out."""
    facts = [
        ("store", label(document["store"])),
        ("savepoint", label(document["path"])),
        ("size", look.dotted(words.plural(document["rows"], "row"), words.plural(document["operators"], "operator"),
                             words.plural(document["files"], "file"), words.size(document["bytes"]))),
    ]  # fmt: skip
    if document["left_out"]:
        facts.append(("left out", ", ".join(label(name) for name in document["left_out"])))
    return render.page_head(f"Savepoint of checkpoint {document['checkpoint_id']}", facts, look)
