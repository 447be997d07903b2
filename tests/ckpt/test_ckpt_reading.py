"""The commands that only read: history, inspect, validate, explain-restore, export. Their pages:
``test_ckpt_pages``.

What ``ckpt inspect`` says of the states that a runtime keeps: timers, watermarks, committables,
records in flight. States whose rows expire: hidden, shown with ``--with-expired``, counted by
``ckpt inspect``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.graph import JobGraph
from stateformat.inspecting import contents as contents_of
from stateformat.model import Stop, StopMode
from stateformat.pages.blocks import Facts
from stateformat.pages.checkpoint import LINES_SHOWN as LINES, _holds, contents_facts, contents_table
from stateformat.segments import WriteOptions
from stateformat.states import declare, list_state
from stateformat.store import open as open_store
from stateformat.tools.ckpt.text import Look, lines as drawn_lines
from stateformat.words import precise_moment
from tests.ckpt.ckpt_runs import document, failure, page, run, state_of, topology_without, words
from tests.forgery import Forger
from tests.worlds import stores

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
        assert f"      {line}\n" in text


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


END = 2**63 - 1


def contents(store: Path, operator: str, state: str) -> Any:
    """As the command has it."""
    checkpoint = open_store(str(store)).open()
    declared = checkpoint.record.state(operator, state)
    return contents_of(checkpoint, declared, checkpoint.read(operator, state).table().num_rows)


def lines(store: object, operator: str, state: str) -> str:
    return " ".join(page("inspect", store, "--operator", operator, "--state", state).split())


def test_the_first_page_counts_what_a_run_uses_up_and_opens_no_segment(flights: Path) -> None:
    found = document("inspect", flights)
    assert not any("contents" in state for state in found["states"])
    assert document("inspect", flights, "--state", "names")["holds"] == found["holds"], "whatever is selected"


def test_a_checkpoint_without_any_of_it_says_nothing(counts: Path) -> None:
    assert document("inspect", counts)["holds"] == {"timers": 0, "in_flight": [], "committables": 0}
    assert "holds" not in page("inspect", counts)
    assert state_of(counts, "counter", "counts")["contents"] is None


def test_the_command_tells_of_each_state_that_was_chosen(flights: Path) -> None:
    found = document("inspect", flights, "--operator", "delays")["states"]
    assert {state["name"] for state in found if state["contents"]} == {"wake", "progress", "overtaken"}
    for state in found:
        assert state["contents"] == contents(flights, "delays", state["name"])
    assert contents(flights, "flights", "unassigned") is None, "a coordinator of another runtime means nothing to us"


def test_timers_that_a_layer_has_deleted_are_not_due(tmp_path: Path) -> None:
    state = declare.timers("counter", "wake", keys={"word": pa.string()})
    job = stores.counts_job(parallelism=1)
    word, empty = ["a", "b", "c"], {"word": pa.array([], pa.string()), "_timestamp": pa.array([], pa.int64())}
    rows: dict[tuple[str, str], Any] = {
        ("counter", "wake"): lambda _: pa.table({"word": word, "_timestamp": [1, 2, 3_500_000], "_tag": [""] * 3})
    }
    gone = {"word": ["a"], "_timestamp": [1], "_tag": [""], "_op": pa.array([1], pa.int8())}
    job = stores.Job(job.job_id, job.graph, (state,), rows)
    store = open_store(str(tmp_path))
    job.publish(store, job.publish(store, None), deltas={("counter", "wake"): lambda _: pa.table(gone)})
    found = contents(tmp_path, "counter", "wake")
    assert (found["timers"], found["first_us"], found["last_at"]) == (2, 2, "1970-01-01T00:00:03.500000Z")
    assert document("inspect", tmp_path)["holds"]["timers"] == 4, "the manifest counts the rows of all layers"
    rows["counter", "wake"] = lambda _: pa.table({**empty, "_tag": pa.array([], pa.string())})
    job.publish(store, store.start(job.job_id))
    none = dict.fromkeys(("first_at", "first_us", "last_at", "last_us"))
    assert contents(tmp_path, "counter", "wake") == {"timers": 0, **none}
    assert "due" not in lines(tmp_path, "counter", "wake")


def test_an_input_has_ended_only_where_all_subtasks_say_so(tmp_path: Path) -> None:
    job = stores.counts_job(parallelism=2)
    state = declare.progress_state("counter")
    ended = {0: True, 1: False}

    def rows(subtask: int) -> pa.Table:
        return pa.table({"_edge": ["lines-counter"], "_watermark": [END - subtask], "_ended": [ended[subtask]]})

    stores.Job(job.job_id, job.graph, (state,), {("counter", "progress"): rows}).publish(
        open_store(str(tmp_path)), None
    )
    (found,) = contents(tmp_path, "counter", "progress")["inputs"]
    assert (found["watermark_at"], found["watermark_us"], found["ended"]) == (f"{END - 1} us", END - 1, False)


def test_committables_come_with_what_they_were_prepared_under(tmp_path: Path) -> None:
    sink = stores.operator("sink", 2)
    state = declare.committables_state("sink", "prepared", columns={"file": pa.string()})
    rows = {("sink", "prepared"): lambda subtask: pa.table({"file": [f"{subtask}-{i}" for i in range(subtask + 1)]})}
    job = stores.Job("sinks", JobGraph((sink,)), (state,), rows)
    store = open_store(str(tmp_path))
    first = job.publish(store, None)
    pending = store.begin(job_id="sinks", graph=job.graph, states=job.states, parent=first)
    carried = first.checkpoint().read("sink", "prepared").table()
    for subtask in range(2):
        with pending.context.subtask("sink", subtask) as writer:
            writer.write("prepared", carried if subtask else pa.table({"file": ["new"]}))
        pending.add(writer)
    second = pending.publish()
    assert contents(tmp_path, "sink", "prepared") == {
        "prepared": [
            {"checkpoint_id": 1, "attempt_id": first.ref.attempt_id, "rows": 3},
            {"checkpoint_id": 2, "attempt_id": second.ref.attempt_id, "rows": 1},
        ]
    }
    text = lines(tmp_path, "sink", "prepared")
    assert f"prepared 3 committables under checkpoint 1, attempt {first.ref.attempt_id}" in text
    assert f"1 committable under checkpoint 2, attempt {second.ref.attempt_id}" in text


def test_messages_on_the_way_to_a_coordinator_are_counted(tmp_path: Path) -> None:
    source = stores.operator("source", 1, coordinator=True)
    columns = {"path": pa.string(), "message_from": pa.int32(), "message": pa.binary()}
    state = declare.coordinator_state("source", "splits", columns=columns)
    table = pa.table({"path": ["a", None, None], "message_from": [None, 0, 0], "message": [None, b"x", b""]})
    rows = {("source", "splits"): lambda _: table.cast(pa.schema(list(columns.items())))}
    stores.Job("source", JobGraph((source,)), (state,), rows).publish(open_store(str(tmp_path)), None)
    assert contents(tmp_path, "source", "splits") == {"messages": 2}
    assert "messages 2 messages on the way to the coordinator" in lines(tmp_path, "source", "splits")


def test_what_cannot_be_read_spoils_no_page(tmp_path: Path) -> None:
    stores.flights_job().publish(open_store(str(tmp_path)), None, options=WriteOptions(inline_bytes_max=0))
    for segment in (tmp_path / "segments").rglob("*delays*wake*.parquet"):
        segment.unlink()
    checkpoint = open_store(str(tmp_path)).open()
    found: Any = contents_of(checkpoint, checkpoint.record.state("delays", "wake"), 60)
    assert set(found) == {"unread"}
    assert "is missing from" in found["unread"]
    assert "contents not read: segments/" in lines(tmp_path, "delays", "wake")
    assert contents(tmp_path, "alerts", "overtaken")["channels"] == 4


def test_very_many_rows_are_not_read(flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("stateformat.inspecting.own_states"), "ROWS_MAX", 59)
    checkpoint = open_store(str(flights)).open()
    found = contents_of(checkpoint, checkpoint.record.state("delays", "wake"), 60)
    assert found == {"unread": "60 rows are too many to read here; `ckpt export` writes them to a file"}
    assert contents_of(checkpoint, checkpoint.record.state("delays", "wake"), 59) != found


def test_a_stop_stands_on_the_page(tmp_path: Path) -> None:
    stop = Stop(StopMode.DRAIN, "ab" * 16)
    stores.counts_job().publish(open_store(str(tmp_path)), None, stop=stop, finishing={"lines": [0, 1]})
    text = " ".join(page("inspect", tmp_path).split())
    assert f"stopped (drain), request {stop.request}" in text
    assert "finishing: 0-1" in text


def test_who_wrote_it_stands_on_the_page_and_in_json(tmp_path: Path) -> None:
    said = {
        "stateformat.program": "flights.py:flights",
        "stateformat.code": f"{'0f6e3a91c2d4' * 4:.40}-dirty",
        "stateformat.spark_application": "local-17",
        "stateformat.host": "h\x1b[1m",
        "stateformat.user": "me",
    }
    stores.counts_job().publish(open_store(str(tmp_path)), None, properties={**said, "mine": "1"})
    text = " ".join(page("inspect", tmp_path).split())
    origin = (
        "written by flights.py:flights · version 0f6e3a91c2d4-dirty · Spark application local-17 · on h\\x1b[1m · as me"
    )
    assert origin in text
    assert "stateformat.program" not in text
    assert "properties mine = 1" in text
    written = {name.removeprefix("stateformat."): value for name, value in said.items()}
    assert document("inspect", tmp_path)["written_by"] == written
    assert [entry["written_by"] for entry in document("history", tmp_path)["checkpoints"]] == [written]


# ---- pieces


def drawn(contents: Any, look: Look = Look()) -> Sequence[str]:  # noqa: B008 - frozen
    return [*drawn_lines([Facts([*contents_facts(contents)]), *contents_table(contents)], look)]


def test_long_lists_are_cut_and_say_so() -> None:
    prepared = [{"checkpoint_id": i, "attempt_id": "a" * 32, "rows": 1} for i in range(LINES + 3)]
    assert len(drawn({"prepared": prepared}, Look(width=120))) == LINES + 1
    assert "and 3 more (--format json" in drawn({"prepared": prepared})[-1]
    inputs = [
        {"edge": f"{i}" * 99, "watermark_at": "none", "watermark_us": None, "ended": True} for i in range(LINES + 1)
    ]
    found = drawn({"inputs": inputs})
    assert len(found) == LINES + 3
    assert max(map(len, found)) <= 80
    assert "and 1 more" in found[-1]


def test_strangers_texts_break_no_line() -> None:
    inputs = [{"edge": "a\nb", "watermark_at": "end", "watermark_us": None, "ended": True}]
    assert drawn({"inputs": inputs})[-1].split("  ")[1] == "a\\nb"
    assert drawn({"unread": "a\x1b[2Jb"}) == ["  contents  not read: a\\x1b[2Jb"]


def test_one_of_each_is_in_the_singular() -> None:
    holds = {"timers": 1, "committables": 1, "in_flight": [{"rows": 1}, {"rows": 0}]}
    assert _holds(holds) == "1 timer · 1 record in flight on 1 edge · 1 committable"
    times = {"timers": 1, "first_at": "2013-01-01T00:00:00Z", "last_at": "2013-01-01T00:00:00Z"}
    assert drawn(times) == ["  due  2013-01-01 00:00:00, 1 timer"]


@pytest.mark.parametrize(
    ("event_time_us", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (-1, "1969-12-31T23:59:59.999999Z"),
        (1_356_998_400_000_000, "2013-01-01T00:00:00Z"),
        (2**62, f"{2**62} us"),
        (-(2**62), f"{-(2**62)} us"),
    ],
)
def test_event_times_are_exact_and_may_lie_beyond_the_calendar(event_time_us: int, text: str) -> None:
    assert precise_moment(event_time_us) == text


HOUR = 3_600_000_000
NOON = 1_790_000_000_000_000
TIMES = "ttl_last_access"


def visits(ttl: sf.Ttl | None) -> sf.State:
    return list_state("counter", "visits", keys={"user": pa.string()}, values={"page": pa.int64()}, ttl=ttl)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Two checkpoints, half an hour apart; in each the rows of "ann" and "bob" are the same."""
    url = str(tmp_path / "store")
    graph = sf.JobGraph((sf.Operator("counter", 1, 8),))
    permit = None
    for now in (NOON, NOON + HOUR // 2):
        pending = sf.open(url).begin(
            job_id="j", graph=graph, states=[visits(sf.Ttl(HOUR, "processing_time", "read_and_write"))], parent=permit
        )
        with pending.context.subtask("counter", 0) as writer:
            times = [NOON - HOUR, NOON - HOUR // 2, NOON - HOUR // 2, NOON]
            writer.write(
                "visits",
                pa.table(
                    {
                        "user": ["ann", "ann", "bob", "bob"],
                        "_index": pa.array([0, 1, 0, 1], pa.int64()),
                        "page": pa.array([1, 2, 3, 4], pa.int64()),
                        TIMES: pa.array(times, pa.timestamp("us")),
                    }
                ),
            )
        pending.add(writer)
        pending.set_now("counter", processing_time_us=now)
        permit = pending.publish()
    return url


AT = ("--operator", "counter", "--state", "visits")


def test_inspect_says_how_long_rows_live_and_how_many_go(store: str) -> None:
    (state,) = document("inspect", store)["states"]
    assert state["ttl"] == {
        "field": 3,
        "duration_us": HOUR,
        "clock": "processing_time",
        "refresh": "read_and_write",
        "now_us": NOON + HOUR // 2,
        "now_at": "2026-09-21T14:43:20Z",
    }
    assert "1 hour · processing time" in words("inspect", store)
    (state,) = document("inspect", store, *AT)["states"]
    assert state["contents"] == {"rows": 4, "expired": 3}
    narrowed = words("inspect", store, *AT)
    assert "3 of 4 rows; the next base leaves them out" in narrowed
    assert "refreshed by reading too" in narrowed


@pytest.mark.parametrize(("more", "pages"), [((), [4]), (("--with-expired",), [1, 2, 3, 4])])
def test_what_had_expired_is_shown_only_when_it_is_asked_for(
    store: str, tmp_path: Path, more: tuple[str, ...], pages: list[int]
) -> None:
    (state,) = document("inspect", store, "--rows", 9, *more)["states"]
    assert sorted(row["page"] for row in state["sample"]) == pages
    document("export", store, *AT, "--to", tmp_path / "rows.parquet", *more)
    assert sorted(pq.read_table(tmp_path / "rows.parquet")["page"].to_pylist()) == pages
    answer = document("sql", store, "select page from counter.visits order by all", *more)
    assert [row["page"] for row in answer["rows"]] == pages
    (found,) = document("top", store, *more)["states"]
    assert found["keys"]["rows"] == len(pages)
    key = document("get", store, "--key", '"bob"', *more)
    assert sorted(row["page"] for row in key["rows"]) == [page for page in pages if page > 2]
    every = document("sql", store, "--all-checkpoints", "select _checkpoint_id as id, page from counter.visits", *more)
    assert len(every["rows"]) == (8 if more else 1 + 3)


def test_a_key_whose_rows_have_expired_has_none(store: str) -> None:
    assert run("get", store, "--key", '"ann"').status == 1
    assert run("get", store, "--key", '"ann"', "--with-expired").status == 0
    history = document("get", store, "--key", '"ann"', "--all")["history"]
    assert [(entry["checkpoint_id"], entry["event"]) for entry in history] == [(2, "removed"), (1, "added")]


def test_time_alone_makes_a_difference_between_two_checkpoints(store: str) -> None:
    found = run("diff", f"{store}@1", "@2", "--format", "json")
    (state,) = found.document["states"]
    assert found.status == 1
    assert (state["added"], state["removed"], state["changed"]) == (0, 2, 0)
    assert run("diff", f"{store}@1", "@2", "--with-expired").status == 0


def topology(ttl: dict[str, Any] | None) -> str:
    state: dict[str, Any] = {
        "operator": "counter",
        "name": "visits",
        "mode": "keyed",
        "kind": "list",
        "key_columns": ["user"],
        "columns": [{"name": "user", "type": "utf8"}, {"name": "page", "type": "int64"}],
    }
    state |= {"ttl": ttl} if ttl is not None else {}
    return json.dumps({"operators": [{"uid": "counter", "parallelism": 1}], "states": [state]})


@pytest.mark.parametrize(
    ("ttl", "message"),
    [
        ({"duration_us": 2 * HOUR, "clock": "processing_time"}, None),
        ({"duration_us": HOUR, "clock": "processing_time", "refresh": "write"}, None),
        ({"duration_us": HOUR}, "expire by processing time and would by event time"),
        (None, "expire 1 hour after their last access in the checkpoint, and the program declares no ttl"),
    ],
)
def test_a_plan_says_what_becomes_of_the_ttl(
    store: str, tmp_path: Path, ttl: dict[str, Any] | None, message: str | None
) -> None:
    (tmp_path / "job.json").write_text(topology(ttl))
    found = run("explain-restore", store, "--topology", tmp_path / "job.json")
    assert found.status == (0 if message is None else 1)
    if message is not None:
        assert message in " ".join(found.out.split())
        given_up = run(
            "explain-restore", store, "--topology", tmp_path / "job.json", "--drop", f"counter/visits.{TIMES}"
        )
        assert given_up.status == 0, given_up.out


def test_a_page_of_the_checkpoint_is_a_topology(store: str, tmp_path: Path) -> None:
    (tmp_path / "same.json").write_text(run("inspect", store, "--format", "json").out)
    assert run("explain-restore", store, "--topology", tmp_path / "same.json").status == 0


def test_rescale_copy_and_rollback_keep_what_has_expired(store: str, tmp_path: Path) -> None:
    for command in (
        ("rescale", store, "--parallelism", "3", "--prove"),
        ("rewrite", store, "--max-parallelism", "16", "--prove"),
        ("copy", store, tmp_path / "copy", "--prove"),
        ("rollback", f"{store}@2"),
    ):
        assert run(*command).status == 0, command
        here = str(tmp_path / "copy") if command[0] == "copy" else store
        (state,) = document("inspect", here, *AT)["states"]
        assert (state["ttl"]["duration_us"], state["ttl"]["now_us"]) == (HOUR, NOON + HOUR // 2)
        assert state["contents"] == {"rows": 4, "expired": 3}
        assert run("validate", here, "--level", "full").status == 0


def test_a_report_says_how_long_rows_live_and_what_time_it_was(store: str, tmp_path: Path) -> None:
    assert run("report", store, "--to", tmp_path / "page.html").status == 0
    told = "1 hour · processing time · refreshed by reading too · now 2026-09-21 14:43:20"
    assert told in " ".join((tmp_path / "page.html").read_text().split())


def test_a_diff_tells_that_rows_live_longer(store: str) -> None:
    now = sf.open(store)
    permit = now.start("j")
    checkpoint = now.open()
    longer = visits(sf.Ttl(2 * HOUR, "processing_time"))
    pending = now.begin(job_id="j", graph=checkpoint.graph, states=[longer], parent=permit)
    with pending.context.subtask("counter", 0) as writer:
        rows = checkpoint.with_expired().state("counter", "visits").table()
        writer.write("visits", rows)
    pending.add(writer)
    pending.publish()
    (state,) = document("diff", f"{store}@2", "@3", "--with-expired", status=1)["states"]
    assert (state["change"], state["added"], state["removed"]) == ("changed", 0, 0)
    (member,) = state["declared"]
    assert member == {
        "member": "ttl",
        "before": "1 hour after its last access, by processing time",
        "after": "2 hours after it was written, by processing time",
    }
    assert "2 hours after it was written" in words("diff", f"{store}@2", "@3", "--with-expired", status=1)
