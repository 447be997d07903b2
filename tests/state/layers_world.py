"""What tests of state in layers share: a model of dictionaries, and a driver that publishes every
epoch.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.backends.state import Layer, SubtaskStates
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.model import Handle, Mode, State
from stateformat.publication import CommitPermit
from stateformat.reading import Checkpoint, ReadTask
from stateformat.reading.merge import merge_layers
from stateformat.schema import segment_schema
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import open as open_store

PLACE = pa.struct([("x", pa.int32()), ("y", pa.string())])
KEYS = {"user": pa.string(), "place": PLACE}
USERS = [None, "", "ann", "bob", "a rather long name of somebody"]
PLACES = [
    None,
    {"x": None, "y": None},
    {"x": 1, "y": ""},
    {"x": 1, "y": None},
    *({"x": n, "y": "s"} for n in range(30)),
]
VALUES = {"n": pa.int64(), "note": pa.string(), "tags": pa.list_(pa.int32())}
STATES = (
    declare.value_state("op", "value", keys=KEYS, values=VALUES),
    declare.map_state("op", "map", keys=KEYS, map_key=pa.string(), values=VALUES),
    declare.list_state("op", "list", keys=KEYS, values=VALUES),
    declare.timers("op", "timers", keys=KEYS, values=VALUES),
    declare.broadcast_state("op", "rules", columns={"rule": pa.int64()}),
)
KEYED = ("value", "map", "list", "timers")
OPERATOR = Operator(OperatorId("op"), 1, 128)
GRAPH = JobGraph((OPERATOR,))
Rows = dict[str, dict[str, Any]]


def fresh() -> SubtaskStates:
    return SubtaskStates(OPERATOR, 0, STATES)


class Model:
    """What the state should be: rows by the text of their row key, for each kind."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rows: dict[str, Rows] = {name: {} for name in KEYED}
        self.next: dict[str, int] = {}
        self.rules: list[int] = []

    def key(self) -> dict[str, Any]:
        return {"user": self.chance.choice(USERS), "place": self.chance.choice(PLACES)}

    def values(self) -> dict[str, Any]:
        chance = self.chance
        return {
            "n": chance.choice([None, chance.randrange(1000)]),
            "note": chance.choice([None, "", f"note {chance.randrange(1000)}"]),
            "tags": chance.choice([None, [], [chance.randrange(9), None]]),
        }

    def row(self, name: str) -> dict[str, Any]:
        """A row of a state, of a key that may be there."""
        own: dict[str, Any] = {}
        if name == "map":
            own = {"_map_key": self.chance.choice([None, "", "a", "b"])}
        elif name == "timers":
            own = {"_timestamp": self.chance.randrange(60), "_tag": self.chance.choice(["", "t"])}
        return {**self.key(), **own, **self.values()}

    def clear(self, name: str, keys: Sequence[dict[str, Any]]) -> None:
        gone = {spelt(key, KEYS) for key in keys}
        self.rows[name] = {at: row for at, row in self.rows[name].items() if spelt(row, KEYS) not in gone}
        for key in gone if name == "list" else ():
            self.next.pop(key, None)

    def put(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            if name == "list" and "_index" not in row:
                row["_index"] = self.next.get(spelt(row, KEYS), 0)
            if name == "list":
                self.next[spelt(row, KEYS)] = row["_index"] + 1
            self.rows[name][spelt(row, ROW_KEYS[name])] = row


def spelt(row: Mapping[str, Any], names: Any) -> str:
    return repr([row[name] for name in names])


ROW_KEYS = {state.name: state.row_key for state in STATES}
COLUMNS = {state.name: [*segment_schema(state).names[1:]] for state in STATES}


def table_of(name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> pa.RecordBatch:
    [state] = [state for state in STATES if state.name == name]
    schema = segment_schema(state)
    chosen = pa.schema([schema.field(column) for column in columns or [c for c in COLUMNS[name] if c != "_index"]])
    return pa.RecordBatch.from_pylist([*rows], chosen)


def contents(states: SubtaskStates) -> dict[str, Rows]:
    found = {}
    for name, kept in zip(
        KEYED, (states.value("value"), states.map("map"), states.list("list"), states.timers("timers")), strict=True
    ):
        rows = kept.rows().to_pylist()
        found[name] = {spelt(row, ROW_KEYS[name]): {column: row[column] for column in COLUMNS[name]} for row in rows}
        assert len(found[name]) == len(rows) == len(kept)
    return found


def expected(model: Model) -> dict[str, Rows]:
    return {
        name: {at: {column: row[column] for column in COLUMNS[name]} for at, row in rows.items()}
        for name, rows in model.rows.items()
    }


def change(states: SubtaskStates, model: Model, *, deletes_only: bool = False, filling: bool = False) -> None:
    """A few random calls, of both alike; or many rows of everything."""
    chance = model.chance
    for name in KEYED if filling else chance.choices(KEYED, k=chance.randrange(1, 6)):
        rows = [model.row(name) for _ in range(100 if filling else chance.choice([1, 2, 8]))]
        if not filling and (deletes_only or chance.random() < 0.4):
            forget(states, model, name, rows)
            continue
        if name == "value":
            states.value(name).put(table_of(name, rows, [*KEYS]), table_of(name, rows, [*VALUES]))
        elif name == "map":
            states.map(name).put(table_of(name, rows))
        elif name == "list":
            states.list(name).append(table_of(name, rows, [*KEYS]), table_of(name, rows, [*VALUES]))
        else:
            states.timers(name).set(table_of(name, rows))
        model.put(name, rows)
    if not deletes_only and chance.random() < 0.5:
        rules = [chance.randrange(9) for _ in range(2)]
        states.entries("rules").replace(pa.table({"rule": rules}))
        model.rules = rules


def forget(states: SubtaskStates, model: Model, name: str, rows: list[dict[str, Any]]) -> None:
    chance, held = model.chance, model.rows[name]
    if name == "value":
        states.value(name).delete(table_of(name, rows))
    elif name == "list" or (name == "map" and chance.random() < 0.3):
        (states.list(name) if name == "list" else states.map(name)).clear(table_of(name, rows, [*KEYS]))
        model.clear(name, rows)
    elif name == "map":
        states.map(name).delete(table_of(name, rows))
    elif chance.random() < 0.5:
        watermark = chance.randrange(40)
        due = states.timers(name).due(watermark)
        fired = {at for at, row in held.items() if row["_timestamp"] <= watermark}
        assert {spelt(row, ROW_KEYS[name]) for row in (due.to_pylist() if due else [])} == fired
        model.rows[name] = {at: row for at, row in held.items() if at not in fired}
    else:
        states.timers(name).delete(table_of(name, rows))
    if name in ("value", "map", "timers") and model.rows[name] is held:
        for row in rows:
            held.pop(spelt(row, ROW_KEYS[name]), None)


@dataclass
class Driver:
    """Publishes every epoch, with layers put together as a driver does that knows what each worker
    kept.
    """

    states: tuple[State, ...] = STATES
    chain: dict[str, list[tuple[Layer, Handle]]] = field(default_factory=dict)
    permit: CommitPermit | None = None
    written_rows: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = open_store(f"memory://{uuid.uuid4().hex}")
        self.options = WriteOptions()

    @property
    def layers(self) -> dict[str, list[Layer]]:
        return {name: [layer for layer, _ in layers] for name, layers in self.chain.items()}

    @property
    def checkpoint(self) -> Checkpoint:
        assert self.permit is not None
        return self.permit.checkpoint()

    def epoch(self, version: int, write: Any) -> dict[str, int]:
        """``write(writer, layers)`` writes the states; returns rows written by name, of what is
        keyed.
        """
        pending = self.store.begin(
            parent=self.permit, job_id="j", graph=GRAPH, states=self.states, options=self.options
        )
        with pending.context.subtask("op", 0) as writer:
            kept = write(writer, self.layers)
        snapshot = writer.snapshot()
        own = {handle.state: handle for handle in snapshot.handles}
        handles = [handle for handle in snapshot.handles if handle.mode != Mode.KEYED]
        rows = {}
        for name, count in kept.items():
            layers = self.chain.get(name, [])[:count]
            assert (name in snapshot.carried) is (count > 0)
            if name in own:
                number = layers[-1][1].layer + 1 if layers else 0
                handle = own[name]._replace(layer=number)
                layers.append((Layer(version, handle.rows, handle.size_bytes), handle))
            rows[name] = own[name].rows if name in own else 0
            self.chain[name] = layers
            handles += [handle for _, handle in layers]
        pending.add(replace(snapshot, handles=tuple(handles), carried=()))
        self.permit = pending.publish()
        return rows

    def newer(self, version: int) -> tuple[dict[str, ReadTask], dict[str, list[Layer]]]:
        """What a worker takes that has everything up to a version."""
        tasks, layers = {}, {}
        for state in self.states:
            task = self.checkpoint.read("op", state.name, 0)
            if state.mode is Mode.KEYED:
                new = [pair for pair in self.chain[state.name] if (pair[0].version or 0) > version]
                layers[state.name] = [layer for layer, _ in new]
                numbers = pa.array([handle.layer for _, handle in new], pa.int32())
                task = replace(task, slices=task.slices.filter(pc.is_in(task.slices["layer"], value_set=numbers)))
            tasks[state.name] = task
        return tasks, layers

    def restored(self, version: int | None = None) -> SubtaskStates:
        states = SubtaskStates(OPERATOR, 0, self.states)
        if version is not None:
            states.begin(version)
        if self.permit is not None:
            states.restore({state.name: self.checkpoint.read("op", state.name, 0) for state in self.states})
        return states


def foreign(driver: Driver, model: Model) -> Any:
    """A writer that clears keys, and folds the top layer into that: SPEC.md allows both."""

    def write(writer: Any, layers: Mapping[str, Sequence[Layer]]) -> dict[str, int]:
        kept = {}
        for state in STATES[:4]:
            name = state.name
            keys = list({spelt(key, KEYS): key for key in (model.key() for _ in range(3))}.values())
            again = [{**model.row(name), **keys[0]} for _ in range(2)]
            again = list({spelt({"_index": 0, **row}, ROW_KEYS[name]): row for row in again}.values())
            again = again[:1] if name == "list" else again
            model.clear(name, keys)
            model.put(name, again)
            clears = [{"_op": 2, **key} for key in keys]
            schema = segment_schema(state, delta=True).remove(0)
            delta = pa.Table.from_pylist(clears + [{"_op": 0, **row} for row in again], schema)
            kept[name] = len(layers[name])
            if len(layers[name]) > 1 and model.chance.random() < 0.7:
                task = driver.checkpoint.read("op", name, 0)
                *_, (_, batches) = task.layers()
                top = pa.Table.from_batches(batches).drop_columns(["_key_group"])
                delta = merge_layers([top, delta], state.row_key, state.key_columns, includes_base=False)
                kept[name] -= 1
            writer.write(name, delta, delta=True)
        writer.write("rules", pa.table({"rule": model.rules}))
        return kept

    return write


def check(driver: Driver, model: Model) -> None:
    found = driver.restored()
    assert contents(found) == expected(model)
    assert found.entries("rules").rows()["rule"].to_pylist() == model.rules
