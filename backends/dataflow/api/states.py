"""The states that an operator declares.

Columns are given as a ``pa.Schema``, a list of ``pa.field``, or a mapping name → type. Keyed states
are keyed by the columns of the operator's hash edge, in that order and of those types; names may
differ.

When columns change, their values in a checkpoint are handled as docs/dataflow.md says. All but keys
may change. Three arguments say how; they may stay in the program, for each acts only once:

- ``renames``, from old names to new ones;
- ``defaults``, from names of columns to their values, as text (SPEC.md section 3.7), in rows that
  are older than the column;
- ``drops``, the names of columns whose values are given up. Declared again, the column is a new
  one.

Rows of value, map and list state may expire: ``ttl=Ttl(30 * 86_400_000_000)`` lets a row live 30
days of event time after it was last written, entries and elements each for themselves. See
docs/dataflow.md for clocks, for reads that count, and for a ``ttl`` that is new, or goes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

import stateformat as sf
from stateformat import states as declare
from stateformat.errors import InvalidInput
from stateformat.graph import brief
from stateformat.model import TimerClock
from stateformat.states import Changes, Columns


@dataclass(frozen=True, repr=False)
class Descriptor(ABC):
    """A declared state of an operator.

    ``renames``: new names of columns, by old. ``defaults``: by column, the value for rows older
    than the column, as text. ``drops``: columns to discard.
    """

    name: str
    renames: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    defaults: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    drops: Collection[str] = field(default=(), kw_only=True)

    def __repr__(self) -> str:
        return brief(self, self.name)

    @property
    def changes(self) -> Changes:
        """How columns have changed. Raises ``InvalidInput`` for what are not column names."""
        if isinstance(self.drops, (str, bytes)) or not all(isinstance(name, str) for name in self.drops):
            raise InvalidInput(f"drops is {self.drops!r}. It must be a list of names of columns.")
        if not isinstance(self.renames, Mapping):
            raise InvalidInput(
                f"renames is {self.renames!r}. It must be a mapping from old names of columns to new ones."
            )
        return Changes(dict(self.renames), frozenset(self.drops))

    @abstractmethod
    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""


@dataclass(frozen=True, repr=False)
class ValueState(Descriptor):
    """One row per key."""

    keys: Columns
    values: Columns
    ttl: sf.Ttl | None = field(default=None, kw_only=True)

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.value_state(
            operator, self.name, keys=self.keys, values=self.values, ttl=self.ttl, defaults=self.defaults
        )


@dataclass(frozen=True, repr=False)
class MapState(Descriptor):
    """A map per key: one row per key and ``_map_key``, which has the type ``map_key``."""

    keys: Columns
    map_key: pa.DataType
    values: Columns
    ttl: sf.Ttl | None = field(default=None, kw_only=True)

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.map_state(
            operator,
            self.name,
            keys=self.keys,
            map_key=self.map_key,
            values=self.values,
            ttl=self.ttl,
            defaults=self.defaults,
        )


@dataclass(frozen=True, repr=False)
class ListState(Descriptor):
    """A list of rows per key."""

    keys: Columns
    values: Columns
    ttl: sf.Ttl | None = field(default=None, kw_only=True)

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.list_state(
            operator, self.name, keys=self.keys, values=self.values, ttl=self.ttl, defaults=self.defaults
        )


@dataclass(frozen=True, repr=False)
class Timers(Descriptor):
    """Timers: the key, ``_timestamp`` (int64, µs), ``_tag`` (utf8), and values.

    ``clock``: what they fire by, ``event_time`` or ``processing_time``. Processing-time timers are
    due when the wall clock reaches ``_timestamp``, µs since 1970, UTC
    (``context.processing_time_us``). At the end of the input those that are not due do not fire.
    None fires after ``finish``, which may take the rest:
    ``context.timers(name).due(TIMESTAMP_MAX)``.
    """

    keys: Columns
    values: Columns = field(default=())
    clock: TimerClock = field(default="event_time", kw_only=True)

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.timers(
            operator, self.name, keys=self.keys, values=self.values, clock=self.clock, defaults=self.defaults
        )


@dataclass(frozen=True, repr=False)
class SplitList(Descriptor):
    """A list per subtask, split into contiguous chunks at another parallelism (even split)."""

    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.even_split_state(operator, self.name, columns=self.columns, defaults=self.defaults)


@dataclass(frozen=True, repr=False)
class UnionList(Descriptor):
    """A list per subtask; on restore every subtask gets all of them.

    No checkpoint can be taken while some subtasks of the operator have finished and others have
    not.
    """

    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.union_state(operator, self.name, columns=self.columns, defaults=self.defaults)


@dataclass(frozen=True, repr=False)
class BroadcastState(Descriptor):
    """Rows that are the same in every subtask: write only what all of them receive alike."""

    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.broadcast_state(operator, self.name, columns=self.columns, defaults=self.defaults)
