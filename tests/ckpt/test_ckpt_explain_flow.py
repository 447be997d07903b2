"""``ckpt explain-restore --flow``: whether a program can go on from a store, column by column."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.local import LocalRuntime, VirtualClock
from stateformat.backends.runtime import Options, restore
from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.model import StopMode
from stateformat.tools.ckpt.functions import FunctionName
from stateformat.tools.ckpt.programs import dataflow_of
from tests.ckpt.ckpt_runs import document, failure, fingerprint, run, words

GOLDEN = Path(__file__).parents[1] / "golden/v1"
JOBS = """
import pyarrow as pa
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow, Operator, ValueState


class Count(Operator):
    state = "totals"

    def __init__(self, columns, **changes):
        self.columns, self.changes = columns, changes

    def output_schema(self, *inputs):
        return inputs[0]

    def states(self, *inputs):
        if self.columns is None:
            raise KeyError("what states?")
        return [ValueState(self.state, {"shard": pa.int32()}, self.columns, **self.changes)]

    def process(self, batch, input):
        keys = pa.record_batch([pa.array(sorted({*batch["shard"].to_pylist()}), pa.int32())], names=["shard"])
        values = [pa.array([1] * keys.num_rows).cast(kind) for kind in self.columns.values()]
        self.context.value_state(self.state).put(keys, pa.record_batch(values, names=list(self.columns)))
        yield batch


BEFORE = {"n": pa.int32(), "old": pa.int64()}


def make(columns=BEFORE, *, job="counts", uid="count", rate=2000, **changes):
    flow = Dataflow(job, parallelism=2)
    numbers = flow.source(RateSource(total=rate, shards=4), uid="numbers")
    counted = numbers.key_by("shard").apply(Count(columns, **changes), uid=uid, name="Counts")
    counted.apply(FileSink("OUT", durable=False), uid="out")
    return flow


def before():
    return make()


def chatty():
    print("made")
    return make()


def after():
    return make({"count": pa.int64(), "seen": pa.int64()}, renames={"n": "count"}, defaults={"seen": "0"}, drops=["old"])


def added():
    flow = make()
    more = flow.source(RateSource(total=5, shards=1), uid="more")
    more.key_by("shard").apply(Count(BEFORE), uid="more counts").apply(FileSink("OUT2", durable=False), uid="more out")
    return flow


class OfSpark(RateSource):
    read_by = "SparkRuntime"


def for_spark():
    flow = Dataflow("counts", parallelism=2)
    flow.source(OfSpark(total=5), uid="numbers").apply(FileSink("OUT", durable=False), uid="out")
    return flow


def endless():
    flow = Dataflow("counts", parallelism=2)
    numbers = flow.source(RateSource(shards=4), uid="numbers")
    numbers.key_by("shard").window(1_000_000, "at", {"n": ("*", "count")}, uid="w")
    return flow


def lost():
    return make({"n": pa.int32()})


def with_profiles():
    Count.state = "profile"
    return make()


def retyped():
    return make({"n": pa.string(), "old": pa.int64()})


def renamed():
    return make(uid="counts")


def another_job():
    return make(job="others")


def typo():
    return make(drops=["odl"])


def raises():
    return make(None)


def broken():
    return 1 / 0


def wrong():
    return "a flow"


def on_spark(spark):
    raise AssertionError
"""


def programs(folder: Path) -> Path:
    """Write the programs; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"counting_{folder.name}.py").write_text(JOBS.replace("OUT", str(folder / "out")))
    return folder


