"""``ckpt validate``: everything that is wrong with a checkpoint, each finding with its clause and what to do. Never writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import click

from ..exit_status import FINE, PROBLEMS
from ..options import Address, Session, command
from ..output import Document
from ..text import Look, facts, heading, label, paragraph, plural, size

if TYPE_CHECKING:
    from stateformat.problems import Problem


@command("validate")
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="Record, manifest, sizes and footers; or every byte and row.",
)
def validate(session: Session, address: Address, *, level: str) -> int:
    """Find everything that is wrong with a checkpoint.

    Each finding names the section of SPEC.md that is broken, the object, and what to do. Nothing is written. Exit status 1
    when there is any problem; warnings do not count.
    """
    from stateformat.model import CheckpointId
    from stateformat.validation import validate as run

    store = session.store(address.url)
    chosen = None if address.checkpoint_id is None else CheckpointId(address.checkpoint_id)
    with session.output.progress(f"Validating {address}") as step:
        report = run(store.storage, chosen, level=cast("Any", level), progress=step)
    document = {
        "store": store.url,
        "checkpoint_id": report.checkpoint_id,
        "level": report.level,
        "ok": report.ok,
        "checked": {
            "records": report.counts.records,
            "handles": report.counts.handles,
            "segments": report.counts.segments,
            "bytes": report.counts.bytes,
            "rows": report.counts.rows,
        },
        "problems": [problem_document(problem) for problem in report.problems],
        "warnings": [problem_document(problem) for problem in report.warnings],
    }
    session.output.show(document, draw)
    return FINE if report.ok else PROBLEMS


def problem_document(problem: Problem) -> Document:
    """One finding; what does not apply to it is null."""
    return {
        "kind": str(problem.kind),
        "clause": problem.clause,
        "message": problem.message,
        "advice": problem.advice,
        "path": problem.path or None,
        "operator": problem.operator or None,
        "state": problem.state or None,
        "subtask": problem.subtask,
    }


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: what was checked, every finding, the verdict as the last line."""
    number = document["checkpoint_id"]
    yield heading(f"Validation of checkpoint {number}" if number is not None else "Validation", look)
    yield ""
    checked = document["checked"]
    counts = [
        plural(checked[name], name.removesuffix("s")) for name in ("records", "handles", "segments") if checked[name]
    ]
    counts += [plural(checked["rows"], "row")] if checked["rows"] else []
    counts += [size(checked["bytes"])] if checked["bytes"] else []
    looked_at = f" {look['dot']} ".join(counts)
    yield from facts([("store", label(document["store"])), ("level", document["level"]), ("checked", looked_at)], look)
    for sort, role in (("problems", "problem"), ("warnings", "partial")):
        for problem in document[sort]:
            yield ""
            yield from _finding(problem, look, role)
    yield ""
    problems = len(document["problems"])
    if problems:
        yield f"  {look.paint(look['fail'], 'problem')} {look.paint(plural(problems, 'problem'), 'problem')}"
    else:
        noted = f", {plural(len(document['warnings']), 'warning')}" if document["warnings"] else ""
        yield f"  {look.paint(look['good'], 'finished')} {look.paint(f'no problems{noted}', 'finished')}"


def _finding(problem: Mapping[str, Any], look: Look, role: str) -> Iterator[str]:
    """Its clause and kind, where it is, what disagrees, what to do."""
    yield f"  {look.paint(look['fail' if role == 'problem' else 'dot'], role)} {look.paint(problem['clause'], role)}  {problem['kind']}"
    where = [
        f"operator {label(problem['operator'])}" if problem["operator"] else "",
        f"state {label(problem['state'])}" if problem["state"] else "",
        f"subtask {problem['subtask']}" if problem["subtask"] is not None else "",
    ]
    if any(where):
        yield "    " + look.paint(", ".join(part for part in where if part), "dim")
    if problem["path"] and problem["path"] not in problem["message"]:
        yield "    " + look.paint(label(problem["path"]), "dim")
    message, advice = label(problem["message"]), label(problem["advice"])
    yield from paragraph(
        message[:1].upper() + message[1:] + ("" if message.endswith(".") else "."), look, indent="    "
    )
    arrow = look["arrow"] + " "
    indent = "    " + " " * len(arrow)
    yield from paragraph(advice[:1].upper() + advice[1:] + ".", look, indent=indent, first="    " + arrow)
