"""``apply_per_key``: a plain Python function for each key.

The annotations of a function say how many arguments it takes, and its rows in which form.

Python's cyclic garbage collector runs less often meanwhile. A piece makes some hundred thousand
tuples and objects, none of them garbage. By default the collector visits them every 700 new
objects, which took two thirds of the time of a piece. Cycles that a user's function leaves are
still collected, a hundred thousand objects later.
"""

from __future__ import annotations

import gc
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise, repeat
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind, InvalidInput
from stateformat.graph import brief
from stateformat.model import TimerClock
from stateformat.segments import row_key_codes
from stateformat.states import Columns, as_schema
from stateformat.tables import rebatch

from ...api import Descriptor, Operator, OperatorContext, Timers
from ..aggregate import key_names, plain
from ..row_steps import check_columns
from .kept import Declared, KeptStates, TimersOfPiece
from .rows import Emitted, Grouped, KeyFault, KeyWithoutValue, RowsAs, as_python, key_values, short

_THRESHOLDS: Final = (100_000, 50, 1000)
_inside: Final[list[tuple[int, int, int]]] = []
"""The thresholds found by each entry, in any thread; the first is the original one."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Make collections rare within the block. A disabled collector stays disabled."""
    before = gc.get_threshold()
    _inside.append(before)
    if before[0]:
        gc.set_threshold(*map(max, _THRESHOLDS, before))
    try:
        yield
    finally:
        first = _inside.pop()
        if not _inside:
            gc.set_threshold(*first)


_FORMS: Final = (
    "Annotate it as pa.RecordBatch, pa.Table, np.ndarray, list[tuple] or a list of a NamedTuple, or not at all."
)
_LEAST, _MOST = 2, 4
# Texts that need no value: list, typing.Sequence[Any], "list[tuple[str, Hidden]]".
_TUPLES: Final = re.compile(r"[\w.]+\s*(\[\s*([\w.]+\.)?(tuple|Tuple|Any)\b.*\])?\s*", re.DOTALL)


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name of a function for errors."""
    fn = _bare(fn)
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def _bare(fn: Any) -> Any:
    """Return what is called when a ``functools.partial`` is."""
    return _bare(fn.func) if isinstance(fn, partial) else fn


def count_arguments(fn: object, what: str, arguments: Sequence[str]) -> int:
    """With how many of ``arguments`` to call ``fn``. ``InvalidInput`` for another number."""
    if not callable(fn):
        raise InvalidInput(f"{what} of apply_per_key is {fn!r}. Give a function ({', '.join(arguments)}).")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return _LEAST + 1
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(parameter.default is parameter.empty for parameter in by_place)
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    count = _MOST if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters) else needed
    # What has a default is the function's own, unless its name says otherwise: ``state=None``.
    while count < min(len(by_place), len(arguments)) and by_place[count].name == arguments[count]:
        count += 1
    if named or not _LEAST <= count <= _MOST:
        raise InvalidInput(
            f"{what} of apply_per_key, {name_of(fn)}, takes {inspect.signature(fn)}. It is called with "
            f"({', '.join(arguments)}), or the first {_LEAST} or {_LEAST + 1} of these."
        )
    return count


def rows_form(fn: Callable[..., Any]) -> tuple[RowsAs, type[Any] | None]:
    """How ``fn`` wants its rows, by the annotation of its second argument; and of what class tuples
    are, if they have names.

    ``InvalidInput`` for one that says nothing of Arrow, numpy or tuples.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return RowsAs.TUPLES, None
    if len(parameters) < _LEAST or parameters[1].annotation is inspect.Parameter.empty:
        return RowsAs.TUPLES, None
    asked = _evaluated(parameters[1].annotation, fn)
    form = _form_of_text(asked) if isinstance(asked, str) else _form(asked)
    if form is None:
        raise InvalidInput(
            f"the rows of {name_of(fn)} are annotated as {_shown(asked)}, which apply_per_key does not know. {_FORMS}"
        )
    if form is RowsAs.TUPLES and isinstance(asked, str) and not _TUPLES.fullmatch(asked):
        raise InvalidInput(
            f"the rows of {name_of(fn)} are annotated as {asked}, and not all of these names are known in its module. "
            "Define or import them there, not within a function and not for type checkers only."
        )
    named = [one for one in typing.get_args(asked) if form is RowsAs.TUPLES and hasattr(one, "_fields")]
    return form, named[0] if named else None


