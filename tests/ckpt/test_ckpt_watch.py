"""``ckpt watch``: following a job by its store. Time is stepped, and runs here are fakes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from stateformat import paths, words
from stateformat.backends.foreign import checkpoint as foreign
from stateformat.backends.storage import MemoryStorage
from stateformat.errors import CheckpointError, StorageError
from stateformat.history import Came, Follower
from stateformat.model import RESCALE_PROPERTY, CheckpointId, Stop, StopMode
from stateformat.publication import CommitPermit
from stateformat.rescaling import WantedParallelism
from stateformat.store import open as open_store
from stateformat.tools.ckpt.commands.running import watch as command
from stateformat.tools.ckpt.output import MakePage
from stateformat.tools.ckpt.text import Look, lines
from tests.ckpt.ckpt_runs import CKPT, SCHEMA, conforms, document, failure, page, run
from tests.worlds import stores

JOB = stores.counts_job()
EVERYTHING = {operator.uid: range(operator.parallelism) for operator in JOB.graph.operators}
GOLDEN = Path(__file__).parents[1] / "golden/v1"
REQUEST = "ab" * 16


class World:
    """A store at a time of its own; publishing takes none."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)
        self.permit: CommitPermit | None = None
        self.now = 1_000.0
        self.waits = 0
        self.script: dict[int, Callable[[], object]] = {}
        self.documents: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.look = Look()
        self.watching = command.Watching(
            self.store.url,
            Follower(self.store.storage),
            self.show,
            wait=self.wait,
            clock=lambda: self.now,
            now_us=self.now_us,
        )

    def now_us(self) -> int:
        return int(self.now * 1e6)

    def show(self, document: dict[str, Any], make: MakePage) -> None:
        self.documents.append(document)
        self.lines += lines(make(document), self.look)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waits += 1
        self.script.get(self.waits, lambda: None)()

    def publish(self, **more: Any) -> None:
        self.permit = JOB.publish(self.store, self.permit, **more)

    @property
    def events(self) -> list[tuple[str, int | None]]:
        return [(one["event"], one.get("checkpoint_id")) for one in self.documents]

    def message(self, event: str) -> str:
        (found,) = [one["message"] for one in self.documents if one["event"] == event]
        return str(found)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    name = f"watched-{uuid4().hex}"
    made = World(f"memory://{name}")
    # Records are made at the time of the world.
    monkeypatch.setattr("stateformat.publication.pending.time.time_ns", lambda: made.now_us() * 1000)
    yield made
    MemoryStorage.reset(name)


def test_it_waits_for_the_first_checkpoint_and_has_a_line_for_each(world: World) -> None:
    world.script = {2: world.publish, 5: world.publish}
    world.watching.run(2.0, count=2)
    assert world.events == [("waiting", None), ("job", None), ("checkpoint", 1), ("checkpoint", 2)]
    assert [line.split() for line in world.lines[-2:]] == [
        ["1", "00:16:44", "20", *world.lines[-2].split()[3:5], "0", "of", "2"],
        ["2", "00:16:50", "6.0", "s", "20", "+0", *world.lines[-1].split()[6:8], "0", "of", "2"],
    ]


def test_a_day_stands_above_its_first_checkpoint(world: World) -> None:
    world.script = dict.fromkeys((1, 2, 3), world.publish)
    world.watching.run(40_000.0, count=3)
    days = [line.strip() for line in world.lines if re.fullmatch(r"  1970-\d\d-\d\d", line)]
    assert days == ["1970-01-01", "1970-01-02"]
    assert world.lines.index("  1970-01-02") == len(world.lines) - 2


