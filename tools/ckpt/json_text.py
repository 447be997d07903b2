"""A JSON document as text, in pieces: a million subtasks never become a million Python objects.

Short lists are indented, as ``json.dumps(document, indent=2)`` does it. Long ones stay columns
(:class:`JsonRows`, :class:`JsonColumn`) or a file (:class:`JsonTexts`) until they are written, one
entry a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

LONG: Final = 1000
"""A list of more scalars than this is written one entry a line."""
_AT_ONCE: Final = 16_384


class JsonRows:
    """A list of flat objects with the same members, as one numpy array of integers per member.

    The arrays have equal length; a negative value is null. Iterating gives the objects.
    """

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __iter__(self) -> Iterator[dict[str, int | None]]:
        for values in self._tuples():
            yield dict(zip(self.arrays, values, strict=True))

    def greatest(self, count: int, name: str) -> list[dict[str, int | None]]:
        """The objects with the greatest values of a member; of equal ones the first."""
        order = (-self.arrays[name]).argsort(kind="stable")[:count]
        return list(JsonRows(**{member: array[order] for member, array in self.arrays.items()}))

    def lines(self) -> Iterator[str]:
        """Each object as JSON."""
        template = "{" + ", ".join(f"{json.dumps(name)}: %s" for name in self.arrays) + "}"
        return (template % values for values in self._tuples(null="null"))

    def _tuples(self, null: str | None = None) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(self), _AT_ONCE):
            columns = []
            for array in self.arrays.values():
                part = array[start : start + _AT_ONCE]
                values = part.tolist()
                columns.append([null if value < 0 else value for value in values] if (part < 0).any() else values)
            yield from zip(*columns, strict=True)


class JsonColumn:
    """A list of scalars that stays an Arrow array until it is written."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts():
            yield from part.to_pylist()

    def pieces(self, **options: Any) -> Iterator[str]:
        """The entries as JSON, many in a piece."""
        for part in self._parts():
            if part.null_count == 0 and str(part.type).startswith("int"):
                yield ", ".join(map(str, part.to_numpy().tolist()))
            else:
                yield json.dumps(part.to_pylist(), **options)[1:-1]

    def _parts(self) -> Iterator[Any]:
        return (self.array.slice(start, _AT_ONCE) for start in range(0, len(self.array), _AT_ONCE))


class JsonTexts:
    """A list of objects that lie as JSON, one a line, in a file; it is read from its beginning."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def lines(self, *, ensure_ascii: bool) -> Iterator[str]:
        """Each object as JSON."""
        self._file.seek(0)
        for line in self._file:
            text = line.decode().removesuffix("\n")
            yield json.dumps(json.loads(text)) if ensure_ascii and not text.isascii() else text


def unprintable_escaped(text: str) -> str:
    """JSON text with unprintable characters escaped: a terminal obeys some (U+009B, U+202E).

    The value stays the same, since JSON has such characters only inside strings.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def pieces(value: Any, *, indent: int = 0, ensure_ascii: bool = False) -> Iterator[str]:
    """The text of a JSON value, in pieces."""
    inner = "\n" + " " * (indent + 2)
    close = "\n" + " " * indent
    lines: Iterator[str] | None = None
    if isinstance(value, JsonRows):
        lines = value.lines()
    elif isinstance(value, JsonColumn):
        lines = value.pieces(ensure_ascii=ensure_ascii)
    elif isinstance(value, JsonTexts):
        lines = value.lines(ensure_ascii=ensure_ascii)
    elif isinstance(value, list | tuple) and len(value) > LONG and not any(isinstance(one, Mapping) for one in value):
        lines = (json.dumps(entry, ensure_ascii=ensure_ascii) for entry in value)
    if lines is not None:
        between = "[" + inner
        for line in lines:
            yield between + line
            between = "," + inner
        yield "[]" if between.startswith("[") else close + "]"
    elif isinstance(value, Mapping) and value:
        for i, (name, member) in enumerate(value.items()):
            yield ("," if i else "{") + inner + json.dumps(name, ensure_ascii=ensure_ascii) + ": "
            yield from pieces(member, indent=indent + 2, ensure_ascii=ensure_ascii)
        yield close + "}"
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for i, entry in enumerate(value):
            yield ("," if i else "[") + inner
            yield from pieces(entry, indent=indent + 2, ensure_ascii=ensure_ascii)
        yield close + "]"
    else:
        yield json.dumps(value, ensure_ascii=ensure_ascii)
