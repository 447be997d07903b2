"""``ckpt report``: the page as a file, its document, and what it does with damage and much data."""

from __future__ import annotations

import json
import re
import time
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat import paths as layout, reporting
from stateformat.backends.foreign import checkpoint as foreign
from stateformat.backends.storage import MemoryStorage
from stateformat.graph import JobGraph, Partitioner
from stateformat.pages import drawings
from stateformat.pages.report import _spread, report_page
from stateformat.reporting import collect_report
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.words import label
from tests.ckpt.ckpt_runs import document, failure, page, run
from tests.html.hostile import NAMES
from tests.html.test_reprs import Parsed
from tests.worlds import stores

FIXTURES = Path(__file__).parents[1] / "foreign/fixtures"
NOW_US = 1_800_000_000 * 10**6


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that ``report.html`` goes to."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_the_page_is_a_file_that_the_next_report_replaces(flights: Path, tmp_path: Path) -> None:
    told = page("report", flights)
    written = tmp_path / "here" / "report.html"
    assert "here/report.html" in "".join(told.split())
    assert "checkpoint 2 · 2 checkpoints of history · 13 states" in told
    text = written.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "Flights: checkpoint 2" in text
    page("report", f"{flights}@1")
    assert "Flights: checkpoint 1" in written.read_text()
    assert [*written.parent.iterdir()] == [written]


def test_a_file_that_is_no_report_stays_unless_forced(flights: Path) -> None:
    Path("notes.html").write_text("mine")
    assert "--force" in failure("report", flights, "--to", "notes.html", status=2)["message"]
    assert Path("notes.html").read_text() == "mine"
    page("report", flights, "--to", "notes.html", "--force")
    assert "Flights" in Path("notes.html").read_text()
    for place in ("s3://bucket", "s3://bucket/", "s3://bucket/folder/"):
        assert "names no file" in failure("report", flights, "--to", place, status=2)["message"]
    assert "is a directory" in failure("report", flights, "--to", ".", status=2)["message"]


def test_standard_output_takes_the_page_and_nothing_else(flights: Path) -> None:
    found = run("report", flights, "--to", "-")
    assert (found.status, found.err) == (0, "")
    assert found.out.startswith("<!DOCTYPE html>")
    assert found.out.endswith("</html>\n")
    failure("report", flights, "--to", "-", status=2)


def test_as_json_it_writes_no_page_unless_told(flights: Path) -> None:
    found = document("report", flights)
    assert (found["path"], found["size_bytes"], [*Path().iterdir()]) == (None, None, [])
    again = document("report", flights, "--to", "page.html")
    assert again["path"] == str(Path("page.html").absolute())
    assert again["size_bytes"] == Path("page.html").stat().st_size


def test_the_document_says_what_the_other_commands_say(flights: Path) -> None:
    found = document("report", flights)
    inspected = document("inspect", flights)
    shown = {name: value for name, value in inspected.items() if name not in ("states", "selection", "system")}
    assert {name: found["checkpoint"][name] for name in shown} == shown
    for state, other in zip(found["states"], inspected["states"], strict=True):
        same = set(other) - {"subtasks"}
        assert {name: state[name] for name in same} == {name: other[name] for name in same}
    history = document("history", flights)
    assert [
        {name: value for name, value in entry.items() if name != "since_parent_us"}
        for entry in found["history"]["checkpoints"]
    ] == history["checkpoints"]
    assert found["validation"] == document("validate", flights)
    sizes = document("du", flights, "--keep", 1)
    assert {name: value for name, value in found["sizes"].items() if name != "left_out"} == {
        name: sizes[name] for name in ("objects", "bytes", "shared_bytes", "folders", "garbage", "keep")
    }
    assert found["sizes"]["keep"]["bytes"] == document("gc", flights, "--keep", 1)["bytes"]


