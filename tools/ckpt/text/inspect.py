"""The page of ``ckpt inspect``: facts, graph, states. Drawn from the JSON document alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from click import unstyle

from stateformat import words
from stateformat.documents import in_order
from stateformat.model import GIVEN_UP_PROPERTY
from stateformat.words import count, label, plural, ranges, size, stopped

from . import graph, render
from .contents import contents_facts, contents_table, holds_line
from .render import Column, Look

Json = Mapping[str, Any]
SUBTASKS_SHOWN: Final = 40
"""Subtasks of a state on a page; JSON lists all."""
OPERATORS_SHOWN: Final = 40
"""Operators of a graph on a page."""
STATES_SHOWN: Final = 40
"""If there are more states, the page shows only the :data:`LARGEST` that take the most bytes."""
LARGEST: Final = 20
GIVEN_UP_SHOWN: Final = 10
"""States that were given up, on a page."""
COMMIT_DIGITS: Final = 12
"""Digits of a commit on a page."""
MORE: Final = "--operator UID shows one, --format json all"


def draw_checkpoint(document: Json, look: Look, now_us: int) -> Iterator[str]:
    """The whole page, or the part that ``--operator`` and ``--state`` select."""
    narrow = any(document["selection"].values())
    yield from render.page_head(f"Checkpoint {document['checkpoint_id']}", _facts(document, look, now_us), look)
    shown = document["operators"]
    if narrow:
        wanted = {document["selection"]["operator"], *(state["operator"] for state in document["states"])}
        shown = [operator for operator in shown if operator["uid"] in wanted]
    yield ""
    yield render.heading("Job graph", look, graph.summary(document["operators"]))
    yield ""
    first = in_order(shown, document["edges"])[:OPERATORS_SHOWN]
    yield from graph.draw(first, document["edges"], look)
    yield from _more(len(shown) - len(first), "operator", look)
    yield ""
    totals, states = document["totals"], document["states"]
    note = (
        ""
        if narrow or document["system"]
        else f"{plural(totals['rows'], 'row')} in {plural(totals['segments'], 'segment')}"
    )
    if len(states) > STATES_SHOWN:
        states = sorted(states, key=lambda state: -state["bytes"])[:LARGEST]
        note = f"the {LARGEST} largest of {count(len(document['states']))}"
    yield render.heading("States", look, note)
    yield ""
    if states:
        yield from _states(document, states, look, narrow=narrow)
        yield from _more(len(document["states"]) - len(states), "state", look)
    else:
        yield "  none"


def _more(left: int, noun: str, look: Look) -> list[str]:
    return ["", f"  {render.more(left, look, noun, hint=MORE)}"] if left > 0 else []


def _facts(document: Json, look: Look, now_us: int) -> Iterator[tuple[str, str]]:
    yield "store", label(document["store"])
    yield "job", words.named(document["job_id"], document["job_name"])
    if document["system"]:
        yield from _foreign_facts(document, look)
        return
    parent = document["parent"]
    after = f", parent {parent['checkpoint_id']}" if parent else ", without a parent"
    yield "kind", document["kind"] + after
    yield "published", words.published(document["created_at_us"], now_us)
    writer = f"{label(document['writer'])}, attempt {document['attempt_id']}"
    yield "written by", look.dotted(origin_text(document["written_by"], look), writer)
    totals, inline = document["totals"], document["inline_bytes"]
    manifest = f"manifest {size(document['manifest']['size_bytes'])}"
    if inline:
        manifest += f", with {size(inline)} of the segments inline, compressed"
    segments, handles = plural(totals["segments"], "segment"), plural(totals["handles"], "handle")
    yield "size", look.dotted(plural(totals["rows"], "row"), size(totals["bytes"]), segments, handles, manifest)
    yield "holds", holds_line(document["holds"], look)
    yield "features", ", ".join([*document["required_features"], *document["optional_features"]])
    if document["stop"]:
        request = label(document["stop"]["request"])
        yield "stop", f"{stopped(document['stop'])}{f', request {request}' if request else ''}"
    if document["content_of"]:
        yield "repair", f"has the content of checkpoint {document['content_of']['checkpoint_id']}"
    if document["rescaled_from"]:
        yield "rescaled", _rescaled(document["rescaled_from"])
    if document["given_up"]:
        yield "given up", _given_up(document["given_up"], look)
    yield from _properties(document)


def _given_up(told: Json, look: Look) -> str:
    """What the checkpoint was published without, in a line."""
    states = [
        f"{label(each['operator'])}/{label(each['state'])} {count(each['rows'] + each['rows_besides'])}"
        for each in told["states"][:GIVEN_UP_SHOWN]
    ]
    states.append(render.more(len(told["states"]) - GIVEN_UP_SHOWN, look))
    what = f"{plural(told['rows'], 'row')} of checkpoint {told['checkpoint_id']}, whose segments were lost"
    return f"{what}: {', '.join(filter(None, states))}"


def origin_text(origin: Json, look: Look) -> str:
    """Who wrote a checkpoint, in words; empty where nobody said it."""
    commit, _, differs = (origin["code"] or "").partition("-")
    code = origin["code"]
    if code and len(commit) >= 40 and commit.isalnum():
        code = commit[:COMMIT_DIGITS] + (f"-{differs}" if differs else "")
    parts = (
        origin["program"] or ("an unnamed program" if code else ""),
        f"version {code}" if code else "",
        f"Spark application {origin['spark_application']}" if origin["spark_application"] else "",
        f"on {origin['host']}" if origin["host"] else "",
        f"as {origin['user']}" if origin["user"] else "",
    )
    return look.dotted(*map(label, parts))


def _foreign_facts(document: Json, look: Look) -> Iterator[tuple[str, str]]:
    """Of another system's checkpoint: what it is, its size, its properties, and what to know."""
    yield "system", f"{document['system']}, read as it is"
    totals = document["totals"]
    rows = [] if totals["rows"] is None else [plural(totals["rows"], "row")]
    yield "size", look.dotted(*rows, size(totals["bytes"]), plural(totals["handles"], "handle"))
    yield "holds", holds_line(document["holds"], look)
    yield from _properties(document)
    for note in document["notes"]:
        subject = f"{label(note['subject'])}: " if note["subject"] else ""
        yield note["kind"], f"{subject}{label(note['message'])}"


