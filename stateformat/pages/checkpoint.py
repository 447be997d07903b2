"""What is shown of a checkpoint, of a dataflow before it has one, and of a history."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from .. import words
from ..model import GIVEN_UP_PROPERTY
from ..words import count, plural, ranges, size
from .blocks import (
    Bar,
    Block,
    Cell,
    Column,
    Facts,
    Graph,
    Heading,
    Json,
    Note,
    Row,
    Said,
    Spark,
    Table,
    Values,
    dotted,
    in_order,
    listed,
    measure,
    more,
    some,
    uneven,
)

Fact = tuple[Cell, Cell]
SUBTASKS_SHOWN: Final = 40
"""Subtasks of a state on a page; JSON lists all."""
OPERATORS_SHOWN: Final = 40
"""Operators of a graph on a page."""
STATES_SHOWN: Final = 40
"""If there are more states, the page shows only the :data:`LARGEST` that take the most bytes."""
LARGEST: Final = 20
GIVEN_UP_SHOWN: Final = 10
"""States that were given up, on a page."""
LINES_SHOWN: Final = 20
"""Inputs, or attempts, of one state on a page; JSON lists all."""
COMMIT_DIGITS: Final = 12
"""Digits of a commit on a page."""
MORE: Final = "--operator UID shows one, --format json all"


def checkpoint_page(document: Json, now_us: int) -> Iterator[Block]:
    """Make the page of ``ckpt inspect``, or the part that ``--operator`` and ``--state`` select."""
    chosen = document["selection"]
    is_part = any(chosen.values())
    yield Heading(f"Checkpoint {document['checkpoint_id']}")
    yield Facts([("store", document["store"]), *checkpoint_facts(document, now_us)])
    shown = document["operators"]
    if is_part:
        wanted = {chosen["operator"], *(state["operator"] for state in document["states"])}
        shown = [operator for operator in shown if operator["uid"] in wanted]
    yield Heading("Job graph", graph_summary(document["operators"]))
    yield from graph_blocks(shown, document["edges"], hint=MORE)
    totals, states = document["totals"], document["states"]
    note = f"{plural(totals['rows'], 'row')} in {plural(totals['segments'], 'segment')}"
    if is_part or document["system"]:
        note = ""
    if len(states) > STATES_SHOWN:
        states = sorted(states, key=lambda state: -state["bytes"])[:LARGEST]
        note = f"the {LARGEST} largest of {count(len(document['states']))}"
    yield Heading("States", note)
    yield _states(document, states, is_part=is_part) if states else Note("none")
    if len(document["states"]) > len(states):
        yield Note(more(len(document["states"]) - len(states), "state", hint=MORE))
    if document["system"] and any(state["rows"] is None for state in states):
        yield Note(not_counted(document))
    facts = [] if is_part else [*remarks(document)]
    if facts:
        yield Facts(facts)


def not_counted(document: Json) -> str:
    """Return which command counts the rows of another system's checkpoint, if it is large."""
    address = shlex.quote(f"{document['store']}@{document['checkpoint_id']}")
    return f"Its rows are not counted here: `ckpt top {address}` counts them."


def dataflow_page(document: Json) -> Iterator[Block]:
    """Make the page of a dataflow: the graph of a first run, its states, its warnings."""
    names = {operator["uid"]: words.operator_of(operator) for operator in document["operators"]}
    yield Heading(f"Dataflow {words.named(document['job_id'], document['job_name'])}")
    yield from graph_blocks(document["operators"], document["edges"])
    states = document["states"]
    rows = [
        Row(
            (state["name"], words.mode_of(state).replace("_", " ")),
            [Facts([*_columns(state)])],
            names.get(state["operator"], state["operator"]),
        )
        for state in states[:LARGEST]
    ]
    yield Heading("States", plural(len(states), "state"))
    yield Table([Column("state"), Column("mode")], rows, noun="state", left=len(states) - len(rows), hint="")
    for sentence in document["warnings"]:
        yield Note(f"Warning: {sentence}")


def graph_blocks(
    operators: Sequence[Json], edges: Sequence[Json], *, hint: str = "--format json lists all"
) -> Iterator[Block]:
    """Make a job graph; of a large one a page of text shows only the first operators."""
    yield Graph(in_order(operators, edges), edges, {}, OPERATORS_SHOWN, hint)


