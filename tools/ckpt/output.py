"""A command's result on standard output, as a page or JSON; the rest on standard error.

A command makes one JSON document, and blocks are made of that document: whatever a page shows, a
program can read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TextIO

import click

from stateformat import words
from stateformat.pages.blocks import ELLIPSIS, Page

from . import text
from .exit_status import Failure
from .json_text import pieces, unprintable_escaped
from .text import Look

Document = dict[str, Any]
MakePage = Callable[[Document], Page]
Step = Callable[[int, int], None]
"""Takes how much is done, of how much (0 while that is unknown)."""
_WRITE_CHARACTERS: Final = 1 << 20
_BAR: Final = 16
_REDRAWN_S: Final = 0.1
_ERASED: Final = "\r\x1b[K"


def look_of(stream: TextIO) -> Look:
    """How a page on this stream may look, by its width and encoding, COLUMNS, NO_COLOR and TERM."""
    color = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = min(max(_terminal_columns() or text.WIDTH_DEFAULT, text.WIDTH_MIN), text.WIDTH_MAX)
    return Look(width, _is_utf8(stream), color)


def _terminal_columns() -> int:
    """COLUMNS, or the terminal's columns, or 0."""
    # shutil would say so too, but its import takes longer than drawing a page.
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns if sys.__stdout__ else 0
    except (OSError, ValueError):
        return 0


def _is_utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "").replace("_", "") in ("utf8", "utf8sig")


def write_json(document: Mapping[str, Any]) -> None:
    """Write a document to standard output, indented, in the characters that it takes."""
    parts, length = [], 0
    for part in map(unprintable_escaped, pieces(document, ensure_ascii=not _is_utf8(sys.stdout))):
        parts.append(part)
        length += len(part)
        if length >= _WRITE_CHARACTERS:
            _write("".join(parts), end=False)
            parts, length = [], 0
    _write("".join(parts))


def _write(said: str, *, end: bool = True) -> None:
    if not _is_utf8(sys.stdout):
        said = said.encode(sys.stdout.encoding or "ascii", "backslashreplace").decode(sys.stdout.encoding or "ascii")
    with on_standard_output():
        click.echo(said, color=True, nl=end)


@contextmanager
def on_standard_output() -> Iterator[None]:
    """Names standard output in the error of a failed write; a closed pipe stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or "standard output") from error


class Output:
    """What a command writes with."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    def show(self, document: Document, make: MakePage) -> None:
        """Write the command's one result: the document, or the page that is made of it."""
        if self.as_json:
            write_json(document)
        else:
            _write("\n".join(text.lines(make(document), look_of(sys.stdout))))

    def line(self, document: Document, make: MakePage) -> None:
        """Write one of many results at once: the document on one line, or the page made of it."""
        if self.as_json:
            _write(unprintable_escaped(json.dumps(document, ensure_ascii=not _is_utf8(sys.stdout))))
        else:
            _write("\n".join(text.lines(make(document), look_of(sys.stdout))))

    def note(self, text: str) -> None:
        """Write a sentence for the user to standard error, in either format."""
        complain(words.label(text))

    @contextmanager
    def progress(self, title: str, *, unit: str = "bytes") -> Iterator[Step]:
        """A progress bar on standard error, if that is a terminal. ``unit`` is what is counted."""
        if not _shows_progress():
            yield lambda _done, _total: None
            return
        look, width, begun = look_of(sys.stderr), (_terminal_columns() or text.WIDTH_DEFAULT) - 1, time.monotonic()
        drawn = begun - _REDRAWN_S

        def step(done: int, total: int) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn < _REDRAWN_S:
                return
            drawn = now
            # Of a wait nobody knows how much of it is done.
            whole = 0 if unit == "s" else total
            bar = text.bar(min(done, whole), whole, replace(look, color=False), width=_BAR).ljust(_BAR if whole else 0)
            amount = " ".join(filter(None, (bar, amount_text(done, total, unit, now - begun) if done else "")))
            room = max(0, width - len(amount) - bool(amount))
            line = " ".join(filter(None, (text.shorten(look.text(title), room, look.text(ELLIPSIS)), amount)))
            sys.stderr.write(_ERASED + text.shorten(line, width, ""))
            sys.stderr.flush()

        step(0, 0)
        try:
            yield step
        finally:
            sys.stderr.write(_ERASED)
            sys.stderr.flush()


def _shows_progress() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def amount_text(done: int, total: int, unit: str, seconds: float) -> str:
    """How much is done of how much, and how fast: ``1.5 GiB of 2.0 GiB, 310.0 MiB/s, 2 s left``.

    Seconds are a wait until it is given up.
    """
    if unit == "s":
        return f"{words.count(done)} s; gives up after {words.count(total)} s"
    text = words.size if unit == "bytes" else words.count
    amount = f"{text(done)} of {text(total)}" if total else text(done)
    rate = f", {text(int(done / seconds))}/s" if done and seconds >= 1 else ""
    left = f", {seconds * (total - done) / done:,.0f} s left" if 0 < done < total and rate else ""
    return amount + (f" {unit}" if unit != "bytes" else "") + rate + left


def complain(message: str) -> None:
    """Write text to standard error, with every unprintable character but line ends spelled out. On
    a terminal no word is broken at its edge.
    """
    encoding = sys.stderr.encoding or "ascii"
    said = words.lines_label(message).encode(encoding, "backslashreplace").decode(encoding)
    if sys.stderr.isatty():
        said = "\n".join(part for line in said.split("\n") for part in text.hanging(line, look_of(sys.stderr).width))
    # A progress bar may stand on the line.
    click.echo((_ERASED if _shows_progress() else "") + said, err=True)


def show_failure(failure: Failure, *, as_json: bool) -> None:
    """Write a sentence to standard error; in JSON format also a document to standard output."""
    complain(failure.message if failure.kind == "help" else f"ckpt: {failure.message}")
    if failure.hint:
        complain(f"      {failure.hint}")
    if as_json:
        write_json(failure.to_json())