def _properties(document: Json) -> Iterator[tuple[str, str]]:
    shown = {f"stateformat.{name}" for name in document["written_by"]}  # By the line "written by".
    shown |= {GIVEN_UP_PROPERTY} if document["given_up"] else set()
    others = {key: value for key, value in document["properties"].items() if key not in shown}
    for i, (key, value) in enumerate(sorted(others.items())):
        yield "properties" if i == 0 else "", f"{label(key)} = {label(value)}"


def _rescaled(rescaled_from: Json) -> str:
    former = [
        f"{label(item['uid'])} had {item['parallelism']} subtasks, "
        + " and ".join(f"{ranges(item[what])} {what}" for what in ("finished", "finishing") if item[what])
        for item in rescaled_from["operators"]
    ]
    return "; ".join([f"from checkpoint {rescaled_from['checkpoint_id']}", *former])


def _states(document: Json, chosen: Sequence[Json], look: Look, *, narrow: bool) -> Iterator[str]:
    """The chosen states per operator: a line of figures, then what the state is made of."""
    operators = {operator["uid"]: operator for operator in document["operators"]}
    bars_width = max(4, 12 + (look.width - 80) // 2)
    columns = [
        Column("state", flexible=True),
        Column("mode"),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column(f"{_measure(chosen)} per subtask" if look.width >= render.NARROW else "per subtask"),
    ]
    place = {uid: i for i, uid in enumerate(operators)}
    states = sorted(chosen, key=lambda state: place.get(state["operator"], len(place)))
    figures = [
        [
            render.pad(label(state["name"]), 9),
            f"{state['mode']} {state['kind']}" if state["kind"] else state["mode"],
            count(state["rows"]),
            size(state["bytes"]),
            _skew(state, operators.get(state["operator"]), look, bars_width),
        ]
        for state in states
    ]
    titles, *lines = render.table(columns, figures, look, indent="    ")
    # What a state is made of is aligned with its mode.
    names_width = unstyle(titles).index("mode") - 8
    yield titles
    before = None
    for state, line in zip(states, lines, strict=True):
        operator = operators.get(state["operator"])
        if state["operator"] != before:
            before = state["operator"]
            title = words.operator_of(operator) if operator else label(before)
            yield from ("  " + look.paint(part, "name") for part in render.wrap(title, look.width - 2))
        yield line
        yield from render.facts(_shape(state, look), look, indent="      ", name_width=names_width)
        yield from contents_table(state.get("contents") or {}, look)
        if narrow and operator is not None and state["mode"] != "coordinator":
            yield from _subtasks(state, operator, look)
        if "sample" in state:
            yield ""
            yield from _sample(state["sample"], look) if state["sample"] else ["      no rows"]
        if (narrow or "sample" in state) and line is not lines[-1]:
            yield ""


def _measure(states: Sequence[Json]) -> str:
    """What bars show: bytes where nobody has counted the rows of other systems' checkpoints."""
    return "bytes" if any(state["rows"] is None for state in states) else "rows"


def _per_subtask(state: Json, operator: Json | None) -> list[int | None] | None:
    """Rows (:func:`_measure`) of each subtask, None for a finished one; None if none owns it."""
    if operator is None or state["mode"] in ("coordinator", "committables"):
        return None
    rows: list[int | None] = [0] * operator["parallelism"]
    for entry in state["subtasks"]:
        if entry["subtask"] is not None and entry["subtask"] < len(rows):
            rows[entry["subtask"]] = entry[_measure([state])]
    for first, last in (*operator["finished"], *operator["finishing"]):
        rows[first : last + 1] = [None] * (last + 1 - first)
    return rows


def _skew(state: Json, operator: Json | None, look: Look, width: int) -> str:
    rows = _per_subtask(state, operator)
    if rows is None:
        if look.width < render.NARROW:
            return ""  # The mode says as much.
        return "the coordinator's" if state["mode"] == "coordinator" else "the sink's"
    if all(value is None for value in rows):
        return "finished"
    return render.spark(rows, look, width=width) + render.uneven(state["skew"], look)


def _shape(state: Json, look: Look) -> Iterator[tuple[str, str]]:
    """Key, columns, layers, and what else is special about a state."""
    fields = state["schemas"][-1]["fields"]
    keys = [item for item in fields if item["name"] in state["key_columns"] or item["name"] == "_map_key"]
    values = [item for item in fields if item not in keys]
    yield "key", ", ".join(map(words.field, keys))
    yield "columns", ", ".join(map(words.field, values))
    if state["edge"] is not None:
        yield "edge", label(state["edge"])
    if state["ttl"] is not None:
        yield "ttl", look.dotted(*words.ttl_of(state["ttl"]))
    if state["clock"] == "processing_time":
        said = state["now_at"] and words.clock(state["now_us"])
        yield "clock", f"processing time, {said} at this checkpoint" if said else "processing time"
    if len(state["schemas"]) > 1:
        older = ", ".join(str(schema["id"]) for schema in state["schemas"][:-1])
        yield "schema", f"{state['schemas'][-1]['id']}, after {older}"
    if any(layer["layer"] for layer in state["layers"]):
        parts = [
            f"{'base' if layer['layer'] == 0 else 'delta'} {plural(layer['rows'], 'row')} {size(layer['bytes'])}"
            for layer in state["layers"]
        ]
        yield "layers", look.dotted(*parts)
    yield from contents_facts(state.get("contents") or {}, look)


def _subtasks(state: Json, operator: Json, look: Look) -> Iterator[str]:
    """What each subtask owns, as a table with bars."""
    entries: Collection[Json] = state["subtasks"]
    if not len(entries):
        return
    yield ""
    measure = _measure([state])
    top = max(entry[measure] for entry in entries)
    columns = [Column("subtask", right=True), Column("rows", right=True), Column("bytes", right=True)]
    keyed = any(entry["first_group"] is not None for entry in entries)
    if keyed:
        by_sender = state["mode"] == "in_flight" and not state["key_columns"]
        columns.append(Column("senders" if by_sender else "key groups"))
    columns.append(Column(""))
    rows = []
    for entry in islice(entries, SUBTASKS_SHOWN):
        owner = "-" if entry["subtask"] is None else str(entry["subtask"])
        groups = "" if entry["first_group"] is None else f"{entry['first_group']}-{entry['last_group']}"
        row = [owner, count(entry["rows"]), size(entry["bytes"])] + [groups] * keyed
        rows.append([*row, render.bar(entry[measure], top, look, width=min(24, look.width - 42))])
    yield from render.table(columns, rows, look, indent="      ")
    if len(entries) > SUBTASKS_SHOWN:
        yield f"      {render.more(len(entries) - SUBTASKS_SHOWN, look)}"
    ended = [f"{what}: {ranges(operator[what])}" for what in ("finished", "finishing") if operator[what]]
    if ended and state["mode"] != "committables":
        yield "      " + look.paint("; ".join(ended), "finished")


def _sample(sample: Sequence[Json], look: Look) -> Iterator[str]:
    """Rows as a table if it fits the page, else as one block per row."""
    cells = [[words.cell(value) for value in row.values()] for row in sample]
    numeric = [all(type(row[name]) in (int, float, type(None)) for row in sample) for name in sample[0]]
    names = [label(name) for name in sample[0]]
    widths = [
        max(render.text_width(name), *(render.text_width(row[i]) for row in cells)) for i, name in enumerate(names)
    ]
    if 6 + sum(width + 2 for width in widths) <= look.width + 2:
        columns = [Column(name, right=right) for name, right in zip(names, numeric, strict=True)]
        yield from render.table(columns, cells, look, indent="      ")
        return
    name_width = min(24, max(map(render.text_width, names)))
    margin = " " * (10 + name_width)
    for number, row in enumerate(cells):
        yield look.paint(f"      row {number + 1}", "dim")
        for name, value in zip(names, row, strict=True):
            head = f"        {look.paint(render.pad(name, name_width), 'dim')}  "
            if render.text_width(name) > name_width:
                yield from (f"        {look.paint(part, 'dim')}" for part in render.wrap(name, look.width - 8))
                head = margin
            for i, part in enumerate(render.wrap(value, look.width - len(margin))):
                yield (head if i == 0 else margin) + part
