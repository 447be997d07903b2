"""``ckpt validate``: everything wrong with a checkpoint, and what to do. Never writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import click

from stateformat import words
from stateformat.words import label

from ...exit_status import FINE, PROBLEMS
from ...options import Address, Session, command, id_of
from ...output import Document
from ...text import Look, render


@command("validate", foreign=True)
@click.option(
    "--level",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="Record, manifest, sizes and footers; or every byte and row.",
)
def validate(session: Session, address: Address, *, level: str) -> int:
    """Find everything that is wrong with a checkpoint.

    Each finding names the broken section of SPEC.md, the object, and what to do. Nothing is
    written. Exit status 1 if there is any problem; warnings do not count.
    """
    from stateformat.documents import problem_document
    from stateformat.validation import validate as run

    store = session.store(address)
    with session.output.progress(f"Validating {address}") as step:
        report = run(store, id_of(address), level=cast("Any", level), progress=step)
    document = {
        "store": store.url,
        "checkpoint_id": report.checkpoint_id,
        "level": report.level,
        "ok": report.ok,
        "checked": {name: getattr(report.counts, name) for name in ("records", "handles", "segments", "bytes", "rows")},
        "problems": [problem_document(problem) for problem in report.problems],
        "warnings": [problem_document(problem) for problem in report.warnings],
    }
    session.output.show(document, draw)
    return FINE if report.ok else PROBLEMS


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: what was checked, every finding, and as the last line the verdict."""
    number, checked = document["checkpoint_id"], document["checked"]
    counts = [
        words.plural(checked[name], name.removesuffix("s"))
        for name in ("records", "handles", "segments", "rows")
        if checked[name]
    ]
    counts += [words.size(checked["bytes"])] if checked["bytes"] else []
    yield from render.page_head(
        f"Validation of checkpoint {number}" if number is not None else "Validation",
        [("store", label(document["store"])), ("level", document["level"]), ("checked", look.dotted(*counts))],
        look,
    )
    for problem in document["problems"]:
        yield from _finding(problem, look, "fail", "problem")
    for problem in document["warnings"]:
        yield from _finding(problem, look, "dot", "partial")
    yield ""
    problems, warnings = len(document["problems"]), len(document["warnings"])
    if problems:
        yield f"  {look.paint(look['fail'], 'problem')} {look.paint(words.plural(problems, 'problem'), 'problem')}"
    else:
        verdict = f"no problems, {words.plural(warnings, 'warning')}" if warnings else "no problems"
        yield f"  {look.paint(look['good'], 'finished')} {look.paint(verdict, 'finished')}"


def _finding(problem: Mapping[str, Any], look: Look, mark: str, role: str) -> Iterator[str]:
    """Its clause and kind, where it is, what disagrees, what to do."""
    yield ""
    yield f"  {look.paint(look[mark], role)} {look.paint(problem['clause'], role)}  {problem['kind']}"
    where = [f"{what} {label(problem[what])}" for what in ("operator", "state") if problem[what]]
    where += [f"subtask {problem['subtask']}"] if problem["subtask"] is not None else []
    if where:
        for line in render.wrap(", ".join(where), look.width - 4):
            yield "    " + look.paint(line, "dim")
    if problem["path"] and problem["path"] not in problem["message"]:
        for line in render.wrap(label(problem["path"]), look.width - 4):
            yield "    " + look.paint(line, "dim")
    yield from render.explanation(problem["message"], problem["advice"], look)
