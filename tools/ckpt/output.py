"""Where a command's result goes: a page or a JSON document on standard output, everything else on standard error.

A command makes one JSON document and a function that draws it; text is drawn *from the document*, so the two cannot tell
different stories, and whatever a page shows a program can read. Progress is drawn by rich, which is imported only when
standard error is a terminal and the command is a long one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import click

from .exit_status import Failure
from .json_text import pieces, unprintable_escaped
from .text import WIDTH_DEFAULT, WIDTH_MAX, WIDTH_MIN, Look, count, label, lines_label, size

Document = dict[str, Any]
Draw = Callable[[Document, Look], Iterable[str]]
Step = Callable[[int, int], None]
"""Progress: how much is done, of how much (0 while that is not known)."""
_WRITE_CHARACTERS = 1 << 20


def look_of(stream: TextIO) -> Look:
    """How pages for this stream may look: COLUMNS or the terminal's width, its encoding, NO_COLOR."""
    colour = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Look(min(max(_terminal_columns() or WIDTH_DEFAULT, WIDTH_MIN), WIDTH_MAX), _is_utf8(stream), colour)


def _terminal_columns() -> int:
    """COLUMNS, or the columns of the terminal, or 0 (what shutil says, whose import takes longer than drawing a page)."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns if sys.__stdout__ else 0
    except (OSError, ValueError):
        return 0


def _silent(done: int, total: int) -> None:
    pass


def _is_utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "").replace("_", "") in ("utf8", "utf8sig")


def write_json(document: Mapping[str, Any]) -> None:
    """A document on standard output, indented, in the characters that it takes."""
    parts, size = [], 0
    for part in map(unprintable_escaped, pieces(document, ensure_ascii=not _is_utf8(sys.stdout))):
        parts.append(part)
        size += len(part)
        if size >= _WRITE_CHARACTERS:
            _write("".join(parts), end=False)
            parts, size = [], 0
    _write("".join(parts))


def _write(text: str, *, end: bool = True) -> None:
    if not _is_utf8(sys.stdout):
        text = text.encode(sys.stdout.encoding or "ascii", "backslashreplace").decode(sys.stdout.encoding or "ascii")
    with on_standard_output():
        click.echo(text, color=True, nl=end)


@contextmanager
def on_standard_output() -> Iterator[None]:
    """Names standard output in the error of a write to it; a reader that went away is told as it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or "standard output") from error


class Output:
    """What a command writes with; ``as_json`` by ``--format``."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    def show(self, document: Document, draw: Draw) -> None:
        """The command's one result: the document, or the page that ``draw`` makes of it."""
        if self.as_json:
            write_json(document)
        else:
            _write("\n".join(draw(document, look_of(sys.stdout))))

    def note(self, text: str) -> None:
        """A sentence for the person at the terminal, on standard error, in either format."""
        complain(label(text))

    @contextmanager
    def progress(self, title: str, *, unit: str = "bytes") -> Iterator[Step]:
        """A bar on standard error while a long command runs, if that is a terminal; a function that does nothing if not.

        It shows how much is done of how much, how fast, and the time that is left. ``unit`` is bytes, or what is counted.
        """
        if not sys.stderr.isatty():
            yield _silent
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(compact=True),
        )
        begun = time.monotonic()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(label(title), total=None, amount="")

            def step(done: int, total: int) -> None:
                amount = amount_text(done, total, unit, time.monotonic() - begun)
                bars.update(task, completed=done, total=total or None, amount=amount)

            yield step


def amount_text(done: int, total: int, unit: str, seconds: float) -> str:
    """How much is done of how much, and how fast: ``1.5 GiB of 2.0 GiB, 310.0 MiB/s``; ``unit`` names what is no bytes."""
    text = size if unit == "bytes" else count
    amount = f"{text(done)} of {text(total)}" if total else text(done)
    rate = f", {text(int(done / seconds))}/s" if done and seconds >= 1 else ""
    return amount + (f" {unit}" if unit != "bytes" else "") + rate


def complain(text: str) -> None:
    """Text on standard error. Line ends are ours; whatever else a terminal would obey is spelled out."""
    encoding = sys.stderr.encoding or "ascii"
    click.echo(lines_label(text).encode(encoding, "backslashreplace").decode(encoding), err=True)


def show_failure(failure: Failure, *, as_json: bool) -> None:
    """One sentence on standard error; in JSON format also a document with ``error`` on standard output."""
    complain(failure.message if failure.kind == "help" else f"ckpt: {failure.message}")
    if failure.hint:
        complain(f"      {failure.hint}")
    if as_json:
        write_json(failure.to_json())


__all__ = [
    "Document",
    "Draw",
    "Output",
    "Step",
    "complain",
    "look_of",
    "on_standard_output",
    "show_failure",
    "write_json",
]
