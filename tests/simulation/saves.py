"""Savepoints that are requested while a job goes on, and what must hold for each.

A savepoint that is answered ``saved`` is a valid store with a checkpoint of the chain, and the
model reads the same from both. Requests in the store are answered by the end of the job.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from stateformat.backends.local import LocalRun
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.history import newest_record
from stateformat.model import CheckpointKind
from stateformat.requests import RequestAnswer, RequestOutcome
from tests.simulation.model import Cut
from tests.simulation.witness import Violation

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

SHARE = 0.3
"""The share of seeds in which savepoints are requested."""


class Saves:
    """The requests of one history."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng = random.Random(f"savepoints {simulation.seed}")
        self._asks = self._rng.random() < SHARE
        self._waiting: dict[str, int] = {}
        """Requests in the store, each with the newest id when it was made."""
        self._direct: list[tuple[LocalRun, str]] = []
        """Requests of runs."""
        self._places = 0

    def plan(self, plan: dict[int, list[str]]) -> None:
        """Add to what happens to a run, by step."""
        while self._asks and self._rng.random() < 0.6:
            plan.setdefault(self._rng.randint(1, 400), []).append("save")

    def begin(self) -> int:
        """Return how long a copy takes in a run that begins, in µs."""
        return self._rng.choice((0, 20_000, 500_000)) if self._asks else 20_000

    def ask(self, run: LocalRun, step: int) -> None:
        """Request a savepoint, at a new place or the default one, from the store or the run."""
        simulation, place = self._simulation, None
        if self._rng.random() < 0.5:
            self._places += 1
            place = f"memory://{simulation.disk.name}-elsewhere/{self._places}"
        simulation.say(f"asked for a savepoint at step {step}, at {place}")
        if simulation.disk.chain and self._rng.random() < 0.6:
            request = simulation.plain_store().request_savepoint(place)
            self._waiting[request.id] = request.newest
        else:
            self._direct.append((run, run.request_savepoint(place)))

    def check_run(self, run: LocalRun) -> None:
        """Check that a run that has ended has answered its requests."""
        for request in (request for one, request in self._direct if one is run):
            answer = run.request_answer(request)
            if answer is None:
                raise Violation(f"the run ended, and did not answer request {request} for a savepoint")
            self._check(answer)

    def check(self, *, ended: bool = False) -> None:
        """Judge the answers. ``ended``: every request must have one."""
        store = self._simulation.plain_store()
        for request, newest in list(self._waiting.items()):
            answer = store.request_answer(request)
            if answer is None:
                if ended:
                    raise Violation(f"the job has ended, and request {request} for a savepoint has no answer")
                continue
            cut = self._check(answer)
            if cut is not None and cut.record.checkpoint_id <= newest and not _is_last(cut):
                raise Violation(f"request {request} was made after checkpoint {newest}, and has {answer}")
            del self._waiting[request]
            store.withdraw_request(request)

    def _check(self, answer: RequestAnswer) -> Cut | None:
        """Check a savepoint; return the cut of its checkpoint."""
        simulation = self._simulation
        simulation.tally.counts[f"savepoints {answer.outcome}"] += 1
        simulation.say(f"savepoint {answer.outcome}: {answer.message}")
        if answer.outcome is RequestOutcome.MISSED or answer.outcome is RequestOutcome.STOPPED:
            raise Violation(f"a request for a savepoint counts for every run, and is {answer.outcome}")
        if answer.outcome is not RequestOutcome.SAVED:
            return None
        assert answer.savepoint is not None
        storage = MemoryStorage(answer.savepoint.removeprefix("memory://"))
        record = newest_record(storage)
        if (
            record is None
            or record.kind is not CheckpointKind.SAVEPOINT
            or record.checkpoint_id != answer.checkpoint_id
        ):
            raise Violation(f"{answer} says where there is a savepoint, and there is {record}")
        cut = simulation.cuts.get(record.ref)
        if cut is None:
            raise Violation(f"{answer.savepoint} is of {record.ref}, which never was the newest")
        source = simulation.rolled_back_to.get(record.ref) or record.parent
        judged = simulation.model.judge(storage, record, simulation.cuts[source] if source else None)
        if (judged.output, judged.positions, judged.facts) != (cut.output, cut.positions, cut.facts):
            raise Violation(f"{answer.savepoint} says something else than checkpoint {record.ref}")
        return cut


def _is_last(cut: Cut) -> bool:
    """Return whether the job stopped or finished at this cut."""
    operators = {op.uid for op in cut.record.graph.operators}
    return cut.record.stop is not None or cut.facts.fully_finished == operators
