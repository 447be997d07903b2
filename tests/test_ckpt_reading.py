"""The commands that only look: history, inspect, validate, explain-restore, export; on real stores, in a process of their own."""

from __future__ import annotations

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
from tests.ckpt_runs import document, failure, fingerprint, page, run, run_program, topology_without
from tests.forgery import Forger


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two checkpoints with everything in it. These tests leave it as it is, and the fixture sees to that."""
    folder = tmp_path_factory.mktemp("reading") / "flights"
    stores.flights_store(str(folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _unchanged(flights: Path) -> Any:
    before = fingerprint(flights)
    yield
    assert fingerprint(flights) == before


def section(text: str, title: str) -> list[str]:
    """The lines of a page from a title to the next line that stands at the margin."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next((i for i in range(start + 1, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    return lines[start:end]


# ---- history ---------------------------------------------------------------------------------------------------------


def test_history_lists_the_chain_newest_first(flights: Path) -> None:
    found = document("history", flights)
    assert [entry["checkpoint_id"] for entry in found["checkpoints"]] == [2, 1]
    newest, first = found["checkpoints"]
    assert (newest["operators"], newest["finished"], newest["partially_finished"]) == (7, 1, 2)
    assert newest["parent"] == {"checkpoint_id": 1, "attempt_id": first["attempt_id"]}
    assert first["parent"] is None
    assert (found["job_id"], found["job_name"], found["strays"]) == ("flights-job", "Flights", [])
    text = page("history", flights)
    rows = [line.split() for line in text.splitlines() if "checkpoint " in line]
    assert [row[0] for row in rows] == ["2", "1"]
    assert "1 of 7, 2 partly" in text


def test_history_can_be_cut_and_then_looks_for_no_strays(flights: Path) -> None:
    found = document("history", flights, "--limit", 1)
    assert [entry["checkpoint_id"] for entry in found["checkpoints"]] == [2]
    assert found["strays"] is None


