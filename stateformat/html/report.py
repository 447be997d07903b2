"""The page of ``ckpt report``: what someone on call wants to see, most urgent first.

Drawn only from the document of ``stateformat.reporting``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .. import words
from .charts import columns as chart
from .elements import Element, Node, document as page, element as e
from .graph import draw_graph
from .pieces import DASH, SHOWN, Column, badge, card, facts, more, opening, short, table
from .report_states import draw_states

Json = Mapping[str, Any]
FINDINGS_SHOWN: Final = 30
HISTORY_SHOWN: Final = 200
_CHECKPOINT: Final = "checkpoint"


def report_page(report: Json) -> Iterator[str]:
    """Return the page as pieces of HTML."""
    checkpoint = report["checkpoint"]
    newest = report["history"]["checkpoints"][:1]
    known = checkpoint or (newest[0] if newest else {"job_id": "", "job_name": ""})
    job = known["job_name"] or known["job_id"] or "Checkpoints"
    title = (
        f"{words.label(job)[:120]}: checkpoint {checkpoint['checkpoint_id']}" if checkpoint else words.label(job)[:120]
    )
    yield from page(
        title,
        e("header", _head(report, job), _cards(report)),
        e(
            "main",
            _faults(report),
            _findings(report) if not report["validation"]["ok"] else None,
            _history(report),
            _graph(report),
            draw_states(report),
            _storage(report),
            _findings(report) if report["validation"]["ok"] else None,
            _about(report),
        ),
        e("footer", f"Made by {report['made_by']} on {words.clock(report['made_at_us'])} UTC. Times are in UTC."),
    )


# The top ------------------------------------------------------------------------------------------


def _head(report: Json, job: str) -> Element:
    checkpoint = report["checkpoint"]
    about: list[Node] = []
    if checkpoint:
        age = words.age(checkpoint["created_at_us"], report["made_at_us"])
        about.append(f"Checkpoint {checkpoint['checkpoint_id']}")
        if checkpoint["created_at_us"] > 0:
            about.append(f"{words.clock(checkpoint['created_at_us'])} UTC{f', {age} old' if age else ''}")
        if report["system"]:
            about.append(f"{report['system']}, read as it is")
    return e(
        "div",
        e("div", e("h1", short(job, 120)), _verdict(report), class_="row spread"),
        e("p", e("code", report["store"])),
        e("p", " · ".join(map(str, about)), class_="quiet") if about else None,
    )


def _verdict(report: Json) -> Element:
    problems = len(report["validation"]["problems"])
    if problems or report["faults"]:
        count = problems or len(report["faults"])
        return badge(f"✕ {words.plural(count, 'problem')}", "bad")
    warnings = len(report["validation"]["warnings"])
    if warnings:
        return badge(f"! {words.plural(warnings, 'warning')}", "some")
    if report["validation"]["level"] == "metadata":
        return badge("✓ metadata fine", "good")
    return badge("✓ no problems", "good")


def _cards(report: Json) -> Element | None:
    checkpoint, history = report["checkpoint"], report["history"]["checkpoints"]
    if not checkpoint:
        return None
    totals = checkpoint["totals"]
    place = next((i for i, one in enumerate(history) if one["checkpoint_id"] == checkpoint["checkpoint_id"]), None)
    before = history[place + 1] if place is not None and place + 1 < len(history) else None
    operators = checkpoint["operators"]
    finished = sum(operator["status"] == "fully_finished" for operator in operators)
    partly = sum(operator["status"] == "partially_finished" for operator in operators)
    apart = None if place is None else history[place]["since_parent_us"]
    cards = [
        card("Rows", words.count(totals["rows"]).replace("-", DASH), _change(totals["rows"], before, "rows")),
        card("Stored", words.size(totals["bytes"]), _change(totals["bytes"], before, "bytes")),
        card(
            "Operators",
            words.count(len(operators)),
            ", ".join(filter(None, [f"{finished} finished" if finished else "", f"{partly} partly" if partly else ""]))
            or "all running",
        ),
        card(
            "Since the one before",
            DASH if apart is None else duration(apart),
            f"{words.plural(len(history), 'checkpoint')}"
            + (f" and {words.count(report['history']['older'])} older" if report["history"]["older"] else ""),
        ),
        card("Would be freed", *_freed_in_short(report["sizes"])),
    ]
    return e("div", cards, class_="cards")


def _change(now: int | None, before: Json | None, name: str) -> str | None:
    past = None if before is None else before["totals"][name]
    if now is None or past is None or before is None:
        return None
    if now == past:
        return f"as in {before['checkpoint_id']}"
    sign = "+" if now > past else "−"
    text = words.size(abs(now - past)) if name == "bytes" else words.count(abs(now - past))
    return f"{sign}{text} since {before['checkpoint_id']}"


def _freed_in_short(sizes: Json) -> tuple[str, str]:
    garbage, keep = sizes["garbage"], sizes["keep"]
    if garbage is None or garbage["stopped"]:
        return DASH, "not known"
    about = f"{words.size(keep['bytes'] - keep['shared_bytes'])} by keeping one" if keep and keep["records"] else ""
    return words.size(garbage["bytes"] - garbage["shared_bytes"]), about


def duration(length_us: int) -> str:
    """Return a length of time for people: ``850 ms``, ``12.5 s``, ``4 min``, ``3.2 h``."""
    seconds = length_us / 1e6
    if seconds < 1:
        return f"{length_us / 1e3:.0f} ms"
    for unit, size, limit in (("s", 1, 120), ("min", 60, 7_200), ("h", 3_600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds / 86_400:.1f} days"


# Findings -----------------------------------------------------------------------------------------


def _faults(report: Json) -> Element | None:
    """Return what is damaged, before everything else, and what is shown instead."""
    if not report["faults"]:
        return None
    checkpoint = report["checkpoint"]
    shown = f"Checkpoint {checkpoint['checkpoint_id']} is shown." if checkpoint else "No checkpoint can be shown."
    return e(
        "section",
        e("h2", "The store is damaged"),
        (e("p", words.sentence(fault["message"])) for fault in report["faults"][:FINDINGS_SHOWN]),
        more(len(report["faults"]) - FINDINGS_SHOWN, "fault"),
        e("p", shown, " ", e("code", f"ckpt repair {report['store']}"), " says what to do."),
        class_="alarm",
    )


def _findings(report: Json) -> Element:
    found = report["validation"]
    checked = found["checked"]
    counts = [
        words.plural(checked[name], name.removesuffix("s"))
        for name in ("records", "handles", "segments", "rows")
        if checked[name]
    ]
    what = {
        "metadata": "Record and manifest were checked; segments were not, for there are many (--level quick).",
        "quick": "Record, manifest, and the size and footer of each segment were checked.",
        "full": "Every byte and row was checked.",
    }[found["level"]]
    unread = "Its record could not be read, so nothing in it was checked."
    what = f"{what} {', '.join(counts)}." if counts else unread
    body: list[Node] = [e("p", what, class_="quiet")]
    for tone, name in (("bad", "problems"), ("some", "warnings")):
        body += [_finding(item, tone) for item in found[name][:FINDINGS_SHOWN]]
        body.append(more(len(found[name]) - FINDINGS_SHOWN, name.removesuffix("s"), "ckpt validate lists all"))
    number = found["checkpoint_id"]
    title = "Validation" if number is None else f"Validation of checkpoint {number}"
    return e(
        "section",
        e("div", e("h2", title), _verdict_of(found), class_="row spread"),
        body,
        class_="" if found["ok"] else "alarm",
    )


def _verdict_of(found: Json) -> Element:
    if found["problems"]:
        return badge(f"✕ {words.plural(len(found['problems']), 'problem')}", "bad")
    if found["warnings"]:
        return badge(f"! {words.plural(len(found['warnings']), 'warning')}", "some")
    return badge("✓ no problems", "good")


def _finding(item: Json, tone: str) -> Element:
    where = [f"{what} {item[what]}" for what in ("operator", "state") if item[what]]
    where += [f"subtask {item['subtask']}"] if item["subtask"] is not None else []
    where += [item["path"]] if item["path"] and item["path"] not in item["message"] else []
    return e(
        "div",
        e("h3", badge(item["clause"], tone), " ", item["kind"].replace("_", " ")),
        e("p", words.sentence(item["message"])),
        e("p", short(", ".join(where), 300), class_="quiet") if where else None,
        e("p", words.sentence(item["advice"]), class_="quiet") if item["advice"] else None,
    )


# History ------------------------------------------------------------------------------------------


def _history(report: Json) -> Element | None:
    history = report["history"]
    newest_first = history["checkpoints"]
    if not newest_first:
        return None
    entries = newest_first[::-1]
    labels = [_label(entry) for entry in entries]
    shown = report["checkpoint"]["checkpoint_id"] if report["checkpoint"] else entries[-1]["checkpoint_id"]
    at = next((i for i, entry in enumerate(entries) if entry["checkpoint_id"] == shown), None)
    ends = (f"checkpoint {entries[0]['checkpoint_id']}", f"{entries[-1]['checkpoint_id']}")
    charts = [
        chart("Rows", [entry["totals"]["rows"] for entry in entries], labels, ends=ends, at=at),
        chart(
            "Stored bytes", [entry["totals"]["bytes"] for entry in entries], labels, text=words.size, ends=ends, at=at
        ),
        chart(
            "Time since the checkpoint before",
            [entry["since_parent_us"] for entry in entries],
            labels,
            text=duration,
            ends=ends,
            at=at,
        ),
    ]
    special = [entry for entry in newest_first if entry["kind"] != _CHECKPOINT or entry["stop"]]
    return e(
        "section",
        e("h2", "Over the history"),
        e("div", charts, class_="charts") if len(entries) > 1 else e("p", "There is one checkpoint.", class_="quiet"),
        e("p", "; ".join(map(_special, special[:8])) + ".", class_="quiet") if special else None,
        more(history["older"], "older checkpoint", "--limit N reads more"),
        opening(f"{words.plural(len(entries), 'checkpoint')} as a table", _history_table(newest_first)),
        class_="long",
    )


def _label(entry: Json) -> str:
    return f"checkpoint {entry['checkpoint_id']}, {words.clock(entry['created_at_us'])}"


def _special(entry: Json) -> str:
    if entry["stop"]:
        return f"at {entry['checkpoint_id']} the job {words.stopped(entry['stop'])}"
    return f"{entry['checkpoint_id']} is a {entry['kind']}"


def _history_table(entries: Sequence[Json]) -> list[Element | None]:
    columns = [
        Column("checkpoint"),
        Column("kind", whole=True),
        Column("published", whole=True),
        Column("interval", right=True),
        Column("finished", right=True),
        Column("rows", right=True),
        Column("bytes", right=True),
    ]
    rows = (
        (
            str(entry["checkpoint_id"]),
            short(entry["kind"] + (", stopped" if entry["stop"] else ""), 20),
            words.clock(entry["created_at_us"]) if entry["created_at_us"] > 0 else DASH,
            None if entry["since_parent_us"] is None else duration(entry["since_parent_us"]),
            f"{entry['finished']} of {entry['operators']}"
            + (f", {entry['partially_finished']} partly" if entry["partially_finished"] else ""),
            None if entry["totals"]["rows"] is None else words.count(entry["totals"]["rows"]),
            words.size(entry["totals"]["bytes"]),
        )
        for entry in entries[:HISTORY_SHOWN]
    )
    return [
        table(columns, rows),
        more(len(entries) - HISTORY_SHOWN, "checkpoint", "ckpt history lists all"),
    ]


# The job, the storage, the rest -------------------------------------------------------------------


def _graph(report: Json) -> Element | None:
    checkpoint = report["checkpoint"]
    if not checkpoint or not checkpoint["operators"]:
        return None
    sizes: dict[str, int] = {}
    for state in report["states"]:
        sizes[state["operator"]] = sizes.get(state["operator"], 0) + state["bytes"]
    note = {uid: words.size(size) for uid, size in sizes.items() if size}
    finished = sum(operator["status"] == "fully_finished" for operator in checkpoint["operators"])
    partly = sum(operator["status"] == "partially_finished" for operator in checkpoint["operators"])
    parts = [f"{finished} finished" if finished else "", f"{partly} partly finished" if partly else ""]
    return e(
        "section",
        e("div", e("h2", "Job graph"), e("span", ", ".join(filter(None, parts)), class_="quiet"), class_="row spread"),
        draw_graph(checkpoint["operators"], checkpoint["edges"], note=note),
        class_="long",
    )


def _storage(report: Json) -> Element | None:
    sizes, checkpoint = report["sizes"], report["checkpoint"]
    pairs: list[tuple[str, Node]] = []
    if checkpoint:
        totals, manifest = checkpoint["totals"], checkpoint["manifest"]
        pairs.append(("Segments", f"{words.count(totals['segments'])}, {words.size(totals['bytes'])}"))
        pairs.append(("Handles", words.count(totals["handles"])))
        if not report["system"]:
            inline = checkpoint["inline_bytes"]
            pairs.append(
                (
                    "Manifest",
                    words.size(manifest["size_bytes"]) + (f", with {words.size(inline)} inline" if inline else ""),
                )
            )
        layers = _layers(report["states"])
        pairs.append(("Layers", layers))
    if sizes["bytes"] is not None:
        shared = f", {words.size(sizes['shared_bytes'])} under two names" if sizes["shared_bytes"] else ""
        pairs.append(("All objects", f"{words.count(sizes['objects'])}, {words.size(sizes['bytes'])}{shared}"))
    pairs.append(("Sizes", sizes["left_out"] and words.sentence(sizes["left_out"])))
    for title, freed in (("Garbage now", sizes["garbage"]), ("With --keep 1", sizes["keep"])):
        if freed:
            pairs.append((title, _freed(freed)))
    saved = report["savepoints"]
    if saved:
        names = [_savepoint(one) for one in saved[:SHOWN]]
        names += [f"{words.count(len(saved) - SHOWN)} more"] if len(saved) > SHOWN else []
        pairs.append(("Savepoints", ", ".join(names)))
    strays = len(report["history"]["strays"])
    if strays:
        pairs.append(("Strays", f"{words.plural(strays, 'record')} that no checkpoint leads to"))
    if not pairs:
        return None
    return e("section", e("h2", "On the storage"), facts(pairs), _folders(sizes["folders"] or ()))


def _folders(folders: Sequence[Json]) -> Element | None:
    held = [folder for folder in folders if folder["objects"]]
    if not held:
        return None
    columns = [
        Column("folder"),
        Column("objects", right=True),
        Column("bytes", right=True),
        Column("garbage", right=True),
    ]
    rows = (
        (
            short(folder["folder"] or "temporary files", 80),
            words.count(folder["objects"]),
            words.size(folder["bytes"]),
            words.size(folder["garbage_bytes"]) if folder.get("garbage_bytes") else None,
        )
        for folder in held[:SHOWN]
    )
    return opening(
        words.plural(len(held), "folder"),
        table(columns, rows),
        more(len(held) - SHOWN, "folder", "ckpt du --format json lists all"),
    )


def _savepoint(one: Json) -> str:
    newest = one["checkpoint"]
    what = f"checkpoint {newest['checkpoint_id']}" if newest else "cannot be read"
    return f"{one['name']} ({what})"


def _layers(states: Sequence[Json]) -> str:
    """Return how much of the state is in deltas, and the most layers of one state."""
    deltas = sum(layer["bytes"] for state in states for layer in state["layers"] if layer["layer"])
    most = max((len(state["layers"]) for state in states), default=0)
    if not deltas and most <= 1:
        return "one of each state"
    return f"up to {most}, with {words.size(deltas)} in deltas"


def _freed(found: Json) -> str:
    if found["stopped"]:
        return words.sentence(found["stopped"])
    if not found["objects"]:
        return "nothing"
    stays = f", {words.size(found['shared_bytes'])} stay under other names" if found["shared_bytes"] else ""
    return f"{words.size(found['bytes'] - found['shared_bytes'])} in {words.plural(found['objects'], 'object')}{stays}"


def _about(report: Json) -> Element | None:
    checkpoint = report["checkpoint"]
    if not checkpoint:
        return None
    parent = checkpoint["parent"]
    pairs: list[tuple[str, Node]] = [
        ("Job", words.named(checkpoint["job_id"], checkpoint["job_name"])),
        ("Kind", checkpoint["kind"] + (f", parent {parent['checkpoint_id']}" if parent else "")),
        ("Written by", _writer(checkpoint)),
        ("Stop", _stop(checkpoint["stop"]) if checkpoint["stop"] else None),
        ("Attempt", e("code", checkpoint["attempt_id"]) if checkpoint["attempt_id"] else None),
        ("Needs", ", ".join([*checkpoint["required_features"], *checkpoint["optional_features"]])),
    ]
    if checkpoint["given_up"]:
        pairs.append(("Given up", _given_up(checkpoint["given_up"])))
    if checkpoint["content_of"]:
        pairs.append(("Repair", f"has the content of checkpoint {checkpoint['content_of']['checkpoint_id']}"))
    if checkpoint["rescaled_from"]:
        pairs.append(("Rescaled", f"from checkpoint {checkpoint['rescaled_from']['checkpoint_id']}"))
    if checkpoint["holds"]:
        pairs.append(("Holds", _holds(checkpoint["holds"])))
    pairs += [
        (note["kind"], f"{note['subject']}: {note['message']}" if note["subject"] else note["message"])
        for note in checkpoint["notes"][:SHOWN]
    ]
    properties = sorted(checkpoint["properties"].items())
    listed = (
        table(
            [Column("property"), Column("value")],
            ((short(name), short(value, 400)) for name, value in properties[:SHOWN]),
        )
        if properties
        else None
    )
    return e(
        "section",
        e("h2", f"About checkpoint {checkpoint['checkpoint_id']}"),
        facts(pairs),
        opening(
            words.plural(len(properties), "property", "properties"), listed, more(len(properties) - SHOWN, "property")
        )
        if listed
        else None,
    )


def _given_up(given: Json) -> Node:
    """Return what a repair gave up when it published the checkpoint."""
    named = [f"{state['operator']} / {state['state']}" for state in given["states"][:SHOWN]]
    left = len(given["states"]) - len(named)
    more_words = f" and {words.count(left)} more" if left > 0 else ""
    return e(
        "span", badge(words.plural(given["rows"], "row"), "some"), " of ", short(f"{', '.join(named)}{more_words}", 600)
    )


def _writer(checkpoint: Json) -> str:
    origin = {name: value for name, value in (checkpoint.get("written_by") or {}).items() if value}
    named = {"program": "", "code": "version ", "spark_application": "Spark application ", "host": "on ", "user": "as "}
    parts = [f"{named.get(name, f'{name} ')}{value}" for name, value in origin.items()]
    return ", ".join([*parts, checkpoint["writer"]])


def _stop(stop: Json) -> str:
    request = f", request {stop['request']}" if stop["request"] else ""
    return f"the job {words.stopped(stop)}{request}"


def _holds(holds: Json) -> str:
    flying = sum(item["rows"] for item in holds["in_flight"])
    parts = [
        words.plural(holds["timers"], "timer") if holds["timers"] else "",
        f"{words.count(flying)} records in flight" if flying else "",
        words.plural(holds["committables"], "committable") if holds["committables"] else "",
    ]
    return ", ".join(filter(None, parts))
