"""JSON Schemas of all that ``ckpt --format json`` prints, of a record, and of a manifest's rows.

The tables of docs/json.md are their source; the page says what the cells hold. The columns of a
manifest come from the code, and their descriptions from SPEC.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..main import COMMANDS

_ROOT: Final = Path(__file__).resolve().parents[3]
JSON_PAGE: Final = _ROOT / "docs" / "json.md"
SCHEMAS: Final = _ROOT / "stateformat" / "schemas"
_OPENED: Final = ("$defs", "properties")
_DIALECT: Final = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
_PLAIN: Final[Mapping[str, Any]] = {
    **{name: {"type": name} for name in ("string", "integer", "number", "boolean", "object", "null")},
    "anything": {},
    "text": {"type": "string", "minLength": 1},
    "digits": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "count": {"type": "integer", "minimum": 0},
    "range": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2},
}


@dataclass
class _Member:
    """One member of an object: the cells of its row, and the rows of what is inside it."""

    kind: str = ""
    meaning: str = ""
    inside: dict[str, _Member] = field(default_factory=dict)


_Table = dict[str, _Member]


def schemas() -> dict[str, str]:
    """Return the files of ``stateformat/schemas``, by name."""
    tables = _tables(JSON_PAGE.read_text(encoding="utf-8"))
    found = {
        "ckpt": _documents(tables),
        "record": _Schema(tables, closed=False).of("A publication record", "record"),
        "manifest": _manifest(),
    }
    return {f"{name}.json": _text({**_DIALECT, **schema}) for name, schema in found.items()}


def _documents(tables: Mapping[str, _Table]) -> dict[str, Any]:
    """Return the schema of all that is printed; ``ckpt-NAME`` is what one command prints."""
    made = _Schema(tables, closed=True)
    commands = {}
    for name in (*COMMANDS, "progress"):
        forms = [table for table in tables if re.split("[ :]", table)[0] == name]
        if forms:
            commands[f"ckpt-{name}"] = {"anyOf": [made.ref(form) for form in (*forms, "error")]}
    refs = [{"$ref": f"#/$defs/{name}"} for name in commands]
    return {"title": "What ckpt prints with --format json", "anyOf": refs, "$defs": commands | made.definitions}


def _tables(page: str) -> dict[str, _Table]:
    """Return the objects of the page by the name before each table: in bold, or a heading."""
    tables: dict[str, _Table] = {}
    name = ""
    for line in page.splitlines():
        if named := re.match(r"## (\S+)$|\*\*([^*]+)\*\*", line):
            name = named[1] or named[2]
        elif row := re.match(r"\| (`.+?`|…) \| (.+?) \| (.*?) ?\|$", line):
            members = re.sub(r"`|\[\]", "", row[1]).split(", ")
            kinds = row[2].split(", ") if ", " in row[2] else [row[2]] * len(members)
            before = members[0].rpartition(".")[0]
            for member, kind in zip(members, kinds, strict=True):
                path = f"{before}{member}" if member.startswith(".") else member
                place = _Member(inside=tables.setdefault(name, {}))
                for part in path.split("."):
                    place = place.inside.setdefault(part, _Member())
                place.kind, place.meaning = kind, re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", row[3])
    return tables


class _Schema:
    """Makes one file, with all objects that it refers to."""

    def __init__(self, tables: Mapping[str, _Table], *, closed: bool) -> None:
        self._tables = tables
        self._closed = closed
        self.definitions: dict[str, Any] = {}

    def of(self, title: str, form: str) -> dict[str, Any]:
        """Return the schema of a document of this form, the name of a table."""
        return {"title": title, **self.ref(form), "$defs": self.definitions}

    def ref(self, form: str) -> dict[str, Any]:
        """Return a reference to an object, which is defined from now on."""
        name = re.sub(r"\W+", "-", form)
        if name not in self.definitions:
            self.definitions[name] = {}  # An object may be inside itself.
            self.definitions[name] = self._object(self._tables[form])
        return {"$ref": f"#/$defs/{name}"}

    def _object(self, table: _Table) -> dict[str, Any]:
        members = self._members(table)
        properties = {name: self._member(member) for name, member in members.items()}
        required = [name for name, member in members.items() if not member.kind.startswith("optional ")]
        found = {"type": "object", "properties": properties, "required": required}
        return {**found, "additionalProperties": False} if self._closed else found

    def _members(self, table: _Table) -> _Table:
        """Return the members of a table, with those of the object that its row ``…`` names."""
        more = table.get("…")
        found = self._members(self._tables[more.kind]) if more else {}
        for name, member in table.items():
            was = found.get(name, _Member())
            found[name] = _Member(member.kind or was.kind, member.meaning or was.meaning, was.inside | member.inside)
        found.pop("…", None)
        return found

    def _member(self, member: _Member) -> dict[str, Any]:
        schema = self._any(member.kind.removeprefix("optional "), member.inside)
        return {"description": member.meaning, **schema} if member.meaning else schema

    def _any(self, kinds: str, inside: _Table) -> dict[str, Any]:
        """Return the schema of kinds joined by ``or``, except for those in parentheses."""
        parts = re.split(r" or (?![^(]*\))", kinds)
        choices = [self._one(kind, inside) for kind in parts if not kind.startswith("`")]
        if literals := [kind.strip("`") for kind in parts if kind.startswith("`")]:
            choices.insert(0, {"type": "string", "enum": literals})
        first, *others = choices
        if others and "type" in first and "enum" not in first and all({*other} == {"type"} for other in others):
            return {**first, "type": [choice["type"] for choice in choices]}
        return {"anyOf": choices} if others else first

    def _one(self, kind: str, inside: _Table) -> dict[str, Any]:
        if kind.startswith("("):
            return self._any(kind[1:-1], inside)
        for prefix, keyword in (("array of ", "items"), ("object of ", "additionalProperties")):
            if kind.startswith(prefix):
                rest = self._one(kind.removeprefix(prefix), inside)
                return {"type": "array" if keyword == "items" else "object", keyword: rest}
        if kind == "object" and inside:
            return self._object(inside)
        if kind in _PLAIN:
            return dict(_PLAIN[kind])
        if bounds := re.fullmatch(r"(\d+) to (\d+)", kind):
            return {"type": "integer", "minimum": int(bounds[1]), "maximum": int(bounds[2])}
        return self.ref(kind)


def _manifest() -> dict[str, Any]:
    """Return the schema of a manifest's row, each column with its Arrow type, in their order."""
    from stateformat.schema import MANIFEST_SCHEMA

    table = (_ROOT / "stateformat" / "SPEC.md").read_text(encoding="utf-8").partition("### 4.1")[2].partition("###")[0]
    rows = re.findall(r"(?m)^\| (`.+?`) \| .+? \| (.+) \|$", table)
    meanings = {name: meaning for names, meaning in rows for name in re.findall(r"`(\w+)`", names)}
    columns = {}
    for column in MANIFEST_SCHEMA:
        arrow = str(column.type)
        kind = "integer" if arrow.startswith("int") else "array" if arrow.startswith("list") else "string"
        columns[column.name] = {
            "description": meanings[column.name],
            "type": [kind, "null"] if column.nullable else kind,
            **({"items": {"type": "integer"}} if kind == "array" else {}),
            **({"contentEncoding": "base16"} if "binary" in arrow else {}),
            "arrow": arrow,
        }
    about = {"title": "A row of a manifest", "description": "`arrow` is the type of the column in the Parquet file."}
    return {**about, "type": "object", "properties": columns, "required": list(columns)}


def _text(schema: Mapping[str, Any]) -> str:
    """Return JSON with a line for each member, and for each object that is defined."""

    def lines(members: Mapping[str, Any], indent: str) -> str:
        return ",\n".join(f"{indent}{json.dumps(name)}: {text(name, value)}" for name, value in members.items())

    def text(name: str, value: Any) -> str:
        return f"{{\n{lines(value, '    ')}\n  }}" if name in _OPENED else json.dumps(value, ensure_ascii=False)

    return f"{{\n{lines(schema, '  ')}\n}}\n"
