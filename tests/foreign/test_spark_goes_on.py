"""Spark goes on from a checkpoint that was dealt anew as from an untouched copy.

Three batches, stop, deal anew, three more batches: what they put out and the state at the end, as
Spark's own reader has it, are those of a plain restart. Everything is deterministic: the input is
files, one a batch, and an input partition holds all of a batch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from stateformat.backends.foreign.spark.repartition.plan import plan_repartition
from stateformat.backends.foreign.spark.repartition.run import repartition
from stateformat.storage import folder_of, open_storage
from tests.docs.test_foreign_recipes import RECIPES, run
from tests.foreign.spark_queries import CHANGELOG, QUERIES, go_on, partitions, readings, state, write_batch
from tests.tally import Tally

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1200)]

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
    source, there = (folder_of(open_storage(str(path))) for path in (stopped, target))
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


@pytest.mark.parametrize(
    ("name", "number", "provider"),
    [("totals", 3, None), ("totals", 5, "rocksdb"), pytest.param("session", 5, None, marks=pytest.mark.truth)],
)
def test_spark_goes_on_from_a_checkpoint_dealt_anew(
    spark: Any, stand: Callable[..., Stand], name: str, number: int, provider: Literal["rocksdb"] | None
) -> None:
    check(spark, stand(name, 4, batches=1), number, provider, CHANGELOG if provider else None)


@pytest.mark.truth
@pytest.mark.timeout(600)
@pytest.mark.parametrize("conf", [{}, CHANGELOG], ids=["default", "rocksdb"])
def test_spark_goes_back_to_an_older_batch_as_the_page_says(spark: Any, tmp_path: Path, conf: dict[str, str]) -> None:
    name, batch = "totals", 1
    query, older, copy = tmp_path / "query", tmp_path / "older", tmp_path / "copy"
    for number in range(5):
        write_batch(tmp_path, QUERIES[name], number)
    whole = go_on(spark, name, tmp_path, query, {**partitions(3), **conf})
    run(RECIPES["back"], tmp_path, QUERY=query, OLDER=older, COPY=copy, BATCH=batch, PARTITIONS=3)
    again = go_on(spark, name, tmp_path, copy, conf)
    # The next batch has its own input; what comes after it may be one batch.
    assert again[batch + 1] == whole[batch + 1]
    assert min(again) == batch + 1
    assert contents(spark, name, copy) == contents(spark, name, query)


@pytest.mark.truth
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "before", "after", "provider"), CASES)
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


@pytest.mark.truth
@pytest.mark.timeout(600)
@pytest.mark.parametrize("after", [12, 3])
@pytest.mark.parametrize("name", ["aggregate", "session", "join-outer", "dedupe-watermark", "transform"])
def test_queries_on_rocksdb_go_on_at_another_number_of_partitions(
    spark: Any, stand: Callable[..., Stand], tally: Tally, name: str, after: int
) -> None:
    check(spark, stand(name, 4, conf=CHANGELOG), after, None, CHANGELOG)
    tally.add("Spark queries on RocksDB gone on from a checkpoint dealt anew", tried=1, wrong=0)
