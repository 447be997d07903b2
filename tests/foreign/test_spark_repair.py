"""What ``ckpt repair`` saves of a damaged query, and what Spark then does with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stateformat
from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.inspecting import prove_checkpoints
from tests.ckpt.ckpt_runs import document, failure, page
from tests.foreign.spark_queries import CHANGELOG, QUERIES, go_on, partitions, write_batch
from tests.foreign.test_spark_repartition import FIXTURES, bytes_of, folder

SPARK = FIXTURES / "spark-4.3.0"
LOGGED = "aggregate-rocksdb-changelog"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def damaged(name: str, place: Path, *damage: Callable[[Path], object]) -> Path:
    query = Path(shutil.copytree(SPARK / name / "checkpoint", place / "query"))
    for one in damage:
        one(query)
    return query


def same(copy: Path, name: str, number: int) -> bool:
    """Whether a copy has the state that the undamaged query has."""
    whole = stateformat.open(SPARK / name / "checkpoint").open(number)
    found = stateformat.open(copy).open()
    return found.id == number and prove_checkpoints(whole, found).same


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def base(query: Path) -> str:
    """A snapshot on which a partition of the newest batch is based."""
    source = SparkSource(folder(query))
    paths = [item.path for part in source.parts for item in source.files(part)]
    return next(path for path in paths if path.endswith((".snapshot", ".zip")))


@pytest.mark.parametrize(
    ("name", "tables"), [("window", False), ("session", False), (LOGGED, False), (LOGGED, True), ("join-outer", False)]
)
def test_a_snapshot_for_which_older_files_make_up_is_left_out_and_nothing_is_lost(
    name: str, tables: bool, tmp_path: Path
) -> None:
    query = damaged(name, tmp_path)
    number, file = stateformat.open(query).open().id, query / base(query)
    for one in [*(file.parent / "SSTs").iterdir()] if tables else [file]:
        cut(one)
    before = bytes_of(query)
    advice = " ".join(one["advice"] for one in document("validate", query, "--level", "full", status=1)["problems"])
    assert "`ckpt repair" in advice
    told = document("repair", query, status=1)
    assert (told["ok"], told["batch"], told["lost"], told["to"]) == (False, number - 1, [], None)
    found = document("repair", query, "--to", tmp_path / "copy")
    assert str(file.relative_to(query)) in found["left_out"]
    assert found["left_out"] == told["left_out"]
    assert not {path for path in found["left_out"] if (tmp_path / "copy" / path).exists()}
    assert same(tmp_path / "copy", name, number)
    assert bytes_of(query) == before


def no_last_delta(at: Path) -> None:
    max((at / "state/0/1").glob("*.delta"), key=lambda path: int(path.stem)).unlink()


@pytest.mark.parametrize(
    ("damage", "back"),
    [
        (no_last_delta, 1),
        (lambda at: flip(at / "state/0/2/5.delta"), 1),
        (lambda at: (at / "commits" / "4").write_text("v1"), 1),
        (lambda at: (at / "commits" / "3").unlink(), 0),
        (lambda at: [(at / log / str(number)).unlink() for log, number in (("commits", 4), ("offsets", 3))], 2),
    ],
    ids=["no-delta", "torn-delta", "torn-commit", "no-commit-between", "no-logs"],
)
def test_what_has_no_second_copy_costs_the_batches_that_need_it(
    damage: Callable[[Path], object], back: int, tmp_path: Path
) -> None:
    query = damaged("aggregate", tmp_path, damage)
    before = bytes_of(query)
    newest = stateformat.open(SPARK / "aggregate" / "checkpoint").open().id - 1
    if not back:
        assert document("repair", query)["ok"]
        return
    found = document("repair", query, "--to", tmp_path / "copy")
    assert found["batch"] == newest - back
    assert all(one["message"] for one in found["lost"])
    assert same(tmp_path / "copy", "aggregate", newest - back + 1)
    assert found["rows"] == stateformat.open(tmp_path / "copy").open().read("operator-0", "default").table().num_rows
    assert bytes_of(query) == before
    told = " ".join(page("repair", query, status=1).split())
    assert f"Spark runs batch {newest - back + 1} again" in told
    assert "writes the copy" in told


def test_offsets_of_the_next_batch_that_nobody_can_read_are_made_anew(tmp_path: Path) -> None:
    query = damaged("totals-uncommitted", tmp_path)
    begun = max((query / "offsets").iterdir(), key=lambda path: int(path.name))
    begun.write_text("v1\n{}\n\0")
    begun.write_bytes(b"\xff")
    found = document("repair", query, "--to", tmp_path / "copy")
    assert found["left_out"] == [f"offsets/{begun.name}"]
    assert not (tmp_path / "copy" / "offsets" / begun.name).exists()


def test_a_query_of_which_nothing_is_whole_is_refused_by_name(tmp_path: Path) -> None:
    query = damaged("aggregate", tmp_path, lambda at: shutil.rmtree(at / "state" / "0" / "2"))
    told = failure("repair", query, "--to", tmp_path / "copy", status=1)["message"]
    assert "has no batch that a copy could have whole; the newest: state/0/2" in told
    assert not (tmp_path / "copy").exists()


def test_a_whole_query_is_not_repaired_and_no_query_in_its_place(tmp_path: Path) -> None:
    query = damaged("aggregate", tmp_path)
    assert document("repair", query)["ok"]
    assert (
        "keeps a copy that it has validated" in failure("repair", query, "--to", tmp_path / "no", status=2)["message"]
    )
    assert "is never changed: --to COPY" in failure("repair", query, "--yes", status=2)["message"]
    document("copy", query, "--to", tmp_path / "there")
    assert "is not empty" in failure("repair", query, "--to", tmp_path / "there", status=2)["message"]
    assert not (tmp_path / "no").exists()
    store = tmp_path / "store"
    document("import", query, "--to", store)
    assert "repaired where it is, with --yes" in failure("repair", store, "--to", tmp_path / "no", status=2)["message"]


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("conf", "kind"), [({}, "delta"), ({}, "snapshot"), (CHANGELOG, "zip")])
def test_spark_goes_on_from_what_was_repaired(spark: Any, tmp_path: Path, conf: dict[str, str], kind: str) -> None:
    conf, query, name = {**conf, **partitions(2)}, tmp_path / "query", "totals"
    for number in range(6):
        write_batch(tmp_path, QUERIES[name], number)
    whole = go_on(spark, name, tmp_path, query, conf)
    shutil.copytree(query, tmp_path / "whole")
    # Snapshots appear once a minute; one that is torn is as good as any that never was whole.
    files = query / "state" / "0" / "1"
    if kind == "delta":
        cut(files / "6.delta")
    else:
        (files / f"5.{kind}").write_bytes(b"torn")
    found = document("repair", query, "--to", tmp_path / "copy")
    assert found["left_out"] == ([] if kind == "delta" else [f"state/0/1/5.{kind}"])
    write_batch(tmp_path, QUERIES[name], 6)
    wanted = go_on(spark, name, tmp_path, tmp_path / "whole", conf)
    again = go_on(spark, name, tmp_path, tmp_path / "copy", conf)
    assert again == {**{batch: rows for batch, rows in whole.items() if batch > found["batch"]}, **wanted}


def test_a_source_that_has_lost_its_log_is_damage(tmp_path: Path) -> None:
    query = Path(shutil.copytree(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint", tmp_path / "query"))
    (query / "sources/0/2").unlink()
    (told,) = document("validate", query, status=1)["problems"]
    assert told["message"] == "sources/0/2: it is missing, or a link, and offsets/4 has offset 4 of that source"
    found = document("repair", query, status=1)
    assert (found["batch"], [one["batch"] for one in found["lost"]]) == (0, [4, 3, 2, 1])


def test_where_an_older_base_does_not_help_the_damage_itself_is_told(tmp_path: Path) -> None:
    query = Path(shutil.copytree(FIXTURES / "spark-4.3.0" / "join-outer-rocksdb-v4" / "checkpoint", tmp_path / "query"))
    table = max((query / "state/0/1/SSTs").glob("*.sst"))
    table.write_bytes(b"xxx")
    newest = document("repair", query, status=1)["lost"][0]
    assert f"SSTs/{table.name}: it has 3 bytes" in newest["message"]


def test_an_older_batch_that_is_asked_for_is_told_alone_and_copied(tmp_path: Path) -> None:
    query = Path(shutil.copytree(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint", tmp_path / "query"))
    newest = max((query / "state/0/1").glob("*.delta"), key=lambda path: int(path.stem))
    newest.write_bytes(newest.read_bytes()[:-1])
    told = " ".join(page("repair", f"{query}@3").split())
    assert "Batch 2 is whole" in told
    assert "Newer batches were not looked at: `ckpt repair " in told
    assert [one["batch"] for one in document("repair", query, status=1)["lost"]] == [4]
    copied = " ".join(page("repair", f"{query}@3", "--to", tmp_path / "copy").split())
    assert "Copied batch 2" in copied
    assert "checkpointLocation" in copied
    assert "Spark goes on from the copy with batch 3." in copied


def test_a_whole_query_says_what_else_can_be_read(tmp_path: Path) -> None:
    query = Path(shutil.copytree(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint", tmp_path / "query"))
    assert "Older batches were not read: `ckpt validate " in " ".join(page("repair", query).split())
    assert document("validate", query, "--all", "--level", "full")["ok"]
