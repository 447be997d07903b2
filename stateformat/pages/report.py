"""The page of ``ckpt report``: what someone on call wants to see, most urgent first.

Made only from the document of ``stateformat.reporting``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from .. import words
from ..words import count, plural, size
from . import html
from .blocks import (
    Bar,
    Block,
    Cards,
    Cell,
    Chart,
    Column,
    Details,
    Facts,
    Finding,
    Graph,
    Heading,
    Json,
    Note,
    Row,
    Said,
    Spark,
    Table,
    Tone,
    dotted,
    in_order,
    measure,
    more,
    plain,
    some,
)
from .checkpoint import checkpoint_facts, freed, graph_summary, not_counted, remarks, state_facts

FINDINGS_SHOWN: Final = 30
HISTORY_SHOWN: Final = 200
SHOWN: Final = 40
"""Entries of other lists on a page; the rest is counted."""
CHARTED: Final = 20
"""States that have charts: the largest."""
OPEN: Final = 1
"""States whose charts are open at first: the largest."""
EMPTY_SHOWN: Final = 12
HOT_MIN: Final = {"rows": 100, "bytes": 64 << 10}
"""Parts with fewer are never marked, however few the others have: a handful of rows is no load."""
FLAT: Final = 0.05
"""A figure that changes by less than this share says so in words."""
PLAIN_FOLDERS: Final = ("checkpoint", "checkpoints", "savepoint", "savepoints")
"""Folders whose names say nothing without the one above."""
SKEWED: Final = 2.0
"""A state counts as skewed from this ratio of the greatest part to the mean."""
_CHECKED: Final = {
    "metadata": "Record and manifest were checked; segments were not, for there are many (--level quick).",
    "quick": "Record, manifest, and the size and footer of each segment were checked.",
    "full": "Every byte and row was checked.",
}
_CHECKED_FILES: Final = {
    "quick": "Metadata, and names and sizes of {files}, were checked. No content was read: `ckpt validate {store} "
    "--level full` reads it.",
    "full": "Metadata, and the content of {files}, were checked.",
}
"""Of another system's checkpoint."""
_FINE: Final = {"metadata": "✓ metadata fine", "quick": "✓ quick check: nothing found", "full": "✓ no problems"}


def report_page(report: Json) -> Iterator[str]:
    """Return the page as pieces of HTML."""
    newest = report["history"]["checkpoints"][:1]
    known = report["checkpoint"] or (newest[0] if newest else {"job_id": "", "job_name": ""})
    job = known["job_name"] or _folder(report) or known["job_id"] or "Checkpoints"
    number = f": checkpoint {report['checkpoint']['checkpoint_id']}" if report["checkpoint"] else ""
    foot = f"Made by {report['made_by']} on {words.clock(report['made_at_us'])} UTC. Times are in UTC."
    return html.whole_page(f"{words.label(job)[:120]}{number}", report_head(report, job), report_blocks(report), foot)


def _folder(report: Json) -> str:
    """Return the last folders of another system's checkpoint, whose job has an id for a name."""
    parts = report["store"].rstrip("/").split("/")[-2:] if report["system"] else []
    return "/".join(parts if parts and parts[-1].startswith(PLAIN_FOLDERS) else parts[-1:])


def report_head(report: Json, job: str) -> Iterator[Block]:
    """Make the top: the job, whether all is well, and the first figures."""
    checkpoint = report["checkpoint"]
    yield Heading(Said(job), _verdict(report["validation"], len(report["faults"])))
    yield Note(report["store"])
    if not checkpoint:
        return
    made = f"{words.clock(checkpoint['created_at_us'])} UTC"
    about = dotted(
        f"Checkpoint {checkpoint['checkpoint_id']}",
        made if checkpoint["created_at_us"] > 0 else "",
        f"{report['system']}, read as it is" if report["system"] else "",
    )
    yield Note(Said(about, "dim"))
    yield Cards([*_cards(report, checkpoint)])