def graph_summary(operators: Sequence[Json]) -> str:
    """Return how much of the graph has finished, in one line."""
    full = sum(operator["status"] == "fully_finished" for operator in operators)
    part = sum(operator["status"] == "partially_finished" for operator in operators)
    parts = [plural(len(operators), "operator"), f"{full} finished" if full else "", f"{part} partly" if part else ""]
    return ", ".join(filter(None, parts))


# ---- facts


def checkpoint_facts(document: Json, now_us: int | None = None) -> Iterator[Fact]:
    """Yield what is known of a checkpoint besides its graph and states; without ``now_us`` not how
    old it is, for a page that is kept.
    """
    yield "job", words.named(document["job_id"], document["job_name"])
    totals = document["totals"]
    if document["system"]:
        yield "system", f"{document['system']}, read as it is"
        rows = "" if totals["rows"] is None else plural(totals["rows"], "row")
        yield "size", dotted(rows, size(totals["bytes"]), plural(totals["handles"], "handle"))
        yield "holds", _holds(document["holds"])
        return
    parent = document["parent"]
    yield "kind", document["kind"] + (f", parent {parent['checkpoint_id']}" if parent else ", without a parent")
    made_us = document["created_at_us"]
    yield "published", words.published(made_us, now_us) if now_us is not None else f"{words.clock(made_us)} UTC"
    yield (
        "written by",
        dotted(_origin(document["written_by"]), f"{document['writer']}, attempt {document['attempt_id']}"),
    )
    inline, manifest = document["inline_bytes"], f"manifest {size(document['manifest']['size_bytes'])}"
    if inline:
        manifest += f", with {size(inline)} of the segments inline, compressed"
    segments, handles = plural(totals["segments"], "segment"), plural(totals["handles"], "handle")
    yield "size", dotted(plural(totals["rows"], "row"), size(totals["bytes"]), segments, handles, manifest)
    yield "holds", _holds(document["holds"])
    yield "features", ", ".join([*document["required_features"], *document["optional_features"]])
    if document["stop"]:
        request = document["stop"]["request"]
        yield "stop", f"{words.stopped(document['stop'])}{f', request {request}' if request else ''}"
    if document["content_of"]:
        yield "repair", f"has the content of checkpoint {document['content_of']['checkpoint_id']}"
    if document["rescaled_from"]:
        yield "rescaled", _rescaled(document["rescaled_from"])
    if document["given_up"]:
        yield "given up", _given_up(document["given_up"])


def remarks(document: Json) -> Iterator[Fact]:
    """Yield what stands at the end of a page: properties, and what reading another system did."""
    for note in document["notes"]:
        yield note["kind"], f"{note['subject']}: {note['message']}" if note["subject"] else note["message"]
    shown = {f"stateformat.{name}" for name in document["written_by"]}  # By the line "written by".
    shown |= {GIVEN_UP_PROPERTY} if document["given_up"] else set()
    others = [
        f"{key} = {_property(key, value)}" for key, value in sorted(document["properties"].items()) if key not in shown
    ]
    yield from listed("properties", others, len(others))


def _property(key: str, value: str) -> str:
    """Return a value, and the time that it is where its name says so."""
    if key.endswith("_ms") and value.isascii() and value.isdigit() and 10**11 <= int(value) < 10**14:
        return f"{value}, {words.clock(int(value) * 1000)} UTC"
    return value


def _holds(holds: Json | None) -> str:
    """Return what is in the checkpoint that a run uses up, in one line."""
    if not holds:
        return ""
    waiting = [entry["rows"] for entry in holds["in_flight"] if entry["rows"]]
    return dotted(
        plural(holds["timers"], "timer") if holds["timers"] else "",
        f"{plural(sum(waiting), 'record')} in flight on {plural(len(waiting), 'edge')}" if waiting else "",
        plural(holds["committables"], "committable") if holds["committables"] else "",
    )


def _given_up(told: Json) -> str:
    """Return what the checkpoint was published without, in a line."""
    states = [
        f"{each['operator']}/{each['state']} {count(each['rows'] + each['rows_besides'])}" for each in told["states"]
    ]
    what = f"{plural(told['rows'], 'row')} of checkpoint {told['checkpoint_id']}, whose segments were lost"
    return f"{what}: {', '.join(some(states, GIVEN_UP_SHOWN))}"


