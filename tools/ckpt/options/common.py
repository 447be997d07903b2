"""What all commands share: the options of every one, and opening the store that an address names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from ..output import Output
from ..text import label
from ..watch import Watch
from .address import Address, AddressType, StorageOptionType, is_local, options_for

if TYPE_CHECKING:
    from stateformat.graph import Operator
    from stateformat.reading import Checkpoint
    from stateformat.storage import Storage
    from stateformat.store import CheckpointStore


class Session:
    """One run of one command: where it writes, and how it reaches stores; ``stats`` counts what all of them do."""

    def __init__(self, output: Output, storage_options: Mapping[str, Any], watch: Watch | None = None) -> None:
        self.output = output
        self._options = storage_options
        self._watch = watch or Watch()
        self._stats = self._watch.stats

    def changes(self, effect: str) -> None:
        """From here on the command changes something: what an interruption leaves behind, as the end of a sentence."""
        self._watch.effect = effect

    def publishes(self, store: str) -> None:
        """From here on the command publishes in a store."""
        self.changes(
            f"`ckpt history {store}` shows whether its checkpoint was published before. If not, nothing was changed, "
            "and `ckpt gc` finds what was written"
        )

    def store(self, url: str, *others: str) -> CheckpointStore:
        """The store at a URL; ``others`` are the further stores of the same command."""
        from stateformat.storage import open_storage
        from stateformat.store import CheckpointStore

        return CheckpointStore(self._observed(open_storage(url, **options_for(url, self._options, others))))

    def _observed(self, storage: Storage) -> Storage:
        if self._stats is None:
            return storage
        from stateformat.storage import instrumented

        return instrumented(storage, self._stats)

    def look(self, address: Address) -> Checkpoint:
        """The checkpoint of an address, to be read only: as ``store(...).open(...)`` gives it, but sooner.

        What writes checkpoints is not imported, nor is a directory looked for among the installed storages.
        """
        from stateformat.history import record_of
        from stateformat.model import CheckpointId
        from stateformat.reading import Checkpoint

        options = options_for(address.url, self._options)
        if is_local(address.url):
            from stateformat.backends.storage.local import from_url as open_local

            storage: Storage = open_local(address.url, options)
        else:
            from stateformat.storage import open_storage

            storage = open_storage(address.url, **options)
        chosen = None if address.checkpoint_id is None else CheckpointId(address.checkpoint_id)
        storage = self._observed(storage)
        return Checkpoint(storage, record_of(storage, chosen))

    def checkpoint(self, address: Address, *others: str) -> tuple[CheckpointStore, Checkpoint]:
        """The store of an address, and the checkpoint (the newest where no id is given)."""
        from stateformat.model import CheckpointId

        store = self.store(address.url, *others)
        chosen = None if address.checkpoint_id is None else CheckpointId(address.checkpoint_id)
        return store, store.open(chosen)


def command(
    name: str, *, checkpoint: str = "optional", pandas: bool = False
) -> Callable[[Callable[..., int | None]], click.Command]:
    """A ``ckpt`` command on one store. The function gets a :class:`Session`, the address, then its own parameters.

    It returns its exit status; None is 0. ``checkpoint`` says whether the address takes an ``@ID`` (:class:`AddressType`),
    ``pandas`` whether the command may need it.
    """
    kind = AddressType(checkpoint)

    def decorate(function: Callable[..., int | None]) -> click.Command:
        @functools.wraps(function)
        def run(*, output_format: str, verbose: int, endpoint_url: str | None, option: Any, **rest: Any) -> int | None:
            if not pandas:
                _leave_pandas_out()
            options = dict(option)
            if endpoint_url is not None:
                options["endpoint_url"] = endpoint_url
            context = click.get_current_context()
            watch = context.ensure_object(Watch)
            watch.begin(verbose, context.command_path)
            session = Session(Output(as_json=output_format == "json"), options, watch)
            return function(session, rest.pop("address"), **rest)

        decorated: Callable[..., Any] = run
        for option in reversed(_COMMON):
            decorated = option(decorated)
        # click lists parameters in the order in which decorators are written: common options stand last.
        parameters = getattr(decorated, "__click_params__", [])
        common, own = parameters[-len(_COMMON) :], parameters[: -len(_COMMON)]
        decorated.__click_params__ = [*common, *own]  # type: ignore[attr-defined]
        decorated = click.argument("address", type=kind, metavar=kind.name)(decorated)
        return click.command(name)(decorated)

    return decorate


class _NoPandas:
    """Finds no pandas, whether it is installed or not; leaves all other modules to the next finder."""

    @staticmethod
    def find_spec(fullname: str, *_: object) -> None:
        """Called for every module that is imported."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not for this process", name=fullname)


