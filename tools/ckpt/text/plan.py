"""The page of ``ckpt explain-restore``, drawn from its JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any, Final

from stateformat import words
from stateformat.words import count, label, plural, size

from ..exit_status import in_options
from . import graph, render
from .render import Column, Look, pad, paragraph, shorten, text_width

Json = Mapping[str, Any]
OPERATORS_SHOWN: Final = 40
"""If there are more operators, the page shows :data:`MOST`: those refused, then those that read the
most bytes."""
MOST: Final = 20
LISTED: Final = 20
"""Refusals, warnings, columns, and names in a row on a page."""
MODE_WIDTH: Final = 12
ACTION_WIDTH: Final = 9
BARS_LEAST: Final = 6
"""The least columns for the bars of an operator."""
LOADED: Final = 5
"""The most loaded subtasks, on a page that does not show all operators."""


def draw_plan(document: Json, look: Look) -> Iterator[str]:
    """The page: each operator before and after, its states and load, and what is refused."""
    plan, start = document["plan"], document.get("start")
    if plan is None:
        yield from _anew(document, look)
        return
    verdict = look.paint("refused", "problem") if document["refused"] else look.paint("possible", "finished")
    skipped = [operator["uid"] for operator in plan["operators"] if operator["action"] == "skip_finished"]
    before = f"{plural(document['committable_rows'], 'row')} of committables, by the driver"
    yield from render.page_head(
        f"Restore of checkpoint {plan['source']['checkpoint_id']}",
        [
            ("store", label(document["store"])),
            ("job", label(plan["job_id"])),
            ("program", label(start["program"]) if start else ""),
            ("restore", verdict),
            ("not started", _names(skipped, look) + (" (finished)" if skipped else "")),
            ("committed first", before if document["committable_rows"] else ""),
            ("given up", _names(plan["drop"], look)),
            ("un-chained", _names(plan["unchained"], look)),
            ("reads", _sums(document, look)),
        ],
        look,
    )
    yield ""
    yield from _operators(document, look)
    refusals = [*(start["refusals"] if start else ()), *plan["refusals"]]
    for refusal in refusals[:LISTED]:
        yield ""
        yield from _refusal(refusal, look)
    yield from _more(len(refusals) - LISTED, "refusal", look)
    yield from _notes([*(start["notes"] if start else ()), *(one["message"] for one in plan["warnings"])], look)


def _anew(document: Json, look: Look) -> Iterator[str]:
    """The page of a program that has nothing to go on from."""
    start = document["start"]
    yield from render.page_head(
        f"Start of {label(start['program'])}",
        [
            ("store", label(document["store"])),
            ("job", words.named(start["job_id"], start["job_name"])),
            ("restore", "none: there is no checkpoint here, so the program begins anew"),
        ],
        look,
    )
    yield ""
    yield render.heading("Job graph", look, graph.summary(start["operators"]))
    yield ""
    yield from graph.draw(start["operators"][:OPERATORS_SHOWN], start["edges"], look)
    yield from _more(len(start["operators"]) - OPERATORS_SHOWN, "operator", look)
    yield from _notes(start["notes"], look)


def _notes(sentences: Sequence[str], look: Look) -> Iterator[str]:
    if sentences:
        yield ""
        yield render.heading("Worth knowing", look)
        for text in sentences[:LISTED]:
            yield from paragraph(words.sentence(text), look, indent="    ", first=f"  {look['dot']} ")
        yield from _more(len(sentences) - LISTED, "note", look)


def _more(left: int, noun: str, look: Look) -> list[str]:
    return ["", f"  {render.more(left, look, noun)}"] if left > 0 else []


def _names(uids: Sequence[str], look: Look) -> str:
    left = len(uids) - LISTED
    rest = f" {look['ellipsis']} and {count(left)} more" if left > 0 else ""
    return ", ".join(map(label, uids[:LISTED])) + rest


def _sums(document: Json, look: Look) -> str:
    """What all subtasks read together, if the page does not show all operators."""
    loads = document["load"]
    if len(document["plan"]["operators"]) <= OPERATORS_SHOWN:
        return ""
    subtasks = plural(sum(len(entry["subtasks"]) for entry in loads), "subtask")
    return look.dotted(
        plural(sum(entry["rows"] for entry in loads), "row"),
        size(sum(entry["bytes"] for entry in loads)),
        f"{subtasks} of {plural(len(loads), 'operator')}",
    )


def _operators(document: Json, look: Look) -> Iterator[str]:
    """A line of figures per operator, and its states below it. Of very many operators only some."""
    operators = document["plan"]["operators"]
    loads = {entry["operator"]: entry for entry in document["load"]}
    refused = {refusal["operator"] for refusal in document["plan"]["refusals"]}
    shown = operators
    if len(operators) > OPERATORS_SHOWN:
        size_of = {uid: load["bytes"] for uid, load in loads.items()}
        order = sorted(operators, key=lambda one: (one["uid"] not in refused, -size_of.get(one["uid"], 0)))
        kept = {operator["uid"] for operator in order[:MOST]}
        shown = [operator for operator in operators if operator["uid"] in kept]
    wide = look.width >= render.NARROW
    columns = [
        Column("operator", flexible=True),
        Column("subtasks", right=True),
        Column("reads rows" if wide else "rows", right=True),
        Column("bytes", right=True, optional=not wide),
        Column("rows per new subtask" if wide else "per new subtask"),
    ]
    # Narrower bars, if lines would be too long.
    for bars_width in (max(BARS_LEAST, 16 + (look.width - 80) // 2), BARS_LEAST):
        figures = []
        for operator in shown:
            uid, load = operator["uid"], loads.get(operator["uid"])
            bars = _bars(document, operator, load, look, bars_width, refused=uid in refused)
            reads = [count(load["rows"]), size(load["bytes"])] if load else ["", ""]
            figures.append([label(uid), _subtasks(operator, look), *reads, bars])
        titles, *lines = render.table(columns, figures, look)
        if all(text_width(line) <= look.width for line in lines):
            break
    states: dict[str, list[Json]] = {}
    for state in document["states"]:
        states.setdefault(state["operator"], []).append(state)
    yield titles
    for operator, line in zip(shown, lines, strict=True):
        yield line
        yield from _states(states.get(operator["uid"], []), look, all_columns=document.get("start") is not None)
    if len(shown) < len(operators):
        yield from _more(len(operators) - len(shown), "operator", look)
        yield ""
        yield from _most_loaded(document, look)


def _most_loaded(document: Json, look: Look) -> Iterator[str]:
    """The subtasks that read the most, of all operators."""
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
        figures = [str(one["subtask"]), count(one["rows"]), size(one["bytes"]), f"{ratio:.1f} {look['times']} mean"]
        rows.append([label(entry["operator"]), *figures])
    yield from render.table(columns, rows, look)


def _subtasks(operator: Json, look: Look) -> str:
    old, new = operator["old_parallelism"], operator["parallelism"]
    if operator["action"] == "skip_finished":
        return str(old)
    change = str(new) if old == new else f"{old or 'new'} {look['arrow']} {new or 'none'}"
    return f"{change} of {operator['max_parallelism']}" if new else change


def _bars(document: Json, operator: Json, load: Json | None, look: Look, width: int, *, refused: bool) -> str:
    """The rows of each new subtask, or why there are none."""
    rows = [entry["rows"] for entry in load["subtasks"]] if load else []
    if operator["action"] == "skip_finished":
        return look.paint("finished: not started" if look.width >= render.NARROW else "not started", "finished")
    if operator["action"] == "dropped" and not refused:
        return look.paint("given up" if operator["uid"] in document["plan"]["drop"] else "left out", "dim")
    if not any(rows):
        return look.paint("refused", "problem") if refused else "no state"
    return render.spark(rows, look, width=width) + render.uneven(words.skew(rows), look)


def _states(states: list[Json], look: Look, *, all_columns: bool) -> Iterator[str]:
    rule_width = max((len(state["rule"]) for state in states), default=0)
    mode_width = max([MODE_WIDTH, *(len(words.mode_of(state)) for state in states)])
    name_width = min(
        max((text_width(label(state["name"])) for state in states), default=0),
        max(8, look.width - 4 - 2 - mode_width - 2 - rule_width),
    )
    for state in states:
        mode = words.mode_of(state)
        name = pad(shorten(label(state["name"]), name_width, look), name_width)
        head = f"    {name}  {look.paint(pad(mode, mode_width), 'dim')}  "
        yield from paragraph(state["rule"], look, indent=" " * text_width(head), first=head)
        yield from _columns(state["columns"], look, every=all_columns)


def _columns(columns: Sequence[Json], look: Look, *, every: bool) -> Iterator[str]:
    """A line per column that changes, and one for all that stay; nothing if all stay, but for
    ``every``.
    """
    changed = [column for column in columns if column["action"] != "kept"]
    lines = [(column["action"], _column_text(column, look)) for column in changed[:LISTED]]
    kept = [column["saved"] for column in columns if column["action"] == "kept"]
    if kept and (changed or every):
        lines.append(("kept", _names(kept, look)))
    for action, text in lines:
        first = "        " + look.paint(pad(action, ACTION_WIDTH), "problem" if action == "refused" else "dim")
        yield from paragraph(text, look, indent=" " * (8 + ACTION_WIDTH), first=first)
    yield from _more(len(changed) - LISTED, "column", look)


def _column_text(column: Json, look: Look) -> str:
    before = None if column["saved"] is None else f"{label(column['saved'])} {column['saved_type']}"
    after = None if column["column"] is None else f"{label(column['column'])} {column['type']}"
    if before is None:
        older = "null" if column["default"] is None else label(column["default"])
        return (
            f"{after} ({older} in older rows)"
            if column["action"] == "added"
            else f"{after} (new, not null, no default)"
        )
    if after is None:
        return before if column["action"] == "dropped" else f"{before} (not declared, and not given up)"
    return f"{before} {look['arrow']} {after}"


def _refusal(refusal: Json, look: Look) -> Iterator[str]:
    """One reason: its code and operator, what disagrees, what to do."""
    mark, code = look.paint(look["fail"], "problem"), refusal["code"]
    # The message has the whole uid.
    uid = shorten(label(refusal["operator"]), look.width - 2 - len(look["fail"]) - 1 - len(code) - 2, look)
    yield f"  {mark} {look.paint(code, 'problem')}  {look.paint(uid, 'name')}".rstrip()
    yield from render.explanation(refusal["message"], in_options(refusal["advice"]), look)
