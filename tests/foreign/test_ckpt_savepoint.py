"""``ckpt export --as flink-savepoint``: a checkpoint goes back to Flink."""

from __future__ import annotations

from pathlib import Path

import pytest

import stateformat
from tests.ckpt.ckpt_runs import document, failure, page, run

FIXTURES = Path(__file__).parent / "fixtures"
SAVED = FIXTURES / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"


def values(address: Path, operator: str, state: str) -> dict[object, object]:
    table = stateformat.open(str(address)).open().read(operator, state).table()
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_an_import_that_keeps_key_groups_goes_back(tmp_path: Path) -> None:
    page("import", SAVED, "--to", tmp_path / "store", "--key-hash", "keep", COLUMNS="120")
    found = document("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back")
    assert (found["format"], found["path"]) == ("flink-savepoint", str(tmp_path / "back"))
    assert (found["operators"], found["left_out"]) == (3, [])
    assert found["files"] == len([*(tmp_path / "back").iterdir()])
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "back").iterdir())
    assert values(tmp_path / "back", "by-string", "count") == values(SAVED, "by-string", "count")


def test_a_checkpoint_of_flinks_becomes_a_canonical_savepoint_without_an_import(tmp_path: Path) -> None:
    text = page("export", SAVED, "--as", "flink-savepoint", "--to", tmp_path / "back")
    assert "Savepoint of checkpoint 1" in text
    assert "3 operators" in text
    assert values(tmp_path / "back", "by-long", "sum") == values(SAVED, "by-long", "sum")


def test_what_an_import_dropped_is_said(tmp_path: Path) -> None:
    options = ["--key-hash", "keep", "--drop", "by-long", "--drop", "by-string/seen"]
    page("import", SAVED, "--to", tmp_path / "store", *options, COLUMNS="120")
    found = document("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back")
    assert sorted(found["left_out"]) == ["by-long", "by-string/seen"]
    operators = stateformat.open(str(tmp_path / "back")).open().graph.by_uid
    assert sorted(operators) == ["by-string", "numbers"]


def test_keys_that_were_hashed_anew_cannot_go_back(tmp_path: Path) -> None:
    page("import", SAVED, "--to", tmp_path / "store", COLUMNS="120")
    found = failure("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back", status=2)
    assert "`ckpt import SAVEPOINT --key-hash keep --to STORE`" in found["message"]
    assert not (tmp_path / "back").exists()


def test_an_import_that_leaves_no_way_back_says_so_once_and_another_leaves_one(tmp_path: Path) -> None:
    said = "what Flink needs to take this state back is not kept"
    assert " ".join(page("import", SAVED, "--to", tmp_path / "rehashed", COLUMNS="120").split()).count(said) == 1
    assert said not in " ".join(page("import", SAVED, "--to", tmp_path / "store", "--key-hash", "keep").split())
    page("export", tmp_path / "store", "--as", "flink-savepoint", "--to", tmp_path / "back")


def test_renamed_operators_and_states_are_refused_by_name(tmp_path: Path) -> None:
    for number, (renamed, said) in enumerate(
        [("by-long=mine", "operator 'mine' is none of Flink's"), ("by-long/sum=total", "state 'total' of operator")]
    ):
        store = tmp_path / f"store-{number}"
        page("import", SAVED, "--to", store, "--key-hash", "keep", "--map", renamed, COLUMNS="120")
        found = failure("export", store, "--as", "flink-savepoint", "--to", tmp_path / "back", status=2)
        assert said in found["message"]
        assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("options", [["--operator", "by-long"], ["--state", "sum"], ["--subtask", "0"], ["--force"]])
def test_a_savepoint_has_all_operators(tmp_path: Path, options: list[str]) -> None:
    found = run("export", SAVED, "--as", "flink-savepoint", "--to", tmp_path / "back", *options)
    assert found.status == 2
    assert "writes all operators into an empty folder" in found.err


@pytest.mark.parametrize("options", [["--operator", "by-long"], ["--state", "sum"]])
def test_a_file_holds_one_state(tmp_path: Path, options: list[str]) -> None:
    found = run("export", SAVED, "--to", tmp_path / "rows.csv", *options)
    assert found.status == 2
    assert "Missing option" in found.err
