"""States that an operator declares: values that know how they are stored.

Columns are given as users of Arrow give them (a ``pa.Schema``, a list of ``pa.field``, or a mapping name → type). Keyed
states are keyed by the columns that the operator's hash edge is keyed by, in that order and of those types; the names may
differ. Every class has ``declare(operator)``, the state as the format declares it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

import stateformat as sf
from stateformat.declare import Columns


@dataclass(frozen=True)
class ValueState:
    """One row per key."""

    name: str
    keys: Columns
    values: Columns

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.value_state(operator, self.name, keys=self.keys, values=self.values)


@dataclass(frozen=True)
class MapState:
    """Rows by key and ``_map_key``, which is of the type ``map_key``."""

    name: str
    keys: Columns
    map_key: pa.DataType
    values: Columns

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.map_state(operator, self.name, keys=self.keys, map_key=self.map_key, values=self.values)


@dataclass(frozen=True)
class ListState:
    """A list of rows per key."""

    name: str
    keys: Columns
    values: Columns

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.list_state(operator, self.name, keys=self.keys, values=self.values)


@dataclass(frozen=True)
class Timers:
    """Event-time timers: rows by key, ``_timestamp`` (int64, µs) and ``_tag`` (utf8), with columns of the user's."""

    name: str
    keys: Columns
    values: Columns = field(default=())

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.timers(operator, self.name, keys=self.keys, values=self.values)


@dataclass(frozen=True)
class SplitList:
    """A list of entries per subtask, dealt out in contiguous chunks at another parallelism (even split)."""

    name: str
    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.even_split_state(operator, self.name, columns=self.columns)


@dataclass(frozen=True)
class UnionList:
    """A list of entries per subtask, all of which every subtask gets at restore.

    No checkpoint can be taken while some subtasks of the operator have finished and others have not.
    """

    name: str
    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.union_state(operator, self.name, columns=self.columns)


@dataclass(frozen=True)
class BroadcastState:
    """Rows of which every subtask holds the same; what it is written from must reach every subtask alike."""

    name: str
    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """As the format declares it."""
        return sf.broadcast_state(operator, self.name, columns=self.columns)


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
