"""Recipes of docs/ that run as they stand, section by section, and whose output is compared.

A recipe is a block of Python or of shell; the block of text behind it is what it prints. The shell
has the ``ckpt`` and the ``python`` of this environment. A line ``# exit status N`` in a block of
shell is what it ends with; without one that is 0.

The Python of a section of docs/data.md is one program, which begins with the lines of its section
"In Python". What it prints is compared where the page shows it, up to sizes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted([DOCS.parent / "README.md", *DOCS.rglob("*.md")])
SNIPPET = r"```python\n(.*?)```(?:\s+It prints:\s+```text\n(.*?)```)?"
"""A program in Python, and what it prints where the page says that."""
STARTS_SPARK = "local_session("
_SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"```(python|bash)\n(.*?)```\n(?:\n(?:It prints:\n\n)?```text\n(.*?)```\n)?", re.DOTALL)
_STATUS = re.compile(r"^# exit status (\d+)$", re.MULTILINE)


class Recipe(NamedTuple):
    """A block that runs, and what the page says that it prints."""

    language: str
    code: str
    shown: str


def snippets(pages: Iterable[Path]) -> list[tuple[str, str, str]]:
    """The name of each snippet of some pages, its code and what it prints (empty: the page does not
    say).
    """
    return [
        (f"{page.name}-{number}", code, printed)
        for page in pages
        for number, (code, printed) in enumerate(re.findall(SNIPPET, page.read_text(), re.DOTALL), 1)
    ]


def _recipes(text: str) -> list[Recipe]:
    return [Recipe(*(part or "" for part in block)) for block in _BLOCK.findall(text)]


@dataclass(frozen=True)
class RecipePage:
    """A page of recipes. ``same`` says whether what a recipe printed is what the page shows."""

    path: Path
    same: Callable[[Recipe, str], bool]

    def sections(self) -> dict[str, list[Recipe]]:
        """The recipes of each section of the page, by its heading."""
        found = {heading: _recipes(text) for heading, text in _SECTION.findall(self.path.read_text())}
        return {heading: recipes for heading, recipes in found.items() if recipes}

    def recipes(self) -> list[Recipe]:
        """All recipes of the page, in order."""
        return _recipes(self.path.read_text())

    def check(self, ran: Sequence[tuple[Recipe, str]], *, update: bool) -> None:
        """Compare what recipes printed, in the page's order, with the page; or put it there."""
        if update:
            self._rewrite(ran)
            return
        for recipe, printed in ran:
            assert self.same(recipe, printed) or printed == recipe.shown, recipe.code

    def _rewrite(self, ran: Sequence[tuple[Recipe, str]]) -> None:
        page, at = self.path.read_text(), 0
        for recipe, printed in ran:
            block = f"```{recipe.language}\n{recipe.code}```\n"
            at = page.index(block, at)
            if not self.same(recipe, printed):
                text = f"```text\n{recipe.shown}```\n" if recipe.shown else ""
                end = page.index(text, at + len(block)) if text else at + len(block)
                after = f"```text\n{printed}```\n" if printed else ""
                page = page[:end] + ("" if text else "\n") + after + page[end + len(text) :]
            at += len(block)
        self.path.write_text(page)


def shell(code: str, environment: Mapping[str, str], *, errors: bool = False, first: Path | None = None) -> str:
    """What a block of shell prints, with ``errors`` also to standard error. ``first``: where its
    programs are looked for, instead of this environment.
    """
    path = f"{first or Path(sys.executable).parent}:{environment['PATH']}"
    expected = _STATUS.search(code)
    done = subprocess.run(
        ["bash", "-euc", code],
        env={**environment, "PATH": path, "COLUMNS": "80", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors else subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == (int(expected[1]) if expected else 0), f"{code}{done.stdout}{done.stderr or ''}"
    return done.stdout


BEGINNING = "In Python"
SHOWN_URL = "s3://bucket/shop"
"""Where the store is for readers of the page."""
_SIZE = re.compile(r"[\d.,]+ [KM]?i?B\b")
_STORE = re.compile(r"^(  store +)\S+(?:\n {9,}\S+)*$", re.MULTILINE)


def headings(*, spark: bool) -> list[str]:
    """The sections whose Python is given a Spark session as ``spark``, or the others."""
    uses = {
        heading: any("spark." in recipe.code for recipe in recipes if recipe.language == "python")
        for heading, recipes in PAGE.sections().items()
    }
    return [heading for heading, used in uses.items() if used is spark]


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
    found = PAGE.sections()
    for recipe in [*([] if heading == BEGINNING else found[BEGINNING][:1]), *found[heading]]:
        if recipe.language == "bash":
            printed_there = shell(re.sub(r"\bshop\b(?![/-])", url, recipe.code), {**os.environ, **(environment or {})})
            yield recipe, _STORE.sub(rf"\g<1>{SHOWN_URL}", printed_there)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = recipe.code.replace('open("shop")', f'open("{url}")').replace('load("shop")', f'load("{url}")')
            exec(compile(code, f"{PAGE.path.name}: {heading}", "exec"), names)
        yield recipe, printed.getvalue()


def _same(recipe: Recipe, printed: str) -> bool:
    if recipe.language == "bash":
        return not recipe.shown or _SIZE.sub("0 B", printed) == _SIZE.sub("0 B", recipe.shown)
    return printed == recipe.shown


PAGE = RecipePage(DOCS / "data.md", _same)