def test_rows_of_subtasks_and_key_groups_add_up(flights: Path) -> None:
    found = document("report", flights)
    for state in found["states"]:
        spread, groups = state["subtasks"], state["key_groups"]
        if spread is not None:
            assert sum(filter(None, spread["values"])) == state["rows"]
            assert spread["count"] == len(spread["values"])
        if groups is not None:
            assert sum(groups["values"]) == state["rows"]
            assert groups["empty"] == groups["values"].count(0)
            assert groups["greatest"][0]["rows"] == max(groups["values"])
    keyed = {state["name"] for state in found["states"] if state["mode"] == "keyed"}
    assert keyed == {state["name"] for state in found["states"] if state["key_groups"]}
    trend = {(item["operator"], item["state"]): item for item in found["trend"]["states"]}
    assert found["trend"]["checkpoint_ids"] == [1, 2]
    for state in found["states"]:
        assert trend[state["operator"], state["name"]]["rows"][-1] == state["rows"]
    assert trend["delays", "sums"]["rows"] == [60, 71]


def test_neighbors_share_a_bar_that_shows_the_greatest_of_them(flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = document("report", flights)["states"]
    monkeypatch.setattr(reporting, "BARS", 2)
    for state, before in zip(document("report", flights)["states"], whole, strict=True):
        for each in ("subtasks", "key_groups"):
            if before[each] is not None:
                values, shared = before[each]["values"], state[each]["per_bar"]
                assert shared == -(-len(values) // 2)
                assert state[each]["values"] == [
                    max((value for value in values[start : start + shared] if value is not None), default=None)
                    for start in range(0, len(values), shared)
                ]


def test_finished_subtasks_have_no_bar(flights: Path) -> None:
    states = {(state["operator"], state["name"]): state for state in document("report", flights)["states"]}
    assert states["flights", "positions"]["subtasks"]["values"] == [None, None, None, 4]
    assert states["planes", "splits"]["subtasks"]["values"] == [None] * 4


@pytest.mark.parametrize("damage", ["record", "manifest", "older record", "lost record"])
def test_damage_stands_at_the_top_and_the_rest_is_shown(five: Path, damage: str) -> None:
    newest = open_store(str(five)).open().record
    target, shown = {
        "record": (layout.record_path(newest.checkpoint_id), 5),
        "manifest": (newest.manifest.path, 5),
        "older record": (layout.record_path(4), 6),
        "lost record": (layout.record_path(4), 6),
    }[damage]
    if damage == "lost record":
        (five / target).unlink()
    else:
        (five / target).write_bytes(b"{")
    found = document("report", five, status=1)
    assert found["faults"]
    assert found["checkpoint"]["checkpoint_id"] == shown
    told = page("report", five, status=1)
    assert "problem" in told
    text = Path("report.html").read_text()
    assert text.index("The store is damaged") < text.index("Over the history")
    assert f"Checkpoint {shown} is shown." in text
    assert "ckpt repair" in text


def test_a_checkpoint_that_was_asked_for_and_is_damaged_is_not_replaced_by_another(five: Path) -> None:
    (five / layout.record_path(4)).write_bytes(b"{")
    found = document("report", f"{five}@4", status=1)
    assert found["checkpoint"] is None
    assert found["validation"]["checkpoint_id"] == 4
    assert found["validation"]["problems"]
    page("report", f"{five}@4", status=1)
    assert "No checkpoint can be shown." in Path("report.html").read_text()


def test_nothing_left_but_damage_is_a_page_too(five: Path) -> None:
    for record in (five / "checkpoints").iterdir():
        record.write_bytes(b"{")
    page("report", five, status=1)
    assert "No checkpoint can be shown." in Path("report.html").read_text()


def test_a_lost_segment_is_a_finding_before_the_history(five: Path) -> None:
    next((five / "segments").rglob("*.parquet")).unlink()
    for gone in (five / "segments").rglob("*.parquet"):
        gone.unlink()
    found = document("report", five, status=1)
    assert {problem["kind"] for problem in found["validation"]["problems"]} == {"object_missing"}
    page("report", five, status=1)
    text = Path("report.html").read_text()
    assert text.index("Validation of checkpoint 6") < text.index("Over the history")


def test_no_store_and_no_such_checkpoint_are_told_and_no_page_is_written(flights: Path, tmp_path: Path) -> None:
    assert failure("report", tmp_path / "nothing", status=3)["kind"] == "store_not_found"
    assert failure("report", f"{flights}@9", status=3)["kind"] == "checkpoint_not_found"
    assert [*Path().iterdir()] == []


def test_a_page_does_not_go_where_garbage_is_collected(own_flights: Path) -> None:
    assert (
        "garbage collection"
        in failure("report", own_flights, "--to", own_flights / "segments/x.html", status=2)["message"]
    )


@pytest.mark.parametrize(
    "folder",
    [
        "flink-2.3.0/core-hashmap-canonical/savepoint",
        "flink-2.3.0/finished-hashmap-canonical/savepoint",
        "flink-1.20.5/brief-hashmap-native/savepoint",
        "spark-4.3.0/window/checkpoint",
        "spark-4.3.0/join-outer-rocksdb-v4/checkpoint",
    ],
)
def test_of_another_system_what_is_known_is_shown(folder: str) -> None:
    found = document("report", FIXTURES / folder)
    assert found["system"]
    assert found["sizes"]["garbage"] is None
    assert [state["bytes"] for state in found["states"]] == [
        state["bytes"] for state in document("inspect", FIXTURES / folder)["states"]
    ]
    page("report", FIXTURES / folder)
    text = Path("report.html").read_text()
    assert "read as it is" in text
    assert ">–<" not in text
    assert f"<h1>{folder.split('/')[1]}/{folder.split('/')[2]}</h1>" in text
    assert all(state["rows"] is not None for state in found["states"])
    assert found["checkpoint"]["totals"]["rows"] == sum(state["rows"] for state in found["states"])
    told = failure("report", FIXTURES / folder, "--to", FIXTURES / folder / "page.html", status=2)
    assert "stays as it is" in told["message"]


def test_rows_of_a_large_checkpoint_of_another_system_are_left_to_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "COUNTED_BYTES", 0)
    folder = FIXTURES / "spark-4.3.0/window/checkpoint"
    assert document("report", folder)["checkpoint"]["totals"]["rows"] is None
    page("report", folder)
    text = unescape(Path("report.html").read_text())
    advice = f"`ckpt top file://{folder}@10` counts them."
    assert advice in text
    assert "<span>Rows</span>" not in text
    assert advice in " ".join(page("inspect", folder, COLUMNS="120").split()).replace("/ ", "/")
    assert document("top", f"{folder}@10")["states"][0]["rows"] == 31


@pytest.mark.parametrize("folder", ["spark-4.3.0/window/checkpoint", "flink-2.3.0/core-hashmap-canonical/savepoint"])
def test_of_a_checkpoint_of_another_system_is_said_which_files_were_checked_and_that_none_was_read(folder: str) -> None:
    files = document("validate", FIXTURES / folder)["checked"]["files"]
    assert files > 1
    page("report", FIXTURES / folder, "--level", "quick")
    text = unescape(Path("report.html").read_text())
    assert "✓ quick check: nothing found" in text
    assert f"Metadata, and names and sizes of {files} files, were checked. No content was read: `ckpt valid" in text
    assert "footer of each segment" not in text
    assert "handles" not in page("validate", FIXTURES / folder)
    assert document("validate", FIXTURES / folder, "--level", "full")["ok"]
    page("report", FIXTURES / folder, "--level", "full")
    text = unescape(Path("report.html").read_text())
    assert "✓ no problems" in text
    assert f"the content of {files} files, were checked" in text


def test_a_report_shows_trends_as_lines_and_marks_no_handful_of_rows(own_flights: Path) -> None:
    page("report", own_flights)
    text = Path("report.html").read_text()
    head, states = text.split("<h2>States</h2>")
    assert head.count('class="trace"') == 2  # Of two checkpoints there is one distance, which is no line.
    assert 'class="b"' not in head.split("<h2>Job graph</h2>")[0]
    assert "since 1</span>" in head
    assert "badge some" not in states.split("<h2>On the storage</h2>")[0]
    assert "states of the runtime" in states
    assert states.count("<details open>") == 1
    assert not re.search(r" (old|ago)<", text)
    assert "Rows, about the same since 1" in text
    page("report", f"{own_flights}@1")
    assert "since 1</span>" not in Path("report.html").read_text()


def test_what_has_more_than_twice_the_mean_is_marked_and_the_mark_is_told() -> None:
    found = {"measure": "rows", "count": 4, "per_bar": 1, "values": [1000, 90, 90, 90]}
    [hot, even] = [
        drawings.chart(_spread("Rows", "subtask", {**found, "values": values}, "rows"))
        for values in (found["values"], [99, 1, 1, 1])
    ]
    assert "more than 2 × the mean" in str(hot)
    assert 'class="e"' in str(hot)
    assert 'class="e"' not in str(even)


def test_pins_stand_with_the_storage(own_flights: Path) -> None:
    page("pin", f"{own_flights}@1", "before-the-change")
    assert [one["name"] for one in document("report", own_flights)["savepoints"]] == ["before-the-change"]
    page("report", own_flights)
    assert "before-the-change (checkpoint 1)" in Path("report.html").read_text()


def test_each_record_and_manifest_is_read_once_and_folders_are_listed_a_few_times() -> None:
    store = CheckpointStore(MemoryStorage("report-reads"))
    job, permit = stores.counts_job(), None
    for _ in range(12):
        permit = job.publish(store, permit, options=WriteOptions(inline_bytes_max=0))
    reads: list[str] = []
    looked = CheckpointStore(_Watched(store.storage, reads))
    collect_report(looked, now_us=NOW_US)
    MemoryStorage.reset("report-reads")
    listings = [read for read in reads if read.startswith("list")]
    metadata = [path for path in reads if not path.startswith((layout.SEGMENTS, "list"))]
    assert sorted(metadata) == sorted(set(metadata))
    assert len(metadata) == 24
    assert len(reads) - len(metadata) - len(listings) == 2  # the footers of the newest
    assert len(listings) <= 9, listings


class _Watched:
    """A storage that notes every object that is read."""

    def __init__(self, inner: Any, reads: list[str]) -> None:
        self._inner, self._reads = inner, reads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("list", "names", "names_after"):
            return found

        def listed(prefix: str) -> Any:
            self._reads.append(f"list {prefix}")
            return found(prefix)

        return listed

    def read_range(self, path: str, offset: int, length: int) -> Any:
        self._reads.append(path)
        return self._inner.read_range(path, offset, length)


def test_a_long_history_is_cut_and_says_so(five: Path) -> None:
    found = document("report", five, "--limit", 2)
    assert [entry["checkpoint_id"] for entry in found["history"]["checkpoints"]] == [6, 5]
    assert found["history"]["older"] == 3
    page("report", five, "--limit", 2)
    assert "… and 3 more older checkpoints" in Path("report.html").read_text()


def test_many_checkpoints_leave_the_garbage_to_du(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "GARBAGE_CHECKPOINTS", 4)
    found = document("report", five)["sizes"]
    assert (found["garbage"], found["keep"]) == (None, None)
    assert "ckpt du" in found["left_out"]
    monkeypatch.setattr(reporting, "TREND_BYTES", 0)
    assert document("report", five)["trend"]["checkpoint_ids"] == [6]


def test_many_segments_are_validated_when_asked(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "SEGMENTS_QUICK", 1)
    assert document("report", five)["validation"]["level"] == "metadata"
    page("report", five)
    assert "metadata fine" in Path("report.html").read_text()
    assert document("report", five, "--level", "quick")["validation"]["level"] == "quick"
    assert document("report", five, "--level", "full")["validation"]["checked"]["rows"] == 20


def test_a_great_report_stays_small(flights: Path) -> None:
    """Ten thousand operators, states, checkpoints, findings and properties."""
    found: Any = json.loads(json.dumps(collect_report(open_store(str(flights)), now_us=NOW_US)))
    many = range(10_000)
    operator, edge = found["checkpoint"]["operators"][4], found["checkpoint"]["edges"][0]
    found["checkpoint"]["operators"] = [{**operator, "uid": f"operator {i}"} for i in many]
    found["checkpoint"]["edges"] = [
        {**edge, "id": f"{i}", "from": f"operator {i}", "to": f"operator {i + 1}"} for i in many
    ]
    found["checkpoint"]["properties"] = {f"property {i}": "x" * 5_000 for i in many}
    found["states"] = [{**found["states"][5], "name": f"state {i}"} for i in many]
    found["history"]["checkpoints"] *= 5_000
    problem = {"kind": "k", "clause": "SPEC 1", "message": "m" * 2_000, "advice": "a" * 500, "path": "p" * 1_000}
    rest = {"operator": "o", "state": "s", "subtask": None}
    found["validation"].update(ok=False, problems=[{**problem, **rest}] * 10_000)
    found["savepoints"] = [{"name": "n" * 100, "checkpoint": None}] * 10_000
    begun = time.perf_counter()
    size = sum(len(piece) for piece in report_page(found))
    assert size < 2_000_000
    assert time.perf_counter() - begun < 30


def test_a_store_of_hostile_names_is_a_page_of_text(tmp_path: Path) -> None:
    """What a record may hold: names of a job, operators, states, columns and properties."""
    names = [name for name in NAMES if 0 < len(name) < 200 and "\x00" not in name and "\ud800" not in name]
    uids = [f"{i}{name}" for i, name in enumerate(names)]
    graph = JobGraph(
        tuple(stores.operator(uid, 2, name=names[-i]) for i, uid in enumerate(uids)),
        tuple(stores.edge(a, b, Partitioner.HASH, f"key {a}") for a, b in pairwise(uids)),
    )
    states = tuple(
        declare.value_state(uid, f"state {uid}", keys={f"key {uid}": pa.string()}, values={f"n {uid}": pa.int64()})
        for uid in uids
    )
    rows = {
        (uid, f"state {uid}"): lambda i, uid=uid: stores.owned(
            pa.table({f"key {uid}": names, f"n {uid}": range(len(names))}), [f"key {uid}"], stores.operator(uid, 2), i
        )
        for uid in uids
    }
    job = stores.Job("job", graph, states, rows, name=names[0])
    job.publish(open_store(str(tmp_path / "store")), None, properties={f"own {name}": name for name in names})
    page("report", tmp_path / "store")
    text = Path("report.html").read_text()
    parsed = Parsed(text)
    assert not parsed.tags & {"script", "img", "iframe", "b", "a"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert text.isprintable() or set(re.findall(r"[^ -~\u00a0-\uffff]", text)) == {"\n"}
    assert escape(names[0]) in text
    assert all(label(uid)[:10] in unescape(text) for uid in uids)


@pytest.mark.parametrize("prefix", ["file:", "file://", "file://localhost", "FILE:"])
def test_files_are_written_to_addresses_as_flink_and_hadoop_write_them(
    counts: Path, prefix: str, tmp_path: Path
) -> None:
    address = f"{prefix}{tmp_path}"
    page("report", counts, "--to", f"{address}/a%20report.html")
    page("sql", counts, "select 1 as one", "--to", f"{address}/rows.csv")
    assert {path.name for path in tmp_path.iterdir()} >= {"a report.html", "rows.csv"}
