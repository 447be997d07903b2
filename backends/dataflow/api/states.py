"""States that an operator declares: values that know how they are stored.

Columns are given as users of Arrow give them (a ``pa.Schema``, a list of ``pa.field``, or a mapping name → type). Keyed
states are keyed by the columns that the operator's hash edge is keyed by, in that order and of those types; the names may
differ. Every class has ``declare(operator)``, the state as the format declares it.

What becomes of the values in a checkpoint when the columns change stands in docs/dataflow.md. All but keys may change, and every
class takes three arguments for that. They stay in the program: what they say has an effect only where it has not been done yet.

- ``renames``, from old names to new ones;
- ``defaults``, from names of columns to what they hold in rows that are older than the column, as text (SPEC.md section 3.7);
- ``drops``, the names of columns whose values are given up. Declared again, the column is a new one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias

import pyarrow as pa

import stateformat as sf
from stateformat.errors import InvalidInput
from stateformat.states import Changes, Columns


class _Changing:
    """What every descriptor has beside its columns."""

    renames: Mapping[str, str]
    drops: Collection[str]

    @property
    def changes(self) -> Changes:
        """What has become of columns since earlier versions of the program. ``InvalidInput`` for what are no names."""
        if isinstance(self.drops, (str, bytes)) or not all(isinstance(name, str) for name in self.drops):
            raise InvalidInput(f"drops is {self.drops!r}; it is a list of names of columns")
        if not isinstance(self.renames, Mapping):
            raise InvalidInput(f"renames is {self.renames!r}; it is a mapping from old names of columns to new ones")
        return Changes(dict(self.renames), frozenset(self.drops))


@dataclass(frozen=True)
class ValueState(_Changing):
    """One row per key."""

    name: str
    keys: Columns
    values: Columns
    _: KW_ONLY
    renames: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    drops: Collection[str] = ()

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.value_state(operator, self.name, keys=self.keys, values=self.values, defaults=self.defaults)


@dataclass(frozen=True)
class MapState(_Changing):
    """Rows by key and ``_map_key``, which is of the type ``map_key``."""

    name: str
    keys: Columns
    map_key: pa.DataType
    values: Columns
    _: KW_ONLY
    renames: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    drops: Collection[str] = ()

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.map_state(
            operator, self.name, keys=self.keys, map_key=self.map_key, values=self.values, defaults=self.defaults
        )


@dataclass(frozen=True)
class ListState(_Changing):
    """A list of rows per key."""

    name: str
    keys: Columns
    values: Columns
    _: KW_ONLY
    renames: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    drops: Collection[str] = ()

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.list_state(operator, self.name, keys=self.keys, values=self.values, defaults=self.defaults)


@dataclass(frozen=True)
class Timers(_Changing):
    """Event-time timers: rows by key, ``_timestamp`` (int64, µs) and ``_tag`` (utf8), with columns of the user's."""

    name: str
    keys: Columns
    values: Columns = field(default=())
    _: KW_ONLY
    renames: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    drops: Collection[str] = ()

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.timers(operator, self.name, keys=self.keys, values=self.values, defaults=self.defaults)


@dataclass(frozen=True)
class SplitList(_Changing):
    """A list of entries per subtask, dealt out in contiguous chunks at another parallelism (even split)."""

    name: str
    columns: Columns
    _: KW_ONLY
    renames: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    drops: Collection[str] = ()

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.even_split_state(operator, self.name, columns=self.columns, defaults=self.defaults)


@dataclass(frozen=True)
class UnionList(_Changing):
    """A list of entries per subtask, all of which every subtask gets at restore.

    No checkpoint can be taken while some subtasks of the operator have finished and others have not.
    """

    name: str
    columns: Columns
    _: KW_ONLY
    renames: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    drops: Collection[str] = ()

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.union_state(operator, self.name, columns=self.columns, defaults=self.defaults)


@dataclass(frozen=True)
class BroadcastState(_Changing):
    """Rows of which every subtask holds the same; what it is written from must reach every subtask alike."""

    name: str
    columns: Columns
    _: KW_ONLY
    renames: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    drops: Collection[str] = ()

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.broadcast_state(operator, self.name, columns=self.columns, defaults=self.defaults)


Descriptor: TypeAlias = "ValueState | MapState | ListState | Timers | SplitList | UnionList | BroadcastState"

__all__ = [
    "BroadcastState",
    "Descriptor",
    "ListState",
    "MapState",
    "SplitList",
    "Timers",
    "UnionList",
    "ValueState",
]
