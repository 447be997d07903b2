"""Random dataflows, as data: what a seed runs, and what the model computes with.

A :class:`Graph` knows nothing of the runtime. Every operator lets each record out exactly once, at
once or later, under a path that it has added its uid to; the pairs ``even``/``odd`` and
``again``/``leave`` let each of them take one half. So whatever happens in a run, a record's fate is
a function of the graph: :mod:`tests.simulation.model` computes it, and nothing may differ.

Operators in one *group* have one parallelism, since records are forwarded between them; the groups'
change from run to run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from stateformat.graph import Partitioner

KEYS = 7
"""How many keys there are."""
GROUPS_MAX = 8
"""Max parallelism of every operator: few key groups, so that several keys share one and all move.
"""
WINDOW_US = 50
KEYED_KINDS = frozenset({"count", "window", "latest", "recent"})
"""Kinds of operators that keep keyed state: behind hash edges only."""
PLAIN_KINDS = ("pass", "rekey", "hold", "union", "union", "ask", "ask", "merge", "join", "join", "join")


class Row(NamedTuple):
    """A record, as far as its fate depends on it. ``path``: the uids that have let it out, each
    behind a dot.
    """

    id: int
    key: int
    ts: int
    hops: int
    path: str


@dataclass(frozen=True)
class SourceSpec:
    """A source; ``splits``: how many records each has. ``together``: how many splits a reader
    holds, None for all given.
    """

    uid: str
    number: int
    splits: tuple[int, ...]
    bounded: bool
    together: int | None
    chunk: int
    timed: bool
    disorder_us: int
    group: int

    @property
    def grows(self) -> bool:
        """Whether its splits appear one after the other, as files in a directory. Not drawn, so
        that other seeds stay as they are.
        """
        return len(self.splits) % 2 == 0

    def row(self, split: int, position: int) -> Row:
        """Return the record at a position of a split: always the same one."""
        number = self.number * 1_000_000 + split * 1_000 + position
        mixed = (number * 2_654_435_761) >> 7
        late = (mixed % 5 == 0) * 70
        return Row(number, mixed % KEYS, max(position * 12 + split * 31 - late, 0), mixed % 4, f".{self.uid}")


@dataclass(frozen=True)
class EdgeSpec:
    """An input of an operator."""

    source: str
    partitioner: Partitioner


@dataclass(frozen=True)
class OpSpec:
    """An operator or sink. ``feedback``: its last input is a loop that this uid closes."""

    uid: str
    kind: str
    inputs: tuple[EdgeSpec, ...]
    chain: bool
    group: int
    feedback: EdgeSpec | None = None


@dataclass(frozen=True)
class Graph:
    """Sources and operators, in topological order apart from feedback."""

    sources: tuple[SourceSpec, ...]
    ops: tuple[OpSpec, ...]

    @property
    def groups(self) -> int:
        """How many groups of one parallelism there are."""
        return 1 + max(step.group for step in (*self.sources, *self.ops))

    @property
    def bounded(self) -> bool:
        """Whether a job ends by itself."""
        return all(source.bounded for source in self.sources)

    def op(self, uid: str) -> OpSpec:
        """An operator by uid."""
        return next(op for op in self.ops if op.uid == uid)

    def describe(self) -> str:
        """Return a description for the story of a failure."""
        lines = [
            f"{source.uid}: splits {source.splits}{'' if source.bounded else ', unbounded'}, group {source.group}"
            for source in self.sources
        ]
        for op in self.ops:
            inputs = ", ".join(f"{edge.source} by {edge.partitioner}" for edge in op.inputs)
            loop = f", loop from {op.feedback.source} by {op.feedback.partitioner}" if op.feedback else ""
            lines.append(f"{op.uid}: {op.kind} of {inputs}{loop}, group {op.group}{'' if op.chain else ', unchained'}")
        return "\n".join(lines)


def passed_on(kind: str, uid: str, row: Row) -> Row | None:
    """Return what an operator of a kind emits for a record, now or later; None if it takes the
    other half.
    """
    key, hops = row.key, row.hops
    if kind == "rekey":
        key = (key * 3 + 1) % KEYS
    elif kind in ("even", "odd"):
        if (row.id % 2 == 0) is not (kind == "even"):
            return None
    elif kind == "again":
        if hops == 0:
            return None
        hops, key = hops - 1, (key + 1) % KEYS
    elif kind == "leave" and hops != 0:
        return None
    return row._replace(key=key, hops=hops, path=f"{row.path}.{uid}")


class _Drawing:
    """A graph that is being drawn."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sources: list[SourceSpec] = []
        self.ops: list[OpSpec] = []
        self.open: list[tuple[str, int]] = []
        """Streams that may be consumed, with their groups."""
        self.consumed: set[str] = set()
        self.groups = 0

    def new_group(self) -> int:
        self.groups += 1
        return self.groups - 1

    def source(self, *, bounded: bool) -> SourceSpec:
        rng = self.rng
        spec = SourceSpec(
            uid=f"s{len(self.sources)}",
            number=len(self.sources),
            splits=tuple(rng.randrange(0, 10) for _ in range(rng.randint(1, 4))),
            bounded=bounded,
            together=rng.choice((1, 1, 2, None)),
            chunk=rng.randint(1, 3),
            timed=rng.random() < 0.8,
            disorder_us=rng.choice((0, 20, 80)),
            group=self.new_group(),
        )
        self.sources.append(spec)
        return spec

    def edge(self, *, keyed: bool, near: bool = False) -> tuple[EdgeSpec, int | None]:
        """An edge from a stream that is there, and its group where it is forwarded. ``near``: point
        to point.
        """
        unused = [stream for stream in self.open if stream[0] not in self.consumed]
        uid, group = self.rng.choice(unused if unused and self.rng.random() < 0.8 else self.open)
        self.consumed.add(uid)
        if keyed:
            return EdgeSpec(uid, Partitioner.HASH), None
        choices = (
            Partitioner.FORWARD,
            Partitioner.FORWARD,
            Partitioner.RESCALE,
            Partitioner.REBALANCE,
            Partitioner.HASH,
        )
        partitioner = self.rng.choice(choices[: 3 if near else 5])
        return EdgeSpec(uid, partitioner), group if partitioner is Partitioner.FORWARD else None

    def add(self, kind: str, inputs: tuple[EdgeSpec, ...], group: int | None, feedback: EdgeSpec | None = None) -> str:
        if kind == "recent" and len(self.ops) % 2:
            kind = "delay"  # Not drawn, so other seeds stay as they are.
        uid = f"{kind}{len(self.ops)}"
        group = self.new_group() if group is None else group
        self.ops.append(OpSpec(uid, kind, inputs, self.rng.random() < 0.75, group, feedback))
        self.open.append((uid, group))
        return uid

    def step(self) -> None:
        """Add one operator, a pair of halves, or a loop."""
        rng = self.rng
        dice = rng.random()
        if dice < 0.38:
            edge, group = self.edge(keyed=True)
            self.add(rng.choice(sorted(KEYED_KINDS)), (edge,), group)
        elif dice < 0.45:
            self.halves("even", "odd")
        elif dice < 0.58:
            self.loop()
        else:
            self.plain(rng.choice(PLAIN_KINDS))

    def plain(self, kind: str) -> None:
        # Only point to point do some subtasks end before others at one cut, which is what union
        # state cannot bear.
        edge, group = self.edge(keyed=False, near=kind == "union")
        inputs = [edge]
        if kind == "merge":
            for _ in range(self.rng.randint(1, 2)):
                other, other_group = self.edge(keyed=False)
                if any(edge.source == other.source for edge in inputs):
                    continue  # Two copies of a record on one path could not be told apart.
                if other_group is not None and group is not None and other_group != group:
                    other = replace(other, partitioner=Partitioner.REBALANCE)
                elif other_group is not None:
                    group = other_group
                inputs.append(other)
        elif kind == "join":
            # The model knows what every copy holds, since a source is read from its begin.
            side = (
                self.source(bounded=self.rng.random() < 0.8)
                if self.rng.random() < 0.7
                else self.rng.choice(self.sources)
            )
            inputs.append(EdgeSpec(side.uid, Partitioner.BROADCAST))
        self.add(kind, tuple(inputs), group)

    def halves(self, *kinds: str) -> None:
        """Add two operators, each of which takes what the other does not."""
        edge, group = self.edge(keyed=False)
        for kind in kinds:
            self.add(kind, (edge,), group)

    def loop(self) -> None:
        """Add a loop head, and after it the operators for what goes around and what leaves."""
        rng = self.rng
        keyed = rng.random() < 0.6
        edge, group = self.edge(keyed=keyed)
        head = self.add("count" if keyed else "merge", (edge,), group)
        self.consumed.add(head)
        place = len(self.ops) - 1
        group = self.ops[place].group
        inner = rng.choice((Partitioner.FORWARD, Partitioner.FORWARD, Partitioner.REBALANCE, Partitioner.HASH))
        kept = group if inner is Partitioner.FORWARD else None
        tail = self.add("again", (EdgeSpec(head, inner),), kept)
        self.consumed.add(tail)
        self.open.remove((tail, self.ops[-1].group))
        back = Partitioner.HASH if keyed else rng.choice((Partitioner.REBALANCE, Partitioner.HASH))
        self.ops[place] = replace(self.ops[place], feedback=EdgeSpec(tail, back))
        self.add("leave", (EdgeSpec(head, inner),), kept)
        self.open.remove((head, group))


def draw(rng: random.Random) -> Graph:
    """A random graph."""
    drawing = _Drawing(rng)
    bounded = rng.random() < 0.7
    for _ in range(rng.choice((1, 1, 2, 2, 2, 3))):
        source = drawing.source(bounded=bounded or rng.random() < 0.5)
        drawing.open.append((source.uid, source.group))
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 3, 4))):
        drawing.step()
    for uid, group in list(drawing.open):
        if uid not in drawing.consumed or rng.random() < 0.1:
            partitioner = rng.choice(
                (Partitioner.FORWARD, Partitioner.FORWARD, Partitioner.REBALANCE, Partitioner.HASH)
            )
            drawing.add("sink", (EdgeSpec(uid, partitioner),), group if partitioner is Partitioner.FORWARD else None)
    return Graph(tuple(drawing.sources), tuple(drawing.ops))