def test_changes_since_the_checkpoint_before_stand_in_the_line(world: World) -> None:
    world.publish()
    before = world.store.open().record.totals
    grown = stores.counts_job(keys=1020)
    world.script = {1: lambda: grown.publish(world.store, world.permit)}
    world.watching.run(90.0, count=1)
    after = world.store.open().record.totals
    (_, first, line) = world.documents
    assert (first["rows_change"], first["after_us"]) == (None, None)
    assert line["rows_change"] == after.rows - before.rows == 1000
    assert line["bytes_change"] == after.bytes - before.bytes
    assert line["after_us"] == 90_000_000
    assert "+1,000" in world.lines[-1]
    assert " 90 s " in world.lines[-1]


@pytest.mark.parametrize("mode", list(StopMode))
def test_a_stop_is_the_end_and_a_later_checkpoint_says_that_the_job_goes_on(world: World, mode: StopMode) -> None:
    world.publish()
    world.script = {
        1: lambda: world.publish(stop=Stop(mode, REQUEST)),
        9: world.publish,
    }
    world.watching.run(1.0, until_end=True)
    assert world.events[-2:] == [("checkpoint", 2), ("stopped", 2)]
    world.watching.run(1.0, count=2)
    assert world.events[-2:] == [("goes_on", 3), ("checkpoint", 3)]


def test_a_job_that_has_finished_is_the_end(world: World) -> None:
    world.script = {3: lambda: world.publish(finished=EVERYTHING)}
    world.watching.run(1.0, until_end=True)
    assert world.events[-2:] == [("checkpoint", 1), ("finished", 1)]
    assert world.waits == 3


def test_a_job_that_had_ended_before_is_not_waited_for(world: World) -> None:
    world.publish(stop=Stop(StopMode.DRAIN, REQUEST))
    world.watching.run(1.0, until_end=True)
    assert world.events[-1] == ("stopped", 1)
    assert world.waits == 0


def test_a_stop_for_a_rescale_is_no_end(world: World) -> None:
    wanted = WantedParallelism(4).encode()
    world.publish(stop=Stop(StopMode.NO_DRAIN, REQUEST), properties={RESCALE_PROPERTY: wanted})
    world.script = {1: world.publish, 2: lambda: world.publish(finished=EVERYTHING)}
    world.watching.run(1.0, until_end=True)
    assert [event for event, _ in world.events[1:]] == [
        "checkpoint",
        "rescaling",
        "checkpoint",
        "checkpoint",
        "finished",
    ]
    assert world.message("rescaling") == "the job stops here to go on at parallelism 4"


def test_a_rollback_a_rescale_and_what_they_mean_for_a_run_are_said(world: World) -> None:
    world.publish()
    world.publish()
    world.script = {1: lambda: world.store.rollback(1), 2: lambda: stores.rescale_newest(world.store, 4)}
    world.watching.run(1.0, count=2)
    assert world.events[-4:] == [("checkpoint", 3), ("rolled_back", 3), ("checkpoint", 4), ("replaced", 4)]
    assert "a running job stops at its next checkpoint" in world.message("rolled_back")
    assert world.lines[-2].endswith("0 of 2, rescale")


def test_a_run_that_was_overtaken_is_said(world: World) -> None:
    world.publish()
    world.publish()

    def overtake() -> None:
        world.store.storage.delete([paths.record_path(CheckpointId(2))])
        world.permit = world.store.start("counts")
        world.publish()
        world.publish()

    world.script = {1: overtake}
    world.watching.run(1.0, count=1)
    assert world.events[-2:] == [("overtaken", 2), ("checkpoint", 3)]


def test_what_expired_between_two_looks_is_said(world: World) -> None:
    def many() -> None:
        for _ in range(5):
            world.publish()
        world.store.expire(2)

    world.publish()
    world.script = {1: many}
    world.watching.run(1.0, count=2)
    assert world.events[-3:] == [("passed", 4), ("checkpoint", 5), ("checkpoint", 6)]
    assert world.message("passed") == "checkpoints 2 to 4 have come and gone between two polls"


