"""Pages of ``ckpt`` alone: what validation found, the rows of a key, what is largest."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from stateformat import words
from stateformat.pages.blocks import (
    Bar,
    Block,
    Cell,
    Column,
    Facts,
    Finding,
    Heading,
    Json,
    Margin,
    Note,
    Said,
    Table,
    Tone,
    Under,
    Values,
    dotted,
    more,
)
from stateformat.words import count, plural, size

from .exit_status import in_options

SHOWN: Final = 50
"""Checkpoints and findings on a page; JSON lists all."""
KEY_ROWS_SHOWN: Final = 20
"""Rows, or changes of one checkpoint, on a page."""
STATES_SHOWN: Final = 20
_COMMAND_MAX: Final = 400
"""A longer command, for a key of a page of text, helps nobody."""
_STANDINGS: Final[Mapping[str, tuple[str, Tone]]] = {
    "whole": ("✓", "good"),
    "damaged": ("✗", "bad"),
    "lost": ("✗", "bad"),
    "undecided": ("·", "some"),
    "expired": ("·", "dim"),
}


def restore_page(document: Json) -> Iterator[Block]:
    """Make the page of a restore, whose advice names options."""
    from stateformat.pages.restore import restore_page

    return restore_page(document, in_options)


# ---- validation


def verdict(problems: int, warnings: int) -> Note:
    """Make the last line of what was checked."""
    if problems:
        return Note(Said(f"✗ {plural(problems, 'problem')}", "bad"))
    said = f"no errors, {plural(warnings, 'warning')}" if warnings else "no problems"
    return Note(Said(f"✓ {said}", "good"))


def checkpoint_findings_page(document: Json) -> Iterator[Block]:
    """Make the page of one checkpoint: what was checked, every finding, the verdict at the end."""
    number = document["checkpoint_id"]
    yield Heading(f"Validation of checkpoint {number}" if number is not None else "Validation")
    yield Facts(_checked(document))
    yield from (_finding(problem) for problem in document["problems"])
    yield from (_finding(problem, is_error=False) for problem in document["warnings"])
    yield verdict(len(document["problems"]), len(document["warnings"]))


def store_findings_page(document: Json) -> Iterator[Block]:
    """Make the page of a store: a line for each checkpoint, every finding, the verdict."""
    yield Heading("Validation of all checkpoints")
    yield Facts(_checked(document))
    yield from _findings(document)
    problems = len(document["problems"]) + sum(len(each["problems"]) for each in document["savepoints"])
    yield verdict(problems, len(document["warnings"]))
    newest, whole = document["newest"], document["newest_whole"]
    if document["ok"] or newest is None:
        return
    if whole == newest:
        yield Note(f"The newest checkpoint, {newest}, is whole.")
        return
    which = _none(document) if whole is None else [f"The newest whole checkpoint is {whole}."]
    yield Note([*which, *_advice(document)])


def newest_whole_page(document: Json) -> Iterator[Block]:
    """Make the page of a search: which it is, what is wrong with newer ones, what to run next."""
    newest, whole = document["newest"], document["newest_whole"]
    answer = (
        "none" if whole is None else f"{whole}, the newest" if whole == newest else f"{whole}; the newest is {newest}"
    )
    store, *facts = _checked(document)
    yield Heading("Newest whole checkpoint")
    yield Facts([store, ("is", answer), *facts])
    if whole == newest:
        if document["level"] == "quick":
            yield Note("Footers were read, but no rows: --level full reads every byte.")
        return
    yield from _findings(document)
    yield Note([*(_none(document) if whole is None else ()), *_advice(document)])


def _checked(document: Json) -> list[tuple[Cell, Cell]]:
    checked = document["checked"]
    own = ("records", "handles", "segments", "rows")
    names = [name for name in (("files", "rows") if checked["files"] else own) if checked[name]]
    counts = [plural(checked[name], name.removesuffix("s")) for name in names]
    counts += [size(checked["bytes"])] if checked["bytes"] else []
    return [("store", document["store"]), ("level", document["level"]), ("checked", dotted(*counts))]


def _findings(document: Json) -> Iterator[Block]:
    """Make a line for each checkpoint and savepoint, then what is wrong with them."""
    results = document["checkpoints"]
    columns = [
        Column("id", right=True),
        Column("published (UTC)", optional=1),
        Column("kind", optional=2),
        Column("is"),
    ]
    left = [result for result in results[SHOWN:] if result["standing"] != "whole"]
    not_whole = f", {count(len(left))} of them not whole" if left else ", all of them whole"
    foot = f"{more(len(results) - SHOWN)}{not_whole}" if len(results) > SHOWN else ""
    yield Table(columns, [*map(_result, results[:SHOWN])], foot=foot)
    saved = document["savepoints"]
    if saved:
        columns = [Column("savepoint"), Column("of", right=True), Column("is")]
        rows = [
            (
                each["name"],
                str(each["checkpoint_id"]),
                _standing("whole" if each["ok"] else "damaged", len(each["problems"])),
            )
            for each in saved
        ]
        yield Table(columns, rows, SHOWN)
        yield from (_finding(problem) for each in saved[:SHOWN] for problem in each["problems"][:1])
    found = [(problem, True) for problem in document["problems"]]
    found += [(problem, False) for problem in document["warnings"]]
    yield from (_finding(problem, is_error=is_error) for problem, is_error in found[:SHOWN])
    if len(found) > SHOWN:
        yield Note(more(len(found) - SHOWN))


def _standing(standing: str, problems: int) -> tuple[Cell, str]:
    sign, tone = _STANDINGS[standing]
    return Said(f"{sign} {standing}", tone), f", {plural(problems, 'problem')}" if problems else ""


def _result(result: Json) -> list[Cell]:
    standing, at = result["standing"], result["created_at_us"]
    what = _standing(standing, result["problem_count"] if standing in ("damaged", "undecided") else 0)
    stray = "" if result["certain"] else ", perhaps a stray"
    return [
        str(result["checkpoint_id"]),
        words.clock(at, seconds=False) if at else "",  # Flink's metadata has no time.
        result["kind"] or "",
        (*what, stray),
    ]


def _finding(problem: Json, *, is_error: bool = True) -> Finding:
    ids = problem.get("checkpoints", [])
    number = sum(last - first + 1 for first, last in ids)
    where = [f"checkpoint{'s' if number > 1 else ''} {words.ranges(ids)}"] if ids else []
    where += [f"{what} {problem[what]}" for what in ("operator", "state") if problem[what]]
    where += [f"subtask {problem['subtask']}"] if problem["subtask"] is not None else []
    lines = [", ".join(where)] if where else []
    lines += [problem["path"]] if problem["path"] and problem["path"] not in problem["message"] else []
    tone: Tone = "bad" if is_error else "some"
    return Finding(problem["clause"], problem["kind"], problem["message"], problem["advice"], lines, tone)


def _none(document: Json) -> Iterator[str]:
    alone = [each["checkpoint_id"] for each in document["checkpoints"] if each["standing"] == "whole"]
    yield (
        f"No checkpoint is certain to be whole: {alone[0]} is whole, but stands alone, so it may be a stray."
        if alone
        else "No checkpoint is whole."
    )
    saved = next((each for each in document["savepoints"] if each["ok"]), None)
    if saved is not None:
        yield (
            f"The savepoint {saved['name']} of checkpoint {saved['checkpoint_id']} is whole: a job with an empty store "
            f"can start from {saved['url']}."
        )


def _advice(document: Json) -> Iterator[str]:
    """Yield what to do next where the newest is not whole."""
    store, whole, newest = document["store"], document["newest_whole"], document["newest"]
    first = next((result for result in document["checkpoints"] if result["checkpoint_id"] == newest), None)
    if first is not None and first["standing"] == "undecided":
        yield (
            f"Whether checkpoint {newest} is damaged is unknown: it could not be read, or is of a newer version. Fix "
            "that first."
        )
        return
    if document["system"] is not None:
        from stateformat.backends.foreign import advice_for

        if whole is not None:
            yield f"`ckpt import {store}@{whole} --to STORE` makes a store of {whole}."
        told = advice_for(document["system"], "validate", store)
        if told:
            yield words.sentence(told)
        return
    level = " --level full" if document["level"] == "full" else ""
    yield f"`ckpt repair {store}{level}` lists every way out, and what each would lose."
    if whole is not None:
        yield (
            f"`ckpt explain-restore {store}@{whole}` shows what {whole} would restore, `ckpt copy {store}@{whole} "
            "TARGET` saves it first."
        )


# ---- one key

_WORDS: Final = {
    "added": "added",
    "removed": "removed",
    "changed": "changed",
    "unchanged": "the columns changed",
    "present": "the oldest checkpoint that is left; they may be older",
    "unreadable": "cannot be read",
}


def key_text(key: Json) -> str:
    """A key as ``--key`` takes it: the value of one column, or an object."""
    return _value_text(next(iter(key.values()))) if len(key) == 1 else json.dumps(key, ensure_ascii=False)


def _value_text(value: Any) -> str:
    """A value as JSON; text without quotes where it cannot be taken for anything else."""
    is_plain = isinstance(value, str) and value.strip() == value != "null" and value[:1] not in ("", '"', "[", "{")
    return str(value) if is_plain and value.isprintable() else json.dumps(value, ensure_ascii=False)


def _checkpoint(document: Json) -> str:
    made = document["created_at_us"]
    when = f", {words.published(made, time.time_ns() // 1000)}" if made else ""
    return f"{document['checkpoint_id']}{when}"


def key_page(document: Json) -> Iterator[Block]:
    """Make the rows of a key in one checkpoint."""
    yield Heading("Key")
    yield Facts([("store", document["store"]), ("checkpoint", _checkpoint(document)), *_about(document)])
    if not document["row_count"]:
        yield Note(f"No rows of key {key_text(document['key'])} in checkpoint {document['checkpoint_id']}.")
        return
    rows = [*islice(document["rows"], KEY_ROWS_SHOWN)]
    yield Values(_columns(document), rows)
    if document["row_count"] > len(rows):
        yield Note(more(document["row_count"] - len(rows), "row"))


def key_history_page(document: Json) -> Iterator[Block]:
    """Make what happened to a key, newest first."""
    first, last = document["oldest"]["checkpoint_id"], document["checkpoint_id"]
    span = f"{plural(document['checkpoints'], 'checkpoint')}, {last}" + (f" down to {first}" if first != last else "")
    yield Heading("Key along the history")
    yield Facts([("store", document["store"]), ("history", span), *_about(document)])
    for entry in document["history"]:
        made, kind = entry["created_at_us"], entry["kind"]
        when = f", {words.clock(made)} UTC" if made else ""
        said = f" ({kind})" if kind not in (None, "checkpoint") else ""
        event = Said(_WORDS[entry["event"]], "bad" if entry["error"] else "name")
        title = Said(f"Checkpoint {entry['checkpoint_id']}{when}{said}", "name")
        yield Under((title, ": ", event), [*_entry(entry, document)], top=True)
    if all(entry["error"] for entry in document["history"]):
        yield Note(f"No rows of key {key_text(document['key'])} in what could be read.")


def _about(document: Json) -> Iterator[tuple[Cell, Cell]]:
    operator = words.named(document["operator"], document["operator_name"])
    columns = ", ".join(document["key_columns"])
    yield "state", f"{operator} / {document['state']}, {document['kind'] or ''} by {columns}"
    group, subtask = document["key_group"], document["subtask"]
    place = [] if group is None else [f"key group {group} of {document['max_parallelism']}", f"subtask {subtask}"]
    yield "key", dotted(key_text(document["key"]), *place)


def _columns(document: Json) -> list[Json]:
    """The columns that tell rows of one key apart; all where there are no others."""
    others = [column for column in document["columns"] if column["name"] not in document["key_columns"]]
    return others or list(document["columns"])


def _entry(entry: Json, document: Json) -> Iterator[Block]:
    from stateformat.pages.difference import column_line, signs

    if entry["error"]:
        yield Note(words.sentence(entry["error"]["message"]))
        return
    since = entry["since"]
    notes: list[Cell] = [*map(column_line, entry["column_changes"])]
    notes += [f"since checkpoint {since}"] if since is not None and since < entry["checkpoint_id"] - 1 else []
    if notes:
        yield Note(notes, "~")
    is_present = entry["event"] == "present"
    changes = [*islice(entry["changes"], KEY_ROWS_SHOWN)]
    signed = [pair for change in changes for pair in signs(change)]
    if signed:
        rows = [row for _, row in signed]
        yield Values(_columns(document), rows, [] if is_present else [sign for sign, _ in signed])
    if entry["change_count"] > len(changes):
        yield Note(more(entry["change_count"] - len(changes), "row" if is_present else "change"))


# ---- what is largest


def top_page(document: Json) -> Iterator[Block]:
    """Make each state with its keys, key groups and subtasks; then how to look at the first key."""
    yield Heading(f"Most {document['by']}")
    yield Facts([("store", document["store"]), ("checkpoint", _checkpoint(document))])
    states = document["states"]
    main = [
        state for state in states if not words.is_bookkeeping(state) and (state["rows"] or state["bytes"])
    ] or states
    for state in main[:STATES_SHOWN]:
        yield from _state(state, document["by"])
    others = [state for state in states if state not in main]
    if others:
        columns = [Column("state", flexible=True), *(Column(name, right=True) for name in ("rows", "bytes"))]
        rows = [
            (f"{state['operator']} / {state['state']}", count(state["rows"]), size(state["bytes"])) for state in others
        ]
        title = f"{plural(len(others), 'state')} of the runtime, or without rows"
        yield Under(title, [Table(columns, rows, STATES_SHOWN, "state")], top=True)
    if len(main) > STATES_SHOWN:
        yield Margin([Note(more(len(main) - STATES_SHOWN, "state"))])
    command = "" if document["per"] else next(_commands(document), "")
    if command:
        yield Margin([Note(f"`{command}` shows its rows.")])


def _state(state: Json, by: str) -> Iterator[Block]:
    name = f"{words.named(state['operator'], state['operator_name'])} / {state['state']}"
    rows = "" if state["rows"] is None else plural(state["rows"], "row")
    kind = f"{state['mode']} {state['kind'] or ''}".strip().replace("_", " ")
    yield Under(name, [Note(dotted(kind, rows, size(state["bytes"])))], top=True)
    if not (state["rows"] or state["bytes"]):
        return
    measure = "bytes" if state["rows"] is None or by == "bytes" else "rows"
    if state["keys"] is not None:
        yield _keys(state["keys"], by)
    groups, subtasks = state["key_groups"], state["subtasks"]
    if groups is not None:
        yield _ranking("key group", groups, measure)
    if state["mode"] not in ("coordinator", "committables"):
        yield _ranking("subtask", subtasks, measure)


def _keys(keys: Json, by: str) -> Block:
    if keys["each"] is not None:
        each = "one row" if by == "rows" else plural(keys["each"], "byte")
        return Note(f"Every key has {each}{'; --by bytes tells their size' if by == 'rows' else ''}.")
    if not keys["count"]:
        return Note("no keys")
    first = keys["greatest"][0]
    columns = [Column(name if len(first["key"]) > 1 else "key", flexible=True) for name in first["key"]]
    columns += [Column("group", right=True), Column("rows", right=True)]
    columns += [] if by == "rows" else [Column(by, right=True)]
    measure = by if by in ("rows", "bytes") else "sum"
    text = {"rows": count, "bytes": size, "sum": _sum}[measure]
    rows: list[Sequence[Cell]] = [
        (
            *(words.window_of(value) or _value_text(value) for value in entry["key"].values()),
            "" if entry["key_group"] is None else str(entry["key_group"]),
            count(entry["rows"]),
            *([] if by == "rows" else [text(entry[measure])]),
            Bar(max(0, entry[measure] or 0), first[measure] or 0),
        )
        for entry in keys["greatest"]
    ]
    amount = plural(keys["rows"], "row") if by == "rows" else text(keys[measure])
    with_what = f"{plural(keys['count'], 'key')} with {amount}{f' of {by}' if measure == 'sum' else ''}"
    return Under(f"{with_what}{_skew(keys)}", [Table([*columns, Column(optional=1)], rows)])


def _sum(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"


def _ranking(noun: str, found: Json, measure: str) -> Under:
    """Make key groups or subtasks, those with most first."""
    is_group = noun == "key group"
    entries: Iterable[Json] = found["greatest"]
    owns_groups = is_group or any(entry["first_group"] is not None for entry in entries)
    top = max([entry[measure] or 0 for entry in entries], default=0)
    columns = [Column("group" if is_group else noun, right=True)]
    columns += [Column("subtask" if is_group else "key groups", right=is_group)] if owns_groups else []
    rows: list[Sequence[Any]] = []
    for entry in entries:
        other = str(entry["subtask"]) if is_group else _range(entry["first_group"], entry["last_group"])
        figures = (count(entry["rows"]), size(entry["bytes"]), Bar(entry[measure], top))
        rows.append((str(entry["key_group" if is_group else "subtask"]), *([other] if owns_groups else []), *figures))
    columns += [Column("rows", right=True), Column("bytes", right=True), Column(optional=1)]
    with_rows = f"{count(found['with_rows'])} of {plural(found['count'], noun)} with rows{_skew(found)}"
    return Under(with_rows, [Table(columns, rows)])


def _range(first: int | None, last: int | None) -> str:
    return "" if first is None or last is None else words.ranges([(first, last)])


def _skew(found: Json) -> str:
    return f", the greatest {found['skew']:.1f} × mean" if found["skew"] >= 1.05 else ", all about even"


def _commands(document: Json) -> Iterator[str]:
    """Yield the command that shows the rows of the first key of each state."""
    for state in document["states"]:
        for entry in (state["keys"] or {}).get("greatest", ())[:1]:
            store = f"{document['store']}@{document['checkpoint_id']}"
            given = ("--operator", state["operator"], "--state", state["state"], "--key", key_text(entry["key"]))
            command = " ".join(["ckpt get", *map(shlex.quote, map(words.label, (store, *given)))])
            if len(command) <= _COMMAND_MAX:
                yield command
