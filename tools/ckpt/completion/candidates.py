"""What a parameter may be: stores and their checkpoints, operators, states, columns, files.

Only local folders are looked at. Names out of a checkpoint that would not stand on a command line
as they are, with line ends or escapes in them, are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

from stateformat import words

from ..options import Address, AddressType, Session, is_local
from ..output import Output
from ..watch import Watch

if TYPE_CHECKING:
    from stateformat.model import Record

SHOWN: Final = 1000
"""Candidates that a shell gets."""
IDS_SHOWN: Final = 100
_SCANNED: Final = 20_000
"""Entries of a folder that are looked at."""
_ID: Final = re.compile(r"(\d{20})\.json")
_MADE: Final = re.compile(rb'"created_at_us":(\d{1,18})')
_HEAD_BYTES: Final = 16 << 10
_OPEN: Final = "open"
Items = list[CompletionItem]


def open_ended(item: CompletionItem) -> bool:
    """Whether more may follow a value without a space."""
    return item.type == _OPEN or item.value.endswith(("/", "=", "@", ",", ".."))


def values_of(parameter: click.Parameter, context: click.Context, typed: str) -> Items | None:
    """What the parameter may be; None where click knows best."""
    if isinstance(parameter.type, AddressType):
        return stores(typed, parameter.type.checkpoint)
    if isinstance(parameter.type, click.Path):
        return paths(typed)
    if parameter.name == "state":
        return [item for item in _states(context, typed) if item.value.startswith(typed)]
    form = parameter.metavar or parameter.type.name
    for pattern, make in _BY_FORM:
        if re.fullmatch(pattern, form):
            return [item for item in make(context, typed) if item.value.startswith(typed)]
    return None


# ---- folders -------------------------------------------------------------------------------------


def paths(typed: str, *, only_folders: bool = False) -> Items:
    """Files and folders: what begins like this, in the order of names; folders end with a slash."""
    folder, name = os.path.split(typed)
    shown = [entry for entry in _entries(folder) if entry.name.startswith(name)]
    found = sorted((entry.name, entry.is_dir()) for entry in shown if name.startswith(".") or entry.name[:1] != ".")
    head = typed[: len(typed) - len(name)]
    return [
        CompletionItem(head + entry + "/" * is_folder) for entry, is_folder in found if is_folder or not only_folders
    ]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:  # noqa: PTH111 - "" is no Path
            return [*islice(entries, _SCANNED)]
    except OSError:
        return []


def stores(typed: str, checkpoint: str) -> Items:
    """Folders, those that hold checkpoints first; behind ``STORE@`` its ids and savepoints.

    ``checkpoint``: whether an id may follow: "never", "optional" or "always".
    """
    form = re.match(r"(flink:|spark:)?(file://)?", typed)
    assert form is not None
    head, place = form[0], typed[form.end() :]
    if "://" in place:
        return []  # A remote store: nobody waits for it while he types.
    store, at, begun = place.rpartition("@")
    if at and checkpoint != "never" and "/" not in begun and (folder := _folder(store)) is not None and _holds(folder):
        return [
            CompletionItem(f"{head}{store}@{item.value}", help=item.help)
            for item in (*ids(folder), *pins(folder))
            if item.value.startswith(begun)
        ]
    found = [(item, _holds(_folder(item.value))) for item in paths(place, only_folders=True)]
    # More may follow a store's name: an id.
    end, kind = {"never": ("", "plain"), "optional": ("", _OPEN), "always": ("@", _OPEN)}[checkpoint]
    some = [CompletionItem(head + item.value.rstrip("/") + end, kind, "store") for item, holds in found if holds]
    return some + [CompletionItem(head + item.value) for item, holds in found if not holds]


def _folder(place: str) -> Path | None:
    return Path(os.path.expanduser(place)) if place else None  # noqa: PTH111 - of "~" alone, too


def _holds(folder: Path | None) -> bool:
    """Whether checkpoints lie in a folder, ours or another system's, as far as names tell."""
    if folder is None:
        return False
    try:
        return any((folder / name).exists() for name in ("checkpoints", "_metadata", "offsets"))
    except (OSError, ValueError):
        return False


def ids(folder: Path) -> Items:
    """The ids of a store's checkpoints, newest first, with their times."""
    names = (_ID.fullmatch(entry.name) for entry in _entries(str(folder / "checkpoints")))
    found = sorted((int(match[1]) for match in names if match), reverse=True)[:IDS_SHOWN]
    return [CompletionItem(str(number), help=_made(folder / "checkpoints" / f"{number:020}.json")) for number in found]


