"""The man page: the same text as help, and source that man programs take without a word."""

from __future__ import annotations

import shutil
import subprocess

import click
import pytest

from stateformat.tools.ckpt.docs import MAN_PAGE, man_page
from stateformat.tools.ckpt.main import COMMANDS, ckpt


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
