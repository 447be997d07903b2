"""Each command's ``--help`` in docs/cli.md.

A block lies between ``<!-- help: NAME -->`` and ``<!-- end -->``; the rest is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import click

from ..main import COMMANDS, ckpt

CLI_PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
_BLOCK: Final = re.compile(r"(<!-- help: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH: Final = 80


def help_of(name: str) -> str:
    """What ``ckpt NAME --help`` or, for ``ckpt``, ``ckpt --help`` prints at 80 columns."""
    group = click.Context(ckpt, info_name="ckpt", terminal_width=_WIDTH - 2, **ckpt.context_settings)
    if name == "ckpt":
        return ckpt.get_help(group)
    command = ckpt.get_command(group, name)
    if command is None:
        raise click.UsageError(f"docs/cli.md names the command {name!r}, which does not exist")
    return command.get_help(click.Context(command, info_name=name, parent=group, terminal_width=_WIDTH - 2))


def refreshed(page: str) -> str:
    """The page with every block up to date."""
    return _BLOCK.sub(lambda block: f"{block[1]}```text\n{help_of(block[2])}\n```\n{block[3]}", page)


def missing(page: str) -> list[str]:
    """The commands without a block."""
    there = {block[1] for block in _BLOCK.findall(page)}
    return [name for name in ("ckpt", *COMMANDS) if name not in there]
