"""The page of ``ckpt top``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stateformat import words
from stateformat.words import label

from . import render
from .key import key_text
from .render import Column, Look

Json = Mapping[str, Any]
STATES_SHOWN: Final = 20
_BAR: Final = 16
_COMMAND_MAX: Final = 400
"""A longer command, for a key of a page of text, helps nobody."""


def draw_top(document: Json, look: Look) -> Iterator[str]:
    """Each state with its keys, key groups and subtasks; then how to look at the first key."""
    made = document["created_at_us"]
    when = f", {words.published(made, time.time_ns() // 1000)}" if made else ""
    facts = [("store", label(document["store"])), ("checkpoint", f"{document['checkpoint_id']}{when}")]
    yield from render.page_head(f"Most {document['by']}", facts, look)
    states = document["states"]
    for state in states[:STATES_SHOWN]:
        yield ""
        yield from _state(state, document["by"], look)
    if len(states) > STATES_SHOWN:
        yield ""
        yield render.more(len(states) - STATES_SHOWN, look, "state")
    yield from _next(document, look)


def _state(state: Json, by: str, look: Look) -> Iterator[str]:
    name = f"{words.named(state['operator'], state['operator_name'])} / {label(state['state'])}"
    sizes = look.dotted("" if state["rows"] is None else words.plural(state["rows"], "row"), words.size(state["bytes"]))
    kind = f"{state['mode']} {state['kind'] or ''}".strip().replace("_", " ")
    yield look.paint(render.shorten(name, look.width - 2, look), "title")
    yield f"  {look.dotted(kind, sizes)}"
    if not (state["rows"] or state["bytes"]):
        return
    measure = "bytes" if state["rows"] is None else by
    if state["keys"] is not None:
        yield from _keys(state["keys"], by, look)
    groups, subtasks = state["key_groups"], state["subtasks"]
    if groups is not None:
        head = f"{words.count(groups['with_rows'])} of {words.plural(groups['count'], 'key group')} with rows"
        yield from _ranking(head, "group", groups, measure, look)
    if state["mode"] not in ("coordinator", "committables"):
        head = f"{words.count(subtasks['with_rows'])} of {words.plural(subtasks['count'], 'subtask')} with rows"
        yield from _ranking(head, "subtask", subtasks, measure, look)


def _keys(keys: Json, by: str, look: Look) -> Iterator[str]:
    yield ""
    if keys["each"] is not None:
        each = "one row" if by == "rows" else words.plural(keys["each"], "byte")
        more = "; --by bytes tells their size" if by == "rows" else ""
        yield from render.paragraph(f"Every key has {each}{more}.", look)
        return
    if not keys["count"]:
        yield "  no keys"
        return
    amount = words.plural(keys["rows"], "row") if by == "rows" else words.size(keys["bytes"])
    yield f"  {words.plural(keys['count'], 'key')} with {amount}{_skew(keys, look)}"
    columns = [Column("key", flexible=True), Column("group", right=True), Column("rows", right=True)]
    columns += [Column("bytes", right=True)] if by == "bytes" else []
    top = keys["greatest"][0][by]
    rows = [
        [
            key_text(entry["key"]),
            str(entry["key_group"]),
            words.count(entry["rows"]),
            *([words.size(entry["bytes"])] if by == "bytes" else []),
            render.bar(entry[by], top, look, width=_BAR),
        ]
        for entry in keys["greatest"]
    ]
    yield from render.table([*columns, Column("", optional=1)], rows, look, indent="    ")


def _ranking(head: str, title: str, found: Json, measure: str, look: Look) -> Iterator[str]:
    """Key groups or subtasks, those with most first."""
    yield ""
    yield f"  {head}{_skew(found, look)}"
    is_group = title == "group"
    columns = [Column(title, right=True), Column("subtask" if is_group else "key groups", right=is_group)]
    columns += [Column("rows", right=True), Column("bytes", right=True), Column("", optional=1)]
    top = max([entry[measure] or 0 for entry in found["greatest"]], default=0)
    rows = [
        [
            str(entry["key_group" if is_group else "subtask"]),
            str(entry["subtask"]) if is_group else _range(entry),
            words.count(entry["rows"]),
            words.size(entry["bytes"]),
            render.bar(entry[measure], top, look, width=_BAR),
        ]
        for entry in found["greatest"]
    ]
    if not is_group and not any(row[1] for row in rows):
        columns, rows = [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in rows]
    yield from render.table(columns, rows, look, indent="    ")


def _range(entry: Json) -> str:
    first, last = entry["first_group"], entry["last_group"]
    return "" if first is None else words.ranges([(first, last)])


def _skew(found: Json, look: Look) -> str:
    return f", the greatest {found['skew']:.1f} {look['times']} mean" if found["skew"] >= 1.05 else ", all about even"


def _next(document: Json, look: Look) -> Iterator[str]:
    """The command that shows the rows of the first key."""
    for state in document["states"]:
        for entry in (state["keys"] or {}).get("greatest", ())[:1]:
            store = f"{document['store']}@{document['checkpoint_id']}"
            given = ("--operator", state["operator"], "--state", state["state"], "--key", key_text(entry["key"]))
            command = " ".join(["ckpt get", *map(shlex.quote, map(label, (store, *given)))])
            if len(command) <= _COMMAND_MAX:
                yield ""
                yield from render.paragraph(f"`{command}` shows its rows.", look, indent="")
            return
