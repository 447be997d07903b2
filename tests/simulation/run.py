"""One seed: draw a dataflow and a history of runs, let it happen, and check it against the model at
every checkpoint.

A history is several *attempts* at running the job to its end on one store: each at its own
parallelism, with its own faults, and each ended by what its seed says or by what its faults bring
about. A run can be left alone half-way and go on beside the next one, as a zombie. The last attempt
has no faults and must come to an end. Everything follows from the seed: there is one thread, a
virtual clock, and ids are drawn too.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from stateformat import paths as layout
from stateformat.backends.dataflow import Dataflow, EventTime, Stream
from stateformat.backends.dataflow.events import BarrierKind
from stateformat.backends.dataflow.task_states import TaskState
from stateformat.backends.local import LocalRun, LocalRuntime
from stateformat.backends.rewrite.rewrite import publish_rescaled
from stateformat.backends.runtime import JobOutcome, JobPaused, LoopFill, VirtualClock, channels, driver
from stateformat.backends.storage.memory import _STORES, MemoryStorage
from stateformat.errors import (
    CheckpointError,
    CheckpointExpired,
    InvalidInput,
    PublishConflict,
    RestoreRefused,
)
from stateformat.graph import JobGraph, Operator, OperatorId, Partitioner, Status
from stateformat.model import CheckpointKind, ParentRef, StopMode
from stateformat.requests import RequestOutcome
from stateformat.rescaling import rescale_of
from stateformat.store import CheckpointStore
from tests.simulation import graphs
from tests.simulation.graphs import GROUPS_MAX, EdgeSpec, Graph
from tests.simulation.model import Cut, Model, check_valid
from tests.simulation.saves import Saves
from tests.simulation.storage import NO_FAULTS, Crash, Disk, Faults, FaultyStorage
from tests.simulation.witness import HOOKS, Facts, Ledger, UserError, Violation, Witness
from tests.simulation.work import KINDS, RECORD, Reader

JOB = "simulated"
STEPS_MAX = 12_000
"""A run of a few hundred records that takes more steps hangs."""
ZOMBIE_STEPS_MAX = 2_000
"""A zombie that has nothing left to publish may idle forever."""
ATTEMPTS_MAX = 40
RESCALED_SEEDS = 7
"""In one of this many seeds running jobs are rescaled."""
PRESSING_SEEDS = 16
"""In one of this many seeds loops always hold as much as they may."""
STOPPED_SOON_SEEDS = 5
"""In one of this many seeds programs are told to end, as by SIGTERM."""
STALLS = 0.35
"""The share of runs that stall before they create a record, while another runs the job."""
IDLE_AFTER = 20_000
"""When splits of timed sources with an odd number of them are idle, µs."""
TENDED = 0.6
"""How often the store is maintained between two runs."""
LEGAL = (CheckpointError, OSError, UserError)
"""Errors with which a run may be given up; any other is a fault of the product."""


class Failed(AssertionError):
    """A seed found something. The message is its story."""


@dataclass
class Tally:
    """What happened in a seed, to show that seeds do what they should."""

    seed: int
    attempts: int = 0
    steps: int = 0
    checkpoints: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)


def build(graph: Graph, witness: Witness, parallelism: list[int]) -> tuple[Dataflow, dict[str, int]]:
    """The dataflow of a graph, and the parallelism of every operator."""
    flow = Dataflow(JOB)
    streams: dict[str, Stream] = {}
    placed: dict[str, int] = {}
    loops: dict[str, Any] = {}
    for source in graph.sources:
        placed[source.uid] = parallelism[source.group]
        timed = EventTime("ts", source.disorder_us) if source.timed else None
        streams[source.uid] = flow.source(
            Reader(source, witness),
            uid=source.uid,
            parallelism=placed[source.uid],
            event_time=timed,
            idle_after=IDLE_AFTER if source.timed and len(source.splits) % 2 else None,
        )
    for op in graph.ops:
        placed[op.uid] = parallelism[op.group]
        inputs = [routed(streams[edge.source], edge) for edge in op.inputs]
        if op.feedback:
            loop = loops[op.feedback.source] = flow.loop(RECORD)
            inputs.append(routed(loop.stream(), op.feedback))
        operator = KINDS[op.kind](op, witness, placed[op.uid])
        stream = inputs[0].apply(
            operator,
            *inputs[1:],
            uid=op.uid,
            parallelism=placed[op.uid],
            max_parallelism=GROUPS_MAX,
            chain=op.chain,
        )
        streams[op.uid] = stream
        if op.uid in loops:
            loops[op.uid].close(stream)
    return flow, placed


def routed(stream: Stream, edge: EdgeSpec) -> Stream:
    """A stream by the partitioner of an edge."""
    match edge.partitioner:
        case Partitioner.HASH:
            return stream.key_by("key")
        case Partitioner.REBALANCE:
            return stream.rebalance()
        case Partitioner.RESCALE:
            return stream.rescale()
        case Partitioner.BROADCAST:
            return stream.broadcast()
        case _:
            return stream.forward()


class Simulation:
    """One seed under way."""

    def __init__(self, seed: int, *, thorough: bool = True) -> None:
        self.seed = seed
        self.thorough = thorough
        self.rng = random.Random(f"history {seed}")
        self.tally = Tally(seed)
        self.story = self.tally.story
        self.graph = graphs.draw(random.Random(f"graph {seed}"))
        self.model = Model(self.graph)
        self.disk = Disk(f"simulated-{seed}")
        self.ledger = Ledger(self.absorb)
        self.cuts: dict[ParentRef, Cut] = {}
        self.rolled_back_to: dict[ParentRef, ParentRef] = {}
        self.rolling_back_to: ParentRef | None = None
        self.parallelism = [self._some() for _ in range(self.graph.groups)]
        self.zombies: list[LocalRun] = []
        self.stepped: list[LocalRun] = []
        self.absorbed = 0
        self.witness: Witness | None = None
        self.keeps = self.rng.choice((None, None, None, 1, 2))
        self.options = replace(driver._OPTIONS, inline_bytes_max=self.rng.choice((16_384, 0)))
        """Segments of this size and more are objects: with 0 each state of each subtask is one."""
        self.saves = Saves(self)
        self.rescales = random.Random(f"rescales {seed}") if seed % RESCALED_SEEDS == 2 else None
        """Draws the rescales of running jobs; its own, so that other seeds stay as they are."""
        self.soon = random.Random(f"soon {seed}") if seed % STOPPED_SOON_SEEDS == 3 else None
        """Draws when programs are told to end; its own, so that other seeds stay as they are."""
        self.asked: dict[str, list[int]] = {}
        """The parallelism of each such request, by group."""
        self.runs = 0
        self.ended = False
        """The job has come to its end and is not run again."""

    def _some(self) -> int:
        return self.rng.choice((1, 1, 2, 2, 3, 4))

    # History --------------------------------------------------------------------------------------

    def run(self) -> Tally:
        """Let it all happen."""
        try:
            # What is fed back goes first, always: a loop must not wait for itself.
            presses = mock.patch.object(LoopFill, "presses", new=True)
            pressing = presses if self.seed % PRESSING_SEEDS == 9 else contextlib.nullcontext()
            # In half of the seeds tasks handle equal elements together, as wide tasks do.
            together = mock.patch.object(channels, "TOGETHER_MIN", 2 if self.seed % 2 else channels.TOGETHER_MIN)
            with drawn_ids(self.seed), mock.patch.object(driver, "_OPTIONS", self.options), pressing, together:
                self._history()
        except Violation as error:
            raise Failed(self._told(str(error))) from error
        except (Crash, Exception) as error:
            raise Failed(self._told(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")) from error
        finally:
            for name in [name for name in _STORES if name == self.disk.name or name.startswith(f"{self.disk.name}/")]:
                MemoryStorage.reset(name)
        return self.tally

    def _told(self, what: str) -> str:
        return f"seed {self.seed}: {what}\n{self.graph.describe()}\n" + "\n".join(self.story[-60:])

    def say(self, what: str) -> None:
        self.story.append(what)

    def _history(self) -> None:
        # Most of what can go wrong in a store needs a longer history.
        unkind = self.rng.choice((0, 1, 1, 2, 3, 4, 6))
        resume = False
        while True:
            self.tally.attempts += 1
            if self.tally.attempts > ATTEMPTS_MAX:
                raise Violation("the job does not come to an end")
            kind = self.tally.attempts > unkind
            outcome = self._attempt(kind=kind, resume=resume)
            self._told_history()
            self.saves.check()
            if outcome is not None and outcome.interrupted:
                self._check_interrupted(outcome)
                outcome = None
            if isinstance(outcome, JobPaused):
                self.tally.counts["rescaled while it ran"] += 1
                outcome = None
            if outcome is not None and outcome.checkpoint_id != self.disk.newest_id():
                # While it came to its end, another run has gone on from there.
                outcome = None
            if outcome is None:
                resume = self._newest_is_suspended()
                self._between()
                continue
            if outcome.stop is not None and outcome.stop.mode is StopMode.NO_DRAIN and self.rng.random() < 0.8:
                if self.rng.random() < 0.3:
                    self._check_runs_nothing(outcome)
                    self._check_committed(self.cuts[self.disk.chain[-1].ref])
                resume = True
                self._between()
                continue
            self._check_end(outcome)
            return

    def _check_interrupted(self, outcome: JobOutcome) -> None:
        """A program that was told to end has left an ordinary checkpoint, committed."""
        self.tally.counts["stopped soon"] += 1
        newest = self.newest()
        if newest is None or outcome.checkpoint_id != self.disk.newest_id():
            return
        if newest.record.stop is not None or outcome.stop is not None:
            raise Violation(f"the checkpoint of a program that was told to end is that of a stop: {newest.record.stop}")
        self._check_committed(newest)

    def _newest_is_suspended(self) -> bool:
        newest = self.newest()
        return newest is not None and newest.record.stop is not None

    def newest(self) -> Cut | None:
        """Return the cut of the newest checkpoint in the chain."""
        return self.cuts[self.disk.chain[-1].ref] if self.disk.chain else None

    # One attempt ----------------------------------------------------------------------------------

    def _attempt(self, *, kind: bool, resume: bool, limit: int | None = None) -> JobOutcome | None:
        """Run the job, to its end or until something ends the run. ``limit``: kill it after that
        many checkpoints.
        """
        rng = self.rng
        zombies = len(self.zombies)
        self.runs += 1
        if self.runs > 1:
            keep = rng.choice((1.0, 1.0, 0.5, 0.0))
            self.parallelism = [p if rng.random() < keep else self._some() for p in self.parallelism]
        faults, hooks = (NO_FAULTS, {}) if kind else self._faults()
        going_on = self._going_on()
        if going_on is not None:
            # The witness expects the new parallelism, so only the death of its process may keep the
            # run from it.
            self.parallelism = going_on
            faults = replace(NO_FAULTS, die=faults.die, budget=faults.budget)
            hooks.pop("open", None)
        self.storage = FaultyStorage(self.disk, faults, random.Random(f"storage {self.seed} {self.runs}"))
        self.witness = Witness(self.runs, self.ledger, hooks, random.Random(f"witness {self.seed} {self.runs}"))
        if not kind and limit is None and rng.random() < STALLS:
            self.storage.meanwhile = self._stall(rng.randint(1, 3))
        newest = self.newest()
        flow, placed = build(self.graph, self.witness, self.parallelism)
        self.witness.facts = self.model.facts_at(newest.facts, placed) if newest else Facts()
        # A job that only waits for its stop would do nothing but checkpoints.
        intervals = (30_000, 60_000, 120_000, 250_000, 400_000)[0 if self.graph.bounded else 2 :]
        options: dict[str, Any] = {
            "unaligned": rng.random() < 0.5,
            "resume": resume,
            "checkpoint_interval_us": rng.choice(intervals),
            "checkpoint_rows": rng.choice((None, None, None, 10)),
            "timeout_us": 600_000_000 if kind or rng.random() < 0.8 else 60_000,
            "requests_every_us": rng.choice((None, 50_000)),
            "tolerable_failures": rng.choice((0, 0, 1, 5)),
            "keep": self.keeps,
        }
        if self.rescales is not None:
            options["requests_every_us"] = 50_000
        if options["unaligned"]:
            options["unaligned_after_us"] = (None, 0, 20_000)[self.runs % 3]
        self.say(
            f"run {self.runs} at {self.parallelism} from {newest.record.checkpoint_id if newest else 'nothing'}: "
            f"{options}, {hooks}, {faults}"
        )
        store = CheckpointStore(self.storage, sleep=lambda seconds: None)
        options |= {"seed": rng.getrandbits(32), "per_operator": placed}
        runtime = LocalRuntime(store, clock=VirtualClock(us_per_work=self.saves.begin()), **options)
        try:
            begun = runtime.begin(flow)
            if isinstance(begun, JobOutcome):
                self.absorb()
                self.say(f"ended at once: {begun.sentence}")
                return begun
            return self._steps(begun, kind=kind, limit=limit)
        except Crash:
            self.say(f"crashed: {self.storage.trace[-1:]}")
            self.tally.counts["crashed"] += 1
        except (PublishConflict, CheckpointExpired) as error:
            if kind and not self.zombies and not zombies:
                raise Violation(f"a run that nobody disturbs ends with {type(error).__name__}: {error}") from error
            self.say(f"overtaken: {error}")
            self.tally.counts["overtaken"] += 1
        except (RestoreRefused, InvalidInput) as error:
            raise Violation(f"refused: {error}") from error
        except LEGAL as error:
            if kind:
                raise Violation(f"a run that nobody disturbs is given up: {type(error).__name__}: {error}") from error
            self.say(f"given up: {type(error).__name__}: {error}")
            self.tally.counts[f"given up: {type(error).__name__}"] += 1
        except (Violation, Failed):
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}\n{traceback.format_exc()}") from error
        self.absorb()
        return None

    def _faults(self) -> tuple[Faults, dict[str, int]]:
        rng = self.rng
        faults = NO_FAULTS
        if rng.random() < 0.5:
            share = rng.choice((5, 20, 60))
            faults = Faults(
                fail=rng.choice((0, share)),
                lose=rng.choice((0, share)),
                late=rng.choice((0, share)),
                refuse=rng.choice((0, share)),
                die=rng.choice((0, 0, 5, 15)),
                budget=rng.randint(1, 4),
            )
        hooks: dict[str, int] = {}
        if rng.random() < 0.5:
            hook = rng.choice(HOOKS)
            hooks[hook] = 1 if hook in ("finish", "close", "open") and rng.random() < 0.5 else rng.randint(1, 25)
        return faults, hooks

    def _steps(self, run: LocalRun, *, kind: bool, limit: int | None) -> JobOutcome | None:
        rng = self.rng
        plan = self._plan(kind=kind)
        # A zombie may be faster than the run that took its place.
        zombie_share = rng.choice((0.3, 0.3, 0.9))
        # Most of what can go wrong goes wrong behind a checkpoint.
        fatal = 0 if kind or rng.random() < 0.3 else len(self.disk.chain) + rng.choice((1, 1, 1, 2, 3))
        how = rng.choice(("kill", "kill", "kill", "zombie"))
        if limit is not None:
            fatal, how = len(self.disk.chain) + limit, "kill"
        stops_late = rng.random() < 0.3
        steps = asked_at = 0
        saving: tuple[int, frozenset[Any]] | None = None
        while True:
            steps += 1
            self.tally.steps += 1
            for what in plan.get(steps, ()):
                if what == "kill":
                    self.say(f"killed at step {steps}")
                    return None
                if what == "zombie":
                    self.say(f"left alone at step {steps}")
                    self.zombies.append(run)
                    return None
                self._interfere(run, what, steps)
            if kind and not self.graph.bounded and steps > 200 and steps - asked_at > 1000:
                asked_at = steps
                self._interfere(run, "drain", steps)
            if self.zombies and rng.random() < zombie_share:
                self._step_zombie()
            goes_on = run.step()
            self.absorb()
            saving = self._check_saving(run, saving)
            if not goes_on:
                assert run.outcome is not None
                self.say(f"outcome at step {steps}: {run.outcome.sentence}")
                self._check_stopped(run.outcome)
                self.saves.check_run(run)
                return run.outcome
            if stops_late and any(worker.task.state is TaskState.WAITING for worker in run.tasks.values()):
                plan.setdefault(steps + rng.randint(1, 40), []).append(rng.choice(("drain", "suspend", "suspend")))
                stops_late = False
            if fatal and len(self.disk.chain) >= fatal:
                plan.setdefault(steps + rng.randint(1, 60), []).append(how)
                fatal = 0
            if steps > STEPS_MAX:
                if kind or self.graph.bounded:
                    raise Violation(f"no end after {steps} steps: {run.describe()}")
                self.say(f"left after {steps} steps")
                return None

    def _plan(self, *, kind: bool) -> dict[int, list[str]]:
        """What happens to a run, by step."""
        rng = self.rng
        plan: dict[int, list[str]] = {}

        def at(first: int, last: int, what: str) -> None:
            plan.setdefault(rng.randint(first, last), []).append(what)

        if rng.random() < 0.25:
            at(1, 400, rng.choice(("drain", "suspend", "suspend")))
            if rng.random() < 0.2:
                at(1, 400, rng.choice(("drain", "suspend")))
        if rng.random() < 0.2:
            at(1, 500, "expire")
        self.saves.plan(plan)
        if self.rescales is not None:
            for _ in range(self.rescales.choice((1, 2, 3))):
                plan.setdefault(self.rescales.randint(20, 400), []).append("rescale while it runs")
        if self.soon is not None and self.soon.random() < (0.2 if kind else 0.6):
            plan.setdefault(self.soon.randint(1, 400), []).append("stop soon")
        if kind:
            return plan
        if rng.random() < 0.15:
            at(1, 400, rng.choice(("kill", "zombie")))
        if rng.random() < 0.2:
            at(1, 500, "fail")
        if not self.graph.bounded:
            at(100, 400, rng.choice(("kill", "drain", "suspend", "zombie")))
            at(400, 700, "kill")
        return plan

    def _interfere(self, run: LocalRun, what: str, step: int) -> None:
        rng = self.rng
        self.tally.counts[what] += 1
        if what == "fail":
            task = rng.choice(list(run.tasks))
            self.say(f"task {task} is killed at step {step}")
            if not run.tasks[task].gone:
                run.tasks[task].fail(RuntimeError("it was killed"))
        elif what == "expire":
            self._expire()
        elif what == "save":
            self.saves.ask(run, step)
        elif what == "stop soon":
            self.say(f"told to stop soon at step {step}")
            run.stop_soon(grace=1e6)
        elif what == "rescale while it runs":
            self._ask_for_rescale()
        else:
            mode = StopMode.DRAIN if what == "drain" else StopMode.NO_DRAIN
            # A copy to where another store is fails; the stop stands.
            elsewhere = f"memory://{self.disk.name}-stopped" if rng.random() < 0.15 else None
            self.say(f"asked to stop ({mode}) at step {step}")
            if rng.random() < 0.3 and self.disk.chain:
                self.plain_store().request_stop(mode, elsewhere)
            else:
                run.request_stop(mode, elsewhere)

    def _ask_for_rescale(self) -> None:
        newest = self.newest()
        if newest is None or self.rescales is None:
            return
        parallelism = [self.rescales.choice((1, 2, 3, 4)) for _ in self.parallelism]
        graph = newest.record.graph
        groups = {step.uid: step.group for step in (*self.graph.sources, *self.graph.ops)}
        sizes = {
            op.uid: parallelism[groups[op.uid]] for op in graph.operators if op.status is not Status.FULLY_FINISHED
        }
        with contextlib.suppress(InvalidInput):
            request = self.plain_store().request_rescale(None, sizes)
            self.asked[request.id] = parallelism
            self.say(f"asked to go on at {parallelism}")

    def _going_on(self) -> list[int] | None:
        """Return the parallelism of the rescale for which the job has stopped."""
        newest = self.newest()
        stop = newest.record.stop if newest is not None and rescale_of(newest.record) is not None else None
        return self.asked[stop.request] if stop is not None else None

    def _step_zombie(self) -> None:
        zombie = self.rng.choice(self.zombies)
        if zombie in self.stepped:
            return  # It is the one that has stalled, in the middle of a step.
        self.stepped.append(zombie)
        try:
            goes_on = zombie.step()
        except Crash:
            goes_on = False
        except LEGAL as error:
            self.say(f"a zombie has ended: {type(error).__name__}: {error}")
            goes_on = False
        finally:
            self.stepped.remove(zombie)
        self.absorb()
        self.tally.counts["zombie steps"] += 1
        if not goes_on:
            self.zombies.remove(zombie)

    # Between runs ---------------------------------------------------------------------------------

    def plain_store(self, meanwhile: Callable[[str, str], None] | None = None) -> CheckpointStore:
        """Return the store without faults, for its maintenance."""
        storage = FaultyStorage(self.disk, NO_FAULTS, self.rng)
        storage.meanwhile = meanwhile
        return CheckpointStore(storage, sleep=lambda seconds: None)

    def _between(self) -> None:
        """Maintain the store between two runs, perhaps with a rival at the same time."""
        rng = self.rng
        newest = self.newest()
        stop = newest.record.stop if newest else None
        if newest is None or (stop is not None and stop.mode is StopMode.DRAIN) or rng.random() > TENDED:
            return
        tend = rng.choice(
            (self._roll_back, self._roll_back, self._expire, self._rescale if stop is None else self._expire)
        )
        if rng.random() < 0.7:
            rival = rng.choice((self._roll_back, self._expire, self._expire))
            # Most of what can go wrong goes wrong before a manifest or a record is there, or
            # between two deletions.
            at = rng.choice((layout.MANIFESTS, layout.RECORDS, ""))
            left = 1 if at else rng.randint(1, 16)

            def meanwhile(verb: str, path: str) -> None:
                nonlocal left
                left -= verb in ("write", "create", "delete") and path.startswith(at) if at else 1
                if left == 0:
                    left = -1
                    self.say(f"before {verb} {path}:")
                    self.absorb()
                    rolling_back_to, self.rolling_back_to = self.rolling_back_to, None
                    rival(self.plain_store())
                    self.rolling_back_to = rolling_back_to

            tend(self.plain_store(meanwhile))
        else:
            tend(self.plain_store())
        self.absorb()

    def _stall(self, count: int) -> Callable[[str, str], None]:
        """A process stalls before it creates its ``count``-th record; another runs the job
        meanwhile.
        """
        left = count

        def meanwhile(verb: str, path: str) -> None:
            nonlocal left
            if verb != "create" or not path.startswith(layout.RECORDS):
                return
            left -= 1
            if left == 0 and not self.ended:
                self.say(f"stalls before it creates {path}")
                self.tally.counts["stalled"] += 1
                own = self.storage, self.witness, self.parallelism
                self.absorb()
                self._attempt(kind=False, resume=self._newest_is_suspended(), limit=self.rng.randint(2, 4))
                stalled, newest = layout.record_id(path), self.disk.newest_id()
                if stalled is not None and newest > stalled and self.rng.random() < 0.6:
                    # All up to the id that it is about to create: what it creates is a stray, right
                    # below the chain.
                    self._expire(keep=newest - stalled)
                self.storage, self.witness, self.parallelism = own
                self.say(f"goes on, and creates {path}")

        return meanwhile

    def _expire(self, store: CheckpointStore | None = None, *, keep: int | None = None) -> None:
        keep = keep or self.rng.choice((1, 1, 2, 3))
        self.say(f"expires all but {keep}")
        # By age as well, by a clock that is a lifetime wrong: all are old, or of the future.
        jump_us = random.Random(f"{self.seed} {keep} {self.disk.newest_id()}").choice((None, None, -1, 1))
        age = {} if jump_us is None else {"older_than_us": 1, "now_us": time.time_ns() // 1000 + jump_us * 10**15}
        with contextlib.suppress(CheckpointError, OSError):
            (store or self.plain_store()).expire(keep, **age)

    def _told_history(self) -> list[ParentRef]:
        """The checkpoints of the store, newest first: each was the newest when it was created, so
        no stray is among them.
        """
        history = [record.ref for record in self.plain_store().history()] if self.disk.chain else []
        never = [ref for ref in history if ref not in self.cuts]
        if never:
            raise Violation(f"the history lists {never}, which never were the newest")
        return history

    def _roll_back(self, store: CheckpointStore) -> None:
        with contextlib.suppress(CheckpointError):
            history = self._told_history()
            if len(history) > 1:
                source = self.rng.choice(history[1:])
                self.say(f"rolls back to {source}")
                self.tally.counts["rollback"] += 1
                self.rolling_back_to = source
                store.rollback(source.checkpoint_id)
        self.absorb()
        self.rolling_back_to = None

    def _rescale(self, store: CheckpointStore) -> None:
        source = store.open()
        parallelism = [self._some() for _ in self.parallelism]
        group_of = {step.uid: step.group for step in (*self.graph.sources, *self.graph.ops)}
        topology = JobGraph(
            tuple(
                Operator(
                    OperatorId(op.uid), parallelism[group_of[op.uid]], op.max_parallelism, coordinator=op.coordinator
                )
                for op in source.graph.operators
            ),
            source.graph.edges,
        )
        with contextlib.suppress(PublishConflict, CheckpointExpired):
            publish_rescaled(source, topology, store=store)
            self.parallelism = parallelism
            self.say(f"rescaled to {parallelism}")
        self.tally.counts["rescale"] += 1

    # Checks ---------------------------------------------------------------------------------------

    def absorb(self) -> None:
        """Judge every checkpoint that has been created since the last call."""
        while self.absorbed < len(self.disk.chain):
            record = self.disk.chain[self.absorbed]
            self.absorbed += 1
            if record.kind is CheckpointKind.ROLLBACK:
                assert self.rolling_back_to is not None
                self.rolled_back_to[record.ref] = self.rolling_back_to
                self.ledger.left_behind |= set(self.ledger.published)
            source = self.rolled_back_to.get(record.ref) or record.parent
            if source is not None and source not in self.cuts:
                raise Violation(f"{record.ref} goes on from {source}, which never was the newest")
            parent = self.cuts[source] if source is not None else None
            self.say(
                f"checkpoint {record.checkpoint_id} {record.kind}{f' {record.stop.mode}' if record.stop else ''}: "
                + ", ".join(f"{op.uid} {op.status}" for op in record.graph.operators if op.done)
            )
            cut = self.cuts[record.ref] = self.model.judge(self.disk.storage, record, parent, full=self.thorough)
            self.ledger.permitted.add(tuple(record.ref))
            self.ledger.published.update(cut.output)
            self.tally.checkpoints += 1
            self._count(cut)

    def _count(self, cut: Cut) -> None:
        """Count what is worth knowing about a checkpoint."""
        counts = self.tally.counts
        counts["checkpoints with records in flight"] += cut.in_flight > 0
        counts["checkpoints with partially finished operators"] += any(
            op.status is Status.PARTIALLY_FINISHED for op in cut.record.graph.operators
        )
        counts["checkpoints of stops"] += cut.record.stop is not None

    def _check_saving(
        self, run: LocalRun, before: tuple[int, frozenset[Any]] | None
    ) -> tuple[int, frozenset[Any]] | None:
        """Check that a task that takes part in a stop's savepoint stays until it is complete."""
        barrier = run.in_flight.barrier if run.in_flight else None
        if barrier is None or barrier.purpose not in (BarrierKind.STOP_DRAIN, BarrierKind.STOP_NO_DRAIN):
            return None
        gone = frozenset(task for task, worker in run.tasks.items() if worker.task.state is TaskState.ENDED)
        if before is not None and before[0] == barrier.number:
            left = [task for task in gone - before[1] if run.tasks[task].snapshot_taken >= barrier.number]
            if left:
                raise Violation(f"{sorted(left)} left before the savepoint was complete that they had taken part in")
        return barrier.number, gone

    def _check_stopped(self, outcome: JobOutcome) -> None:
        """Check that nothing happens or is read after the barrier of a stop without drain."""
        cut, witness = self.newest(), self.witness
        assert witness is not None
        if not self.thorough:
            check_valid(self.disk.storage)
        if outcome.savepoint is not None and self.thorough:
            check_valid(MemoryStorage(outcome.savepoint.removeprefix("memory://")))
        if outcome.stop is None or outcome.stop.mode is not StopMode.NO_DRAIN or cut is None:
            return
        for split, position in witness.read_to.items():
            uid, number = split.split("/")
            if position > cut.positions[uid, int(number)]:
                raise Violation(f"{split} was read to {position}, behind the stop at {cut.positions[uid, int(number)]}")
        late = {
            who: seen.since_snapshot
            for who, seen in witness.active.items()
            if seen.since_snapshot and not seen.finished
        }
        if late:
            raise Violation(f"these did something behind the barrier of the stop: {late}")

    def _check_runs_nothing(self, outcome: JobOutcome) -> None:
        """Check that a job that has ended, or was stopped and is run without ``resume``, returns at
        once.
        """
        again = self._attempt(kind=True, resume=False)
        assert self.witness is not None
        if again is None or again.checkpoint_id != outcome.checkpoint_id or self.witness.active:
            raise Violation(f"a job that had ended was run again: {again}, {sorted(self.witness.active)}")

    def _check_committed(self, cut: Cut) -> None:
        missing = cut.output.keys() - self.ledger.committed.keys()
        if missing:
            raise Violation(f"published and not committed: {sorted(missing)[:4]}")
        surplus = self.ledger.committed.keys() - cut.output.keys() - self.ledger.left_behind
        if surplus:
            raise Violation(f"committed, and no part of the newest checkpoint's history: {sorted(surplus)[:4]}")

    def _check_rescales(self) -> None:
        """Check that a rescale that was answered as done has the requested parallelism."""
        chain = {record.checkpoint_id: record for record in self.disk.chain}
        groups = {step.uid: step.group for step in (*self.graph.sources, *self.graph.ops)}
        for request, parallelism in self.asked.items():
            answer = self.plain_store().request_answer(request)
            if answer is None or answer.outcome is not RequestOutcome.RESCALED or answer.checkpoint_id is None:
                continue
            self.tally.counts["rescales answered"] += 1
            stop, first = chain[answer.checkpoint_id - 1], chain[answer.checkpoint_id]
            if stop.stop is None or stop.stop.request != request:
                raise Violation(f"request {request} was answered with {answer}, which is not behind its stop")
            for op in stop.graph.operators:
                size = first.graph.operator(op.uid).parallelism
                if op.status is not Status.FULLY_FINISHED and size != parallelism[groups[op.uid]]:
                    raise Violation(f"{op.uid} is at {size} in {first.ref}, and not as asked: {parallelism}")

    def _check_end(self, outcome: JobOutcome) -> None:
        cut = self.newest()
        if cut is None:
            raise Violation("the job has finished without a checkpoint")
        if outcome.stop is None or outcome.stop.mode is StopMode.DRAIN:
            if cut.facts.fully_finished != {op.uid for op in cut.record.graph.operators}:
                raise Violation(f"the job has finished, and its last checkpoint says {cut.facts}")
            positions = self.model.everything() if outcome.stop is None else cut.positions
            self.model.check_output(cut.output, positions)
        self._check_runs_nothing(outcome)
        self._check_committed(cut)
        self.saves.check(ended=True)
        self._check_rescales()
        self.ended = True
        while self.zombies:
            self._step_zombie()
            if self.tally.counts["zombie steps"] > ZOMBIE_STEPS_MAX:
                break
        if self.newest() is not cut:
            raise Violation(f"a zombie has gone on from {cut.record.ref}")
        self._check_committed(cut)


@contextlib.contextmanager
def drawn_ids(seed: int) -> Iterator[None]:
    """Make attempt ids, write ids and request ids follow from the seed too."""
    draw = random.Random(f"ids {seed}").randbytes
    # The second is what ``secrets`` draws from.
    with mock.patch.object(os, "urandom", draw), mock.patch.object(random, "_urandom", draw):
        yield


def simulate(seed: int, *, thorough: bool = True) -> Tally:
    """Run one seed. Raises :class:`Failed` with its story. ``thorough``: validate every checkpoint,
    not only the last of each run.
    """
    return Simulation(seed, thorough=thorough).run()
