"""Spark goes on from what was written for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

import stateformat as sf
from stateformat.backends.foreign.spark.repartition.plan import plan_repartition
from stateformat.backends.foreign.spark.repartition.run import repartition
from stateformat.backends.importing import ImportSpec, import_checkpoint, prove_import
from stateformat.errors import DamagedCheckpoint, InvalidInput, UnsupportedFormat
from stateformat.inspecting import sizes_document
from stateformat.storage import open_storage
from stateformat.validation import validate, validate_all
from tests.docs.test_pages import FOREIGN_RECIPES, run_recipe
from tests.foreign.spark_queries import CHANGELOG, QUERIES, go_on, partitions, readings, state, write_batch
from tests.foreign.spark_rows import encode_row
from tests.tally import Tally

Contents = dict[str, list[dict[str, Any]]]
TRIED = (
    "aggregate", "whole", "unnamed", "window", "session", "join-inner", "join-outer", "dedupe", "dedupe-watermark", "two",
    "pandas-state",
)  # fmt: skip
CASES = [
    (name, before, after, provider)
    for name in TRIED
    for before, after, provider in ((4, 12, None), (4, 3, None), (4, 6, "rocksdb"))
] + [("join-outer", 20, 8, None), ("aggregate", 200, 8, None)]
"""Two hundred is what Spark has by default. A task for each in each batch takes long, so one query
shows it.
"""
OF_EACH_KIND = {
    ("aggregate", 4, 12, None), ("session", 4, 6, "rocksdb"), ("join-outer", 4, 3, None), ("dedupe-watermark", 4, 6, "rocksdb"),
    ("two", 4, 3, None), ("pandas-state", 4, 12, None), ("join-outer", 20, 8, None),
}  # fmt: skip


class Stand(NamedTuple):
    """A query that stopped after three batches, with input for three more; and its restart."""

    name: str
    folder: Path
    output: dict[int, list[str]]
    contents: Contents

    @property
    def stopped(self) -> Path:
        return self.folder / "stopped"


def contents(spark: Any, name: str, checkpoint: Path) -> Contents:
    return {label: state(spark, checkpoint, options) for label, options in readings(name, checkpoint)}


def without_partitions(found: Contents) -> Contents:
    order = {
        label: [{k: v for k, v in row.items() if k != "partition"} for row in rows] for label, rows in found.items()
    }
    return {label: sorted(rows, key=json.dumps) for label, rows in order.items()}


@pytest.fixture(scope="module")
def stand(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Stand]:
    made: dict[Any, Stand] = {}

    def make(name: str, count: int, batches: int = 3, conf: dict[str, str] | None = None) -> Stand:
        key = name, count, batches, *sorted((conf or {}).items())
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{name}-{count}")
            for number in range(batches):
                write_batch(folder, QUERIES[name], number)
            go_on(spark, name, folder, folder / "stopped", {**partitions(count), **(conf or {})})
            for number in range(batches, 2 * batches):
                write_batch(folder, QUERIES[name], number)
            plain = folder / "plain"
            shutil.copytree(folder / "stopped", plain)
            output = go_on(spark, name, folder, plain, conf)
            assert any(output.values()), "batches that put nothing out show little"
            made[key] = Stand(name, folder, output, without_partitions(contents(spark, name, plain)))
        return made[key]

    return make


def deal(stopped: Path, target: Path, number: int, provider: Literal["rocksdb"] | None) -> None:
    source, there = (open_storage(str(path)).folder() for path in (stopped, target))
    assert source is not None
    assert there is not None
    repartition(source, there, plan_repartition(source, there.url, number, provider))


def check(
    spark: Any, stood: Stand, number: int, provider: Literal["rocksdb"] | None, conf: dict[str, str] | None = None
) -> None:
    target = stood.folder / f"to-{number}-{provider}"
    deal(stood.stopped, target, number, provider)
    # A restart takes the number of partitions from the checkpoint, whatever the session says.
    output = go_on(spark, stood.name, stood.folder, target, {**partitions(7), **(conf or {})})
    assert output == stood.output
    found = contents(spark, stood.name, target)
    assert without_partitions(found) == stood.contents
    newest = max((target / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert json.loads(newest.read_text().splitlines()[1])["conf"]["spark.sql.shuffle.partitions"] == str(number)
    folders = {int(path.name) for path in (target / "state").glob("*/[0-9]*") if any(path.iterdir())}
    assert folders == (set(range(number)) if stood.name != "whole" else folders & {0})
    keyed = {row["partition"] for rows in found.values() for row in rows}
    assert keyed <= folders
    shutil.rmtree(target)


@pytest.mark.spark
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "number", "provider"),
    [("totals", 3, None), ("totals", 5, "rocksdb"), pytest.param("session", 5, None, marks=pytest.mark.truth)],
)
def test_spark_goes_on_from_a_checkpoint_dealt_anew(
    spark: Any, stand: Callable[..., Stand], name: str, number: int, provider: Literal["rocksdb"] | None
) -> None:
    check(spark, stand(name, 4, batches=1), number, provider, CHANGELOG if provider else None)


@pytest.mark.spark
@pytest.mark.timeout(1200)
@pytest.mark.truth
@pytest.mark.timeout(600)
@pytest.mark.parametrize("conf", [{}, CHANGELOG], ids=["default", "rocksdb"])
def test_spark_goes_back_to_an_older_batch_as_the_page_says(spark: Any, tmp_path: Path, conf: dict[str, str]) -> None:
    name, batch = "totals", 1
    query, copy = tmp_path / "query", tmp_path / "copy"
    for number in range(5):
        write_batch(tmp_path, QUERIES[name], number)
    whole = go_on(spark, name, tmp_path, query, {**partitions(3), **conf})
    run_recipe(FOREIGN_RECIPES["back"], tmp_path, QUERY=query, COPY=copy, ID=batch + 1)
    again = go_on(spark, name, tmp_path, copy, conf)
    # The next batch has its own input; what comes after it may be one batch.
    assert again[batch + 1] == whole[batch + 1]
    assert min(again) == batch + 1
    assert contents(spark, name, copy) == contents(spark, name, query)


@pytest.mark.spark
@pytest.mark.timeout(1200)
@pytest.mark.truth
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "before", "after", "provider"),
    [case if case in OF_EACH_KIND else pytest.param(*case, marks=pytest.mark.engines) for case in CASES],
)
def test_every_query_goes_on_at_another_number_of_partitions(
    spark: Any,
    stand: Callable[..., Stand],
    tally: Tally,
    name: str,
    before: int,
    after: int,
    provider: Literal["rocksdb"] | None,
) -> None:
    check(spark, stand(name, before), after, provider, CHANGELOG if provider else None)
    tally.add("Spark queries gone on from a checkpoint dealt anew", tried=1, wrong=0)


@pytest.mark.spark
@pytest.mark.timeout(1200)
@pytest.mark.truth
@pytest.mark.timeout(600)
@pytest.mark.parametrize("after", [12, 3])
@pytest.mark.parametrize("name", ["aggregate", "session", "join-outer", "dedupe-watermark", "transform"])
def test_queries_on_rocksdb_go_on_at_another_number_of_partitions(
    spark: Any, stand: Callable[..., Stand], tally: Tally, name: str, after: int
) -> None:
    check(spark, stand(name, 4, conf=CHANGELOG), after, None, CHANGELOG)
    tally.add("Spark queries on RocksDB gone on from a checkpoint dealt anew", tried=1, wrong=0)


# ---- stores of Spark before it wrote schemas

FIXTURES = Path(__file__).parent / "fixtures" / "old-spark-3.0.3"
NAMES = ("totals", "whole", "join")
SUMS = {"key-0": 3, "key-1": 13, "key-2": 9, "key-3": 12, "key-4": 7, "key-5": 11, "key-6": 8}
"""By the query's own output: the last row of each key in three batches."""


