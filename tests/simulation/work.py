"""The sources, operators and sinks of the simulator: small, and every hook reports to the
:class:`Witness` first.

Every operator adds its uid to the path of a record when it emits it (``graphs.passed_on``), and
keeps records that it does not emit yet in declared states, whole. Counters write their count into
the record's ``marks``. So any cut through a run shows where each record is, and the output shows
what the states were.

Rows are handled one by one: there are only some dozens of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from stateformat import Ttl
from stateformat.backends.dataflow import (
    ApplyPerKey,
    BroadcastState,
    Chunk,
    Descriptor,
    ListState,
    MapState,
    NoSplit,
    Operator,
    OperatorContext,
    OperatorCoordinator,
    Output,
    Prepared,
    ReaderContext,
    Sender,
    Source,
    Split,
    SplitEnumerator,
    SplitList,
    Timers,
    TwoPhaseCommitSink,
    UnionList,
    ValueState,
)
from tests.simulation.graphs import WINDOW_US, OpSpec, Row, SourceSpec, passed_on
from tests.simulation.lives import LIVES_US, LOOKED_EVERY
from tests.simulation.witness import Seen, Witness

RECORD = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("key", pa.int64()),
        pa.field("ts", pa.int64()),
        pa.field("hops", pa.int64()),
        pa.field("path", pa.string()),
        pa.field("marks", pa.string()),
    ]
)
KEY = pa.schema([pa.field("key", pa.int64())])
N = pa.schema([pa.field("n", pa.int64())])
VALUES = pa.schema([field for field in RECORD if field.name != "key"])
LIFE_SCHEMA = pa.schema(
    [("subtask", pa.int64()), ("parallelism", pa.int64()), ("what", pa.string()), ("value", pa.int64())]
)
LIFE = SplitList("life", LIFE_SCHEMA)
TABLE_SCHEMA = pa.schema([("id", pa.int64()), ("path", pa.string())])

Rows = list[dict[str, Any]]
AT = pa.schema([pa.field("at_us", pa.int64())])
DELAY_US = 9_000
FRESH_US = 30_000
"""How long an element of a list lives in processing time."""


def batch_of(rows: Rows, schema: pa.Schema = RECORD) -> pa.RecordBatch:
    """Rows as a batch."""
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def table_of(rows: Rows, schema: pa.Schema) -> pa.Table:
    """Rows as a table."""
    return pa.Table.from_pylist(rows, schema=schema)


def let_out(spec: OpSpec, row: dict[str, Any]) -> Rows:
    """Return what an operator emits for a record: one row, or none if it takes the other half."""
    passed = passed_on(spec.kind, spec.uid, Row(row["id"], row["key"], row["ts"], row["hops"], row["path"]))
    return [] if passed is None else [{**passed._asdict(), "marks": row["marks"]}]


class Watched(Operator):
    """An operator whose every hook is witnessed. Kinds differ in ``take``, ``due`` and ``rest``."""

    holds: tuple[Descriptor, ...] = ()
    keeps_life = True

    def __init__(self, spec: OpSpec, witness: Witness, parallelism: int) -> None:
        self.spec, self.witness, self.parallelism = spec, witness, parallelism
        self.uid = spec.uid

    def states(self, *inputs: pa.Schema) -> tuple[Descriptor, ...]:
        return (*self.holds, LIFE) if self.keeps_life else self.holds

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return RECORD

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self.subtask = context.subtask
        self.witness.opened(self.uid, context.subtask, context.watermark)
        if self.keeps_life:
            self._check_life()
        self.begin()

    def _check_life(self) -> None:
        """Check that, if nothing has changed, exactly the subtask's own entries come back."""
        facts = self.witness.facts
        if facts.settled.get(self.uid) != self.context.parallelism:
            return
        found = {row["what"]: row["value"] for row in self.context.entries("life").rows().to_pylist()}
        if found != dict(facts.life.get((self.uid, self.subtask), {})):
            self.witness._violated(self.uid, self.subtask, f"its own entries are {found}")

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        self.witness.processing(self.uid, self.subtask, input, self.context.watermark)
        return self.emit(self.take(batch.to_pylist(), input))

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        self.witness.called(self.uid, self.subtask, "on_timer", watermark=self.context.watermark)
        return self.emit(self.due(timers.to_pylist()))

    def receive(self, message: bytes) -> Output:
        self.witness.called(self.uid, self.subtask, "receive")
        return self.emit(self.told(message))

    def end_input(self, input: int) -> Output:
        self.witness.input_ended(self.uid, self.subtask, input)
        return None

    def finish(self) -> Output:
        self.witness.finishing(self.uid, self.subtask, len(self.spec.inputs))
        return self.emit(self.rest())

    def snapshot(self) -> None:
        seen = self.witness.snapshot(self.uid, self.subtask)
        if self.keeps_life:
            self.context.entries("life").replace(table_of(self._life(seen), LIFE_SCHEMA))
        self.put_down()

    def _life(self, seen: Seen) -> Rows:
        own = {"subtask": self.subtask, "parallelism": self.context.parallelism}
        happened = [{**own, "what": what, "value": 0} for what in sorted(seen.ended | seen.past)]
        return [*happened, {**own, "what": "watermark", "value": self.context.watermark}]

    def checkpoint_complete(self) -> None:
        self.witness.fault("checkpoint_complete", f"{self.uid}[{self.subtask}]")

    def close(self) -> None:
        self.witness.closing(self.uid, self.subtask)

    def emit(self, rows: Rows) -> pa.RecordBatch | None:
        out = [passed for row in rows for passed in let_out(self.spec, row)]
        return batch_of(out) if out else None

    # What kinds differ in -------------------------------------------------------------------------

    def begin(self) -> None:
        """After opening."""

    def take(self, rows: Rows, input: int) -> Rows:
        """Take records; return what to emit now."""
        return rows

    def due(self, timers: Rows) -> Rows:
        """Take timers that are due; return what to emit now."""
        return []

    def told(self, message: bytes) -> Rows:
        """Take a message from the coordinator; return what to emit now."""
        return []

    def rest(self) -> Rows:
        """Return, at the end, everything that is held."""
        return []

    def put_down(self) -> None:
        """Before a snapshot."""