def _leave_pandas_out() -> None:
    """Spare a command the import of pandas, which takes longer than all of ``ckpt inspect``.

    pyarrow looks for pandas when it is first given a Python list, to see whether that might be a Series, and when it first
    makes a numpy array, once each. It is shown that there is none. Where pyarrow is there already, this is somebody else's
    process, and is left as it is.
    """
    if "pyarrow" in sys.modules or "pandas" in sys.modules:
        return
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array([0], pa.int8()).to_numpy()  # Typed: before it infers a first type, it imports dateutil.
    finally:
        sys.meta_path.remove(_NoPandas)


_COMMON: list[Any] = [
    click.option(
        "--format",
        "output_format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="A page for people, or JSON for programs (docs/json.md).",
    ),
    click.option("--endpoint-url", metavar="URL", help="The S3 server, where it is not Amazon's."),
    click.option(
        "--option",
        multiple=True,
        type=StorageOptionType(),
        metavar="KEY=VALUE",
        help="An option for the storage of the store's URL; repeatable.",
    ),
    click.option(
        "-v",
        "--verbose",
        count=True,
        help="Tell on standard error what is done and what it took; show stack traces. -vv: every request, too.",
    ),
]


def operator_uid(checkpoint: Checkpoint, given: str) -> str:
    """The uid for what a user typed: a uid, or the name of exactly one operator."""
    from stateformat.errors import ErrorKind, InvalidInput

    graph = checkpoint.graph
    if given in graph.by_uid:
        return given
    named = [operator.uid for operator in graph.operators if operator.name == given]
    if len(named) == 1:
        return named[0]
    if named:
        raise InvalidInput(
            f"{len(named)} operators are named {given!r}; give the uid of one: {', '.join(named)}",
            kind=ErrorKind.UNKNOWN_OPERATOR,
            operator=given,
        )
    raise InvalidInput(
        f"checkpoint {checkpoint.id} has no operator {given!r}, by uid or by name; {_known(graph.operators, given)}",
        kind=ErrorKind.UNKNOWN_OPERATOR,
        operator=given,
    )


OPERATORS_TOLD: Final = 20
"""Operators that a sentence lists; of very many it tells how many there are."""


def _known(operators: Sequence[Operator], given: str) -> str:
    """Which operators there are, and the one that was probably meant."""
    from difflib import get_close_matches

    uids = {label(text): operator.uid for operator in operators for text in (operator.name, operator.uid) if text}
    close = get_close_matches(label(given), uids, n=1)
    meant = f"did you mean {uids[close[0]]!r}? It" if close else "it"
    told = [
        label(f"{operator.uid} ({operator.name})" if operator.name not in ("", operator.uid) else operator.uid)
        for operator in operators[:OPERATORS_TOLD]
    ]
    left = len(operators) - len(told)
    return f"{meant} has {', '.join(told) or 'none'}{f' and {left:,} more' if left else ''}"


def other_store(session: Session, store: CheckpointStore, target: Address, address: Address) -> CheckpointStore:
    """The store of ``--to``, which is to be another one than the command works on."""
    from stateformat.storage import check_outside

    there = session.store(target.url, address.url)
    if there.url == store.url:
        raise click.UsageError(f"--to names {store.url} itself; leave it out to publish there")
    check_outside(there.url, store.url)
    return there


__all__ = ["Session", "command", "operator_uid", "other_store"]
