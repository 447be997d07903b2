"""What advice names exists: each command, each of its options, each argument of a Python call."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import PurePath

import click
import pytest

from stateformat.tools.ckpt.main import COMMANDS, ckpt
from tests.advice.sentences import HOLE, Sentence, of_source, sentences
from tests.test_tree import MODULES, tree

SAMPLES = {"N": "3", "ID": "3", "AGE": "7d"}
"""What stands for a placeholder that is no text."""
HEARD_BY = {
    "backends/foreign/flink/writing/": ("export",),
    "backends/importing.py": ("import",),
    "backends/foreign/spark/repartition/": ("rescale", "rewrite"),
    "backends/rewrite/transforming.py": ("rewrite",),
    "tools/ckpt/commands/running/asking.py": ("stop", "savepoint", "rescale", "run"),
    "tools/ckpt/pages.py": ("top", "validate"),
    "tools/ckpt/programs.py": ("explain-restore", "run"),
    "tools/ckpt/repartitioned.py": ("rescale", "rewrite"),
    "tools/ckpt/start_plan.py": ("explain-restore", "run"),
    "tools/ckpt/transforms.py": ("rewrite",),
}
"""The commands whose users read the sentences of a file, where these are not all."""


def test_each_command_in_advice_exists_and_takes_what_stands_with_it() -> None:
    wrong = {str(one): [fault for line in one.commands for fault in faults_of_command(line)] for one in sentences()}
    assert not any(wrong.values()), {one: faults for one, faults in wrong.items() if faults}


def test_each_option_in_advice_is_one_of_a_command_that_says_so_or_is_named() -> None:
    wrong = {str(one): [*faults_of_options(one)] for one in sentences() if one.options}
    assert not any(wrong.values()), {one: faults for one, faults in wrong.items() if faults}


def test_each_argument_in_advice_is_one_that_a_function_takes() -> None:
    wrong = [(str(one), name) for one in sentences() for name in one.arguments if name not in parameters()]
    assert not wrong, f"no function has these: {wrong}"


@pytest.mark.parametrize(
    "code",
    [
        'raise E(f"it is full; `ckpt rewrit {store}` helps")',
        'raise E("it is full; `ckpt rewrite STORE --too URL` helps")',
        'raise E("it is " + what + ", so `ckpt rewrite --max-parallelism many` helps")',
        'raise E("go back with `ckpt rollback STORE`")',
        'raise E(f"make one of it: `ckpt import {url}`")',
        'raise E("it is kept; ask again with " "--parallelsim N")',
        'raise E("the place is kept, so give plaice=... or nothing")',
        "say(f\"{name}: {'ask with --tu there' if there else here}\")",
    ],
)
def test_advice_that_names_what_is_not_there_is_found(code: str) -> None:
    found = of_source(code, "backends/some.py")
    wrong = [
        *(fault for one in found for line in one.commands for fault in faults_of_command(line)),
        *(fault for one in found for fault in faults_of_options(one)),
        *(name for one in found for name in one.arguments if name not in parameters()),
    ]
    assert wrong, code


def command_of(name: str) -> click.Command | None:
    return ckpt.get_command(click.Context(ckpt), name)


@cache
def options_of(name: str) -> dict[str, click.Option]:
    command = command_of(name)
    assert command is not None
    return {text: one for one in command.params if isinstance(one, click.Option) for text in one.opts} | {
        "--help": click.Option(["--help"], is_flag=True)
    }


def faults_of_command(line: str) -> Iterator[str]:
    """What ``ckpt LINE`` could not mean."""
    name, *rest = shlex.split(line)
    command = command_of(name)
    if command is None:
        yield f"there is no command {name!r}"
        return
    options, given, places = options_of(name), set(), []
    while rest:
        word = rest.pop(0)
        text, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if not word.startswith("-"):
            places.append(word)
        elif text not in options:
            yield f"ckpt {name} has no option {text}"
        else:
            given.add(options[text].name)
            if not options[text].is_flag and (equals or rest):
                yield from faults_of_value(options[text], value if equals else rest.pop(0))
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    if len(places) > len(arguments) and all(one.nargs == 1 for one in arguments):
        yield f"ckpt {name} takes {len(arguments)} arguments, not {places}"
    for argument, place in zip(arguments, places, strict=False):
        yield from faults_of_value(argument, place)
    if places:  # A line to be pasted, for it has the store.
        missing = [one for one in command.params if one.required and one.name not in given]
        yield from (f"ckpt {name} needs {one.name}" for one in missing if one not in arguments[: len(places)])


def faults_of_value(parameter: click.Parameter, word: str) -> Iterator[str]:
    if (HOLE in word and HOLE + "@" not in word) or "%" in word:
        return
    value = word.replace("@" + HOLE, "@3").replace(HOLE, "/store").replace("@ID", "@3")
    try:
        parameter.type.convert(SAMPLES.get(value, value), parameter, None)
    except click.ClickException as error:
        yield f"{parameter.name} cannot be {word!r}: {error.format_message()}"


def faults_of_options(sentence: Sentence) -> Iterator[str]:
    """Options that no command has of which a reader of the sentence can think."""
    named = [line.split()[0] for line in sentence.commands]
    path = PurePath(sentence.path)
    own = path.stem.rstrip("_").replace("_", "-")
    heard = next((some for start, some in HEARD_BY.items() if sentence.path.startswith(start)), None)
    if heard is None:
        heard = (own,) if own in COMMANDS and "commands" in path.parts else tuple(COMMANDS)
    for text in sentence.options:
        if not any(text in options_of(name) for name in (*named, *heard) if name in COMMANDS):
            yield f"none of {[*named, *heard]} has {text}"


@cache
def parameters() -> frozenset[str]:
    """Every parameter of a function of the product, and every field of a class."""
    found = set()
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return frozenset(found) | {"client_kwargs", "anon", "safe"}  # of s3fs, and of urllib