class Pass(Watched):
    """Emits everything at once. Keeps nothing."""

    keeps_life = False


class Merge(Watched):
    """The same for several inputs; it keeps its life."""


class Remembering(Watched):
    """Keeps when the records of each key came, in a list that expires by the clock and in one that
    does not, and compares both.
    """

    holds = (
        ListState("fresh", KEY, AT, ttl=Ttl(FRESH_US, clock="processing_time")),
        ListState("all", KEY, AT),
    )

    def remember(self, key: int) -> None:
        """Compare what both lists hold of a key, and add the time it is to both."""
        fresh, kept = (self.context.list_state(name) for name in ("fresh", "all"))
        now_us = self.context.processing_time_us
        came = [row["at_us"] for row in kept.get_one(key)]
        found, wanted = [row["at_us"] for row in fresh.get_one(key)], [at for at in came if now_us < at + FRESH_US]
        if found != wanted:
            self.witness._violated(self.uid, self.subtask, f"at {now_us} key {key} holds {found}, and not {wanted}")
        if len(came) > len(wanted) + 2:
            kept.clear_one(key)
            for at in wanted:
                kept.append_one((key,), at_us=at)
        for state in (fresh, kept):
            state.append_one((key,), at_us=now_us)


class Count(Remembering):
    """Counts the records of each key, for ever and lately, and looks at one of them again and
    again; it writes all of this into them.
    """

    holds = (
        *Remembering.holds,
        ValueState("count", KEY, {"n": pa.int64()}),
        ValueState("lately", KEY, {"n": pa.int64()}, ttl=Ttl(LIVES_US)),
        MapState("looked", KEY, pa.int64(), {}, ttl=Ttl(LIVES_US, refresh="read_and_write")),
    )

    def take(self, rows: Rows, input: int) -> Rows:
        counts, looked = self.context.value_state("count"), self.context.map_state("looked")
        out = []
        for row in rows:
            key = row["key"]
            self.remember(key)
            old = counts.get_one(key)
            n = old["n"] + 1 if old else 1
            counts.put_one((key,), n=n)
            seen = max(looked.get_one(key), default=0)
            if n % LOOKED_EVERY == 1:
                looked.clear_one(key)
                looked.put_one((key,), n)
            said = f"{self.context.watermark},{self._lately(key)},{seen}"
            out.append({**row, "marks": f"{row['marks']}{self.uid}#{n}#{said};"})
        return out

    def _lately(self, key: int) -> int:
        state = self.context.value_state("lately")
        state.add(batch_of([{"key": key}], KEY), batch_of([{"n": 1}], N), {"n": "sum"})
        return state.get_one(key)["n"]  # type: ignore[index,no-any-return]


