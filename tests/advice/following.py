"""Finding advice in what ``ckpt`` prints, and doing what it says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import click

from stateformat.tools.ckpt.exit_status import in_options
from stateformat.tools.ckpt.main import ckpt
from tests.advice.sentences import HOLE, Sentence, commands_in, sentences
from tests.ckpt.ckpt_runs import Run, run

WIDE = "500"
"""Columns: no line of a sentence is broken in the middle of a word."""
COMPLETED: Mapping[str, tuple[str, ...]] = {
    "copy": ("{new}",),
    "diff": ("{store}",),
    "export": ("--as", "csv", "--to", "{new}"),
    "gc": ("--keep", "1"),
    "import": ("--to", "{new}"),
    "pin": ("kept",),
    "rescale": ("--parallelism", "3"),
    "sql": ("from states",),
}
"""What a command needs beside its store, where the sentence leaves that to its reader."""
_LEFT_OUT = re.compile(r"--drop '?([^\s'`,)]*[^\s'`,).])")


@dataclass
class Place:
    """A folder of which a command complained: a store, or another system's checkpoint."""

    store: Path
    """What the command was called with, without an id."""
    id: int = 1
    """A whole checkpoint in it."""
    given: Mapping[str, str] = field(default_factory=dict)
    """What stands for placeholders here, such as ``SAVEPOINT``."""
    made: list[Path] = field(default_factory=list)
    """What commands were told to make, in this order."""

    def new(self) -> Path:
        """A place where nothing is yet, outside of the folder."""
        root = next(path for path in self.store.parents if path.name.startswith("tried"))
        self.made.append(root / f"new-{len(self.made) + 1}")
        return self.made[-1]

    def argv(self, line: str) -> list[str]:
        """A command of a sentence, with its store and what it cannot be called without."""
        name, *rest = shlex.split(line)
        command = ckpt.get_command(click.Context(ckpt), name)
        assert command is not None, line
        takes = {text: not one.is_flag for one in command.params if isinstance(one, click.Option) for text in one.opts}
        words, places, option = [name], 0, ""
        for word in rest:
            words.append(self._filled(word, option))
            places += not option and not word.startswith("-")
            option = word if not option and takes.get(word) else ""
        if not places:
            always = any(getattr(one.type, "checkpoint", "") == "always" for one in command.params)
            words.insert(1, f"{self.store}@{self.id}" if always else str(self.store))
        more = COMPLETED.get(name, ())
        if more and not ((places > 1 or "--to" in words) if not more[0].startswith("-") else set(more) & set(words)):
            words += [text.format(store=self.store, new=self.new() if "{new}" in text else "") for text in more]
        return words

    def _filled(self, word: str, option: str) -> str:
        if word in self.given:
            return self.given[word]
        if word in {"TARGET", "COPY"} or (option and word in {"STORE", "URL"}):
            return str(self.new())
        if option:
            return {"N": "3", "AGE": "7d"}.get(word, word)
        named = re.sub(r"@ID$", f"@{self.id}", word)
        named = re.sub(r"^(STORE|QUERY)(?=@|$)", str(self.store), named)
        return {"NAME": "kept"}.get(named, named)

    def tried(self, line: str) -> tuple[list[str], str | None]:
        """Do what a sentence says: the call, and why it was refused, if it was.

        Where the answer is to leave something out, that is done as well.
        """
        argv = self.argv(line)
        while True:
            found = run(*argv, "--format", "json", COLUMNS=WIDE)
            refused = refusal_of(found)
            leave = _LEFT_OUT.search(refused or "")
            if leave is None or leave[1] in argv or "UID" in leave[1] or argv[0] != "import":
                return argv, refused
            argv += ["--drop", leave[1]]


def refusal_of(found: Run) -> str | None:
    """Why a call did nothing; None if it did what it is for, whatever it found."""
    try:
        document: Any = json.loads(found.out)
    except ValueError:
        document = None
    if isinstance(document, dict) and "error" in document:
        return str(document["error"]["message"])
    return None if found.status in (0, 1) else found.err


def said(found: Run) -> str:
    """All that a call printed, in one line."""
    return " ".join((found.out + " " + found.err).split())


def complaints(text: str) -> Iterator[tuple[Sentence, str]]:
    """The advice of the product that was printed, with the values in it."""
    for sentence in sentences():
        for pattern, piece in _patterns(sentence):
            match = pattern.search(text) if piece in text else None
            if match:
                yield sentence, match[0]
                break


def lines_in(text: str) -> list[str]:
    """The commands that a printed text tells its reader to call."""
    found = [line for _, printed in complaints(text) for line in commands_in(printed)]
    return list(dict.fromkeys([*commands_in(text), *found]))


@cache
def _patterns(sentence: Sentence) -> list[tuple[re.Pattern[str], str]]:
    found = []
    for text in {sentence.text, in_options(sentence.text), sentence.text.replace("drop=", "--drop ")}:
        pieces = [" ".join(piece.split()) for piece in re.split(rf"{HOLE}|%[sdr]", text)]
        while pieces and not pieces[0]:
            pieces.pop(0)
        while pieces and not pieces[-1]:
            pieces.pop()
        pattern = r"\s?.{0,900}?\s?".join(map(re.escape, pieces))
        found.append((re.compile(pattern, re.IGNORECASE), max(pieces, key=len)[1:]))
    return found


def copied(source: Path, to: Path) -> Path:
    """A copy of a folder, to be changed."""
    return Path(shutil.copytree(source, to, symlinks=True))