def _evaluated(asked: Any, fn: Callable[..., Any]) -> Any:
    """Return an annotation of ``fn``; one that names what has no value, as text."""
    fn = _bare(fn)
    plain: Any = inspect.unwrap(fn if inspect.isroutine(fn) else type(fn).__call__)
    plain = getattr(plain, "__func__", plain)
    # Of this argument only: the others may name what is imported for type checkers.
    alone = SimpleNamespace(__annotations__={"rows": asked})
    within = inspect.getclosurevars(plain).nonlocals if inspect.isfunction(plain) else {}
    with suppress(NameError, AttributeError, TypeError, SyntaxError):
        asked = typing.get_type_hints(alone, getattr(plain, "__globals__", {}), dict(within))["rows"]
    return asked


def _shown(asked: Any) -> str:
    return asked.__qualname__ if isinstance(asked, type) and not typing.get_args(asked) else str(asked)


def _form(asked: Any) -> RowsAs | None:
    origin = typing.get_origin(asked) or asked
    if asked is Any:
        return RowsAs.TUPLES
    if not isinstance(origin, type):
        return None
    if origin is pa.RecordBatch:
        return RowsAs.BATCH
    if origin is pa.Table:
        return RowsAs.TABLE
    if issubclass(origin, np.ndarray):
        return RowsAs.NUMPY
    arguments = typing.get_args(asked)
    of_tuples = not arguments or arguments[0] is Any or _is_tuple(arguments[0])
    sequences = issubclass(list, origin) or issubclass(origin, list | Iterable)
    unfit = issubclass(origin, dict | str | bytes) or not (origin is list or origin.__module__ == "collections.abc")
    return RowsAs.TUPLES if sequences and of_tuples and not unfit else None


def _is_tuple(asked: Any) -> bool:
    origin = typing.get_origin(asked) or asked
    return isinstance(origin, type) and issubclass(origin, tuple)


def _form_of_text(text: str) -> RowsAs | None:
    bare = text.partition("[")[0].rpartition(".")[2].strip()
    known = {
        "RecordBatch": RowsAs.BATCH,
        "Table": RowsAs.TABLE,
        "ndarray": RowsAs.NUMPY,
        "NDArray": RowsAs.NUMPY,
        "list": RowsAs.TUPLES,
        "Sequence": RowsAs.TUPLES,
        "Iterable": RowsAs.TUPLES,
        "Any": RowsAs.TUPLES,
    }
    return known.get(bare)


PIECE_ROWS: Final = 262_144
PIECE_BYTES: Final = 16 << 20
"""How much a function is called for between two look-ups of the states."""
TIMERS: Final = "timers"
CLOCKS: Final = ("event_time", "processing_time")

_ARGUMENTS: Final = ("key", "rows", "state", "timers")
_TIMER_ARGUMENTS: Final = ("key", "timestamp", "state", "timers")
_STATE, _TIMERS = 3, 4


class PerKeyError(CheckpointError):
    """The function of a key raised, or returned something other than declared. The message names
    the key.

    ``__cause__`` is the exception that it raised.
    """

    default_kind = ErrorKind.OPERATOR_FAILED


class _Callback(NamedTuple):
    fn: Callable[..., Any]
    arguments: int
    """How many it takes."""


