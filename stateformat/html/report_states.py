"""The part of a report on states: how large each is, how it grew, how it is distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from .. import words
from .charts import columns as chart, share, spark
from .elements import Element, Node, element as e
from .pieces import DASH, Column, badge, facts, mode_of, more, opening, short, state_name, table

Json = Mapping[str, Any]
STATES_SHOWN: Final = 40
CHARTED: Final = 20
"""States that have charts: the largest."""
OPEN: Final = 3
"""States whose charts are open at first: the largest."""
FIELDS_SHOWN: Final = 60
EMPTY_SHOWN: Final = 12
HOT_MIN: Final = 10
"""Values below this many rows or bytes are never marked, however few the others have."""
SKEWED: Final = 2.0
"""A state counts as skewed from this ratio of the greatest part to the mean."""


def draw_states(report: Json) -> Element | None:
    """Return the section on states, the largest first."""
    if report["checkpoint"] is None:
        return None
    states = sorted(report["states"], key=lambda state: -state["bytes"])
    if not states:
        return e("section", e("h2", "States"), e("p", "There are none.", class_="quiet"))
    trends = _trends(report)
    ids = report["trend"]["checkpoint_ids"]
    top = max(state["bytes"] for state in states)
    held = [state for state in states if state["bytes"]] or states[:1]
    shown = held[:STATES_SHOWN]
    titles = ("state", "mode", "rows", "bytes", "share", _over(ids), "skew")
    empty = [f"{state['operator']} / {state['name']}" for state in states[len(held) :]]
    return e(
        "section",
        e("h2", "States"),
        e("div", (e("span", title) for title in titles), class_="line titles"),
        [_state(state, trends.get((state["operator"], state["name"])), top, i) for i, state in enumerate(shown)],
        more(len(held) - len(shown), "state", "ckpt inspect --format json lists all"),
        _empty(empty),
        class_="long states",
    )


def _empty(names: Sequence[str]) -> Element | None:
    """Return the names of states that take no bytes."""
    if not names:
        return None
    listed = [words.label(name)[:60] for name in names[:EMPTY_SHOWN]]
    left = len(names) - len(listed)
    return e("p", "Empty: ", ", ".join(listed), f" and {words.count(left)} more" if left else "", ".", class_="quiet")


class _Trend(NamedTuple):
    """The bytes of a state in several checkpoints; the one at ``shown`` is that of the report."""

    ids: Sequence[int]
    sizes: Sequence[int | None]
    shown: int | None


def _trends(report: Json) -> dict[tuple[str, str], _Trend]:
    """Return the trend of each state; none if there is only one checkpoint."""
    ids, here = report["trend"]["checkpoint_ids"], report["checkpoint"]["checkpoint_id"]
    if len(ids) < 2:
        return {}
    shown = ids.index(here) if here in ids else None
    return {(item["operator"], item["state"]): _Trend(ids, item["bytes"], shown) for item in report["trend"]["states"]}


def _over(ids: Sequence[int]) -> str:
    return f"{ids[0]} to {ids[-1]}" if len(ids) > 1 else "trend"


def _state(state: Json, trend: _Trend | None, top: int, place: int) -> Element:
    """Return a state as one line, which opens to show its charts and columns."""
    cells = (
        ("", state_name(state["operator"], state["name"], 36)),
        ("mode", mode_of(state)),
        ("rows", DASH if state["rows"] is None else words.count(state["rows"])),
        ("bytes", words.size(state["bytes"])),
        (
            "share",
            share(state["bytes"], top, f"{words.size(state['bytes'])}; the greatest state has {words.size(top)}"),
        ),
        ("trend", spark(trend.sizes, _trend_words(trend)) if trend else DASH),
        ("skew", _skew(state)),
    )
    line = (e("span", cell, data_label=label, class_=label or "name") for label, cell in cells)
    inside = _details(state, trend, is_charted=place < CHARTED)
    return e(
        "details", e("summary", e("div", line, class_="line")), e("div", inside, class_="inside"), open=place < OPEN
    )


def _trend_words(trend: _Trend) -> str:
    known = [(number, value) for number, value in zip(trend.ids, trend.sizes, strict=True) if value is not None]
    if not known:
        return "not known"
    (first, was), (last, now) = known[0], known[-1]
    return f"{words.size(was)} at checkpoint {first}, {words.size(now)} at {last}"


def _skew(state: Json) -> Node:
    if state["subtasks"] is None or not state["bytes"]:
        return DASH
    text = f"{state['skew']:g} ×"
    return badge(text, "some") if state["skew"] >= SKEWED else text


def _details(state: Json, trend: _Trend | None, *, is_charted: bool) -> list[Element | None]:
    measured = state["subtasks"]
    charts: list[Element] = []
    if trend and is_charted:
        labels = [f"checkpoint {number}" for number in trend.ids]
        ends = (str(trend.ids[0]), str(trend.ids[-1]))
        title = "Bytes over the history"
        charts.append(chart(title, trend.sizes, labels, text=words.size, ends=ends, at=trend.shown))
    if measured and measured["count"] > 1 and is_charted:
        text = words.size if measured["measure"] == "bytes" else words.count
        title = f"{measured['measure'].capitalize()} by subtask"
        charts.append(_spread(title, "subtask", measured, text))
    groups = state["key_groups"]
    if groups and is_charted:
        charts.append(_spread("Rows by key group", "key group", groups, words.count))
    return [
        e("div", charts, class_="charts") if charts else None,
        facts(_facts(state)),
        _fields(state),
    ]


def _spread(title: str, noun: str, found: Json, text: Any) -> Element:
    """Return a chart of what each subtask or key group has; neighbors may share bars."""
    per, count = found["per_bar"], found["count"]
    firsts = [i * per for i in range(len(found["values"]))]
    if per == 1:
        labels = [f"{noun} {first}" for first in firsts]
    else:
        labels = [f"the greatest of {noun}s {first} to {min(first + per, count) - 1}" for first in firsts]
    known = [value for value in found["values"] if value is not None]
    hot = SKEWED * sum(known) / max(1, len(known))
    marked = [value is not None and value > max(hot, HOT_MIN) for value in found["values"]]
    return chart(title, found["values"], labels, text=text, ends=("0", str(count - 1)), marked=marked)


def _facts(state: Json) -> list[tuple[str, Node]]:
    pairs: list[tuple[str, Node]] = []
    measured, groups = state["subtasks"], state["key_groups"]
    if measured and measured["greatest"]:
        text = words.size if measured["measure"] == "bytes" else words.count
        most = [
            f"{DASH if item['subtask'] is None else item['subtask']} ({text(item[measured['measure']])})"
            for item in measured["greatest"][:3]
        ]
        pairs.append(("Subtasks with most", f"{', '.join(most)}; the greatest has {state['skew']:g} × the mean"))
    if groups:
        most = [f"{item['group']} ({words.count(item['rows'])})" for item in groups["greatest"][:3]]
        told = f"{', '.join(most) or 'none'}; the greatest has {groups['skew']:g} × the mean"
        pairs.append(("Key groups with most", f"{told}; {words.count(groups['empty'])} of {groups['count']} are empty"))
    layers = [
        ("base " if layer["layer"] == 0 else f"delta {layer['layer']} ")
        + ("" if layer["rows"] is None else f"{words.plural(layer['rows'], 'row')}, ")
        + words.size(layer["bytes"])
        for layer in state["layers"][:20]
    ]
    pairs.append(("Layers", "; ".join(layers)))
    pairs.append(("Segments", f"{words.count(state['segments'])}, by {words.plural(state['handles'], 'handle')}"))
    pairs.append(("Edge", state["edge"]))
    pairs.append(("TTL", ", ".join(words.ttl_of(state["ttl"])) if state.get("ttl") else None))
    pairs.append(("Key", ", ".join(state["key_columns"])))
    return pairs


def _fields(state: Json) -> Element | None:
    fields = state["schemas"][-1]["fields"] if state["schemas"] else []
    if not fields:
        return None
    rows = (
        (short(item["name"]), short(words.type_text(item["type"]), 200), "yes" if item["nullable"] else "no")
        for item in fields[:FIELDS_SHOWN]
    )
    return opening(
        words.plural(len(fields), "column"),
        table([Column("column"), Column("type"), Column("may be null")], rows),
        more(len(fields) - FIELDS_SHOWN, "column"),
    )
