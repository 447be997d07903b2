"""A recorded scenario, and the replay of every crash of it; also of a second run after a first that
died.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

from tests.crashes.crash_calls import SystemCalls
from tests.crashes.crash_disk import Call, Disk, put
from tests.crashes.crash_scenarios import SCENARIOS, STORE, Judge, Replay, in_small_steps, promised, storage_at

SEED = 20_261


class Recording:
    """A scenario that was prepared and run once: the disk before it, its calls, and a judge of what
    they leave.
    """

    def __init__(self, workspace: Path, name: str, *, durable: bool = True, record: Any = None) -> None:
        self.base = workspace / "base"
        self.base.mkdir()
        scenario = SCENARIOS[name]
        scenario.prepare(self.base)
        self.disk = Disk(self.base)
        self.judge = Judge(workspace, scenario)
        if record is None:
            with SystemCalls(self.base) as calls, in_small_steps(calls.mark):
                scenario.act(self.base, storage_at(self.base / STORE, durable=durable), calls.mark)
            self.calls = calls.calls
        else:
            self.calls = record(self.base, name)
        disk = copy.deepcopy(self.disk)
        self.judge.learn(disk.look())
        for call in self.calls:
            disk.apply(call)
            self.judge.learn(disk.look())

    def replay(self, calls: list[Call] | None = None, **how: Any) -> Replay:
        """Judge every crash during these calls, by default those recorded."""
        replay = Replay(self.judge, copy.deepcopy(self.disk), promised(self.disk.look()))
        return replay.run(self.calls if calls is None else calls, random.Random(SEED), **how)

    def syncs(self) -> list[int]:
        """Return the numbers of the calls that sync."""
        return [number for number, call in enumerate(self.calls) if call.verb == "sync"]

    def after(self, verb: str) -> list[int]:
        """Return how many calls had been made when each call of a kind returned."""
        return [number + 1 for number, call in enumerate(self.calls) if call.verb == verb]

    def missed_without(self, number: int, *, closely: bool = False) -> bool:
        """Return whether leaving out one sync goes unnoticed.

        Looks at every mark; ``closely``: looks closely, after every call.
        """
        calls = [*self.calls[:number], Call("mark", ""), *self.calls[number + 1 :]]
        return not self.replay(calls, stop=True, only_marks=not closely, closely=closely).problems


def second_run(recording: Recording, workspace: Path, died_after: int, *, closely: bool = True) -> Replay:
    """Let the first run die after ``died_after`` calls, run a second on what is visible then, and
    judge a power failure at every mark of the second.
    """
    disk = copy.deepcopy(recording.disk)
    promises = promised(disk.look())
    # A new judge: what the first run would have written had it lived need not exist now.
    judge = Judge(workspace, recording.judge.scenario)
    judge.learn(disk.look())
    for call in recording.calls[:died_after]:
        disk.apply(call)
        judge.learn(disk.look())
        if call.verb == "mark":
            promises.add(call.path)
    base = workspace / f"second-{died_after}"
    base.mkdir()
    put(disk.look(), base)
    with SystemCalls(base) as second, in_small_steps(second.mark):
        recording.judge.scenario.again(base, storage_at(base / STORE), second.mark)
    learning = copy.deepcopy(disk)
    for call in second.calls:
        learning.apply(call)
        judge.learn(learning.look())
    replay = Replay(judge, disk, promises)
    return replay.run(second.calls, random.Random(SEED), only_marks=True, closely=closely)
