"""What a notebook shows of a store, a checkpoint, a plan, a dataflow and a diff, in brief.

Each function takes the function that makes the document, because a notebook shows nothing for a
value whose ``_repr_html_`` raises: here an empty or damaged store becomes a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .. import words
from .charts import share
from .elements import Element, Node, element as e, fragment
from .graph import draw_graph
from .pieces import DASH, Column, badge, facts, mode_of, more, short, state_name, table

Json = Mapping[str, Any]
Make = Callable[[], Json]
ROWS_SHOWN: Final = 10


def store_html(url: str, make: Make) -> str:
    """Return a store's newest checkpoints. The document: ``checkpoints``, ``older``, ``fault``."""
    return _shown(f"Store {url}", make, _store)


def checkpoint_html(name: str, make: Make) -> str:
    """Return a checkpoint's graph and states. The document: a record's, and ``sizes``."""
    return _shown(f"Checkpoint {name}", make, _checkpoint)


def plan_html(name: str, make: Make) -> str:
    """Return who starts how, and why the restore is refused. The document: ``operators``,
    ``refusals``.
    """
    return _shown(name, make, _plan)


def dataflow_html(name: str, make: Make) -> str:
    """Return a job's graph and states. The document: a record's, without what a run adds."""
    return _shown(f"Dataflow {name}", make, _dataflow)


def diff_html(name: str, make: Make) -> str:
    """Return what differs between two checkpoints. The document: that of ``ckpt diff``."""
    return _shown(f"From checkpoint {name}", make, _diff)


def _shown(title: str, make: Make, draw: Callable[[Json], list[Node]]) -> str:
    head = e("h2", short(title, 120))
    try:
        return fragment(head, draw(make()))
    except Exception as error:
        return fragment(head, e("p", words.sentence(str(error) or type(error).__name__)))


def _store(document: Json) -> list[Node]:
    entries = document["checkpoints"]
    columns = [
        Column("checkpoint", right=True),
        Column("kind", whole=True),
        Column("published (UTC)", whole=True),
        Column("finished"),
        Column("rows", right=True),
        Column("bytes", right=True),
    ]
    rows = (
        (
            str(entry["checkpoint_id"]),
            short(entry["kind"], 20),
            words.clock(entry["created_at_us"]) if entry["created_at_us"] > 0 else DASH,
            f"{entry['finished']} of {entry['operators']}",
            None if entry["totals"]["rows"] is None else words.count(entry["totals"]["rows"]),
            words.size(entry["totals"]["bytes"]),
        )
        for entry in entries[:ROWS_SHOWN]
    )
    job = words.named(entries[0]["job_id"], entries[0]["job_name"]) if entries else ""
    fault = document["fault"]
    return [
        e("p", short(job, 200), class_="quiet"),
        e("p", badge("damaged", "bad"), " ", words.sentence(fault)) if fault else None,
        table(columns, rows),
        more(document["older"], "checkpoint", "store.history() has all"),
    ]


def _checkpoint(document: Json) -> list[Node]:
    totals = document["totals"]
    rows = [] if totals["rows"] is None else [words.plural(totals["rows"], "row")]
    written = words.clock(document["created_at_us"]) if document["created_at_us"] > 0 else ""
    pairs: list[tuple[str, Node]] = [
        ("Job", words.named(document["job_id"], document["job_name"])),
        ("Kind", document["system"] or document["kind"]),
        ("Published", f"{written} UTC" if written else ""),
        ("Size", ", ".join([*rows, words.size(totals["bytes"])])),
    ]
    return [
        facts(pairs),
        draw_graph(document["operators"], document["edges"]) if document["operators"] else None,
        _states(document),
    ]


