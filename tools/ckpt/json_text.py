"""A JSON document as text, in pieces: a million subtasks never become a million Python objects.

Short lists are indented, as ``json.dumps(document, indent=2)`` does it. Long ones stay columns
(``stateformat.documents``) or a file (:class:`JsonTexts`) until they are written, one entry a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

from stateformat.documents import JsonColumn, JsonRows

LONG: Final = 1000
"""A list of more scalars than this is written one entry a line."""


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

    def __iter__(self) -> Iterator[Any]:
        return map(json.loads, self.lines(ensure_ascii=False))


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
