"""docs/api.md is what the docstrings say, of every public door."""

from __future__ import annotations

from importlib import import_module

import pytest

from stateformat.tools.api_docs import DOORS, PAGE, markdown, page


def test_the_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/api.md is out of date: run `make docs`"


@pytest.mark.parametrize("door", [door for door, _ in DOORS if door != "stateformat.backends.state"])
def test_every_public_name_has_a_section(door: str) -> None:
    section = PAGE.read_text(encoding="utf-8").split(f"\n## `{door}`\n")[1].split("\n## `")[0]
    names = getattr(import_module(door), "__all__", ())
    assert [name for name in names if f"### `{name}`\n" not in section and not name.startswith("__")] == []


@pytest.mark.parametrize(
    ("docstring", "text"),
    [
        ("See :meth:`~a.b.C.get` and :class:`D`.", "See `get` and `D`."),
        ("``x`` is\n    one.", "`x` is one."),
        ("As so::\n\n    a = 1\n\n    b = 2\n\nThen.", "As so:\n\n```py\na = 1\n\nb = 2\n```\n\nThen."),
        ("- a\n- b", "- a\n- b"),
    ],
)
def test_a_docstring_becomes_markdown(docstring: str, text: str) -> None:
    assert markdown(docstring) == text


def test_signatures_and_inherited_calls_are_shown() -> None:
    text = page()
    for part in (
        "plan_restore(\n    topology: JobGraph,",
        "find_one(key: Any, map_key: Any) -> dict[str, Any] | None",
        "run(flow: Dataflow) -> JobOutcome",
        "lookup(\n    keys: pa.RecordBatch,\n    *,\n    distinct: bool = False,\n)",
    ):
        assert part in text or part.replace("\n    ", " ").replace(",\n)", ")").replace("( ", "(") in text, part
    assert ":class:" not in text