def _states(document: Json) -> Element | None:
    sizes = document["sizes"]
    states = sorted(document["states"], key=lambda state: -_size(sizes, state)[1])
    if not states:
        return None
    top = max(_size(sizes, state)[1] for state in states)
    columns = [
        Column("state"),
        Column("mode"),
        Column("rows", right=True),
        Column("bytes", right=True),
        Column("share"),
    ]
    rows = []
    for state in states[:ROWS_SHOWN]:
        count, size_bytes = _size(sizes, state)
        rows.append(
            (
                state_name(state["operator"], state["name"]),
                mode_of(state),
                None if count is None else words.count(count),
                words.size(size_bytes),
                share(size_bytes, top, words.size(size_bytes)),
            )
        )
    return e("div", table(columns, rows), more(len(states) - ROWS_SHOWN, "state"))


def _size(sizes: Mapping[tuple[str, str], tuple[int | None, int]], state: Json) -> tuple[int | None, int]:
    return sizes.get((state["operator"], state["name"]), (None, 0))


def _plan(document: Json) -> list[Node]:
    columns = [
        Column("operator"),
        Column("action"),
        Column("subtasks"),
        Column("saved rows", right=True),
        Column("reads", right=True),
    ]
    reads = document["reads"]
    operators = document["operators"]
    rows = (
        (
            short(words.named(operator["name"] or operator["uid"], operator["uid"]), 60),
            operator["action"].replace("_", " "),
            f"{operator['old_parallelism']} → {operator['parallelism']}",
            words.count(operator["saved_rows"]),
            words.size(reads[operator["uid"]]) if operator["uid"] in reads else None,
        )
        for operator in operators[: 2 * ROWS_SHOWN]
    )
    refusals = document["refusals"]
    return [
        e("p", badge("can be restored", "good") if not refusals else badge("refused", "bad")),
        *(
            e("p", words.sentence(refusal["message"]), " ", words.sentence(refusal["advice"]))
            for refusal in refusals[:ROWS_SHOWN]
        ),
        more(len(refusals) - ROWS_SHOWN, "refusal", "plan.refusals has all"),
        table(columns, rows),
        more(len(operators) - 2 * ROWS_SHOWN, "operator", "plan.operators has all"),
    ]


def _dataflow(document: Json) -> list[Node]:
    states = document["states"]
    columns = [Column("state"), Column("mode"), Column("key"), Column("columns")]
    rows = (
        (
            state_name(state["operator"], state["name"]),
            mode_of(state),
            short(", ".join(state["key_columns"]), 80),
            short(", ".join(item["name"] for item in state["schemas"][-1]["fields"]), 160)
            if state["schemas"]
            else None,
        )
        for state in states[: 2 * ROWS_SHOWN]
    )
    return [
        draw_graph(document["operators"], document["edges"]),
        table(columns, rows) if states else None,
        more(len(states) - 2 * ROWS_SHOWN, "state"),
        *(e("p", f"Warning: {words.label(sentence)}") for sentence in document["warnings"]),
    ]


def _diff(document: Json) -> list[Node]:
    differing = [state for state in document["states"] if state["change"] != "same"]
    columns = [
        Column("state"),
        Column("change"),
        Column("rows added", right=True),
        Column("removed", right=True),
        Column("changed", right=True),
        Column("columns"),
    ]
    rows = (
        (
            state_name(state["operator"], state["state"]),
            state["change"],
            *(None if state[name] is None else words.count(state[name]) for name in ("added", "removed", "changed")),
            short(", ".join(f"{one['column']} {one['change']}" for one in state["columns"]), 160),
        )
        for state in differing[: 2 * ROWS_SHOWN]
    )
    graph = document["graph"] or {"operators": [], "edges": []}
    changes = [f"{one['name']} {one['change']}" for one in (*graph["operators"], *graph["edges"])]
    listed = ", ".join(changes[:ROWS_SHOWN]) + (
        f" and {len(changes) - ROWS_SHOWN} more" if changes[ROWS_SHOWN:] else ""
    )
    same = len(document["states"]) - len(differing)
    return [
        e("p", badge("same content", "good") if document["same"] else badge("they differ", "some")),
        e("p", f"Graph: {listed}") if changes else None,
        table(columns, rows) if differing else None,
        more(len(differing) - 2 * ROWS_SHOWN, "state", "diff.states has all"),
        e("p", f"The same: {words.plural(same, 'state')}.", class_="quiet") if same else None,
    ]