def test_a_damaged_record_is_said_with_what_to_do(world: World) -> None:
    def damage() -> None:
        world.store.storage.delete([paths.record_path(CheckpointId(2))])
        world.store.storage.create(paths.record_path(CheckpointId(2)), b"{")

    world.publish()
    world.publish()
    damage()
    world.publish()
    world.watching._look(first=True)
    assert world.events == [("job", None), ("checkpoint", 1), ("damaged", 2), ("checkpoint", 3)]
    assert "`ckpt repair memory://" in world.message("damaged")


def test_silence_is_said_after_several_times_the_usual_and_then_ever_more_seldom(world: World) -> None:
    for _ in range(4):
        world.publish()
        world.now += 10
    world.watching._look(first=True)
    for _ in range(60):
        world.wait(10)
        world.watching._look()
    said = [one["message"] for one in world.documents if one["event"] == "silent"]
    # Ten seconds had passed since the last one when the watch began.
    assert [re.findall(r"for (\S+ \w+),", text)[0] for text in said] == ["50 s", "2 min", "3 min", "7 min"]
    assert "they came every 10 s: nothing has changed, or the job does not run" in said[0]
    world.publish()
    world.watching._look()
    world.wait(20)
    world.watching._look()
    assert world.events[-1] == ("checkpoint", 5)


def test_a_job_of_quick_checkpoints_is_not_called_silent_at_once(world: World) -> None:
    for _ in range(4):
        world.publish()
        world.now += 0.1
    world.watching._look(first=True)
    for seconds, silent in ((20.0, False), (10.0, True)):
        world.wait(seconds)
        world.watching._look()
        assert ("silent" in {event for event, _ in world.events}) is silent


def test_a_job_that_has_ended_is_not_called_silent(world: World) -> None:
    world.publish()
    world.now += 10
    world.publish(finished=EVERYTHING)
    world.watching._look(first=True)
    world.wait(10_000)
    world.watching._look()
    assert "silent" not in {event for event, _ in world.events}


def test_a_store_that_fails_for_a_while_is_said_once_and_too_long_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish()
    world.watching._look(first=True)
    whole = Follower.look

    def fails(self: Follower) -> Any:
        raise StorageError("no route")

    for times in (3, command.TRIES - 1):
        monkeypatch.setattr(Follower, "look", fails)
        for _ in range(times):
            world.watching._look()
        monkeypatch.setattr(Follower, "look", whole)
        world.watching._look()
    assert [event for event, _ in world.events[2:]] == ["unreachable", "reachable"] * 2
    monkeypatch.setattr(Follower, "look", fails)
    with pytest.raises(StorageError, match="no route"):
        world.watching.run(1.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.9, "9.9 s"), (42.4, "42 s"), (99, "99 s"), (200, "3 min"), (7200, "2 h"), (500_000, "6 d")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert words.elapsed(seconds) == text


# ---- the command


def test_a_page_is_a_table_that_grows_on_any_width(flights: Path) -> None:
    for columns in ("60", "80", "110"):
        text = page("watch", GOLDEN / "stopped", "--until-end", COLUMNS=columns)
        lines = text.splitlines()
        assert max(map(len, lines)) <= int(columns)
        assert lines[0] == "Watching"
        assert "the job has stopped here" in text.lower().replace("\n    ", " ")
    assert flights.exists()


def test_without_unicode_it_is_ascii() -> None:
    assert run("watch", GOLDEN / "stopped", "--until-end", encoding="ascii").out.isascii()


def test_json_is_an_object_a_line_as_the_schema_says() -> None:
    found = run("watch", GOLDEN / "stopped", "--until-end", "--format", "json")
    documents = [json.loads(line) for line in found.out.splitlines()]
    assert [one["event"] for one in documents][-2:] == ["checkpoint", "stopped"]
    for one in documents:
        conforms("watch", one)
    assert {one["store"] for one in documents} == {open_store(str(GOLDEN / "stopped")).url}


