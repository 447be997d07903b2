"""The pages of ``ckpt get``: the rows of one key, and what happened to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from stateformat import words
from stateformat.words import label

from . import render
from .diff import column_line
from .render import Look
from .rows import draw_rows

Json = Mapping[str, Any]
KEY_ROWS_SHOWN: Final = 20
"""Rows, or changes of one checkpoint, on a page."""
_WORDS: Final = {
    "added": "added",
    "removed": "removed",
    "changed": "changed",
    "unchanged": "the columns changed",
    "present": "the oldest checkpoint that is left; they may be older",
    "unreadable": "cannot be read",
}


def key_text(key: Json) -> str:
    """A key as ``--key`` takes it: the value of one column, or an object."""
    value = next(iter(key.values())) if len(key) == 1 else key
    return label(json.dumps(value, ensure_ascii=False))


def draw_key(document: Json, look: Look) -> Iterator[str]:
    """The rows of a key in one checkpoint."""
    made = document["created_at_us"]
    when = f", {words.published(made, time.time_ns() // 1000)}" if made else ""
    head = [("store", label(document["store"])), ("checkpoint", f"{document['checkpoint_id']}{when}")]
    yield from render.page_head("Key", [*head, *_about(document, look)], look)
    yield ""
    count = document["row_count"]
    if not count:
        key = key_text(document["key"])
        yield from render.paragraph(f"No rows of key {key} in checkpoint {document['checkpoint_id']}.", look)
        return
    rows = [*islice(document["rows"], KEY_ROWS_SHOWN)]
    lines = [*draw_rows(_columns(document), rows, look, indent="  ")]
    yield from lines
    yield from _left_out(count - len(rows), "row", lines, look)


def draw_key_history(document: Json, look: Look) -> Iterator[str]:
    """What happened to a key, newest first."""
    history, count = document["history"], document["checkpoints"]
    first, last = document["oldest"]["checkpoint_id"], document["checkpoint_id"]
    span = f"{words.plural(count, 'checkpoint')}, {last}" + (f" down to {first}" if first != last else "")
    head = [("store", label(document["store"])), ("history", span)]
    yield from render.page_head("Key along the history", [*head, *_about(document, look)], look)
    lines: list[str] = []
    for entry in history:
        yield ""
        drawn = [*_entry(entry, document, look)]
        lines += drawn
        yield from drawn
    if not any(entry["error"] is None for entry in history):
        yield ""
        yield from render.paragraph(f"No rows of key {key_text(document['key'])} in what could be read.", look)
    yield from _left_out(0, "", lines, look)


def _about(document: Json, look: Look) -> Iterator[tuple[str, str]]:
    operator = words.named(document["operator"], document["operator_name"])
    kind = document["kind"] or ""
    columns = ", ".join(map(label, document["key_columns"]))
    yield "state", f"{operator} / {label(document['state'])}, {kind} by {columns}"
    group, subtask = document["key_group"], document["subtask"]
    place = f"key group {group} of {document['max_parallelism']}" if group is not None else ""
    yield "key", look.dotted(key_text(document["key"]), place, f"subtask {subtask}" if group is not None else "")


def _columns(document: Json) -> list[Json]:
    """The columns that tell rows of one key apart; all where there are no others."""
    others = [column for column in document["columns"] if column["name"] not in document["key_columns"]]
    return others or list(document["columns"])


def _entry(entry: Json, document: Json, look: Look) -> Iterator[str]:
    made, event = entry["created_at_us"], entry["event"]
    when = f", {words.clock(made)} UTC" if made else ""
    kind = entry["kind"]
    said = f" ({kind})" if kind not in (None, "checkpoint") else ""
    title = f"Checkpoint {entry['checkpoint_id']}{when}{said}"
    role = "problem" if entry["error"] else "title"
    yield from render.paragraph(look.paint(title, "title") + ": " + look.paint(_WORDS[event], role), look, indent="")
    if entry["error"]:
        yield from render.paragraph(words.sentence(entry["error"]["message"]), look)
        return
    for note in (*map(column_line, entry["column_changes"]), *_since(entry)):
        yield from render.paragraph(note, look, first="  ~ ", indent="    ")
    changes = [*islice(entry["changes"], KEY_ROWS_SHOWN)]
    signed = [*_signed(changes, plain=event == "present")]
    if signed:
        signs = [] if event == "present" else [sign for sign, _ in signed]
        yield from draw_rows(_columns(document), [row for _, row in signed], look, indent="  ", signs=signs)
    left = entry["change_count"] - len(changes)
    if left > 0:
        yield f"  {render.more(left, look, 'row' if event == 'present' else 'change')}"


def _signed(changes: Iterable[Json], *, plain: bool) -> Iterator[tuple[str, Json]]:
    """Each row with what happened to it: minus is how it was, plus how it is."""
    for change in changes:
        if change["before"] is not None:
            yield "-", change["before"]
        if change["after"] is not None:
            yield "" if plain else "+", change["after"]


def _since(entry: Json) -> Iterator[str]:
    since = entry["since"]
    if since is not None and since < entry["checkpoint_id"] - 1:
        yield f"since checkpoint {since}"


def _left_out(left: int, noun: str, lines: Iterable[str], look: Look) -> Iterator[str]:
    """What the page does not show, and how to see it."""
    cut = any(look["ellipsis"] in line for line in lines)
    if left > 0 or cut:
        yield ""
    if left > 0:
        yield f"  {render.more(left, look, noun)}"
    if cut:
        yield f"  {look['ellipsis']} marks values that are cut (--format json has them whole)"
