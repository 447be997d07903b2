"""The commands that only read: history, inspect, validate, explain-restore, export. Their pages:
``test_ckpt_pages``."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from tests import stores
from tests.ckpt.ckpt_runs import document, failure, page, run, state_of, topology_without
from tests.forgery import Forger

SUMS = ("--operator", "delays", "--state", "sums")


# ---- history


def test_history_lists_the_chain_newest_first(flights: Path) -> None:
    newest, first = document("history", flights)["checkpoints"]
    assert (newest["operators"], newest["finished"], newest["partially_finished"]) == (7, 1, 2)
    assert newest["parent"] == {"checkpoint_id": 1, "attempt_id": first["attempt_id"]}
    assert first["parent"] is None


def test_history_can_be_cut_and_then_looks_for_no_strays(flights: Path) -> None:
    found = document("history", flights, "--limit", 1)
    assert [entry["checkpoint_id"] for entry in found["checkpoints"]] == [2]
    assert found["strays"] is None


def test_history_names_strays(tmp_path: Path) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    stores.counts_store(str(store), checkpoints=3)
    stores.counts_store(str(other), checkpoints=2)
    record = "checkpoints/00000000000000000002.json"
    (store / record).write_bytes((other / record).read_bytes())
    found = document("history", store)
    assert [entry["checkpoint_id"] for entry in found["checkpoints"]] == [3]
    assert [stray["checkpoint_id"] for stray in found["strays"]] == [1, 2]
    assert "2 strays, no checkpoint: 1 (attempt" in page("history", store)


# ---- inspect


def test_inspect_has_every_state_with_its_rows_and_skew(flights: Path) -> None:
    found = document("inspect", flights)
    states = {(state["operator"], state["name"]): state for state in found["states"]}
    assert len(states) == 13
    sums = states["delays", "sums"]
    assert [(layer["layer"], layer["rows"]) for layer in sums["layers"]] == [(0, 60), (1, 11)]
    assert sums["rows"] == sum(entry["rows"] for entry in sums["subtasks"]) == 71
    assert sums["skew"] == round(max(entry["rows"] for entry in sums["subtasks"]) * 4 / 71, 2)
    assert [entry["layers"] for entry in sums["subtasks"]] == [2] * 4
    assert states["planes", "splits"]["subtasks"] == []
    assert [entry["subtask"] for entry in states["airlines", "names"]["subtasks"]] == [1, 3]
    assert [entry["subtask"] for entry in states["flights", "unassigned"]["subtasks"]] == [None]
    assert found["totals"]["rows"] == sum(state["rows"] for state in found["states"])
    assert found["totals"]["bytes"] == pytest.approx(sum(state["bytes"] for state in found["states"]), abs=20)
    assert found["inline_bytes"] == found["totals"]["bytes"] > 0


@pytest.mark.parametrize("given", ["delays", "Delays per plane"])
def test_inspect_narrows_by_uid_or_name_and_shows_rows(flights: Path, given: str) -> None:
    found = document("inspect", flights, "--operator", given, "--state", "last", "--rows", 3)
    assert found["selection"] == {"operator": "delays", "state": "last"}
    (state,) = found["states"]
    assert len(state["sample"]) == 3
    assert all(int(row["raw"], 16) % 256 == 255 for row in state["sample"])
    assert all(row["route"] in (None, ["EWR", "IAH"]) for row in state["sample"])


# ---- validate


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_whole_checkpoint_has_no_problems(flights: Path, level: str) -> None:
    found = document("validate", flights, "--level", level)
    assert (found["ok"], found["problems"], found["level"], found["checkpoint_id"]) == (True, [], level, 2)
    assert found["checked"]["segments"] == 40
    assert (found["checked"]["rows"] > 0) is (level == "full")


def test_validate_finds_everything_at_once_and_says_what_to_do(tmp_path: Path) -> None:
    stores.flights_job().publish(open_store(str(tmp_path)), None, options=WriteOptions(inline_bytes_max=0))
    first, second, *_ = sorted((tmp_path / "segments").rglob("*delays*sums*.parquet"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    found = document("validate", tmp_path, "--level", "full", status=1)
    assert {problem["kind"] for problem in found["problems"]} >= {"object_missing", "object_size_differs"}
    assert {Path(problem["path"]).name for problem in found["problems"]} == {first.name, second.name}
    for problem in found["problems"]:
        assert problem["clause"].startswith("SPEC ")
        assert (problem["operator"], problem["state"]) == ("delays", "sums")
        assert problem["advice"]
    assert page("validate", tmp_path, status=1).splitlines()[-1] == f"  ✗ {len(found['problems'])} problems"


# ---- explain-restore


def refusals(found: Any) -> set[tuple[str, str]]:
    return {(refusal["code"], refusal["operator"]) for refusal in found["plan"]["refusals"]}


def test_explain_restore_says_who_would_read_what(flights: Path) -> None:
    found = document("explain-restore", flights, "--parallelism", 6)
    actions = {operator["uid"]: operator["action"] for operator in found["plan"]["operators"]}
    assert actions == dict.fromkeys(actions, "start") | {"planes": "skip_finished"}
    load = {entry["operator"]: [subtask["rows"] for subtask in entry["subtasks"]] for entry in found["load"]}
    assert set(load) == set(actions) - {"planes"}
    assert all(len(subtasks) == 6 for subtasks in load.values())
    assert (load["rates"], load["airlines"], sum(load["flights"])) == ([4] * 6, [2] * 6, 4)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--operator-parallelism", "Delays per plane=129"), "parallelism_above_max"),
        (("--max-parallelism", 256), "max_parallelism_changed"),
    ],
)
def test_explain_restore_says_why_not(flights: Path, options: tuple[object, ...], code: str) -> None:
    found = document("explain-restore", flights, *options, status=1)
    assert found["refused"] is True
    assert refusals(found) == {(code, "delays")}


def test_what_inspect_prints_is_a_topology_file(flights: Path, tmp_path: Path) -> None:
    topology = tmp_path / "topology.json"
    topology.write_text(run("inspect", flights, "--format", "json").out)
    same = document("explain-restore", flights, "--topology", topology)
    assert same["refused"] is False
    assert {operator["old_parallelism"] == operator["parallelism"] for operator in same["plan"]["operators"]} == {True}


def test_a_topology_without_an_operator_needs_its_state_to_be_given_up(flights: Path, tmp_path: Path) -> None:
    topology = topology_without("rates", flights, tmp_path / "topology.json")
    refused = document("explain-restore", flights, "--topology", topology, status=1)
    assert refusals(refused) == {("operator_missing", "rates")}
    text = page("explain-restore", flights, "--topology", topology, status=1)
    assert "given up" not in text
    assert "not in the topology" in text
    assert "--drop 'rates'" in " ".join(text.split())
    given_up = document("explain-restore", flights, "--topology", topology, "--drop", "rates")
    assert given_up["plan"]["drop"] == ["rates"]
    assert document("explain-restore", flights, "--drop", "rates")["plan"]["drop"] == ["rates"]


def test_a_schema_that_cannot_evolve_is_refused(flights: Path, tmp_path: Path) -> None:
    whole = document("inspect", flights)
    for state in whole["states"]:
        if (state["operator"], state["name"]) == ("delays", "sums"):
            state["schemas"][-1]["fields"][1]["type"] = "utf8"
    topology = tmp_path / "topology.json"
    topology.write_text(json.dumps(whole))
    (refusal,) = document("explain-restore", flights, "--topology", topology, status=1)["plan"]["refusals"]
    assert refusal["code"] == "schema_cannot_evolve"
    assert "'n' was int64 and would be utf8" in refusal["message"]


def declaring(flights: Path, file: Path, columns: Sequence[tuple[str, str]], **more: Any) -> Path:
    """A topology file whose operator ``delays`` declares its state ``sums`` as a program does."""
    whole, sums = document("inspect", flights), state_of(flights, "delays", "sums")
    keys = [item for item in sums["schemas"][-1]["fields"] if item["name"] in sums["key_columns"]]
    declared = {name: sums[name] for name in ("operator", "name", "mode", "kind", "key_columns")}
    fields = [{"name": item["name"], "type": item["type"]} for item in keys]
    fields += [{"name": name, "type": kind} for name, kind in columns]
    others = [item for item in whole["states"] if item["operator"] == "delays" and item["name"] != "sums"]
    graph = {name: whole[name] for name in ("operators", "edges")}
    file.write_text(json.dumps({**graph, "states": [*others, {**declared, "columns": fields, **more}]}))
    return file


def test_explain_restore_says_column_by_column_what_becomes_of_a_state(flights: Path, tmp_path: Path) -> None:
    file = declaring(flights, tmp_path / "topology.json", [("count", "int64"), ("new", "utf8")], renames={"n": "count"})
    refused = document("explain-restore", flights, "--topology", file, status=1)
    assert [(each["code"], each["details"]["columns"]) for each in refused["plan"]["refusals"]] == [
        ("column_missing", ["minutes"])
    ]
    drop = ("--drop", "delays/sums.minutes")
    found = document("explain-restore", flights, "--topology", file, *drop)
    (state,) = [item for item in found["states"] if (item["operator"], item["name"]) == ("delays", "sums")]
    actions = {column["column"] or column["saved"]: column["action"] for column in state["columns"]}
    assert actions == {"tailnum": "kept", "count": "renamed", "new": "added", "minutes": "dropped"}
    assert found["plan"]["drop"] == ["delays/sums.minutes"]
    text = page("explain-restore", flights, "--topology", file, *drop)
    for line in (
        "renamed  n int64 → count int64",
        "added    new string (null in older rows)",
        "dropped  minutes double",
    ):
        assert f"        {line}\n" in text


@pytest.mark.parametrize("name", ["delays/sums", "delays/sums.n"])
def test_what_is_given_up_goes_by_uid(flights: Path, name: str) -> None:
    by_name = document("explain-restore", flights, "--drop", name.replace("delays", "Delays per plane"))
    assert by_name["plan"]["drop"] == [name]


# ---- export


def sums_now() -> dict[str, tuple[int, float]]:
    """The state ``sums`` after base and delta."""
    rows = {stores.tail(i): (i, i / 4) for i in range(stores.PLANES)}
    rows |= {stores.tail(i): (1000 + i, 0.5) for i in range(10)}
    del rows[stores.tail(10)]
    return rows


def _read(path: Path) -> dict[str, tuple[int, float]]:
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
        assert list(rows[0]) == ["tailnum", "n", "minutes"]
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["tailnum"]: (int(row["n"]), float(row["minutes"])) for row in rows}


def test_export_merges_layers_in_every_format(flights: Path, tmp_path: Path) -> None:
    for suffix in ("parquet", "csv", "jsonl"):
        target = tmp_path / f"sums.{suffix}"
        found = document("export", flights, *SUMS, "--to", target)
        assert (found["rows"], found["format"], found["bytes"]) == (59, suffix, target.stat().st_size)
        assert _read(target) == sums_now()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sums.csv", "sums.jsonl", "sums.parquet"]


def test_export_of_one_subtask_is_its_share(flights: Path, tmp_path: Path) -> None:
    rows: dict[str, tuple[int, float]] = {}
    for subtask in range(4):
        target = tmp_path / f"{subtask}.jsonl"
        text = page("export", flights, *SUMS, "--subtask", subtask, "--to", target)
        mine = _read(target)
        assert mine
        assert not mine.keys() & rows.keys()
        assert text.startswith("Exported from checkpoint 2\n")
        assert f"  state  delays / sums, subtask {subtask}\n" in text
        assert f"{len(mine)} rows · {target.stat().st_size} B of jsonl" in text
        rows |= mine
    assert rows == sums_now()


def test_export_to_standard_output_is_nothing_but_data(flights: Path) -> None:
    found = run("export", flights, "--operator", "airlines", "--state", "names", "--to", "-", "--as", "csv")
    assert found.out == '"carrier","name"\n"AA","American"\n"B6","JetBlue"\n'
    assert found.err == "2 rows of airlines/names, checkpoint 2\n"
    nested = run("export", flights, "--operator", "delays", "--state", "last", "--to", "-", "--as", "jsonl")
    rows = [json.loads(line) for line in nested.out.splitlines()]
    assert {len(row["raw"]) for row in rows} == {4}
    assert len(rows) == 2 * stores.PLANES


def test_export_replaces_nothing_unless_told_to(flights: Path, tmp_path: Path) -> None:
    target = tmp_path / "there.csv"
    target.write_text("precious")
    arguments = ("export", flights, "--operator", "rates", "--state", "limits", "--to", target)
    assert "--force" in failure(*arguments, status=2)["message"]
    assert target.read_text() == "precious"
    page(*arguments, "--force")
    assert target.read_text().count("\n") == 5


def test_an_export_goes_into_a_plain_file_only(flights: Path, tmp_path: Path) -> None:
    what = ["export", flights, *SUMS, "--as", "csv", "--force", "--to"]
    assert "is a directory; name a file in it" in failure(*what, tmp_path, status=2)["message"]
    link = tmp_path / "nothing"
    link.symlink_to("/dev/null")
    assert "is not a regular file" in failure(*what, link, status=2)["message"]
    assert link.is_symlink()
    missing = failure(*what, tmp_path / "no" / "x.csv", status=3)["message"]
    assert missing.startswith(f"{tmp_path / 'no'}: no such directory; make it")


def test_what_is_no_text_is_not_written_as_text(tmp_path: Path) -> None:
    forger = Forger(stores.flights_store(str(tmp_path / "flights")).storage, 2)
    at = forger.find("airlines", "names", 1)
    rows = forger.table_of(at)
    name = rows.schema.get_field_index("name")
    forger.set_rows(at, rows.set_column(name, "name", pa.array([b"\xff\xfe"] * len(rows)).view(pa.string())))
    forger.seal()
    state = (tmp_path / "flights", "--operator", "airlines", "--state", "names")
    for command in (("inspect", *state, "--rows", 1), ("export", *state, "--to", tmp_path / "x.csv")):
        error = failure(*command, status=1)
        assert error["kind"] == "damaged_segment"
        assert "cannot be written as text: In column 1: Invalid: Invalid UTF8" in error["message"]


def test_an_export_that_fails_half_way_leaves_no_file(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    stores.counts_job(keys=2000).publish(open_store(str(store)), None, options=WriteOptions(inline_bytes_max=0))
    victim = sorted((store / "segments").rglob("*.parquet"))[1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    out.mkdir()
    error = failure("export", store, "--operator", "counter", "--state", "counts", "--to", out / "x.jsonl", status=1)
    assert victim.name in error["message"]
    assert list(out.iterdir()) == []
