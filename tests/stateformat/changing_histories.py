"""Histories of a small job drawn from a seed, with the rows of every checkpoint in plain Python.

An operator has keyed state of every kind. A step writes it whole, or as a delta with deletes and
clears, or changes nothing, or adds and widens columns, or is a rescale or rewrite. What is true is
kept in dictionaries; :func:`joined` lets DuckDB compare two of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa

from stateformat.backends.rewrite import RewriteSpec, publish_rescaled, rewrite
from stateformat.graph import JobGraph, Operator
from stateformat.model import State
from stateformat.publication import CommitPermit, PendingCheckpoint
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.ttl import TTL_COLUMN, Ttl
from tests.worlds.stores import owned

Row = dict[str, Any]
KEYS = {"user": pa.int64(), "town": pa.string()}
USERS = 30
LIFE = 1_000
"""Microseconds."""
FIRST = {
    "n": pa.int32(),
    "share": pa.float64(),
    "place": pa.struct([pa.field("x", pa.int32()), pa.field("name", pa.string())]),
    "tags": pa.list_(pa.string()),
    "counts": pa.map_(pa.string(), pa.int64()),
}
LATER = {"n": pa.int64(), "level": pa.int32(), **{name: kind for name, kind in FIRST.items() if name != "n"}}
"""``n`` is wider, ``level`` is new with a default."""
OWN = {"value": (), "map": ("_map_key",), "list": ("_index",), "timers": ("_timestamp", "_tag")}


def declared(kind: str, previous: State | None = None, *, later: bool = False, ttl: Ttl | None = None) -> State:
    """The state of a kind, named after it; timers do not expire."""
    more: dict[str, Any] = {"keys": KEYS, "values": LATER if later else FIRST}
    more |= {"ttl": ttl} if ttl is not None and kind != "timers" else {}
    if later:
        more |= {"previous": previous, "defaults": {"level": "7"}}
    if kind == "map":
        return declare.map_state("op", kind, map_key=pa.string(), **more)
    makers: Mapping[str, Callable[..., State]] = {
        "value": declare.value_state,
        "list": declare.list_state,
        "timers": declare.timers,
    }
    return makers[kind]("op", kind, **more)


@dataclass
class History:
    """A store, and for each checkpoint the rows of each state by row key."""

    store: CheckpointStore
    draw: random.Random
    truth: dict[int, dict[str, dict[tuple[Any, ...], Row]]] = field(default_factory=dict)
    permit: CommitPermit | None = None
    later_from: int | None = None
    """The first checkpoint with the later columns."""
    _schemas: dict[tuple[str, int], pa.Schema] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = {kind: declared(kind) for kind in OWN}
        self._now: dict[str, dict[tuple[Any, ...], Row]] = {kind: {} for kind in OWN}
        self._graph = JobGraph((Operator("op", 2, 16, name="Operator"),))

    def step(self, what: str) -> None:
        """Publish the next checkpoint."""
        getattr(self, f"_{what}")()
        self.truth[self.store.open().id] = {kind: dict(rows) for kind, rows in self._now.items()}

    def _whole(self) -> None:
        for kind, rows in self._now.items():
            for _ in range(self.draw.randrange(40)):
                row = self._row(kind)
                rows[self._key(kind, row)] = row
        self._publish({kind: [*rows.values()] for kind, rows in self._now.items()}, delta=False)

    def _delta(self) -> None:
        self._publish({kind: self._changed(kind, self.draw.choice([1, 3, 30])) for kind in OWN}, delta=True)

    def _quiet(self) -> None:
        self._publish({kind: [] for kind in OWN}, delta=True)

    def _evolve(self) -> None:
        if self.later_from is None:
            later = {kind: declared(kind, state, later=True, ttl=state.ttl) for kind, state in self.states.items()}
            self.states = later
            self.later_from = len(self.truth) + 1
            for rows in self._now.values():
                rows.update({key: {**row, "level": 7} for key, row in rows.items()})
        self._delta()

    def _rescale(self) -> None:
        now = self.store.open()
        self.permit = publish_rescaled(now, now.graph.at(self.draw.choice([1, 3, 4])), store=self.store)

    def _compact(self) -> None:
        rewrite(self.store, self.store.open(), RewriteSpec())
        self.permit = self.store.start("job")

    def _rekey(self) -> None:
        rewrite(self.store, self.store.open(), RewriteSpec(max_parallelism=self.draw.choice([8, 16, 24])))
        self.permit = self.store.start("job")

    def _publish(self, rows: Mapping[str, list[Row]], *, delta: bool) -> None:
        graph = self._graph if self.permit is None else self.store.open().graph
        operator = graph.operator("op")
        pending = self.store.begin(job_id="job", graph=graph, states=self.states.values(), parent=self.permit)
        for subtask in range(operator.parallelism):
            with pending.context.subtask("op", subtask) as writer:
                for kind, state in self.states.items():
                    table = table_of(rows[kind], self._columns(kind, delta=delta))
                    mine = owned(table, list(KEYS), operator, subtask)
                    writer.write(state.name, mine, delta=delta and self.permit is not None)
            pending.add(writer)
        self._tell_time(pending)
        self.permit = pending.publish()

    def _tell_time(self, pending: PendingCheckpoint) -> None:
        """Say what time it is, where rows expire."""

    def _changed(self, kind: str, count: int) -> list[Row]:
        """Change the rows of a state; the rows of the delta that does so."""
        rows, delta, seen = self._now[kind], list[Row](), set[tuple[Any, ...]]()
        for key in [*{tuple(row[name] for name in KEYS) for row in rows.values()}]:
            if self.draw.random() < 0.05:
                for gone in [at for at, row in rows.items() if tuple(row[name] for name in KEYS) == key]:
                    del rows[gone]
                delta.append({**dict(zip(KEYS, key, strict=True)), "_op": 2})
        for _ in range(count):
            old = self.draw.choice([*rows.values()]) if rows and self.draw.random() < 0.6 else None
            row = {**self._row(kind), **{name: old[name] for name in (*KEYS, *OWN[kind])}} if old else self._row(kind)
            key = self._key(kind, row)
            if key in seen:
                continue
            seen.add(key)
            if self.draw.random() < 0.3:
                rows.pop(key, None)
                delta.append({**{name: row[name] for name in (*KEYS, *OWN[kind])}, "_op": 1})
            else:
                row = dict(rows[key]) if key in rows and self.draw.random() < 0.3 else row
                rows[key] = row
                delta.append({**row, "_op": 0})
        return delta

    def _columns(self, kind: str, *, delta: bool) -> pa.Schema:
        own = {"_map_key": pa.string(), "_index": pa.int64(), "_timestamp": pa.int64(), "_tag": pa.string()}
        later = self.later_from is not None
        columns = {**KEYS, **{name: own[name] for name in OWN[kind]}, **(LATER if later else FIRST)}
        times = {} if self.states[kind].ttl is None else {TTL_COLUMN: pa.timestamp("us")}
        return pa.schema({**columns, **times, **({"_op": pa.int8()} if delta else {})}.items())

    def _key(self, kind: str, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in (*KEYS, *OWN[kind]))

    def _row(self, kind: str) -> Row:
        draw = self.draw
        number = draw.randrange(USERS)
        row: Row = {"user": None if number == 7 else number % 11, "town": None if number % 5 == 3 else f"t{number}"}
        own = {
            "_map_key": draw.choice("abc"),
            "_index": draw.randrange(4),
            "_timestamp": draw.randrange(3) * 10,
            "_tag": draw.choice(["", "x"]),
        }
        row |= {name: own[name] for name in OWN[kind]}
        row |= {
            "n": draw.choice([None, 0, 1, 2]),
            "share": draw.choice([None, math.nan, 0.5, math.inf, 1.0]),
            "place": draw.choice([None, {"x": None, "name": "a"}, {"x": 1, "name": None}, {"x": 1, "name": "a"}]),
            "tags": draw.choice([None, [], [None], ["a"], ["a", "b"], ["a", None, "b"]]),
            "counts": draw.choice([None, [], [("a", 1)], [("a", None)], [("a", 1), ("b", 2)]]),
        }
        return {**row, "level": draw.choice([7, 8, None])} if self.later_from is not None else row

    def rows(self, kind: str, checkpoint_id: int, *, as_of: int) -> pa.Table:
        """The rows of a checkpoint in the columns of another one."""
        later = self.later_from is not None and as_of >= self.later_from
        rows: Iterable[Row] = self.live(kind, checkpoint_id)
        if later and self.later_from is not None and checkpoint_id < self.later_from:
            rows = [{**row, "level": 7} for row in rows]
        names = [*KEYS, *OWN[kind], *(LATER if later else FIRST)]
        names += [] if self.states[kind].ttl is None else [TTL_COLUMN]
        stored = self._stored_schema(kind, as_of)
        return table_of(rows, pa.schema([stored.field(name) for name in names]))

    def live(self, kind: str, checkpoint_id: int) -> list[Row]:
        """The rows of a checkpoint that are shown."""
        return [*self.truth[checkpoint_id][kind].values()]

    def _stored_schema(self, kind: str, checkpoint_id: int) -> pa.Schema:
        at = (kind, checkpoint_id)
        if at not in self._schemas:
            self._schemas[at] = self.store.open(checkpoint_id).state("op", kind).schema
        return self._schemas[at]


def table_of(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    """Rows as a table; a missing column is null."""
    listed = list(rows)
    columns = [pa.array([row.get(field.name) for row in listed], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


class ExpiringHistory(History):
    """A history whose rows live for :data:`LIFE`, by a clock that goes on with each checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        clock: Any = self.draw.choice(["event_time", "processing_time"])
        self.states = {kind: declared(kind, ttl=Ttl(LIFE, clock)) for kind in OWN}
        self.clock = 0
        self.hides = True
        self._now_at: dict[int, int] = {}

    def step(self, what: str) -> None:
        """Publish the next checkpoint."""
        self.clock += self.draw.choice([0, LIFE // 4, LIFE // 2])
        newest = len(self.truth)
        super().step(what)
        # Rescales and rewrites keep the time of their source.
        told = what not in ("rescale", "compact", "rekey")
        self._now_at[newest + 1] = self.clock if told else self._now_at[newest]

    @property
    def time_went_on(self) -> bool:
        """Whether any checkpoint was told a later time than the first: then rows have expired."""
        return len({*self._now_at.values()}) > 1

    def live(self, kind: str, checkpoint_id: int) -> list[Row]:
        """The rows of a checkpoint that have not expired."""
        rows, now = super().live(kind, checkpoint_id), self._now_at[checkpoint_id]
        hides = self.hides and self.states[kind].ttl is not None
        return [row for row in rows if not hides or row[TTL_COLUMN] + LIFE > now]

    def _tell_time(self, pending: PendingCheckpoint) -> None:
        pending.set_now("op", event_time_us=self.clock, processing_time_us=self.clock)

    def _row(self, kind: str) -> Row:
        return {**super()._row(kind), TTL_COLUMN: self.clock - self.draw.randrange(LIFE)}


def random_history(url: str, seed: int, steps: int = 7, *, of: type[History] = History) -> History:
    """A history of some checkpoints."""
    draw = random.Random(seed)
    history = of(open_store(url), draw)
    history.step("whole")
    kinds = ["delta", "delta", "delta", "whole", "quiet", "rescale", "compact", "rekey", "evolve"]
    for what in draw.choices(kinds, k=steps - 1):
        history.step(what)
    return history


def joined(old: pa.Table, new: pa.Table, row_key: Iterable[str]) -> pa.Table:
    """The changes from one table to another, as DuckDB's full outer join finds them."""
    names = new.column_names
    keys = list(row_key)
    at_keys = " and ".join(f"o.{name} is not distinct from n.{name}" for name in keys)
    differ = " or ".join(f"o_{name} is distinct from n_{name}" for name in names if name not in keys) or "false"
    both = ", ".join(f"{side}.{name} as {side}_{name}" for side in "on" for name in names)

    def side(prefix: str, change: str, where: str) -> str:
        columns = ", ".join(f"{prefix}_{name} as {name}" for name in names)
        return f"select {columns}, '{change}' as _change from pairs where {where}"

    matched = f"o_there and n_there and ({differ})"
    sql = f"""
        with pairs as (
            select o.there as o_there, n.there as n_there, {both}
            from (select *, true as there from old) o full outer join (select *, true as there from new) n on {at_keys}
        )
        {side("o", "delete", "n_there is null")} union all {side("n", "insert", "o_there is null")}
        union all {side("o", "update_before", matched)} union all {side("n", "update_after", matched)}
    """
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("old", old)
        connection.register("new", new)
        found: pa.Table = connection.sql(sql).to_arrow_table()
    return found
