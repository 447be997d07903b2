"""How values look at a prompt and in a notebook: short lines, small tables, never an exception.

Parsed: what goes in as text comes out as text.
"""

from __future__ import annotations

import enum
import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from docs._site.pages import DOORS, NAMES as NAMES_OF
from stateformat import paths as layout
from stateformat.backends import connectors, dataflow
from stateformat.backends.bootstrap import Rows, ThreadEngine
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.backends.local import LocalRuntime, VirtualClock
from stateformat.inspecting import diff
from stateformat.pages.elements import document, element, fragment
from stateformat.pages.html import draw_graph
from stateformat.pages.report import report_page
from stateformat.reporting import collect_report
from stateformat.store import CheckpointStore, open as open_store
from stateformat.words import label
from tests.html.hostile import NAMES, hostile
from tests.worlds import stores

FIXTURES = Path(__file__).parents[1] / "foreign/fixtures"
LENGTH_MAX = 240


def classes() -> Iterator[Any]:
    """Every public class of every door, but errors, enumerations and protocols."""
    for door in DOORS:
        package = import_module(door)
        for name in NAMES_OF[door].split() if door in NAMES_OF else package.__all__:
            found = getattr(package, name)
            if not inspect.isclass(found) or issubclass(found, BaseException | enum.Enum):
                continue
            if not getattr(found, "_is_protocol", False):
                yield pytest.param(found, id=f"{door}.{name}")


@pytest.mark.parametrize("public", [*classes()])
def test_no_public_class_prints_an_address(public: Any) -> None:
    assert public.__repr__ is not object.__repr__


COLUMNS = {"key": pa.string(), "n": pa.int64()}
BATCH = pa.table({"key": ["a", "b"] * 500, "n": range(1000)})


def flow() -> dataflow.Dataflow:
    made = dataflow.Dataflow("a job", name="<b>a job</b>")
    rows = made.source(connectors.MemorySource(BATCH), uid="rows")
    rows.key_by("key").apply(dataflow.Aggregate("key", {"n": ("n", "sum")}), uid="sums").apply(
        connectors.CollectSink(), uid="out"
    )
    return made


