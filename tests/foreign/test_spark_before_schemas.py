"""Spark before 3.1 did not write which columns a state has: what needs no columns works, rows are
bytes, and one batch on a later Spark makes them readable.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.foreign.spark.repartition.plan import plan_repartition
from stateformat.backends.importing import ImportSpec, import_checkpoint, prove_import
from stateformat.errors import DamagedCheckpoint, InvalidInput, UnsupportedFormat
from stateformat.inspecting import sizes_document
from stateformat.storage import folder_of, open_storage
from stateformat.validation import validate, validate_all
from tests.foreign.spark_rows import encode_row

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
    folder = folder_of(open_storage(address("totals")))
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
