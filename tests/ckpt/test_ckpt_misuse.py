"""What a user mistypes: the answer names it, says what was probably meant, and changes nothing.

Help and documentation: neither drifts from the other.

The man page: the same text as help, and source that man programs take without a word.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import stateformat as sf
from stateformat.tools.ckpt import docs
from stateformat.tools.ckpt.docs import MAN_PAGE, man_page
from stateformat.tools.ckpt.exit_status import in_options
from stateformat.tools.ckpt.main import COMMANDS, ckpt, main
from stateformat.tools.ckpt.synonyms import MEANT, OPTIONS
from tests.ckpt.ckpt_runs import DOCS, document, failure, fingerprint, program, run, words
from tests.worlds import stores

SUMS = "--operator delays --state sums"
MISUSE = [
    ("rescale", "--parallelism"),
    ("rescale --parallelism 0", "x>=1"),
    ("rescale --operator-parallelism delays=0", "delays=0"),
    ("explain-restore --parallelism -3", "x>=1"),
    ("rewrite --max-parallelism 40000", "32768"),
    ("rewrite --rename nope=x", "nope"),
    ("rewrite --rename sink=alerts", "alerts"),
    ("explain-restore --operator-parallelism nope=2", "nope"),
    ("explain-restore --drop nope", "nope"),
    ("explain-restore --drop delays/nope", "operator 'delays' has no state 'nope'; it has 'sums'"),
    ("explain-restore --drop delays/sums.zz", "never had a column 'zz'"),
    ("explain-restore --drop delays/zz.n", "has no state 'zz.n'"),
    ("inspect --operator delay", "did you mean 'delays'? It has "),
    ("inspect --operator Delays_per_plan", "did you mean 'delays'? It has "),
    ("inspect --operator zzz", "by uid or by name; it has "),
    ("inspect --state nope", "it has 'splits'"),
    ("inspect --state smus", "did you mean 'sums'?"),
    ("inspect --rows many", "not a valid integer"),
    ("inspect --rows 99999999999999999999", "too large; the greatest that it can be is 9007199254740991"),
    (f"explain-restore --operator-parallelism delays={'9' * 5000}", "not a number of subtasks"),
    ("inspect --unknown", "--unknown"),
    ("validate --level deep", "quick"),
    ("gc --keep 0", "x>=1"),
    ("rollback", "@7"),
    ("history --option anon=true", "anon"),
    ("history --option nonsense", "KEY=VALUE"),
    *((f"stop --timeout {seconds}", "--timeout") for seconds in ("inf", "nan", "-1", "soon", "1e300")),
    (f"export {SUMS} --to x.txt", "--as"),
    (f"export {SUMS} --to -", "add --as csv or --as jsonl"),
    (f"export {SUMS} --to - --as parquet", "standard output"),
    (f"export {SUMS} --subtask 4 --to x.csv", "subtasks 0 to 3"),
    ("export --operator delays --state nope --to x.csv", "it has 'sums', 'by_month'"),
    ("export --operator delays --state smus --to x.csv", "did you mean 'sums'?"),
    ("export --operator nope --state sums --to x.csv", "delays (Delays per plane)"),
]


@pytest.mark.parametrize(("command", "told"), MISUSE)
def test_misuse_is_named_and_changes_nothing(flights: Path, command: str, told: str) -> None:
    name, *options = command.split()
    before = fingerprint(flights)
    error = failure(name, flights, *(option.replace("_", " ") for option in options), status=2)
    assert told in error["message"]
    assert fingerprint(flights) == before


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (f"{{}}@{'9' * 5000}", "2^53"),
        ("gopher://host/store", "file"),
    ],
)
def test_an_address_that_is_none_is_misuse(flights: Path, address: str, told: str) -> None:
    assert told in failure("inspect", address.format(flights), status=2)["message"]


def _numbers() -> Iterator[tuple[str, click.Parameter]]:
    for name in COMMANDS:
        found = ckpt.get_command(click.Context(ckpt), name)
        assert found is not None
        for option in found.params:
            counted = isinstance(option, click.Option) and option.count
            # A plan refuses a parallelism that is too large, and says for which operators.
            if isinstance(option.type, click.types.IntParamType) and not counted and option.name != "parallelism":
                yield name, option


def test_no_number_is_greater_than_its_use_can_take() -> None:
    found = dict.fromkeys((name, option.name) for name, option in _numbers())
    assert ("inspect", "rows") in found
    for name, option in _numbers():
        for number in (10**20, 2**63):
            with pytest.raises(click.BadParameter):
                option.type.convert(str(number), option, None)
        assert option.type.convert("7", option, None) == 7, name


@pytest.mark.parametrize(
    "command",
    ["copy", "rescale --parallelism 3 --to", "rewrite --to", "rollback@1 --to", "stop --to", "savepoint --to"]
    + [f"export --as {form} --to" for form in ("parquet", "csv", "flink-savepoint")]
    + ["report --to", "sql values(1) --to", "rescale --running --parallelism 3 --to"],
)
def test_nothing_is_written_to_memory_that_goes_with_the_command(flights: Path, command: str) -> None:
    name, *options = command.split()
    name, _, number = name.partition("@")
    place = "memory://gone/x.csv" if name in ("report", "sql") else "memory://gone"
    before = fingerprint(flights)
    error = failure(name, f"{flights}@{number}" if number else flights, *options, place, status=2)
    assert "memory" in error["message"]
    assert fingerprint(flights) == before


@pytest.mark.parametrize("command", ["rescale --parallelism 3", "rewrite"])
def test_to_is_another_store(flights: Path, command: str) -> None:
    before, (name, *options) = fingerprint(flights), command.split()
    message = failure(name, flights, *options, "--to", flights, status=2)["message"]
    assert message == f"--to names file://{flights} itself; leave it out to publish there"
    assert fingerprint(flights) == before


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


@pytest.mark.parametrize("number", [9_999_999, 10**8, 10**20])
@pytest.mark.parametrize("way", ["option", "operator", "topology"])
def test_a_parallelism_beyond_all_bounds_is_refused_before_anything_is_planned(
    counts: Path, tmp_path: Path, number: int, way: str
) -> None:
    topology = document("inspect", counts)
    for operator in topology["operators"]:
        operator["parallelism"] = number
    (tmp_path / "topology.json").write_text(json.dumps(topology))
    options = {
        "option": ("--parallelism", number),
        "operator": ("--operator-parallelism", f"counter={number}"),
        "topology": ("--topology", tmp_path / "topology.json"),
    }[way]
    begun = time.process_time()
    plan = sf.open(str(counts)).open().plan_restore(sf.JobGraph((sf.Operator("counter", number),), ()))
    assert plan.refused
    assert time.process_time() - begun < 1
    refused = words("explain-restore", counts, *options, status=1)
    assert f"is asked for parallelism {number}, which is not within 1 to 32768" in refused


def test_of_very_many_operators_a_sentence_names_some(tmp_path: Path) -> None:
    graph = sf.JobGraph(tuple(sf.Operator(f"step {number}", 1) for number in range(1000)), ())
    sf.open(str(tmp_path / "store")).begin(job_id="wide", graph=graph, states=[], parent=None).publish()
    message = failure("inspect", tmp_path / "store", "--operator", "stepp 7", status=2)["message"]
    assert "did you mean 'step 7'? It has step 0, step 1, " in message
    assert message.endswith(" and 980 more")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *((typed, None) for typed in ("zzz", "stpo", "rolback", "coppy", "gcc")),
        *(("inspekt", "inspect"), ("inspct", "inspect"), ("exprt", "export")),
    ],
)
def test_a_mistyped_command_is_told_what_was_meant_but_for_one_that_changes_something(
    typed: str, meant: str | None
) -> None:
    found = run(typed, "store")
    assert found.status == 2
    assert f"No such command {typed!r}." in found.err
    assert ("Did you mean" in found.err) == (meant is not None)
    assert meant is None or f"Did you mean '{meant}'?" in found.err


@pytest.mark.parametrize("typed", MEANT)
def test_what_people_type_for_a_command_is_answered_with_that_command(typed: str) -> None:
    """The command takes the arguments and options that the answer shows."""
    found = run(typed.upper(), "store")
    form = MEANT[typed]
    assert (found.status, typed in COMMANDS) == (2, False)
    assert f"No such command {typed.upper()!r}. It is `ckpt {form}` here." in found.err
    name, *words = shlex.split(form)
    command = ckpt.get_command(click.Context(ckpt), name)
    assert command is not None
    assert {word for word in words if word.startswith("--")} <= {name for one in command.params for name in one.opts}
    given = form.split(" --")[0].split(maxsplit=1)[1]
    assert len(shlex.split(given)) == sum(isinstance(one, click.Argument) for one in command.params)


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [("report", "--output", "--to"), ("top", "--top", "--limit"), ("inspect", "--head", "--rows")],
)
def test_what_people_type_for_an_option_is_answered_with_that_option(command: str, typed: str, meant: str) -> None:
    assert typed in OPTIONS
    assert f"No such option {typed!r}. Did you mean {meant!r}?" in run(command, "store", typed, "1").err


def test_without_arguments_there_is_help_and_the_status_of_misuse() -> None:
    found = run()
    assert (found.status, found.err.startswith("Usage: ckpt ")) == (2, True)


def test_a_storage_option_that_a_directory_knows_is_taken(flights: Path) -> None:
    assert run("history", flights, "--option", "durable=false").status == 0


def test_advice_names_options_for_the_arguments_of_the_library() -> None:
    assert in_options("give it up with drop='a/b', or resume=True") == "give it up with --drop 'a/b', or --resume"
    assert in_options('with drop="it\'s"') == 'with --drop "it\'s"'
    assert in_options("backdrop='x'") == "backdrop='x'"


# ---- stores that are not there


@pytest.mark.parametrize(
    "command",
    [
        *("history", "inspect", "validate", "explain-restore", "rescale --parallelism 2", "rewrite", "gc --delete"),
        *("export --operator a --state b --to {}/x.csv", "rollback", "copy {}/target", "stop"),
    ],
)
def test_a_store_that_is_not_there_is_not_found_and_not_made(tmp_path: Path, command: str) -> None:
    name, *options = command.format(tmp_path).split()
    nowhere = tmp_path / "nowhere"
    error = failure(name, f"{nowhere}@1" if name == "rollback" else nowhere, *options, status=3)
    assert error["kind"] == "store_not_found"
    assert str(nowhere) in error["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["history", "inspect", "validate", "gc"])
def test_an_empty_store_is_not_found_either(tmp_path: Path, command: str) -> None:
    assert failure(command, tmp_path, status=3)["kind"] in ("store_empty", "store_not_found")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_there_or_has_expired_is_called_so(tmp_path: Path) -> None:
    stores.counts_store(str(tmp_path), checkpoints=3)
    error = failure("inspect", f"{tmp_path}@9", status=3)
    assert (error["kind"], "9" in error["message"]) == ("checkpoint_not_found", True)
    assert run("gc", tmp_path, "--keep", 1, "--delete").status == 0
    assert failure("inspect", f"{tmp_path}@1", status=3)["kind"] == "checkpoint_expired"


def test_a_folder_of_something_else_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root")
    refused = words("inspect", tmp_path, status=3)
    assert "is no store of checkpoints" in refused
    assert "Check the address" in refused


@pytest.mark.parametrize("command", ["history", "inspect", "gc --delete", "rescale --parallelism 3"])
def test_a_file_in_place_of_a_store_is_not_to_be_removed(tmp_path: Path, command: str) -> None:
    precious, (name, *options) = tmp_path / "precious.csv", command.split()
    precious.write_text("a,b\n")
    message = failure(name, precious, *options, status=3)["message"]
    assert "it is no directory, and a store is one" in message
    assert "heck the address" in message
    assert precious.read_text() == "a,b\n"


def test_a_folder_of_checkpoints_is_told_with_those_in_it(tmp_path: Path) -> None:
    fixtures = Path(__file__).parents[1] / "foreign/fixtures"
    shutil.copytree(fixtures / "flink-2.3.0/core-hashmap-canonical/savepoint", tmp_path / "savepoint-1-a")
    shutil.copytree(fixtures / "spark-4.3.0/two/checkpoint", tmp_path / "words")
    stores.counts_store(str(tmp_path / "ours"))
    (tmp_path / "other").mkdir()
    found = words("inspect", tmp_path, status=3)
    assert (
        "In it are ours (a store), savepoint-1-a (a Flink checkpoint or savepoint), words (the checkpoint of a Spark "
        f"query). Give one of them: `ckpt inspect file://{tmp_path}/ours`"
    ) in found
    assert "Check the address" not in found
    assert run("inspect", f"file://{tmp_path}/ours").status == 0
    for number in range(8):
        shutil.copytree(tmp_path / "words", tmp_path / f"a{number}")
    assert "and 6 more. Give one of them" in words("validate", tmp_path, status=3)


WITHOUT_STORE = {"completion"}
"""Commands about no store: they have no result that JSON would show."""


def test_every_help_stands_in_the_docs_word_for_word() -> None:
    page = docs.CLI_PAGE.read_text(encoding="utf-8")
    assert docs.missing(page) == []
    assert docs.refreshed(page) == page, "run `make docs` (python -m stateformat.tools.ckpt.docs)"


@pytest.mark.parametrize("command", ["ckpt", "rewrite"])
def test_the_help_in_the_docs_is_what_the_program_prints(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = program(*([] if command == "ckpt" else [command]), "--help")
    assert (found.returncode, found.stdout) == (0, docs.help_of(command) + "\n")
    assert f"```text\n{found.stdout}```\n" in docs.CLI_PAGE.read_text(encoding="utf-8")


def test_the_docs_are_refreshed_block_by_block() -> None:
    page = "before\n<!-- help: gc -->\nold\n<!-- end -->\nafter\n"
    fresh = docs.refreshed(page)
    assert fresh.startswith("before\n<!-- help: gc -->\n```text\nUsage: ckpt gc ")
    assert fresh.endswith("\n```\n<!-- end -->\nafter\n")
    assert docs.missing(page) == ["ckpt", *(name for name in COMMANDS if name != "gc")]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_the_line_of_help_that_the_list_shows(name: str) -> None:
    command = ckpt.get_command(click.Context(ckpt), name)
    assert command is not None
    assert command.name == name
    assert (command.help or "").split("\n")[0] == COMMANDS[name]
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert all(option.help for option in options), "every option is explained"
    common = {"--format", "--verbose", "--endpoint-url", "--option"}
    assert name in WITHOUT_STORE or common <= {text for one in options for text in one.opts}


@pytest.mark.parametrize("page", ["cli.md", "json.md"])
def test_every_command_has_a_section_in_the_docs(page: str) -> None:
    without = WITHOUT_STORE if page == "json.md" else set()
    assert set(COMMANDS) - without <= set(re.findall(r"(?m)^## (\S+)$", (DOCS / page).read_text()))


def test_ckpt_as_a_library_call_returns_its_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["history", str(tmp_path / "nowhere")]) == 3
    assert main(["--help"]) == 0
    assert "Usage: ckpt" in capsys.readouterr().out


def rendered() -> str:
    """The page as text, in very long lines."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed here; `apt-get install groff-base` brings it")
    found = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", "-rLL=10000n", "-rHY=0", MAN_PAGE],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stderr == ""
    return " ".join(found.stdout.split())


def test_the_man_page_is_the_one_that_help_makes() -> None:
    assert MAN_PAGE.read_text(encoding="ascii") == man_page(), "run `make docs`"


def test_every_word_of_help_stands_in_the_page_as_it_is_rendered() -> None:
    text = rendered()
    group = click.Context(ckpt, info_name="ckpt", **ckpt.context_settings)
    for name in COMMANDS:
        command = ckpt.get_command(group, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=group, max_content_width=1000, terminal_width=1000)
        assert f"ckpt {name} {' '.join(command.collect_usage_pieces(context))}" in text
        for part in (command.help or "").replace("\b", "").split("\n\n"):
            assert " ".join(part.split()) in text, name
        for option in command.params:
            record = option.get_help_record(context) if isinstance(option, click.Option) else None
            for part in record or ():
                assert " ".join(part.split()) in text, name


def test_mandoc_finds_nothing_wrong_but_that_no_date_is_given() -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed here; `apt-get install mandoc` brings it")
    found = subprocess.run(
        ["mandoc", "-Tlint", "-Wwarning", MAN_PAGE], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    assert [line for line in found if "missing date" not in line] == []