def report_blocks(report: Json) -> Iterator[Block]:
    """Make the sections: damage first, findings before what they are about."""
    checkpoint, is_sound = report["checkpoint"], report["validation"]["ok"]
    if report["faults"]:
        shown = f"Checkpoint {checkpoint['checkpoint_id']} is shown." if checkpoint else "No checkpoint can be shown."
        faults = [words.sentence(fault["message"]) for fault in report["faults"]]
        yield Heading("The store is damaged", tone="bad")
        yield from map(Note, some(faults, FINDINGS_SHOWN, "fault"))
        yield Note(f"{shown} `ckpt repair {report['store']}` says what to do.")
    if not is_sound:
        yield from _findings(report["validation"])
    yield from _history(report)
    if checkpoint and checkpoint["operators"]:
        sizes: dict[str, int] = {}
        for state in report["states"]:
            sizes[state["operator"]] = sizes.get(state["operator"], 0) + state["bytes"]
        yield Heading("Job graph", graph_summary(checkpoint["operators"]))
        notes = {uid: size(taken) for uid, taken in sizes.items() if taken}
        yield Graph(in_order(checkpoint["operators"], checkpoint["edges"]), checkpoint["edges"], notes)
    if checkpoint:
        yield from _states(report)
    yield from _storage(report)
    if is_sound:
        yield from _findings(report["validation"])
    if checkpoint:
        facts = [*checkpoint_facts(checkpoint), *remarks(checkpoint)]
        yield Heading(f"About checkpoint {checkpoint['checkpoint_id']}")
        yield Facts(facts[:SHOWN])
        if len(facts) > SHOWN:
            yield Note(more(len(facts) - SHOWN, "line", hint="ckpt inspect --format json lists all"))


def _verdict(found: Json, faults: int) -> Said:
    if found["problems"] or faults:
        return Said(f"✗ {plural(len(found['problems']) or faults, 'problem')}", "bad")
    if found["warnings"]:
        return Said(f"! {plural(len(found['warnings']), 'warning')}", "some")
    return Said(_FINE[found["level"]], "good")


def _cards(report: Json, checkpoint: Json) -> Iterator[tuple[str, str, str]]:
    history, totals, operators = report["history"]["checkpoints"], checkpoint["totals"], checkpoint["operators"]
    place = next((i for i, one in enumerate(history) if one["checkpoint_id"] == checkpoint["checkpoint_id"]), None)
    before = history[place + 1] if place is not None and place + 1 < len(history) else None
    if totals["rows"] is not None:
        yield "Rows", count(totals["rows"]), _change("count", totals["rows"], before, "rows")
    yield "Stored", size(totals["bytes"]), _change("bytes", totals["bytes"], before, "bytes")
    ended = graph_summary(operators).partition(", ")[2]
    yield "Operators", count(len(operators)), ended or "all running"
    older = report["history"]["older"]
    apart = None if place is None else history[place]["since_parent_us"]
    if apart is not None:
        yield (
            "Interval",
            words.elapsed(apart / 1e6),
            plural(len(history), "checkpoint") + (f" and {count(older)} older" if older else ""),
        )
    garbage, keep = report["sizes"]["garbage"], report["sizes"]["keep"]
    if garbage is not None and not garbage["stopped"]:
        one = f"keeping one frees {size(keep['bytes'] - keep['shared_bytes'])}" if keep and keep["records"] else ""
        yield "Garbage", size(garbage["bytes"] - garbage["shared_bytes"]), one


def _change(unit: str, now: int, before: Json | None, name: str) -> str:
    past = None if before is None else before["totals"][name]
    if past is None or before is None:
        return ""
    if now == past:
        return f"as in {before['checkpoint_id']}"
    return f"{'+' if now > past else '−'}{measure(unit, abs(now - past))} since {before['checkpoint_id']}"


def _findings(found: Json) -> Iterator[Block]:
    checked, number = found["checked"], found["checkpoint_id"]
    names = [name for name in ("records", "handles", "segments", "rows") if checked[name]]
    counts = ", ".join(plural(checked[name], name.removesuffix("s")) for name in names)
    title = "Validation" if number is None else f"Validation of checkpoint {number}"
    yield Heading(title, _verdict(found, 0), "" if found["ok"] else "bad")
    unread = "Its record could not be read, so nothing in it was checked."
    said = f"{_CHECKED[found['level']]} {counts}." if counts else unread
    if checked["files"]:
        files = plural(checked["files"], "file")
        said = _CHECKED_FILES[found["level"]].format(files=files, store=words.label(found["store"]))
    yield Note(Said(said, "dim"))
    for name in ("problems", "warnings"):
        for item in found[name][:FINDINGS_SHOWN]:
            where = [f"{what} {item[what]}" for what in ("operator", "state") if item[what]]
            where += [f"subtask {item['subtask']}"] if item["subtask"] is not None else []
            where += [item["path"]] if item["path"] and item["path"] not in item["message"] else []
            tone: Tone = "bad" if name == "problems" else "some"
            about = item["kind"].replace("_", " ")
            yield Finding(item["clause"], about, item["message"], item["advice"] or "", where, tone)
        if len(found[name]) > FINDINGS_SHOWN:
            left = len(found[name]) - FINDINGS_SHOWN
            yield Note(more(left, name.removesuffix("s"), hint="ckpt validate lists all"))


