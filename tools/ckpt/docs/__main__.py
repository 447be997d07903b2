"""Rewrites docs/cli.md, docs/foreign.md, docs/ckpt.1 and the schemas in place."""

from __future__ import annotations

import sys

import click

from . import CLI_PAGE, FOREIGN_PAGE, MAN_PAGE, SCHEMAS, man_page, missing, refreshed, schemas, with_tasks


def main() -> int:
    """Write all files. Returns exit status 1 if a command has no block."""
    page = CLI_PAGE.read_text(encoding="utf-8")
    CLI_PAGE.write_text(refreshed(page), encoding="utf-8")
    FOREIGN_PAGE.write_text(with_tasks(FOREIGN_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    MAN_PAGE.write_text(man_page(), encoding="ascii")
    for file, text in schemas().items():
        (SCHEMAS / file).write_text(text, encoding="utf-8")
    for name in missing(page):
        click.echo(f"docs/cli.md has no block for {name}", err=True)
    return 1 if missing(page) else 0


if __name__ == "__main__":
    sys.exit(main())
