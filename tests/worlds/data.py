"""A store that has everything in which a naive reader errs, and what is true, in plain Python.

:func:`data_store` publishes six checkpoints of a shop. :func:`expected` tells the rows of a state
in any of them, and :func:`expected_changes` what changed between two; neither calls a reader of
ours. ``totals`` is also found by its name, "Totals per user".

| checkpoint | what happens |
|---|---|
| 1 | parallelism 2, every keyed state whole |
| 2 | large deltas with deletes and clears, in segments of their own |
| 3 | small deltas, inline; deleted keys come back, an upsert changes nothing |
| 4 | a rescale to 3, by metadata alone |
| 5 | ``spent``: ``orders`` widened, ``town`` renamed to ``city``, ``vip`` and ``tier`` new |
| 6 | small deltas, inline |

``spent`` and ``baskets`` lie in segments and in layers inline; all other states have no file.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import Any

import pyarrow as pa

from stateformat.graph import JobGraph, Partitioner
from stateformat.model import State
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.worlds.stores import Job, edge, operator, owned, rescale_newest

Row = dict[str, Any]
Name = tuple[str, str]

PARALLELISMS = {1: 2, 2: 2, 3: 2, 4: 3, 5: 3, 6: 3}
"""That of every operator, by checkpoint."""
NEWEST = 6
EVOLVED = 5
"""The first checkpoint whose ``spent`` has the newest columns."""
USERS = 6000

_USER = {"user": pa.string()}
_SPENT = {"orders": pa.int32(), "euros": pa.float64(), "town": pa.string(), "seen": pa.timestamp("us", "UTC")}
_SPENT_NOW = {
    "orders": pa.int64(),
    "euros": pa.float64(),
    "city": pa.string(),
    "seen": pa.timestamp("us", "UTC"),
    "vip": pa.bool_(),
    "tier": pa.string(),
}
_SHOP = pa.struct([pa.field("name", pa.string()), pa.field("pieces", pa.int32())])


def states(checkpoint_id: int) -> tuple[State, ...]:
    """What a checkpoint declares."""
    spent = declare.value_state("totals", "spent", keys=_USER, values=_SPENT)
    if checkpoint_id >= EVOLVED:
        spent = declare.value_state(
            "totals",
            "spent",
            keys=_USER,
            values=_SPENT_NOW,
            previous=spent,
            renames={"town": "city"},
            defaults={"vip": "false"},
        )
    day = {**_USER, "day": pa.date32()}
    basket = {"pieces": pa.int32(), "price": pa.decimal128(8, 2)}
    visit = {"shop": _SHOP, "tags": pa.list_(pa.string())}
    return (
        declare.even_split_state("orders", "positions", columns={"path": pa.string(), "position": pa.int64()}),
        declare.union_state("orders", "shards", columns={"shard": pa.int32(), "owner": pa.string()}),
        declare.coordinator_state("orders", "unassigned", columns={"path": pa.string()}),
        spent,
        declare.map_state("totals", "baskets", keys=_USER, map_key=pa.string(), values=basket),
        declare.list_state("totals", "recent", keys=_USER, values=visit),
        declare.timers("totals", "reminders", keys=_USER, values={"note": pa.binary()}),
        declare.value_state("totals", "by_day", keys=day, values={"amount": pa.float32()}),
        declare.value_state("totals", "refunds", keys={"order": pa.int64()}, values={"euros": pa.float64()}),
        declare.broadcast_state("totals", "rates", columns={"currency": pa.string(), "euros": pa.float64()}),
    )


ROW_KEYS: Mapping[Name, tuple[str, ...]] = {
    ("totals", "spent"): ("user",),
    ("totals", "baskets"): ("user", "_map_key"),
    ("totals", "recent"): ("user", "_index"),
    ("totals", "reminders"): ("user", "_timestamp", "_tag"),
    ("totals", "by_day"): ("user", "day"),
    ("totals", "refunds"): ("order",),
}
"""What tells the rows of a keyed state apart."""
NAMES: tuple[Name, ...] = tuple((state.operator, state.name) for state in states(NEWEST))


def schema(operator: str, state: str, checkpoint_id: int = NEWEST) -> pa.Schema:
    """The columns of a state as users see them, without metadata."""
    [declared] = [one for one in states(checkpoint_id) if (one.operator, one.name) == (operator, state)]
    types = {
        "positions": {"path": pa.string(), "position": pa.int64()},
        "shards": {"shard": pa.int32(), "owner": pa.string()},
        "unassigned": {"path": pa.string()},
        "spent": _USER | (_SPENT_NOW if checkpoint_id >= EVOLVED else _SPENT),
        "baskets": {**_USER, "_map_key": pa.string(), "pieces": pa.int32(), "price": pa.decimal128(8, 2)},
        "recent": {"_index": pa.int64(), **_USER, "shop": _SHOP, "tags": pa.list_(pa.field("element", pa.string()))},
        "reminders": {"_timestamp": pa.int64(), "_tag": pa.string(), **_USER, "note": pa.binary()},
        "by_day": {**_USER, "day": pa.date32(), "amount": pa.float32()},
        "refunds": {"order": pa.int64(), "euros": pa.float64()},
        "rates": {"currency": pa.string(), "euros": pa.float64()},
    }
    return pa.schema(list(types[declared.name].items()))


def user(number: int) -> str | None:
    """The key of a user; number 0 is null."""
    return None if number == 0 else f"u{number:04d}"


@dataclass(frozen=True)
class Change:
    """What one checkpoint does to a keyed state: clears first, then deletes, then upserts."""

    clears: Sequence[Row] = ()
    deletes: Sequence[Row] = ()
    upserts: Sequence[Row] = ()

    def apply(self, rows: dict[Any, Row], name: Name) -> None:
        """Do it to rows by their row keys."""
        keys = ROW_KEYS[name]
        gone = [tuple(clear.items()) for clear in self.clears]
        if gone:
            cleared = [at for at, row in rows.items() if any(all(row[c] == v for c, v in one) for one in gone)]
            for at in cleared:
                del rows[at]
        for delete in self.deletes:
            rows.pop(tuple(delete[key] for key in keys), None)
        for upsert in self.upserts:
            rows[tuple(upsert[key] for key in keys)] = upsert

    def table(self, columns: pa.Schema, *, delta: bool) -> pa.Table:
        """What is written: the whole state, or a layer."""
        if not delta:
            return pa.Table.from_pylist([*self.upserts], columns)
        coded = [(2, self.clears), (1, self.deletes), (0, self.upserts)]
        rows = [{"_op": code, **row} for code, some in coded for row in some]
        return pa.Table.from_pylist(rows, pa.schema([pa.field("_op", pa.int8()), *columns]))


TOWNS = ("Bern", "Oslo", "Lyon", "Turin", "Graz", "Ghent", "Cork")
_EPOCH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def _spent(number: int, round_: int, **now: Any) -> Row:
    """A row of ``spent`` in its newest columns."""
    euros = (number * 7919 + round_ * 104729) % 1_000_003 / 100
    return {
        "user": user(number),
        "orders": number % 9 + round_,
        "euros": float("nan") if number == 13 else euros,
        "city": None if number % 50 == 1 else TOWNS[number % 7],
        "seen": _EPOCH + datetime.timedelta(seconds=number * 37 + round_ * 86_400),
        "vip": False,
        "tier": None,
        **now,
    }


def _basket(number: int, item: str, pieces: int) -> Row:
    price = Decimal((number * 131 + len(item)) % 100_000) / 100
    return {"user": user(number), "_map_key": item, "pieces": pieces, "price": price}


def _visit(number: int, index: int) -> Row:
    shop = None if number % 4 == 3 else {"name": TOWNS[number % 7], "pieces": number if index else None}
    return {"user": user(number), "_index": index, "shop": shop, "tags": ["new", None, "gift"][: number % 4]}


def _reminder(number: int, at: int) -> Row:
    return {"user": user(number), "_timestamp": at * 1_000_000, "_tag": "mail", "note": bytes([number % 256, 255])}


def _by_day(number: int, day: int, amount: float | None) -> Row:
    return {"user": user(number), "day": datetime.date(2026, 3, day), "amount": amount}


def _users(numbers: Iterable[int]) -> list[Row]:
    return [{"user": user(number)} for number in numbers]


def _first() -> dict[Name, Change]:
    items = ("bread", "milk", "")
    return {
        ("totals", "spent"): Change(upserts=[_spent(n, 0) for n in range(USERS)]),
        ("totals", "baskets"): Change(upserts=[_basket(n, item, n % 5) for n in range(2000) for item in items]),
        ("totals", "recent"): Change(upserts=[_visit(n, i) for n in range(40) for i in range(2)]),
        ("totals", "reminders"): Change(upserts=[_reminder(n, 60 * n) for n in range(30)]),
        ("totals", "by_day"): Change(
            upserts=[_by_day(n, 1 + n % 3, float("nan") if n == 5 else n / 4) for n in range(60)]
        ),
        ("totals", "refunds"): Change(),
    }


def _second() -> dict[Name, Change]:
    return {
        ("totals", "spent"): Change(
            deletes=_users(range(1, USERS, 10)), upserts=[_spent(n, 1) for n in range(0, USERS + 400, 2)]
        ),
        ("totals", "baskets"): Change(
            clears=_users(range(0, 500, 5)),
            deletes=[{"user": user(n), "_map_key": "milk"} for n in range(600, 800)],
            upserts=[_basket(n, "tea", 2) for n in range(1800)],
        ),
        ("totals", "recent"): Change(clears=_users([3, 7]), upserts=[_visit(3, 5), _visit(41, 0)]),
        ("totals", "reminders"): Change(
            deletes=[{"user": user(4), "_timestamp": 240_000_000, "_tag": "mail"}], upserts=[_reminder(4, 999)]
        ),
        ("totals", "by_day"): Change(deletes=[{"user": None, "day": datetime.date(2026, 3, 1)}]),
        ("totals", "refunds"): Change(),
    }


def _third() -> dict[Name, Change]:
    return {
        ("totals", "spent"): Change(
            deletes=_users([2, 4, 9999]),
            # 11 and 21 come back, 13 (NaN) and 6 are written again as they were.
            upserts=[_spent(11, 2), _spent(21, 2), _spent(13, 0), _spent(6, 1), _spent(0, 2, city=None)],
        ),
        ("totals", "baskets"): Change(clears=_users([0, 5]), upserts=[_basket(5, "bread", 7)]),
        ("totals", "recent"): Change(deletes=[{"user": user(9), "_index": 0}]),
        ("totals", "reminders"): Change(),
        ("totals", "by_day"): Change(upserts=[_by_day(0, 9, None), _by_day(5, 3, float("nan"))]),
        ("totals", "refunds"): Change(),
    }


def _fifth() -> dict[Name, Change]:
    def gold(number: int) -> Row:
        # Most differ, or the layer would be small enough to lie inline.
        tier = "gold" if number < 100 else f"gold {number}"
        return _spent(number, 3, orders=2**40 + number, vip=True, tier=tier)

    return {
        ("totals", "spent"): Change(
            deletes=_users(range(3, USERS, 100)), upserts=[gold(n) for n in range(0, USERS, 3) if n % 100 != 3]
        ),
        ("totals", "baskets"): Change(upserts=[_basket(2500, "tea", 1)]),
        ("totals", "recent"): Change(upserts=[_visit(9, 0)]),
        ("totals", "reminders"): Change(clears=_users([1])),
        ("totals", "by_day"): Change(clears=[{"user": user(8), "day": datetime.date(2026, 3, 3)}]),
        ("totals", "refunds"): Change(),
    }


def _sixth() -> dict[Name, Change]:
    return {
        ("totals", "spent"): Change(
            deletes=_users([6, 12]), upserts=[_spent(2, 4, vip=None), _spent(7001, 4, tier="new"), _spent(18, 4)]
        ),
        ("totals", "baskets"): Change(deletes=[{"user": user(2500), "_map_key": "tea"}]),
        ("totals", "recent"): Change(),
        ("totals", "reminders"): Change(upserts=[_reminder(1, 7)]),
        ("totals", "by_day"): Change(upserts=[_by_day(8, 3, 0.5)]),
        ("totals", "refunds"): Change(),
    }


CHANGES: Mapping[int, Callable[[], dict[Name, Change]]] = {1: _first, 2: _second, 3: _third, 5: _fifth, 6: _sixth}


def _entries(checkpoint_id: int) -> dict[Name, list[Row]]:
    """The rows of the states without keys; a rescale leaves them as they are."""
    at = 3 if checkpoint_id == 4 else checkpoint_id
    return {
        ("orders", "positions"): [{"path": f"day-{n}.csv", "position": at * 100 + n} for n in range(7)],
        ("orders", "shards"): [{"shard": n, "owner": None if n == at else f"s{n}"} for n in range(5)],
        ("orders", "unassigned"): [{"path": f"day-{n}.csv"} for n in range(at, 10)],
        ("totals", "rates"): [{"currency": "CHF", "euros": 1 + at / 100}, {"currency": "NOK", "euros": 0.085}],
    }


@cache
def _history() -> dict[int, dict[Name, list[Row]]]:
    """All rows in the newest columns, by checkpoint."""
    keyed: dict[Name, dict[Any, Row]] = {name: {} for name in ROW_KEYS}
    found = {}
    for checkpoint_id in PARALLELISMS:
        for name, change in CHANGES[checkpoint_id]().items() if checkpoint_id in CHANGES else ():
            change.apply(keyed[name], name)
        found[checkpoint_id] = {
            **{name: list(rows.values()) for name, rows in keyed.items()},
            **_entries(checkpoint_id),
        }
    return found


def _as_of(rows: Iterable[Row], name: Name, checkpoint_id: int) -> list[Row]:
    """Rows in the columns of a checkpoint's schema."""
    if name == ("totals", "spent") and checkpoint_id < EVOLVED:
        old = {"user": "user", "orders": "orders", "euros": "euros", "city": "town", "seen": "seen"}
        return [{old.get(column, column): value for column, value in row.items() if column in old} for row in rows]
    return list(rows)


