"""How ``ckpt inspect`` shows what a runtime's own states hold, from its JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stateformat.words import count, label, plural

from .render import Column, Look, more, table

Json = Mapping[str, Any]

LINES: Final = 20
"""Inputs, or attempts, of one state on a page; JSON lists all."""


def holds_line(holds: Json, look: Look) -> str:
    """What is in the checkpoint that a run uses up, in one line."""
    waiting = [entry["rows"] for entry in holds["in_flight"] if entry["rows"]]
    records = f"{plural(sum(waiting), 'record')} in flight on {plural(len(waiting), 'edge')}" if waiting else ""
    return look.dotted(
        plural(holds["timers"], "timer") if holds["timers"] else "",
        records,
        plural(holds["committables"], "committable") if holds["committables"] else "",
    )


def contents_facts(contents: Json, look: Look) -> Iterator[tuple[str, str]]:
    """What fits into lines of ``name  value``."""
    if "unread" in contents:
        yield "contents", f"not read: {label(contents['unread'])}"
    if "expired" in contents:
        yield "expired", f"{contents['expired']:,} of {plural(contents['rows'], 'row')}; the next base leaves them out"
    if contents.get("timers"):
        first, last = _time(contents, "first"), _time(contents, "last")
        due = first if first == last else f"{first} to {last}"
        yield "due", f"{due}, {plural(contents['timers'], 'timer')}"
    if "channels" in contents:
        senders, receivers = plural(contents["senders"], "sender"), plural(contents["receivers"], "receiver")
        yield "channels", f"{count(contents['channels'])}, of {senders} and {receivers}"
    if "messages" in contents:
        yield "messages", f"{plural(contents['messages'], 'message')} on the way to the coordinator"
    prepared: Sequence[Json] = contents.get("prepared", ())
    for i, entry in enumerate(prepared[:LINES]):
        under = f"under checkpoint {entry['checkpoint_id']}, attempt {entry['attempt_id']}"
        yield "prepared" if i == 0 else "", f"{plural(entry['rows'], 'committable')} {under}"
    if len(prepared) > LINES:
        yield "", more(len(prepared) - LINES, look)


def contents_table(contents: Json, look: Look) -> Iterator[str]:
    """The inputs of an operator: how far each is, and whether it has ended."""
    inputs: Sequence[Json] = contents.get("inputs", ())
    if not inputs:
        return
    yield ""
    columns = [Column("input", flexible=True), Column("watermark"), Column("")]
    rows = [[label(entry["edge"]), _time(entry, "watermark"), "ended" * entry["ended"]] for entry in inputs[:LINES]]
    yield from table(columns, rows, look, indent="      ")
    if len(inputs) > LINES:
        yield f"      {more(len(inputs) - LINES, look)}"


def _time(entry: Json, name: str) -> str:
    text = str(entry[f"{name}_at"])
    return {"none": "none yet", "end": "the end"}.get(text, text.replace("T", " ").removesuffix("Z"))