def address(name: str) -> str:
    return str(FIXTURES / name / "checkpoint")


@pytest.mark.parametrize(("name", "states", "subtasks"), [("totals", 1, 3), ("whole", 1, 1), ("join", 4, 3)])
def test_history_sizes_and_metadata_need_no_columns(name: str, states: int, subtasks: int) -> None:
    store = sf.open(address(name))
    assert [record.checkpoint_id for record in store.history()] == [3, 2, 1]
    checkpoint = store.open()
    (operator,) = checkpoint.graph.operators
    assert (len(checkpoint.states), operator.parallelism) == (states, subtasks)
    document = sizes_document(store)
    on_disk = sum(path.stat().st_size for path in (FIXTURES / name / "checkpoint" / "state").rglob("3.delta"))
    assert 0 < on_disk < document["checkpoints"][0]["bytes"] < document["bytes"]
    (note, *_) = checkpoint.notes
    assert "Spark before 3.1 did not write" in note.message
    assert "state/0/0/" in note.message
    assert "its first batch writes the file" in note.message


def test_rows_are_the_bytes_that_spark_wrote() -> None:
    rows = sf.open(address("totals")).open().read("operator-0", "default").table().to_pylist()
    wanted = {(encode_row([key], ["string"]), encode_row([total], ["long"])) for key, total in SUMS.items()}
    assert {(row["key"], row["value"]) for row in rows} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_validation_checks_the_files_and_says_once_what_it_cannot_check(name: str, tmp_path: Path) -> None:
    report = validate_all(sf.open(address(name)), level="full")
    assert [result.standing for result in report.checkpoints] == ["whole"] * 3
    assert {finding.problem.severity for finding in report.findings} == {"warning"}
    assert len(report.findings) == (4 if name == "join" else 1)
    assert all("not compared with their partition" in finding.problem.message for finding in report.findings)
    copy = tmp_path / "copy"
    shutil.copytree(address(name), copy)
    torn = next(copy.glob("state/0/0/**/2.delta"))
    torn.write_bytes(torn.read_bytes()[:-1])
    problems = validate(open_storage(str(copy)), level="full").problems
    assert [problem.path for problem in problems] == [str(torn.relative_to(copy))]