MAKERS: dict[str, Callable[[Path], Any]] = {
    "source": lambda _: connectors.MemorySource(BATCH),
    "rate": lambda _: connectors.RateSource(total=5),
    "sink": lambda folder: connectors.FileSink(folder / "out"),
    "database": lambda folder: connectors.SqlSink(f"sqlite:///{folder}/x.db", "counts", key="key"),
    "operator": lambda _: dataflow.TumblingWindow("key", 10, "n", {"m": ("n", "max")}),
    "state": lambda _: dataflow.MapState("by_month", keys=COLUMNS, map_key=pa.int8(), values=COLUMNS),
    "states": lambda _: dataflow.ValueState("sums", keys=pa.schema(COLUMNS), values=pa.schema(COLUMNS)),
    "flow": lambda _: flow(),
    "step": lambda _: flow().steps["sums"],
    "stream": lambda _: flow().source(connectors.MemorySource(BATCH), uid="more"),
    "rows": lambda _: Rows(BATCH, order_by="n"),
    "engine": lambda _: ThreadEngine(),
    "clock": lambda _: VirtualClock(),
    "runtime": lambda folder: LocalRuntime(open_store(str(folder))),
    "harness": lambda _: OperatorHarness(dataflow.Deduplicate("key"), COLUMNS, key_by="key"),
    "store": lambda folder: stores.flights_store(str(folder)),
    "survey": lambda folder: stores.flights_store(str(folder)).survey(),
    "garbage": lambda folder: stores.flights_store(str(folder)).expire(1, delete=False),
    "permit": lambda folder: stores.flights_store(str(folder)).start("flights-job"),
    "record": lambda folder: stores.flights_store(str(folder)).open().record,
    "manifest": lambda folder: stores.flights_store(str(folder)).open().manifest,
    "rows of a state": lambda folder: stores.flights_store(str(folder)).open().state("delays", "sums"),
    "changes": lambda folder: stores.flights_store(str(folder)).changes("delays", "sums", 1, 2),
    "range": lambda folder: stores.flights_store(str(folder)).states_over("delays", "sums"),
    "foreign": lambda _: open_store(str(FIXTURES / "flink-2.3.0/core-hashmap-canonical/savepoint")).open(),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_value_is_one_short_line(name: str, tmp_path: Path) -> None:
    shown = repr(MAKERS[name](tmp_path))
    assert "\n" not in shown
    assert " at 0x" not in shown
    assert len(shown) <= LENGTH_MAX, shown


def test_the_repr_of_a_sink_has_no_password() -> None:
    pytest.importorskip("psycopg")
    sink = connectors.SqlSink("postgresql://ann:secret@db.example/data", "t", key="k", staging="/tmp/x")
    assert "secret" not in repr(sink)


def html(value: Any) -> Parsed:
    """What a notebook shows of a value, parsed: one element, with its style."""
    text = value._repr_html_()
    parsed = Parsed(text)
    assert text.startswith('<div class="sf"><style>')
    assert not parsed.open
    assert not parsed.tags & {"script", "img", "iframe"}
    assert len(text) < 500_000
    return parsed


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return stores.flights_store(str(tmp_path / "store"))


def text_of(value: Any) -> str:
    return " ".join(html(value).text)


def test_a_store_shows_its_newest_checkpoints(store: CheckpointStore) -> None:
    shown = text_of(store)
    assert "flights-job (Flights)" in shown
    assert "1 of 7" in shown
    job, permit = stores.flights_job(), store.start("flights-job")
    for _ in range(10):
        permit = job.publish(store, permit)
    assert "… and 2 more checkpoints" in text_of(store)


def test_a_checkpoint_shows_graph_and_states_and_opens_no_segment(store: CheckpointStore) -> None:
    checkpoint = store.open()
    for folder in Path(store.url.removeprefix("file://")).glob("segments/*"):
        shutil.rmtree(folder)
    parsed = html(checkpoint)
    assert "svg" in parsed.tags
    assert {"Delays per plane", "by_month"} <= set(parsed.text)


def test_a_plan_shows_who_starts_and_what_refuses(store: CheckpointStore) -> None:
    checkpoint = store.open()
    plan = checkpoint.plan_restore(checkpoint.graph.at(3))
    shown = text_of(plan)
    assert ("possible" in shown) is not plan.refused
    refused = checkpoint.plan_restore(checkpoint.graph.at(129))
    assert "129" in text_of(refused)
    assert "refused" in text_of(refused)


def test_a_dataflow_shows_its_graph_before_it_runs() -> None:
    parsed = html(flow())
    assert "svg" in parsed.tags
    assert "b" not in parsed.tags
    assert {"rows", "sums", "out"} <= set(parsed.text)


def test_a_diff_shows_what_differs(store: CheckpointStore) -> None:
    found = diff.diff_checkpoints(store.open(1), store.open(2))
    shown = text_of(found)
    assert "different: the graph and" in shown
    assert "sums" in shown
    assert "the same: " in text_of(diff.diff_checkpoints(store.open(1), store.open(1)))


def test_what_cannot_be_read_is_a_sentence_in_a_notebook(store: CheckpointStore, tmp_path: Path) -> None:
    assert "There is no store at" in text_of(open_store(str(tmp_path / "nothing")))
    newest = store.open()
    (tmp_path / "store" / newest.record.manifest.path).write_bytes(b"no manifest")
    assert "manifest" in text_of(store.open())
    (tmp_path / "store" / layout.record_path(2)).write_bytes(b"{")
    assert "damaged" in text_of(open_store(store.url))
    empty = dataflow.Dataflow("nothing")
    assert "Dataflow nothing" in text_of(empty)


def test_foreign_checkpoints_are_shown_as_ours_are() -> None:
    for folder in ("flink-2.3.0/core-hashmap-canonical/savepoint", "spark-4.3.0/window/checkpoint"):
        opened = open_store(str(FIXTURES / folder))
        assert "History" in text_of(opened)
        assert "svg" in html(opened.open()).tags


def test_the_whole_sentence_about_damage_wraps_beside_its_sign(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "store" / layout.record_path(2)).write_bytes(b"{")
    shown = open_store(store.url)._repr_html_()
    (badge,) = re.findall(r'<span class="badge bad">([^<]*)</span>', shown)
    assert badge == "✗"
    assert "`ckpt repair` says what can be done." in shown


def test_a_notebook_has_all_of_a_graph_and_no_options_of_a_command() -> None:
    shown = text_of(open_store(str(FIXTURES / "flink-2.3.0/sql-hashmap-canonical/savepoint")).open())
    assert "Operators and edges in words" in shown
    assert "(--" not in shown.partition("Checkpoint")[2]


def test_each_input_of_an_operator_is_told_in_words(store: CheckpointStore) -> None:
    shown = " ".join(html(store.open()).text)
    for told in ("planes hash by tailnum", "rates broadcast", "alerts hash by tailnum (feedback)"):
        assert told in shown


def test_names_are_text_in_notebooks_too() -> None:
    for name in NAMES:
        if not name or "\ud800" in name or "\x00" in name:
            continue
        made = dataflow.Dataflow("job", name=name)
        made.source(connectors.MemorySource(BATCH), uid=f"{name}1")
        parsed = html(made)
        assert parsed.tags <= {"strong"} | {
            "div",
            "style",
            "h2",
            "p",
            "svg",
            "title",
            "g",
            "rect",
            "circle",
            "text",
            "span",
            *("dl", "dt", "dd"),
        } | {*("details", "summary", "table", "thead", "tbody", "tr", "th", "td", "abbr", "path")}


class Parsed(HTMLParser):
    """The elements, attributes and text of a page, as the standard library reads it."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def flights_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = stores.flights_store(str(tmp_path_factory.mktemp("html") / "store"))
    return collect_report(open_store(store.url), now_us=store.open().record.created_at_us + 10**6)


@pytest.mark.parametrize("name", NAMES)
def test_text_and_attributes_come_back_as_they_went_in(name: str) -> None:
    parsed = Parsed(str(element("p", name, title=name)))
    assert parsed.tags == {"p"}
    assert "".join(parsed.text) == label(name)
    assert parsed.attributes == {("title", label(name) or None)}
    assert not parsed.open


@pytest.mark.parametrize(
    ("tag", "attributes"),
    [
        ("script", {}),
        ("img", {}),
        ("p><b", {}),
        ("iframe", {}),
        ("p", {"onclick": "x"}),
        ("p", {"style": "color: red"}),
        ("p", {"href": "http://example.org"}),
        ("p", {"src": "x"}),
        ("p", {"a b": "x"}),
        ("p", {'a"': "x"}),
    ],
)
def test_what_could_run_or_load_is_no_element(tag: str, attributes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="no "):
        element(tag, **attributes)


def test_attributes_are_left_out_bare_or_quoted() -> None:
    made = element(
        "p", 1, 2.5, None, ["a", ("b", element("code", "<"))], class_="x y", open=True, title=None, lang=False
    )
    assert str(made) == '<p class="x y" open>12.5ab<code>&lt;</code></p>'
    assert str(element("rect", x=0.25, y=7)) == '<rect x="0.2" y="7"/>'


def test_a_page_says_that_nothing_may_be_loaded_and_no_script_may_run() -> None:
    page = "".join(document("<title>", element("p", "text")))
    policies = [
        value for name, value in Parsed(page).attributes if name == "content" and "default-src" in (value or "")
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    assert "&lt;title&gt;" in page


def test_no_name_in_a_report_becomes_markup(flights_report: dict[str, Any]) -> None:
    plain = Parsed("".join(report_page(flights_report)))
    evil = hostile(flights_report)
    page = "".join(report_page(evil))
    parsed = Parsed(page)
    page.encode()  # no half of a surrogate pair is left
    assert not parsed.open
    assert parsed.tags <= plain.tags | {"abbr", "h3"}
    assert {name for name, _ in parsed.attributes} <= {name for name, _ in plain.attributes} | {"title"}
    assert not any(name.startswith("on") or name in ("src", "href", "style") for name, _ in parsed.attributes)
    text = "\n".join(parsed.text)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert all(label(name)[:24] in text for name in NAMES[:8])


def test_a_report_has_every_operator_state_and_checkpoint(flights_report: dict[str, Any]) -> None:
    text = " ".join(Parsed("".join(report_page(flights_report))).text)
    for operator in flights_report["checkpoint"]["operators"]:
        assert (operator["name"] or operator["uid"]) in text
    for state in flights_report["states"]:
        assert state["name"] in text
    for words in ("Flights", "3 of 4 finished: 0-2", "60 timers", "nightly run", "feedback"):
        assert words in text
    assert "alerts hash by tailnum (feedback)" in text


def test_what_a_repair_gave_up_is_told(flights_report: dict[str, Any]) -> None:
    states = [
        {"operator": "delays", "state": f"state {i}", "effect": "lost", "rows": 1, "rows_besides": 0} for i in range(50)
    ]
    given = {"checkpoint_id": 1, "rows": 1234, "states": states}
    told = {**flights_report, "checkpoint": {**flights_report["checkpoint"], "given_up": given}}
    text = "".join(Parsed("".join(report_page(told))).text)
    assert "given up1,234 rows of checkpoint 1, whose segments were lost: delays/state 0 1, delays/state 1 1" in text
    assert "and 40 more" in text


def operators(*uids: str, **more: Any) -> list[dict[str, Any]]:
    """Operators as a record has them."""
    rest = {"name": "", "parallelism": 4, "max_parallelism": 128, "status": "running", "chain": None}
    return [{"uid": uid, **rest, "finished": [], "finishing": [], "coordinator": False, **more} for uid in uids]


def edges(*pairs: str, **more: Any) -> list[dict[str, Any]]:
    """Edges, given as ``a>b``."""
    rest = {"partitioner": "hash", "key_columns": [], "feedback": False, "input": 0}
    return [
        {"id": pair, "from": pair.partition(">")[0], "to": pair.partition(">")[2], **rest, **more} for pair in pairs
    ]


GRAPHS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "nothing": ([], []),
    "one": (operators("a"), []),
    "no edges, as of Flink": (operators("a", "b", "c"), []),
    "a loop to itself": (operators("a"), edges("a>a", feedback=True)),
    "a cycle, which the format forbids": (operators("a", "b", "c"), edges("a>b", "b>c", "c>a")),
    "an edge to nowhere": (operators("a"), edges("a>b", "c>a")),
    "two edges between the same": (operators("a", "b"), edges("a>b", "a>b")),
    "sixty into one into sixty": (
        operators(*(f"s{i}" for i in range(60)), "all", *(f"t{i}" for i in range(60))),
        edges(*(f"s{i}>all" for i in range(60)), *(f"all>t{i}" for i in range(60))),
    ),
    "two hundred in a line": (
        operators(*(f"o{i}" for i in range(200))),
        edges(*(f"o{i}>o{i + 1}" for i in range(199)), "o0>o199"),
    ),
    "a chain": (
        operators("a") + operators("b", "c", "d", chain="x"),
        edges("a>b") + edges("b>c", "c>d", partitioner="forward"),
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_boxes_neither_overlap_nor_leave_the_drawing(name: str) -> None:
    drawn = draw_graph(*GRAPHS[name], {})
    for svg in found(drawn, "svg"):
        place = dict(svg.attributes)
        if not found(svg, "rect"):
            continue
        width, height = float(place["width"]), float(place["height"])
        rects = [
            tuple(float(dict(rect.attributes)[side]) for side in ("x", "y", "width", "height"))
            for rect in found(svg, "rect")
        ]
        for i, (x, y, wide, high) in enumerate(rects):
            assert x >= 0
            assert y >= 0
            assert x + wide <= width + 0.6
            assert y + high <= height + 0.6
            for left, top, broad, tall in rects[:i]:
                apart = x >= left + broad or left >= x + wide or y >= top + tall or top >= y + high
                assert apart, (name, rects[i])


def found(node: Any, tag: str) -> list[Any]:
    """Every element with this tag in a tree."""
    if not hasattr(node, "tag"):
        return []
    inside = [hit for child in node.children for hit in found(child, tag)]
    return [node, *inside] if node.tag == tag else inside


def test_a_chain_is_one_box_and_its_operators_are_lines_in_it() -> None:
    drawn = draw_graph(*GRAPHS["a chain"], {})
    wide = found(drawn, "svg")[0]
    assert len(found(wide, "rect")) == 2
    assert len(found(wide, "circle")) == 4


def test_a_graph_too_large_to_draw_is_a_table() -> None:
    drawn = draw_graph(operators(*(f"o{i}" for i in range(1_000))), [], {})
    assert not found(drawn, "svg")
    assert "and 700 more operators" in str(drawn)


def test_a_fragment_brings_its_own_style_and_one_root() -> None:
    text = fragment(element("p", "<b>"))
    assert text.startswith('<div class="sf"><style>')
    assert text.endswith("<p>&lt;b&gt;</p></div>")
