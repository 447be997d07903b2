"""Docstrings as Markdown: roles of Sphinx become code, and what follows ``::`` becomes a block of
Python.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


class AsMarkdown(griffe.Extension):
    """Rewrites every docstring when it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """One docstring."""
    text = re.sub(r":[a-z]+:`~?(?:[\w.]+\.)?([^`.]+)`", r"`\1`", text)
    return re.sub(r"::\n\n((?:    .*(?:\n|$)|\n)+)", _block, text)


def _block(match: re.Match[str]) -> str:
    return f":\n\n```python\n{textwrap.dedent(match[1]).strip()}\n```\n\n"
