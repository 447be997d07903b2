"""From the environment that a shell sets to the lines that it reads."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Timer
from typing import Final

import click
from click.shell_completion import CompletionItem, ShellComplete

from .candidates import SHOWN, open_ended, values_of
from .lines import inserted, typed

VARIABLE: Final = "_CKPT_COMPLETE"
SECONDS_MAX: Final = 2.0
_BREAKS: Final = " \t\n\"'@><=;|&(:"


def answer(group: click.Group, commands: Mapping[str, str], environment: Mapping[str, str]) -> int:
    """Print what may come next. Never an error, and never later than after two seconds.

    ``commands``: those of the group, with their help, none of which is imported for its name.
    """
    end = Timer(SECONDS_MAX, os._exit, (0,))
    end.daemon = True
    end.start()
    with contextlib.suppress(BaseException):
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as long as the process lives
        text = _answer(group, commands, environment).encode("utf-8", "ignore")
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    end.cancel()
    return 0


def _answer(group: click.Group, commands: Mapping[str, str], environment: Mapping[str, str]) -> str:
    if environment[VARIABLE] != "bash":
        *words, last = environment["CKPT_WORDS"].split("\x1f")
        found = items(group, commands, words, last)
        is_zsh = environment[VARIABLE] == "zsh"
        signs = ["-+"[open_ended(item)] if is_zsh else "" for item in found]
        return "".join(
            f"{sign}{item.value}\t{' '.join((item.help or '').split())}\n"
            for sign, item in zip(signs, found, strict=True)
        )
    whole = os.fsencode(environment["COMP_LINE"])
    line = typed(
        whole[: int(environment["COMP_POINT"])].decode("utf-8", "ignore"), environment.get("COMP_WORDBREAKS", _BREAKS)
    )
    if line.kept < 0:
        return "space\n"
    found = items(group, commands, line.words, line.last)
    head = "nospace" if any(map(open_ended, found)) else "space"
    return "\n".join([head, *(inserted(item.value, line) for item in found)]) + "\n"


def items(group: click.Group, commands: Mapping[str, str], words: Sequence[str], last: str) -> list[CompletionItem]:
    """What the last word may be; all begin with what is typed of it."""
    if not words and not last.startswith("-"):
        return [CompletionItem(name, help=text) for name, text in commands.items() if name.startswith(last)]
    if words and words[0] not in commands:
        return []
    before = ""
    if last.startswith("--") and "=" in last:
        before, _, _ = last.partition("=")
        before += "="
    parent = click.Context(group, info_name="ckpt", **group.context_settings)
    command = group.get_command(parent, words[0]) if words else None
    if command is not None:
        # An option that has no value yet would keep click from reading the rest.
        whole = list(words[1:-1] if words[-1].startswith("-") else words[1:])
        known = command.make_context(words[0], whole, parent=parent, resilient_parsing=True)
        for parameter in command.params:
            # click finds out which parameter is typed; what it may be, ``candidates`` knows.
            parameter.shell_complete = partial(_values, parameter, known)  # type: ignore[method-assign]
    given = ShellComplete(group, {}, "ckpt", VARIABLE).get_completions(list(words), last)
    found = (CompletionItem(before + item.value, item.type, item.help) for item in given)
    return [item for item in found if item.value.startswith(last) and item.value.isprintable()][:SHOWN]


def _values(
    parameter: click.Parameter, known: click.Context, context: click.Context, incomplete: str
) -> list[CompletionItem]:
    found = values_of(parameter, known, incomplete)
    return type(parameter).shell_complete(parameter, context, incomplete) if found is None else found