def _origin(origin: Json) -> str:
    """Return who wrote a checkpoint, in words; empty where nobody said it."""
    code = origin["code"]
    commit, _, differs = (code or "").partition("-")
    if code and len(commit) >= 40 and commit.isalnum():
        code = commit[:COMMIT_DIGITS] + (f"-{differs}" if differs else "")
    return dotted(
        origin["program"] or ("an unnamed program" if code else ""),
        f"version {code}" if code else "",
        f"Spark application {origin['spark_application']}" if origin["spark_application"] else "",
        f"on {origin['host']}" if origin["host"] else "",
        f"as {origin['user']}" if origin["user"] else "",
    )


def _rescaled(rescaled_from: Json) -> str:
    former = [
        f"{item['uid']} had {item['parallelism']} subtasks, "
        + " and ".join(f"{ranges(item[what])} {what}" for what in ("finished", "finishing") if item[what])
        for item in rescaled_from["operators"]
    ]
    return "; ".join([f"from checkpoint {rescaled_from['checkpoint_id']}", *former])


# ---- states


def _states(document: Json, chosen: Sequence[Json], *, is_part: bool) -> Table:
    """Make the chosen states per operator: a line of figures, then what the state is made of."""
    operators = {operator["uid"]: operator for operator in document["operators"]}
    place = {uid: i for i, uid in enumerate(operators)}
    rows = []
    for state in sorted(chosen, key=lambda state: place.get(state["operator"], len(place))):
        operator = operators.get(state["operator"])
        below: list[Block] = [Facts([*state_facts(state), *contents_facts(state.get("contents") or {})])]
        below += contents_table(state.get("contents") or {})
        if is_part and operator is not None and state["mode"] != "coordinator" and len(state["subtasks"]):
            below.append(_subtasks(state, operator))
        if "sample" in state:
            below.append(_sample(state["sample"]) if state["sample"] else Note("no rows"))
        mode = f"{state['mode']} {state['kind']}" if state["kind"] else state["mode"]
        cells = (state["name"], mode, count(state["rows"]), size(state["bytes"]), _skew(state, operator))
        rows.append(Row(cells, below, words.operator_of(operator) if operator else state["operator"]))
    unit = "bytes" if any(state["rows"] is None for state in chosen) else "rows"
    columns = [
        Column("state", flexible=True, least=9),
        Column("mode"),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column(f"{unit} per subtask", narrow=Column("per subtask", flexible=True)),
    ]
    return Table(columns, rows)


def _measure(state: Json) -> str:
    """Return what bars show: bytes where nobody has counted another system's rows."""
    return "bytes" if state["rows"] is None else "rows"


def _skew(state: Json, operator: Json | None) -> Cell:
    if operator is None or state["mode"] in ("coordinator", "committables"):
        return "the coordinator's" if state["mode"] == "coordinator" else "the sink's"
    values: list[int | None] = [0] * operator["parallelism"]
    for entry in state["subtasks"]:
        if entry["subtask"] is not None and entry["subtask"] < len(values):
            values[entry["subtask"]] = entry[_measure(state)]
    for first, last in (*operator["finished"], *operator["finishing"]):
        values[first : last + 1] = [None] * (last + 1 - first)
    return "finished" if all(value is None for value in values) else Spark(values, uneven(state["skew"]))


def _columns(state: Json) -> Iterator[Fact]:
    fields = state["schemas"][-1]["fields"] if state["schemas"] else []
    keys = [item for item in fields if item["name"] in state["key_columns"] or item["name"] == "_map_key"]
    yield "key", ", ".join(map(words.field, keys))
    yield "columns", ", ".join(words.field(item) for item in fields if item not in keys)


def state_facts(state: Json) -> Iterator[Fact]:
    """Yield key, columns, layers, and what else is special about a state."""
    yield from _columns(state)
    yield "edge", state["edge"] or ""
    if state["ttl"] is not None:
        yield "ttl", dotted(*words.ttl_of(state["ttl"]))
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
        yield "layers", dotted(*some(parts, LINES_SHOWN))


def contents_facts(contents: Json) -> Iterator[Fact]:
    """Yield what a runtime's own state holds."""
    if "unread" in contents:
        yield "contents", f"not read: {contents['unread']}"
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
    prepared = [
        f"{plural(each['rows'], 'committable')} under checkpoint {each['checkpoint_id']}, attempt {each['attempt_id']}"
        for each in contents.get("prepared", ())
    ]
    yield from listed("prepared", prepared, LINES_SHOWN)