def test_history_names_strays(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.counts_store(str(store), checkpoints=3)
    other = tmp_path / "other"
    stores.counts_store(str(other), checkpoints=2)
    record = "checkpoints/00000000000000000002.json"
    (store / record).write_bytes((other / record).read_bytes())
    found = document("history", store)
    assert [entry["checkpoint_id"] for entry in found["checkpoints"]] == [3]
    assert [stray["checkpoint_id"] for stray in found["strays"]] == [1, 2]
    assert "2 strays, no checkpoint: 1 (attempt" in page("history", store)


# ---- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_shows_the_graph_with_what_has_finished(flights: Path) -> None:
    text = page("inspect", flights)
    lines = section(text, "Job graph")
    assert lines[2:10] == [
        "          operator                   subtasks  max  status",
        "  ●       planes                            4  128  finished",
        "  │ ◐     flights                           4  128  3 of 4 finished: 0-2",
        "  │ │       coordinator",
        "  │ │ ◐   airlines                          4  128  1 of 4 finished: 0",
        "  │ │ │     finishing: 2",
        "  │ │ │ ○ rates                             4  128  running",
        "  ├─┴─┴─╯",
    ]
    assert "  ○       Delays per plane (delays)         4  128  running" in lines
    assert any("↺ alerts hash by tailnum (feedback)" in line for line in lines)


def test_inspect_shows_every_state_with_its_rows_and_skew(flights: Path) -> None:
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
    text = "\n".join(section(page("inspect", flights), "States"))
    assert "layers    base 60 rows" in text
    assert "key       tailnum utf8, _map_key int8" in text
    assert "columns   route list<utf8>, raw binary" in text


def test_inspect_of_an_older_checkpoint_has_its_facts(flights: Path) -> None:
    found = document("inspect", f"{flights}@1")
    assert (found["checkpoint_id"], found["parent"], found["stop"]) == (1, None, None)
    assert found["properties"] == {"owner": "ann", "purpose": "nightly run"}
    assert found["required_features"] == ["committables", "in_flight"]
    text = page("inspect", f"{flights}@1")
    assert "checkpoint, without a parent" in text
    assert "  properties  owner = ann\n              purpose = nightly run\n" in text


@pytest.mark.parametrize("given", ["delays", "Delays per plane"])
def test_inspect_narrows_by_uid_or_name_and_shows_subtasks_and_rows(flights: Path, given: str) -> None:
    found = document("inspect", flights, "--operator", given, "--state", "last", "--rows", 3)
    assert found["selection"] == {"operator": "delays", "state": "last"}
    (state,) = found["states"]
    assert len(state["sample"]) == 3
    assert all(int(row["raw"], 16) % 256 == 255 for row in state["sample"])
    assert all(row["route"] in (None, ["EWR", "IAH"]) for row in state["sample"])
    text = page("inspect", flights, "--operator", given, "--state", "last", "--rows", 3)
    assert "planes" not in "".join(line for line in text.splitlines() if "●" in line)
    assert "subtask  rows" in text
    assert '["EWR", "IAH"]' in text


def test_inspect_shows_rows_too_wide_for_a_table_one_by_one(tmp_path: Path) -> None:
    store = tmp_path / "wide"
    job = stores.counts_job()
    long = {("counter", "counts"): lambda i: stores.owned(_long_words(), ["word"], job.graph.operators[1], i)}
    stores.Job(job.job_id, job.graph, job.states, long).publish(open_store(str(store)), None)
    text = page("inspect", store, "--rows", 1)
    assert "      row 1\n" in text
    assert "x" * 60 in text


def _long_words() -> Any:
    import pyarrow as pa

    return pa.table({"word": ["x" * 200, "y" * 200], "n": pa.array([1, 2], pa.int64())})


def test_a_page_takes_the_width_and_characters_that_it_is_given(flights: Path) -> None:
    wide = page("inspect", flights, COLUMNS="110")
    assert max(map(len, wide.splitlines())) > 80
    assert max(map(len, wide.splitlines())) <= 110
    plain = run_program("inspect", flights, PYTHONIOENCODING="ascii").out
    assert plain.isascii()
    assert "  | +     flights" in plain
    assert "\x1b" not in page("inspect", flights, FORCE_COLOR="1")


def test_a_checkpoint_of_strangers_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    store = tmp_path / "strange"
    stores.counts_job().publish(open_store(str(store)), None, properties={"a\x1b[2J": "b\nc"})
    assert "a\\x1b[2J = b\\nc" in page("inspect", store)
    assert document("inspect", store)["properties"] == {"a\x1b[2J": "b\nc"}


# ---- validate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_whole_checkpoint_has_no_problems(flights: Path, level: str) -> None:
    found = document("validate", flights, "--level", level)
    assert (found["ok"], found["problems"], found["level"], found["checkpoint_id"]) == (True, [], level, 2)
    assert found["checked"]["segments"] == 40
    assert (found["checked"]["rows"] > 0) is (level == "full")
    assert page("validate", flights, "--level", level).splitlines()[-1] == "  ✓ no problems"


def test_validate_finds_everything_at_once_and_says_what_to_do(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.flights_job().publish(open_store(str(store)), None, options=WriteOptions(inline_bytes_max=0))
    first, second, *_ = sorted((store / "segments").rglob("*delays*sums*.parquet"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    found = document("validate", store, "--level", "full", status=1)
    assert {problem["kind"] for problem in found["problems"]} >= {"object_missing", "object_size_differs"}
    assert {Path(problem["path"]).name for problem in found["problems"]} == {first.name, second.name}
    for problem in found["problems"]:
        assert problem["clause"].startswith("SPEC ")
        assert (problem["operator"], problem["state"]) == ("delays", "sums")
        assert problem["advice"]
    text = page("validate", store, status=1)
    assert text.splitlines()[-1] == f"  ✗ {len(found['problems'])} problems"
    assert "object_missing" in text


# ---- explain-restore -------------------------------------------------------------------------------------------------


def test_explain_restore_shows_who_would_read_what(flights: Path) -> None:
    found = document("explain-restore", flights, "--parallelism", 6)
    assert found["refused"] is False
    actions = {operator["uid"]: operator["action"] for operator in found["plan"]["operators"]}
    assert actions == dict.fromkeys(actions, "start") | {"planes": "skip_finished"}
    load = {entry["operator"]: entry["subtasks"] for entry in found["load"]}
    assert set(load) == set(actions) - {"planes"}
    assert all(len(subtasks) == 6 for subtasks in load.values())
    assert [entry["rows"] for entry in load["rates"]] == [4] * 6
    assert [entry["rows"] for entry in load["airlines"]] == [2] * 6
    assert sum(entry["rows"] for entry in load["flights"]) == 4
    rules = {(state["operator"], state["name"]): state["rule"] for state in found["states"]}
    assert rules["delays", "sums"] == "key groups are cut anew for 6 subtasks"
    assert rules["planes", "splits"] == "none: the operator has finished"
    assert found["committable_rows"] == 2
    text = page("explain-restore", flights, "--parallelism", 6)
    assert "  restore          possible\n" in text
    assert "  not started      planes (finished)\n" in text
    assert "4 → 6 of 128" in text


def test_explain_restore_gives_every_reason_why_not(flights: Path) -> None:
    found = document("explain-restore", flights, "--operator-parallelism", "Delays per plane=129", status=1)
    assert found["refused"] is True
    codes = {(refusal["code"], refusal["operator"]) for refusal in found["plan"]["refusals"]}
    assert codes == {("parallelism_above_max", "delays")}
    text = page("explain-restore", flights, "--parallelism", 129, status=1)
    assert "  restore          refused\n" in text
    assert text.count("✗ parallelism_above_max") == 6
    assert "→ Choose at most 128" in text


def test_explain_restore_of_a_changed_max_parallelism_is_refused_where_there_are_keys(flights: Path) -> None:
    found = document("explain-restore", flights, "--max-parallelism", 256, status=1)
    assert {(refusal["code"], refusal["operator"]) for refusal in found["plan"]["refusals"]} == {
        ("max_parallelism_changed", "delays")
    }


def test_what_inspect_prints_is_a_topology_file(flights: Path, tmp_path: Path) -> None:
    topology = tmp_path / "topology.json"
    topology.write_text(run("inspect", flights, "--format", "json").out)
    same = document("explain-restore", flights, "--topology", topology)
    assert same["refused"] is False
    assert {operator["old_parallelism"] == operator["parallelism"] for operator in same["plan"]["operators"]} == {True}


def test_a_topology_without_an_operator_needs_its_state_to_be_given_up(flights: Path, tmp_path: Path) -> None:
    topology = topology_without("rates", flights, tmp_path / "topology.json")
    refused = document("explain-restore", flights, "--topology", topology, status=1)
    assert [refusal["code"] for refusal in refused["plan"]["refusals"]] == ["operator_missing"]
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
    found = document("explain-restore", flights, "--topology", topology, status=1)
    (refusal,) = found["plan"]["refusals"]
    assert refusal["code"] == "schema_cannot_evolve"
    assert "'n' was int64 and would be utf8" in refusal["message"]


def declaring(flights: Path, file: Path, columns: Sequence[tuple[str, str]], **said: Any) -> Path:
    """A topology file whose operator `delays` declares its state `sums` as a program does."""
    whole = document("inspect", flights)
    (sums,) = [item for item in whole["states"] if (item["operator"], item["name"]) == ("delays", "sums")]
    keys = [item for item in sums["schemas"][-1]["fields"] if item["name"] in sums["key_columns"]]
    declared = {name: sums[name] for name in ("operator", "name", "mode", "kind", "key_columns")}
    fields = [{"name": item["name"], "type": item["type"]} for item in keys]
    fields += [{"name": name, "type": kind} for name, kind in columns]
    parts = {name: whole[name] for name in ("operators", "edges")}
    others = [item for item in whole["states"] if item["operator"] == "delays" and item is not sums]
    file.write_text(json.dumps({**parts, "states": [*others, {**declared, "columns": fields, **said}]}))
    return file


def test_explain_restore_says_column_by_column_what_becomes_of_a_state(flights: Path, tmp_path: Path) -> None:
    (sums,) = [
        item
        for item in document("inspect", flights)["states"]
        if (item["operator"], item["name"]) == ("delays", "sums")
    ]
    old = [item["name"] for item in sums["schemas"][-1]["fields"] if item["name"] not in sums["key_columns"]]
    file = declaring(flights, tmp_path / "topology.json", [("count", "int64"), ("new", "utf8")], renames={"n": "count"})
    gone = [name for name in old if name != "n"]
    refused = document("explain-restore", flights, "--topology", file, status=1)
    assert [(each["code"], each["details"]["columns"]) for each in refused["plan"]["refusals"]] == [
        ("column_missing", gone)
    ]
    drops = [word for name in gone for word in ("--drop", f"delays/sums.{name}")]
    found = document("explain-restore", flights, "--topology", file, *drops)
    (state,) = [item for item in found["states"] if (item["operator"], item["name"]) == ("delays", "sums")]
    actions = {column["column"] or column["saved"]: column["action"] for column in state["columns"]}
    assert actions == {
        **dict.fromkeys(sums["key_columns"], "kept"),
        "count": "renamed",
        "new": "added",
        **dict.fromkeys(gone, "dropped"),
    }
    assert found["plan"]["drop"] == sorted(f"delays/sums.{name}" for name in gone)
    text = page("explain-restore", flights, "--topology", file, *drops)
    assert "        renamed  n int64 → count int64\n" in text
    assert "        added    new string (null in older rows)\n" in text
    assert all(f"        dropped  {name} " in text for name in gone)


def test_a_column_can_be_given_up_by_name_and_one_that_never_was_cannot(flights: Path) -> None:
    text = page("explain-restore", flights, "--drop", "Delays per plane/sums.n")
    assert "        dropped  n int64\n" in text
    assert "given up         delays/sums.n\n" in text
    for wrong, told in (("delays/sums.zz", "never had a column 'zz'"), ("delays/zz.n", "has no state 'zz.n'")):
        assert told in failure("explain-restore", flights, "--drop", wrong, status=2)["message"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
        ('{"operators": [], "states": [{"columns": [], "schema": []}]}', "states[0].schema is unknown"),
        ('{"operators": [], "states": [{"columns": [], "renames": {"a": 1}}]}', "states[0].renames has 1 for 'a'"),
        ('{"operators": [{"uid": "a"}]}', "operators[0].parallelism is missing"),
        ('{"operators": [{"uid": "a", "paralelism": 1}]}', "operators[0].paralelism is unknown"),
        (
            '{"operators": [], "edges": [{"id": "e", "from": "a", "to": "b", "partitioner": "x"}]}',
            "edges[0].partitioner",
        ),
    ],
)
def test_a_topology_file_that_is_none_is_misuse(flights: Path, tmp_path: Path, content: str, told: str) -> None:
    topology = tmp_path / "topology.json"
    topology.write_text(content)
    error = failure("explain-restore", flights, "--topology", topology, status=2)
    assert told in error["message"]
    assert str(topology) in error["message"]


# ---- export ----------------------------------------------------------------------------------------------------------


def sums_now() -> dict[str, tuple[int, float]]:
    """The state ``sums`` as it stands after base and delta."""
    rows = {stores.tail(i): (i, i / 4) for i in range(stores.PLANES)}
    rows |= {stores.tail(i): (1000 + i, 0.5) for i in range(10)}
    del rows[stores.tail(10)]
    return rows


def test_export_merges_layers_in_every_format(flights: Path, tmp_path: Path) -> None:
    found = {}
    for suffix in ("parquet", "csv", "jsonl"):
        target = tmp_path / f"sums.{suffix}"
        told = document("export", flights, "--operator", "delays", "--state", "sums", "--to", target)
        assert (told["rows"], told["format"], told["bytes"]) == (59, suffix, target.stat().st_size)
        found[suffix] = _read(target)
    assert found["parquet"] == found["csv"] == found["jsonl"] == sums_now()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sums.csv", "sums.jsonl", "sums.parquet"]


def _read(path: Path) -> dict[str, tuple[int, float]]:
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
        assert list(rows[0]) == ["tailnum", "n", "minutes"]
    elif path.suffix == ".csv":
        import csv

        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["tailnum"]: (int(row["n"]), float(row["minutes"])) for row in rows}


def test_export_of_one_subtask_is_its_share(flights: Path, tmp_path: Path) -> None:
    rows: dict[str, tuple[int, float]] = {}
    for subtask in range(4):
        target = tmp_path / f"{subtask}.jsonl"
        page("export", flights, "--operator", "delays", "--state", "sums", "--subtask", subtask, "--to", target)
        mine = _read(target)
        assert mine
        assert not mine.keys() & rows.keys()
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
    error = failure(*arguments, status=2)
    assert "--force" in error["message"]
    assert target.read_text() == "precious"
    page(*arguments, "--force")
    assert target.read_text().count("\n") == 5


def test_what_is_no_text_is_not_written_as_text(tmp_path: Path) -> None:
    store = tmp_path / "flights"
    forger = Forger(stores.flights_store(str(store)).storage, 2)
    at = forger.find("airlines", "names", 1)
    rows = forger.table_of(at)
    name = rows.schema.get_field_index("name")
    forger.set_rows(at, rows.set_column(name, "name", pa.array([b"\xff\xfe"] * len(rows)).view(pa.string())))
    forger.seal()
    state = ("--operator", "airlines", "--state", "names")
    for command in (("inspect", store, *state, "--rows", 1), ("export", store, *state, "--to", tmp_path / "x.csv")):
        error = failure(*command, status=1)
        assert error["kind"] == "damaged_segment"
        assert "cannot be written as text: In column 1: Invalid: Invalid UTF8" in error["message"]


def test_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.counts_job(keys=2000).publish(open_store(str(store)), None, options=WriteOptions(inline_bytes_max=0))
    victim = sorted((store / "segments").rglob("*.parquet"))[1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    error = failure("export", store, "--operator", "counter", "--state", "counts", "--to", out / "x.jsonl", status=1)
    assert victim.name in error["message"]
    assert list(out.iterdir()) == []
    missing = failure(
        "export", store, "--operator", "counter", "--state", "counts", "--to", tmp_path / "no" / "x.csv", status=3
    )
    assert str(tmp_path / "no") in missing["message"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--operator", "delays", "--state", "sums", "--to", "x.txt"], "--as"),
        (["--operator", "delays", "--state", "sums", "--to", "-", "--as", "parquet"], "standard output"),
        (["--operator", "delays", "--state", "nope", "--to", "x.csv"], "it has 'sums', 'by_month'"),
        (["--operator", "nope", "--state", "sums", "--to", "x.csv"], "delays (Delays per plane)"),
        (["--operator", "delays", "--state", "sums", "--subtask", "4", "--to", "x.csv"], "subtasks 0 to 3"),
    ],
)
def test_export_of_what_is_not_there_is_misuse(flights: Path, arguments: list[str], told: str) -> None:
    error = failure("export", flights, *arguments, status=2)
    assert told in error["message"]
