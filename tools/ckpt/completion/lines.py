"""Command lines as bash has them: taken apart, and candidates as bash inserts them.

bash replaces only what follows the last *word break*, a character like ``@``, ``:`` or ``=``, and
inserts what it gets without quoting it.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_SPACES: Final = " \t\n"
_PLAIN: Final = re.compile(r"[^A-Za-z0-9_@%+=:,./~^-]")
_IN_DOUBLE: Final = re.compile(r'(["$`\\!])')


class Typed(NamedTuple):
    """A line up to the cursor."""

    words: tuple[str, ...]
    """Those before the last, unquoted, without the program."""
    last: str
    """The word at the cursor, unquoted; may be empty."""
    quote: str
    """The quote in which it ends, or empty."""
    kept: int
    """How many of its characters bash keeps; None of ours replace them. -1 if it cannot be told."""


def typed(line: str, breaks: str) -> Typed:
    """Take a line apart. ``breaks``: COMP_WORDBREAKS."""
    words: list[str] = []
    word, quote, kept = "", "", 0
    inside, quoted_at = False, -1
    at = 0
    while at < len(line):
        char = line[at]
        at += 1
        if quote:
            if char == quote:
                quote = ""
            elif char == "\\" and quote == '"' and line[at : at + 1] in ('"', "$", "`", "\\"):
                word += line[at]
                at += 1
            else:
                word += char
        elif char in "'\"":
            quote, inside, quoted_at = char, True, len(word)
        elif char == "\\":
            word += line[at : at + 1]
            inside = True
            at += 1
        elif char in _SPACES:
            if inside:
                words.append(word)
            word, kept, inside, quoted_at = "", 0, False, -1
        else:
            word += char
            inside = True
            if char in breaks:
                kept = len(word)
    # A quote that opened in the middle of a word: what bash would replace is not what we know.
    if quote and quoted_at != kept:
        kept = -1
    return Typed(tuple(words[1:]), word, quote, kept)


def inserted(value: str, line: Typed) -> str:
    """A candidate as bash inserts it, which begins behind what it keeps."""
    rest = value[line.kept :]
    if line.quote == "'":
        return rest.replace("'", "'\\''")
    if line.quote == '"':
        return _IN_DOUBLE.sub(r"\\\1", rest)
    escaped = _PLAIN.sub(lambda char: "\\" + char[0], rest)
    # A tilde that the user typed stays one; in a name it is a character.
    return "\\" + escaped if escaped.startswith("~") and not escaped.startswith("~/") and not line.kept else escaped
