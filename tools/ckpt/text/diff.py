"""The page of ``ckpt diff``, and what ``--prove`` says of a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stateformat import words
from stateformat.words import label

from . import render
from .render import Column, Look
from .rows import draw_rows

Json = Mapping[str, Any]
LINES_SHOWN: Final = 40
"""Operators, columns or states on a page; JSON lists all."""
_PLACEMENT: Final = (
    "Parallelism, max parallelism, key hashes, names, chains, layers and files say where state lies, not what it is: "
    "they do not count."
)
_WHOLE_STATES: Final = {
    "added": ["all", "", ""],
    "removed": ["", "all", ""],
    "replaced": ["all", "all", ""],
}
"""What stands in place of counts where a whole state has come, gone, or become another."""
_COUNTED: Final = ("added", "removed", "changed")


def draw_diff(document: Json, look: Look) -> Iterator[str]:
    """The whole page."""
    yield from render.page_head(_title(document), _head(document, look), look)
    if document["graph"] is not None:
        yield ""
        yield from _graph(document["graph"], look)
    yield from _columns(document["states"], look)
    yield ""
    yield from _states(document["states"], look)
    if _has_placement(document):
        yield ""
        yield from render.paragraph(_PLACEMENT, look)


def draw_proof(proof: Json, look: Look) -> Iterator[str]:
    """The line of ``--prove``; where content was lost, what differs."""
    yield ""
    if proof["same"]:
        states = words.plural(proof["states"], "state")
        what = states
        if proof["rows"] is not None:
            rows = words.plural(proof["rows"], "stored row" if proof["counts_layers"] else "row")
            what = f"{rows} of {states}"
        read = words.size(proof["read_bytes"])
        if proof["verified_bytes"] is not None:
            read = f"digests of {words.size(proof['verified_bytes'])} verified"
        else:
            read = f"{read} read"
        text = f"Proved: {what}, the graph and its statuses are the same; {read}."
        if proof["left_out"]:
            text = f"{text[:-1]}. Left out as asked, and not compared: {label(', '.join(proof['left_out']))}."
        yield from render.paragraph(f"{look['good']} {text}", look)
        return
    text = f"{look['fail']} Not proved: the result differs from its source."
    if proof["difference"] is None:
        text = f"{look['fail']} Not proved: what was copied is damaged."
    yield from render.paragraph(look.paint(text, "problem"), look)
    for problem in proof["problems"][:LINES_SHOWN]:
        yield from render.explanation(problem["message"], problem["advice"], look)
    yield from _more(len(proof["problems"]) - LINES_SHOWN, look)
    for member in proof["record"][:LINES_SHOWN]:
        values = f" {look['arrow']} ".join(_value(member[side])[:100] for side in ("before", "after"))
        yield from render.paragraph(f"{label(member['member'])}: {values}", look, indent="    ", first="  ~ ")
    yield from _more(len(proof["record"]) - LINES_SHOWN, look)
    if proof["difference"] is not None:
        yield ""
        yield from draw_diff(proof["difference"], look)


def _title(document: Json) -> str:
    before, after = document["before"], document["after"]
    return f"Difference of checkpoints {before['checkpoint_id']} and {after['checkpoint_id']}"


def _head(document: Json, look: Look) -> Iterator[tuple[str, str]]:
    before, after = document["before"], document["after"]
    for name, side, other in (("before", before, after), ("after", after, before)):
        job = words.named(side["job_id"], side["job_name"]) if side["job_id"] != other["job_id"] else ""
        kind = label(side["system"]) if side["system"] else side["kind"]
        rows = side["totals"]["rows"]
        yield (
            name,
            look.dotted(
                f"{label(side['store'])}@{side['checkpoint_id']}",
                kind,
                f"job {job}" if job else "",
                "" if rows is None else words.plural(rows, "row"),
                words.size(side["totals"]["bytes"]),
            ),
        )
    selection = document["selection"]
    chosen = [f"{name} {label(selection[name])}" for name in ("operator", "state") if selection[name] is not None]
    yield "only", ", ".join(chosen)
    yield "content", _verdict(document, look)
    yield "read", words.size(document["read_bytes"])


def _verdict(document: Json, look: Look) -> str:
    states = document["states"]
    if document["same"]:
        return look.paint(f"the same: {words.plural(len(states), 'state')}", "finished")
    differ = sum(state["change"] != "same" for state in states)
    parts = [f"{words.count(differ)} of {words.plural(len(states), 'state')}"] if differ else []
    graph = document["graph"]
    if graph is not None and not graph["same"]:
        parts.insert(0, "the graph")
    return look.paint(f"different: {' and '.join(parts)}", "problem")


def _graph(graph: Json, look: Look) -> Iterator[str]:
    changes = [("", change) for change in graph["operators"]] + [("edge ", change) for change in graph["edges"]]
    yield render.heading("Job graph", look, "the same" if graph["same"] else "different")
    if not changes:
        return
    yield ""
    for what, change in changes[:LINES_SHOWN]:
        arrow = look["arrow"]
        name = label(change["name"]).replace(" -> ", f" {arrow} ")
        parts = [_member(member, look) for member in change["members"]]
        if change["was"]:
            parts.insert(0, f"was {label(change['was'])}")
        said = "; ".join(parts) if parts else change["change"]
        sign = {"added": "+", "removed": "-"}.get(change["change"], "~" if change["counts"] else " ")
        yield from render.paragraph(f"{what}{name}: {said}", look, indent="    ", first=f"  {sign} ")
    yield from _more(len(changes) - LINES_SHOWN, look)


def _member(member: Json, look: Look) -> str:
    name = member["member"].replace("_", " ")
    if name == "status":
        return f"{member['before']} {look['arrow']} {member['after']}".replace("_", " ")
    return f"{name} {_value(member['before'])} {look['arrow']} {_value(member['after'])}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        if all(isinstance(item, list) for item in value):
            return words.ranges(value) or "none"
        return ", ".join(map(label, value))
    if value is None or value == "":
        return "none"
    return words.count(value) if isinstance(value, int) and not isinstance(value, bool) else label(words.cell(value))


def _columns(states: Sequence[Json], look: Look) -> Iterator[str]:
    changed = [state for state in states if state["columns"] or state["declared"] or state["was"]]
    if not changed:
        return
    yield ""
    yield render.heading("Schemas", look, words.plural(len(changed), "state"))
    yield ""
    lines = [(_name(state), text) for state in changed for text in _declarations(state, look)]
    for name, text in lines[:LINES_SHOWN]:
        yield from render.paragraph(f"{name}: {text}", look, indent="    ", first="  ~ ")
    yield from _more(len(lines) - LINES_SHOWN, look)


def _declarations(state: Json, look: Look) -> Iterator[str]:
    if state["was"]:
        yield f"was {label(state['was']['operator'])}/{label(state['was']['state'])}"
    for member in state["declared"]:
        yield _member(member, look)
    for change in state["columns"]:
        yield column_line(change)


def column_line(change: Json) -> str:
    """A line about a column."""
    name, what = label(change["column"]), change["change"]
    kind = label(change["type"])
    if what == "added":
        return f"{name} {kind} is new" + ("" if change["default"] is None else f", {label(change['default'])} before")
    if what == "dropped":
        return f"{name} {kind} is gone"
    if what == "renamed":
        return f"{label(change['was'])} is now {name}"
    if what in ("nullable", "required"):
        return f"{name} {'may now be null' if what == 'nullable' else 'may no longer be null'}"
    if what == "default":
        return f"{name} has the default {_value(change['default'])}, had {_value(change['was'])}"
    tail = ", which cannot be compared" if what == "retyped" else ""
    return f"{name} {what} from {label(change['type_was'])} to {kind}{tail}"


def _states(states: Sequence[Json], look: Look) -> Iterator[str]:
    differ = [state for state in states if state["change"] != "same"]
    same = len(states) - len(differ)
    note = "" if not states else f"{words.count(same)} of {words.count(len(states))} the same"
    yield render.heading("States", look, note)
    yield ""
    if not states:
        yield "  none"
        return
    columns = [
        Column("state", flexible=True),
        Column("mode", optional=2),
        Column("rows before", right=True, optional=1),
        Column("rows", right=True),
        Column("added", right=True),
        Column("removed", right=True),
        Column("changed", right=True),
    ]
    shown = (differ or states)[:LINES_SHOWN]
    yield from render.table(columns, [_row(state, look) for state in shown], look)
    yield from _more(len(differ or states) - LINES_SHOWN, look)
    for state in shown:
        yield from _details(state, look)


def _row(state: Json, look: Look) -> list[str]:
    counts = [words.count(state[name]) for name in _COUNTED]
    if state["change"] not in ("same", "changed"):
        counts = _WHOLE_STATES[state["change"]]
    rows = [_rows(state[side], look) for side in ("before", "after")]
    return [_name(state), state["kind"] or state["mode"], *rows, *counts]


def _rows(sizes: Json | None, look: Look) -> str:
    if sizes is None:
        return "-"
    if sizes["rows"] is not None:
        return words.count(sizes["rows"])
    # Layers that nobody has merged: the rows that stand are at most those stored.
    most = "≤ " if look.unicode else "<= "
    return "-" if sizes["stored_rows"] is None else most + words.count(sizes["stored_rows"])


def _details(state: Json, look: Look) -> Iterator[str]:
    """Where the changes are, if they are not spread; and some of them."""
    lines = [*_where(state, look)]
    sample = state.get("sample")
    if not lines and not sample:
        return
    yield ""
    yield look.paint(f"  {_name(state)}", "name")
    yield from lines
    if sample:
        signed = [
            (sign, row)
            for change in sample
            for sign, row in (("-", change["before"]), ("+", change["after"]))
            if row is not None
        ]
        yield from draw_rows(
            state["row_columns"], [row for _, row in signed], look, indent="    ", signs=[sign for sign, _ in signed]
        )


def _where(state: Json, look: Look) -> Iterator[str]:
    if state["order"] == "other":
        yield from render.paragraph("The same entries, in another order.", look, indent="    ")
    if state["order"] == "rotated":
        text = "The same entries in the same order, starting at another one, as after a rescale."
        yield from render.paragraph(text, look, indent="    ")
    pattern = state["pattern"]
    if pattern is None:
        return
    yield from render.paragraph(_pattern(pattern, state), look, indent="    ")
    counts = state["groups"].arrays if hasattr(state["groups"], "arrays") else None
    if counts is not None:
        yield f"    {_bars(counts, look)}"


def _pattern(pattern: Json, state: Json) -> str:
    """Which key groups stand out, and how many of the rows they had."""
    groups = pattern["groups"]
    named = words.ranges(groups[:8]) + (f" and {len(groups) - 8} more ranges" if len(groups) > 8 else "")
    number = sum(last - first + 1 for first, last in groups)
    had = f"{number} of {next(iter(state['groups']))['max_parallelism']}"
    if pattern["rows"] is not None:
        had = f"which had {pattern['rows']:.0%} of the rows before"
    group = "key group" if number == 1 else "key groups"
    return f"{pattern['changes']:.0%} of the changes lie in {group} {named}, {had}."


def _bars(counts: Mapping[str, Any], look: Look) -> str:
    """The changes of each key group, as a line of bars from the first group to the last."""
    values = [0] * int(counts["max_parallelism"][0])
    total = counts["added"] + counts["removed"] + counts["changed"]
    for group, count in zip(counts["group"].tolist(), total.tolist(), strict=True):
        values[group] = count
    return render.spark(values, look, width=min(64, look.width - 8))


def _has_placement(document: Json) -> bool:
    graph = document["graph"]
    members = [
        member["counts"]
        for change in ([*graph["operators"], *graph["edges"]] if graph else [])
        for member in change["members"]
    ]
    return not all(members)


def _name(state: Json) -> str:
    return f"{label(state['operator'])}/{label(state['state'])}"


def _more(left: int, look: Look) -> Iterator[str]:
    if left > 0:
        yield f"  {render.more(left, look)}"
