"""Crashes of a job with a file sink and a SQL sink, and what must hold afterwards.

Run as a module (``python -m tests.crashes.crash_sinks <base>``) it runs the job to its end, for a
recorder that watches from outside: neither SQLite nor Arrow's files go through Python.
:class:`SinkJudge` creates a tree that a crash may have left, runs the job again, and checks that
files and table have every row once.
"""

from __future__ import annotations

import copy
import random
import re
import shutil
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stateformat.backends.connectors import FileSink, MemorySource, SqlSink
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.errors import CheckpointError
from stateformat.store import CheckpointStore
from tests.crashes.crash_calls import STORE, traced
from tests.crashes.crash_disk import Call, Disk, Tree, put
from tests.crashes.crash_scenarios import storage_at

ROWS = range(6)
UNFINISHED = re.compile(r"\.(open|part)$|/\.tmp-[^/]*$")
SEED = 20_717


def run(base: Path, *, durable: bool = True) -> None:
    """Run the job to its end: several checkpoints, each with rows for both sinks. If it has ended,
    commit again.
    """
    flow = Dataflow("crashes")
    rows = flow.source(MemorySource(pa.table({"n": ROWS}), batch_rows=2), uid="rows")
    rows.apply(FileSink(base / "out", durable=durable), uid="files")
    url = f"sqlite:///{base}/data.db"
    rows.apply(SqlSink(url, "t", staging=base / "staging", durable=durable), uid="table")
    store = CheckpointStore(storage_at(base / STORE, durable=durable), sleep=lambda seconds: None)
    LocalRuntime(store, checkpoint_rows=2, max_restarts=0).run(flow)


def recorded(base: Path) -> list[Call]:
    """Run the job in a separate process and return its calls."""
    return traced(base, "tests.crashes.crash_sinks", str(base))


class SinkJudge:
    """Judges what crashes have left. Trees that it has seen are not judged again."""

    def __init__(self, workspace: Path) -> None:
        self._place = workspace / "left"
        self._known: dict[tuple[object, ...], str] = {}
        self._files: dict[str, bytes] = {}
        self.states = 0

    @property
    def judged(self) -> int:
        """How many different trees were judged."""
        return len(self._known)

    def learn(self, tree: Tree) -> None:
        """Learn from a tree which bytes committed files must have."""
        for path, data in tree.items():
            if path.startswith("out/part-") and data is not None:
                self._files[path] = data

    def problem(self, tree: Tree) -> str:
        """Return what is wrong with a tree; empty if nothing is."""
        self.states += 1
        # Files with the name of an unfinished file are removed unread, so their bytes do not count.
        key = tuple(sorted((path, b"" if UNFINISHED.search(path) else data) for path, data in tree.items()))
        if key not in self._known:
            self._known[key] = self._look(tree)
        return self._known[key]

    def _look(self, tree: Tree) -> str:
        for path, data in tree.items():
            if path.startswith("out/part-") and data != self._files[path]:
                return f"{path} is seen and torn"
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        put(tree, self._place)
        try:
            run(self._place, durable=False)
            # What a crashed attempt prepared, and what came back from published checkpoints, is
            # removed once these have expired.
            CheckpointStore(storage_at(self._place / STORE, durable=False)).expire(1)
            run(self._place, durable=False)
            return self._differs()
        except (CheckpointError, OSError, pa.ArrowException, sqlite3.Error) as error:
            return f"the job cannot be run again, or its output not be read: {error}"

    def _differs(self) -> str:
        files = [n for path in (self._place / "out").glob("part-*") for n in pq.read_table(path)["n"].to_pylist()]
        connection = sqlite3.connect(self._place / "data.db")
        table = [n for (n,) in connection.execute("SELECT n FROM t")]
        connection.close()
        for what, found in (("files", files), ("table", table)):
            if sorted(found) != [*ROWS]:
                return f"the {what} hold {sorted(found)}"
        left = [path for folder in ("out/.pending", "staging") for path in (self._place / folder).rglob("*.prepared")]
        return f"prepared output is left behind: {left[0].name}" if left else ""


class SinkRecording:
    """The job, run once under a recorder: the disk before it, and its calls."""

    def __init__(self, workspace: Path) -> None:
        self.base = workspace / "base"
        self.base.mkdir()
        self.workspace = workspace
        self.disk = Disk(self.base)
        self.judge = SinkJudge(workspace)
        self.calls = recorded(self.base)

    def problems(
        self,
        calls: Sequence[Call] | None = None,
        disk: Disk | None = None,
        *,
        removals: bool = False,
        stop: bool = False,
    ) -> list[str]:
        """Return what is wrong after a crash at any of these calls on a disk.

        By default: the recorded calls, on the disk before them. ``removals``: look only after a
        sink has removed something, and at the end. ``stop`` at the first problem.
        """
        calls, disk = calls or self.calls, copy.deepcopy(disk or self.disk)
        learning, draw, found = copy.deepcopy(disk), random.Random(SEED), []
        self.judge.learn(learning.look())
        offset = disk.number
        for call in calls:
            learning.apply(call._replace(covers=call.covers + offset))
            self.judge.learn(learning.look())
        for number, call in enumerate([Call("mark", ""), *calls]):
            disk.apply(call._replace(covers=call.covers + offset + 1))
            removes = call.verb == "unlink" and not call.path.startswith(STORE)
            if (stop and found) or (removals and not removes and number < len(calls)):
                continue
            told = set()
            for kind, tree in disk.crashes(draw):
                problem = self.judge.problem(tree)
                if problem and kind not in told:
                    told.add(kind)
                    found.append(f"{kind} after call {number} ({call.verb} {call.path}): {problem}")
        return found

    def without(self, path: str) -> list[Call]:
        """Return the calls without the syncs of paths that a pattern matches in full."""
        return [
            Call("mark", "") if call.verb == "sync" and re.fullmatch(path, call.path) else call for call in self.calls
        ]

    def moments(self) -> list[int]:
        """Return after how many calls the first run has done something that the second relies on: a
        folder, a link, the end of a journal.
        """
        return [
            number + 1
            for number, call in enumerate(self.calls)
            if not call.path.startswith("run")
            and (call.verb in ("mkdir", "link") or (call.verb, call.path) == ("unlink", "data.db-journal"))
        ]

    def second_run(self, died_after: int) -> list[str]:
        """Let the first run die after ``died_after`` calls, run a second on what is visible then,
        and return what is wrong if the power fails.
        """
        disk = copy.deepcopy(self.disk)
        for call in self.calls[:died_after]:
            disk.apply(call)
        base = self.workspace / f"second-{died_after}"
        base.mkdir()
        put(disk.look(), base)
        found = self.problems(recorded(base), disk, removals=True)
        shutil.rmtree(base)
        return [f"death after call {died_after}, then {problem}" for problem in found]


if __name__ == "__main__":
    run(Path(sys.argv[1]))
