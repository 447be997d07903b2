"""The states and timers of the keys of a piece, as objects that a function changes.

A value is an object with an attribute for each column, a map is a dict, a list is a list. Entries
and elements with one value column are plain values, those with several are named tuples. All are
read from the keyed state at once; afterwards they are compared with what was read, and the
differences are written at once.
"""

from __future__ import annotations

import keyword
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict, namedtuple
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, reduce
from itertools import chain, islice, pairwise, repeat
from operator import attrgetter, itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.states import as_schema
from stateformat.tables import CONVERSION_ERRORS, from_python, number_of

from ....state import KeyedList, KeyedMap, KeyedValue, TimerSet
from ...api import Descriptor, ListState, MapState, OperatorContext, ValueState
from .rows import (
    KeyFault,
    OutsideYears,
    as_python,
    clipped,
    differ,
    first_misfit,
    first_outside_years,
    holds_floats,
    short,
)


def places_before(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[int]:
    """Return for each element of ``new`` its place in ``old``, −1 if it is new.

    Places ascend, so an element that was moved counts as new. Among equal elements that could stay,
    the last do. Two searches, one from each end, find all that stay if the list was filtered or
    extended at one end, and most of them in any other case.
    """
    last = len(old) - 1
    backward = [place if place < 0 else last - place for place in _in_order(old[::-1], new[::-1])[::-1]]
    if -1 not in backward:
        return backward
    forward = _in_order(old, new)
    return forward if forward.count(-1) < backward.count(-1) else backward


def _in_order(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[int]:
    """Match each element with the first equal one after the previous match."""
    places = defaultdict(list)
    for place, value in enumerate(old):
        places[value].append(place)
    found = []
    begin = 0
    for value in new:
        equal = places.get(value, ())
        at = bisect_left(equal, begin)
        found.append(equal[at] if at < len(equal) else -1)
        begin = found[-1] + 1 or begin
    return found


_CLEAR: Final = "clear"
_SET: Final = "_set"
_NONE: Final = object()

Numbers = Sequence[int] | npt.NDArray[np.signedinteger[Any]]
"""The key of the piece that each row belongs to."""


class Kept(ABC):
    """One state, for the keys of one piece after another."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def fetch(self, keys: pa.RecordBatch) -> Sequence[Any]:
        """Return an object for each key. ``keys`` are distinct."""

    @abstractmethod
    def store(self, keys: pa.RecordBatch, objects: Sequence[Any]) -> None:
        """Write what has changed since :meth:`fetch`; None deletes. Raises :class:`KeyFault`."""

    def _array(self, item: pa.Field, values: Sequence[Any], numbers: Sequence[int] | None = None) -> pa.Array:
        """Return a column of Python values. ``numbers``: the key of each; None: one per key."""
        try:
            array = from_python(values, item.type)
        except CONVERSION_ERRORS:
            place, error = first_misfit(values, item.type)
            number = place if numbers is None else numbers[place]
            raise KeyFault(
                number,
                f"set {item.name!r} of state {self.name!r} to {short(values[place])}, which is {item.type}: "
                f"{clipped(str(error), 160)}. Convert it, or declare another type.",
            ) from error
        place = first_outside_years(array)
        if place >= 0:
            raise KeyFault(
                place if numbers is None else numbers[place],
                f"set {item.name!r} of state {self.name!r} to {short(values[place])}, which Python's datetime does not "
                "hold. Keep it as int64.",
            )
        if array.null_count and not item.nullable and numbers is not None:
            place = array.is_null().index(True).as_py()
            raise self._null(item, numbers[place])
        return array

    def _python(self, column: pa.Array, name: str, numbers: Numbers | None = None) -> list[Any]:
        """Return a column as Python values. ``numbers`` as of :meth:`_array`."""
        try:
            return as_python(column)
        except OutsideYears as error:
            number = error.place if numbers is None else int(numbers[error.place])
            raise KeyFault(number, f"has {error}, in {name!r} of state {self.name!r}. Keep it as int64.") from error

    def _null(self, item: pa.Field, number: int) -> KeyFault:
        return KeyFault(
            number,
            f"left {item.name!r} of state {self.name!r} None, which is declared without nulls. Set it, or declare it "
            "nullable.",
        )

    def _wrong(self, number: int, found: object, wanted: str) -> KeyFault:
        return KeyFault(number, f"set state {self.name!r} to {type(found).__name__}. Keep {wanted}, or set None.")


class KeptValue(Kept):
    """Value state as objects with attributes. If all attributes are None, there is no state."""

    def __init__(self, name: str, state: KeyedValue, fields: Sequence[pa.Field], *, expires: bool) -> None:
        super().__init__(name)
        self._state, self._fields, self._expires = state, fields, expires
        self._made = state_class("State", tuple(item.name for item in fields), tells=expires)
        self._getters = [attrgetter(item.name) for item in fields]

    def fetch(self, keys: pa.RecordBatch) -> Sequence[Any]:
        self._old, self._found = self._state.get(keys)
        return list(map(self._made, *map(self._python, self._old.columns, self._old.schema.names)))

    def store(self, keys: pa.RecordBatch, objects: Sequence[Any]) -> None:
        if set(map(type, objects)) != {self._made}:
            objects = self._without_none(objects)
        new = [
            self._array(item, _attributes(objects, getter, item.name))
            for item, getter in zip(self._fields, self._getters, strict=True)
        ]
        changed = reduce(np.logical_or, map(differ, self._old.columns, new))
        if self._expires:
            # An attribute set to the value it had restarts the time to live.
            changed |= np.fromiter(map(attrgetter(_SET), objects), np.bool_, len(objects))
        if not changed.any():
            return
        there = np.ones(len(objects), np.bool_)
        if all(column.null_count for column in new):
            there = ~reduce(np.logical_and, (column.is_null().to_numpy(zero_copy_only=False) for column in new))
        for item, column in zip(self._fields, new, strict=True):
            if column.null_count and not item.nullable:
                missing = column.is_null().to_numpy(zero_copy_only=False) & there
                if missing.any():
                    raise self._null(item, int(np.argmax(missing)))
        values = pa.RecordBatch.from_arrays(new, names=[item.name for item in self._fields])
        put, gone = changed & there, changed & ~there & self._found
        if put.all():
            self._state.put(keys, values)
        elif put.any():
            mask = pa.array(put)
            self._state.put(keys.filter(mask), values.filter(mask))
        if gone.any():
            self._state.delete(keys.filter(pa.array(gone)))

    def _without_none(self, objects: Sequence[Any]) -> list[Any]:
        none = self._made(*[None] * len(self._fields))
        found = [none if one is None else one for one in objects]
        for number, one in enumerate(found):
            if type(one) is not self._made:
                raise self._wrong(number, one, "the object, and set its attributes")
        return found


class _KeptRows(Kept):
    """What maps and lists have in common."""

    def __init__(self, name: str, fields: Sequence[pa.Field]) -> None:
        super().__init__(name)
        self._fields = fields
        self._nested = any(pa.types.is_nested(item.type) for item in fields)
        self._signed = any(holds_floats(item.type) for item in fields)
        self._made: Callable[..., Any] | None = None
        if len(fields) != 1:
            self._made = namedtuple(name if name.isidentifier() else "Row", [item.name for item in fields])  # type: ignore[misc]

    def _values(self, rows: pa.RecordBatch, numbers: Numbers) -> list[Any]:
        columns = [self._python(rows.column(item.name), item.name, numbers) for item in self._fields]
        return columns[0] if self._made is None else list(map(self._made, *columns))

    def _signs_differ(self, old: Any, new: Any) -> bool:
        """Return whether equal lists or dicts of floats have 0.0 and −0.0 at the same place."""
        values = new if isinstance(new, list) else new.values()
        zero = self._nested or 0.0 in (values if self._made is None else chain.from_iterable(values))
        return zero and repr(old) != repr(new)

    def _differ(self, was: Any, value: Any) -> bool:
        return bool(was != value) or (self._signed and repr(was) != repr(value))

    def _columns(self, values: Sequence[Any], numbers: Sequence[int]) -> list[pa.Array]:
        if self._made is None:
            return [self._array(self._fields[0], values, numbers)]
        width = len(self._fields)
        for value, number in zip(values, numbers, strict=True):
            if not isinstance(value, tuple) or len(value) != width:
                names = ", ".join(item.name for item in self._fields)
                raise KeyFault(
                    number, f"put {short(value)} into state {self.name!r}. Put tuples of its {width} columns, {names}."
                )
        return [
            self._array(item, list(map(itemgetter(place), values)), numbers) for place, item in enumerate(self._fields)
        ]


class KeptMap(_KeptRows):
    """Map state as dicts."""

    def __init__(
        self, name: str, state: KeyedMap, map_key: pa.Field, fields: Sequence[pa.Field], *, expires: bool
    ) -> None:
        super().__init__(name, fields)
        self._state, self._map_key = state, map_key
        self._made_dict: type[dict[Any, Any]] = _TellingDict if expires else dict

    def fetch(self, keys: pa.RecordBatch) -> Sequence[Any]:
        rows, of_key = self._state.lookup(keys)
        self._old = self._dicts(rows, of_key, len(keys))
        found = self._dicts(rows, of_key, len(keys)) if self._nested else self._old
        return list(map(self._made_dict, found))

    def _dicts(self, rows: pa.RecordBatch, of_key: Any, count: int) -> list[dict[Any, Any]]:
        if not len(rows):
            return [{} for _ in range(count)]
        map_keys = self._python(rows.column("_map_key"), "_map_key", of_key)
        bounds = np.searchsorted(of_key, np.arange(count + 1)).tolist()
        pairs = list(zip(map_keys, self._values(rows, of_key), strict=True))
        return [dict(pairs[begin:end]) for begin, end in pairwise(bounds)]

    def store(self, keys: pa.RecordBatch, objects: Sequence[Any]) -> None:
        cleared: list[int] = []
        gone: tuple[list[int], list[Any]] = [], []
        put: tuple[list[int], list[Any], list[Any]] = [], [], []
        for number, (old, new) in enumerate(zip(self._old, objects, strict=True)):
            told = new.told if isinstance(new, _TellingDict) else ()
            if new == old and not told and not (self._signed and self._signs_differ(old, new)):
                continue
            if new is not None and not isinstance(new, Mapping):
                raise self._wrong(number, new, "a dict")
            if not new:
                cleared.extend((number,) if old else ())
                continue
            for map_key, value in new.items():
                was = old.get(map_key, _NONE)
                if was is _NONE or map_key in told or (value is not was and self._differ(was, value)):
                    put[0].append(number)
                    put[1].append(map_key)
                    put[2].append(value)
            lost = [map_key for map_key in old if map_key not in new]
            gone[0].extend([number] * len(lost))
            gone[1].extend(lost)
        if put[0]:
            # Before anything is deleted: a fault in a new value must leave the state as it was.
            columns = [self._array(self._map_key, put[1], put[0]), *self._columns(put[2], put[0])]
            names = ["_map_key", *(item.name for item in self._fields)]
            rows = beside(keys.take(pa.array(put[0])), columns, names)
        if cleared:
            self._state.clear(keys.take(pa.array(cleared)))
        if gone[0]:
            old_keys = self._array(self._map_key, gone[1], gone[0])
            self._state.delete(beside(keys.take(pa.array(gone[0])), [old_keys], ["_map_key"]))
        if put[0]:
            self._state.put(rows)


class _TellingDict(dict[Any, Any]):
    """A dict that records which entries were set, even to the values they had."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.told: set[Any] = set()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.told.add(key)

    def update(self, *given: Any, **named: Any) -> None:
        for key, value in dict(*given, **named).items():
            self[key] = value

    def __ior__(self, given: Any) -> _TellingDict:  # type: ignore[misc]
        self.update(given)
        return self


class KeptList(_KeptRows):
    """List state as lists."""

    def __init__(self, name: str, state: KeyedList, fields: Sequence[pa.Field], *, expires: bool) -> None:
        super().__init__(name, fields)
        self._state, self._expires = state, expires

    def fetch(self, keys: pa.RecordBatch) -> Sequence[Any]:
        rows, of_key = self._state.lookup(keys)
        bounds = np.searchsorted(of_key, np.arange(len(keys) + 1)).tolist()
        pairs = list(pairwise(bounds))
        values = self._values(rows, of_key)
        again = self._values(rows, of_key) if self._nested else values
        self._old = [again[begin:end] for begin, end in pairs]
        return [values[begin:end] for begin, end in pairs]

    def store(self, keys: pa.RecordBatch, objects: Sequence[Any]) -> None:
        cleared: list[int] = []
        lengths: list[tuple[int, int]] = []
        added: list[Any] = []
        for number, (old, new) in enumerate(zip(self._old, objects, strict=True)):
            if new == old and not (self._signed and self._signs_differ(old, new)):
                continue
            if new is not None and not isinstance(new, list):
                raise self._wrong(number, new, "a list")
            fresh = new or []
            begin = fresh[: len(old)]
            if old and begin == old and not (self._signed and self._signs_differ(old, begin)):
                fresh = fresh[len(old) :]
            elif old:
                cleared.append(number)
            lengths.append((number, len(fresh)))
            added.append(fresh)
        numbers = [number for number, length in lengths for _ in range(length)]
        if numbers:
            # Before anything is cleared: a fault must leave the state as it was.
            columns = self._columns(list(chain.from_iterable(added)), numbers)
            values = pa.RecordBatch.from_arrays(columns, names=[item.name for item in self._fields])
            accessed = self._accessed(keys, cleared, numbers, values) if self._expires and cleared else None
        if cleared:
            self._state.clear(keys.take(pa.array(cleared)))
        if numbers:
            self._state.append(keys.take(pa.array(numbers)), values, accessed=accessed)

    def _accessed(
        self, keys: pa.RecordBatch, cleared: Sequence[int], numbers: Sequence[int], values: pa.RecordBatch
    ) -> npt.NDArray[np.int64]:
        """When each of ``values`` was last accessed: what a list had before keeps its time."""
        assert self._state.expiry is not None
        now = self._state.expiry.now_us
        accessed = [now] * len(numbers)
        times = iter(self._state.last_access(keys.take(pa.array(cleared))).tolist())
        # As they come back from the state, where 1.0 may be 1.
        new = list(map(repr, self._values(values, numbers)))
        begins, ends = (np.searchsorted(numbers, cleared, side).tolist() for side in ("left", "right"))
        for number, begin, end in zip(cleared, begins, ends, strict=True):
            old = list(map(repr, self._old[number]))
            # The place −1 is that of what is new.
            before = [*islice(times, len(old)), now]
            accessed[begin:end] = map(before.__getitem__, places_before(old, new[begin:end]))
        return np.array(accessed, np.int64)


def beside(keys: pa.RecordBatch, columns: Sequence[pa.Array], names: Sequence[str]) -> pa.RecordBatch:
    """Return keys with more columns."""
    return pa.RecordBatch.from_arrays([*keys.columns, *columns], names=[*keys.schema.names, *names])


@dataclass(frozen=True)
class KeptStates:
    """All states of an operator. The object of several has an attribute for each."""

    parts: Sequence[Kept]
    made: type | None
    """None: there is one state, which is passed itself."""

    def fetch(self, keys: pa.RecordBatch) -> Sequence[Any]:
        """Return what the function gets, for each key."""
        found = [part.fetch(keys) for part in self.parts]
        return found[0] if self.made is None else list(map(self.made, *found))

    def store(self, keys: pa.RecordBatch, objects: Sequence[Any]) -> None:
        """Write what has changed. Raises :class:`KeyFault`."""
        if self.made is None:
            self.parts[0].store(keys, objects)
            return
        for part in self.parts:
            part.store(keys, _attributes(objects, attrgetter(part.name), part.name))


def _attributes(objects: Sequence[Any], getter: Callable[[Any], Any], name: str) -> list[Any]:
    """Return an attribute of each object, None if the function deleted it (``del state.n``)."""
    try:
        return list(map(getter, objects))
    except AttributeError:
        return [getattr(one, name, None) for one in objects]


class Declared:
    """The states that a user has declared: columns of one value, a descriptor, or several."""

    def __init__(self, state: object) -> None:
        self.descriptors: list[Descriptor] = []
        if state is None:
            return
        if isinstance(state, Descriptor):
            self.descriptors = [state]
        elif isinstance(state, Sequence) and state and all(isinstance(one, Descriptor) for one in state):
            self.descriptors = list(state)
        else:
            self.descriptors = [ValueState("state", (), as_schema(state))]
        self._several = isinstance(state, Sequence) and self.descriptors == list(state)
        for one in self.descriptors:
            if not isinstance(one, ValueState | MapState | ListState):
                raise InvalidInput(
                    f"state {one.name!r} of apply_per_key is a {type(one).__name__}. Declare ValueState, MapState and "
                    "ListState; timers= is for timers."
                )
            names = as_schema(one.values).names
            if not names:
                raise InvalidInput(f"state {one.name!r} of apply_per_key has no columns. Name at least one.")
            check_attributes(names, f"column {{!r}} of state {one.name!r}")
        if self._several:
            check_attributes([one.name for one in self.descriptors], "state {!r}")

    def opened(self, context: OperatorContext) -> KeptStates | None:
        """Return the states of a subtask, None where none is declared."""
        if not self.descriptors:
            return None
        parts = [_opened(one, context) for one in self.descriptors]
        return KeptStates(parts, state_class("States", tuple(part.name for part in parts)) if self._several else None)


def _opened(one: Descriptor, context: OperatorContext) -> Kept:
    assert isinstance(one, ValueState | MapState | ListState)
    fields = list(as_schema(one.values))
    if isinstance(one, ValueState):
        return KeptValue(one.name, context.value_state(one.name), fields, expires=one.ttl is not None)
    if isinstance(one, ListState):
        return KeptList(one.name, context.list_state(one.name), fields, expires=one.ttl is not None)
    map_key = pa.field("_map_key", one.map_key)
    return KeptMap(one.name, context.map_state(one.name), map_key, fields, expires=one.ttl is not None)


def check_attributes(names: Iterable[str], what: str) -> None:
    """Raise ``InvalidInput`` for names that no attribute can have."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or name == _CLEAR:
            raise InvalidInput(
                f"{what.format(name)} cannot be an attribute of the state that a function gets. Name it otherwise: "
                f"letters and digits, no word of Python, no {_CLEAR!r}, no '_' in front."
            )


@cache
def state_class(name: str, names: tuple[str, ...], *, tells: bool = False) -> type:
    """Return a class with these attributes. An object is false if all are None, as by ``clear()``.

    ``tells``: its ``_set`` tells whether an attribute was set since the object was made.
    """

    def clear(self: Any) -> None:
        for one in names:
            setattr(self, one, None)

    get = attrgetter(*names)

    def is_there(self: Any) -> bool:
        found = get(self)
        return found is not None if len(names) == 1 else any(one is not None for one in found)

    def tell(self: Any, attribute: str, value: Any) -> None:
        object.__setattr__(self, attribute, value)
        if attribute != _SET:
            object.__setattr__(self, _SET, True)

    fields: list[Any] = [(one, Any, None) for one in names]
    methods: dict[str, Any] = {"clear": clear, "__bool__": is_there}
    if tells:
        # Set last when an object is made.
        fields.append((_SET, bool, field(default=False, repr=False, compare=False)))
        methods["__setattr__"] = tell
    return make_dataclass(name, fields, slots=True, namespace=methods)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)
_BOUND: Final = 1 << 63

Moment = int | datetime | np.datetime64
"""µs since 1970, or a datetime; one without a zone is UTC, as in Arrow and numpy."""


class _Log:
    """What the functions of a piece have set and deleted, in order: the last call counts."""

    def __init__(self, context: OperatorContext) -> None:
        self.context = context
        self.words: dict[tuple[int, int], bool] = {}
        self.pending: set[tuple[int, int]] = set()
        """Timers that are due and still to be called, by the number of their key."""


class KeyTimers:
    """The timers of one key: the fourth argument of a function.

    A timestamp is µs since 1970 or a datetime; one without a time zone is UTC.
    """

    __slots__ = ("_log", "_number")

    def __init__(self, log: _Log, number: int) -> None:
        self._log, self._number = log, number

    def __repr__(self) -> str:
        return f"KeyTimers(watermark={self.watermark}, processing_time_us={self.processing_time_us})"

    @property
    def watermark(self) -> int:
        """The current event time, µs."""
        return self._log.context.watermark

    @property
    def processing_time_us(self) -> int:
        """The wall-clock time, µs since 1970: the same for all calls in a step or epoch."""
        return self._log.context.processing_time_us

    def set(self, timestamp: Moment) -> None:
        """Set a timer. One in the past is due at once; setting one again changes nothing."""
        word = self._number, whole_us(timestamp)
        if word not in self._log.pending:
            self._log.words[word] = True

    def delete(self, timestamp: Moment) -> None:
        """Delete a timer, if it is set."""
        word = self._number, whole_us(timestamp)
        if word in self._log.pending:
            self._log.pending.remove(word)
        else:
            self._log.words[word] = False


def whole_us(timestamp: Moment) -> int:
    """Return µs since 1970. Raises ``InvalidInput`` for a value that is not a time."""
    if isinstance(timestamp, datetime):
        aware = timestamp if timestamp.tzinfo is not None else timestamp.replace(tzinfo=UTC)
        return (aware - _EPOCH) // _US
    try:
        # None for NaT.
        number = number_of(timestamp, "us") if isinstance(timestamp, np.datetime64) else timestamp
        whole = operator.index(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        whole = _BOUND
    if not -_BOUND <= whole < _BOUND:
        raise InvalidInput(f"a timer at {timestamp!r}. Give whole microseconds since 1970 (int), or a datetime.")
    return whole


class TimersOfPiece:
    """The timers of the keys of a piece."""

    def __init__(self, timers: TimerSet, context: OperatorContext) -> None:
        self._timers = timers
        self._log = _Log(context)

    def of(self, numbers: Iterable[int]) -> Iterator[KeyTimers]:
        """Return an object for each call, by the number of its key."""
        return map(KeyTimers, repeat(self._log), numbers)

    def fire(self, numbers: Sequence[int], timestamps: Sequence[int]) -> Iterator[bool]:
        """Yield for each due timer whether to call it: no earlier call has deleted it."""
        pending = self._log.pending = set(zip(numbers, timestamps, strict=True))
        for word in zip(numbers, timestamps, strict=True):
            is_due = word in pending
            pending.discard(word)
            yield is_due

    def store(self, keys: pa.RecordBatch) -> None:
        """Set and delete the timers in the state."""
        words, self._log.words = self._log.words, {}
        for is_set, act in ((False, self._timers.delete), (True, self._timers.set)):
            chosen = [word for word, last in words.items() if last is is_set]
            if chosen:
                numbers, timestamps = (pa.array(column, pa.int64()) for column in zip(*chosen, strict=True))
                act(beside(keys.take(numbers), [timestamps], ["_timestamp"]))
