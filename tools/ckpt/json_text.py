"""A JSON document as text, piece by piece, so that a document of a million subtasks is never held as a million objects.

Theory of operation. What is small is indented, as a person reads it. What is long stands as columns (:class:`Rows`,
:class:`Column`) until it is written, and is then written one entry a line. ``"".join(pieces(document))`` is the document; a
document without columns and without long lists is what ``json.dumps(document, indent=2)`` makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

LONG: Final = 1000
"""Entries from which on a list is written one entry a line."""
_AT_ONCE: Final = 16_384


class Rows:
    """A list of flat objects that all have the same members, kept as arrays of integers, one for each member.

    ``arrays`` are numpy arrays of equal length; below 0 is null. Iterating gives the objects.
    """

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __iter__(self) -> Iterator[dict[str, int | None]]:
        names = list(self.arrays)
        for start in range(0, len(self), _AT_ONCE):
            for values in self._tuples(start, start + _AT_ONCE):
                yield dict(zip(names, values, strict=True))

    def greatest(self, count: int, name: str) -> list[dict[str, int | None]]:
        """Those with the greatest values of a member, the first of equal ones first."""
        order = (-self.arrays[name]).argsort(kind="stable")[:count]
        return list(Rows(**{member: array[order] for member, array in self.arrays.items()}))

    def lines(self) -> Iterator[str]:
        """Each object as JSON."""
        template = "{" + ", ".join(f"{json.dumps(name)}: %s" for name in self.arrays) + "}"
        for start in range(0, len(self), _AT_ONCE):
            yield from (template % values for values in self._tuples(start, start + _AT_ONCE, null="null"))

    def _tuples(self, start: int, stop: int, null: str | None = None) -> Iterator[tuple[Any, ...]]:
        columns = []
        for array in self.arrays.values():
            part = array[start:stop]
            values = part.tolist()
            columns.append([null if value < 0 else value for value in values] if (part < 0).any() else values)
        return zip(*columns, strict=True)


class Column:
    """A list of scalars that stays an Arrow array until it is written."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.array), _AT_ONCE):
            yield from self.array.slice(start, _AT_ONCE).to_pylist()

    def pieces(self, **options: Any) -> Iterator[str]:
        """The entries as JSON, many in a piece."""
        for start in range(0, len(self.array), _AT_ONCE):
            part = self.array.slice(start, _AT_ONCE)
            if part.null_count == 0 and str(part.type).startswith("int"):
                yield ", ".join(map(str, part.to_numpy().tolist()))
            else:
                yield json.dumps(part.to_pylist(), **options)[1:-1]


def unprintable_escaped(text: str) -> str:
    """JSON text with every character that does not print escaped: a terminal obeys some of them (U+009B, U+202E).

    JSON has such characters inside strings only, so the value stays the same.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def pieces(value: Any, *, indent: int = 0, ensure_ascii: bool = False) -> Iterator[str]:
    """The text of a JSON value, in pieces."""
    inner = "\n" + " " * (indent + 2)
    close = "\n" + " " * indent
    if isinstance(value, Rows):
        yield from _joined(value.lines(), "[" + inner, "," + inner, close + "]")
    elif isinstance(value, Column):
        yield from _joined(value.pieces(ensure_ascii=ensure_ascii), "[" + inner, "," + inner, close + "]")
    elif isinstance(value, Mapping) and value:
        for i, (name, member) in enumerate(value.items()):
            yield ("," if i else "{") + inner + json.dumps(name, ensure_ascii=ensure_ascii) + ": "
            yield from pieces(member, indent=indent + 2, ensure_ascii=ensure_ascii)
        yield close + "}"
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        if len(value) > LONG and not any(isinstance(entry, Mapping) for entry in value):
            entries = (json.dumps(entry, ensure_ascii=ensure_ascii) for entry in value)
            yield from _joined(entries, "[" + inner, "," + inner, close + "]")
            return
        for i, entry in enumerate(value):
            yield ("," if i else "[") + inner
            yield from pieces(entry, indent=indent + 2, ensure_ascii=ensure_ascii)
        yield close + "]"
    else:
        yield json.dumps(value, ensure_ascii=ensure_ascii)


def _joined(lines: Iterator[str], begin: str, between: str, end: str) -> Iterator[str]:
    lead = begin
    for line in lines:
        yield lead + line
        lead = between
    yield end if lead is not begin else "[]"


__all__ = ["LONG", "Column", "Rows", "pieces", "unprintable_escaped"]
