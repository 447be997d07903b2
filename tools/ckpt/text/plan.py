"""The page of ``ckpt explain-restore``, drawn from its JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from typing import Any, Final

from ..exit_status import in_options
from .render import (
    Column,
    Look,
    count,
    facts,
    heading,
    label,
    pad,
    paragraph,
    plural,
    shorten,
    size,
    skew,
    spark,
    table,
    text_width,
)

Json = Mapping[str, Any]
OPERATORS_SHOWN: Final = 40
"""Operators on a page; of more than that it shows the :data:`MOST` that are refused or read the most bytes."""
MOST: Final = 20
TOLD: Final = 20
"""Refusals, warnings and names in a row on a page."""
MODE_WIDTH: Final = 12
ACTION_WIDTH: Final = 9
NARROW: Final = 72
"""Columns below which titles are shorter."""
BARS_LEAST: Final = 6
"""Columns that the bars of an operator have at least."""
LOADED: Final = 5
"""The most loaded subtasks, where not all operators are shown."""


def draw(document: Json, look: Look) -> Iterator[str]:
    """The page: each operator before and after, its states and their rule, what each subtask reads, what is refused."""
    plan = document["plan"]
    verdict = look.paint("refused", "problem") if document["refused"] else look.paint("possible", "finished")
    yield heading(f"Restore of checkpoint {plan['source']['checkpoint_id']}", look)
    yield ""
    skipped = [operator["uid"] for operator in plan["operators"] if operator["action"] == "skip_finished"]
    before = f"{plural(document['committable_rows'], 'row')} of committables, by the driver"
    yield from facts(
        [
            ("store", label(document["store"])),
            ("job", label(plan["job_id"])),
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
    for refusal in plan["refusals"][:TOLD]:
        yield ""
        yield from _refusal(refusal, look)
    yield from _more(len(plan["refusals"]) - TOLD, "refusal", look)
    if plan["warnings"]:
        yield ""
        yield heading("Worth knowing", look)
        for warning in plan["warnings"][:TOLD]:
            yield from paragraph(label(warning["message"]), look, indent="    ", first=f"  {look['dot']} ")
        yield from _more(len(plan["warnings"]) - TOLD, "warning", look)


def _more(left: int, noun: str, look: Look) -> Iterator[str]:
    """That a page leaves something out, and where it stands."""
    if left > 0:
        yield ""
        yield f"  {look['ellipsis']} and {plural(left, f'more {noun}', f'more {noun}s')} (--format json lists all)"


def _names(uids: Sequence[str], look: Look) -> str:
    left = len(uids) - TOLD
    rest = f" {look['ellipsis']} and {count(left)} more" if left > 0 else ""
    return ", ".join(map(label, uids[:TOLD])) + rest


def _sums(document: Json, look: Look) -> str:
    """What all subtasks read together, where the operators are too many to be added up by eye."""
    loads = document["load"]
    if len(document["plan"]["operators"]) <= OPERATORS_SHOWN:
        return ""
    subtasks = plural(sum(len(entry["subtasks"]) for entry in loads), "subtask")
    sums = [
        plural(sum(entry["rows"] for entry in loads), "row"),
        size(sum(entry["bytes"] for entry in loads)),
        f"{subtasks} of {plural(len(loads), 'operator')}",
    ]
    return f" {look['dot']} ".join(sums)


def _operators(document: Json, look: Look) -> Iterator[str]:
    """Per operator a line of figures, and below it its states; of very many those that matter most."""
    operators = document["plan"]["operators"]
    shown = operators
    if len(operators) > OPERATORS_SHOWN:
        loads = {entry["operator"]: entry for entry in document["load"]}
        refused = {refusal["operator"] for refusal in document["plan"]["refusals"]}
        order = sorted(operators, key=lambda one: (one["uid"] not in refused, -_bytes(loads.get(one["uid"]))))
        kept = {operator["uid"] for operator in order[:MOST]}
        shown = [operator for operator in operators if operator["uid"] in kept]
    columns = [
        Column("operator", flexible=True),
        Column("subtasks", right=True),
        Column("reads rows" if look.width >= NARROW else "rows", right=True),
        Column("bytes", right=True, optional=look.width < NARROW),
        Column("rows per new subtask" if look.width >= NARROW else "per new subtask"),
    ]
    # Where lines are still too long, the bars give way.
    for bars_width in (max(BARS_LEAST, 16 + (look.width - 80) // 2), BARS_LEAST):
        titles, *lines = table(columns, _loads(document, shown, look, bars_width), look)
        if all(text_width(line) <= look.width for line in lines):
            break
    states: dict[str, list[Json]] = {}
    for state in document["states"]:
        states.setdefault(state["operator"], []).append(state)
    yield titles
    for operator, line in zip(shown, lines, strict=True):
        yield line
        yield from _states(states.get(operator["uid"], []), look)
    if len(shown) < len(operators):
        yield from _more(len(operators) - len(shown), "operator", look)
        yield ""
        yield from _most_loaded(document, look)


def _loads(document: Json, operators: Sequence[Json], look: Look, bars_width: int) -> list[list[str]]:
    """The line of figures of each operator, with bars of at most ``bars_width`` columns."""
    loads = {entry["operator"]: entry for entry in document["load"]}
    refused = {refusal["operator"] for refusal in document["plan"]["refusals"]}
    rows = []
    for operator in operators:
        uid = operator["uid"]
        load = loads.get(uid)
        per_subtask = [entry["rows"] for entry in load["subtasks"]] if load else []
        bars = _bars(
            operator, per_subtask, look, bars_width, refused=uid in refused, given_up=uid in document["plan"]["drop"]
        )
        figures = [count(load["rows"]), size(load["bytes"])] if load else ["", ""]
        rows.append([label(uid), _numbers(operator, look), *figures, bars])
    return rows


def _bytes(load: Json | None) -> int:
    return int(load["bytes"]) if load else 0


def _most_loaded(document: Json, look: Look) -> Iterator[str]:
    """The subtasks that read the most, of all operators."""
    found = [
        (one, entry)
        for entry in document["load"]
        if len(entry["subtasks"])
        for one in entry["subtasks"].greatest(LOADED, "bytes")
    ]
    found = nlargest(LOADED, found, key=lambda pair: pair[0]["bytes"])
    columns = [
        Column("most loaded", flexible=True),
        Column("subtask", right=True),
        Column("reads rows", right=True),
        Column("bytes", right=True),
        Column("of its operator"),
    ]
    rows = []
    for one, entry in found:
        ratio = one["rows"] * len(entry["subtasks"]) / entry["rows"] if entry["rows"] else 1.0
        figures = [str(one["subtask"]), count(one["rows"]), size(one["bytes"]), f"{ratio:.1f} {look['times']} mean"]
        rows.append([label(entry["operator"]), *figures])
    yield from table(columns, rows, look)


def _numbers(operator: Json, look: Look) -> str:
    old, new = operator["old_parallelism"], operator["parallelism"]
    if operator["action"] == "skip_finished":
        return str(old)
    change = str(new) if old == new else f"{old or 'new'} {look['arrow']} {new or 'none'}"
    return f"{change} of {operator['max_parallelism']}" if new else change


def _bars(operator: Json, rows: list[int], look: Look, width: int, *, refused: bool, given_up: bool) -> str:
    if operator["action"] == "skip_finished":
        return look.paint("finished: not started" if look.width >= NARROW else "not started", "finished")
    if operator["action"] == "dropped" and not refused:
        return look.paint("given up" if given_up else "left out", "dim")
    if not any(rows):
        return look.paint("refused", "problem") if refused else "no state"
    uneven = skew(rows)
    return spark(rows, look, width=width) + (f"  {uneven:.1f} {look['times']} mean" if uneven >= 1.05 else "")


def _states(states: list[Json], look: Look) -> Iterator[str]:
    rule_width = max((len(state["rule"]) for state in states), default=0)
    name_width = min(
        max((text_width(label(state["name"])) for state in states), default=0),
        max(8, look.width - 4 - 2 - MODE_WIDTH - 2 - rule_width),
    )
    for state in states:
        mode = f"{state['mode']} {state['kind']}" if state["kind"] else state["mode"]
        name = pad(shorten(label(state["name"]), name_width, look), name_width)
        head = f"    {name}  {look.paint(pad(mode, MODE_WIDTH), 'dim')}  "
        yield from paragraph(state["rule"], look, indent=" " * text_width(head), first=head)
        yield from _columns(state["columns"], look)


def _columns(columns: Sequence[Json], look: Look) -> Iterator[str]:
    """A line for each column that is not merely kept, and one for the others; nothing where all are kept."""
    changed = [column for column in columns if column["action"] != "kept"]
    lines = [(column["action"], _column_text(column, look)) for column in changed[:TOLD]]
    kept = [column["saved"] for column in columns if column["action"] == "kept"]
    if changed and kept:
        lines.append(("kept", _names(kept, look)))
    for action, text in lines:
        first = "        " + look.paint(pad(action, ACTION_WIDTH), "problem" if action == "refused" else "dim")
        yield from paragraph(text, look, indent=" " * (8 + ACTION_WIDTH), first=first)
    yield from _more(len(changed) - TOLD, "column", look)


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
    """One reason: its code and operator, what disagrees, the next step."""
    mark, code = look.paint(look["fail"], "problem"), refusal["code"]
    # The message below has the uid in full.
    uid = shorten(label(refusal["operator"]), look.width - 2 - len(look["fail"]) - 1 - len(code) - 2, look)
    yield f"  {mark} {look.paint(code, 'problem')}  {look.paint(uid, 'name')}"
    yield from paragraph(label(refusal["message"]) + ".", look, indent="    ")
    advice = label(in_options(refusal["advice"]))
    arrow = look["arrow"] + " "
    indent = "    " + " " * len(arrow)
    yield from paragraph(advice[:1].upper() + advice[1:] + ".", look, indent=indent, first="    " + arrow)
