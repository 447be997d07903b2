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
from collections.abc import Iterator, Mapping
from typing import Any

from tests.recipes import DOCS, Recipe, RecipePage, shell

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
