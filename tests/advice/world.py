"""The stores, folders and files that advice is tried on, and a case of it."""

from __future__ import annotations

import functools
import json
import re
import runpy
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRun, LocalRuntime, VirtualClock
from stateformat.graph import JobGraph, OperatorId
from stateformat.manifest import manifest_ref
from stateformat.model import MAX_CHECKPOINT_ID, StopMode
from stateformat.record import members_of
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.advice.following import WIDE, complaints, copied, refusal_of, said
from tests.ckpt.ckpt_runs import run
from tests.forgery import Forger, seal
from tests.worlds import stores

FIXTURES = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"
ENVIRONMENT = {"COLUMNS": WIDE, "SHELL": "/bin/another"}
FUNCTIONS = """
import pyarrow as pa
import pyarrow.compute as pc

def same(rows):
    return rows

def moved(rows):
    return rows.set_column(rows.column_names.index("word"), "word", pc.utf8_upper(rows["word"]))

def numbered(rows):
    return rows.set_column(rows.column_names.index("word"), "word", pc.utf8_length(rows["word"]).cast("int64"))

def dated(rows):
    return rows.set_column(rows.column_names.index("key"), "key", rows["key"].cast("int32").cast("date32"))

def called(rows):
    return rows.rename_columns(["text" if name == "word" else name for name in rows.column_names])
"""
FLOW = """
from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.dataflow import Dataflow, Operator

def flow():
    flow = Dataflow("counts", parallelism=2)
    flow.source(RateSource(total=10, shards=2), uid="lines").apply(CollectSink(), uid="counter")
    return flow

def long():
    flow = Dataflow("counts", parallelism=2)
    flow.source(RateSource(total=20_000, shards=2), uid="lines").apply(CollectSink(), uid="counter")
    return flow

class Odd(Operator):
    def states(self, *inputs):
        raise ValueError("no states")

    def process(self, batch, input):
        return None

def raises():
    flow = Dataflow("counts", parallelism=2)
    flow.source(RateSource(total=10, shards=2), uid="lines").key_by("n").apply(Odd(), uid="counter")
    return flow
"""
SINKS = """
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow

def flow(place="first"):
    flow = Dataflow("written", parallelism=2)
    flow.source(RateSource(total=2000, shards=4), uid="lines").apply(FileSink("OUT/" + place, durable=False), uid="out")
    return flow

def moved():
    return flow("second")
"""


class Case(NamedTuple):
    """A complaint, by a piece of its sentence, and what to do about it."""

    says: str
    call: str
    """What the last of these calls says. Calls are parted by `` ; ``."""
    then: str
    why: str = ""
    """What the last call may be refused for, which is another matter."""
    shows: str = ""
    """A pattern of what was left out: the last call prints it, and the first does not."""
    traces: bool = False
    """Whether the first call shows where a function of the job has failed."""


CORPUS = FIXTURES.parents[1] / "corpus"
BROKEN = {
    "gone": "2.3-segment-missing",
    "twice": "3.2-state-twice",
    "totals": "3.2-totals-differ",
    "union": "4.6-union-partly-finished",
    "nobody": "3.6-state-of-nobody",
    "unknown": "4.1-unknown-state",
    "shared": "4.3-key-group-in-two-handles",
    "stray": "8.1-stray",
    "misplaced": "5.3-key-group-is-another-keys",
}
"""Stores of the corpus."""

OFTEN = {"five", "flights", "keyed_kept", "ran", "stopped"}
"""Stores of many cases: made once, and copied."""