def _made(record: Path) -> str:
    try:
        with record.open("rb") as file:
            match = _MADE.search(file.read(_HEAD_BYTES))
    except OSError:
        return ""
    return f"{words.clock(int(match[1]), seconds=False)} UTC" if match else ""


def pins(folder: Path) -> Items:
    """The names of the savepoints below a store."""
    named = sorted(entry.name for entry in _entries(str(folder / "savepoints")) if entry.is_dir())
    return [CompletionItem(name, help="savepoint") for name in named if not name.startswith(".")]


# ---- what a record says --------------------------------------------------------------------------


def _record(context: click.Context) -> Record | None:
    """The record of the checkpoint on the line."""
    address = context.params.get("address")
    if not isinstance(address, Address) or not is_local(address.url):
        return None
    watch = Watch()
    try:
        return Session(Output(), {}, watch).read_only(address).record
    except Exception:
        return None  # Whatever is wrong with it, other commands say.
    finally:
        watch.end()


def _operators(context: click.Context, _: str = "") -> Iterator[CompletionItem]:
    record = _record(context)
    for operator in () if record is None else record.graph.operators:
        yield CompletionItem(str(operator.uid), help=words.label(operator.name))


def _states(context: click.Context, _: str) -> Iterator[CompletionItem]:
    chosen = _chosen(context)
    kinds = {state.name: words.label(f"{state.mode} {state.kind or ''}") for state in chosen}
    return (CompletionItem(name, help=kind) for name, kind in kinds.items())


def _chosen(context: click.Context) -> list[Any]:
    """The states of the operator on the line; of all if there is none."""
    record, given = _record(context), context.params.get("operator")
    if record is None:
        return []
    uids = {operator.uid for operator in record.graph.operators if given in (None, operator.uid, operator.name)}
    return [state for state in record.states if state.operator in uids]


def _operators_equal(context: click.Context, _: str) -> Iterator[CompletionItem]:
    return (CompletionItem(f"{item.value}=", help=item.help) for item in _operators(context))


def _to_drop(context: click.Context, typed: str) -> Iterator[CompletionItem]:
    """Operators; their states, once a slash is typed; columns, once a point."""
    record = _record(context)
    if record is None:
        return
    yield from _operators(context)
    for state in record.states:
        name = f"{state.operator}/{state.name}"
        if "/" in typed:
            yield CompletionItem(name)
        if typed.startswith(f"{name}."):
            for field in state.current.fields:
                yield CompletionItem(f"{name}.{field.name}")


def _columns(context: click.Context, typed: str) -> Iterator[CompletionItem]:
    """Columns, separated by commas."""
    before, comma, _ = typed.rpartition(",")
    name = context.params.get("state")
    chosen = [state for state in _chosen(context) if name in (None, state.name)]
    named = {field.name: str(field.type) for state in chosen for field in state.current.fields}
    taken = before.split(",")
    return (
        CompletionItem(before + comma + name, help=kind)
        for name, kind in named.items()
        if name not in taken and "," not in name
    )


def _store(context: click.Context) -> Path | None:
    """The folder of the store on the line."""
    address = context.params.get("address")
    return _folder(address.url) if isinstance(address, Address) and is_local(address.url) else None


def _ranges(context: click.Context, typed: str) -> Iterator[CompletionItem]:
    first, dots, _ = typed.partition("..")
    folder = _store(context)
    for item in [] if folder is None else ids(folder):
        yield CompletionItem(f"{first}..{item.value}" if dots else f"{item.value}..", help=item.help)


def _pins(context: click.Context, _: str) -> Iterator[CompletionItem]:
    folder = _store(context)
    return iter([] if folder is None else pins(folder))


def _other(context: click.Context, typed: str) -> Iterator[CompletionItem]:
    """Another checkpoint: of a store, or, behind ``@`` alone, of the store on the line."""
    if not typed.startswith("@"):
        yield from stores(typed, "optional")
        return
    folder = _store(context)
    for item in () if folder is None else (*ids(folder), *pins(folder)):
        yield CompletionItem(f"@{item.value}", help=item.help)


def _paths(_: click.Context, typed: str) -> Iterator[CompletionItem]:
    return iter(paths(typed))


_BY_FORM: Final[tuple[tuple[str, Callable[[click.Context, str], Iterator[CompletionItem]]], ...]] = (
    ("UID|OPERATOR", _operators),
    ("UID=.*|OLD=NEW", _operators_equal),
    (r"(UID|OPERATOR)\[/STATE.*", _to_drop),
    (r"COLUMN.*", _columns),
    (r"FROM\.\.TO", _ranges),
    (r"\[NAME\]", _pins),
    (r"OTHER\[@ID\]", _other),
    ("FILE.*|.*FOLDER.*|JOB", _paths),
)
"""Values by the form in which help shows a parameter."""