def expected_rows(
    operator: str, state: str, checkpoint_id: int = NEWEST, *, columns_of: int | None = None
) -> list[Row]:
    """The rows of a state in a checkpoint, as dictionaries, in no order.

    ``columns_of``: the checkpoint whose columns they have, at least ``checkpoint_id``.
    """
    rows = _history()[checkpoint_id][operator, state]
    return _as_of(rows, (operator, state), columns_of or checkpoint_id)


def expected(operator: str, state: str, checkpoint_id: int = NEWEST, *, columns_of: int | None = None) -> pa.Table:
    """The same as a table in the schema of :func:`schema`; broadcast state once."""
    rows = expected_rows(operator, state, checkpoint_id, columns_of=columns_of)
    return pa.Table.from_pylist(rows, schema(operator, state, columns_of or checkpoint_id))


def expected_changes(operator: str, state: str, start: int, end: int) -> list[Row]:
    """How a keyed state came from checkpoint ``start`` to ``end``, in the columns of ``end``.

    A row has ``_change`` and ``_checkpoint_id`` (``end``). A row that is as it was has none.
    """
    keys = ROW_KEYS[operator, state]
    before, after = (
        {repr([row[key] for key in keys]): row for row in expected_rows(operator, state, at, columns_of=end)}
        for at in (start, end)
    )
    found = []
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if repr(old) == repr(new):
            continue
        names = ("update_before", "update_after") if old and new else ("delete", "insert")
        pairs = zip(names, (old, new), strict=True)
        found += [{**row, "_change": change, "_checkpoint_id": end} for change, row in pairs if row]
    return found


