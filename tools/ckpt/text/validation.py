"""Pages of what validation found: of one checkpoint, of a store, and of the way to a whole one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from stateformat import words
from stateformat.words import label

from . import render
from .render import Column, Look

Document = Mapping[str, Any]

SHOWN: Final = 50
"""Checkpoints and findings on a page; JSON lists all."""
_MARKS: Final = {
    "whole": ("good", "finished"),
    "damaged": ("fail", "problem"),
    "lost": ("fail", "problem"),
    "undecided": ("dot", "partial"),
    "expired": ("dot", "dim"),
}


def draw_one(document: Document, look: Look) -> Iterator[str]:
    """The page of one checkpoint: what was checked, every finding, the verdict as the last line."""
    number = document["checkpoint_id"]
    title = f"Validation of checkpoint {number}" if number is not None else "Validation"
    yield from render.page_head(title, _facts(document, look), look)
    for problem in document["problems"]:
        yield from _finding(problem, look, "fail", "problem")
    for problem in document["warnings"]:
        yield from _finding(problem, look, "dot", "partial")
    yield ""
    yield _verdict(document, look)


def draw_all(document: Document, look: Look) -> Iterator[str]:
    """The page of a store: a line for each checkpoint, every finding, the verdict."""
    yield from render.page_head("Validation of all checkpoints", _facts(document, look), look)
    yield ""
    yield from _checkpoints(document["checkpoints"], look)
    yield from _savepoints(document["savepoints"], look)
    yield from _findings(document, look)
    yield ""
    yield _verdict(document, look)
    newest, whole = document["newest"], document["newest_whole"]
    if document["ok"] or newest is None:
        return
    yield ""
    if whole is None:
        yield from _none(document, look)
    elif whole == newest:
        yield from render.paragraph(f"The newest checkpoint, {newest}, is whole.", look)
    else:
        yield from render.paragraph(f"The newest whole checkpoint is {whole}.", look)
    if whole != newest:
        yield from _advice(document, look)


def draw_newest_whole(document: Document, look: Look) -> Iterator[str]:
    """The page of a search: which it is, what is wrong with newer ones, what to run next."""
    newest, whole = document["newest"], document["newest_whole"]
    answer = (
        "none" if whole is None else f"{whole}, the newest" if whole == newest else f"{whole}; the newest is {newest}"
    )
    facts = _facts(document, look)
    yield from render.page_head("Newest whole checkpoint", [facts[0], ("is", answer), *facts[1:]], look)
    if whole == newest:
        if document["level"] == "quick":
            yield ""
            yield from render.paragraph("Footers were read, but no rows: --level full reads every byte.", look)
        return
    yield ""
    yield from _checkpoints(document["checkpoints"], look)
    yield from _savepoints(document["savepoints"], look)
    yield from _findings(document, look)
    yield ""
    if whole is None:
        yield from _none(document, look)
    yield from _advice(document, look)


def _none(document: Document, look: Look) -> Iterator[str]:
    alone = [each["checkpoint_id"] for each in document["checkpoints"] if each["standing"] == "whole"]
    text = "No checkpoint is whole."
    if alone:
        text = f"No checkpoint is certain to be whole: {alone[0]} is whole, but stands alone, so it may be a stray."
    yield from render.paragraph(text, look)
    saved = next((each for each in document["savepoints"] if each["ok"]), None)
    if saved is not None:
        yield from render.paragraph(
            f"The savepoint {label(saved['name'])} of checkpoint {saved['checkpoint_id']} is whole: a job with an "
            f"empty store can start from {label(saved['url'])}.",
            look,
        )


def _facts(document: Document, look: Look) -> list[tuple[str, str]]:
    checked = document["checked"]
    counts = [
        words.plural(checked[name], name.removesuffix("s"))
        for name in ("records", "handles", "segments", "rows")
        if checked[name]
    ]
    counts += [words.size(checked["bytes"])] if checked["bytes"] else []
    return [("store", label(document["store"])), ("level", document["level"]), ("checked", look.dotted(*counts))]


def _checkpoints(results: list[Document], look: Look) -> Iterator[str]:
    columns = [
        Column("id", right=True),
        Column("published (UTC)", optional=1),
        Column("kind", optional=2),
        Column("is"),
    ]
    shown = results[:SHOWN]
    yield from render.table(columns, [_row(result, look) for result in shown], look)
    if len(results) > len(shown):
        left = [result for result in results[SHOWN:] if result["standing"] != "whole"]
        not_whole = f", {words.count(len(left))} of them not whole" if left else ", all of them whole"
        yield f"  {render.more(len(results) - len(shown), look)}{not_whole}"


def _savepoints(savepoints: list[Document], look: Look) -> Iterator[str]:
    if not savepoints:
        return
    yield ""
    rows = []
    for each in savepoints[:SHOWN]:
        glyph, role = _MARKS["whole" if each["ok"] else "damaged"]
        count = f", {words.plural(len(each['problems']), 'problem')}" if each["problems"] else ""
        what = look.paint(f"{look[glyph]} {'whole' if each['ok'] else 'damaged'}", role) + count
        rows.append([label(each["name"]), str(each["checkpoint_id"]), what])
    yield from render.table([Column("savepoint"), Column("of", right=True), Column("is")], rows, look)
    if len(savepoints) > SHOWN:
        yield f"  {render.more(len(savepoints) - SHOWN, look)}"
    for each in savepoints[:SHOWN]:
        for problem in each["problems"][:1]:
            yield from _finding(problem, look, "fail", "problem")


def _row(result: Document, look: Look) -> list[str]:
    glyph, role = _MARKS[result["standing"]]
    problems, at = result["problem_count"], result["created_at_us"]
    what = look.paint(f"{look[glyph]} {result['standing']}", role)
    if problems and result["standing"] in ("damaged", "undecided"):
        what += f", {words.plural(problems, 'problem')}"
    what += "" if result["certain"] else ", perhaps a stray"
    # Flink's metadata has no time.
    when = words.clock(at, seconds=False) if at else ""
    return [str(result["checkpoint_id"]), when, result["kind"] or "", what]


def _findings(document: Document, look: Look) -> Iterator[str]:
    problems, warnings = document["problems"], document["warnings"]
    for problem in problems[:SHOWN]:
        yield from _finding(problem, look, "fail", "problem")
    for problem in warnings[: max(SHOWN - len(problems), 0)]:
        yield from _finding(problem, look, "dot", "partial")
    left = len(problems) + len(warnings) - SHOWN
    if left > 0:
        yield ""
        yield f"  {render.more(left, look)}"


def _finding(problem: Document, look: Look, mark: str, role: str) -> Iterator[str]:
    """Its clause and kind, where it is, what disagrees, what to do."""
    yield ""
    yield f"  {look.paint(look[mark], role)} {look.paint(problem['clause'], role)}  {problem['kind']}"
    ids = problem.get("checkpoints", [])
    where = [f"checkpoint{'s' if _count(ids) > 1 else ''} {words.ranges(ids)}"] if ids else []
    where += [f"{what} {label(problem[what])}" for what in ("operator", "state") if problem[what]]
    where += [f"subtask {problem['subtask']}"] if problem["subtask"] is not None else []
    if where:
        for line in render.wrap(", ".join(where), look.width - 4):
            yield "    " + look.paint(line, "dim")
    if problem["path"] and problem["path"] not in problem["message"]:
        for line in render.wrap(label(problem["path"]), look.width - 4):
            yield "    " + look.paint(line, "dim")
    yield from render.explanation(problem["message"], problem["advice"], look)


def _count(ids: Iterable[Any]) -> int:
    return sum(last - first + 1 for first, last in ids)


def _verdict(document: Document, look: Look) -> str:
    problems, warnings = len(document["problems"]), len(document["warnings"])
    problems += sum(len(each["problems"]) for each in document.get("savepoints", ()))
    if problems:
        return f"  {look.paint(look['fail'], 'problem')} {look.paint(words.plural(problems, 'problem'), 'problem')}"
    verdict = f"no errors, {words.plural(warnings, 'warning')}" if warnings else "no problems"
    return f"  {look.paint(look['good'], 'finished')} {look.paint(verdict, 'finished')}"


def _advice(document: Document, look: Look) -> Iterator[str]:
    """What to do next where the newest is not whole."""
    store, whole, newest = label(document["store"]), document["newest_whole"], document["newest"]
    first = next((result for result in document["checkpoints"] if result["checkpoint_id"] == newest), None)
    if first is not None and first["standing"] == "undecided":
        yield from render.paragraph(
            f"Whether checkpoint {newest} is damaged is unknown: it could not be read, or is of a newer version. Fix "
            "that first.",
            look,
        )
        return
    if document["system"] is not None:
        from stateformat.backends.foreign import advice_for

        if whole is not None:
            yield from render.paragraph(f"`ckpt import {store}@{whole} --to STORE` makes a store of {whole}.", look)
        told = advice_for(document["system"], "validate", store)
        if told:
            yield from render.paragraph(words.sentence(told), look)
        return
    level = " --level full" if document["level"] == "full" else ""
    yield from render.paragraph(f"`ckpt repair {store}{level}` lists every way out, and what each would lose.", look)
    if whole is not None:
        yield from render.paragraph(
            f"`ckpt explain-restore {store}@{whole}` shows what {whole} would restore, `ckpt copy {store}@{whole} "
            "TARGET` saves it first.",
            look,
        )
