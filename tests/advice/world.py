"""The stores, folders and files that advice is tried on, and a case of it."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from stateformat.graph import JobGraph
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import open as open_store
from tests import stores
from tests.advice.following import WIDE, complaints, copied, refusal_of, said
from tests.ckpt.ckpt_runs import run

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
}
"""Stores of the corpus."""


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
            made = copied(CORPUS / "broken" / BROKEN[name], path) if name in BROKEN else getattr(self, name)(path)
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
    text = said(run(*call, **ENVIRONMENT))
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