class World:
    """What the calls name, made when one does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0
        self._there: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name == "made":
            return str(self.folder / f"new-{self.made}")
        if name == "new":
            self.made += 1
            return str(self.folder / f"new-{self.made}")
        if name not in self._there:
            path = self.folder / name
            if name in BROKEN:
                made = copied(CORPUS / "broken" / BROKEN[name], path)
            elif name in OFTEN and self.folder.name != "often":
                made = copied(Path(often(self.folder.parent / "often", name)), path)
            else:
                made = getattr(self, name)(path)
            self._there[name] = str(made)
        return self._there[name]

    def five(self, path: Path) -> Path:
        store, job = stores.counts_store(str(path), keys=300), stores.counts_job(keys=300)
        for _ in range(4):
            job.publish(store, store.start(job.job_id), options=WriteOptions(inline_bytes_max=0))
        return path

    def pinned(self, path: Path) -> Path:
        open_store(str(self.five(path))).pin(None, "kept")
        return path

    def lost(self, path: Path) -> Path:
        copied(Path(self["five"]), path)
        sorted(path.glob("segments/*5/*"))[0].unlink()
        return path

    def gap(self, path: Path) -> Path:
        copied(Path(self["five"]), path)
        (path / "checkpoints" / f"{3:020}.json").unlink()
        return path

    def cut(self, path: Path) -> Path:
        copied(Path(self["five"]), path)
        record = path / "checkpoints" / f"{5:020}.json"
        record.write_bytes(record.read_bytes()[:100])
        return path

    def unlisted(self, path: Path) -> Path:
        copied(Path(self["five"]), path)
        sorted(path.glob("manifests/*"))[-1].unlink()
        return path

    def spoiled(self, path: Path) -> Path:
        self.pinned(path)
        for record in path.glob("savepoints/*/checkpoints/*"):
            record.write_bytes(b"{")
        return path

    def other(self, path: Path) -> Path:
        return Path(stores.counts_store(str(path)).url.removeprefix("file://"))

    def flights(self, path: Path) -> Path:
        stores.flights_store(str(path))
        return path

    def ran(self, path: Path) -> Path:
        found = run("run", f"{self['flow']}:flow", path, "--rows-per-epoch", "2")
        assert found.status == 0, found
        return path

    def saved(self, path: Path) -> Path:
        found = run("copy", self["ran"] + "@1", path)
        assert found.status == 0, found
        return path

    def kept(self, path: Path) -> Path:
        self.pinned(path)
        sorted(path.glob("segments/*5/*"))[0].unlink()
        return path

    def avro(self, path: Path) -> Path:
        return FIXTURES / "spark-4.3.0/transform-rocksdb-avro/checkpoint"

    def stopped(self, path: Path) -> Path:
        """A job that keeps all checkpoints has stopped."""
        store, asked = open_store(str(path)), False
        run = self._begun(store, runpy.run_path(self["flow"])["long"](), keep=None)
        while run.step():
            if not asked and (run.progress().checkpoint_id or 0) > 11:
                asked = bool(store.request_stop(StopMode.NO_DRAIN))
        return path

    def stopped_too(self, path: Path) -> Path:
        return copied(Path(self["stopped"]), path)

    def crashed(self, path: Path) -> Path:
        """A job that writes files has died after two checkpoints."""
        run = self._begun(open_store(str(path)), runpy.run_path(self["sinks"])["flow"]())
        while run.step() and run.progress().checkpoint_id != 2:
            pass
        run.close()
        return path

    def emptied(self, path: Path) -> Path:
        """What the job had prepared for its newest checkpoint is gone."""
        copied(Path(self["crashed"]), path)
        for file in [*(self.folder / "out").rglob(f"*{2:020}-*.p*")]:
            file.unlink()
        return path

    def _begun(self, store: CheckpointStore, flow: Dataflow, **options: Any) -> LocalRun:
        how = {"clock": VirtualClock(), "checkpoint_rows": 500, "requests_every_us": 1, **options}
        run = LocalRuntime(store, **how).begin(flow)
        assert isinstance(run, LocalRun)
        return run

    def sinks(self, path: Path) -> Path:
        path = path.with_name(f"sinks_{self.folder.name}.py")
        path.write_text(SINKS.replace("OUT", str(self.folder / "out")))
        return path

    def forged(self, path: Path) -> Path:
        """What is to be committed is no file of the sink's."""
        return self._with_committables(copied(Path(self["crashed"]), path), 2, "out", "path", "../mine")

    def unreadable(self, path: Path) -> Path:
        """What is to be committed has no rows."""
        copied(Path(self["stopped"]), path)
        newest = open_store(str(path)).open().id
        return self._with_committables(path, newest, "counter", "payload", b"none")

    def _with_committables(self, store: Path, checkpoint_id: int, uid: str, column: str, value: Any) -> Path:
        forger = Forger(open_store(str(store)).storage, checkpoint_id)
        held = [(handle.operator, handle.state, bool(handle.rows)) for handle in forger.handles]
        at = held.index((uid, "committables", True))
        rows = forger.table_of(at)
        number = rows.schema.get_field_index(column)
        values = pa.array([value] * len(rows), rows.schema.field(number).type)
        forger.set_rows(at, rows.set_column(number, rows.schema.field(number), values))
        forger.seal()
        return store

    def greatest(self, path: Path) -> Path:
        copied(Path(self["five"]), path)
        (path / "checkpoints" / f"{MAX_CHECKPOINT_ID:020}.json").write_bytes(b"{")
        return path

    def garbled(self, path: Path) -> Path:
        """The column of a manifest that has the inline segments cannot be read."""
        forger = Forger(stores.counts_store(str(path)).storage, 1)
        name = forger.record.manifest.path
        data = bytearray((path / name).read_bytes())
        columns = pq.read_metadata(pa.BufferReader(bytes(data))).row_group(0)
        data[columns.column(columns.num_columns - 1).data_page_offset + 40] ^= 1
        (path / name).write_bytes(data)
        record = replace(forger.record, manifest=manifest_ref(name, pa.py_buffer(bytes(data))))
        (path / forger.path).write_bytes(seal({"format": "stateformat", "version": 1, **members_of(record)}))
        return path

    def no_text(self, path: Path) -> Path:
        """Bytes that are no UTF-8 in a column of text."""
        forger = Forger(stores.flights_store(str(path)).storage, 2)
        at = forger.find("airlines", "names", 1)
        rows = forger.table_of(at)
        name = rows.schema.get_field_index("name")
        forger.set_rows(at, rows.set_column(name, "name", pa.array([b"\xff\xfe"] * len(rows)).view(pa.string())))
        forger.seal()
        return path

    def hopeless(self, path: Path) -> Path:
        """The newest is damaged, and so is what it came from; one that stands alone is whole."""
        copied(Path(self["five"]), path)
        for number in (2, 4, 5):
            (path / "checkpoints" / f"{number:020}.json").write_bytes(b"{")
        return path

    def alone(self, path: Path) -> Path:
        """Nobody names the checkpoint below the damaged one, and the one that it names is gone."""
        copied(Path(self["five"]), path)
        (path / "checkpoints" / f"{5:020}.json").write_bytes(b"{")
        (path / "checkpoints" / f"{3:020}.json").unlink()
        return path

    def bare(self, path: Path) -> Path:
        """A query of Spark without the files of a partition."""
        copied(Path(self["spark"]), path)
        for file in (path / "state/0/0").glob("*.*"):
            file.unlink()
        return path

    def old(self, path: Path) -> Path:
        """A query that Spark 3.2 began."""
        copied(Path(self["spark"]), path)
        for log in (path / "offsets").glob("[0-9]*"):
            text = log.read_text()
            log.write_text(text.replace('useStrictDistribution":"true"', 'useStrictDistribution":"false"'))
        for check in (path / "offsets").glob(".*.crc"):
            check.unlink()
        return path

    def two_names(self, path: Path) -> Path:
        """What may be a state of either of two operators."""
        operators = [stores.operator(uid, 1) for uid in ("a", "a/b")]
        states = [
            declare.even_split_state(OperatorId(uid), name, columns={"n": pa.int64()})
            for uid, name in (("a", "b/c"), ("a/b", "c"))
        ]
        rows = {(state.operator, state.name): lambda _: pa.table({"n": [1]}) for state in states}
        stores.Job("names", JobGraph(tuple(operators)), tuple(states), rows).publish(open_store(str(path)), None)  # type: ignore[arg-type]
        return path

    def above(self, path: Path) -> Path:
        return next((FIXTURES / "flink-2.3.0/namespaces-rocksdb-checkpoint/savepoint").iterdir())

    def chk(self, path: Path) -> Path:
        return next(self.above(path).glob("chk-*"))

    def log(self, path: Path) -> Path:
        return next((FIXTURES / "flink-2.3.0/brief-rocksdb-checkpoint-changelog/savepoint").iterdir())

    def spark(self, path: Path) -> Path:
        return FIXTURES / "spark-4.3.0/aggregate/checkpoint"

    def checksums(self, path: Path) -> Path:
        return FIXTURES / "spark-4.3.0/totals-row-checksum/checkpoint"

    def stateless(self, path: Path) -> Path:
        shutil.copytree(self["spark"], path, ignore=shutil.ignore_patterns("state"))
        return path

    def keyed(self, path: Path) -> Path:
        return FIXTURES / "flink-2.3.0/keys-hashmap-canonical/savepoint"

    def keyed_kept(self, path: Path) -> Path:
        return self.imported(path, "--key-hash", "keep", source="keyed")

    def flink(self, path: Path) -> Path:
        return FIXTURES / "flink-2.3.0/core-hashmap-canonical/savepoint"

    def imported(self, path: Path, *options: str, source: str = "flink") -> Path:
        found = run("import", self[source], "--to", path, *options)
        assert found.status == 0, found
        return path

    def renamed(self, path: Path) -> Path:
        return self.imported(path, "--key-hash", "keep", "--map", "by-long=mine")

    def retitled(self, path: Path) -> Path:
        return self.imported(path, "--key-hash", "keep", "--map", "by-long/sum=total")

    def hashed(self, path: Path) -> Path:
        return self.imported(path)

    def file(self, path: Path) -> Path:
        path.write_text("mine")
        return path

    def functions(self, path: Path) -> Path:
        path = path.with_suffix(".py")
        path.write_text(FUNCTIONS)
        return path

    def flow(self, path: Path) -> Path:
        path = path.with_suffix(".py")
        path.write_text(FLOW)
        return path

    def cut_off(self, path: Path) -> Path:
        """The topology of the flights without the input of the alerts."""
        found = run("inspect", self["flights"], "--format", "json")
        edges = [each for each in found.document["edges"] if each["id"] != "delays-alerts"]
        path.write_text(json.dumps({"operators": found.document["operators"], "edges": edges}))
        return path

    def topology(self, path: Path) -> Path:
        found = run("inspect", self["five"], "--format", "json")
        path.write_text(json.dumps({name: found.document[name] for name in ("operators", "edges")}))
        return path

    def long(self, _: Path) -> str:
        return published("memory://advice-long", 202)

    def many(self, path: Path) -> str:
        """Many operators, one in seven of which has a state."""
        operators = [stores.operator(f"operator-{number:03}", 1) for number in range(310)]
        states = [
            declare.even_split_state(one.uid, "rows", columns={"n": pa.int64()})
            for number, one in enumerate(operators)
            if number % 7 == 0
        ]
        rows = {(state.operator, state.name): lambda _: pa.table({"n": [1]}) for state in states}
        store = open_store(f"memory://{path}")
        job = stores.Job("many", JobGraph(tuple(operators)), tuple(states), rows)  # type: ignore[arg-type]
        job.publish(store, None, options=WriteOptions(inline_bytes_max=0))
        return store.url

    def many_lost(self, path: Path) -> str:
        store = open_store(f"memory://{path}")
        open_store(self["many"]).copy(open_store(self["many"]).open(), store)
        store.storage.delete([item.path for item in store.storage.list("segments/")])
        return store.url

    def many_pinned(self, path: Path) -> str:
        store = open_store(published(f"memory://{path}", 1))
        for number in range(45):
            store.pin(None, f"kept-{number:02}")
        return store.url

    def wide(self, path: Path) -> Path:
        """A key with a value that is too long for a page."""
        job, rows = stores.counts_job(), pa.table({"word": ["w"], "text": ["x" * 700 + " and the end"]})
        state = declare.value_state("counter", "counts", keys={"word": pa.string()}, values={"text": pa.string()})
        owner = job.graph.operator(state.operator)
        replace(
            job, states=(state,), rows={("counter", "counts"): lambda i: stores.owned(rows, ["word"], owner, i)}
        ).publish(open_store(str(path)), None)
        return path


