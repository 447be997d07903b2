"""What all commands share: their common options, and opening the store that an address names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ..output import Output
from ..watch import Watch
from .values import Address, AddressType, OperatorParallelism, StorageOptionType, is_local, options_for

if TYPE_CHECKING:
    from stateformat.errors import CheckpointError
    from stateformat.model import CheckpointId
    from stateformat.reading import Checkpoint
    from stateformat.storage import Storage
    from stateformat.store import CheckpointStore


class Session:
    """One run of one command: where it writes, and how it opens stores."""

    def __init__(
        self,
        output: Output,
        storage_options: Mapping[str, Any],
        watch: Watch,
        *,
        allow_outside: bool = False,
        with_expired: bool = False,
    ) -> None:
        self.output = output
        self.with_expired = with_expired
        """Whether rows that had expired are shown as well."""
        self._allow_outside = allow_outside
        self._options = storage_options
        self._watch = watch
        self._named: set[str] = set()

    @property
    def verbose(self) -> bool:
        """Whether the log goes to standard error."""
        return self._watch.level > 0

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """The storage options of the command line."""
        return self._options

    def changes(self, effect: str) -> None:
        """From now on an interruption leaves this ``effect`` behind (the end of a sentence)."""
        self._watch.effect = effect

    def publishes(self, store: str) -> None:
        """From now on the command publishes in a store, which is no savepoint by its name."""
        if store in self._named:
            raise click.UsageError(
                f"{store} is a savepoint and stays as it is; publish in a store of its own, with --to URL"
            )
        self.changes(
            f"`ckpt history {store}` shows whether its checkpoint was published before. If not, nothing was changed, "
            "and `ckpt gc` finds what was written once another is published"
        )

    def target(self, address: Address, *others: str) -> CheckpointStore:
        """The store that the command fills, which must outlast it; ``others`` as for `store`."""
        from stateformat.storage import check_lasting

        for other in others:
            check_lasting(address.url, other)
        return self.store(address.url, *others)

    def store(self, address: Address | str, *others: str) -> CheckpointStore:
        """The store of an address or URL; ``others`` are the other stores of the same command."""
        from stateformat.formats import open_folder
        from stateformat.store import CheckpointStore

        given = Address(address, whole=True) if isinstance(address, str) else address
        options = options_for(given.url, self._options, others)
        return CheckpointStore(
            self._instrumented(self._open(given, options)),
            format=given.format,
            outside=functools.partial(open_folder, options=options) if self._allow_outside else None,
        )

    def _open(self, address: Address, options: Mapping[str, Any]) -> Storage:
        """The storage of an address. A usage error for ``STORE@NAME`` where a store is meant."""
        from stateformat.storage import open_storage, split_name

        store, name = split_name(address.url)
        if name is None or address.format is not None:
            return open_storage(address.url, **options)
        from stateformat.errors import ErrorKind, NotFound
        from stateformat.pins import is_named, open_address

        storage = open_address(address.url, **options)
        if is_named(storage, address.url):
            if address.whole:
                raise click.UsageError(
                    f"{address.url} is the savepoint {name} of {store}, and a whole store is meant here: leave @{name} "
                    f"out, or write {address.url}/ for a store whose own name ends so"
                )
            self._named.add(storage.url)
        elif not address.whole and not storage.exists():
            raise NotFound(
                f"there is no store at {storage.url}, and {store} has no savepoint {name!r}; `ckpt history {store}` "
                "lists the savepoints of a store",
                kind=ErrorKind.STORE_NOT_FOUND,
            )
        return storage

    def options_of(self, url: str, *others: str) -> Mapping[str, Any]:
        """The storage options for a place that is no store; ``others`` are the command's stores."""
        return options_for(url, self._options, others)

    def folder(self, address: Address, *others: str) -> Storage:
        """The plain folder at an address, for files that are not those of a store."""
        from stateformat.formats import open_folder

        return self._instrumented(open_folder(address.url, options_for(address.url, self._options, others)))

    def _instrumented(self, storage: Storage) -> Storage:
        if self._watch.stats is None:
            return storage
        from stateformat.storage import instrumented

        return instrumented(storage, self._watch.stats)

    def read_only(self, address: Address, *others: str) -> Checkpoint:
        """The checkpoint of an address, opened sooner than :meth:`checkpoint` does.

        It does not import what writes checkpoints, nor search the installed storages for a
        directory's.
        """
        from stateformat.errors import NotFound
        from stateformat.history import NO_RECORDS, record_of
        from stateformat.reading import StoreCheckpoint

        if address.format is not None:
            return self.checkpoint(address, *others)[1]
        options = options_for(address.url, self._options, others)
        from stateformat.storage import split_name

        if is_local(address.url) and split_name(address.url)[1] is None:
            from stateformat.backends.storage.local import from_url as open_local

            storage: Storage = open_local(address.url, options)
        else:
            storage = self._open(address, options)
        storage = self._instrumented(storage)
        try:
            return StoreCheckpoint(storage, record_of(storage, id_of(address)))
        except NotFound as error:
            if error.kind not in NO_RECORDS:
                raise
            return self.checkpoint(address, *others)[1]  # Of another system, or the same error.

    def checkpoint(self, address: Address, *others: str) -> tuple[CheckpointStore, Checkpoint]:
        """The store of an address and its checkpoint."""
        store = self.store(address, *others)
        return store, store.open(id_of(address))

    def system(self, store: CheckpointStore) -> str | None:
        """The system whose checkpoints lie where a store was expected; None for a store."""
        from stateformat.formats import foreign_checkpoints
        from stateformat.history import record_ids

        if store.format is None and record_ids(store.storage):
            return None
        found = foreign_checkpoints(store.storage, store.format)
        return None if found is None else found.system

    def refuse_foreign(self, command: str, store: CheckpointStore, error: CheckpointError | None = None) -> None:
        """Raise what to do in place of a command, if the store is another system's."""
        from stateformat.backends.foreign import advice_for
        from stateformat.errors import InvalidInput

        system = self.system(store)
        told = advice_for(system, command, store.url) if system is not None else ""
        if told:
            kind = InvalidInput if error is None else type(error)
            raise kind(f"{store.url} is {system}, no store of this library. {told}") from error

    def explain(self, command: str, address: Address, error: Exception) -> None:
        """Raise what to do instead, if a command failed because its store is another system's."""
        from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, NotFound

        if isinstance(error, (InvalidInput, NotFound)) and error.kind is not ErrorKind.CHECKPOINT_NOT_FOUND:
            try:
                store = self.store(address)
            except CheckpointError:
                return  # Of what is no store either, the command has said so.
            self.refuse_foreign(command, store, error)

    def shown(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint with the rows that had expired, where the command asks for them."""
        return checkpoint.with_expired() if self.with_expired else checkpoint


def id_of(address: Address) -> CheckpointId | None:
    """The checkpoint id of an address; None for the newest."""
    from stateformat.model import CheckpointId

    return None if address.checkpoint_id is None else CheckpointId(address.checkpoint_id)


def command(
    name: str,
    *,
    checkpoint: str = "optional",
    pandas: bool | str = False,
    foreign: bool = False,
    expired: bool = False,
    behind: str | None = None,
) -> Callable[[Callable[..., int | None]], click.Command]:
    """A ``ckpt`` command on one store.

    The decorated function takes a :class:`Session`, the :class:`Address`, and its own parameters.
    It returns its exit status; None is 0.

    Args:
        name: the command's name.
        checkpoint: whether the address takes an ``@ID``: "never", "optional" or "always".
        pandas: whether the command may need pandas; or the name of the parameter with which it
            does.
        foreign: whether the command reads other systems' checkpoints.
        expired: whether the command shows rows, and those that had expired if it is asked to.
        behind: the name of the argument that comes before the address.
    """
    kind = AddressType(checkpoint)

    def decorate(function: Callable[..., int | None]) -> click.Command:
        @functools.wraps(function)
        def run(
            *,
            output_format: str,
            verbose: int,
            endpoint_url: str | None,
            option: Any,
            allow_outside: bool = False,
            with_expired: bool = False,
            **rest: Any,
        ) -> int | None:
            if not (rest.get(pandas) if isinstance(pandas, str) else pandas):
                _leave_pandas_out()
            context = click.get_current_context()
            watch = context.ensure_object(Watch)
            watch.begin(verbose, context.command_path)
            output = Output(as_json=output_format == "json")
            options = storage_options(endpoint_url, option)
            session = Session(output, options, watch, allow_outside=allow_outside, with_expired=with_expired)
            address = rest.pop("address")
            try:
                return function(session, address, **rest)
            except Exception as error:
                if not foreign:
                    session.explain(name, address, error)
                raise

        made: click.Command = click.command(name, epilog=_OF_OTHERS if foreign else None)(run)
        own = [*made.params, *([_WITH_EXPIRED] if expired else []), *([_ALLOW_OUTSIDE] if foreign else [])]
        first = [one for one in own if one.name == behind]
        address = click.Argument(["address"], type=kind, metavar=kind.name)
        made.params = [*first, address, *(one for one in own if one not in first), *_COMMON]
        return made

    return decorate


def storage_options(endpoint_url: str | None, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The values of :data:`STORAGE_OPTIONS` as a storage takes them."""
    return {**dict(pairs), **({} if endpoint_url is None else {"endpoint_url": endpoint_url})}


class _NoPandas:
    """An import finder for which there is no pandas."""

    @staticmethod
    def find_spec(fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not for this process", name=fullname)


def _leave_pandas_out() -> None:
    """Spare a command the import of pandas, which takes longer than all of ``ckpt inspect``.

    pyarrow looks for pandas once when given its first Python list, and once for its first numpy
    array. If pyarrow is imported already, this process is not ours and stays as it is.
    """
    if "pyarrow" in sys.modules or "pandas" in sys.modules:
        return
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array([0], pa.int8()).to_numpy()  # Typed: to infer a first type, it would import dateutil.
    finally:
        sys.meta_path.remove(_NoPandas)


_OF_OTHERS: Final = "STORE may also be the checkpoint folder of a Spark query, or a checkpoint or savepoint of Flink."
STORAGE_OPTIONS: Final = (
    click.Option(["--endpoint-url"], metavar="URL", help="The S3 server, if it is not Amazon's."),
    click.Option(
        ["--option"],
        multiple=True,
        type=StorageOptionType(),
        metavar="KEY=VALUE",
        help="An option for the storage of the store's URL; repeatable.",
    ),
)
_WITH_EXPIRED: Final = click.Option(
    ["--with-expired"], is_flag=True, help="Also the rows of states with a TTL that had expired at the checkpoint."
)
_ALLOW_OUTSIDE: Final = click.Option(
    ["--allow-outside"],
    is_flag=True,
    help="Of a Flink checkpoint, also read files that its metadata names in other folders.",
)
_COMMON: Final = (
    click.Option(
        ["--format", "output_format"],
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="A page for people, or JSON for programs (docs/json.md).",
    ),
    *STORAGE_OPTIONS,
    click.Option(
        ["-v", "--verbose"],
        count=True,
        help="Log to standard error what is done and what it took; show stack traces. -vv: log every request, too.",
    ),
)

F = TypeVar("F", bound=Callable[..., Any])


def parallelism_options(function: F) -> F:
    """Adds ``--parallelism`` and ``--operator-parallelism UID=N`` to a command."""
    function = click.option(
        "--operator-parallelism",
        multiple=True,
        type=OperatorParallelism("UID=N"),
        metavar="UID=N",
        help="Subtasks of one operator, by uid or name; repeatable. Overrides --parallelism.",
    )(function)
    return click.option(
        "--parallelism",
        type=click.IntRange(min=1),  # The plan refuses what is too large, with the operators.
        metavar="N",
        help="Subtasks of every operator that has not fully finished.",
    )(function)


def engine_option(what: str) -> Callable[[F], F]:
    """``--engine``: in this process, or on Spark."""
    return click.option(
        "--engine", type=click.Choice(["local", "spark"]), default="local", show_default=True, help=what
    )


def per_operator(checkpoint: Checkpoint, pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """``--operator-parallelism`` by uid; ``InvalidInput`` for an unknown operator."""
    return {checkpoint.operator_uid(given): number for given, number in pairs}


def other_store(session: Session, store: CheckpointStore, target: Address, address: Address) -> CheckpointStore:
    """The store of ``--to``; a usage error if it is the command's own."""
    from stateformat.storage import check_outside

    there = session.target(target, address.url)
    if there.url == store.url:
        raise click.UsageError(f"--to names {store.url} itself; leave it out to publish there")
    check_outside(there.url, store.url)
    return there
