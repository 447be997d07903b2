"""``apply_per_key``: a plain Python function for each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
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
from .conversion import as_python
from .emitted import Emitted, KeyFault, short
from .few_collections import few_collections
from .grouping import Grouped, KeyWithoutValue, key_values
from .kept import Declared, KeptStates
from .key_timers import TimersOfPiece
from .signature import count_arguments, name_of, rows_form

PIECE_ROWS: Final = 262_144
PIECE_BYTES: Final = 16 << 20
"""How much a function is called for between one search of the states and the next."""
TIMERS: Final = "timers"
CLOCKS: Final = ("event_time", "processing_time")

_ARGUMENTS: Final = ("key", "rows", "state", "timers")
_TIMER_ARGUMENTS: Final = ("key", "timestamp", "state", "timers")
_STATE, _TIMERS = 3, 4


class PerKeyError(CheckpointError):
    """The function of a key raised, or gave something else than declared; the message has the key.

    ``__cause__`` is what it raised.
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

    - ``fn(key, rows, state, timers)``, or the first two or three of these. ``key`` is the value of
      the key column, a tuple of several. ``rows`` are the rows of that key, never none, as they
      came: all that lie in one piece. ``state`` is described below.
    - ``rows`` by annotation: a list of tuples in the order of the columns (no annotation, or
      ``list[tuple]``), of a ``NamedTuple`` with the columns that it names, a numpy array with a
      field for each column (``np.ndarray``), a ``pa.RecordBatch``, or a ``pa.Table``. In numpy,
      integers and booleans are objects where there are nulls among them; its times
      (``np.datetime64``) may be given, kept and set as timers, and NaT is null.
    - ``output``: the columns of what ``fn`` returns or yields: tuples in that order, dicts, or
      Arrow tables. A tuple is one row, a list several. None is nothing.
    - ``state``: columns of one value per key, or a ``ValueState``, ``MapState``, ``ListState``
      (their ``keys`` may be ``()``), or a list of these. A value is an object with an attribute for
      each column, each None for a new key; a map is a dict, a list is a list; entries of several
      columns are named tuples. Of several states, ``state`` has an attribute for each, by name.
      ``state.clear()`` deletes, and so does None in place of one of several. A value all of whose
      attributes are None is none.
    - ``ttl=`` of a state begins anew for a value when an attribute is set, and for an entry when it
      is set in the dict, both also to what they were. An element of a list is written when it is
      put in; those that stay in their order keep their time, whatever comes or goes between them.
      Of a dict or list in place of another, what is equal stays. Refreshed by reading, all that is
      kept of a key begins anew when the key has rows. Event time goes in steps, so a ttl by it
      should be many steps long (docs/dataflow.md).
    - ``on_timer(key, timestamp, state, timers)``, or the first two or three of these: called when a
      time has come that ``timers.set(timestamp)`` has set for that key, by the clock ``timers``:
      ``"event_time"``, the watermark, or ``"processing_time"``. It gives rows as ``fn`` does. A
      method ``on_timer`` of ``fn`` will do. When the input ends, timers of processing time that are
      not due yet are dropped.

    All is stored for the keys together, when ``fn`` has been called for each of them: what differs
    from what was read. So change ``state`` in the call, and keep nothing of it.

    **What a key costs**, beside the function itself: about a microsecond of processor time for a
    value of two columns and one row of output, in a piece of some thousand keys; a row of tuples
    about 0.1 µs. An Arrow batch for each key costs another 0.5 µs, and what Arrow's calls on few
    rows cost. A piece costs about half a millisecond, however small. Maps and lists are read whole
    for each key that has rows: keep them small, or make a part of them part of the key.

    A piece is what comes at once: in process a batch, on Spark all of an epoch that no watermark
    parts. It has at most 16 MB and 262,144 rows. So the rows of a key may come in several calls.
    What ``fn`` raises ends the job with the key named. So does what does not fit declared types.
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
        """What ``state`` declares, and ``timers``."""
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
        """Call ``on_timer`` for each timer; those of one key in order of time."""
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
        """Call for each of ``numbers``, places in ``distinct`` and ``keys``; then store."""
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
            # It would end the loop over the keys without a word.
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
    """The descriptor with its keys, if it has none."""
    return one if as_schema(one.keys).names else replace(one, keys=keys)  # type: ignore[attr-defined, call-arg]


def _unless_deleted(fn: Callable[..., Any], due: Iterator[bool], arguments: Sequence[Iterable[Any]]) -> Iterator[Any]:
    return (fn(*given) if is_due else None for is_due, given in zip(due, zip(*arguments, strict=False), strict=False))


def _by_keys(timers: pa.RecordBatch, keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Timers in pieces of bounded size; all timers of a key are in one, in order of time."""
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
