"""Writes docs/api.md, the reference of the public doors, from signatures and docstrings: ``python -m stateformat.tools.api_docs``.

A test compares :func:`page` with the file, so the two cannot drift. Signatures are those of the source, read as syntax, so
the page is the same under every version of Python.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "api.md"
DOORS: Final = (
    ("stateformat", "the format: stores, checkpoints, states, errors"),
    ("redistribution", "restore plans"),
    ("stateformat.backends.dataflow.flow", "dataflows, operators, sources, sinks"),
    ("stateformat.backends.dataflow.api.states", "the states that an operator declares"),
    ("stateformat.backends.dataflow.operators", "ready-made operators"),
    ("stateformat.backends.dataflow.testing", "a harness for operators"),
    ("stateformat.backends.state", "the states as an operator uses them"),
    ("stateformat.backends.connectors", "sources and sinks"),
    ("stateformat.backends.local", "the executor in this process"),
    ("stateformat.backends.spark.runtime", "the executor on Spark"),
    ("stateformat.backends.spark.options", "how a job runs on Spark"),
    ("stateformat.backends.storage.local", "stores on a file system"),
    ("stateformat.backends.storage.memory", "stores in memory"),
    ("stateformat.backends.storage.s3.storage", "stores on S3"),
)
_HEAD: Final = """# Reference

Written by `make docs` from the docstrings of the code; edit those. The guides are [library.md](library.md) for authors of
runtimes and [dataflow.md](dataflow.md) and [operators.md](operators.md) for authors of jobs.

"""
_ONLY: Final = {"stateformat.backends.state": ("Entries", "KeyedList", "KeyedMap", "KeyedValue", "TimerSet")}
"""What is public of doors that lead to more than that."""
_WIDTH: Final = 100
_ROLE: Final = re.compile(r":[a-z]+:`~?([^`]+)`")

Definition = ast.ClassDef | ast.FunctionDef


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    parts += [f"- [`{door}`](#{_anchor(door)}): {about}\n" for door, about in DOORS]
    for door, _ in DOORS:
        module = import_module(door)
        parts.append(f"\n## `{door}`\n\n{markdown(inspect.getdoc(module) or '')}\n")
        parts += [text for name in sorted(_public(module)) for text in _described(module, name)]
    return "".join(parts)


def _anchor(door: str) -> str:
    return door.replace(".", "")


def _public(module: ModuleType) -> list[str]:
    named = _ONLY.get(module.__name__) or getattr(module, "__all__", None)
    if named is not None:
        return [str(name) for name in named]
    return [
        node.name
        for node in _tree(str(module.__file__)).body
        if isinstance(node, Definition) and not node.name.startswith("_")
    ]


def _described(module: ModuleType, name: str) -> Iterator[str]:
    """The section of one name: a class or function; a constant or alias where it has a docstring."""
    found = getattr(module, name)
    home = sys.modules.get(getattr(found, "__module__", ""), module)
    body = _tree(str(home.__file__)).body if getattr(home, "__file__", None) else []
    node = next((node for node in body if isinstance(node, Definition) and node.name == name), None)
    if isinstance(node, ast.FunctionDef):
        yield f"\n### `{name}`\n\n{_signature(node)}\n{markdown(ast.get_docstring(node) or '')}\n"
    elif isinstance(node, ast.ClassDef) and inspect.isclass(found):
        yield f"\n### `{name}`\n\n{_class_head(node)}{markdown(ast.get_docstring(node) or '')}\n"
        yield from _members(found)
    else:
        for text, documented in _attributes(_origin(module, name)):
            if _name(text) == name:
                yield f"\n### `{name}`\n\n{_fence([text])}\n{markdown(documented)}\n"


def _origin(module: ModuleType, name: str) -> list[ast.stmt]:
    """The statements of the module that a constant or alias is imported from, or of this one."""
    body = _tree(str(module.__file__)).body
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return _tree(str(import_module(node.module).__file__)).body
    return body


def _class_head(node: ast.ClassDef) -> str:
    bases = [base for base in map(ast.unparse, node.bases) if base not in ("ABC",) and not base.startswith("_")]
    start = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    fields = "" if start is None else _fence([_call(node.name, start, returns=False)])
    return (f"Bases: {', '.join(f'`{base}`' for base in bases)}\n\n" if bases else "") + (
        f"{fields}\n" if fields else ""
    )


def _name(attribute: str) -> str:
    return attribute.split(":")[0].split(" ")[0]


@cache
def _documented() -> frozenset[object]:
    modules = [import_module(door) for door, _ in DOORS]
    return frozenset(
        found for module in modules for name in _public(module) if inspect.isclass(found := getattr(module, name))
    )


def _members(found: type) -> Iterator[str]:
    """Fields, then methods and properties: those of the class, and those that it has from classes of ours without a section."""
    if issubclass(found, Enum):
        yield "\n" + textwrap.fill(", ".join(f"`{name}`" for name in found.__members__), _WIDTH) + "\n"
    nodes: dict[str, ast.FunctionDef] = {}
    fields: dict[str, str] = {}
    for one in found.__mro__:
        ours = one is found or (one not in _documented() and one.__module__.split(".")[0] in _OURS)
        home = sys.modules.get(one.__module__)
        if not ours or home is None or not getattr(home, "__file__", None):
            continue
        node = next(
            (
                item
                for item in _tree(str(home.__file__)).body
                if isinstance(item, ast.ClassDef) and item.name == one.__name__
            ),
            None,
        )
        for item in node.body if node is not None else ():
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and ast.get_docstring(item):
                nodes.setdefault(item.name, item)
        for text, documented in _attributes(node.body if node is not None else []):
            if not text.startswith("_") and _name(text) not in map(_name, fields):
                fields[text] = documented
    if fields:
        yield "\n"
    for text, documented in fields.items():
        said = f": {markdown(documented, indent='  ')}" if documented else ""
        yield f"- `{text}`{said}\n"
    for item in nodes.values():
        yield f"\n{_signature(item)}\n{markdown(ast.get_docstring(item) or '')}\n"


_OURS: Final = frozenset(door.split(".")[0] for door, _ in DOORS)


def _attributes(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Annotated attributes, and assigned ones with a docstring, with what the docstring under them says."""
    for node, following in zip(body, [*body[1:], None], strict=True):
        said = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = inspect.cleandoc(str(following.value.value))
        if isinstance(node, ast.AnnAssign):
            plain = node.value is not None and "field(" not in ast.unparse(node.value)
            yield (
                f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
                + (f" = {ast.unparse(node.value)}" if plain and node.value is not None else ""),
                said,
            )
        elif isinstance(node, ast.Assign) and said:
            yield ast.unparse(node.targets[0]), said


