"""The page of ``ckpt explain-restore``, drawn from its JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.ckpt.render import (
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
)

Json = Mapping[str, Any]
_WORDS = {
    "start": "starts",
    "new": "starts, new",
    "skip_finished": "finished: not started",
    "dropped": "given up",
}


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
            ("not started", ", ".join(map(label, skipped)) + (" (finished)" if skipped else "")),
            ("committed first", before if document["committable_rows"] else ""),
            ("given up", ", ".join(map(label, plan["drop"]))),
            ("un-chained", ", ".join(map(label, plan["unchained"]))),
        ],
        look,
    )
    yield ""
    yield from _operators(document, look)
    for refusal in plan["refusals"]:
        yield ""
        yield from _refusal(refusal, look)
    if plan["warnings"]:
        yield ""
        yield heading("Worth knowing", look)
        for warning in plan["warnings"]:
            yield from paragraph(label(warning["message"]), look, indent="    ", first=f"  {look['dot']} ")


def _operators(document: Json, look: Look) -> Iterator[str]:
    """Per operator a line of figures, and below it its states."""
    loads = {entry["operator"]: entry["subtasks"] for entry in document["load"]}
    bars_width = 16 + (look.width - 80) // 2
    columns = [
        Column("operator", flexible=True),
        Column("subtasks", right=True),
        Column("reads rows", right=True),
        Column("bytes", right=True),
        Column("rows per new subtask"),
    ]
    refused = {refusal["operator"] for refusal in document["plan"]["refusals"]}
    rows = []
    for operator in document["plan"]["operators"]:
        load = loads.get(operator["uid"], [])
        per_subtask = [entry["rows"] for entry in load]
        rows.append(
            [
                label(operator["uid"]),
                _numbers(operator, look),
                count(sum(per_subtask)) if load else "",
                size(sum(entry["bytes"] for entry in load)) if load else "",
                _bars(operator, per_subtask, look, bars_width, refused=operator["uid"] in refused),
            ]
        )
    titles, *lines = table(columns, rows, look)
    yield titles
    for operator, line in zip(document["plan"]["operators"], lines, strict=True):
        yield line
        states = [state for state in document["states"] if state["operator"] == operator["uid"]]
        yield from _states(states, look)


def _numbers(operator: Json, look: Look) -> str:
    old, new = operator["old_parallelism"], operator["parallelism"]
    if operator["action"] == "skip_finished":
        return str(old)
    change = str(new) if old == new else f"{old or 'new'} {look['arrow']} {new or 'none'}"
    return f"{change} of {operator['max_parallelism']}" if new else change


def _bars(operator: Json, rows: list[int], look: Look, width: int, *, refused: bool) -> str:
    if operator["action"] in ("skip_finished", "dropped"):
        role = "finished" if operator["action"] == "skip_finished" else "dim"
        return look.paint(_WORDS[operator["action"]], role)
    if not any(rows):
        return look.paint("refused", "problem") if refused else "no state"
    uneven = skew(rows)
    return spark(rows, look, width=width) + (f"  {uneven:.1f} {look['times']} mean" if uneven >= 1.05 else "")


def _states(states: list[Json], look: Look) -> Iterator[str]:
    name_width = min(24, max((len(label(state["name"])) for state in states), default=0))
    for state in states:
        mode = f"{state['mode']} {state['kind']}" if state["kind"] else state["mode"]
        name = pad(shorten(label(state["name"]), name_width, look), name_width)
        yield f"    {name}  {look.paint(pad(mode, 12), 'dim')}  {state['rule']}"


def _refusal(refusal: Json, look: Look) -> Iterator[str]:
    """One reason: its code and operator, what disagrees, the next step."""
    mark = look.paint(look["fail"], "problem")
    yield f"  {mark} {look.paint(refusal['code'], 'problem')}  {look.paint(label(refusal['operator']), 'name')}"
    yield from paragraph(label(refusal["message"]) + ".", look, indent="    ")
    advice = label(refusal["advice"])
    arrow = look["arrow"] + " "
    indent = "    " + " " * len(arrow)
    yield from paragraph(advice[:1].upper() + advice[1:] + ".", look, indent=indent, first="    " + arrow)
