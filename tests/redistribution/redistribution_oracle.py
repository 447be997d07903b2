"""Who gets which row, by the words of docs/redistribution.md, one row at a time.

Written apart from the package: no arrays, no cumulative sums, no cutting; every row is handed out
like a card. Slow on purpose. It reads the parts of a ``redistribution_cases.FakeCheckpoint`` and
nothing of the manifest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import ceil
from typing import Any

from stateformat.graph import Partitioner, Status
from stateformat.model import Mode, State
from tests.redistribution.redistribution_cases import Delivered, FakeCheckpoint, Part

Deal = dict[int, list[Any]]


def expected(
    source: FakeCheckpoint, parallelism: Mapping[str, int], *, progress_stays: Callable[[str], bool]
) -> Delivered:
    """What every new subtask of every operator gets, without the states of which it gets nothing.

    ``parallelism`` is the new one by uid; an operator that is not in it is not in the topology.
    ``progress_stays`` says of which operators each subtask keeps its own progress.
    """
    graph = source.record.graph
    found: Delivered = {}
    starts: dict[tuple[str, Mode], int] = defaultdict(int)
    held: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for part in source.parts:
        held[part.operator, part.state].append(part)
    for state in sorted(source.record.states, key=lambda item: (item.operator.encode(), item.name.encode())):
        operator = graph.by_uid[state.operator]
        if operator.uid not in parallelism:
            continue
        parts = held[state.operator, state.name]
        if state.mode is Mode.COMMITTABLES or (
            state.mode is Mode.COORDINATOR and operator.status is not Status.FULLY_FINISHED
        ):
            rows = [row for part in parts for row in part.rows]
            if rows:
                found[state.operator, state.name, None] = rows
        if state.mode in (Mode.COMMITTABLES, Mode.COORDINATOR) or operator.status is Status.FULLY_FINISHED:
            continue
        new = parallelism[operator.uid]
        same = new == operator.parallelism and operator.status is Status.RUNNING
        shared = (operator.uid, state.mode)
        if state.mode is Mode.KEYED:
            dealt = by_group(parts, new, operator.max_parallelism or 0)
        elif state.mode is Mode.EVEN_SPLIT:
            if same:
                dealt = own(parts)
            else:
                dealt, starts[shared] = cards([row for part in parts for row in part.rows], new, starts[shared])
        elif state.mode is Mode.UNION:
            dealt = everything(parts, new)
        elif state.mode is Mode.BROADCAST:
            dealt = copies(parts, new)
        elif state.mode is Mode.PROGRESS:
            dealt = own(parts) if progress_stays(operator.uid) else everything(parts, new)
        else:
            dealt, starts[shared] = in_flight(source, state, parts, new, same=same, start=starts[shared])
        for subtask, rows in dealt.items():
            if rows:
                found[state.operator, state.name, subtask] = rows
    return found


def own(parts: list[Part]) -> Deal:
    dealt: Deal = defaultdict(list)
    for part in parts:
        dealt[part.subtask].extend(part.rows)
    return dealt


def everything(parts: list[Part], new: int) -> Deal:
    return {subtask: [row for part in parts for row in part.rows] for subtask in range(new)}


def owner_of(group: int, new: int, max_parallelism: int) -> int:
    owners = [
        subtask
        for subtask in range(new)
        if group
        in range(ceil(Fraction(subtask * max_parallelism, new)), ceil(Fraction((subtask + 1) * max_parallelism, new)))
    ]
    assert len(owners) == 1
    return owners[0]


def by_group(parts: list[Part], new: int, max_parallelism: int) -> Deal:
    dealt: Deal = defaultdict(list)
    for part in sorted(parts, key=lambda item: item.layer):
        for group, row in part.rows:
            dealt[owner_of(group, new, max_parallelism)].append((group, row))
    return dealt


def cards(rows: list[Any], new: int, start: int) -> tuple[Deal, int]:
    """Hands of cards: dealing round the table says how many each gets, then each takes that many
    from the top.
    """
    hands = [0] * new
    for number in range(len(rows)):
        hands[(start + number) % new] += 1
    dealt: Deal = {}
    rest = list(rows)
    for turn in range(new):
        player = (start + turn) % new
        dealt[player], rest = rest[: hands[player]], rest[hands[player] :]
    assert not rest
    return dealt, (start + len(rows)) % new


def copies(parts: list[Part], new: int) -> Deal:
    held = own(parts)
    running = sorted(held)
    return {
        subtask: held[subtask] if subtask in held else held[running[subtask % len(running)]] for subtask in range(new)
    }


def in_flight(
    source: FakeCheckpoint, state: State, parts: list[Part], new: int, *, same: bool, start: int
) -> tuple[Deal, int]:
    edge = source.record.graph.by_edge[state.edge or ""]
    if edge.partitioner is Partitioner.HASH:
        ceiling = source.record.graph.by_uid[state.operator].max_parallelism
        return by_group(parts, new, ceiling or 0), start
    if same or edge.partitioner is Partitioner.BROADCAST:
        return own(parts), start
    dealt: Deal = defaultdict(list)
    for part in parts:
        for sender in sorted({sender for sender, _ in part.rows}):
            channel = [row for row in part.rows if row[0] == sender]
            hands, start = cards(channel, new, start)
            for player, hand in hands.items():
                dealt[player].extend(hand)
    return dealt, start