def _signature(node: ast.FunctionDef) -> str:
    decorators = [ast.unparse(item) for item in node.decorator_list]
    if any("property" in decorator for decorator in decorators):
        return _fence([f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}"])
    lines = [f"@{name}" for name in decorators if name in ("classmethod", "staticmethod")]
    return _fence([*lines, _call(node.name, node)])


def _call(name: str, node: ast.FunctionDef, *, returns: bool = True) -> str:
    """A call as the source declares it, without ``self``, one argument a line where it is long."""
    arguments = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if arguments.args.args and arguments.args.args[0].arg in ("self", "cls"):
        del arguments.args.args[0]
    # A default stands apart from an annotation, as the formatter writes it.
    parts = [re.sub(r"^(\w+: [^=]+)=(?!=)", r"\1 = ", part) for part in _split(ast.unparse(arguments.args))]
    result = f" -> {ast.unparse(node.returns)}" if returns and node.returns is not None else ""
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])


def _split(arguments: str) -> list[str]:
    """Arguments apart, by the commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in arguments:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _fence(lines: list[str]) -> str:
    # Not ``python``: a signature is no program, and the snippets of the guides are run.
    return "\n".join(["```py", *lines, "```"]) + "\n"


def markdown(text: str, *, indent: str = "") -> str:
    """A docstring as Markdown: code between single backticks, references as names, literal blocks between fences."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if block.startswith("    ") or (out and out[-1].endswith("::")):
            code = textwrap.dedent(block).strip("\n")
            if out and out[-1].endswith("```"):
                out[-1] = out[-1].removesuffix("```") + f"\n{code}\n```"
                continue
            if out:
                out[-1] = out[-1].removesuffix("::") + (":" if out[-1] != "::" else "")
            out.append(f"```py\n{code}\n```")
        elif re.match(r"^(==+ |[-*] |\d\. )", block):
            out.append(f"```text\n{block}\n```" if block.startswith("==") else _inline(block))
        else:
            out.append(
                textwrap.fill(_inline(" ".join(block.split())), _WIDTH, break_long_words=False, break_on_hyphens=False)
            )
    joined = "\n\n".join(part for part in out if part)
    return joined.replace("\n", f"\n{indent}") if indent else joined


def _inline(text: str) -> str:
    text = _ROLE.sub(lambda role: f"`{role[1].rsplit('.', 1)[-1]}`", text)
    return text.replace("``", "`")


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
