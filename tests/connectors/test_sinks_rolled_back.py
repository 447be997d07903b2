"""Clean-up keeps what any checkpoint that can be started from still carries (R9b and R9c)."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat import paths as layout
from stateformat.backends.connectors import FileSink, SqlSink
from stateformat.backends.dataflow import Dataflow, Prepared, TwoPhaseCommitSink
from stateformat.backends.dataflow.chained_operator import OperatorError
from stateformat.backends.local import RunDiscarded
from stateformat.backends.runtime.commits import check_places
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import DamagedCheckpoint, InvalidInput
from stateformat.history import Wanted, carried_committables
from stateformat.model import CheckpointId
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from tests.connectors.sink_s3 import Inside, Outside
from tests.forgery import Forger, put
from tests.worlds.local import Bench, Tap, rows, to_end, until


class Renaming(TwoPhaseCommitSink):
    """A sink with :meth:`clean` alone. A commit renames; where nothing lies it has been done."""

    committable_columns = pa.schema([("name", pa.string())])

    def __init__(self) -> None:
        self.prepared: dict[str, list[int]] = {}
        self.seen: dict[str, list[int]] = {}

    def open(self, context: Any) -> None:
        super().open(context)
        self.values: list[int] = []

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.values += batch["value"].to_pylist()

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:
        values, self.values = self.values, []
        name = f"{prepared.checkpoint_id}-{prepared.attempt_id}"
        self.prepared[name] = values
        return pa.table({"name": [name]}) if values else None

    def commit(self, permit: Any, committables: pa.Table) -> None:
        for name in committables["name"].to_pylist():
            if name in self.prepared:
                self.seen[name] = self.prepared.pop(name)

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None) -> None:
        kept = carried["name"].to_pylist() if carried is not None else []
        for name in [name for name in self.prepared if int(name.partition("-")[0]) <= newest_id and name not in kept]:
            del self.prepared[name]


def broken(*_: Any) -> Any:
    """A commit that does nothing, for the sinks are down."""
    raise ConnectionError("down")


class World:
    """A job with sinks of three kinds, which are down when they are told to be."""

    def __init__(self, place: Path, output: Inside | Outside) -> None:
        self.bench = Bench(checkpoint_interval_us=10**12)
        self.tap = Tap([rows(n) for n in range(10)], shut=True)
        self.place = place
        self.output, self.files = output, output.sink(durable=False)
        self.table = SqlSink(f"sqlite:///{place}/data.db", "t", staging=place / "staging", durable=False)
        self.renaming = Renaming()
        self.flow = self.flow_into(self.files, self.table, self.renaming)

    def flow_into(self, files: FileSink, table: SqlSink, renaming: Renaming) -> Dataflow:
        flow = Dataflow("job")
        stream = flow.source(self.tap, uid="in")
        for uid, sink in (("files", files), ("table", table), ("renaming", renaming)):
            stream.apply(sink, uid=uid)
        return flow

    def publish(self, chunks: int, *, down: bool = False) -> None:
        """Begin a run, read up to so many chunks, publish, and die; ``down``: before any commit."""
        run = self.bench.begin(self.flow)
        self.tap.let(0, chunks)
        begun = self.bench.newest_id
        for _ in range(80):
            run.step()
        with pytest.MonkeyPatch.context() as patch:
            if down:
                for sink in (FileSink, SqlSink, Renaming):
                    patch.setattr(sink, "commit", broken)
                with pytest.raises(RunDiscarded):
                    self.bench.checkpoint(run)
            else:
                self.bench.checkpoint(run)
        assert self.bench.newest_id == begun + 1

    def restart(self) -> None:
        """Begin a run, which commits and cleans up, and let it die."""
        self.bench.begin(self.flow)

    def seen(self) -> list[list[int]]:
        """What each sink shows."""
        connection = sqlite3.connect(self.place / "data.db")
        table = [n for (n,) in connection.execute("SELECT value FROM t ORDER BY value")]
        connection.close()
        return [self.output.seen("value"), table, sorted(n for values in self.renaming.seen.values() for n in values)]


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    local = request.param == "local"
    return World(tmp_path, Inside(tmp_path / "out") if local else Outside(request.getfixturevalue("moto")))


def test_two_rollbacks_lose_no_output(world: World) -> None:
    world.publish(2)
    assert world.seen() == [[0, 1]] * 3
    world.publish(4, down=True)
    store = world.bench.store
    store.rollback(1)
    world.restart()
    assert world.seen() == [[0, 1]] * 3
    store.rollback(2)
    world.restart()
    assert world.seen() == [[0, 1, 2, 3]] * 3


def test_what_a_rollback_under_way_carries_is_kept_though_its_source_has_expired(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(2)
    world.publish(4, down=True)
    store, inner = world.bench.store, world.bench.storage.inner
    store.rollback(1)
    create, done = inner.create, []

    def slow(path: str, data: bytes) -> Any:
        if path == layout.record_path(CheckpointId(4)) and not done:
            done.append(path)
            store.expire(keep=1)
            world.restart()
        return create(path, data)

    monkeypatch.setattr(inner, "create", slow)
    store.rollback(2)
    assert done
    world.restart()
    assert world.seen() == [[0, 1, 2, 3]] * 3


def test_what_no_checkpoint_carries_goes(world: World) -> None:
    world.publish(2)
    world.publish(4, down=True)
    store = world.bench.store
    store.rollback(1)
    store.expire(keep=1)
    world.restart()
    assert not world.renaming.prepared
    assert world.files.prepared_attempts("files") == world.table.prepared_attempts("table") == set()
    assert world.seen() == [[0, 1]] * 3


def break_record(world: World) -> None:
    put(world.bench.storage.inner, layout.record_path(CheckpointId(2)), b"{\n")


def break_manifest(world: World) -> None:
    record = world.bench.store.open(2).record
    put(world.bench.storage.inner, record.manifest.path, b"PAR1")


def forge(world: World) -> None:
    forger = Forger(world.bench.storage.inner, 2)
    at = forger.find("files", "committables")
    forged = forger.table_of(at)
    index = forged.schema.get_field_index("path")
    forged = forged.set_column(index, forged.schema.field(index), pa.array(["../victim"]))
    forger.set_rows(at, forged)
    forger.seal()


@pytest.mark.parametrize("damage", [break_record, break_manifest, forge], ids=["record", "manifest", "forged"])
def test_where_an_older_checkpoint_cannot_be_read_nothing_prepared_is_removed_and_that_is_told(
    tmp_path: Path, damage: Callable[[World], None], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, Inside(tmp_path / "out"))
    world.publish(2)
    world.publish(4, down=True)
    world.bench.store.rollback(1)
    damage(world)
    with caplog.at_level(logging.WARNING):
        world.restart()
    (told,) = [record.message for record in caplog.records if "keep what earlier runs prepared" in record.message]
    assert told.startswith("sinks 'files', 'table', 'renaming' keep what earlier runs prepared")
    assert [each.checkpoint_id for each in world.files.prepared_attempts("files")] == [2]
    assert [each.checkpoint_id for each in world.table.prepared_attempts("table")] == [2]
    assert [name.partition("-")[0] for name in world.renaming.prepared] == ["2"]


def test_a_start_reads_other_checkpoints_only_where_something_is_left(tmp_path: Path) -> None:
    """By default nothing is: then only the newest is read, however many are kept."""
    bench, asked = Bench(checkpoint_interval_us=10**12), []

    class Reading(FileSink):
        def clean(self, uid: str, newest_id: int, carried: pa.Table | None = None) -> list[str]:
            asked.append(newest_id)
            return super().clean(uid, newest_id, carried)

    tap = Tap([rows(n) for n in range(10)], shut=True)
    flow = Dataflow("job")
    flow.source(tap, uid="in").apply(Reading(tmp_path / "out", durable=False), uid="files")
    run = bench.begin(flow)
    for chunks in range(1, 5):
        tap.let(0, chunks)
        for _ in range(60):
            run.step()
        bench.checkpoint(run)
    put(bench.storage.inner, layout.record_path(CheckpointId(2)), b"{\n")
    bench.begin(flow)
    assert asked == [0, 4]
    # And only down to the least id that is left.
    schema = bench.newest.state("files", "committables").current
    assert carried_committables(bench.store.storage, "committables", {"files": Wanted(3, schema)})["files"]
    with pytest.raises(DamagedCheckpoint):
        carried_committables(bench.store.storage, "committables", {"files": Wanted(2, schema)})


def test_a_sink_that_fails_to_tell_what_it_has_prepared_is_named(tmp_path: Path) -> None:
    class Wrong(FileSink):
        def prepared_attempts(self, uid: str) -> set[Prepared]:
            raise KeyError(uid)

    bench, tap = Bench(checkpoint_interval_us=10**12), Tap([rows(1)], shut=True)
    flow = Dataflow("job")
    flow.source(tap, uid="in").apply(Wrong(tmp_path / "out", durable=False), uid="files")
    run = bench.begin(flow)
    until(run, lambda: run.in_flight is None)
    bench.checkpoint(run)
    with pytest.raises(OperatorError, match="prepared_attempts of 'files' failed: KeyError"):
        bench.begin(flow)


# Two jobs in one place


def test_a_place_where_another_job_is_ahead_of_the_savepoint_is_refused(world: World) -> None:
    world.publish(2)
    store = world.bench.store
    savepoint = store.open().record
    sinks = {"files": world.files, "table": world.table, "renaming": world.renaming}
    # The old job has ended: nothing that it left is beyond the savepoint.
    check_places(sinks, savepoint, store.url)
    world.publish(4, down=True)
    attempt = store.open().record.attempt_id
    for uid in ("files", "table"):
        with pytest.raises(
            InvalidInput, match=rf"place of sink '{uid}' holds output .* checkpoint 2 \(attempt {attempt}\)"
        ):
            check_places({uid: sinks[uid]}, savepoint, store.url)
    # A savepoint of what the old job has published last is not behind anything.
    check_places(sinks, store.open().record, store.url)
    # Who cannot tell is not asked for more.
    check_places({"renaming": world.renaming}, savepoint, store.url)


def test_a_job_that_starts_again_or_is_rolled_back_finds_its_own_output_and_goes_on(world: World) -> None:
    world.publish(2)
    run = world.bench.begin(world.flow)
    world.tap.let(0, 4)
    for _ in range(80):
        run.step()
    with pytest.MonkeyPatch.context() as patch:
        # The attempt prepares, and dies before its record.
        patch.setattr(world.bench.storage.inner, "create", broken)
        with pytest.raises(RunDiscarded):
            world.bench.checkpoint(run)
    assert [each.checkpoint_id for each in world.files.prepared_attempts("files")] == [2]
    world.publish(4)
    assert world.seen() == [[0, 1, 2, 3]] * 3


def test_a_second_job_from_one_savepoint_is_refused_where_it_shares_a_place_and_goes_on_in_one_of_its_own(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Inside(tmp_path / "out"))
    world.publish(2)
    store = world.bench.store
    MemoryStorage.reset("second")
    second = CheckpointStore(open_storage("memory://second"), sleep=lambda seconds: None)
    runtime = world.bench.runtime(start_from=f"{store.url}@1")
    runtime.store = second
    # The old job goes on: it has prepared its second checkpoint and not committed it.
    world.publish(4, down=True)
    before = sorted((tmp_path / "out").rglob("*"))
    with pytest.raises(InvalidInput, match="Two jobs must not share a place"):
        runtime.begin(world.flow)
    assert sorted((tmp_path / "out").rglob("*")) == before
    assert second.storage.list("") == []
    # In places of its own it begins, prepares, dies before its first record, and begins again.
    place = Inside(tmp_path / "other")
    other = place.sink(durable=False)
    flow = world.flow_into(other, SqlSink(f"sqlite:///{tmp_path}/other.db", "t", durable=False), Renaming())
    with pytest.raises(
        OperatorError,
        match=r"its 2 rows are lost.* If the sink has moved.* drop='UID/committables', with the uid of this sink",
    ):
        runtime.begin(flow)
    runtime.options = replace(runtime.options, drop=("files/committables", "table/committables"))
    run = runtime.begin(flow)
    for _ in range(80):
        run.step()
    world.bench.clock.wait_until(world.bench.clock.now_us() + 10**13)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second.storage, "create", broken)
        with pytest.raises(RunDiscarded):
            until(run, lambda: False)
    assert [each.checkpoint_id for each in other.prepared_attempts("files")] == [3]
    run = runtime.begin(flow)
    world.tap.let(0)
    to_end(run)
    # The old job has 0 and 1, and goes on with the others too.
    assert place.seen("value") == [*range(2, 10)]
