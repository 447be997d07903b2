"""Runs the recipes of docs/data.md as they stand, section by section, and compares the output.

A recipe is a block of Python or of shell; the block of text behind it is what it prints. The Python
of a section is one program, which begins with the lines of the section "In Python". The shell has
the ``ckpt`` of this environment; what it prints is compared where the page shows it, up to sizes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "data.md"
BEGINNING = "In Python"
SHOWN_URL = "s3://bucket/shop"
"""Where the store is for readers of the page."""
_SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_SIZE = re.compile(r"[\d.,]+ [KM]?i?B\b")
_STORE = re.compile(r"^(  store +)\S+(?:\n {9,}\S+)*$", re.MULTILINE)
_BLOCK = re.compile(r"```(python|bash)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


class Recipe(NamedTuple):
    """A block that runs, and what the page says that it prints."""

    language: str
    code: str
    shown: str


def headings(*, spark: bool) -> list[str]:
    """The sections whose Python is given a Spark session as ``spark``, or the others."""
    uses = {
        heading: any("spark." in recipe.code for recipe in recipes if recipe.language == "python")
        for heading, recipes in sections().items()
    }
    return [heading for heading, used in uses.items() if used is spark]


def sections() -> dict[str, list[Recipe]]:
    """The recipes of each section of the page, by its heading."""
    found = {
        heading: [Recipe(*(part or "" for part in block)) for block in _BLOCK.findall(text)]
        for heading, text in _SECTION.findall(PAGE.read_text())
    }
    return {heading: recipes for heading, recipes in found.items() if recipes}


def run(
    heading: str,
    *,
    given: Mapping[str, Any] | None = None,
    url: str = "shop",
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Recipe, str]]:
    """Run a section in the working directory; yield each recipe and what it printed.

    ``given``: names that its Python finds. ``url``: where the store is.
    """
    names: dict[str, Any] = {"__name__": "recipe", **(given or {})}
    found = sections()
    for recipe in [*([] if heading == BEGINNING else found[BEGINNING][:1]), *found[heading]]:
        if recipe.language == "bash":
            printed_there = _shell(re.sub(r"\bshop\b(?![/-])", url, recipe.code), {**os.environ, **(environment or {})})
            yield recipe, _STORE.sub(rf"\g<1>{SHOWN_URL}", printed_there)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = recipe.code.replace('open("shop")', f'open("{url}")').replace('load("shop")', f'load("{url}")')
            exec(compile(code, f"{PAGE.name}: {heading}", "exec"), names)
        yield recipe, printed.getvalue()


def _shell(code: str, environment: Mapping[str, str]) -> str:
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", code],
        env={**environment, "PATH": path, "COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rewrite(ran: list[tuple[Recipe, str]]) -> None:
    """Put into the page what the recipes printed."""
    page = PAGE.read_text()
    for recipe, printed in ran:
        block = f"```{recipe.language}\n{recipe.code}```\n"
        before = block + (f"\n```text\n{recipe.shown}```\n" if recipe.shown else "")
        assert page.count(before) == 1, f"the page has {page.count(before)} times:\n{before}"
        page = page.replace(before, block + (f"\n```text\n{printed}```\n" if printed else ""))
    PAGE.write_text(page)


def check(ran: list[tuple[Recipe, str]], *, update: bool) -> None:
    """Compare what recipes printed with the page, or put it there."""
    wrong = [(recipe, printed) for recipe, printed in ran if not _same(recipe, printed)]
    if update:
        rewrite(wrong)
        return
    for recipe, printed in wrong:
        assert printed == recipe.shown, recipe.code


def _same(recipe: Recipe, printed: str) -> bool:
    if recipe.language == "bash":
        return not recipe.shown or _SIZE.sub("0 B", printed) == _SIZE.sub("0 B", recipe.shown)
    return printed == recipe.shown
