"""The oracle: what any checkpoint and the output up to it must hold, computed from the graph alone.

Theory of operation. A checkpoint is a cut. At a cut each record that a source has read is in
exactly one place for each path that it takes: in output that was prepared (in this checkpoint or
one before it), in a state that holds it, or on its way. From its place a record's remaining fate is
known (:meth:`Model.fate`), and so the fates of all records at all places, added up, must be the
fates of the records read: a record lost, repeated or gone astray shows at the first checkpoint
after it.

The model also checks counters and the counts written into records, windows and their timers,
broadcast copies, coordinators, who has finished, and how far each split was read. Nothing here uses
the runtime; checkpoints are read through ``stateformat``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stateformat.backends.dataflow.events import MAX_WATERMARK
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.graph import Partitioner, Status
from stateformat.model import CheckpointKind, Mode, Record, StopMode
from stateformat.reading import Checkpoint, StoreCheckpoint
from stateformat.validation import validate
from tests.simulation.graphs import Graph, Row, SourceSpec, passed_on
from tests.simulation.lives import KeyHistory, Said
from tests.simulation.witness import Facts, Violation
from tests.simulation.work import held_rows, window_end

Fate = tuple[str, int, str]
"""A sink, a record's id, and the path on which the record reached the sink."""
Stored = list[dict[str, Any]]


@dataclass
class Cut:
    """What one checkpoint says, as far as later ones depend on it."""

    record: Record
    output: dict[tuple[Any, ...], tuple[str, ...]]
    """All output prepared up to here."""
    positions: dict[tuple[str, int], int]
    """How far each split was read: records of (source, split) below it."""
    facts: Facts
    disturbed: frozenset[str]
    """Operators that partially finished at some time up to here: their subtasks share what
    remained.
    """
    in_flight: int = 0
    """Records on their way."""


