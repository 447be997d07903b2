"""The page of ``ckpt inspect``: a checkpoint's facts, its graph, its states. Drawn from the JSON document alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from click import unstyle

from . import graph
from .contents import contents_facts, contents_table, holds_line
from .render import (
    Column,
    Look,
    age,
    bar,
    cell,
    clock,
    count,
    facts,
    heading,
    label,
    pad,
    plural,
    ranges,
    size,
    spark,
    table,
    text_width,
    wrap,
)

Json = Mapping[str, Any]
SUBTASKS_SHOWN: Final = 40
"""Lines of a table of subtasks on a page; JSON lists all."""
OPERATORS_SHOWN: Final = 40
"""Operators of a graph on a page."""
STATES_SHOWN: Final = 40
"""States on a page; of more than that it shows the :data:`LARGEST` that take the most bytes."""
LARGEST: Final = 20
NARROW: Final = 72
"""Columns below which titles are shorter."""


def draw(document: Json, look: Look, now_us: int) -> Iterator[str]:
    """The whole page, or the part that ``--operator`` and ``--state`` leave."""
    narrow = any(document["selection"].values())
    yield heading(f"Checkpoint {document['checkpoint_id']}", look)
    yield ""
    yield from facts(_facts(document, look, now_us), look)
    shown = document["operators"]
    if narrow:
        wanted = {document["selection"]["operator"], *(state["operator"] for state in document["states"])}
        shown = [operator for operator in shown if operator["uid"] in wanted]
    yield ""
    yield heading("Job graph", look, graph.summary(document["operators"]))
    yield ""
    first = graph.in_order(shown, document["edges"])[:OPERATORS_SHOWN]
    yield from graph.draw(first, document["edges"], look)
    yield from more(len(shown) - len(first), "operator", look)
    yield ""
    totals, states = document["totals"], document["states"]
    note = "" if narrow else f"{plural(totals['rows'], 'row')} in {plural(totals['segments'], 'segment')}"
    if len(states) > STATES_SHOWN:
        states = sorted(states, key=lambda state: -state["bytes"])[:LARGEST]
        note = f"the {LARGEST} largest of {count(len(document['states']))}"
    yield heading("States", look, note)
    yield ""
    if states:
        yield from _states(document, states, look, narrow=narrow)
        yield from more(len(document["states"]) - len(states), "state", look)
    else:
        yield "  none"


def more(left: int, noun: str, look: Look) -> Iterator[str]:
    """That a page leaves something out, and how to see it."""
    if left > 0:
        yield ""
        hint = "--operator UID shows one, --format json all"
        yield f"  {look['ellipsis']} and {plural(left, f'more {noun}', f'more {noun}s')} ({hint})"


def _facts(document: Json, look: Look, now_us: int) -> Iterator[tuple[str, str]]:
    yield "store", label(document["store"])
    name, job = label(document["job_name"]), label(document["job_id"])
    yield "job", job if name in ("", job) else f"{job} ({name})"
    parent = document["parent"]
    after = f", parent {parent['checkpoint_id']}" if parent else ", without a parent"
    yield "kind", document["kind"] + after
    ago = age(document["created_at_us"], now_us)
    yield "published", f"{clock(document['created_at_us'])} UTC{f', {ago} ago' if ago else ''}"
    yield "written by", f"{label(document['writer'])}, attempt {document['attempt_id']}"
    totals = document["totals"]
    sizes = [
        plural(totals["rows"], "row"),
        size(totals["bytes"]),
        plural(totals["segments"], "segment"),
        plural(totals["handles"], "handle"),
        f"manifest {size(document['manifest']['size_bytes'])}",
    ]
    if document["inline_bytes"]:
        sizes[-1] += f", with {size(document['inline_bytes'])} of the segments inline, compressed"
    yield "size", f" {look['dot']} ".join(sizes)
    yield "holds", holds_line(document["holds"], look)
    yield "features", ", ".join([*document["required_features"], *document["optional_features"]])
    if document["stop"]:
        mode, request = document["stop"]["mode"], label(document["stop"]["request"])
        yield "stop", f"the job stopped here, {mode.replace('_', ' ')}{f' (request {request})' if request else ''}"
    if document["content_of"]:
        yield "repair", f"has the content of checkpoint {document['content_of']['checkpoint_id']}"
    if document["rescaled_from"]:
        yield "rescaled", _rescaled(document["rescaled_from"])
    for i, (key, value) in enumerate(sorted(document["properties"].items())):
        yield "properties" if i == 0 else "", f"{label(key)} = {label(value)}"


def _rescaled(rescaled_from: Json) -> str:
    former = [
        f"{label(item['uid'])} had {item['parallelism']} subtasks, "
        + " and ".join(f"{ranges(item[what])} {what}" for what in ("finished", "finishing") if item[what])
        for item in rescaled_from["operators"]
    ]
    return "; ".join([f"from checkpoint {rescaled_from['checkpoint_id']}", *former])


def _states(document: Json, chosen: Sequence[Json], look: Look, *, narrow: bool) -> Iterator[str]:
    """Per operator its states, those ``chosen``: a line of figures, then what the state is made of."""
    operators = {operator["uid"]: operator for operator in document["operators"]}
    bars_width = max(4, 12 + (look.width - 80) // 2)
    columns = [
        Column("state", flexible=True),
        Column("mode"),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column("rows per subtask" if look.width >= NARROW else "per subtask"),
    ]
    place = {uid: i for i, uid in enumerate(operators)}
    states = sorted(chosen, key=lambda state: place.get(state["operator"], len(place)))
    figures = [
        [
            pad(label(state["name"]), 9),
            f"{state['mode']} {state['kind']}" if state["kind"] else state["mode"],
            count(state["rows"]),
            size(state["bytes"]),
            _skew(state, operators.get(state["operator"]), look, bars_width),
        ]
        for state in states
    ]
    titles, *lines = table(columns, figures, look, indent="    ")
    # What a state is made of stands below its mode.
    names_width = unstyle(titles).index("mode") - 8
    yield titles
    before = None
    for state, line in zip(states, lines, strict=True):
        operator = operators.get(state["operator"])
        if state["operator"] != before:
            before = state["operator"]
            title = graph.title(operator) if operator else label(before)
            yield from ("  " + look.paint(part, "name") for part in wrap(title, look.width - 2))
        yield line
        yield from facts(_shape(state, look), look, indent="      ", name_width=names_width)
        yield from contents_table(state.get("contents") or {}, look)
        if narrow and operator is not None and state["mode"] != "coordinator":
            yield from _subtasks(state, operator, look)
        if "sample" in state:
            yield from _rows(state, look)
        if (narrow or "sample" in state) and line is not lines[-1]:
            yield ""


def _per_subtask(state: Json, operator: Json | None) -> list[int | None] | None:
    """Rows of every subtask of a state that subtasks own; None for one that has ended, no list for other modes."""
    if operator is None or state["mode"] in ("coordinator", "committables"):
        return None
    rows: list[int | None] = [0] * operator["parallelism"]
    for entry in state["subtasks"]:
        if entry["subtask"] is not None and entry["subtask"] < len(rows):
            rows[entry["subtask"]] = entry["rows"]
    for first, last in (*operator["finished"], *operator["finishing"]):
        rows[first : last + 1] = [None] * (last + 1 - first)
    return rows


def _skew(state: Json, operator: Json | None, look: Look, width: int) -> str:
    rows = _per_subtask(state, operator)
    if rows is None:
        if look.width < NARROW:
            return ""  # The mode says as much.
        return "the coordinator's" if state["mode"] == "coordinator" else "the sink's"
    if all(value is None for value in rows):
        return "finished"
    ratio = f"  {state['skew']:.1f} {look['times']} mean" if state["skew"] >= 1.05 else ""
    return spark(rows, look, width=width) + ratio


def _shape(state: Json, look: Look) -> Iterator[tuple[str, str]]:
    """Key, columns, layers, and what else is particular to a state."""
    fields = state["schemas"][-1]["fields"]
    keys = [item for item in fields if item["name"] in state["key_columns"] or item["name"] == "_map_key"]
    values = [item for item in fields if item not in keys]
    yield "key", ", ".join(map(_field, keys))
    yield "columns", ", ".join(map(_field, values))
    if state["edge"] is not None:
        yield "edge", label(state["edge"])
    if len(state["schemas"]) > 1:
        older = ", ".join(str(schema["id"]) for schema in state["schemas"][:-1])
        yield "schema", f"{state['schemas'][-1]['id']}, after {older}"
    if any(layer["layer"] for layer in state["layers"]):
        parts = [
            f"{'base' if layer['layer'] == 0 else 'delta'} {plural(layer['rows'], 'row')} {size(layer['bytes'])}"
            for layer in state["layers"]
        ]
        yield "layers", f" {look['dot']} ".join(parts)
    yield from contents_facts(state.get("contents") or {}, look)


def _field(item: Json) -> str:
    """A column: name, type, and only what is not usual about it."""
    default = f" = {label(item['default'])}" if "default" in item else ""
    return f"{label(item['name'])} {type_text(item['type'])}{'' if item['nullable'] else ' not null'}{default}"


def type_text(kind: Any) -> str:
    """A type of SPEC.md section 3.7 as people write it: ``list<int64>``, ``struct<a int64, b utf8>``."""
    if isinstance(kind, str):
        return kind
    if "list" in kind:
        return f"list<{type_text(kind['list']['type'])}>"
    if "map" in kind:
        return f"map<{', '.join(type_text(item['type']) for item in kind['map'])}>"
    return f"struct<{', '.join(_field(item) for item in kind['struct'])}>"


def _subtasks(state: Json, operator: Json, look: Look) -> Iterator[str]:
    """What each subtask owns, as a table with bars."""
    entries: Collection[Json] = state["subtasks"]
    if not len(entries):
        return
    yield ""
    top = max(entry["rows"] for entry in entries)
    keyed = any(entry["first_group"] is not None for entry in entries)
    columns = [Column("subtask", right=True), Column("rows", right=True), Column("bytes", right=True)]
    columns += [
        Column("senders" if state["mode"] == "in_flight" and not state["key_columns"] else "key groups")
    ] * keyed
    columns += [Column("")]
    rows = []
    for entry in islice(entries, SUBTASKS_SHOWN):
        owner = "-" if entry["subtask"] is None else str(entry["subtask"])
        groups = "" if entry["first_group"] is None else f"{entry['first_group']}-{entry['last_group']}"
        row = [owner, count(entry["rows"]), size(entry["bytes"])] + [groups] * keyed
        rows.append([*row, bar(entry["rows"], top, look, width=min(24, look.width - 42))])
    yield from table(columns, rows, look, indent="      ")
    if len(entries) > SUBTASKS_SHOWN:
        yield f"      {look['ellipsis']} and {count(len(entries) - SUBTASKS_SHOWN)} more (--format json lists all)"
    ended = [f"{what}: {ranges(operator[what])}" for what in ("finished", "finishing") if operator[what]]
    if ended and state["mode"] != "committables":
        yield "      " + look.paint("; ".join(ended), "finished")


def _rows(state: Json, look: Look) -> Iterator[str]:
    """The sample: a table where it fits, else one block a row."""
    sample = state["sample"]
    yield ""
    yield from (_row_lines(sample, look) if sample else ["      no rows"])


def _row_lines(sample: Sequence[Json], look: Look) -> Iterator[str]:
    cells = [[cell(value) for value in row.values()] for row in sample]
    numeric = [all(type(row[name]) in (int, float, type(None)) for row in sample) for name in sample[0]]
    names = [label(name) for name in sample[0]]
    widths = [max(text_width(name), *(text_width(row[i]) for row in cells)) for i, name in enumerate(names)]
    if 6 + sum(width + 2 for width in widths) <= look.width + 2:
        columns = [Column(name, right=right) for name, right in zip(names, numeric, strict=True)]
        yield from table(columns, cells, look, indent="      ")
        return
    name_width = min(24, max(map(text_width, names)))
    margin = " " * (10 + name_width)
    for number, row in enumerate(cells):
        yield look.paint(f"      row {number + 1}", "dim")
        for name, value in zip(names, row, strict=True):
            head = f"        {look.paint(pad(name, name_width), 'dim')}  "
            if text_width(name) > name_width:
                yield from (f"        {look.paint(part, 'dim')}" for part in wrap(name, look.width - 8))
                head = margin
            for i, part in enumerate(wrap(value, look.width - len(margin))):
                yield (head if i == 0 else margin) + part