# ---- the history


def _history(report: Json) -> Iterator[Block]:
    newest_first = report["history"]["checkpoints"]
    if not newest_first:
        return
    entries = newest_first[::-1]
    yield Heading("Over the history")
    if len(entries) > 1:
        names = [f"checkpoint {entry['checkpoint_id']}, {words.clock(entry['created_at_us'])}" for entry in entries]
        checkpoint = report["checkpoint"] or newest_first[0]
        ids = [entry["checkpoint_id"] for entry in entries]
        at = ids.index(checkpoint["checkpoint_id"]) if checkpoint["checkpoint_id"] in ids else None
        ends = (_end(entries[0], entries[-1]), _end(entries[-1], entries[0]))
        rows = [entry["totals"]["rows"] for entry in entries]
        if any(value is not None for value in rows):
            yield Chart(f"Rows{_since(rows, ids, at)}", rows, names, ends=ends, at=at, is_trend=True)
        stored = [entry["totals"]["bytes"] for entry in entries]
        yield Chart(f"Stored bytes{_since(stored, ids, at)}", stored, names, "bytes", ends, at=at, is_trend=True)
        apart = [entry["since_parent_us"] for entry in entries]
        if sum(value is not None for value in apart) > 1:
            yield Chart("Time since the checkpoint before", apart, names, "us", ends, at=at, is_trend=True)
    else:
        kind = "" if entries[0]["kind"] == "checkpoint" else f", a {entries[0]['kind']}"
        yield Note(Said(f"There is one checkpoint{kind}.", "dim"))
    special = [entry for entry in newest_first if entry["kind"] != "checkpoint" or entry["stop"]]
    if special and (len(entries) > 1 or special[0]["stop"]):
        yield Note(Said(words.sentence("; ".join(map(_special, special[:8]))), "dim"))
    if report["history"]["older"]:
        yield Note(more(report["history"]["older"], "older checkpoint", hint="--limit N reads more"))
    yield Details(f"{plural(len(entries), 'checkpoint')} as a table", [_history_table(newest_first)])


def _end(entry: Json, other: Json) -> str:
    """Return the checkpoint at one end of a chart, with its time; its day where that differs."""
    if entry["created_at_us"] <= 0:
        return f"checkpoint {entry['checkpoint_id']}"
    day, clock = words.clock(entry["created_at_us"]).split(" ")
    return f"{entry['checkpoint_id']} · {clock if words.clock(other['created_at_us']).startswith(day) else day}"


def _since(values: Sequence[int | None], ids: Sequence[int], at: int | None) -> str:
    """Return how much a figure, by default the last, has changed since the first that is known."""
    first, last = (
        next(((value, number) for value, number in zip(values, ids, strict=True) if value), (0, 0)),
        values[-1 if at is None else at],
    )
    if not first[0] or last is None or at == 0:
        return ""
    change = last / first[0] - 1
    return f", {'about the same' if abs(change) < FLAT else f'{change:+.0%}'} since {first[1]}".replace("-", "−")


def _special(entry: Json) -> str:
    if entry["stop"]:
        return f"at {entry['checkpoint_id']} the job {words.stopped(entry['stop'])}"
    return f"{entry['checkpoint_id']} is a {entry['kind']}"


def _history_table(entries: Sequence[Json]) -> Table:
    columns = [
        Column("checkpoint"),
        Column("kind"),
        Column("published", whole=True),
        Column("interval", right=True),
        Column("finished", right=True),
        Column("rows", right=True),
        Column("bytes", right=True),
    ]
    rows: list[list[Cell]] = []
    for entry in entries[:HISTORY_SHOWN]:
        apart, totals = entry["since_parent_us"], entry["totals"]
        rows.append(
            [
                str(entry["checkpoint_id"]),
                entry["kind"] + (", stopped" if entry["stop"] else ""),
                words.clock(entry["created_at_us"]) if entry["created_at_us"] > 0 else None,
                None if apart is None else words.elapsed(apart / 1e6),
                words.operators_finished(entry),
                None if totals["rows"] is None else count(totals["rows"]),
                size(totals["bytes"]),
            ]
        )
    return Table(columns, rows, None, "checkpoint", "ckpt history lists all", len(entries) - len(rows))


