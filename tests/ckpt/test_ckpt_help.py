"""Help and documentation: neither drifts from the other.

The man page: the same text as help, and source that man programs take without a word.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from stateformat.tools.ckpt import docs
from stateformat.tools.ckpt.docs import MAN_PAGE, man_page
from stateformat.tools.ckpt.main import COMMANDS, ckpt, main
from tests.ckpt.ckpt_runs import DOCS, program

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
