"""How values look at a prompt and in a notebook: short lines, small tables, never an exception."""

from __future__ import annotations

import enum
import inspect
import shutil
from collections.abc import Callable, Iterator
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
from stateformat.store import CheckpointStore, open as open_store
from tests import stores
from tests.html.hostile import NAMES
from tests.html.test_html_elements import Parsed

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
    assert ("can be restored" in shown) is not plan.refused
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
    assert "they differ" in shown
    assert "sums" in shown
    assert "same content" in text_of(diff.diff_checkpoints(store.open(1), store.open(1)))


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
        assert "checkpoint" in text_of(opened)
        assert "svg" in html(opened.open()).tags


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
        } | {*("details", "summary", "table", "thead", "tbody", "tr", "th", "td", "abbr", "path")}