class ApplyPerKey(Operator):
    """Calls a plain Python function once for each key of a piece of the stream.

    Example::

        def visits(key, rows, state):
            state.n = (state.n or 0) + len(rows)
            yield key, state.n

        counted = {"user": pa.string(), "n": pa.int64()}
        clicks.key_by("user").apply_per_key(
            visits, state={"n": pa.int64()}, output=counted, uid="visits"
        )

    - ``fn(key, rows, state, timers)``; it may take only the first two or three of these. ``key`` is
      the value of the key column, or a tuple if there are several. ``rows`` are the key's rows in
      the piece, in arrival order, at least one. ``state`` is described below.
    - The annotation of ``rows`` chooses their form: a list of tuples in the order of the columns
      (no annotation, or ``list[tuple]``), a list of a ``NamedTuple`` with the columns it names, a
      NumPy structured array with a field for each column (``np.ndarray``), a ``pa.RecordBatch``, or
      a ``pa.Table``. In NumPy, columns of integers or booleans that have nulls are objects.
      Times are ``np.datetime64``: they can be returned, kept in state and set as timers, and NaT
      stands for null.
    - ``output``: the columns of the rows that ``fn`` returns or yields, as tuples in that order,
      dicts, or Arrow tables. A tuple is one row, a list is several rows, and None is no row.
    - ``state``: the columns of one value per key, or a ``ValueState``, ``MapState`` or
      ``ListState`` (whose ``keys`` may be ``()``), or a list of these. A value is an object with an
      attribute for each column; for a new key each is None. A map is a dict and a list is a list;
      entries with several columns are named tuples. For a list of states, ``state`` has an
      attribute for each, by name. ``state.clear()`` deletes the state; in a list of states,
      setting one to None also deletes it. A value whose attributes are all None is deleted, too.
    - ``ttl=`` of a state: a value's time restarts when an attribute is set, and an entry's when it
      is set in the dict, even to the same value. A list element's time starts when it is added;
      elements that stay in order keep their time, whatever is added or removed around them. If a
      dict or list is replaced, its equal entries keep their time. With refresh by reading, the time
      of everything kept for a key restarts whenever the key has rows. Event time advances in steps,
      so a ttl in event time should span many of them (docs/dataflow.md).
    - ``on_timer(key, timestamp, state, timers)``; it may take only the first two or three of these.
      It is called for each ``timers.set(timestamp)`` of that key, once the clock ``timers`` reaches
      that time: ``"event_time"`` (the watermark) or ``"processing_time"``. It returns rows as
      ``fn`` does. It can also be a method ``on_timer`` of ``fn``. When the input ends,
      processing-time timers that are not due yet are dropped.

    State is stored for all keys of a piece together, after ``fn`` has been called for each of them;
    only what has changed is written. So change ``state`` during the call, and do not keep
    references to it.

    **What a key costs**, apart from the function itself: about a microsecond of processor time for
    a value of two columns and one row of output, in a piece of some thousand keys; each row as a
    tuple adds about 0.1 µs. An Arrow batch per key adds 0.5 µs and the cost of Arrow's calls on
    few rows. A piece costs about half a millisecond, however small. Maps and lists are read whole
    for each key that has rows: keep them small, or move part of them into the key.

    A piece is what arrives together: in process, a batch; on Spark, the rows of an epoch between
    two watermarks. It has at most 16 MB and 262,144 rows, so the rows of a key may come in several
    calls. An exception in ``fn``, or a result that does not fit the declared types, ends the job
    with an error that names the key (:class:`PerKeyError`).
    """

    gathered_bytes = PIECE_BYTES

    def __init__(
        self,
        keys: str | Sequence[str],
        fn: Callable[..., Any],
        *,
        output: Columns = (),
        state: Columns | Descriptor | Sequence[Descriptor] | None = None,
        timers: TimerClock | None = None,
        on_timer: Callable[..., Any] | None = None,
    ) -> None:
        self._keys = key_names(keys)
        self._fn = _Callback(fn, count_arguments(fn, "fn", _ARGUMENTS))
        self._rows_as, self._row = rows_form(fn)
        self._schema = as_schema(output)
        self._declared = Declared(state)
        on_timer = on_timer or getattr(fn, "on_timer", None)
        self._on_timer: _Callback | None = None
        if on_timer is not None:
            self._on_timer = _Callback(on_timer, count_arguments(on_timer, "on_timer", _TIMER_ARGUMENTS))
        elif timers is not None:
            raise InvalidInput(f"timers is {timers!r}, but there is no function to call. Give on_timer=.")
        if timers is not None and timers not in CLOCKS:
            raise InvalidInput(f"timers is {timers!r}. Give {' or '.join(map(repr, CLOCKS))}.")
        self._clock: TimerClock = timers or "event_time"
        self._check_arguments()

    def _check_arguments(self) -> None:
        callbacks = [callback for callback in (self._fn, self._on_timer) if callback is not None]
        takes = max(callback.arguments for callback in callbacks)
        name = name_of(self._fn.fn)
        if self._declared.descriptors and takes < _STATE:
            raise InvalidInput(f"state is declared, and {name} takes none. Make it {name}(key, rows, state).")
        if takes >= _TIMERS and self._on_timer is None:
            raise InvalidInput(f"{name} takes timers, but there is no function to call. Give on_timer=.")

    def __repr__(self) -> str:
        return brief(self, name_of(self._fn.fn), *self._keys)

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        """Return the states that ``state`` declares, and ``timers``."""
        check_columns(inputs[0], self._keys, "a function of a key")
        keys = [plain(inputs[0].field(name)) for name in self._keys]
        found = [_keyed(one, keys) for one in self._declared.descriptors]
        return [*found, Timers(TIMERS, keys, clock=self._clock)] if self._on_timer is not None else found

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """``output``."""
        check_columns(inputs[0], self._keys, "a function of a key")
        if self._row is not None:
            check_columns(inputs[0], self._row._fields, f"{self._row.__qualname__} of {name_of(self._fn.fn)}")
        return self._schema

    def open(self, context: OperatorContext) -> None:
        """Find the states."""
        super().open(context)
        self._kept: KeptStates | None = self._declared.opened(context)
        self._timers = None if self._on_timer is None else TimersOfPiece(context.timers(TIMERS), context)

    def process(self, batch: pa.RecordBatch, input: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - there is one
        """Call the function for each key of the batch, piece by piece."""
        table = pa.Table.from_batches([batch])
        for piece in rebatch([table], batch.schema, PIECE_ROWS, PIECE_BYTES):
            with few_collections():
                grouped = Grouped(piece, self._keys)
                keys = self._values_of(grouped.keys)
                try:
                    arguments = [keys, grouped.rows(self._rows_as, self._row)]
                except KeyFault as fault:
                    raise self._error(self._fn, keys[fault.number], str(fault)) from fault.__cause__
                yield from self._run(self._fn, arguments, range(len(keys)), grouped.keys, keys)

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - there is one set
        """Call ``on_timer`` for each timer; those of a key in order of time."""
        assert self._on_timer is not None
        for piece in _by_keys(timers, self._keys):
            codes = row_key_codes([piece.column(name) for name in self._keys])
            _, first = np.unique(codes, return_index=True)
            distinct = piece.select(self._keys).take(pa.array(first))
            keys, numbers = self._values_of(distinct), codes.tolist()
            timestamps = as_python(piece.column("_timestamp"))
            arguments = [map(keys.__getitem__, numbers), timestamps]
            with few_collections():
                yield from self._run(self._on_timer, arguments, numbers, distinct, keys, timestamps)

    def _run(
        self,
        callback: _Callback,
        arguments: list[Iterable[Any]],
        numbers: Sequence[int],
        distinct: pa.RecordBatch,
        keys: Sequence[Any],
        timestamps: Sequence[int] = (),
    ) -> Iterator[pa.RecordBatch]:
        """Call the function for each of ``numbers``, places in ``distinct`` and ``keys``; store."""
        kept = self._kept if callback.arguments >= _STATE else None
        timers = self._timers if callback.arguments >= _TIMERS else None
        try:
            objects = None if kept is None else kept.fetch(distinct)
        except KeyFault as fault:
            raise self._error(callback, keys[fault.number], str(fault)) from fault.__cause__
        if callback.arguments >= _STATE:
            arguments.append(repeat(None) if objects is None else map(objects.__getitem__, numbers))
        if callback.arguments >= _TIMERS:
            arguments.append(repeat(None) if timers is None else timers.of(numbers))
        results: Iterator[Any] = map(callback.fn, *arguments)
        if timers is not None and timestamps:
            results = _unless_deleted(callback.fn, timers.fire(numbers, timestamps), arguments)
        emitted = Emitted(self._schema, name_of(callback.fn))
        try:
            yield from emitted.run(results)
        except KeyFault as fault:
            raise self._error(callback, keys[numbers[fault.number]], str(fault)) from fault.__cause__
        except Exception as error:
            said = f"raised {type(error).__name__}: {error}" if str(error) else f"raised {type(error).__name__}"
            raise self._error(callback, keys[numbers[emitted.current]], said) from error
        if emitted.done < len(numbers):
            # It would silently end the loop over the keys.
            raise self._error(callback, keys[numbers[emitted.done]], "raised StopIteration. Give next() a default.")
        try:
            if kept is not None and objects is not None:
                kept.store(distinct, objects)
        except KeyFault as fault:
            raise self._error(callback, keys[fault.number], str(fault)) from fault.__cause__
        if timers is not None:
            timers.store(distinct)

    def _values_of(self, keys: pa.RecordBatch) -> list[Any]:
        try:
            return key_values(keys)
        except KeyWithoutValue as error:
            raise PerKeyError(f"{name_of(self._fn.fn)} cannot be called: {error}") from error.__cause__

    @staticmethod
    def _error(callback: _Callback, key: Any, said: str) -> PerKeyError:
        return PerKeyError(f"{name_of(callback.fn)} of key {short(key)} {said}")


def _keyed(one: Descriptor, keys: Sequence[pa.Field]) -> Descriptor:
    """Return the descriptor with its keys, if it has none."""
    return one if as_schema(one.keys).names else replace(one, keys=keys)  # type: ignore[attr-defined, call-arg]


def _unless_deleted(fn: Callable[..., Any], due: Iterator[bool], arguments: Sequence[Iterable[Any]]) -> Iterator[Any]:
    return (fn(*given) if is_due else None for is_due, given in zip(due, zip(*arguments, strict=False), strict=False))


def _by_keys(timers: pa.RecordBatch, keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield timers in pieces of bounded size; those of a key are in one, in order of time."""
    if len(timers) <= PIECE_ROWS:
        yield timers
        return
    codes = row_key_codes([timers.column(name) for name in keys])
    piece_of_key = np.cumsum(np.bincount(codes)) // PIECE_ROWS
    pieces = piece_of_key[codes]
    order = np.argsort(pieces, kind="stable")
    bounds = np.searchsorted(pieces[order], np.arange(int(pieces.max()) + 2)).tolist()
    for begin, end in pairwise(bounds):
        if end > begin:
            yield timers.take(pa.array(order[begin:end]))
