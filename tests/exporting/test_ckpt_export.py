"""``ckpt export`` into tables and folders: what it says, and what it refuses in a sentence."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from pyarrow import csv, parquet as pq

from stateformat.backends.exporting import Format
from stateformat.store import CheckpointStore
from tests.ckpt.ckpt_runs import document, failure, page, run
from tests.data_world import NAMES, data_store, expected, expected_rows, same_rows
from tests.exporting.export_readers import TYPES, files_in, rows_of, types_store
from tests.stores import flights_store

SPENT = ("--operator", "Totals per user", "--state", "spent")
FIXTURES = Path(__file__).parents[1] / "foreign" / "fixtures"
SAVED = FIXTURES / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"
QUERY = FIXTURES / "spark-4.3.0" / "join-outer" / "checkpoint"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    data_store(str(folder))
    return folder


@pytest.mark.parametrize("file_format", ["iceberg", "delta"])
def test_all_states_in_one_call(world: Path, tmp_path: Path, file_format: str) -> None:
    found = document("export", world, "--as", file_format, "--to", tmp_path)
    assert [(one["operator"], one["state"]) for one in found["states"]] == list(NAMES)
    assert found["rows"] == sum(len(expected(*name)) for name in NAMES)
    assert found["catalog"] == (f"{tmp_path}/catalog.db" if file_format == "iceberg" else None)
    for one, name in zip(found["states"], NAMES, strict=True):
        assert same_rows(rows_of(Format(file_format), Path(one["path"])), expected(*name))
    again = document("export", world, "--as", file_format, "--to", tmp_path)
    assert (again["rows"], again["files"]) == (0, 0)
    assert all((one["added"], one["present"], one["version"]) == ([], [6], None) for one in again["states"])
    text = page("export", world, "--as", file_format, "--to", tmp_path)
    assert "nothing: all of it was already there" in text
    newer = document("export", f"{world}@3", "--operator", "totals", "--as", file_format, "--to", tmp_path)
    assert {one["operator"] for one in newer["states"]} == {"totals"}


def test_the_page_says_what_was_written_where_and_what_is_not_as_it_was(tmp_path: Path) -> None:
    types_store(str(tmp_path / "store"))
    text = page("export", tmp_path / "store", "--as", "iceberg", "--to", tmp_path / "lake")
    assert "Exported from checkpoint 1" in text
    assert "3 rows · 1 file" in text
    words = " ".join(text.split())
    assert f"{TYPES}/{TYPES}: tiny is int instead of int8: Iceberg has no int8" in words
    assert "a.b is named 'a_b_2': Iceberg has no '.' in names" in words
    found = document("export", tmp_path / "store", "--as", "delta", "--to", tmp_path / "delta")
    notes = found["states"][0]["notes"]
    assert {"column": "local", "message": "is timestamp_ntz, which needs a reader of Delta's version 3"} in notes


def test_several_checkpoints_are_told_apart_in_every_format(world: Path, tmp_path: Path) -> None:
    wanted = [
        {"_checkpoint_id": i, **row}
        for i in (2, 3)
        for row in expected_rows("totals", "spent", i, columns_of=6)
        if row["orders"] > 7
    ]
    chosen = (*SPENT, "--checkpoints", "2..3", "--where", "orders > 7", "--to")
    for file_format in Format:
        found = document("export", world, *chosen, tmp_path / file_format, "--as", file_format)
        assert (found["checkpoint_ids"], found["where"]) == ([2, 3], "orders > 7")
        table = rows_of(file_format, tmp_path / file_format)
        assert same_rows(table, type(table).from_pylist(wanted, table.schema))
    found = document("export", world, *chosen, tmp_path / "x.parquet")
    assert (found["rows"], found["checkpoint_id"]) == (len(wanted), 3)
    table = pq.read_table(tmp_path / "x.parquet")
    assert same_rows(table, type(table).from_pylist(wanted, table.schema))
    document("export", world, *chosen, tmp_path / "x.csv")
    assert csv.read_csv(tmp_path / "x.csv")["_checkpoint_id"].unique().to_pylist() == [2, 3]
    assert "checkpoints 2 to 3" in run("export", world, *chosen, "-", "--as", "jsonl").err
    whole = document("export", world, *SPENT, "--all-checkpoints", "--as", "delta", "--to", tmp_path / "whole")
    assert whole["states"][0]["added"] == [1, 2, 3, 4, 5, 6]
    ended = document("export", world, *SPENT, "--checkpoints", "5..", "--as", "delta", "--to", tmp_path / "whole")
    assert (ended["states"][0]["added"], ended["states"][0]["present"]) == ([], [5, 6])


@pytest.mark.parametrize("file_format", ["parquet", "csv", "jsonl"])
def test_files_of_all_states(world: Path, tmp_path: Path, file_format: str) -> None:
    found = document("export", world, "--as", file_format, "--to", tmp_path / "out")
    assert files_in(tmp_path / "out") == {f"{operator}/{state}.{file_format}" for operator, state in NAMES}
    assert [one["rows"] for one in found["states"]] == [len(expected(*name)) for name in NAMES]
    assert "holds " in failure("export", world, "--as", file_format, "--to", tmp_path / "out", status=2)["message"]


def test_states_of_every_mode_and_kind_are_tables(tmp_path: Path) -> None:
    store: CheckpointStore = flights_store(str(tmp_path / "store"))
    for file_format in Format:
        for at in (1, 2):
            found = document(
                "export", f"{tmp_path / 'store'}@{at}", "--as", file_format, "--to", tmp_path / file_format
            )
        for one in found["states"]:
            wanted = store.open().state(one["operator"], one["state"]).table()
            assert same_rows(rows_of(file_format, Path(one["path"])), wanted), one
        several = document(
            *(
                "export",
                tmp_path / "store",
                "--all-checkpoints",
                "--as",
                file_format,
                "--to",
                tmp_path / f"{file_format}s",
            )
        )
        assert all(one["added"] == [1, 2] for one in several["states"])


@pytest.mark.parametrize("file_format", ["iceberg", "delta"])
@pytest.mark.parametrize("foreign", [SAVED, QUERY], ids=["flink", "spark"])
def test_checkpoints_of_other_systems_become_tables(tmp_path: Path, file_format: str, foreign: Path) -> None:
    found = document("export", foreign, "--as", file_format, "--to", tmp_path)
    assert found["rows"] > 0
    assert all(one["added"] for one in found["states"])
    for one in found["states"]:
        assert len(rows_of(Format(file_format), Path(one["path"]))) == one["rows"]
    again = document("export", foreign, "--as", file_format, "--to", tmp_path)
    assert again["rows"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--as iceberg --to x --force", "--force replaces a file"),
        ("--to x", "'x' is the folder of all states; add --as iceberg, delta"),
        ("--to x.csv", "Missing option '--operator'; a file holds one state"),
        ("--state spent --as delta --to x", "Missing option '--operator'"),
        ("--operator nope --as delta --to x", "has no operator 'nope'"),
        ("--operator totals --state spnt --as delta --to x", "did you mean 'spent'"),
        ("--as delta --partition-by a --to x", "--partition-by writes Parquet"),
        ("--as delta --checkpoints 7..9 --to x", "no checkpoint 7"),
        ("--as delta --checkpoints 5..2 --to x", "ends before it begins"),
        ("--as delta --checkpoints 2 --to x", "is not a range of checkpoints"),
        ("--as delta --checkpoints 0..2 --to x", "is not a range of checkpoints"),
        ("--as delta --checkpoints .. --to x", "is not a range of checkpoints"),
        ("--as delta --checkpoints 2..3 --all-checkpoints --to x", "contradict each other"),
        ("--as delta --checkpoints 2..3 --subtask 0 --to x", "--subtask is of one checkpoint"),
        ("--as delta --subtask 7 --operator totals --to x", "subtasks 0 to 2"),
        ("--as delta --where vip --to x", "orders/positions: .*no column 'vip'"),
        ("--operator totals --state spent --as delta --where 'oders > 1' --to x", "no column 'oders'"),
        ("--operator totals --state spent --as delta --where orders --to x", "BOOLEAN|boolean|condition"),
        ("--as delta --to s3://", "names? no|no address|is no "),
        ("--as iceberg --to memory://x", "cannot hold tables"),
        ("--as iceberg --to -", "--to - is standard output, and this goes into a folder"),
        ("--as parquet --operator totals --state spent --partition-by city --to -", "is standard output"),
        ("--as flink-savepoint --where a --to x", "writes all operators"),
        ("--as flink-savepoint --all-checkpoints --to x", "writes all operators"),
        ("--as flink-savepoint --partition-by a --to x", "writes all operators"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("export", world, *shlex.split(options))
    assert found.status in (2, 3), found
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(" ".join(found.err.split()))
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("how", ["--as iceberg", "--as delta", "--operator totals --state spent --partition-by city"])
def test_a_file_is_no_folder(world: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "a.csv").write_text("n")
    error = failure("export", world, *shlex.split(how), "--to", tmp_path / "a.csv", status=2)
    assert "a.csv is a file; give a folder that is new or empty" in error["message"]


def test_the_table_of_another_state_is_told_by_both_names(world: Path, tmp_path: Path) -> None:
    rates, spent = (
        ("export", world, "--as", "delta", "--to", tmp_path / "t", "--operator", "totals", "--state", one)
        for one in ("rates", "spent")
    )
    document(*rates)
    assert (
        "t is of state 'rates' of operator 'totals', job 'shop', and this export is of state 'spent' of operator 'totals', "
        "job 'shop'; export to another folder"
    ) in failure(*spent, status=2)["message"]


def test_a_place_in_the_store_is_refused(world: Path) -> None:
    for place in ("segments/x", "manifests"):
        error = failure("export", world, "--as", "delta", "--to", world / place, status=2)
        assert "garbage collection would delete it" in error["message"]
    error = failure("export", SAVED, "--as", "delta", "--to", SAVED / "out", status=2)
    assert "stays as it is" in error["message"]


def test_one_checkpoint_is_not_several(world: Path, tmp_path: Path) -> None:
    error = failure("export", f"{world}@2", "--as", "delta", "--all-checkpoints", "--to", tmp_path / "x", status=2)
    assert "@2 is one checkpoint" in error["message"]