# ---- the states


def _states(report: Json) -> Iterator[Block]:
    """Make the states, the largest first: how large each is, how it grew, how it is distributed."""
    states = sorted(report["states"], key=lambda state: -state["bytes"])
    yield Heading("States", plural(len(states), "state"))
    if not states:
        yield Note(Said("There are none.", "dim"))
        return
    ids = report["trend"]["checkpoint_ids"]
    trends = {(item["operator"], item["state"]): item["bytes"] for item in report["trend"]["states"]}
    held = [state for state in states if state["bytes"]] or states[:1]
    main = [state for state in held if not words.is_bookkeeping(state)] or held
    kept = [state for state in held if state not in main]
    yield _table(main, trends if len(ids) > 1 else {}, report, OPEN)
    if kept:
        title = f"{plural(len(kept), 'state')} of the runtime, {size(sum(state['bytes'] for state in kept))}"
        yield Details(title, [_table(kept, {}, report, 0)])
    if report["system"] and any(state["rows"] is None for state in states):
        yield Note(not_counted(report["checkpoint"]))
    empty = [words.label(f"{state['operator']} / {state['name']}")[:60] for state in states[len(held) :]]
    if empty:
        left = f" and {count(len(empty) - EMPTY_SHOWN)} more" if len(empty) > EMPTY_SHOWN else ""
        yield Note(Said(f"Empty: {', '.join(empty[:EMPTY_SHOWN])}{left}.", "dim"))


def _table(
    states: Sequence[Json], trends: Mapping[tuple[str, str], Sequence[int | None]], report: Json, opened: int
) -> Table:
    """Make a line for each state, which opens; columns of which nothing is known are left out."""
    ids, top = report["trend"]["checkpoint_ids"], max(state["bytes"] for state in states)
    columns = [
        *(Column("state"), Column("mode"), Column("rows", right=True), Column("bytes", right=True)),
        *(Column("share"), *([Column("trend")] if trends else []), Column("skew", right=True)),
    ]
    rows = []
    for i, state in enumerate(states[:SHOWN]):
        trend = trends.get((state["operator"], state["name"]))
        about = f"{_ends(trend)} at checkpoints {ids[0]} to {ids[-1]}" if trend else ""
        cells: tuple[Cell, ...] = (
            (state["operator"], " / ", Said(state["name"], "name")),
            words.mode_of(state).replace("_", " "),
            "" if state["rows"] is None else count(state["rows"]),
            size(state["bytes"]),
            Bar(state["bytes"], top, f"{size(state['bytes'])}; the greatest has {size(top)}"),
            *([Spark(trend, about=about, is_trend=True) if trend else ""] if trends else []),
            _skew(state),
        )
        charts = [*_charts(state, trend, report)] if i < CHARTED else []
        rows.append(Row(cells, [*charts, Facts([*_facts(state)])]))
    return Table(
        columns, rows, None, "state", "ckpt inspect --format json lists all", len(states) - len(rows), opened=opened
    )


def _ends(trend: Sequence[int | None]) -> str:
    known = [value for value in trend if value is not None]
    return f"{size(known[0])} to {size(known[-1])}" if known else "not known"


def _skew(state: Json) -> Cell:
    if state["subtasks"] is None or not state["bytes"]:
        return ""
    parts, unit = state["subtasks"], state["subtasks"]["measure"]
    greatest = max((item[unit] for item in parts["greatest"]), default=0)
    is_skewed = state["skew"] >= SKEWED and greatest >= HOT_MIN[unit]
    return Said(f"{state['skew']:g} ×", "some" if is_skewed else "")


def _charts(state: Json, trend: Sequence[int | None] | None, report: Json) -> Iterator[Chart]:
    ids, number = report["trend"]["checkpoint_ids"], report["checkpoint"]["checkpoint_id"]
    if trend:
        names, at = [f"checkpoint {each}" for each in ids], ids.index(number) if number in ids else None
        ends = (f"checkpoint {ids[0]}", str(ids[-1]))
        yield Chart(f"Bytes{_since(trend, ids, at)}", trend, names, "bytes", ends, at=at, is_trend=True)
    measured, groups = state["subtasks"], state["key_groups"]
    if measured and measured["count"] > 1:
        yield _spread(f"{measured['measure'].capitalize()} by subtask", "subtask", measured, measured["measure"])
    if groups:
        yield _spread("Rows by key group", "key group", groups, "rows")


