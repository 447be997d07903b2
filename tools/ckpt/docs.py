"""Writes each command's ``--help`` into docs/cli.md, and the man page docs/ckpt.1.

``python -m stateformat.tools.ckpt.docs``. A block of docs/cli.md lies between
``<!-- help: NAME -->`` and ``<!-- end -->``; the rest is written by hand. Tests compare both files
with :func:`refreshed` and ``man.man_page``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

import click

from .main import COMMANDS, ckpt
from .man import MAN_PAGE, man_page

CLI_PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
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


def main() -> int:
    """Rewrite both pages in place. Returns exit status 1 if a command has no block."""
    page = CLI_PAGE.read_text(encoding="utf-8")
    CLI_PAGE.write_text(refreshed(page), encoding="utf-8")
    MAN_PAGE.write_text(man_page(), encoding="ascii")
    for name in missing(page):
        click.echo(f"docs/cli.md has no block for {name}", err=True)
    return 1 if missing(page) else 0


if __name__ == "__main__":
    sys.exit(main())
