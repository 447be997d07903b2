"""What ``ckpt inspect`` says of the states that a runtime keeps: timers, watermarks, committables,
records in flight."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.graph import JobGraph
from stateformat.inspecting import contents as contents_of
from stateformat.model import Stop, StopMode
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import open as open_store
from stateformat.tools.ckpt.text import Look
from stateformat.tools.ckpt.text.contents import LINES, contents_facts, contents_table, holds_line
from stateformat.words import precise_moment
from tests import stores
from tests.ckpt.ckpt_runs import document, page, state_of

END = 2**63 - 1


def contents(store: Path, operator: str, state: str) -> Any:
    """As the command has it."""
    checkpoint = open_store(str(store)).open()
    declared = checkpoint.record.state(operator, state)
    return contents_of(checkpoint, declared, checkpoint.read(operator, state).table().num_rows)


def lines(store: object, operator: str, state: str) -> str:
    return " ".join(page("inspect", store, "--operator", operator, "--state", state).split())


def test_the_first_page_counts_what_a_run_uses_up_and_opens_no_segment(flights: Path) -> None:
    found = document("inspect", flights)
    assert not any("contents" in state for state in found["states"])
    assert document("inspect", flights, "--state", "names")["holds"] == found["holds"], "whatever is selected"


def test_a_checkpoint_without_any_of_it_says_nothing(counts: Path) -> None:
    assert document("inspect", counts)["holds"] == {"timers": 0, "in_flight": [], "committables": 0}
    assert "holds" not in page("inspect", counts)
    assert state_of(counts, "counter", "counts")["contents"] is None


def test_the_command_tells_of_each_state_that_was_chosen(flights: Path) -> None:
    found = document("inspect", flights, "--operator", "delays")["states"]
    assert {state["name"] for state in found if state["contents"]} == {"wake", "progress", "overtaken"}
    for state in found:
        assert state["contents"] == contents(flights, "delays", state["name"])
    assert contents(flights, "flights", "unassigned") is None, "a coordinator of another runtime means nothing to us"


def test_timers_that_a_layer_has_deleted_are_not_due(tmp_path: Path) -> None:
    state = declare.timers("counter", "wake", keys={"word": pa.string()})
    job = stores.counts_job(parallelism=1)
    word, empty = ["a", "b", "c"], {"word": pa.array([], pa.string()), "_timestamp": pa.array([], pa.int64())}
    rows: dict[tuple[str, str], Any] = {
        ("counter", "wake"): lambda _: pa.table({"word": word, "_timestamp": [1, 2, 3_500_000], "_tag": [""] * 3})
    }
    gone = {"word": ["a"], "_timestamp": [1], "_tag": [""], "_op": pa.array([1], pa.int8())}
    job = stores.Job(job.job_id, job.graph, (state,), rows)
    store = open_store(str(tmp_path))
    job.publish(store, job.publish(store, None), deltas={("counter", "wake"): lambda _: pa.table(gone)})
    found = contents(tmp_path, "counter", "wake")
    assert (found["timers"], found["first_us"], found["last_at"]) == (2, 2, "1970-01-01T00:00:03.500000Z")
    assert document("inspect", tmp_path)["holds"]["timers"] == 4, "the manifest counts the rows of all layers"
    rows["counter", "wake"] = lambda _: pa.table({**empty, "_tag": pa.array([], pa.string())})
    job.publish(store, store.start(job.job_id))
    none = dict.fromkeys(("first_at", "first_us", "last_at", "last_us"))
    assert contents(tmp_path, "counter", "wake") == {"timers": 0, **none}
    assert "due" not in lines(tmp_path, "counter", "wake")


def test_an_input_has_ended_only_where_all_subtasks_say_so(tmp_path: Path) -> None:
    job = stores.counts_job(parallelism=2)
    state = declare.progress_state("counter")
    ended = {0: True, 1: False}

    def rows(subtask: int) -> pa.Table:
        return pa.table({"_edge": ["lines-counter"], "_watermark": [END - subtask], "_ended": [ended[subtask]]})

    stores.Job(job.job_id, job.graph, (state,), {("counter", "progress"): rows}).publish(
        open_store(str(tmp_path)), None
    )
    (found,) = contents(tmp_path, "counter", "progress")["inputs"]
    assert (found["watermark_at"], found["watermark_us"], found["ended"]) == (f"{END - 1} us", END - 1, False)


def test_committables_come_with_what_they_were_prepared_under(tmp_path: Path) -> None:
    sink = stores.operator("sink", 2)
    state = declare.committables_state("sink", "prepared", columns={"file": pa.string()})
    rows = {("sink", "prepared"): lambda subtask: pa.table({"file": [f"{subtask}-{i}" for i in range(subtask + 1)]})}
    job = stores.Job("sinks", JobGraph((sink,)), (state,), rows)
    store = open_store(str(tmp_path))
    first = job.publish(store, None)
    pending = store.begin(job_id="sinks", graph=job.graph, states=job.states, parent=first)
    carried = first.checkpoint().read("sink", "prepared").table()
    for subtask in range(2):
        with pending.context.subtask("sink", subtask) as writer:
            writer.write("prepared", carried if subtask else pa.table({"file": ["new"]}))
        pending.add(writer)
    second = pending.publish()
    assert contents(tmp_path, "sink", "prepared") == {
        "prepared": [
            {"checkpoint_id": 1, "attempt_id": first.ref.attempt_id, "rows": 3},
            {"checkpoint_id": 2, "attempt_id": second.ref.attempt_id, "rows": 1},
        ]
    }
    text = lines(tmp_path, "sink", "prepared")
    assert f"prepared 3 committables under checkpoint 1, attempt {first.ref.attempt_id}" in text
    assert f"1 committable under checkpoint 2, attempt {second.ref.attempt_id}" in text


def test_messages_on_the_way_to_a_coordinator_are_counted(tmp_path: Path) -> None:
    source = stores.operator("source", 1, coordinator=True)
    columns = {"path": pa.string(), "message_from": pa.int32(), "message": pa.binary()}
    state = declare.coordinator_state("source", "splits", columns=columns)
    table = pa.table({"path": ["a", None, None], "message_from": [None, 0, 0], "message": [None, b"x", b""]})
    rows = {("source", "splits"): lambda _: table.cast(pa.schema(list(columns.items())))}
    stores.Job("source", JobGraph((source,)), (state,), rows).publish(open_store(str(tmp_path)), None)
    assert contents(tmp_path, "source", "splits") == {"messages": 2}
    assert "messages 2 messages on the way to the coordinator" in lines(tmp_path, "source", "splits")


def test_what_cannot_be_read_spoils_no_page(tmp_path: Path) -> None:
    stores.flights_job().publish(open_store(str(tmp_path)), None, options=WriteOptions(inline_bytes_max=0))
    for segment in (tmp_path / "segments").rglob("*delays*wake*.parquet"):
        segment.unlink()
    checkpoint = open_store(str(tmp_path)).open()
    found: Any = contents_of(checkpoint, checkpoint.record.state("delays", "wake"), 60)
    assert set(found) == {"unread"}
    assert "is missing from" in found["unread"]
    assert "contents not read: segments/" in lines(tmp_path, "delays", "wake")
    assert contents(tmp_path, "alerts", "overtaken")["channels"] == 4


def test_very_many_rows_are_not_read(flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("stateformat.inspecting.own_states"), "ROWS_MAX", 59)
    checkpoint = open_store(str(flights)).open()
    found = contents_of(checkpoint, checkpoint.record.state("delays", "wake"), 60)
    assert found == {"unread": "60 rows are too many to read here; `ckpt export` writes them to a file"}
    assert contents_of(checkpoint, checkpoint.record.state("delays", "wake"), 59) != found


def test_a_stop_stands_on_the_page(tmp_path: Path) -> None:
    stop = Stop(StopMode.DRAIN, "ab" * 16)
    stores.counts_job().publish(open_store(str(tmp_path)), None, stop=stop, finishing={"lines": [0, 1]})
    text = " ".join(page("inspect", tmp_path).split())
    assert f"stopped (drain), request {stop.request}" in text
    assert "finishing: 0-1" in text


def test_who_wrote_it_stands_on_the_page_and_in_json(tmp_path: Path) -> None:
    said = {
        "stateformat.program": "flights.py:flights",
        "stateformat.code": f"{'0f6e3a91c2d4' * 4:.40}-dirty",
        "stateformat.spark_application": "local-17",
        "stateformat.host": "h\x1b[1m",
        "stateformat.user": "me",
    }
    stores.counts_job().publish(open_store(str(tmp_path)), None, properties={**said, "mine": "1"})
    text = " ".join(page("inspect", tmp_path).split())
    origin = (
        "written by flights.py:flights · version 0f6e3a91c2d4-dirty · Spark application local-17 · on h\\x1b[1m · as me"
    )
    assert origin in text
    assert "stateformat.program" not in text
    assert "properties mine = 1" in text
    written = {name.removeprefix("stateformat."): value for name, value in said.items()}
    assert document("inspect", tmp_path)["written_by"] == written
    assert [entry["written_by"] for entry in document("history", tmp_path)["checkpoints"]] == [written]


# ---- pieces


def drawn(contents: Any, look: Look = Look()) -> Sequence[str]:  # noqa: B008 - frozen
    return [*(" ".join(pair) for pair in contents_facts(contents, look)), *contents_table(contents, look)]


def test_long_lists_are_cut_and_say_so() -> None:
    prepared = [{"checkpoint_id": i, "attempt_id": "a" * 32, "rows": 1} for i in range(LINES + 3)]
    assert len(drawn({"prepared": prepared})) == LINES + 1
    assert "and 3 more (--format json" in drawn({"prepared": prepared})[-1]
    inputs = [
        {"edge": f"{i}" * 99, "watermark_at": "none", "watermark_us": None, "ended": True} for i in range(LINES + 1)
    ]
    found = drawn({"inputs": inputs})
    assert len(found) == LINES + 3
    assert max(map(len, found)) <= 80
    assert "and 1 more" in found[-1]


def test_strangers_texts_break_no_line() -> None:
    inputs = [{"edge": "a\nb", "watermark_at": "end", "watermark_us": None, "ended": True}]
    assert drawn({"inputs": inputs})[-1].split("  ")[3] == "a\\nb"
    assert drawn({"unread": "a\x1b[2Jb"}) == ["contents not read: a\\x1b[2Jb"]


def test_one_of_each_is_in_the_singular() -> None:
    holds = {"timers": 1, "committables": 1, "in_flight": [{"rows": 1}, {"rows": 0}]}
    assert holds_line(holds, Look(unicode=False)) == "1 timer . 1 record in flight on 1 edge . 1 committable"
    times = {"timers": 1, "first_at": "2013-01-01T00:00:00Z", "last_at": "2013-01-01T00:00:00Z"}
    assert drawn(times) == ["due 2013-01-01 00:00:00, 1 timer"]


@pytest.mark.parametrize(
    ("event_time_us", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (-1, "1969-12-31T23:59:59.999999Z"),
        (1_356_998_400_000_000, "2013-01-01T00:00:00Z"),
        (2**62, f"{2**62} us"),
        (-(2**62), f"{-(2**62)} us"),
    ],
)
def test_event_times_are_exact_and_may_lie_beyond_the_calendar(event_time_us: int, text: str) -> None:
    assert precise_moment(event_time_us) == text