def _spread(title: str, noun: str, found: Json, unit: str) -> Chart:
    """Make a chart of what each subtask or key group has; neighbors may share bars."""
    per, total, values = found["per_bar"], found["count"], found["values"]
    names = [
        f"{noun} {first}" if per == 1 else f"the greatest of {noun}s {first} to {min(first + per, total) - 1}"
        for first in range(0, len(values) * per, per)
    ]
    known = [value for value in values if value is not None]
    hot = max(HOT_MIN[unit], SKEWED * sum(known) / max(1, len(known)))
    marked = [value is not None and value > hot for value in values]
    ends, legend = (f"{noun} 0", str(total - 1)), f"more than {SKEWED:g} × the mean"
    return Chart(title, values, names, "bytes" if unit == "bytes" else "count", ends, marked, legend=legend)


def _facts(state: Json) -> Iterator[tuple[Cell, Cell]]:
    measured, groups = state["subtasks"], state["key_groups"]
    if measured and measured["greatest"]:
        unit = measured["measure"]
        most = [
            f"{'–' if item['subtask'] is None else item['subtask']} ({measure(unit, item[unit])})"
            for item in measured["greatest"][:3]
        ]
        yield "subtasks with most", f"{', '.join(most)}; the greatest has {state['skew']:g} × the mean"
    if groups:
        most = [f"{item['group']} ({count(item['rows'])})" for item in groups["greatest"][:3]]
        told = f"{', '.join(most) or 'none'}; the greatest has {groups['skew']:g} × the mean"
        yield "key groups with most", f"{told}; {count(groups['empty'])} of {groups['count']} are empty"
    yield "segments", f"{count(state['segments'])}, by {plural(state['handles'], 'handle')}"
    yield from state_facts(state)


# ---- the storage


def _storage(report: Json) -> Iterator[Block]:
    pairs = [(name, value) for name, value in _sizes(report) if plain(value)]
    folders = [folder for folder in report["sizes"]["folders"] or () if folder["objects"]]
    if not pairs:
        return
    yield Heading("On the storage")
    yield Facts(pairs)
    if folders:
        columns = [Column("folder"), *(Column(title, right=True) for title in ("objects", "bytes", "garbage"))]
        rows: list[list[Cell]] = [
            [
                words.folder_of(folder["folder"], report["system"]),
                count(folder["objects"]),
                size(folder["bytes"]),
                None if folder.get("garbage_bytes") is None else size(folder["garbage_bytes"]),
            ]
            for folder in folders
        ]
        table = Table(columns, rows, SHOWN, "folder", "ckpt du --format json lists all")
        yield Details(plural(len(folders), "folder"), [table])


def _sizes(report: Json) -> Iterator[tuple[Cell, Cell]]:
    sizes, states = report["sizes"], report["states"]
    if report["checkpoint"]:
        deltas = sum(layer["bytes"] for state in states for layer in state["layers"] if layer["layer"])
        most = max((len(state["layers"]) for state in states), default=0)
        yield "layers", f"up to {most}, with {size(deltas)} in deltas" if deltas or most > 1 else "one of each state"
    if sizes["bytes"] is not None:
        shared = f", {size(sizes['shared_bytes'])} under two names" if sizes["shared_bytes"] else ""
        yield "all objects", f"{count(sizes['objects'])}, {size(sizes['bytes'])}{shared}"
    yield "sizes", words.sentence(sizes["left_out"]) if sizes["left_out"] else ""
    yield "garbage now", freed(sizes["garbage"])
    yield "with --keep 1", freed(sizes["keep"])
    saved = [f"{one['name']} ({_savepoint(one['checkpoint'])})" for one in report["savepoints"]]
    yield "savepoints", ", ".join(some(saved, SHOWN))
    strays = len(report["history"]["strays"])
    yield "strays", f"{plural(strays, 'record')} that no checkpoint leads to" if strays else ""


def _savepoint(newest: Mapping[str, object] | None) -> str:
    return f"checkpoint {newest['checkpoint_id']}" if newest else "cannot be read"