def same_rows(found: pa.Table | Iterable[Mapping[str, Any]], wanted: pa.Table | Iterable[Mapping[str, Any]]) -> bool:
    """Whether two tables have the same rows, in any order; null equals null and NaN equals NaN."""
    return _counted(found) == _counted(wanted)


def _counted(rows: pa.Table | Iterable[Mapping[str, Any]]) -> Counter[str]:
    listed = rows.to_pylist() if isinstance(rows, pa.Table) else rows
    return Counter(repr(sorted((name, _plain(value)) for name, value in row.items())) for row in listed)


def _plain(value: Any) -> Any:
    """A value whose ``repr`` is that of every equal value."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC)
    return value.normalize() if isinstance(value, Decimal) else value


def _graph(parallelism: int) -> JobGraph:
    return JobGraph(
        (
            operator("orders", parallelism, name="Orders", coordinator=True),
            operator("totals", parallelism, name="Totals per user"),
            operator("mail", parallelism, name="Mail"),
        ),
        (
            edge("orders", "totals", Partitioner.HASH, "user"),
            edge("totals", "mail", Partitioner.REBALANCE),
        ),
    )


@dataclass(frozen=True)
class _Written:
    """What one checkpoint's job writes."""

    checkpoint_id: int
    graph: JobGraph
    keyed: Mapping[Name, pa.Table] = field(default_factory=dict)

    def rows(self, name: Name) -> Callable[[int], pa.Table]:
        """The rows of a state by subtask; that of the coordinator is −1."""
        at = self.graph.operator(name[0])
        if name in self.keyed:
            keys = [key for key in ROW_KEYS[name] if not key.startswith("_")]
            return lambda subtask: owned(self.keyed[name], keys, at, subtask)
        entries = expected(*name, self.checkpoint_id)
        if name[1] in ("rates", "unassigned"):
            return lambda _: entries
        return lambda subtask: entries.take(list(range(subtask, len(entries), at.parallelism)))


def _job(checkpoint_id: int) -> Job:
    graph = _graph(PARALLELISMS[checkpoint_id])
    keyed = {
        name: Change(change.clears, change.deletes, _as_of(change.upserts, name, checkpoint_id)).table(
            schema(*name, checkpoint_id), delta=checkpoint_id > 1
        )
        for name, change in CHANGES[checkpoint_id]().items()
    }
    written = _Written(checkpoint_id, graph, keyed)
    return Job("shop", graph, states(checkpoint_id), {name: written.rows(name) for name in NAMES}, name="Shop")


def data_store(url: str, *, checkpoints: int = NEWEST, **options: Any) -> CheckpointStore:
    """A store with the checkpoints 1 to ``checkpoints`` of the shop, at any URL."""
    store, permit = open_store(url, **options), None
    for checkpoint_id in range(1, checkpoints + 1):
        if checkpoint_id not in CHANGES:
            permit = rescale_newest(store, PARALLELISMS[checkpoint_id])
            continue
        job = _job(checkpoint_id)
        layers = {name: job.rows[name] for name in ROW_KEYS} if checkpoint_id > 1 else {}
        permit = job.publish(store, permit, deltas=layers)
    return store
