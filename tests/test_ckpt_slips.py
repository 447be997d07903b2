"""What a person mistypes or has not thought of: the answer names it, says what was probably meant, and changes nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.tools.ckpt.exit_status import in_options
from stateformat.tools.ckpt.text import render
from tests import stores
from tests.ckpt_runs import CKPT, document, failure, fingerprint, page, run, topology_without

WIDE = "日本語のオペレーター"
LONG = "a name that says everything about what the operator does, and then some more, until no page is wide enough"


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints with everything in them, which these tests leave as they are."""
    folder = tmp_path_factory.mktemp("slips") / "flights"
    stores.flights_store(str(folder))
    return folder


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which names are long, or take two columns for each character."""
    folder = tmp_path_factory.mktemp("odd") / "store"
    operators = (sf.Operator("source", 1, name=LONG), sf.Operator(WIDE, 1, max_parallelism=16))
    graph = sf.JobGraph(operators, (sf.Edge("e", "source", WIDE, sf.Partitioner.REBALANCE),))
    rules = sf.broadcast_state(WIDE, "規則", columns={LONG: pa.string()})
    state = sf.even_split_state("source", LONG, columns={"n": pa.int64()})
    pending = sf.open(str(folder)).begin(job_id="odd", graph=graph, states=[rules, state], parent=None)
    for owner, name, rows in (
        (WIDE, "規則", pa.table({LONG: ["語" * 70]})),
        ("source", LONG, pa.table({"n": [1]})),
    ):
        with pending.context.subtask(owner, 0) as writer:
            writer.write(name, rows)
        pending.add(writer)
    pending.publish()
    return folder


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "arguments"),
    [
        (0, ("inspect",)),
        (0, ("inspect", "--rows", "1")),
        (0, ("explain-restore",)),
        (1, ("explain-restore", "--parallelism", "17")),
        (1, ("explain-restore", "--parallelism", "99999")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_long_and_wide_names_keep_to_the_columns_of_the_page(
    odd: Path, status: int, arguments: tuple[str, ...]
) -> None:
    for columns in (80, 120):
        text = page(arguments[0], odd, *arguments[1:], status=status, COLUMNS=str(columns))
        assert max(map(render.text_width, text.splitlines())) <= columns
        assert WIDE in text


def test_lines_are_wrapped_by_the_columns_that_their_characters_take() -> None:
    text = "operator '日本語' is asked for parallelism 99999, which is not within 1 to 32768 日本語" + "語" * 50
    lines = render.wrap(text, 40)
    assert max(map(render.text_width, lines)) == 40
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert render.wrap("日本 語", 20) == ["日本 語"]
    assert render.wrap("日" * 10 + " " + "本" * 10, 20) == ["日" * 10, "本" * 10]
    assert render.wrap("a " + "日" * 12, 21) == ["a " + "日" * 9, "日" * 3]


def test_an_operator_that_a_topology_lacks_is_refused_and_not_given_up(flights: Path, tmp_path: Path) -> None:
    topology = topology_without("rates", flights, tmp_path / "topology.json")
    refused = page("explain-restore", flights, "--topology", topology, status=1)
    assert "given up" not in refused
    assert "not in the topology" in refused
    assert "--drop 'rates'" in " ".join(refused.split())
    given_up = page("explain-restore", flights, "--topology", topology, "--drop", "rates")
    assert "  given up         rates\n" in given_up
    assert "not in the topology" not in given_up


def test_advice_speaks_of_options_where_the_library_speaks_of_arguments() -> None:
    assert in_options("give it up with drop='a/b', or resume=True") == "give it up with --drop 'a/b', or --resume"
    assert in_options('with drop="it\'s"') == 'with --drop "it\'s"'
    assert in_options("backdrop='x'") == "backdrop='x'"


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_command_that_is_mistyped_is_told_what_was_meant() -> None:
    assert "No such command 'inspekt'. Did you mean 'inspect'?" in run("inspekt").err
    assert "Did you mean" not in run("zzz").err


def test_an_operator_that_is_mistyped_is_told_what_was_meant(flights: Path) -> None:
    assert "did you mean 'delays'? It has " in failure("inspect", flights, "--operator", "delay", status=2)["message"]
    by_name = failure("inspect", flights, "--operator", "Delays per plan", status=2)["message"]
    assert "did you mean 'delays'? It has " in by_name
    nothing_near = failure("inspect", flights, "--operator", "zzz", status=2)["message"]
    assert "by uid or by name; it has " in nothing_near


def test_of_very_many_operators_a_sentence_names_some(tmp_path: Path) -> None:
    operators = tuple(sf.Operator(f"step {number}", 1) for number in range(1000))
    sf.open(str(tmp_path / "store")).begin(
        job_id="wide", graph=sf.JobGraph(operators, ()), states=[], parent=None
    ).publish()
    told = failure("inspect", tmp_path / "store", "--operator", "stepp 7", status=2)["message"]
    assert "did you mean 'step 7'? It has step 0, step 1, " in told
    assert told.endswith(" and 980 more")


def test_a_state_to_drop_is_looked_for_in_its_operator(flights: Path) -> None:
    told = failure("explain-restore", flights, "--drop", "delays/nope", status=2)["message"]
    assert "operator 'delays' has no state 'nope'; it has 'sums'" in told
    found = document("explain-restore", flights, "--drop", "Delays per plane/sums")
    assert found["plan"]["drop"] == ["delays/sums"]


# ---- places ----------------------------------------------------------------------------------------------------------


def test_an_export_goes_into_a_plain_file_only(flights: Path, tmp_path: Path) -> None:
    what = ["export", flights, "--operator", "delays", "--state", "sums", "--as", "csv", "--force", "--to"]
    assert "is a directory; name a file in it" in failure(*what, tmp_path, status=2)["message"]
    link = tmp_path / "nothing"
    link.symlink_to("/dev/null")
    assert "is no plain file" in failure(*what, link, status=2)["message"]
    assert link.is_symlink()
    missing = failure(*what, tmp_path / "no" / "x.csv", status=3)["message"]
    assert missing.startswith(f"{tmp_path / 'no'}: no such directory; make it")


@pytest.mark.parametrize("command", [("rescale", "--parallelism", "3"), ("rewrite",)], ids=lambda value: value[0])
def test_to_is_another_store(flights: Path, command: tuple[str, ...]) -> None:
    before = fingerprint(flights)
    told = failure(command[0], flights, *command[1:], "--to", flights, status=2)["message"]
    assert told == f"--to names file://{flights} itself; leave it out to publish there"
    assert fingerprint(flights) == before


def test_a_file_in_place_of_a_store_is_not_to_be_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious.csv"
    precious.write_text("a,b\n")
    for command in (("history",), ("inspect",), ("gc", "--delete"), ("rescale", "--parallelism", "3")):
        told = failure(command[0], precious, *command[1:], status=3)["message"]
        assert "it is a file, and a store is a directory; check the address" in told
    assert precious.read_text() == "a,b\n"


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "soon"])
def test_a_time_that_no_clock_takes_is_misuse(flights: Path, seconds: str) -> None:
    assert "--timeout" in failure("stop", flights, "--timeout", seconds, status=2)["message"]


def test_an_id_of_thousands_of_digits_is_misuse(flights: Path) -> None:
    assert "2^53" in failure("inspect", f"{flights}@{'9' * 5000}", status=2)["message"]


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redirection", "arguments", "status"),
    [(">&-", "history", 0), ("2>&-", "nonsense", 2), (">&- 2>&-", "inspect", 0)],
)
def test_a_closed_stream_is_nobody_who_reads(flights: Path, redirection: str, arguments: str, status: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" {arguments} "$1" {redirection}', CKPT, flights], capture_output=True, check=False
    )
    assert done.returncode == status
    assert b"bug" not in done.stderr


def test_a_full_disk_behind_standard_output_is_named(flights: Path) -> None:
    export = 'export --operator delays --state sums --to - --as csv "$1"'
    for command in ('history "$1"', 'history --format json "$1"', export):
        done = subprocess.run(
            ["sh", "-c", f'"$0" {command} >/dev/full', CKPT, flights], capture_output=True, text=True, check=False
        )
        assert done.returncode == 3
        assert "ckpt: standard output: No space left on device" in done.stderr