def begin(folder: Path, **options: Any) -> Any:
    """A run of ``before`` in the folder's store."""
    runtime = LocalRuntime(sf.open(str(folder / "store")), clock=VirtualClock(), checkpoint_rows=500, **options)
    return runtime.begin(flow(folder, "before"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the programs, and a store of ``before`` whose job has not ended."""
    path = [*sys.path]
    folder = programs(tmp_path_factory.mktemp("programs"))
    run = begin(folder)
    while run.step() and run.progress().checkpoint_id != 2:
        pass
    run.close()
    before = fingerprint(folder)
    yield folder
    assert fingerprint(folder) == before
    sys.path[:] = path


def program(folder: Path, function: str) -> str:
    return f"{folder / f'counting_{folder.name}.py'}:{function}"


def flow(folder: Path, function: str) -> Any:
    return dataflow_of(FunctionName.parse(program(folder, function), ""))


def explained(folder: Path, function: str, *options: str, status: int = 0) -> Any:
    return document("explain-restore", folder / "store", "--flow", program(folder, function), *options, status=status)


def columns(found: Any, operator: str = "count", state: str = "totals") -> list[tuple[str, str | None, str | None]]:
    (one,) = [each for each in found["states"] if (each["operator"], each["name"]) == (operator, state)]
    return [(column["action"], column["saved"], column["column"]) for column in one["columns"]]


def test_a_program_that_has_not_changed_can_go_on(place: Path) -> None:
    found = explained(place, "before")
    assert not found["refused"]
    assert found["start"]["program"] == f"counting_{place.name}.py:before"
    assert columns(found) == [("kept", "shard", "shard"), ("kept", "n", "n"), ("kept", "old", "old")]
    text = words("explain-restore", place / "store", "--flow", program(place, "before"))
    assert "kept shard, n, old" in text


def test_each_column_of_a_changed_program_has_its_line(place: Path) -> None:
    assert columns(explained(place, "after")) == [
        ("kept", "shard", "shard"),
        ("renamed", "n", "count"),
        ("added", None, "seen"),
        ("dropped", "old", None),
    ]
    text = words("explain-restore", place / "store", "--flow", program(place, "after"))
    for line in ("renamed n int32 → count int64", "added seen int64 (0 in older rows)", "dropped old int64"):
        assert line in text


def test_states_that_are_new_begin_empty(place: Path) -> None:
    found = explained(place, "added")
    new = {(state["operator"], state["name"]) for state in found["states"] if state["rule"] == "new: begins empty"}
    assert new == {
        ("more", "splits"),
        ("more", "enumerator"),
        ("more counts", "totals"),
        ("more counts", "progress"),
        ("more out", "progress"),
        ("more out", "committables"),
    }


REFUSED = {
    "lost": (
        "column_missing",
        "(renames={'old': 'NEW'} or drops=['old']), or give it up with --drop 'count/totals.old'",
    ),
    "retyped": ("schema_cannot_evolve", "column 'n' was int32 and would be utf8"),
    "renamed": ("operator_missing", "`ckpt rewrite --rename count=NEW`"),
    "another_job": ("job_mismatch", "name it Dataflow('counts'), or give it a store of its own"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_a_start_refuses_the_page_refuses_with_what_to_write_in_the_program(place: Path, function: str) -> None:
    code, says = REFUSED[function]
    found = explained(place, function, status=1)
    assert found["refused"]
    assert code in {each["code"] for each in (*found["start"]["refusals"], *found["plan"]["refusals"])}
    text = words("explain-restore", place / "store", "--flow", program(place, function), status=1)
    assert f"✗ {code}" in text
    assert says.lower() in text.lower()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("before", {}),
        ("before", {"parallelism": 3}),
        ("before", {"parallelism": 200}),
        ("before", {"per_operator": {"count": 5}}),
        ("after", {}),
        ("lost", {}),
        ("lost", {"drop": ["count/totals.old"]}),
        ("retyped", {}),
        ("renamed", {}),
        ("renamed", {"drop": ["count"]}),
    ],
)
def test_a_start_refuses_exactly_what_the_page_refuses(place: Path, function: str, options: dict[str, Any]) -> None:
    arguments = [f"--drop={name}" for name in options.get("drop", ())]
    arguments += [f"--parallelism={options['parallelism']}"] if "parallelism" in options else []
    arguments += [f"--operator-parallelism={uid}={n}" for uid, n in options.get("per_operator", {}).items()]
    codes = []
    try:
        restore(flow(place, function), sf.open(str(place / "store")).start("counts"), Options(**options))
    except RestoreRefused as error:
        codes = [refusal.code for refusal in error.details["refusals"]]
    found = explained(place, function, *arguments, status=1 if codes else 0)
    assert [each["code"] for each in found["plan"]["refusals"]] == codes


def test_operators_may_be_named_by_their_name(place: Path) -> None:
    found = explained(place, "before", "--operator-parallelism", "Counts=7")
    assert {one["uid"]: one["parallelism"] for one in found["plan"]["operators"]}["count"] == 7
    assert "and the program takes precedence" in " ".join(found["start"]["notes"])


def test_a_parallelism_that_the_program_does_not_have_is_misuse(place: Path) -> None:
    arguments = ("explain-restore", place / "store", "--flow", program(place, "before"))
    assert (
        "which dataflow 'counts' does not have"
        in failure(*arguments, "--operator-parallelism", "nobody=7", status=2)["message"]
    )


def test_a_store_without_a_checkpoint_lets_the_program_begin_anew(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for store in (tmp_path / "nothing", tmp_path / "empty"):
        found = document("explain-restore", store, "--flow", program(place, "before"))
        assert (found["refused"], found["plan"], found["start"]["anew"]) == (False, None, True)
        assert [one["uid"] for one in found["start"]["operators"]] == ["numbers", "count", "out"]
    assert "so the program begins anew" in words("explain-restore", store, "--flow", program(place, "before"))
    gone = ("explain-restore", f"{tmp_path / 'nothing'}@7", "--flow", program(place, "before"))
    assert failure(*gone, status=3)["kind"] == "store_not_found"


def test_a_savepoint_is_started_from_and_an_older_checkpoint_too(place: Path, tmp_path: Path) -> None:
    store, copy = sf.open(str(place / "store")), sf.open(str(tmp_path / "copy"))
    store.copy(store.open(), copy)
    found = document("explain-restore", tmp_path / "copy", "--flow", program(place, "after"))
    assert any("this is a savepoint" in note and "--from" in note for note in found["start"]["notes"])
    found = document("explain-restore", f"{place / 'store'}@1", "--flow", program(place, "after"))
    assert any("newest checkpoint, 2" in note and "ckpt rollback" in note for note in found["start"]["notes"])


def test_a_sink_whose_place_another_job_writes_to_is_refused_where_a_start_would_refuse_it(
    place: Path, tmp_path: Path
) -> None:
    store, copy = sf.open(str(place / "store")), sf.open(str(tmp_path / "copy"))
    store.copy(store.open(1), copy)
    found = document("explain-restore", tmp_path / "copy", "--flow", program(place, "before"), status=1)
    (refusal,) = found["start"]["refusals"]
    assert (refusal["code"], refusal["operator"]) == ("sink_place_taken", "out")
    assert "Two jobs must not share a place" in refusal["message"]
    runtime = LocalRuntime(sf.open(str(tmp_path / "own")), start_from=str(tmp_path / "copy"))
    with pytest.raises(InvalidInput, match="Two jobs must not share a place"):
        runtime.begin(flow(place, "before"))
    found = document("explain-restore", f"{place / 'store'}@1", "--flow", program(place, "before"))
    assert any("with --from it would be refused" in note for note in found["start"]["notes"])


@pytest.mark.parametrize(("mode", "says"), [("no_drain", "only with --resume"), ("drain", "a start returns at once")])
def test_a_stop_in_the_checkpoint_is_said(mode: str, says: str, tmp_path: Path) -> None:
    folder = programs(tmp_path / mode)
    store, run = sf.open(str(folder / "store")), begin(folder, requests_every_us=1)
    asked = False
    while run.step():
        if run.progress().checkpoint_id == 1 and not asked:
            store.request_stop(StopMode(mode))
            asked = True
    found = document("explain-restore", folder / "store", "--flow", program(folder, "before"))
    assert any(says in note for note in found["start"]["notes"])


def test_a_stop_for_a_rescale_is_gone_on_from_at_the_parallelism_that_was_asked_for(tmp_path: Path) -> None:
    folder = programs(tmp_path / "rescaled")
    store, run = sf.open(str(folder / "store")), begin(folder, requests_every_us=1)
    newest = 0
    while run.step() and not (newest and store.open().record.stop):
        if run.progress().checkpoint_id == 1 and not newest:
            store.request_rescale(3, {"out": 5})
        newest = run.progress().checkpoint_id or 0
    run.close()
    found = document("explain-restore", folder / "store", "--flow", program(folder, "before"))
    sizes = {one["uid"]: one["parallelism"] for one in found["plan"]["operators"]}
    assert sizes == {"numbers": 3, "count": 3, "out": 5}
    number = found["plan"]["source"]["checkpoint_id"]
    assert found["start"]["notes"] == [
        f"the job stopped at checkpoint {number} for a rescale: a start goes on at parallelism 3, 'out' at 5"
    ]


def test_the_page_says_which_executor_alone_reads_a_source(place: Path) -> None:
    found = document("explain-restore", place / "store", "--flow", program(place, "for_spark"), status=1)
    assert "only SparkRuntime reads source 'numbers'" in found["start"]["notes"]
    anew = document("explain-restore", place / "nothing", "--flow", program(place, "for_spark"))
    assert anew["start"]["notes"] == ["only SparkRuntime reads source 'numbers'"]


def test_the_page_says_which_operator_waits_for_event_time_that_never_comes(place: Path) -> None:
    for store, status in (("store", 1), ("nothing", 0)):
        found = document("explain-restore", place / store, "--flow", program(place, "endless"), status=status)
        assert any("'w' waits for event time, but source 'numbers'" in note for note in found["start"]["notes"])


def test_a_state_under_another_name_is_recognised_and_the_advice_helps(place: Path) -> None:
    store = shutil.copytree(place / "store", place.parent / "renamed")
    found = document("explain-restore", store, "--flow", program(place, "with_profiles"), status=1)
    (refusal,) = found["plan"]["refusals"]
    assert refusal["code"] == "state_missing"
    advised = "`ckpt rewrite --rename count/totals=profile`"
    assert (
        f"the new state 'profile' has the same key: if it is this one under another name, {advised}"
        in refusal["advice"]
    )
    document("rewrite", store, "--rename", "count/totals=profile")
    found = document("explain-restore", store, "--flow", program(place, "with_profiles"))
    assert not found["refused"]
    assert all(state["name"] != "totals" for state in found["states"])


def test_a_job_that_has_finished_is_not_started(tmp_path: Path) -> None:
    folder = programs(tmp_path / "finished")
    LocalRuntime(sf.open(str(folder / "store")), clock=VirtualClock()).run(flow(folder, "before"))
    found = document("explain-restore", folder / "store", "--flow", program(folder, "before"))
    assert any(note.startswith("everything has finished") for note in found["start"]["notes"])


def test_of_another_systems_checkpoint_the_page_says_what_its_import_lets_go_on(place: Path) -> None:
    folders = sorted((Path(__file__).parents[1] / "data/foreign").rglob("_metadata")) or sorted(
        (Path(__file__).parents[1]).rglob("_metadata")
    )
    found = document("explain-restore", folders[0].parent, "--flow", program(place, "before"), status=1)
    assert found["system"]
    assert not found["start"]["refusals"]
    assert any("ckpt import" in note and "--job-id counts" in note for note in found["start"]["notes"])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("broken", "broken raised ZeroDivisionError: division by zero"),
        ("raises", "its code raised KeyError when its states were asked for: 'what states?'"),
        ("wrong", "wrong returned str; it must return a Dataflow"),
        ("typo", "never had a column 'odl' that could be renamed or dropped"),
        ("nobody", "has no function 'nobody'; its functions are: added, after, another_job"),
    ],
)
def test_a_program_that_makes_no_dataflow_is_misuse_in_one_sentence(place: Path, function: str, says: str) -> None:
    arguments = ("explain-restore", place / "store", "--flow", program(place, function))
    found = run(*arguments)
    assert (found.status, found.out) == (2, "")
    assert says in found.err.splitlines()[-1]
    if function in ("broken", "raises"):
        raised = {"broken": "return 1 / 0", "raises": 'raise KeyError("what states?")'}[function]
        assert raised in run(*arguments, "--verbose", traces=True).err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--topology", __file__], "which says what --topology would"),
        (["--max-parallelism", "64"], "which says what --max-parallelism would"),
    ],
)
def test_a_program_and_what_replaces_one_exclude_each_other(place: Path, options: list[str], says: str) -> None:
    arguments = ("explain-restore", place / "store", "--flow", program(place, "before"), *options)
    assert says in failure(*arguments, status=2)["message"]


def test_barriers_that_overtake_are_an_option_of_a_program_alone(place: Path) -> None:
    assert failure("explain-restore", place / "store", "--unaligned", status=2)["kind"] == "usage"
    explained(place, "before", "--unaligned")


def test_what_the_program_prints_does_not_get_into_the_document(place: Path) -> None:
    found = run("explain-restore", place / "store", "--flow", program(place, "chatty"), "--format", "json")
    assert found.err == "made\n"
    assert found.document["start"]["job_id"] == "counts"