def test_nothing_deals_keys_whose_columns_are_unknown(tmp_path: Path) -> None:
    folder = open_storage(address("totals")).folder()
    assert folder is not None
    with pytest.raises(UnsupportedFormat, match=r"start the query once on Spark 3\.1 or later"):
        plan_repartition(folder, str(tmp_path), 5)
    checkpoint = sf.open(address("totals")).open()
    with pytest.raises(InvalidInput, match="--key-hash keep"):
        import_checkpoint(checkpoint, sf.open(str(tmp_path / "anew")))
    spec = ImportSpec(key_hash="keep")
    kept = sf.open(str(tmp_path / "kept"))
    import_checkpoint(checkpoint, kept, spec)
    assert prove_import(checkpoint, kept.open(), spec).same


def test_a_later_spark_has_lost_its_schema(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(FIXTURES.parent / "spark-3.5.9" / "aggregate" / "checkpoint", copy)
    (copy / "state" / "0" / "0" / "_metadata" / "schema").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"_metadata/schema is missing.* from a copy, or start the query once"):
        sf.open(str(copy)).open()
    (copy / "state" / "0" / "0" / "_metadata" / ".schema.crc").touch()
    with pytest.raises(DamagedCheckpoint, match=r"remove its \.schema\.crc"):
        sf.open(str(copy)).open()


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.parametrize("old", [True, pytest.param(False, marks=pytest.mark.truth)])
def test_one_batch_on_a_later_spark_writes_the_schema(spark: Any, tmp_path: Path, old: bool) -> None:
    copy, folder = tmp_path / "copy", tmp_path / "input"
    shutil.copytree(address("totals"), copy)
    folder.mkdir()
    # The source's log has absolute paths, and a restart looks at the files of the last batch.
    for number in range(3):
        log = copy / "sources" / "0" / str(number)
        log.write_text(log.read_text().replace("/tmp/stateformat-fixtures/old-spark-3.0.3/totals/input", str(folder)))
        (folder / f"batch-{number}.json").touch()

    def batch(number: int, amount: int) -> None:
        (folder / f"{number}.json").write_text(json.dumps({"k": "key-1", "n": amount}))
        frame = spark.readStream.schema("k string, n int").json(str(folder)).groupBy("k").sum("n")
        query = frame.writeStream.outputMode("update").format("noop").option("checkpointLocation", str(copy))
        query.trigger(availableNow=True).start().awaitTermination()

    batch(3, 1000)
    if not old:
        # The same for a file that was lost.
        for lost in ("schema", ".schema.crc"):
            (copy / "state" / "0" / "0" / "_metadata" / lost).unlink()
        batch(4, 0)
    checkpoint = sf.open(str(copy)).open()
    rows = checkpoint.read("operator-0", "default").table().to_pylist()
    assert {row["k"]: row["sum"] for row in rows} == SUMS | {"key-1": 1013}
    report = validate(open_storage(str(copy)), level="full")
    assert report.findings == ()