def test_every_event_is_documented() -> None:
    text = Path(command.__file__).read_text()
    named = set(re.findall(r'_event\(\s*"(\w+)"', text))
    assert len(named) >= 12
    assert named == {*SCHEMA["$defs"]["watch-event"]["properties"]["event"]["enum"]}


def test_other_systems_checkpoints_are_refused_and_history_is_named() -> None:
    folder = next(iter(sorted(Path(__file__).parents[1].rglob("_metadata")))).parent
    error = failure("watch", folder, status=2)
    assert "Only stores and Spark queries are followed; `ckpt history" in error["message"]


def test_a_checkpoint_is_not_followed() -> None:
    assert failure("watch", f"{GOLDEN / 'stopped'}@1", status=2)["kind"] == "usage"


def test_ctrl_c_ends_it_with_status_130_and_a_closed_pipe_quietly(tmp_path: Path) -> None:
    started = [str(CKPT), "watch", str(tmp_path / "store"), "--interval", "0.05"]
    with subprocess.Popen(
        started,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as program:
        assert program.stdout is not None
        assert "Waiting for the first checkpoint" in program.stdout.readline()
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=60)
    assert (program.returncode, err.strip()) == (130, "ckpt: interrupted; nothing was changed")
    store = stores.counts_store(str(tmp_path / "store"))
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.stdout.close()
        JOB.publish(store, store.start("counts"))
        assert program.stderr is not None
        assert program.stderr.read() == ""
    assert program.returncode == 141


# ---- a Spark query


QUERY = Path(__file__).parents[1] / "foreign/fixtures/spark-4.3.0/window/checkpoint"


def test_a_spark_query_is_followed_batch_by_batch(tmp_path: Path) -> None:
    query, later = shutil.copytree(QUERY, tmp_path / "query"), tmp_path / "later"
    shutil.copytree(query / "commits", later)
    for batch in (7, 8, 9):
        (query / f"commits/{batch}").unlink()
    waits: list[float] = []
    shown: list[dict[str, Any]] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        for batch in {2: (7,), 4: (8, 9)}.get(len(waits), ()):
            shutil.copy(later / str(batch), query / f"commits/{batch}")

    store = open_store(str(query))
    follower = command.QueryFollower(store)
    watching = command.Watching(store.url, follower, lambda found, _: shown.append(found), wait=wait)
    watching.run(1.0, 3)
    batches = [one for one in shown if one["event"] == "checkpoint"]
    assert [one["checkpoint_id"] for one in batches] == [5, 6, 7, 8, 9, 10]
    assert len(waits) == 4
    rows = [document("top", f"{query}@{number}")["states"][0]["rows"] for number in range(5, 11)]
    assert [one["totals"]["rows"] for one in batches] == rows
    assert [one["rows_change"] for one in batches] == [None, *(now - past for past, now in pairwise(rows))]
    for one in shown:
        conforms("watch", one)
    (query / "commits/9").unlink()
    shutil.copy(later / "9", query / "commits/11")
    with pytest.raises(CheckpointError):
        follower.look()


def test_rows_of_a_batch_with_much_state_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "COUNTED_BYTES", 0)
    seen = command.QueryFollower(open_store(str(QUERY))).look()
    assert [one.record.totals.rows for one in seen if isinstance(one, Came)] == [None] * 3
    assert command._change(seen[1].record, seen[0].record, "rows") is None  # type: ignore[union-attr]


def test_the_command_follows_a_spark_query_and_no_flink_savepoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.Watching, "run", lambda self, *_, **__: self._look(first=True))
    shown = page("watch", QUERY)
    assert re.search(r"^ +10  11:00:59 .* 1\.5 KiB  0 of 1$", shown, re.MULTILINE)
    told = failure("watch", QUERY.parents[2] / "flink-2.3.0/core-hashmap-canonical/savepoint", status=2)
    assert "Only stores and Spark queries are followed" in told["message"]
