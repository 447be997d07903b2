"""Completion of command lines in bash, zsh and fish: click's own, which asks here for values.

Only local stores are looked at, and nothing is written. An error completes nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from .options import Address, AddressType, Session, is_local
from .output import Output
from .watch import Watch

if TYPE_CHECKING:
    from stateformat.model import Record

VARIABLE: Final = "_CKPT_COMPLETE"
INSTALLED: Final = {
    "bash": ('eval "$(ckpt completion bash)"', "~/.bashrc"),
    "zsh": ('eval "$(ckpt completion zsh)"', "~/.zshrc"),
    "fish": ("ckpt completion fish | source", "~/.config/fish/config.fish"),
}
"""The one line that installs it, and where that line belongs."""
_SHOWN: Final = 100


def script(shell: str) -> str:
    """The script of a shell. Its second line says how to install it."""
    line, file = INSTALLED[shell]
    made = get_completion_class(shell)
    assert made is not None
    # `source` of click's class for bash would start a bash to learn its version.
    text = made.source_template % made(click.Group(), {}, "ckpt", VARIABLE).source_vars()
    first, _, rest = text.strip().partition("\n")
    comment = f"# To install: put this line into {file}:  {line}"
    return f"{first}\n{comment}\n{rest}\n" if first.startswith("#") else f"{comment}\n{first}\n{rest}\n"


def answer(group: click.Group, instruction: str) -> int:
    """Print what may come next, as click's scripts read it."""
    known = group.get_command

    def with_values(ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = known(ctx, cmd_name)
        for parameter in command.params if command else ():
            if (values := _values_of(parameter)) is not None:
                parameter.shell_complete = values  # type: ignore[method-assign]
        return command

    group.get_command = with_values  # type: ignore[method-assign]
    with contextlib.suppress(Exception):
        return shell_complete(group, {}, "ckpt", VARIABLE, instruction)
    return 0


def _values_of(parameter: click.Parameter) -> partial[list[CompletionItem]] | None:
    """What completes a parameter; None where click knows."""
    form = parameter.metavar or parameter.type.name
    if isinstance(parameter.type, AddressType) or form.startswith("OTHER"):
        return partial(_addresses)
    if parameter.name == "state":
        return partial(_named, _states)
    if re.match(r"UID|OPERATOR|OLD=", form):
        return partial(_named, _operators)
    return None


def _addresses(context: click.Context, typed: str) -> list[CompletionItem]:
    """Folders, which the shell lists; after ``@`` the ids of the store and its savepoints."""
    store, at, begun = typed.rpartition("@")
    if not at:
        return [CompletionItem(typed, type="dir")]
    folder = _folder(store) if store else _store(context)
    names = [] if folder is None else [*_ids(folder), *_savepoints(folder)]
    return [CompletionItem(f"{store}@{name}") for name in names if name.startswith(begun)]


def _named(names: Callable[[click.Context], list[str]], context: click.Context, typed: str) -> list[CompletionItem]:
    with contextlib.suppress(Exception):  # Whatever is wrong with the checkpoint, other commands say.
        found = [name for name in names(context) if name.startswith(typed) and name.isprintable()]
        return [CompletionItem(name) for name in found[:_SHOWN]]
    return []


def _folder(place: str) -> Path | None:
    plain = re.sub(r"^(flink:|spark:)?(file://)?", "", place)
    return None if "://" in plain else Path(plain).expanduser()


def _store(context: click.Context) -> Path | None:
    address = _address(context)
    return None if address is None else _folder(address.url)


def _ids(folder: Path) -> Iterator[str]:
    """The ids of a store's checkpoints, newest first."""
    names = sorted((path.stem for path in folder.glob("checkpoints/*.json")), reverse=True)[:_SHOWN]
    return (name.lstrip("0") for name in names if re.fullmatch(r"\d{20}", name))


def _savepoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("savepoints/[!.]*") if path.name.isprintable())


def _address(context: click.Context) -> Address | None:
    """The first address on the line. After an option without its value, click leaves the words
    before it in ``args``.
    """
    given = context.params.get("address")
    if given is None and context.args:
        given = AddressType().convert(context.args[0], None, context)
    return given if isinstance(given, Address) and is_local(given.url) else None


def _record(context: click.Context) -> Record | None:
    address = _address(context)
    watch = Watch()
    try:
        return None if address is None else Session(Output(), {}, watch).read_only(address).record
    finally:
        watch.end()


def _operators(context: click.Context) -> list[str]:
    record = _record(context)
    return [] if record is None else [str(operator.uid) for operator in record.graph.operators]


def _states(context: click.Context) -> list[str]:
    """The states of the operator on the line; of all if there is none."""
    record, given = _record(context), context.params.get("operator")
    if record is None:
        return []
    uids = {operator.uid for operator in record.graph.operators if given in (None, operator.uid, operator.name)}
    return list(dict.fromkeys(state.name for state in record.states if state.operator in uids))