def contents_table(contents: Json) -> list[Block]:
    """Make the inputs of an operator: how far each is, and whether it has ended."""
    rows = [
        (entry["edge"], _time(entry, "watermark"), "ended" if entry["ended"] else "")
        for entry in contents.get("inputs", ())
    ]
    columns = [Column("input", flexible=True), Column("watermark"), Column()]
    return [Table(columns, rows, LINES_SHOWN)] if rows else []


def _time(entry: Json, name: str) -> str:
    text = str(entry[f"{name}_at"])
    return {"none": "none yet", "end": "the end"}.get(text, text.replace("T", " ").removesuffix("Z"))


def _subtasks(state: Json, operator: Json) -> Table:
    """Make what each subtask owns, with bars."""
    entries: Collection[Json] = state["subtasks"]
    unit = _measure(state)
    top = max(entry[unit] for entry in entries)
    is_keyed = any(entry["first_group"] is not None for entry in entries)
    by_sender = state["mode"] == "in_flight" and not state["key_columns"]
    columns = [
        *(Column("subtask", right=True), Column("rows", right=True), Column("bytes", right=True)),
        *([Column("senders" if by_sender else "key groups")] if is_keyed else []),
        Column(),
    ]
    rows: list[Sequence[Cell]] = []
    for entry in islice(entries, SUBTASKS_SHOWN):
        owner = "-" if entry["subtask"] is None else str(entry["subtask"])
        groups = "" if entry["first_group"] is None else f"{entry['first_group']}-{entry['last_group']}"
        figures = (owner, count(entry["rows"]), size(entry["bytes"]))
        rows.append((*figures, *([groups] if is_keyed else []), Bar(entry[unit], top, measure(unit, entry[unit]))))
    ended = [f"{what}: {ranges(operator[what])}" for what in ("finished", "finishing") if operator[what]]
    foot = Said("; ".join(ended) if state["mode"] != "committables" else "", "good")
    return Table(columns, rows, left=len(entries) - len(rows), foot=foot)


def _sample(sample: Sequence[Json]) -> Values:
    """Make some rows of a state."""
    numbers = {name for name in sample[0] if all(type(row[name]) in (int, float, type(None)) for row in sample)}
    return Values([{"name": name, "type": "int" if name in numbers else "string"} for name in sample[0]], sample)


# ---- the history


def history_page(document: Json, now_us: int) -> Iterator[Block]:
    """Make the page of ``ckpt history``: the store and its job, its checkpoints, what is odd."""
    checkpoints = document["checkpoints"]
    yield Heading("History")
    yield Facts([("store", document["store"]), ("job", words.named(document["job_id"], document["job_name"]))])
    columns = [
        Column("id", right=True),
        Column("kind"),
        Column("published (UTC)", whole=True),
        Column("age", right=True, optional=2),
        Column("finished", flexible=True, optional=1),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column("parent", right=True, optional=1),
    ]
    unknown = _unknown([*checkpoints, *document["cut_off"]])
    rows = {entry["checkpoint_id"]: _entry(entry, now_us) for entry in (*checkpoints, *document["cut_off"])}
    for what in ("damaged", "lost"):
        for entry in document[what]:
            rows[entry["checkpoint_id"]] = [str(entry["checkpoint_id"]), what, *[""] * 6]
    older, hint = document.get("older", 0), "store.history() has all"
    ordered = [
        [cell for cell, column in zip(rows[number], columns, strict=True) if column.title not in unknown]
        for number in sorted(rows, reverse=True)
    ]
    yield Table([column for column in columns if column.title not in unknown], ordered, None, "checkpoint", hint, older)
    yield from _savepoints(document["savepoints"], now_us)
    for entry in checkpoints:
        if entry["stop"]:
            yield Note(f"At checkpoint {entry['checkpoint_id']} the job {words.stopped(entry['stop'])}.")
    if document["ended_by"]:
        yield Note(words.sentence(document["ended_by"]["message"]), "✗", "bad")
    strays = document["strays"]
    if strays:
        names = ", ".join(
            f"{stray['checkpoint_id']} ({'attempt ' + stray['attempt_id'][:8] if stray['attempt_id'] else 'damaged'})"
            for stray in strays
        )
        removal = f"Retention removes {'it' if len(strays) == 1 else 'them'} (`ckpt gc --keep N`)."
        yield Note(f"{plural(len(strays), 'stray')}, no checkpoint: {names}. {removal}")


FAULTS_SHOWN: Final = 5
"""What is wrong below a folder, on a page; JSON lists all."""


