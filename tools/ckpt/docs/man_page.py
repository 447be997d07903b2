"""The man page ``ckpt(1)``, from the same help that ``ckpt COMMAND --help`` prints.

It lies in docs/ckpt.1, and the wheel has it as share/man/man1/ckpt.1.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from stateformat import __version__

from ..exit_status import STATUS_MEANINGS
from ..main import COMMANDS, SECTIONS, ckpt

MAN_PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "ckpt.1"
_OF_ALL: Final = 12
"""Options that so many commands have, in the same words, are explained once."""
_SEE: Final = "docs/cli.md: real output; docs/json.md: the JSON of every command; stateformat/SPEC.md: the format."
_WIDE: Final = 1000
_LINE: Final = 72


def man_page() -> str:
    """The page as man(7) source, in ASCII."""
    group = click.Context(ckpt, info_name="ckpt", **ckpt.context_settings)
    contexts = {name: _context(group, name) for name in COMMANDS}
    records = {name: _options(context) for name, context in contexts.items()}
    shared = _shared(records)
    about, _, more = inspect.cleandoc(ckpt.help or "").partition("\n\n")
    lines = [
        '.\\" Made from the help of ckpt by `make docs`; do not edit.',
        f'.TH CKPT 1 "" "stateformat {__version__}" "User Commands"',
        ".SH NAME",
        "ckpt \\- " + _inline(about.rstrip(".").lower()),
        ".SH SYNOPSIS",
        ".B ckpt",
        "[\\fIoptions\\fR] \\fIcommand\\fR [\\fIarguments\\fR]",
        ".SH DESCRIPTION",
        *_paragraphs(more.partition("\n\nExit status:")[0]),
    ]
    for title, (_, commands) in SECTIONS.items():
        lines.append(f".SH {_quoted(title.upper())}")
        for name in commands:
            lines += _command(name, contexts[name], [record for record in records[name] if record not in shared])
    lines += [".SH COMMON OPTIONS", "Commands that work on a store have most of these."]
    lines += _tagged(shared)
    lines += [".SH EXIT STATUS", *_tagged(STATUS_MEANINGS)]
    lines += [".SH SEE ALSO", *_text(_SEE)]
    return "\n".join(lines) + "\n"


def _context(group: click.Context, name: str) -> click.Context:
    command = ckpt.get_command(group, name)
    assert command is not None
    return click.Context(command, info_name=name, parent=group, terminal_width=_WIDE, max_content_width=_WIDE)


def _options(context: click.Context) -> list[tuple[str, str]]:
    """Options with their help, as click words them."""
    every = context.command.get_params(context)
    found = (option.get_help_record(context) for option in every if isinstance(option, click.Option))
    return [record for record in found if record is not None]


def _shared(records: Mapping[str, Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    every = [record for some in records.values() for record in some]
    return [record for record in dict.fromkeys(every) if every.count(record) >= _OF_ALL]


def _command(name: str, context: click.Context, options: Sequence[tuple[str, str]]) -> Iterator[str]:
    usage = " ".join(context.command.collect_usage_pieces(context))
    yield f".SS {_quoted(f'ckpt {name} {usage}')}"
    yield from _paragraphs(inspect.cleandoc(context.command.help or ""))
    yield from _tagged(options)


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs; those that click leaves as they are (\\b) keep their lines."""
    for number, part in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        if part.startswith("\b"):
            yield ".nf"
            yield from map(_line, part.split("\n")[1:])
            yield ".fi"
        else:
            yield from _text(part)


def _tagged(records: Sequence[tuple[str, str]]) -> Iterator[str]:
    for names, text in records:
        yield ".TP"
        # Names are bold, what stands for a value is slanted.
        parts = re.split(r"(?<=\s)([^-\s,][^,]*)", names)
        yield "".join(
            f"\\fI{_inline(part)}\\fR" if at % 2 else f"\\fB{_inline(part)}\\fR" for at, part in enumerate(parts)
        )
        yield from _text(text)


def _text(text: str) -> list[str]:
    """Text on short lines, which a reader's page fills anew."""
    return [
        _line(line)
        for line in textwrap.wrap(" ".join(text.split()), _LINE, break_long_words=False, break_on_hyphens=False)
    ]


def _line(line: str) -> str:
    """A line of text: nothing in it is a request."""
    found = _inline(line)
    return f"\\&{found}" if found[:1] in (".", "'") else found


def _inline(text: str) -> str:
    escaped = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("'", "\\(aq").replace("~", "\\(ti")
    )
    escaped = escaped.replace("^", "\\(ha").replace('"', "\\(dq")
    return "".join(char if char.isascii() else f"\\[u{ord(char):04X}]" for char in escaped)


def _quoted(text: str) -> str:
    return f'"{_inline(text)}"'
