"""Help, documentation, and what a command imports: none of them drifts from the others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from stateformat.tools.ckpt import docs
from stateformat.tools.ckpt.main import COMMANDS, ckpt
from tests import stores
from tests.ckpt_runs import DOCS, run

HEAVY = {"pyarrow", "numpy", "pandas", "pyspark", "s3fs", "fsspec", "botocore", "rich"}


def test_every_help_stands_in_the_docs_word_for_word() -> None:
    page = docs.CLI_PAGE.read_text(encoding="utf-8")
    assert docs.missing(page) == []
    assert docs.refreshed(page) == page, "run `make docs` (python -m stateformat.tools.ckpt.docs)"


@pytest.mark.parametrize("command", ["ckpt", "inspect", "rewrite"])
def test_the_help_in_the_docs_is_what_the_command_prints(command: str) -> None:
    found = run(*([] if command == "ckpt" else [command]), "--help", COLUMNS="80")
    assert found.status == 0
    assert found.out == docs.help_of(command) + "\n"
    assert f"```text\n{found.out}```\n" in docs.CLI_PAGE.read_text(encoding="utf-8")


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
    assert {"--format", "--verbose", "--endpoint-url", "--option"} <= {text for one in options for text in one.opts}


def test_every_command_has_a_section_in_each_page_of_the_docs() -> None:
    for page in ("cli.md", "json.md"):
        sections = set(re.findall(r"(?m)^## (\S+)$", (DOCS / page).read_text()))
        assert set(COMMANDS) <= sections, page


def modules_of(*arguments: object) -> set[str]:
    """The top-level modules that a run of ``ckpt`` has imported by its end."""
    code = (
        "import sys\nfrom stateformat.tools.ckpt.main import main\nstatus = main()\n"
        "print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert modules_of(*arguments).isdisjoint(HEAVY)


def test_inspecting_a_directory_imports_arrow_and_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    stores.counts_store(str(tmp_path / "store"))
    found = modules_of("inspect", tmp_path / "store")
    assert found & HEAVY == {"pyarrow", "numpy"}


def test_ckpt_as_a_library_call_returns_its_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from stateformat.tools.ckpt.main import main

    assert main(["history", str(tmp_path / "nowhere")]) == 3
    assert main(["--help"]) == 0
    assert "Usage: ckpt" in capsys.readouterr().out
