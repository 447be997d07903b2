"""How ``ckpt inspect`` shows what a runtime's own states hold. Drawn from the JSON document alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .render import Column, Look, count, label, plural, table

Json = Mapping[str, Any]

LINES: Final = 20
"""Inputs, or attempts, shown of one state; JSON lists all."""


def holds_line(holds: Json, look: Look) -> str:
    """What is in the checkpoint that only a run uses up, in one line; nothing where there is nothing of it."""
    waiting = [entry for entry in holds["in_flight"] if entry["rows"]]
    parts = [
        plural(holds["timers"], "timer") if holds["timers"] else "",
        f"{plural(sum(entry['rows'] for entry in waiting), 'record')} in flight on {plural(len(waiting), 'edge')}"
        if waiting
        else "",
        plural(holds["committables"], "committable") if holds["committables"] else "",
    ]
    return f" {look['dot']} ".join(filter(None, parts))


def contents_facts(contents: Json, look: Look) -> Iterator[tuple[str, str]]:
    """What fits into lines of ``name  value``."""
    if "unread" in contents:
        yield "contents", f"not looked at: {label(contents['unread'])}"
    if contents.get("timers"):
        first, last = _time(contents, "first"), _time(contents, "last")
        due = first if first == last else f"{first} to {last}"
        yield "due", f"{due}, {plural(contents['timers'], 'timer')}"
    if "channels" in contents:
        senders, receivers = plural(contents["senders"], "sender"), plural(contents["receivers"], "receiver")
        yield "channels", f"{count(contents['channels'])}, of {senders} and {receivers}"
    if "messages" in contents:
        yield "messages", f"{plural(contents['messages'], 'message')} on the way to the coordinator"
    for i, entry in enumerate(contents.get("prepared", ())[:LINES]):
        under = f"under checkpoint {entry['checkpoint_id']}, attempt {entry['attempt_id']}"
        yield "prepared" if i == 0 else "", f"{plural(entry['rows'], 'committable')} {under}"
    yield from _left(contents.get("prepared", ()), look)


def contents_table(contents: Json, look: Look) -> Iterator[str]:
    """The inputs of an operator: how far each is, and whether it has ended."""
    inputs: Sequence[Json] = contents.get("inputs", ())
    if not inputs:
        return
    yield ""
    columns = [Column("input", flexible=True), Column("watermark"), Column("")]
    rows = [[label(entry["edge"]), _time(entry, "watermark"), "ended" * entry["ended"]] for entry in inputs[:LINES]]
    yield from table(columns, rows, look, indent="      ")
    yield from (f"      {text}" for _, text in _left(inputs, look))


def _left(entries: Sequence[Json], look: Look) -> Iterator[tuple[str, str]]:
    if len(entries) > LINES:
        yield "", f"{look['ellipsis']} and {count(len(entries) - LINES)} more (--format json lists all)"


def _time(entry: Json, name: str) -> str:
    text = str(entry[f"{name}_at"])
    return {"none": "none yet", "end": "the end"}.get(text, text.replace("T", " ").removesuffix("Z"))