@functools.cache
def often(folder: Path, name: str) -> str:
    """A store that is made once."""
    folder.mkdir(exist_ok=True)
    return World(folder)[name]


@functools.cache
def published(url: str, checkpoints: int) -> str:
    """A store of so many checkpoints without states."""
    store, permit = open_store(url), None
    job = stores.Job("empty", JobGraph((stores.operator("one", 1),)), ())
    for _ in range(checkpoints):
        permit = job.publish(store, permit)
    return store.url


def called(text: str, world: World) -> list[str]:
    """The words of a call."""
    return shlex.split(text.format_map(world))  # type: ignore[arg-type]


def tried(case: Case, folder: Path) -> None:
    """Have the sentence said, and do what it says."""
    world = World(folder)
    *made, call = [called(part, world) for part in case.call.split(" ; ")]
    for argv in made:
        assert refusal_of(run(*argv, **ENVIRONMENT)) is None, argv
    text = said(run(*call, traces=case.traces, **ENVIRONMENT))
    told = [sentence for sentence, _ in complaints(text) if case.says in sentence.text]
    assert told, text
    *before, then = [called(part, world) for part in case.then.split(" ; ")]
    for argv in before:
        assert refusal_of(run(*argv, **ENVIRONMENT)) is None, argv
    found = run(*then, **ENVIRONMENT)
    assert refusal_of(found) is None or case.why in said(found), found
    again = [sentence for sentence, _ in complaints(said(found)) if sentence in told]
    assert not again or case.why or case.shows, found
    assert not case.shows or re.search(case.shows, said(found)), f"{case.shows} is not in {said(found)}"
    assert not case.shows or not re.search(case.shows, text), f"{case.shows} was not left out"