class Window(Watched):
    """Holds records until their window is over; emits late ones at once."""

    holds = (ListState("window", KEY, VALUES), Timers("over", KEY))

    def take(self, rows: Rows, input: int) -> Rows:
        late = []
        for row in rows:
            end = window_end(row["ts"])
            if end <= self.context.watermark:
                late.append({**row, "marks": f"{row['marks']}{self.uid}#late;"})
                continue
            held = {name: value for name, value in row.items() if name != "key"}
            self.context.list_state("window").append_one((row["key"],), **held)
            self.context.timers("over").set_one((row["key"],), end)
        return late

    def due(self, timers: Rows) -> Rows:
        state = self.context.list_state("window")
        out: Rows = []
        for timer in timers:
            key, end = timer["key"], timer["_timestamp"]
            held = state.get_one(key)
            state.clear_one(key)
            for row in held:
                if window_end(row["ts"]) == end:
                    out.append({**row, "key": key, "marks": f"{row['marks']}{self.uid}#{end};"})
                else:
                    state.append_one((key,), **row)
        return out

    def rest(self) -> Rows:
        held = self.context.list_state("window").rows().to_pylist()
        if held:
            self.witness._violated(self.uid, self.subtask, f"finish, and windows are open: {held}")
        return []


def window_end(ts: int) -> int:
    """Return when the window of a time is over."""
    return (ts // WINDOW_US + 1) * WINDOW_US


class Latest(Remembering):
    """Holds the newest record of each key in a map, and emits the others."""

    holds = (*Remembering.holds, MapState("latest", KEY, pa.string(), {"row": pa.string()}))

    def take(self, rows: Rows, input: int) -> Rows:
        state = self.context.map_state("latest")
        out: Rows = []
        for row in rows:
            self.remember(row["key"])
            out += [json.loads(old["row"]) for old in state.get_one(row["key"]).values()]
            state.clear_one(row["key"])
            state.put_one((row["key"],), f"{row['id']}{row['path']}", row=json.dumps(row))
        return out

    def rest(self) -> Rows:
        state = self.context.map_state("latest")
        return [json.loads(row["row"]) for row in state.rows().to_pylist()]


class Recent(Watched):
    """Holds up to three records of each key in a list, and lets all out when the fourth comes; a
    function of a key.
    """

    holds = (ListState("recent", KEY, VALUES),)

    def begin(self) -> None:
        self.per_key = ApplyPerKey("key", self.of_key, state=self.holds[0], output=RECORD)
        self.per_key.open(self.context)

    def take(self, rows: Rows, input: int) -> Rows:
        return [row for batch in self.per_key.process(batch_of(rows), input) for row in batch.to_pylist()]

    @staticmethod
    def of_key(key: int, rows: list[tuple[Any, ...]], held: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        for row in rows:
            number, _, *values = row
            if len(held) < 3:
                held.append((number, *values))
                continue
            yield from ((number, key, *values) for number, *values in held)
            held.clear()
            yield row

    def rest(self) -> Rows:
        rows = self.context.list_state("recent").rows().to_pylist()
        return [{name: row[name] for name in RECORD.names} for row in rows]


class Delay(Remembering):
    """Holds each record in a timer of processing time; emits what is left at the end."""

    holds = (*Remembering.holds, Timers("later", KEY, VALUES, clock="processing_time"))

    def take(self, rows: Rows, input: int) -> Rows:
        now_us = self.context.processing_time_us
        for row in rows:
            self.remember(row["key"])
            held = {name: value for name, value in row.items() if name != "key"}
            tag = f"{now_us} {row['id']}{row['path']}"
            self.context.timers("later").set_one((row["key"],), now_us + row["id"] % 5 * DELAY_US, tag, **held)
        return []

    def due(self, timers: Rows) -> Rows:
        now_us = self.context.processing_time_us
        for row in timers:
            set_us = int(row["_tag"].split()[0])
            if not set_us <= row["_timestamp"] <= now_us:
                self.witness._violated(self.uid, self.subtask, f"at {now_us}, set at {set_us}: {row}")
        return [{name: row[name] for name in RECORD.names} for row in timers]

    def rest(self) -> Rows:
        left = self.context.timers("later").due(2**63 - 1)
        return [] if left is None else [{name: row[name] for name in RECORD.names} for row in left.to_pylist()]


class Hold(Watched):
    """Holds two records of three back, in no key's name, until there are too many or the end
    comes.
    """

    holds = (SplitList("held", RECORD),)

    def begin(self) -> None:
        self.held: Rows = self.context.entries("held").rows().to_pylist()

    def take(self, rows: Rows, input: int) -> Rows:
        self.held += [row for row in rows if row["id"] % 3]
        out = [row for row in rows if not row["id"] % 3]
        while len(self.held) > 6:
            out.append(self.held.pop(0))
        return out

    def rest(self) -> Rows:
        return self.held

    def put_down(self) -> None:
        self.context.entries("held").replace(table_of(self.held, RECORD))


class Union(Hold):
    """The same in a union list: every subtask gets all of it and keeps its share."""

    holds = (UnionList("held", RECORD),)

    def begin(self) -> None:
        rows = self.context.entries("held").rows().to_pylist()
        self.held = [row for row in rows if row["id"] % self.context.parallelism == self.subtask]


class Join(Watched):
    """Keeps what its second input says for all; the first goes through with how much that was."""

    holds = (BroadcastState("table", TABLE_SCHEMA),)

    def take(self, rows: Rows, input: int) -> Rows:
        table = self.context.entries("table")
        if input == 1:
            known = table.rows().to_pylist()
            new = [{"id": row["id"], "path": row["path"]} for row in rows]
            table.replace(table_of([*known, *new], TABLE_SCHEMA))
            return []
        count = table.rows().num_rows
        return [{**row, "marks": f"{row['marks']}{self.uid}#{count};"} for row in rows]


class Ask(Watched):
    """Emits a record when the coordinator has answered, or at the end."""

    holds = (SplitList("waiting", RECORD),)

    def coordinator(self) -> OperatorCoordinator:
        return Answers(self.uid, self.witness, self.parallelism)

    def begin(self) -> None:
        self.waiting: Rows = self.context.entries("waiting").rows().to_pylist()

    def take(self, rows: Rows, input: int) -> Rows:
        for row in rows:
            self.waiting.append(row)
            self.context.send_to_coordinator(f"{row['id']}{row['path']}".encode())
        return []

    def told(self, message: bytes) -> Rows:
        name = message.decode()
        out = [row for row in self.waiting if f"{row['id']}{row['path']}" == name]
        self.waiting = [row for row in self.waiting if f"{row['id']}{row['path']}" != name]
        return out

    def rest(self) -> Rows:
        return self.waiting

    def put_down(self) -> None:
        self.context.entries("waiting").replace(table_of(self.waiting, RECORD))


class Answers(OperatorCoordinator):
    """Remembers every record that any subtask has named, and answers."""

    columns = {"name": pa.string()}  # noqa: RUF012 - the API's own

    def __init__(self, uid: str, witness: Witness, parallelism: int) -> None:
        self.uid, self.witness, self.parallelism = uid, witness, parallelism
        self.names: list[str] = []

    def open(self, send: Sender) -> None:
        self.send = send

    def restore(self, rows: pa.Table) -> None:
        self.names = rows["name"].to_pylist()

    def receive(self, subtask: int, message: bytes) -> None:
        self.witness.fault("coordinator_receive", self.uid)
        name = message.decode()
        if name in self.names:
            self.witness._violated(self.uid, subtask, f"the coordinator is told twice of {name}")
        self.names.append(name)
        if subtask < self.parallelism:
            self.send(subtask, message)

    def snapshot(self) -> pa.Table:
        self.witness.fault("coordinator_snapshot", self.uid)
        return pa.table({"name": pa.array(self.names, pa.string())})


class Recording(TwoPhaseCommitSink, Watched):
    """A sink whose committables carry the rows themselves; the ledger is what it writes to."""

    committable_columns = {"name": pa.string(), "content": pa.string()}  # noqa: RUF012 - the API's own

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema([])

    def begin(self) -> None:
        self.rows: Rows = []
        self.parts = 0

    def take(self, rows: Rows, input: int) -> Rows:
        self.rows += rows
        return []

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:
        self.witness.fault("prepare_commit", f"{self.uid}[{self.subtask}]")
        rows, self.rows = self.rows, []
        if not rows:
            return None
        self.parts += 1
        name = f"{self.witness.number}-{self.subtask}-{self.parts}"
        content = "\n".join(json.dumps(row, sort_keys=True) for row in rows)
        self.witness.ledger.prepare((self.uid, prepared.checkpoint_id, prepared.attempt_id, name))
        return pa.table({"name": [name], "content": [content]})

    def commit(self, permit: Any, committables: pa.Table) -> pa.Table | None:
        self.witness.fault("commit_before", self.uid)
        later = committables.slice(0, 1 if self.witness.put_off > 0 else 0)
        self.witness.put_off -= 1
        now = committables.slice(later.num_rows)
        self.witness.ledger.commit(self.uid, permit, now.to_pylist())
        self.witness.fault("commit_after", self.uid)
        return later if later.num_rows else None

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None) -> None:
        self.witness.ledger.clean(uid, newest_id, carried.to_pylist() if carried is not None else [])


class Splits(SplitEnumerator):
    """Assigns the splits of a source, each once."""

    columns = {"split": pa.int64()}  # noqa: RUF012 - the API's own

    def __init__(self, spec: SourceSpec, witness: Witness) -> None:
        self.spec, self.witness = spec, witness
        self.left = list(range(len(spec.splits)))

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        self.witness.fault("next_split", self.spec.uid)
        if not self.left:
            return NoSplit.NEVER
        split = self.left.pop(0)
        return Split(f"{self.spec.uid}/{split}", str(split).encode())

    def snapshot(self) -> pa.Table:
        self.witness.fault("enumerator_snapshot", self.spec.uid)
        return pa.table({"split": pa.array(self.left, pa.int64())})

    def restore(self, rows: pa.Table) -> None:
        self.left = rows["split"].to_pylist()


class Appearing(SplitEnumerator):
    """Splits that appear two at a time, as files in a directory. Assigned ones are in a log."""

    columns = {"split": pa.int64()}  # noqa: RUF012 - the API's own
    log_columns = {"split": pa.int64()}  # noqa: RUF012

    def __init__(self, spec: SourceSpec, witness: Witness) -> None:
        self.spec, self.witness = spec, witness
        self.dealt: set[int] = set()
        self.new: list[int] = []
        self.found: list[int] = []
        self.looks = 0

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        self.witness.fault("next_split", self.spec.uid)
        if not self.found:
            self.looks += 1
            to_come = [split for split in range(len(self.spec.splits)) if split not in self.dealt]
            if not to_come:
                return NoSplit.NEVER
            if self.looks % 2:
                return NoSplit.LATER
            self.found = to_come[:2]
        split = self.found.pop(0)
        self.dealt.add(split)
        self.new.append(split)
        return Split(f"{self.spec.uid}/{split}", str(split).encode())

    def snapshot(self) -> pa.Table:
        self.witness.fault("enumerator_snapshot", self.spec.uid)
        return pa.table({"split": pa.array(self.found, pa.int64())})

    def logged(self) -> pa.Table:
        new, self.new = self.new, []
        return pa.table({"split": pa.array(new, pa.int64())})

    def restore(self, rows: pa.Table) -> None:
        self.found = rows["split"].to_pylist()

    def restore_log(self, rows: pa.Table) -> None:
        self.dealt = {*rows["split"].to_pylist()}


class Reader(Source):
    """Reads records that depend only on their split and position."""

    def __init__(self, spec: SourceSpec, witness: Witness) -> None:
        self.spec, self.witness = spec, witness
        self.bounded = spec.bounded
        self.splits_per_reader = spec.together

    @property
    def schema(self) -> pa.Schema:
        return RECORD

    def enumerator(self) -> SplitEnumerator:
        return (Appearing if self.spec.grows else Splits)(self.spec, self.witness)

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        number = int(split.payload)
        length = self.spec.splits[number]
        position = split.position
        while position < length:
            self.witness.fault("read", f"{self.spec.uid}[{context.subtask}]")
            end = min(position + self.spec.chunk, length)
            rows = [{**self.spec.row(number, n)._asdict(), "marks": ""} for n in range(position, end)]
            position = end
            self.witness.read(split.id, position)
            yield Chunk(batch_of(rows), position)
        while not self.bounded:
            yield Chunk(None, position)


KINDS: dict[str, type[Watched]] = {
    "pass": Pass,
    "rekey": Pass,
    "even": Pass,
    "odd": Pass,
    "leave": Pass,
    "again": Pass,
    "merge": Merge,
    "count": Count,
    "window": Window,
    "latest": Latest,
    "recent": Recent,
    "delay": Delay,
    "hold": Hold,
    "union": Union,
    "ask": Ask,
    "join": Join,
    "sink": Recording,
}


def held_rows(kind: str, state: str, rows: Iterable[dict[str, Any]]) -> Rows:
    """The records that a state of an operator holds, from the rows that a checkpoint stores of
    it.
    """
    if (kind, state) == ("latest", "latest"):
        return [json.loads(row["row"]) for row in rows]
    if (kind, state) in {
        ("window", "window"),
        ("recent", "recent"),
        ("delay", "later"),
        ("hold", "held"),
        ("union", "held"),
        ("ask", "waiting"),
    }:
        return [{name: row[name] for name in RECORD.names} for row in rows]
    return []
