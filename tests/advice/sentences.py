"""Every sentence of the product that tells somebody to act: it names a ``ckpt`` command, an option,
or an argument of a Python call.

They are found in the syntax tree: strings, f-strings (with their holes), and what ``+`` joins. Help
texts and docstrings are not among them, for other tests hold those.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.test_tree import MODULES, ROOT, WINGS, tree

HOLE = "\N{REPLACEMENT CHARACTER}"
"""Stands in a text where the sentence has a value."""
NO_ADVICE = (
    "stateformat/pages/style.py",  # variables of CSS are written like options
    "tools/ckpt/completion",  # scripts of shells, which tests/ckpt/test_ckpt_completion.py runs
    "tools/ckpt/docs/",
    "tools/ckpt/synonyms.py",  # a table, which tests/ckpt/test_ckpt_misuse.py tries
    "backends/origin.py",  # calls git
)
_COMMAND = re.compile(
    r"(?<!\bby )\bckpt (?!by\b|-)([a-z][a-z-]*)((?: (?:--[a-z][a-z-]*|[A-Z][A-Z@]*\b(?! [a-z])|[^\s`]*"
    + HOLE
    + r"[^\s`]*))*)"
)
_SPAN = re.compile(r"`(ckpt [a-z][^`]*)`")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_ARGUMENT = re.compile(r"(?<![\w.:?&{-])([a-z][a-z_]{2,})=(?!=)")
_FIELD = re.compile(r"\{[a-z_]+\}")
_OF_OTHERS = re.compile(r"`?\b(?:flink (?:run|savepoint|stop)|spark-submit|pip install)\b[^`,;.)]*")
"""Commands of other programs, with what is theirs."""


@dataclass(frozen=True)
class Sentence:
    """A string of the product. ``text`` has a :data:`HOLE` for each value in it."""

    path: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.function}): {self.text.replace(HOLE, '{}')}"

    @property
    def commands(self) -> list[str]:
        """Every ``ckpt`` command that it names."""
        if len(self.text.split()) < 3:  # The name of a program, or a piece of a line.
            return []
        return commands_in(self.text)

    @property
    def options(self) -> list[str]:
        """Every option that it names without a command."""
        rest = _OF_OTHERS.sub("", _COMMAND.sub("", _SPAN.sub("", self.text)))
        return _OPTION.findall(rest) if len(self.text.split()) > 2 else []

    @property
    def arguments(self) -> list[str]:
        """Every argument that it names as Python writes it: ``resume=True``, ``staging=``."""
        prose = re.search(r"[a-z]+[,;:]? [a-z]+ [a-z]+", self.text)
        return _ARGUMENT.findall(_SPAN.sub("", self.text)) if prose and "<" not in self.text else []


def commands_in(text: str) -> list[str]:
    """Every ``ckpt`` command in a text, with what belongs to it: ``repair STORE --yes``."""
    spans = [found.removeprefix("ckpt ") for found in _SPAN.findall(text)]
    return spans + ["".join(found).strip() for found in _COMMAND.findall(_SPAN.sub("", text))]


@cache
def sentences() -> tuple[Sentence, ...]:
    """All advice of the product, in the order of its files."""
    paths = {module: str(path.relative_to(ROOT)) for module, path in MODULES.items()}
    for module, path in paths.items():
        if path.split("/")[1] in WINGS:  # A link, as imports see it.
            paths[module] = path.removeprefix("stateformat/")
    return tuple(
        one
        for module, path in sorted(paths.items(), key=lambda item: item[1])
        if not path.startswith(NO_ADVICE)
        for one in _advice(tree(module), path)
    )


def of_source(source: str, path: str) -> list[Sentence]:
    """The advice in some source, as if it stood in a file of the product."""
    return list(_advice(ast.parse(source), path))


def _advice(parsed: ast.Module, path: str) -> Iterator[Sentence]:
    return (one for one in _inside(parsed, path, ()) if one.commands or one.options or one.arguments)


def _inside(node: ast.AST, path: str, within: tuple[str, ...]) -> Iterator[Sentence]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        within = (*within, node.name)
    text = _text(node)
    if text is not None:
        text = _FIELD.sub(HOLE, text)  # Of a text for `str.format`.
        yield Sentence(path, node.lineno, ".".join(within), text)  # type: ignore[attr-defined]
    for child in _children(node):
        yield from _inside(child, path, within)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What may hold advice below a node: not its docstring, decorators and help."""
    if isinstance(node, ast.JoinedStr):
        yield from (part.value for part in node.values if isinstance(part, ast.FormattedValue))
        return
    if isinstance(node, ast.BinOp) and _text(node) is not None:
        yield from _holes(node)
        return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name != "decorator_list" and not _is_help(child):
                yield child


def _holes(node: ast.expr) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp):
        yield from (inner for side in (node.left, node.right) for inner in _holes(side))
    elif isinstance(node, ast.JoinedStr):
        yield from _children(node)
    elif not isinstance(node, ast.Constant):
        yield node


def _is_help(node: ast.AST) -> bool:
    """Whether it is a string that stands alone, or says what an option of ``ckpt`` is for."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.keyword):
        return node.arg in {"help", "short_help"}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    module, name = node.func.value, node.func.attr
    return isinstance(module, ast.Name) and module.id == "click" and name not in {"UsageError", "BadParameter"}


def _text(node: ast.AST | None) -> str | None:
    """The text of a string, of an f-string, or of a sum in which there is one; else None."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_text(node.left), _text(node.right)]
        return None if sides == [None, None] else "".join(HOLE if side is None else side for side in sides)
    return None