def below_page(document: Json, now_us: int) -> Iterator[Block]:
    """Make the page of ``ckpt history`` for a folder: the checkpoints below it, what is wrong."""
    yield Heading("Checkpoints below a folder")
    yield Facts([("folder", document["folder"])])
    columns = [
        Column("of"),
        Column("kind", optional=2),
        Column("id", right=True),
        Column("written (UTC)", whole=True, narrow=Column("written (UTC)", whole=True, optional=1)),
        Column("age", right=True, optional=3),
        Column("bytes", right=True, narrow=Column("bytes", right=True, optional=2)),
        Column("written by", optional=4),
        Column("state"),
        Column("place", wraps=True),
    ]
    places = document["places"]
    yield Table(columns, [_place(place, now_us) for place in places], None, "checkpoint", "--limit N", document["more"])
    faults = [words.sentence(f"{place['path']}: {place['fault']['message']}") for place in places if place["fault"]]
    if faults:
        yield Note([*some(faults, FAULTS_SHOWN)], "✗", "bad")
    if document["left_out"]:
        yield Note(
            f"{plural(document['left_out'], 'folder')} were not looked into, since {count(document['looked_into'])} "
            "were: give a folder further down"
        )
    passed = [f"{one['path']}: {one['why']}" for one in document["passed_over"]]
    if passed:
        yield Facts(listed("passed over", passed, FAULTS_SHOWN))
    address = next((place["address"] for place in places if place["whole"]), None)
    if address is not None:
        yield Note(f"`ckpt inspect {shlex.quote(address)}` shows the first that is whole.")


def _unknown(entries: Sequence[Json]) -> list[str]:
    """Return the columns of which nothing is known: rows of another system, times of Flink."""
    rows = any(entry["totals"]["rows"] is not None for entry in entries)
    times = any(entry["created_at_us"] for entry in entries)
    return [*([] if rows or not entries else ["rows"]), *([] if times or not entries else ["published (UTC)", "age"])]


def _place(place: Json, now_us: int) -> list[Cell]:
    record, written_us = place["checkpoint"], place["written_at_us"]
    return [
        place["system"] or "store",
        record["kind"] if record else "",
        "" if place["id"] is None else str(place["id"]),
        words.clock(written_us, seconds=False) if written_us else "-",
        words.age(written_us, now_us) if written_us else "",
        size(record["totals"]["bytes"]) if record else "-",
        place["writer"] or "",
        {True: "whole", False: "not whole", None: "unknown"}[place["whole"]],
        place["path"],
    ]


def _entry(entry: Json, now_us: int) -> list[Cell]:
    made_us = entry["created_at_us"]
    return [
        str(entry["checkpoint_id"]),
        entry["kind"],
        # Flink's metadata has no time.
        words.clock(made_us, seconds=False) if made_us else "-",
        words.age(made_us, now_us) if made_us else "",
        words.operators_finished(entry),
        count(entry["totals"]["rows"]),
        size(entry["totals"]["bytes"]),
        str(entry["parent"]["checkpoint_id"]) if entry["parent"] else "",
    ]


def _savepoints(found: Sequence[Json], now_us: int) -> Iterator[Block]:
    """Make the table of what lies in ``savepoints/``, and what is wrong with it."""
    if not found:
        return
    columns = [
        Column("savepoint", flexible=True),
        Column("id", right=True),
        Column("published (UTC)", whole=True),
        Column("age", right=True, optional=2),
        Column("rows", right=True),
        Column("bytes", right=True),
    ]
    rows: list[list[Cell]] = []
    for each in found:
        of: Any = each["checkpoint"]
        row = [each["name"], "damaged", *[""] * 4] if of is None else [each["name"], *_entry(of, now_us)]
        rows.append(row if of is None else [row[i] for i in (0, 1, 3, 4, 6, 7)])
    yield Table(columns, rows)
    for each in found:
        if each["fault"]:
            fault = words.sentence(f"savepoint {each['name']}: {each['fault']['message']}")
            yield Note(fault, "✗", "bad")
        elif each["claimed"]:
            yield Note(f"Savepoint {each['name']} is claimed: a job has gone on in it.")


def freed(found: Json | None) -> str:
    """Return what deleting would free, and what of it stays under other names."""
    if found is None:
        return ""
    if found["stopped"]:
        return "not known"
    if not found["objects"]:
        return "nothing"
    stays = f"{size(found['shared_bytes'])} stay under other names" if found["shared_bytes"] else ""
    return dotted(f"frees {size(found['bytes'] - found['shared_bytes'])}", plural(found["objects"], "object"), stays)
