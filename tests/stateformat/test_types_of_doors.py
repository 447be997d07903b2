"""What type checkers see: a job and a runtime as the guides write them pass ``mypy --strict``, and
slips do not.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from stateformat.backends.runtime import Options, RuntimeOptions, Schedule
from stateformat.backends.runtime.options import ScheduleOptions
from stateformat.backends.spark.sessions import SparkOptions, SparkRuntimeOptions

ROOT = Path(__file__).resolve().parents[2]

JOB = '''
"""A job as docs/dataflow.md writes one."""
from collections.abc import Iterator, Sequence

import pyarrow as pa

import stateformat
from stateformat.backends.dataflow import Dataflow, Operator, Output
from stateformat.backends.dataflow import Descriptor, Timers, ValueState
from stateformat.backends.local import LocalRuntime


class Totals(Operator):
    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        key = {"city": pa.string()}
        return [ValueState("total", key, {"n": pa.int64()}, renames={"m": "n"}), Timers("hour", key)]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        total = self.context.value_state("total")
        old = total.get_one("Oslo") or {"n": 0}
        total.put_one("Oslo", n=old["n"] + batch.num_rows)
        self.context.timers("hour").set_one("Oslo", self.context.watermark + 1)
        return batch

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Iterator[pa.RecordBatch]:
        yield timers.select(["city"])


def job(flow: Dataflow) -> None:
    from stateformat.backends.connectors import FileSink, ParquetSource

    rows = flow.source(ParquetSource("in/"), uid="in", event_time="at").key_by("city")
    rows.filter(lambda batch: pa.array([True]), uid="kept", parallelism=2).key_by("city").apply(Totals(), uid="totals")
    rows.aggregate({"n": ("", "count")}, uid="n").apply(FileSink("out/"), uid="out")


flow = Dataflow("cities", parallelism=4)
job(flow)
outcome = LocalRuntime(stateformat.open("store"), checkpoint_interval_us=1_000_000, parallelism=2).run(flow)
print(outcome.sentence)
'''
RUNTIME = '''
"""A runtime as docs/library.md writes one."""
import pyarrow as pa

import stateformat as sf
from stateformat.states import value_state
from stateformat.redistribution import RestorePlan

store = sf.open("store")
first = value_state("counts", "total", keys={"k": pa.string()}, values={"n": pa.int32()})
total = value_state(
    "counts", "total", keys={"k": pa.string()}, values={"n": pa.int64()}, previous=first, renames={}, defaults={"n": "0"}
)
graph = sf.JobGraph((sf.Operator("counts", parallelism=2, max_parallelism=128),))
permit = store.start("job")
pending = store.begin(job_id="job", graph=graph, states=[total], parent=permit)
with pending.context.subtask("counts", 0) as writer:
    writer.write("total", pa.table({"k": ["a"], "n": [1]}))
pending.add(writer)
permit = pending.publish()
plan: RestorePlan = store.open().plan_restore(graph.at(parallelism=6), states=[total], drop=["gone"])
plan.check()
for name, task in store.open().restore(plan, "counts", 0).items():
    print(name, task.table().num_rows)
'''
SLIPS = """
import pyarrow as pa

import stateformat as sf
from stateformat.states import value_state
from stateformat.backends.dataflow import Stream
from stateformat.backends.local import LocalRuntime
from stateformat.backends.spark.runtime import SparkRuntime


def slips(checkpoint: sf.Checkpoint, graph: sf.JobGraph, stream: Stream, store: sf.CheckpointStore) -> None:
    checkpoint.plan_restore(graph).chek()
    checkpoint.plan_restore(graph, dorp=["a"])
    checkpoint.restore("plan", "counts", 0)
    value_state("op", "v", keys={}, values={}, default={"n": "0"})
    LocalRuntime(store, paralelism=2)
    LocalRuntime(store, parallelism="2")
    SparkRuntime(None, store, idle=2)
    stream.filter(lambda batch: batch, uid="f", paralelism=2)
    stream.deduplicate()
"""
FIRST_SLIP = SLIPS[: SLIPS.index("    checkpoint.plan_restore")].count("\n") + 1


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one run of ``mypy --strict`` says of these files, the examples of docs/operators.md
    among them, as for a user whose project is elsewhere.
    """
    folder = tmp_path_factory.mktemp("user")
    (folder / "job.py").write_text(JOB)
    (folder / "runtime.py").write_text(RUNTIME)
    (folder / "slips.py").write_text(SLIPS)
    page = (ROOT / "docs" / "operators.md").read_text()
    (folder / "operators.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    # As the project's settings: pyarrow has no types. Nothing of ours is passed over.
    (folder / "mypy.ini").write_text(
        "[mypy]\nstrict = True\n[mypy-pyarrow.*,pyspark.*,fsspec.*]\nignore_missing_imports = True\nfollow_imports = skip\n"
    )
    files = ["job.py", "runtime.py", "operators.py", "slips.py"]
    cache = ROOT / ".mypy_cache" / "of_users"
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(cache), *files]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_a_job_and_a_runtime_written_from_the_guides_are_typed(told: str) -> None:
    assert [line for line in told.splitlines() if not line.startswith("slips.py")] == []


def test_every_slip_is_found_and_names_what_is_wrong(told: str) -> None:
    lines = SLIPS.splitlines()[FIRST_SLIP - 1 :]
    for number, code in enumerate(lines, FIRST_SLIP):
        assert f"slips.py:{number}: error" in told, code
    for part in ('"RestorePlan" has no attribute "chek"', '"dorp"', '"paralelism"', '"uid"', '"default"', '"idle"'):
        assert part in told


@pytest.mark.parametrize("package", ["stateformat", "redistribution", "backends"])
def test_every_package_of_the_library_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (ScheduleOptions, [Schedule]),
        (RuntimeOptions, [Options, Schedule]),
        (SparkRuntimeOptions, [SparkOptions, Schedule]),
    ],
)
def test_the_typed_keywords_of_runtimes_are_the_fields_of_their_options(names: type, classes: list[type]) -> None:
    fields = {
        name: kind
        for one in classes
        for name, kind in typing.get_type_hints(one).items()
        if name in {field.name for field in dataclasses.fields(one)}
    }
    assert typing.get_type_hints(names) == fields
