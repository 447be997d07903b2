"""What is shown of the difference of two checkpoints, and of a proof that there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .. import words
from ..words import count, plural, size
from .blocks import (
    Block,
    Cell,
    Chart,
    Column,
    Facts,
    Finding,
    Heading,
    Json,
    Note,
    Said,
    Table,
    Under,
    Values,
    dotted,
    more,
)

LINES_SHOWN: Final = 40
"""Operators, columns or states on a page; JSON lists all."""
_PLACEMENT: Final = (
    "Parallelism, max parallelism, key hashes, names, chains, layers and files say where state lies, not what it is: "
    "they do not count."
)
_WHOLE_STATES: Final = {"added": ("all", "", ""), "removed": ("", "all", ""), "replaced": ("all", "all", "")}
"""What stands in place of counts where a whole state has come, gone, or become another."""
_COUNTED: Final = ("added", "removed", "changed")


def difference_page(document: Json) -> Iterator[Block]:
    """Make the page of ``ckpt diff``."""
    before, after = document["before"], document["after"]
    yield Heading(f"Difference of checkpoints {before['checkpoint_id']} and {after['checkpoint_id']}")
    yield Facts([*_head(document)])
    graph = document["graph"]
    if graph is not None:
        changes = [("", change) for change in graph["operators"]] + [("edge ", change) for change in graph["edges"]]
        yield Heading("Job graph", "the same" if graph["same"] else "different")
        yield from _lines([_element(what, change) for what, change in changes])
    changed = [state for state in document["states"] if state["columns"] or state["declared"] or state["was"]]
    if changed:
        yield Heading("Schemas", plural(len(changed), "state"))
        yield from _lines([("~", f"{_name(state)}: {text}") for state in changed for text in _declarations(state)])
    yield from _states(document["states"])
    members = [
        member["counts"]
        for change in ([*graph["operators"], *graph["edges"]] if graph else [])
        for member in change["members"]
    ]
    if not all(members):
        yield Note(_PLACEMENT)


def proof_blocks(proof: Json) -> Iterator[Block]:
    """Make the line of ``--prove``; where content was lost, what differs."""
    if proof["same"]:
        what = plural(proof["states"], "state")
        if proof["rows"] is not None:
            what = f"{plural(proof['rows'], 'stored row' if proof['counts_layers'] else 'row')} of {what}"
        read = f"{size(proof['read_bytes'])} read"
        if proof["verified_bytes"] is not None:
            read = f"digests of {size(proof['verified_bytes'])} verified"
        left_out = f" Left out as asked, and not compared: {', '.join(proof['left_out'])}." if proof["left_out"] else ""
        yield Note(f"✓ Proved: {what}, the graph and its statuses are the same; {read}.{left_out}")
        return
    why = "what was copied is damaged" if proof["difference"] is None else "the result differs from its source"
    problems = [Finding("", "", each["message"], each["advice"]) for each in proof["problems"][:LINES_SHOWN]]
    changes = [
        ("~", f"{member['member']}: {' → '.join(_value(member[side])[:100] for side in ('before', 'after'))}")
        for member in proof["record"]
    ]
    left = more(len(proof["problems"]) - LINES_SHOWN)
    below = [*problems, *([Note(left)] if left else []), *_lines(changes)]
    yield Under(Said(f"✗ Not proved: {why}.", "bad"), below)
    if proof["difference"] is not None:
        yield from difference_page(proof["difference"])


def _lines(lines: Sequence[tuple[str, str]]) -> Iterator[Block]:
    """Make signed lines of one group; those that are left out are counted."""
    if lines:
        signed = [*lines[:LINES_SHOWN], *([("", more(len(lines) - LINES_SHOWN))] if len(lines) > LINES_SHOWN else [])]
        yield Note([text for _, text in signed], [sign for sign, _ in signed])


def _head(document: Json) -> Iterator[tuple[Cell, Cell]]:
    before, after = document["before"], document["after"]
    for name, side, other in (("before", before, after), ("after", after, before)):
        job = words.named(side["job_id"], side["job_name"]) if side["job_id"] != other["job_id"] else ""
        rows = side["totals"]["rows"]
        yield (
            name,
            dotted(
                f"{side['store']}@{side['checkpoint_id']}",
                side["system"] or side["kind"],
                f"job {job}" if job else "",
                "" if rows is None else plural(rows, "row"),
                size(side["totals"]["bytes"]),
            ),
        )
    chosen = document["selection"]
    yield "only", ", ".join(f"{name} {chosen[name]}" for name in ("operator", "state") if chosen[name] is not None)
    yield "content", _verdict(document)
    yield "read", size(document["read_bytes"])


def _verdict(document: Json) -> Said:
    states = document["states"]
    if document["same"]:
        return Said(f"the same: {plural(len(states), 'state')}", "good")
    differ = sum(state["change"] != "same" for state in states)
    parts = [f"{count(differ)} of {plural(len(states), 'state')}"] if differ else []
    if document["graph"] is not None and not document["graph"]["same"]:
        parts.insert(0, "the graph")
    return Said(f"different: {' and '.join(parts)}", "bad")


def _element(what: str, change: Json) -> tuple[str, str]:
    """Return a change of an operator or edge: its sign, and what has changed."""
    parts = [f"was {change['was']}"] if change["was"] else []
    parts += [_member(member) for member in change["members"]]
    sign = {"added": "+", "removed": "-"}.get(change["change"], "~" if change["counts"] else " ")
    return sign, f"{what}{change['name'].replace(' -> ', ' → ')}: {'; '.join(parts) or change['change']}"


def _member(member: Json) -> str:
    name = member["member"].replace("_", " ")
    if name == "status":
        return f"{member['before']} → {member['after']}".replace("_", " ")
    return f"{name} {_value(member['before'])} → {_value(member['after'])}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        if all(isinstance(item, list) for item in value):
            return words.ranges(value) or "none"
        return ", ".join(map(str, value))
    if value is None or value == "":
        return "none"
    return count(value) if isinstance(value, int) and not isinstance(value, bool) else words.cell(value)


def _declarations(state: Json) -> Iterator[str]:
    if state["was"]:
        yield f"was {state['was']['operator']}/{state['was']['state']}"
    yield from map(_member, state["declared"])
    yield from map(column_line, state["columns"])


def column_line(change: Json) -> str:
    """Return a line about a column."""
    name, what, kind = change["column"], change["change"], change["type"]
    if what == "added":
        return f"{name} {kind} is new" + ("" if change["default"] is None else f", {change['default']} before")
    if what == "dropped":
        return f"{name} {kind} is gone"
    if what == "renamed":
        return f"{change['was']} is now {name}"
    if what in ("nullable", "required"):
        return f"{name} {'may now be null' if what == 'nullable' else 'may no longer be null'}"
    if what == "default":
        return f"{name} has the default {_value(change['default'])}, had {_value(change['was'])}"
    tail = ", which cannot be compared" if what == "retyped" else ""
    return f"{name} {what} from {change['type_was']} to {kind}{tail}"


def _states(states: Sequence[Json]) -> Iterator[Block]:
    differ = [state for state in states if state["change"] != "same"]
    yield Heading("States", f"{count(len(states) - len(differ))} of {count(len(states))} the same" if states else "")
    if not states:
        yield Note("none")
        return
    columns = [
        Column("state", flexible=True),
        Column("mode", optional=2),
        Column("rows before", right=True, optional=1),
        *(Column(title, right=True) for title in ("rows", *_COUNTED)),
    ]
    shown = differ or states
    yield Table(columns, [_row(state) for state in shown], LINES_SHOWN)
    for state in shown[:LINES_SHOWN]:
        lines = [*_where(state), *_changed(state.get("sample") or (), state)]
        if lines:
            yield Under(Said(_name(state), "name"), lines)


def _row(state: Json) -> list[Cell]:
    counts = _WHOLE_STATES.get(state["change"]) or [count(state[name]) for name in _COUNTED]
    return [
        _name(state),
        state["kind"] or state["mode"],
        *(_rows(state[side]) for side in ("before", "after")),
        *counts,
    ]


def _rows(sizes: Json | None) -> str:
    if sizes is None:
        return "-"
    if sizes["rows"] is not None:
        return count(sizes["rows"])
    # Layers that nobody has merged: the rows that stand are at most those stored.
    return "-" if sizes["stored_rows"] is None else f"≤ {count(sizes['stored_rows'])}"


def _changed(sample: Sequence[Json], state: Json) -> Iterator[Block]:
    """Make some of the changes: minus is how a row was, plus how it is."""
    signed = [(sign, row) for change in sample for sign, row in signs(change)]
    if signed:
        yield Values(state["row_columns"], [row for _, row in signed], [sign for sign, _ in signed])


def signs(change: Json) -> Iterator[tuple[str, Json]]:
    """Yield a row with what happened to it: minus is how it was, plus how it is."""
    for sign, row in (("-", change["before"]), ("+", change["after"])):
        if row is not None:
            yield sign, row


def _where(state: Json) -> Iterator[Block]:
    """Make where the changes are, if they are not spread."""
    if state["order"] == "other":
        yield Note("The same entries, in another order.")
    if state["order"] == "rotated":
        yield Note("The same entries in the same order, starting at another one, as after a rescale.")
    if state["pattern"] is None:
        return
    yield Note(_pattern(state["pattern"], state))
    if hasattr(state["groups"], "arrays"):
        yield Chart("", _by_group(state["groups"].arrays))


def _pattern(pattern: Json, state: Json) -> str:
    """Return which key groups stand out, and how many of the rows they had."""
    groups = pattern["groups"]
    named = words.ranges(groups[:8]) + (f" and {len(groups) - 8} more ranges" if len(groups) > 8 else "")
    number = sum(last - first + 1 for first, last in groups)
    had = f"{number} of {next(iter(state['groups']))['max_parallelism']}"
    if pattern["rows"] is not None:
        had = f"which had {pattern['rows']:.0%} of the rows before"
    group = "key group" if number == 1 else "key groups"
    return f"{pattern['changes']:.0%} of the changes lie in {group} {named}, {had}."


def _by_group(counts: Mapping[str, Any]) -> list[int]:
    """Return the changes of each key group, from the first group to the last."""
    values = [0] * int(counts["max_parallelism"][0])
    total = counts["added"] + counts["removed"] + counts["changed"]
    for group, changes in zip(counts["group"].tolist(), total.tolist(), strict=True):
        values[group] = changes
    return values


def _name(state: Json) -> str:
    return f"{state['operator']}/{state['state']}"