class Model:
    """Computes the fates of records in one graph, and judges checkpoints."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds = {op.uid: op.kind for op in graph.ops}
        self._targets: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for op in graph.ops:
            for number, edge in enumerate(op.inputs):
                self._targets[edge.source].append((op.uid, number))
            if op.feedback:
                self._targets[op.feedback.source].append((op.uid, len(op.inputs)))
        self._in_order = self._ordered()
        self._fates: dict[tuple[Row, str], tuple[Fate, ...]] = {}
        self.key_at: dict[tuple[int, str], int] = {}
        """The key with which a record came to an operator, by id and path up to and with it."""
        self._read: dict[tuple[str, int, int], tuple[Fate, ...]] = {}

    def _ordered(self) -> frozenset[str]:
        """Operators to which the records of one split and key come in their order, on one path:
        nobody before them holds any back, and every edge keeps records of one key together.
        """
        ordered = {source.uid for source in self.graph.sources}
        found = set()
        for op in self.graph.ops:
            edges = [edge for edge in op.inputs if edge.partitioner is not Partitioner.BROADCAST]
            kept = all(edge.partitioner in (Partitioner.FORWARD, Partitioner.HASH) for edge in edges)
            if kept and op.feedback is None and all(edge.source in ordered for edge in edges):
                found.add(op.uid)
                if op.kind in ("pass", "rekey", "even", "odd", "count", "merge", "join"):
                    ordered.add(op.uid)
        return frozenset(found)

    def in_order(self, uid: str, counts: dict[tuple[int, str], int]) -> bool:
        """Whether the counts of a counter ascend along each split, key and path, where that is
        promised.
        """
        lanes: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
        if uid in self._in_order:
            for (number, path), value in counts.items():
                source, rest = divmod(number, 1_000_000)
                split, position = divmod(rest, 1_000)
                key = self.graph.sources[source].row(split, position).key
                lanes[number // 1_000, key, path].append((position, value))
        return all([n for _, n in sorted(lane)] == sorted(n for _, n in lane) for lane in lanes.values())

    # Fates ----------------------------------------------------------------------------------------

    def fate(self, row: Row, uid: str, number: int = 0) -> tuple[Fate, ...]:
        """Return where a record that has reached an operator ends up."""
        if self.kinds[uid] == "sink":
            return ((uid, row.id, row.path),)
        if self.kinds[uid] == "join" and number == 1:
            return ()
        known = self._fates.get((row, uid))
        if known is None:
            out = passed_on(self.kinds[uid], uid, row)
            found: list[Fate] = []
            if out is not None:
                self.key_at[out.id, out.path] = row.key
                for target, target_input in self._targets[uid]:
                    found += self.fate(out, target, target_input)
            known = self._fates[row, uid] = tuple(found)
        return known

    def fate_of_read(self, source: str, split: int, position: int) -> tuple[Fate, ...]:
        """Return where the record at a position of a split ends up."""
        place = (source, split, position)
        if place not in self._read:
            spec = next(item for item in self.graph.sources if item.uid == source)
            row = spec.row(split, position)
            found: list[Fate] = []
            for target, number in self._targets[source]:
                found += self.fate(row, target, number)
            self._read[place] = tuple(found)
        return self._read[place]

    def everything(self) -> dict[tuple[str, int], int]:
        """Return the positions at which all splits are read to their ends."""
        return {
            (source.uid, split): length for source in self.graph.sources for split, length in enumerate(source.splits)
        }

    def fates_of(self, positions: dict[tuple[str, int], int]) -> Counter[Fate]:
        """Return the fates of all records below positions."""
        found: Counter[Fate] = Counter()
        for (source, split), end in positions.items():
            for position in range(end):
                found.update(self.fate_of_read(source, split, position))
        return found

    def facts_at(self, facts: Facts, placed: dict[str, int]) -> Facts:
        """The same, for a run at this parallelism."""
        moved = {uid for uid, parallelism in placed.items() if facts.settled.get(uid) != parallelism}
        moved -= facts.fully_finished
        for op in self.graph.ops:
            if any(edge.source in moved and not edge.partitioner.all_to_all for edge in op.inputs):
                moved.add(op.uid)
        return replace(facts, steady=frozenset(placed) - moved - facts.fully_finished)

    # Output ---------------------------------------------------------------------------------------

    def check_output(
        self, output: dict[tuple[Any, ...], tuple[str, ...]], positions: dict[tuple[str, int], int]
    ) -> None:
        """Check that the output is that of all records below positions, each exactly once."""
        self._same("the output", Counter(place for place, _ in outputs(output)), self.fates_of(positions))

    def drained(self, found: Iterable[Fate], least: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """Return how far each split was read, judging by the fates found: drained sources may end
        anywhere.
        """
        furthest = dict(least)
        for _, number, _ in found:
            source, rest = divmod(number, 1_000_000)
            split, position = divmod(rest, 1_000)
            place = (self.graph.sources[source].uid, split)
            furthest[place] = max(furthest.get(place, 0), position + 1)
        return furthest

    # Checkpoints ----------------------------------------------------------------------------------

    def judge(self, storage: MemoryStorage, record: Record, parent: Cut | None, *, full: bool = True) -> Cut:
        """Read a checkpoint and check it; raise :class:`Violation` if anything in it is wrong.
        ``full``: validate it too.
        """
        if full:
            check_valid(storage, record.checkpoint_id)
        reading = _Reading(self, StoreCheckpoint(storage, record), parent)
        reading.statuses()
        cut = reading.cut()
        drained = record.stop is not None and record.stop.mode is StopMode.DRAIN
        if record.kind is CheckpointKind.CHECKPOINT or record.kind is CheckpointKind.SAVEPOINT:
            places = Counter(reading.fates())
            places.update(place for place, _ in outputs(cut.output))
            if drained:
                cut.positions = self.drained(places, cut.positions)
            self._same(f"checkpoint {record.checkpoint_id}", places, self.fates_of(cut.positions))
            reading.counters(cut)
            reading.windows()
            reading.copies(cut)
            reading.coordinators(cut)
        return cut

    def _same(self, what: str, found: Counter[Fate], expected: Counter[Fate]) -> None:
        if found != expected:
            raise Violation(
                f"{what}: {sum((expected - found).values())} are missing: {sorted((expected - found).elements())[:4]}; "
                f"{sum((found - expected).values())} too many: {sorted((found - expected).elements())[:4]}"
            )


def check_valid(storage: MemoryStorage, checkpoint_id: int | None = None) -> None:
    """Check that a checkpoint, by default the newest, has no problems."""
    report = validate(storage, checkpoint_id, level="full")
    # A process that died before it withdrew a stray may leave it behind.
    found = [str(problem) for problem in report.problems if problem.severity == "error" or problem.clause != "SPEC 8.1"]
    if found:
        raise Violation(f"checkpoint {report.checkpoint_id} of {report.url}: {found}")


def outputs(output: dict[tuple[Any, ...], tuple[str, ...]]) -> Iterator[tuple[Fate, dict[str, Any]]]:
    """Yield the rows of prepared output, each with its fate."""
    for key, lines in output.items():
        for line in lines:
            row = json.loads(line)
            yield (key[0], row["id"], row["path"]), row


def _values(row: dict[str, Any], columns: Iterable[str]) -> str:
    """Return the values of some columns of a row, as a text that tells values apart."""
    return repr([row[name] for name in columns])


class _Reading:
    """One checkpoint being read."""

    def __init__(self, model: Model, checkpoint: Checkpoint, parent: Cut | None) -> None:
        self.model, self.checkpoint, self.parent = model, checkpoint, parent
        self.record = checkpoint.record
        self.graph = self.record.graph
        self._states: dict[tuple[str, str], list[tuple[int | None, Stored]]] = defaultdict(list)
        columns = ["operator", "state", "subtask", "layer", "row_start", "rows", "path", "inline"]
        layers: dict[tuple[str, str, int | None], list[tuple[int, Stored]]] = defaultdict(list)
        for handle in checkpoint.manifest.full().select(columns).to_pylist():
            if handle["rows"]:
                place = (handle["operator"], handle["state"], handle["subtask"])
                layers[place].append((handle["layer"], self._read(handle)))
        for (operator, state, subtask), stored in layers.items():
            self._states[operator, state].append((subtask, self._merged(operator, state, stored)))

    def _merged(self, operator: str, state: str, layers: list[tuple[int, Stored]]) -> Stored:
        """Merge layers, row by row (SPEC.md section 5.4)."""
        if not any(number for number, _ in layers):
            return [row for _, rows in layers for row in rows]
        declared = self.record.by_state[operator, state]
        found: dict[str, dict[str, Any]] = {}
        for _, rows in sorted(layers, key=itemgetter(0)):
            cleared = [_values(row, declared.key_columns) for row in rows if row.get("_op") == 2]
            found = {key: row for key, row in found.items() if _values(row, declared.key_columns) not in cleared}
            for row in rows:
                if row.get("_op", 0) == 0:
                    found[_values(row, declared.row_key)] = row
                elif row["_op"] == 1:
                    found.pop(_values(row, declared.row_key), None)
        return [*found.values()]

    def _read(self, handle: dict[str, Any]) -> Stored:
        """Return the rows of a handle, read by Arrow alone."""
        data = handle["inline"] or self.checkpoint.storage.read(handle["path"])
        found: Stored = (
            pq.ParquetFile(pa.BufferReader(data)).read().slice(handle["row_start"], handle["rows"]).to_pylist()
        )
        return found

    def rows(self, operator: str, state: str) -> Stored:
        """Return everything that is stored of a state, subtask by subtask."""
        return [row for _, rows in self._states[operator, state] for row in rows]

    def fail(self, what: str) -> None:
        raise Violation(f"checkpoint {self.record.checkpoint_id}: {what}")

    # The cut --------------------------------------------------------------------------------------

    def cut(self) -> Cut:
        """Return what later checkpoints depend on."""
        disturbed = {op.uid for op in self.graph.operators if op.status is Status.PARTIALLY_FINISHED}
        if self.parent is not None:
            disturbed |= self.parent.disturbed
        in_flight = sum(
            len(self.rows(state.operator, state.name)) for state in self.record.states if state.mode is Mode.IN_FLIGHT
        )
        return Cut(self.record, self._output(), self._positions(), self._facts(), frozenset(disturbed), in_flight)

    def _output(self) -> dict[tuple[Any, ...], tuple[str, ...]]:
        output = dict(self.parent.output) if self.parent else {}
        for state in self.record.states:
            if state.mode is Mode.COMMITTABLES:
                for row in self.rows(state.operator, state.name):
                    key = (str(state.operator), row["_checkpoint_id"], row["_attempt_id"], row["name"])
                    content = tuple(row["content"].splitlines())
                    if output.setdefault(key, content) != content:
                        self.fail(f"committable {key} was another before")
        return output

    def _positions(self) -> dict[tuple[str, int], int]:
        """Splits that a reader holds, that are still to be dealt, and the others, which were read
        to their ends.
        """
        found = {}
        drained = self.record.stop is not None and self.record.stop.mode is StopMode.DRAIN
        for source in self.model.graph.sources:
            operator = self.graph.by_uid[source.uid]  # type: ignore[index]
            least = self.parent.positions if self.parent else {}
            for split, length in enumerate(source.splits):
                before = least.get((source.uid, split), 0)
                found[source.uid, split] = before if drained else length
            if operator.status is Status.FULLY_FINISHED:
                continue
            held = [(row["split_id"], row["position"]) for row in self.rows(source.uid, "splits")]
            left = [(f"{source.uid}/{split}", 0) for split in self._left(source)]
            seen = Counter(name for name, _ in held + left)
            if any(count > 1 for count in seen.values()):
                self.fail(f"a split of {source.uid} stands twice: held {held}, left {left}")
            for name, position in held + left:
                split = int(name.split("/")[1])
                found[source.uid, split] = position
                if position < least.get((source.uid, split), 0):
                    self.fail(f"split {name} goes back to {position} from {least[source.uid, split]}")
            if not source.bounded and not drained and len(seen) != len(source.splits):
                self.fail(f"splits of the unbounded {source.uid} are gone: held {held}, left {left}")
        return found

    def _left(self, source: SourceSpec) -> list[int]:
        """Return the splits that no reader has been assigned."""
        kept = [row["split"] for row in self._coordinator(source.uid) if row["split"] is not None]
        if not source.grows:
            return kept
        dealt = Counter(row["split"] for row in self.rows(source.uid, "enumerator_log"))
        if max(dealt.values(), default=0) > 1 or any(split in dealt for split in kept):
            self.fail(f"the log of {source.uid} has {dict(dealt)}, and {kept} are left")
        return [split for split in range(len(source.splits)) if split not in dealt]

    def _coordinator(self, uid: str) -> Stored:
        for state in self.record.states:
            if state.operator == uid and state.mode is Mode.COORDINATOR:
                return self.rows(uid, state.name)
        return []

    def _facts(self) -> Facts:
        settled: dict[str, int] = {}
        life: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
        everywhere: dict[str, frozenset[str]] = {}
        for operator in self.graph.operators:
            if self.record.rescaled_from is None and operator.status is Status.RUNNING:
                settled[operator.uid] = operator.parallelism
            if (operator.uid, "life") not in self.record.by_state or operator.status is Status.FULLY_FINISHED:
                continue
            done = operator.done
            ended: dict[int, set[str]] = {n: set() for n in range(operator.parallelism) if n not in done}
            for row in self.rows(operator.uid, "life"):
                life[operator.uid, row["subtask"]][row["what"]] = row["value"]
                if row["what"].startswith("end_input"):
                    ended.setdefault(row["subtask"], set()).add(row["what"])
            everywhere[operator.uid] = frozenset(set.intersection(*ended.values()))
        if self.record.rescaled_from is not None and self.parent is not None:
            everywhere = dict(self.parent.facts.ended_everywhere)
        fully = frozenset(str(op.uid) for op in self.graph.operators if op.status is Status.FULLY_FINISHED)
        return Facts(fully, settled, frozenset(), life, everywhere)

    # What must hold -------------------------------------------------------------------------------

    def statuses(self) -> None:
        """Check that finished stays finished, and that union state is never partially finished."""
        if self.parent is not None and self.record.kind is not CheckpointKind.ROLLBACK:
            lost = self.parent.facts.fully_finished - {
                op.uid for op in self.graph.operators if op.status is Status.FULLY_FINISHED
            }
            if lost:
                self.fail(f"{sorted(lost)} had fully finished and have not any more")
        for state in self.record.states:
            partly = self.graph.operator(state.operator).status is Status.PARTIALLY_FINISHED
            if state.mode is Mode.UNION and partly:
                self.fail(f"{state.operator} has union state and is partially finished")

    def fates(self) -> Iterator[Fate]:
        """Of all records that a state holds or that are on their way."""
        for state in self.record.states:
            uid = str(state.operator)
            if state.mode is Mode.IN_FLIGHT:
                edge = next(edge for edge in self.graph.edges if edge.id == state.edge)
                for row in self.rows(uid, state.name):
                    yield from self.model.fate(_row(row), str(edge.target), edge.input)
            elif uid in self.model.kinds:
                for row in held_rows(self.model.kinds[uid], state.name, self.rows(uid, state.name)):
                    yield from self.model.fate(_row(row), uid)

    def everywhere(self, cut: Cut) -> Iterator[dict[str, Any]]:
        """All records at all places, whole."""
        for _, row in outputs(cut.output):
            yield row
        for state in self.record.states:
            uid = str(state.operator)
            if state.mode is Mode.IN_FLIGHT:
                yield from self.rows(uid, state.name)
            elif uid in self.model.kinds:
                yield from held_rows(self.model.kinds[uid], state.name, self.rows(uid, state.name))

    def counters(self, cut: Cut) -> None:
        """Each counter says how many records have passed it, and no two records have the same count
        of a key.
        """
        counts: dict[str, dict[tuple[int, str], int]] = defaultdict(dict)
        said: dict[tuple[int, str], Said] = {}
        for row in self.everywhere(cut):
            marks = [mark.split("#") for mark in row["marks"].split(";") if mark]
            path = ""
            for uid in row["path"].split(".")[1:]:
                path += f".{uid}"
                if self.model.kinds.get(uid) != "count":
                    continue
                n = next(number for number, mark in enumerate(marks) if mark[0] == uid)
                _, text, rest = marks.pop(n)
                value = int(text)
                said[row["id"], path] = Said.of(rest)
                if counts[uid].setdefault((row["id"], path), value) != value:
                    self.fail(f"record {row['id']} was counted twice by {uid}, as {value} and as another")
        for uid, kind in self.model.kinds.items():
            if kind == "count":
                self._counter(uid, counts[uid], cut)
                self._lives(uid, counts[uid], said, cut)

    def _lives(self, uid: str, counts: dict[tuple[int, str], int], said: dict[tuple[int, str], Said], cut: Cut) -> None:
        """Check that what a counter remembers for a limited time lives that long and no longer."""
        histories: dict[int, KeyHistory] = defaultdict(KeyHistory)
        for n, place in sorted((n, place) for place, n in counts.items()):
            key = self.model.key_at[place]
            wrong = histories[key].take(n, said[place])
            if wrong:
                self.fail(f"{uid}, key {key}: {wrong}")
        if self.graph.by_uid[uid].status is Status.FULLY_FINISHED or uid in cut.disturbed:  # type: ignore[index]
            return
        stored = {row["key"]: row for row in self.rows(uid, "lately")}
        times = [row["value"] for row in self.rows(uid, "life") if row["what"] == "watermark"]
        for key, history in histories.items():
            wrong = history.check_stored(stored.get(key), max(times, default=MAX_WATERMARK))
            if wrong:
                self.fail(f"{uid}, key {key}, stored: {wrong}")

    def _counter(self, uid: str, counts: dict[tuple[int, str], int], cut: Cut) -> None:
        by_key: dict[int, list[int]] = defaultdict(list)
        for (number, path), value in counts.items():
            by_key[self.model.key_at[number, path]].append(value)
        for key, values in by_key.items():
            if sorted(values) != list(range(1, len(values) + 1)):
                self.fail(f"{uid} has counted key {key} as {sorted(values)}")
        if not self.model.in_order(uid, counts):
            self.fail(f"{uid} has counted records of one split and key out of order: {sorted(counts.items())}")
        operator = self.graph.by_uid[uid]  # type: ignore[index]
        if operator.status is Status.FULLY_FINISHED:
            return
        stored = {row["key"]: row["n"] for row in self.rows(uid, "count")}
        expected = {key: len(values) for key, values in by_key.items()}
        if uid in cut.disturbed:
            expected = {key: count for key, count in expected.items() if key in stored}
        if stored != expected:
            self.fail(f"counter {uid} says {stored}, and {expected} have passed")

    def windows(self) -> None:
        """Check that every held record has a timer, and every timer a record."""
        for uid, kind in self.model.kinds.items():
            if kind == "window" and self.graph.by_uid[uid].status is not Status.FULLY_FINISHED:  # type: ignore[index]
                held = {(row["key"], window_end(row["ts"])) for row in self.rows(uid, "window")}
                timers = {(row["key"], row["_timestamp"]) for row in self.rows(uid, "over")}
                if held != timers:
                    self.fail(f"{uid} holds windows {sorted(held)} and timers {sorted(timers)}")

    def copies(self, cut: Cut) -> None:
        """Check that all copies of a broadcast state are equal: all its source has sent, once."""
        for op in self.model.graph.ops:
            operator = self.graph.by_uid[op.uid]  # type: ignore[index]
            if op.kind != "join" or operator.status is Status.FULLY_FINISHED:
                continue
            source = next(item for item in self.model.graph.sources if item.uid == op.inputs[1].source)
            expected = sorted(
                source.row(split, position).id
                for split in range(len(source.splits))
                for position in range(cut.positions[source.uid, split])
            )
            done = operator.done
            for subtask in range(operator.parallelism):
                if subtask not in done:
                    copy = [
                        row["id"] for owner, rows in self._states[op.uid, "table"] if owner == subtask for row in rows
                    ]
                    if sorted(copy) != expected:
                        self.fail(f"copy {subtask} of {op.uid} has {sorted(copy)}, and {expected} were sent")

    def coordinators(self, cut: Cut) -> None:
        """Check that a coordinator knows every record that has reached its operator, or will be
        told again; each once.
        """
        arrived: dict[str, set[str]] = defaultdict(set)
        for row in self.everywhere(cut):
            path = ""
            for uid in row["path"].split(".")[1:]:
                if self.model.kinds.get(uid) == "ask":
                    arrived[uid].add(f"{row['id']}{path}")
                path += f".{uid}"
        for uid, kind in self.model.kinds.items():
            if kind != "ask" or self.graph.by_uid[uid].status is Status.FULLY_FINISHED:  # type: ignore[index]
                continue
            arrived[uid] |= {
                f"{row['id']}{row['path']}" for row in held_rows("ask", "waiting", self.rows(uid, "waiting"))
            }
            rows = self._coordinator(uid)
            known = [row["name"] for row in rows if row["message"] is None]
            told = [row["message"].decode() for row in rows if row["message"] is not None]
            if Counter(known + told) != Counter(arrived[uid]):
                missing, surplus = arrived[uid] - {*known, *told}, Counter(known + told) - Counter(arrived[uid])
                self.fail(
                    f"the coordinator of {uid} lacks {sorted(missing)[:4]} and has {sorted(surplus)[:4]} too many"
                )


def _row(row: dict[str, Any]) -> Row:
    return Row(row["id"], row["key"], row["ts"], row["hops"], row["path"])
