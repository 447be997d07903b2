"""Watches a run from inside: every hook of every operator reports here before it does anything.

A :class:`Witness` belongs to one run. It knows the facts of the checkpoint that the run goes on
from (:class:`Facts`). It stops the whole simulation with a :class:`Violation` when a hook is called
that must not be: an operator is opened though fully finished, a record comes after ``finish``, an
input ends twice in a published history, time goes back. It also lets hooks fail, each once, at the
call that the seed has drawn.

The :class:`Ledger` outlives runs: what sinks have made visible, checked against what was published.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIN_WATERMARK = -(2**63)

HOOKS = (
    "open",
    "process",
    "process",
    "on_timer",
    "receive",
    "end_input",
    "finish",
    "snapshot",
    "prepare_commit",
    "commit_before",
    "commit_after",
    "checkpoint_complete",
    "close",
    "next_split",
    "enumerator_snapshot",
    "read",
    "coordinator_receive",
    "coordinator_snapshot",
)
"""Where user code can fail."""


class Violation(BaseException):
    """The product has done what it must not. No handler of the product catches it."""


class UserError(RuntimeError):
    """User code fails, because the seed says so."""


@dataclass(frozen=True)
class Facts:
    """What is known of the checkpoint that a run goes on from.

    ``settled``: operators none of whose subtasks had ended, with their parallelism; at that they
    keep their entries. ``steady``: those of them that hear nobody point to point who is not
    settled; only these keep their place in time, since what a producer begins anew may send what
    another had sent. ``life``: what has happened to each subtask, from its own state.
    ``ended_everywhere``: the inputs that had ended for all subtasks.
    """

    fully_finished: frozenset[str] = frozenset()
    settled: Mapping[str, int] = field(default_factory=dict)
    steady: frozenset[str] = frozenset()
    life: Mapping[tuple[str, int], Mapping[str, int]] = field(default_factory=dict)
    ended_everywhere: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass
class Seen:
    """One activation."""

    past: frozenset[str]
    """What had happened to this subtask before, in the published history."""
    watermark: int
    ended: set[str] = field(default_factory=set)
    finished: bool = False
    closed: bool = False
    since_snapshot: int = 0
    """Calls that may emit, since the last snapshot."""


class Ledger:
    """What all sinks have made visible, by sink, checkpoint id, attempt id and name."""

    def __init__(self, absorb: Callable[[], None]) -> None:
        self.published: dict[tuple[Any, ...], tuple[str, ...]] = {}
        """Every committable in a checkpoint of the chain, with its content."""
        self.committed: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self.prepared: set[tuple[Any, ...]] = set()
        """What sinks have prepared and neither committed nor removed, like temporary files."""
        self.permitted: set[tuple[int, str]] = set()
        """Every checkpoint that was the newest when it was created."""
        self.left_behind: set[tuple[Any, ...]] = set()
        """What was published above a checkpoint that a rollback went back to."""
        self._absorb = absorb

    def prepare(self, key: tuple[Any, ...]) -> None:
        """A sink prepares output under its uid, checkpoint id, attempt id, and a name."""
        self.prepared.add(key)

    def clean(self, uid: str, newest_id: int, carried: list[dict[str, Any]]) -> None:
        """A sink removes what was prepared under ids up to the newest and is not carried."""
        kept = {(uid, row["_checkpoint_id"], row["_attempt_id"], row["name"]) for row in carried}
        self.prepared = {key for key in self.prepared if key[0] != uid or key[1] > newest_id or key in kept}

    def commit(self, uid: str, permit: Any, rows: list[dict[str, Any]]) -> None:
        """A sink makes output visible; committing it again changes nothing."""
        self._absorb()
        if tuple(permit.ref) not in self.permitted:
            raise Violation(f"{uid} commits with a permit for {permit.ref}, which was never the newest")
        for row in rows:
            key = (uid, row["_checkpoint_id"], row["_attempt_id"], row["name"])
            content = tuple(row["content"].splitlines())
            if key not in self.published:
                raise Violation(f"{uid} commits {key}, which no published checkpoint holds: {content}")
            if key not in self.committed and key not in self.prepared:
                if key in self.left_behind:
                    raise UserError(f"what {uid} prepared as {key} was left behind by a rollback, and is gone")
                raise Violation(f"what {uid} prepared as {key} was removed before it was committed")
            self.prepared.discard(key)
            if self.committed.setdefault(key, content) != content:
                raise Violation(f"{uid} commits {key} with another content than before")


class Witness:
    """One run, seen from its operators."""

    def __init__(self, number: int, ledger: Ledger, faults: Mapping[str, int], rng: random.Random) -> None:
        self.number = number
        self.ledger = ledger
        self.facts = Facts()
        self.active: dict[tuple[str, int], Seen] = {}
        self.read_to: dict[str, int] = {}
        """How far each split was read in this run."""
        self.put_off = rng.choice((0, 0, 1, 1, 3))
        """How many commits put rows off to the next checkpoint."""
        self._faults = dict(faults)

    def fault(self, hook: str, who: str) -> None:
        """Fail if it is this call's turn."""
        if hook in self._faults:
            self._faults[hook] -= 1
            if self._faults[hook] == 0:
                raise UserError(f"{hook} of {who} fails (a fault of the simulator)")

    def opened(self, uid: str, subtask: int, watermark: int) -> None:
        """An activation begins."""
        if uid in self.facts.fully_finished:
            raise Violation(f"{uid}[{subtask}] is opened, and was fully finished")
        past: frozenset[str] = frozenset()
        least = MIN_WATERMARK
        if uid in self.facts.steady:
            life = self.facts.life.get((uid, subtask), {})
            past, least = frozenset(life) - {"watermark"}, life.get("watermark", MIN_WATERMARK)
        if (uid, subtask) in self.active:
            raise Violation(f"{uid}[{subtask}] is opened twice in run {self.number}")
        self.active[uid, subtask] = Seen(past | self.facts.ended_everywhere.get(uid, frozenset()), least)
        self.fault("open", f"{uid}[{subtask}]")
        if watermark < least:
            self._violated(uid, subtask, f"opened at watermark {watermark}, and had come to {least}")

    def called(self, uid: str, subtask: int, hook: str, *, watermark: int | None = None) -> Seen:
        """A hook that may emit is called."""
        seen = self.active[uid, subtask]
        if seen.finished:
            self._violated(uid, subtask, f"{hook} after finish")
        if seen.closed:
            self._violated(uid, subtask, f"{hook} after close")
        if watermark is not None:
            if watermark < seen.watermark:
                self._violated(uid, subtask, f"time goes back from {seen.watermark} to {watermark}")
            seen.watermark = watermark
        seen.since_snapshot += 1
        self.fault(hook, f"{uid}[{subtask}]")
        return seen

    def input_ended(self, uid: str, subtask: int, number: int) -> None:
        """``end_input``."""
        seen = self.called(uid, subtask, "end_input")
        name = f"end_input {number}"
        if name in seen.ended or name in seen.past:
            self._violated(uid, subtask, f"{name} for the second time")
        seen.ended.add(name)

    def processing(self, uid: str, subtask: int, number: int, watermark: int) -> Seen:
        """``process``."""
        seen = self.called(uid, subtask, "process", watermark=watermark)
        if {f"end_input {number}"} & (seen.ended | seen.past):
            self._violated(uid, subtask, f"a record of input {number} after its end")
        return seen

    def finishing(self, uid: str, subtask: int, inputs: int) -> None:
        """``finish``."""
        seen = self.called(uid, subtask, "finish")
        if "finish" in seen.past:
            self._violated(uid, subtask, "finish for the second time")
        missing = [n for n in range(inputs) if f"end_input {n}" not in seen.ended | seen.past]
        if missing:
            self._violated(uid, subtask, f"finish, and inputs {missing} have not ended")
        seen.ended.add("finish")
        seen.finished = True

    def snapshot(self, uid: str, subtask: int) -> Seen:
        """``snapshot``; returns what has happened to the subtask."""
        seen = self.active[uid, subtask]
        if seen.closed:
            self._violated(uid, subtask, "snapshot after close")
        self.fault("snapshot", f"{uid}[{subtask}]")
        seen.since_snapshot = 0
        return seen

    def closing(self, uid: str, subtask: int) -> None:
        """``close``."""
        self.active[uid, subtask].closed = True
        self.fault("close", f"{uid}[{subtask}]")

    def read(self, split: str, position: int) -> None:
        """A reader has reached a position."""
        self.read_to[split] = max(position, self.read_to.get(split, 0))

    def _violated(self, uid: str, subtask: int, what: str) -> None:
        raise Violation(f"run {self.number}: {uid}[{subtask}]: {what}")
