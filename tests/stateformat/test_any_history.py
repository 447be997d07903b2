"""Any history: whatever is published, lost, expired, collected, rolled back, copied and pinned, in
whatever order, a store holds what a few dictionaries say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import stateformat as sf
from stateformat import paths as layout
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointExpired, ErrorKind, InvalidInput, NotFound, PublishConflict
from stateformat.model import CheckpointKind
from stateformat.reading import StoreCheckpoint
from tests.stateformat.test_retention import everything, needed_by_hand
from tests.worlds.stepping import JOB, World, contents, whole
from tests.worlds.stores import refused

NAMES = st.sampled_from(["safe", "before-fix", "x"])
BACK = st.integers(0, 5)
"""How many ids behind the newest; one that is not there must be told from one that has expired."""


class AnyHistory(RuleBasedStateMachine):
    """One store, its job, and what the store must hold."""

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.run = self.world.run()
        self.held: dict[int, Any] = {}
        """What each checkpoint holds that has not expired."""
        self.parents: dict[int, int | None] = {}
        self.pins: dict[str, tuple[int, Any]] = {}
        self.overtaken = False
        """Whether the run holds what is no longer the newest."""
        self.rolled_back = False

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        with self.world as world:
            if self.held:
                world.store.collect_garbage(delete=True)
                rest = {path for path in everything(world.storage) if (layout.owner_id(path) or 0) <= max(self.held)}
                assert rest == needed_by_hand(world.storage)
            world.check(rolled_back=self.rolled_back)
            for name in self.pins:
                MemoryStorage.reset(f"{world.name}/savepoints/{name}")

    @property
    def newest(self) -> int:
        return max(self.held, default=0)

    def absent(self, checkpoint_id: int, call: Callable[[], Any]) -> None:
        """A checkpoint that has expired is told from one that never was."""
        if 0 < checkpoint_id < min(self.held):
            refused(CheckpointExpired, call, f"oldest that is left is {min(self.held)}")
        else:
            refused(NotFound, call, kind=ErrorKind.CHECKPOINT_NOT_FOUND)

    # ---- what a job does

    @rule(full=st.booleans())
    def publish(self, full: bool) -> None:
        if self.overtaken:
            refused(PublishConflict, lambda: self.run.publish(full=full))
            self.restart()
            return
        self.run.publish(full=full)
        assert self.run.permit is not None
        published = self.run.permit.ref.checkpoint_id
        assert published == self.newest + 1
        self.parents[published] = self.newest or None
        self.held[published] = contents(self.run.permit.checkpoint())

    @rule()
    def crash(self) -> None:
        """An attempt dies with all but its record written."""
        if not self.overtaken:
            self.world.publisher("dead", self.run.permit, interval=self.run.interval).until("create").kill()

    @rule()
    def restart(self) -> None:
        self.run, self.overtaken = self.world.run(), False
        assert (self.run.permit.ref.checkpoint_id if self.run.permit else 0) == self.newest

    # ---- what a user does

    @precondition(lambda self: self.held)
    @rule(keep=st.integers(1, 4))
    def expire(self, keep: int) -> None:
        before = everything(self.world.storage)
        plan = self.world.store.expire(keep, delete=False)
        assert everything(self.world.storage) == before, "a plan changes nothing"
        done = self.world.store.expire(keep)
        assert (plan.newest, plan.objects, plan.size_bytes) == (done.newest, done.objects, done.size_bytes)
        gone = [checkpoint_id for checkpoint_id in self.held if checkpoint_id <= self.newest - keep]
        assert [layout.record_id(item.path) for item in done.records] == gone
        assert before - everything(self.world.storage) == {item.path for item in done.objects}
        for checkpoint_id in gone:
            del self.held[checkpoint_id]

    @precondition(lambda self: self.held)
    @rule()
    def collect(self) -> None:
        self.world.store.collect_garbage(delete=True)

    @precondition(lambda self: self.held)
    @rule(back=BACK)
    def roll_back(self, back: int) -> None:
        wanted, newest = self.newest - back, self.newest
        if wanted == newest:
            refused(InvalidInput, lambda: self.world.store.rollback(wanted), "is the newest")
        elif wanted not in self.held:
            self.absent(wanted, lambda: self.world.store.rollback(wanted))
        else:
            record = self.world.store.rollback(wanted).record
            assert (record.checkpoint_id, record.kind) == (newest + 1, CheckpointKind.ROLLBACK)
            self.held[newest + 1], self.parents[newest + 1] = self.held[wanted], newest
            self.overtaken = self.rolled_back = True

    @precondition(lambda self: self.held)
    @rule(back=st.integers(-1, 5))
    def open_and_copy(self, back: int) -> None:
        wanted = self.newest - back
        if wanted not in self.held:
            self.absent(wanted, lambda: self.world.store.open(wanted))
            return
        name = f"copy-{uuid4().hex}"
        target = sf.CheckpointStore(MemoryStorage(name))
        record = self.world.store.copy(self.world.store.open(wanted), target)
        assert record.kind is CheckpointKind.SAVEPOINT
        assert whole(target.open()) == self.held[wanted]
        again = target.start(JOB)
        assert again is not None
        assert again.ref == self.world.store.open(wanted).record.ref
        MemoryStorage.reset(name)

    @precondition(lambda self: self.held)
    @rule(name=NAMES, back=BACK)
    def pin(self, name: str, back: int) -> None:
        wanted = self.newest - back
        pin = lambda: self.world.store.pin(wanted, name)  # noqa: E731
        if wanted not in self.held:
            self.absent(wanted, pin)
        elif name in self.pins and self.pins[name][0] != wanted:
            refused(InvalidInput, pin, "is taken", kind=ErrorKind.STORE_NOT_EMPTY)
        else:
            assert pin().checkpoint_id == wanted
            self.pins[name] = wanted, self.held[wanted]

    @rule(name=NAMES)
    def unpin(self, name: str) -> None:
        if name in self.pins:
            self.world.store.unpin(name)
            del self.pins[name]
        else:
            with pytest.raises(NotFound):
                self.world.store.unpin(name)

    # ---- what is always so

    @invariant()
    def the_store_holds_what_it_must(self) -> None:
        if not self.held:
            assert self.world.ids() == []
            return
        records = self.world.store.history()
        assert [record.checkpoint_id for record in records] == sorted(self.held, reverse=True)
        for record in records:
            assert (record.parent.checkpoint_id if record.parent else None) == self.parents[record.checkpoint_id]
            assert whole(StoreCheckpoint(self.world.storage, record)) == self.held[record.checkpoint_id]

    @invariant()
    def pins_stay_as_they_were(self) -> None:
        assert [one.name for one in self.world.store.pins()] == sorted(self.pins)
        for name, (checkpoint_id, held) in self.pins.items():
            pinned = sf.open(f"{self.world.store.url}@{name}").open()
            assert (pinned.id, pinned.record.kind) == (checkpoint_id, CheckpointKind.SAVEPOINT)
            assert whole(pinned) == held


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, report_multiple_bugs=False
)
