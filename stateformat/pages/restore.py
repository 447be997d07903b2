"""What is shown of a restore before it happens, and of the start of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from typing import Final

from .. import words
from ..words import count, plural, size
from .blocks import (
    Block,
    Cell,
    Column,
    Facts,
    Finding,
    Heading,
    Json,
    Note,
    Row,
    Said,
    Spark,
    Table,
    Under,
    dotted,
    more,
    uneven,
)
from .checkpoint import OPERATORS_SHOWN, graph_blocks, graph_summary

MOST: Final = 20
"""Of more than :data:`OPERATORS_SHOWN` operators so many are shown: those refused, then those that
read the most bytes."""
LISTED: Final = 20
"""Refusals, warnings, columns, and names in a row on a page."""
MODE_WIDTH: Final = 12
LOADED: Final = 5
"""The most loaded subtasks, on a page that does not show all operators."""


def restore_page(document: Json, advice: Callable[[str], str] = str) -> Iterator[Block]:
    """Make the page: each operator before and after, its states and load, and what is refused.

    ``advice``: what changes the advice of a refusal into that of a command.
    """
    plan, start = document["plan"], document.get("start")
    if plan is None:
        yield from _anew(document)
        return
    skipped = [operator["uid"] for operator in plan["operators"] if operator["action"] == "skip_finished"]
    before = f"{plural(document['committable_rows'], 'row')} of committables, by the driver"
    yield Heading(f"Restore of checkpoint {plan['source']['checkpoint_id']}")
    yield Facts(
        [
            ("store", document["store"]),
            ("job", plan["job_id"]),
            ("program", start["program"] if start else ""),
            ("restore", Said("refused", "bad") if document["refused"] else Said("possible", "good")),
            ("not started", _names(skipped) + (" (finished)" if skipped else "")),
            ("committed first", before if document["committable_rows"] else ""),
            ("given up", _names(plan["drop"])),
            ("un-chained", _names(plan["unchained"])),
            ("reads", _sums(document)),
        ]
    )
    yield from _operators(document)
    refusals = [*(start["refusals"] if start else ()), *plan["refusals"]]
    for refusal in refusals[:LISTED]:
        # The message has the whole uid.
        yield Finding(refusal["code"], refusal["operator"], refusal["message"], advice(refusal["advice"]))
    yield from _more(len(refusals) - LISTED, "refusal")
    yield from _notes([*(start["notes"] if start else ()), *(one["message"] for one in plan["warnings"])])


def _anew(document: Json) -> Iterator[Block]:
    """Make the page of a program that has nothing to go on from."""
    start = document["start"]
    yield Heading(f"Start of {start['program']}")
    yield Facts(
        [
            ("store", document["store"]),
            ("job", words.named(start["job_id"], start["job_name"])),
            ("restore", "none: there is no checkpoint here, so the program begins anew"),
        ]
    )
    yield Heading("Job graph", graph_summary(start["operators"]))
    yield from graph_blocks(start["operators"], start["edges"])
    yield from _notes(start["notes"])


def _notes(sentences: Sequence[str]) -> Iterator[Block]:
    if sentences:
        notes: list[Cell] = [words.sentence(text) for text in sentences[:LISTED]]
        yield Under("Worth knowing", [Note(notes, sign="·")], top=True)
        yield from _more(len(sentences) - LISTED, "note")


def _more(left: int, noun: str) -> Iterator[Block]:
    if left > 0:
        yield Note(more(left, noun))


def _names(uids: Sequence[str]) -> str:
    left = len(uids) - LISTED
    return ", ".join(uids[:LISTED]) + (f" … and {count(left)} more" if left > 0 else "")


def _sums(document: Json) -> str:
    """Return what all subtasks read together, if the page does not show all operators."""
    loads = document["load"]
    if len(document["plan"]["operators"]) <= OPERATORS_SHOWN:
        return ""
    subtasks = plural(sum(len(entry["subtasks"]) for entry in loads), "subtask")
    return dotted(
        plural(sum(entry["rows"] for entry in loads), "row"),
        size(sum(entry["bytes"] for entry in loads)),
        f"{subtasks} of {plural(len(loads), 'operator')}",
    )


def _operators(document: Json) -> Iterator[Block]:
    """Make a line of figures per operator, and its states below it; of very many only some."""
    operators = document["plan"]["operators"]
    loads = {entry["operator"]: entry for entry in document["load"]}
    refused = {refusal["operator"] for refusal in document["plan"]["refusals"]}
    shown = operators
    if len(operators) > OPERATORS_SHOWN:
        size_of = {uid: load["bytes"] for uid, load in loads.items()}
        order = sorted(operators, key=lambda one: (one["uid"] not in refused, -size_of.get(one["uid"], 0)))
        kept = {operator["uid"] for operator in order[:MOST]}
        shown = [operator for operator in operators if operator["uid"] in kept]
    columns = [
        Column("operator", flexible=True),
        Column("subtasks", right=True),
        Column("reads rows", right=True, narrow=Column("rows", right=True)),
        Column("bytes", right=True, narrow=Column("bytes", right=True, optional=1)),
        Column("rows per new subtask", narrow=Column("per new subtask", flexible=True)),
    ]
    states: dict[str, list[Json]] = {}
    for state in document["states"]:
        states.setdefault(state["operator"], []).append(state)
    rows = []
    for operator in shown:
        uid, load = operator["uid"], loads.get(operator["uid"])
        bars = _bars(document, operator, load, refused=uid in refused)
        reads = (count(load["rows"]), size(load["bytes"])) if load else ("", "")
        below = _states(states.get(uid, []), every=document.get("start") is not None)
        rows.append(Row((uid, _subtasks(operator), *reads, bars), below))
    yield Table(columns, rows)
    if len(shown) < len(operators):
        yield from _more(len(operators) - len(shown), "operator")
        yield _most_loaded(document)


def _most_loaded(document: Json) -> Table:
    """Make the subtasks that read the most, of all operators."""
    found = [
        (one, entry)
        for entry in document["load"]
        if len(entry["subtasks"])
        for one in entry["subtasks"].greatest(LOADED, "bytes")
    ]
    columns = [
        Column("most loaded", flexible=True),
        Column("subtask", right=True),
        Column("reads rows", right=True),
        Column("bytes", right=True),
        Column("of its operator"),
    ]
    rows = []
    for one, entry in nlargest(LOADED, found, key=lambda pair: pair[0]["bytes"]):
        ratio = one["rows"] * len(entry["subtasks"]) / entry["rows"] if entry["rows"] else 1.0
        figures = (str(one["subtask"]), count(one["rows"]), size(one["bytes"]), f"{ratio:.1f} × mean")
        rows.append((entry["operator"], *figures))
    return Table(columns, rows)


def _subtasks(operator: Json) -> str:
    old, new = operator["old_parallelism"], operator["parallelism"]
    if operator["action"] == "skip_finished":
        return str(old)
    change = str(new) if old == new else f"{old or 'new'} → {new or 'none'}"
    return f"{change} of {operator['max_parallelism']}" if new else change


def _bars(document: Json, operator: Json, load: Json | None, *, refused: bool) -> Cell:
    """Make the rows of each new subtask, or why there are none."""
    rows = [entry["rows"] for entry in load["subtasks"]] if load else []
    if operator["action"] == "skip_finished":
        return Said("finished: not started", "good")
    if operator["action"] == "dropped" and not refused:
        return Said("given up" if operator["uid"] in document["plan"]["drop"] else "left out", "dim")
    if not any(rows):
        return Said("refused", "bad") if refused else "no state"
    return Spark(rows, uneven(words.skew(rows)))


def _states(states: list[Json], *, every: bool) -> list[Block]:
    """Make what becomes of each state, and of its columns.

    A column that changes has a line, all that stay have one; none if all stay, but for ``every``.
    """
    rows = []
    for state in states:
        changed = [column for column in state["columns"] if column["action"] != "kept"]
        lines: list[tuple[Cell, Cell]] = [
            (Said(column["action"], "bad") if column["action"] == "refused" else column["action"], _column(column))
            for column in changed[:LISTED]
        ]
        kept = [column["saved"] for column in state["columns"] if column["action"] == "kept"]
        if kept and (changed or every):
            lines.append(("kept", _names(kept)))
        lines.append(("", more(len(changed) - LISTED, "column")))
        rows.append(Row((state["name"], Said(words.mode_of(state), "dim"), state["rule"]), [Facts(lines)]))
    columns = [
        Column("state", flexible=True),
        Column("mode", least=MODE_WIDTH),
        Column("what becomes of it", wraps=True),
    ]
    return [Table(columns, rows, titled=False)] if rows else []


def _column(column: Json) -> str:
    before = None if column["saved"] is None else f"{column['saved']} {column['saved_type']}"
    after = None if column["column"] is None else f"{column['column']} {column['type']}"
    if before is None:
        older = "null" if column["default"] is None else column["default"]
        return (
            f"{after} ({older} in older rows)"
            if column["action"] == "added"
            else f"{after} (new, not null, no default)"
        )
    if after is None:
        return before if column["action"] == "dropped" else f"{before} (not declared, and not given up)"
    return f"{before} → {after}"
