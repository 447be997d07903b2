"""Copies of a query as of a batch: whole or refused, and never a folder on which Spark starts too
soon.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stateformat
from stateformat.backends.foreign.spark.checks import check_source
from stateformat.backends.foreign.spark.copying import copy_query, plan_copy
from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.errors import DamagedCheckpoint, InvalidInput, StorageError, UnsupportedFormat
from stateformat.inspecting import prove_checkpoints
from stateformat.storage import InFront, OutputObject, Storage
from tests.ckpt.ckpt_runs import document, failure, page
from tests.foreign.spark_queries import CHANGELOG, QUERIES, go_on, partitions, write_batch
from tests.foreign.test_spark_repartition import ALL, AVRO, FIXTURES, bytes_of, each, folder

AGGREGATE = FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint"
LOGGED = FIXTURES / "spark-4.3.0" / "aggregate-rocksdb-changelog" / "checkpoint"
OLD = ["old-spark-3.0.3/join", "old-spark-3.0.3/totals", "old-spark-3.0.3/whole"]


def copied(query: Path, target: Path, number: int | None = None, place: Storage | None = None) -> tuple[int, int]:
    source = SparkSource(folder(query), number)
    there = place or folder(target)
    return copy_query(source.folder, there, plan_copy(source, there.url))


@pytest.mark.parametrize("name", [*each(ALL), *OLD])
def test_every_batch_that_is_whole_is_copied_with_its_state(name: str, tmp_path: Path) -> None:
    query = FIXTURES / name / "checkpoint"
    before = bytes_of(query)
    for record in stateformat.open(query).history():
        number, target = record.checkpoint_id, tmp_path / str(record.checkpoint_id)
        files, size = copied(query, target, number)
        there = bytes_of(target)
        assert (files, size) == (len(there), sum(map(len, there.values())))
        found = stateformat.open(target)
        assert found.history()[0].checkpoint_id == number
        assert prove_checkpoints(stateformat.open(query).open(number), found.open()).same
        assert {path for path in there if path.startswith("sources/")} == {
            path for path in before if path.startswith("sources/")
        }
        assert not [path for path in there if path.endswith(".tmp")]
        # A checksum of Hadoop's without its file keeps Spark from writing that file.
        sums = [path for path in map(Path, there) if path.name.endswith(".crc")]
        assert all(str(path.with_name(path.name[1:-4])) in there for path in sums)
    assert bytes_of(query) == before


def test_a_copy_has_nothing_of_later_batches_but_what_the_next_one_began_with(tmp_path: Path) -> None:
    copied(LOGGED, tmp_path, 3)
    logs = {log: sorted(int(path.name) for path in (tmp_path / log).iterdir()) for log in ("offsets", "commits")}
    assert logs == {"offsets": [0, 1, 2, 3], "commits": [0, 1, 2]}
    files = [path for path in (tmp_path / "state").rglob("*") if path.suffix in (".zip", ".changelog")]
    assert files
    assert {int(path.stem) for path in files} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda at: (at / "offsets" / "1").unlink(), "offsets/1: it is missing"),
        (lambda at: (at / "commits" / "1").write_text("v1"), "commits/1"),
        (lambda at: next((at / "state/0/1").glob("2.delta")).unlink(), "state/0/1/2.delta"),
        (lambda at: (at / "state/0/1/2.delta").write_bytes(b"\0" * 40), "state/0/1/2.delta"),
        (lambda at: shutil.copy(at / "state/0/1/2.delta", at / "state/0/2/2.delta"), "state/0/2"),
        (lambda at: (at / "metadata").write_text("{}"), "metadata"),
    ],
    ids=["no-offsets", "short-commit", "no-delta", "forged", "swapped", "no-id"],
)
def test_an_original_that_is_not_whole_is_refused_by_name(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    query = Path(shutil.copytree(AGGREGATE, tmp_path / "query"))
    damage(query)
    with pytest.raises(DamagedCheckpoint, match=message):
        copied(query, tmp_path / "copy", 2)
    assert not (tmp_path / "copy").exists()


def test_state_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="without it the copy would not be whole"):
        copied(AVRO, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_target_that_holds_anything_or_lies_in_the_query_is_refused(tmp_path: Path) -> None:
    query = Path(shutil.copytree(AGGREGATE, tmp_path / "query"))
    copied(query, tmp_path / "copy")
    with pytest.raises(InvalidInput, match="is not empty: it holds a query's checkpoint"):
        copied(query, tmp_path / "copy")
    with pytest.raises(InvalidInput, match="is the checkpoint itself or lies in it"):
        copied(query, query / "copy")


class Failing(InFront):
    """A folder in which no file after so many can be written."""

    def __init__(self, inner: Storage, left: int) -> None:
        super().__init__(inner)
        self.left = left

    def open_output(self, path: str) -> OutputObject:
        self.left -= 1
        if self.left < 0:
            raise StorageError(f"cannot write {path}")
        return super().open_output(path)


def interrupted(query: Path, target: Path, left: int, number: int | None = None) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        copied(query, target, number, Failing(folder(target), left))


def test_a_copy_that_was_interrupted_at_any_file_says_what_it_is(tmp_path: Path) -> None:
    whole, _ = copied(AGGREGATE, tmp_path / "whole", 2)
    for left in range(whole + 1):
        target = tmp_path / str(left)
        interrupted(AGGREGATE, target, left, 2)
        files = bytes_of(target)
        assert not files or "offsets/3" in files
        if left > 1:
            assert "metadata" in files
        if len(files) > 1:
            with pytest.raises(InvalidInput, match=r"begun and not ended.*Remove the folder and run the command again"):
                copied(AGGREGATE, target, 2)
    assert "begun and not ended: remove the folder" in failure("inspect", target, status=3)["message"]


def test_the_command_tells_how_the_query_goes_on_and_proves_the_copy(tmp_path: Path) -> None:
    found = document("copy", f"{LOGGED}@3", "--to", tmp_path / "copy", "--prove")
    assert found["proof"]["same"]
    assert (found["batch"], found["newest_batch"], found["runs_again"]) == (2, 4, True)
    assert found["files"] == len(bytes_of(tmp_path / "copy"))
    told = " ".join(page("copy", f"{LOGGED}@3", tmp_path / "other").split())
    assert "Spark goes on from the copy with batch 3, with the same input as before" in told
    assert "What batches 3 to 4 put out is in the sink already" in told
    newest = " ".join(page("copy", LOGGED, tmp_path / "newest").split())
    assert "with batch 5." in newest
    assert "put out" not in newest
    assert "give the target once" in failure("copy", LOGGED, status=2)["message"]


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.timeout(600)
@pytest.mark.parametrize("conf", [{}, CHANGELOG], ids=["default", "rocksdb"])
def test_spark_starts_on_no_copy_that_is_not_complete(spark: Any, tmp_path: Path, conf: dict[str, str]) -> None:
    query = tmp_path / "query"
    for number in range(3):
        write_batch(tmp_path, QUERIES["totals"], number)
    output = go_on(spark, "totals", tmp_path, query, {**partitions(2), **conf})
    whole, _ = copied(query, tmp_path / "whole", 2)
    for left in (1, 2, 3, whole // 2, whole - 1, whole):
        target = tmp_path / str(left)
        interrupted(query, target, left, 2)
        with pytest.raises(Exception, match=r"begun and not ended: remove the folder|MISSING_METADATA_FILE"):
            go_on(spark, "totals", tmp_path, target, conf)
    again = go_on(spark, "totals", tmp_path, tmp_path / "whole", conf)
    assert again[2] == output[2]


@pytest.mark.parametrize(
    ("name", "suffix"), [("window", "delta"), ("aggregate-rocksdb-changelog", "changelog"), ("session", "delta")]
)
def test_swapped_files_are_found_even_if_all_that_they_do_is_remove(name: str, suffix: str, tmp_path: Path) -> None:
    query = FIXTURES / "spark-4.3.0" / name / "checkpoint"
    whole = {record.checkpoint_id for record in stateformat.open(query).history()}
    tried = 0
    for number in sorted(whole):
        swapped = Path(shutil.copytree(query, tmp_path / str(number)))
        one, other = (swapped / "state" / "0" / partition / f"{number}.{suffix}" for partition in "01")
        source = SparkSource(folder(swapped), number)
        needed = {str(swapped / item.path) for part in source.parts for item in source.files(part)}
        if not {str(one), str(other)} <= needed or one.read_bytes() == other.read_bytes():
            continue
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
        tried += 1
        found = list(check_source(SparkSource(folder(swapped), number), "full", lambda *_: None))
        assert [finding for finding in found if finding.severity == "error"], number
        with pytest.raises(DamagedCheckpoint, match="belong"):
            copied(swapped, tmp_path / f"copy-{number}", number)
    assert tried > 2


def test_a_batch_that_lost_a_file_is_told_between_those_that_are_whole(tmp_path: Path) -> None:
    query = Path(shutil.copytree(FIXTURES / "spark-4.3.0" / "window" / "checkpoint", tmp_path / "query"))
    (query / "state" / "0" / "2" / "5.delta").unlink()
    found = document("history", query, status=1)
    assert [one["checkpoint_id"] for one in found["damaged"]] == [6, 5]
    told = document("validate", query, "--all", status=1)
    assert {one["checkpoint_id"] for one in told["checkpoints"] if one["standing"] == "damaged"} == {5, 6}
    # What Spark itself has removed is the oldest, and is no loss.
    for old in (query / "state" / "0").glob("*/[1-6].*"):
        old.unlink()
    assert document("history", query)["damaged"] == []


def test_schema_files_are_named_as_spark_names_them_in_any_folder(tmp_path: Path) -> None:
    query = FIXTURES / "spark-4.3.0" / "transform-rocksdb-ids" / "checkpoint"
    target = tmp_path / "a copy, 50%25 ö"
    found = document("copy", query, target)
    assert found["location"] == f"file:{target}"
    named = json.loads((target / "state/0/_metadata/v2/0").read_text().splitlines()[1])
    for store in named["stateStoreInfo"]:
        assert all(Path(path.removeprefix("file:")).is_file() for path in store["stateSchemaFilePaths"])


@pytest.mark.parametrize("lacking", ["sources", "sources/0/1"])
@pytest.mark.parametrize("linked", [False, True])
def test_a_log_of_a_source_that_is_missing_or_a_link_is_refused(lacking: str, linked: bool, tmp_path: Path) -> None:
    query = Path(shutil.copytree(AGGREGATE, tmp_path / "query"))
    moved = (query / lacking).rename(tmp_path / "moved")
    if linked:
        (query / lacking).symlink_to(moved)
    with pytest.raises(DamagedCheckpoint, match=r"sources/0/[01]: it is missing, or a link"):
        copied(query, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_an_offset_of_any_size_is_compared_with_the_files_that_are_there(tmp_path: Path) -> None:
    query = Path(shutil.copytree(AGGREGATE, tmp_path / "query"))
    newest = max((query / "offsets").iterdir(), key=lambda path: int(path.name))
    newest.write_text(re.sub(r'"logOffset":\d+', f'"logOffset":{10**12 - 1}', newest.read_text()))
    with pytest.raises(DamagedCheckpoint, match=r"sources/0/\d: it is missing.*has offset 999999999999"):
        copied(query, tmp_path / "copy")


def test_what_a_compact_file_of_a_source_holds_may_be_gone(tmp_path: Path) -> None:
    query = Path(shutil.copytree(AGGREGATE, tmp_path / "query"))
    logs = query / "sources" / "0"
    (logs / "1").rename(logs / "1.compact")
    (logs / "0").unlink()
    copied(query, tmp_path / "copy")
    assert (tmp_path / "copy" / "sources" / "0" / "1.compact").exists()


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.timeout(600)
def test_spark_goes_on_from_a_copy_in_a_folder_of_any_name(spark: Any, tmp_path: Path) -> None:
    query, target = tmp_path / "query", tmp_path / "a copy, 50%25 ö"
    for number in range(3):
        write_batch(tmp_path, QUERIES["transform"], number)
    output = go_on(spark, "transform", tmp_path, query, {**partitions(2), **CHANGELOG})
    copied(query, target, 2)
    again = go_on(spark, "transform", tmp_path, target, CHANGELOG)
    assert again[2] == output[2]
