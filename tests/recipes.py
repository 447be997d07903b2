"""Pages of docs/ whose blocks run as they stand, and whose output is compared.

A recipe is a block of Python or of shell; the block of text behind it is what it prints. The shell
has the ``ckpt`` and the ``python`` of this environment. A line ``# exit status N`` in a block of
shell is what it ends with; without one that is 0.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted([DOCS.parent / "README.md", *DOCS.rglob("*.md")])
SNIPPET = r"```python\n(.*?)```(?:\s+It prints:\s+```text\n(.*?)```)?"
"""A program in Python, and what it prints where the page says that."""
STARTS_SPARK = "local_session("
_SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"```(python|bash)\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
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


@dataclass(frozen=True)
class RecipePage:
    """A page of recipes. ``same`` says whether what a recipe printed is what the page shows."""

    path: Path
    same: Callable[[Recipe, str], bool]

    def sections(self) -> dict[str, list[Recipe]]:
        """The recipes of each section of the page, by its heading."""
        found = {
            heading: [Recipe(*(part or "" for part in block)) for block in _BLOCK.findall(text)]
            for heading, text in _SECTION.findall(self.path.read_text())
        }
        return {heading: recipes for heading, recipes in found.items() if recipes}

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
            before = block + (f"\n```text\n{recipe.shown}```\n" if recipe.shown else "")
            after = block + (f"\n```text\n{printed}```\n" if printed else "")
            at = page.index(before, at)
            if not self.same(recipe, printed):
                page = page[:at] + after + page[at + len(before) :]
            at += len(block)
        self.path.write_text(page)


def shell(code: str, environment: Mapping[str, str], *, errors: bool = False) -> str:
    """What a block of shell prints, with ``errors`` also to standard error."""
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
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
