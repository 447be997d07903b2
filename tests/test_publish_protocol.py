"""The publication protocol, one test per counter-example of the model that it was checked with.

Every test named ``f1`` … ``f17`` is the interleaving by which a protocol without one rule loses or repeats output, or
deletes what is needed. At the end of each the world is checked: one history, every checkpoint of it whole, every interval
in the output exactly once. :func:`test_the_rule_is_what_holds` takes the rule away and sees the same test fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stateformat import paths as layout, store
from stateformat.errors import (
    CheckpointError,
    CheckpointExpired,
    DamagedCheckpoint,
    ErrorKind,
    InvalidInput,
    JobMismatch,
    NotFound,
    OutcomeUnknown,
    PublishConflict,
    StorageError,
)
from stateformat.history import records as history, retention
from stateformat.model import CheckpointId, CheckpointKind
from stateformat.publication import CommitPermit, pending, protocol as publication
from stateformat.publication.protocol import MOVES, Observation
from stateformat.reading import Checkpoint, load_manifest, load_record
from stateformat.store import CheckpointStore
from tests.stepping import (
    GRAPH,
    JOB,
    STATES,
    Do,
    Driver,
    Request,
    Run,
    Sink,
    Step,
    World,
    any_order,
    contents,
    explore,
    whole,
)


def overtaken(driver: Driver, *, published: bool = False) -> PublishConflict:
    """The error that a driver ends with when others have gone on: never a permit."""
    error = driver.fail()
    assert isinstance(error, PublishConflict), repr(error)
    assert (error.kind, error.details["published"]) == (ErrorKind.OVERTAKEN, published)
    return error


def lost(driver: Driver) -> PublishConflict:
    error = driver.fail()
    assert isinstance(error, PublishConflict), repr(error)
    assert (error.kind, error.details["published"]) == (ErrorKind.PUBLISH_LOST, False)
    return error


def republish(storage: Any, permit: CommitPermit, kind: CheckpointKind = CheckpointKind.RESCALE) -> CommitPermit:
    """What a rescale does to the history: a child of the newest with the same content, from metadata alone."""
    found = CheckpointStore(storage, sleep=lambda seconds: None).begin(
        job_id=JOB, graph=GRAPH, states=STATES, parent=permit, kind=kind, source=permit.ref
    )
    found.add_handles(permit.checkpoint().manifest.full())
    return found.publish()


# --- begin -----------------------------------------------------------------------------------------------------------


def test_f1_begin_does_not_list_to_choose_a_parent() -> None:
    with World() as world:
        world.publisher("A").finish()
        # B still computes from nothing. It begins only now, when a newest is there that it never had.
        b = world.publisher("B")
        lost(b)
        assert not [
            line for line in b.trace[: b.trace.index(next(x for x in b.trace if "create" in x))] if "list" in line
        ]
        world.check()


def test_f1_a_running_job_does_not_undo_a_rescale() -> None:
    with World() as world:
        run = world.run().publish()
        assert run.permit is not None
        republish(world.storage, run.permit)
        with pytest.raises(PublishConflict) as caught:
            run.publish()
        assert caught.value.kind is ErrorKind.PUBLISH_LOST
        assert caught.value.details["newest"] == 2
        world.check()


def test_the_first_of_two_first_checkpoints_wins() -> None:
    with World() as world:
        a, b = world.publisher("A"), world.publisher("B")
        b.until("create")
        a.finish()
        lost(b)
        world.check()


# --- permit ----------------------------------------------------------------------------------------------------------


def test_f2_reading_back_ours_is_no_permit() -> None:
    with World() as world:
        b = world.publisher("B").until("create")
        world.run().publish().publish()
        world.expire()
        b.step(Do.LOSE)
        assert b.stands_at("read", "checkpoints/")
        overtaken(b)
        assert world.ids() == [2], "the stray is withdrawn"
        world.check()


def test_f14_a_torn_listing_is_no_permit() -> None:
    with World() as world:
        b = world.publisher("B").until("create")
        run = world.run().publish().publish()
        world.expire()
        b.step().until("list", "checkpoints/")
        # While B's scan goes on, 3 is created behind it and 2 deleted before it.
        run.publish()
        world.expire()
        b.step(hide=[layout.record_path(CheckpointId(3))])
        overtaken(b)
        world.check()


def test_a_permit_comes_only_from_publishing_and_starting() -> None:
    with World() as world:
        run = world.run().publish()
        assert run.permit is not None
        with pytest.raises(InvalidInput, match="made by nobody else"):
            CommitPermit(run.permit.record, world.storage)
        again = world.store.start(JOB)
        assert again is not None
        assert again.ref == run.permit.ref


@pytest.mark.parametrize("answer", [Do.LOSE, Do.DROP, Do.REFUSE])
def test_a_lost_answer_and_a_conflict_that_is_none_end_in_one_permit(answer: Do) -> None:
    with World() as world:
        run = world.publisher("A").until("create").step(answer).finish()
        assert run.permit.ref.checkpoint_id == 1
        assert world.attempts() == {1: run.permit.ref.attempt_id}
        world.check()


@pytest.mark.parametrize("verb", ["read", "list", "delete"])
def test_requests_that_fail_are_tried_again(verb: str) -> None:
    with World() as world:
        b = world.publisher("B").until("create")
        world.run().publish().publish()
        world.expire()
        b.step(Do.LOSE).until(verb).step(Do.DROP)
        overtaken(b)
        assert world.ids() == [2]
        world.check()


def test_a_storage_that_stays_silent_ends_in_unknown_and_a_restart_reads_the_truth() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step(Do.LOSE)
        while not a.done:
            a.step(Do.DROP)
        assert isinstance(a.error, OutcomeUnknown)
        assert a.error.details["checkpoint_id"] == 1
        assert world.sink.outputs == []
        world.restarter("B").finish()
        assert world.sink.outputs == [1], "the record is there, so its output is committed by whoever restarts"
        world.check()


def test_a_refusal_of_the_first_create_is_told_at_once_and_nothing_is_published() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step(Do.FORBID)
        assert a.done, "no request follows"
        assert isinstance(a.error, StorageError)
        assert a.error.kind is ErrorKind.STORAGE_REFUSED
        assert str(a.error).startswith("checkpoint 1 was not published: not permitted")
        assert (world.ids(), world.sink.outputs) == ([], [])
        world.restarter("B", publish=1).finish()
        world.check()


@pytest.mark.parametrize("before", [Do.DROP, Do.REFUSE, Do.LATE])
def test_a_refusal_after_a_try_whose_answer_was_lost_says_nothing_of_that_try(before: Do) -> None:
    with World() as world:
        a = world.publisher("A").until("create").step(before).until("create").step(Do.FORBID)
        while not a.done:
            a.step(Do.FORBID if a.stands_at("create") else Do.IT)
        assert isinstance(a.error, OutcomeUnknown)
        assert "not permitted" in str(a.error)
        a.land()
        assert world.ids() == ([1] if before is Do.LATE else [])
        world.restarter("B", publish=1).finish()
        world.check()


def test_a_try_that_lands_after_a_later_one_was_refused_has_published() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step(Do.LATE).until("create").step(Do.FORBID)
        a.land()
        assert a.finish().permit.ref.checkpoint_id == 1
        world.check()


def test_every_create_of_a_publication_has_the_same_bytes() -> None:
    with World() as world:
        written = []
        inner = world.storage.create

        def spy(path: str, data: bytes) -> Any:
            written.append((path, data))
            return inner(path, data)

        world.storage.create = spy  # type: ignore[method-assign]
        world.publisher("A").until("create").step(Do.DROP).until("create").step(Do.REFUSE).finish()
        a = world.publisher("B", world.store.start(JOB), interval=1).until("create").step(Do.LATE)
        a.finish()
        a.land()
        assert len(written) == 3
        assert len(set(written)) == 2, "one content per name"
        world.check()


# --- overtaken -------------------------------------------------------------------------------------------------------


def test_f8_the_overtaken_does_not_remove_what_others_have_gone_on_from() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step()
        world.restarter("B", publish=1).finish()
        first = world.attempts()[1]
        error = overtaken(a, published=True)
        assert "gone on from it" in str(error)
        assert world.attempts()[1] == first
        assert [record.checkpoint_id for record in world.store.history()] == [2, 1]
        world.check()


def test_a_child_that_names_another_attempt_is_not_ours() -> None:
    with World() as world:
        b = world.publisher("B").until("create")
        world.run().publish().publish()
        world.expire()
        b.step()
        overtaken(b)
        assert f"delete {layout.record_path(CheckpointId(1))}: IT" in b.trace
        assert world.ids() == [2]


def test_a_child_that_cannot_be_read_may_be_ours_so_the_record_stays() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step()
        world.restarter("B", publish=1).finish()
        path = layout.record_path(CheckpointId(2))
        data = world.storage.read(path).to_pybytes()
        world.storage.delete([path])
        world.storage.create(path, data.replace(b'"job"', b'"jab"'))
        error = a.fail()
        assert isinstance(error, PublishConflict)
        assert world.ids() == [1, 2]


def test_the_overtaken_that_crashes_before_it_removes_leaves_a_stray() -> None:
    with World() as world:
        b = world.publisher("B").until("create")
        run = world.run().publish().publish()
        world.expire()
        b.until("delete").kill()
        assert world.ids() == [1, 2]
        assert [ref.checkpoint_id for ref in world.store.strays()] == [1]
        run.publish()
        world.expire(keep=1)
        assert world.ids() == [3]
        assert world.store.strays() == []
        world.check()


# --- absent ----------------------------------------------------------------------------------------------------------


def test_f12_absence_after_expiry_is_not_a_reason_to_try_again() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step(Do.LOSE)
        world.restarter("B", publish=1).finish()
        world.expire()
        lost(a)
        assert world.ids() == [2]
        world.check()


def test_a_create_that_lands_between_reading_back_and_listing_is_no_rivals() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step(Do.LATE).until("list")
        a.land()
        assert a.finish().permit.ref.checkpoint_id == 1
        assert world.ids() == [1]
        world.check()


def test_f16_a_create_that_lands_late_touches_neither_newest_nor_permits_nor_output() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step(Do.LATE)
        run = a.finish()
        run = Run(world.storage, world.sink, run.permit)
        run.interval = 1
        run.publish(full=True)
        reader = Checkpoint(world.storage, load_record(world.storage, CheckpointId(1)))
        c = world.restarter("C").until("read", "manifests/")
        run.publish(full=True)
        world.expire()
        a.land()
        assert world.ids() == [1, 3]
        assert c.finish().permit.ref.checkpoint_id == 3
        # The old id looks damaged until the next expire; garbage is not collected meanwhile, for the stray may need it.
        with pytest.raises(DamagedCheckpoint):
            load_manifest(world.storage, reader.record)
        assert world.store.collect_garbage(delete=True).stopped is not None
        assert world.expire().stopped is None
        assert world.ids() == [3]
        world.check()


def test_f16_a_restart_that_misses_an_object_lists_again_before_it_calls_that_damage() -> None:
    with World() as world:
        a = world.publisher("A").until("create").step(Do.LATE)
        run = a.finish()
        c = world.restarter("C").until("read", "manifests/")
        Run(world.storage, world.sink, run.permit)
        world.restarter("B", publish=1).finish()
        world.expire()
        a.land()
        assert c.finish().permit.ref.checkpoint_id == 2
        assert world.expire().stopped is None
        world.check()


# --- newest ----------------------------------------------------------------------------------------------------------


def test_f3_a_restart_lists_again_after_it_has_read() -> None:
    with World() as world:
        run = world.run().publish()
        b = world.publisher("B").until("write", "manifests/")
        c = world.restarter("C").until("read", "checkpoints/")
        run.publish()
        world.expire()
        b.until("create").step()
        found = c.finish()
        assert found.permit.ref == run.permit.ref if run.permit else False
        overtaken(b)
        world.check()


def test_f3b_a_restart_beside_a_rescale_lists_again_too() -> None:
    with World() as world:
        run = world.run().publish()
        b = world.publisher("B").until("write", "manifests/")
        c = world.restarter("C").until("read", "checkpoints/")
        assert run.permit is not None
        republish(world.storage, run.permit)
        world.expire()
        b.until("create").step()
        assert c.finish().permit.ref.checkpoint_id == 2
        overtaken(b)
        world.check()


def test_a_restart_never_falls_back_to_an_older_checkpoint() -> None:
    with World() as world:
        world.run().publish().publish()
        path = layout.record_path(CheckpointId(2))
        data = world.storage.read(path).to_pybytes()
        world.storage.delete([path])
        world.storage.create(path, data.replace(b'"job"', b'"jab"'))
        with pytest.raises(DamagedCheckpoint, match="00002"):
            world.store.start(JOB)


def test_a_history_that_will_not_hold_still_is_given_up_with_a_sentence() -> None:
    with World() as world:
        run = world.run().publish()
        c = world.restarter("C")
        while not c.done:
            if c.stands_at("read", "checkpoints/"):
                run.publish()
            c.step()
        assert isinstance(c.error, StorageError)
        assert c.error.kind is ErrorKind.HISTORY_UNSTABLE
        world.check()


# --- strays ----------------------------------------------------------------------------------------------------------


def with_stray(world: World) -> Run:
    """1 and 2 were published and 1 has expired; then B, which has died since, has created 1 with content of its own."""
    b = world.publisher("B").until("write", "manifests/")
    run = world.run().publish().publish()
    world.expire()
    b.until("create").step().kill()
    assert world.ids() == [1, 2]
    return run


def test_f10_a_stray_is_no_checkpoint_for_anyone() -> None:
    with World() as world:
        run = with_stray(world)
        assert [record.checkpoint_id for record in world.store.history()] == [2]
        assert [tuple(ref) for ref in world.store.strays()] == [(1, world.attempts()[1])]
        with pytest.raises(NotFound, match="stray"):
            world.store.open(1)
        # Retention counts ids, not records: a stray is not one of those to keep.
        run.publish()
        world.expire(keep=2)
        assert world.ids() == [2, 3]
        world.check()


def test_f13_nobody_rolls_back_to_a_stray() -> None:
    with World() as world:
        with_stray(world)
        with pytest.raises(NotFound, match="stray"):
            world.store.rollback(1)
        assert world.ids() == [1, 2]
        world.check()


# --- readers ---------------------------------------------------------------------------------------------------------


def test_f9_a_reader_of_an_expired_checkpoint_is_not_told_of_damage() -> None:
    with World() as world:
        run = world.run().publish()
        b = world.publisher("B").until("create")
        reader = world.driver("reader", lambda storage: CheckpointStore(storage).open(1).manifest)
        reader.until("read", "manifests/")
        run.publish()
        world.expire()
        b.step()
        error = reader.fail()
        assert isinstance(error, CheckpointExpired)
        overtaken(b)
        world.check()


def test_a_missing_object_of_a_checkpoint_that_stands_is_damage() -> None:
    with World() as world:
        run = world.run().publish()
        assert run.permit is not None
        world.storage.delete([run.permit.record.manifest.path])
        with pytest.raises(DamagedCheckpoint) as caught:
            _ = world.store.open().manifest
        assert caught.value.kind is ErrorKind.OBJECT_MISSING


# --- sinks -----------------------------------------------------------------------------------------------------------


def test_f6_a_committable_is_committed_under_the_attempt_that_prepared_it() -> None:
    with World() as world:
        run = world.run().publish()
        assert run.permit is not None
        republish(world.storage, run.permit)
        assert world.run().permit is not None
        assert world.sink.outputs == [1]
        world.check()


def test_f6b_what_is_carried_and_committed_late_is_committed_once() -> None:
    with World() as world:
        slow = world.run()
        slow.sink_is_down = True
        slow.publish()
        successor = Run(world.storage, world.sink, sink_is_down=True).restart()
        assert world.sink.outputs == []
        successor.sink_is_down = False
        successor.publish()
        slow.sink_is_down = False
        slow.commit()
        assert sorted(world.sink.outputs) == [1, 2]
        world.check()


def test_f11_a_restart_does_not_clean_up_what_a_slow_attempt_is_about_to_commit() -> None:
    with World() as world:
        run = world.run().publish()
        a = world.publisher("A", run.permit, interval=1).until("write", "manifests/")
        world.restarter("B", clean_up=True).finish()
        a.finish()
        assert sorted(world.sink.outputs) == [1, 2]
        # Once something newer is there, what never became part of the history goes.
        dead = world.publisher("D", run.permit, interval=1)
        dead.kill()
        assert len(world.sink.prepared) == 3
        world.restarter("C", clean_up=True).finish()
        assert len(world.sink.prepared) == 2
        world.check()


# --- expire and garbage ----------------------------------------------------------------------------------------------


def test_f4_gc_that_misses_the_newest_it_listed_starts_over() -> None:
    with World() as world:
        run = world.run().publish()
        gc = world.driver("gc", lambda storage: CheckpointStore(storage).collect_garbage(delete=True))
        gc.until("read", "checkpoints/")
        run.publish().publish()
        world.expire()
        assert world.ids() == [3]
        assert gc.finish().newest == 3
        world.check()


def test_f4b_gc_that_reads_a_stray_in_the_place_of_the_newest_starts_over() -> None:
    with World() as world:
        run = world.run().publish()
        b = world.publisher("B").until("write", "manifests/")
        gc = world.driver("gc", lambda storage: CheckpointStore(storage).collect_garbage(delete=True))
        gc.until("read", "checkpoints/")
        run.publish()
        world.expire()
        b.until("create").step()
        assert gc.finish().newest == 2
        overtaken(b)
        world.check()


@pytest.mark.parametrize("steps", range(20))
def test_f5_expire_removes_all_doomed_records_before_the_first_object(steps: int) -> None:
    with World() as world:
        # 2 lies on top of the base of 1; 3 is whole.
        world.run().publish().publish().publish(full=True)
        expire = world.driver("expire", lambda storage: CheckpointStore(storage).expire(1))
        for _ in range(steps):
            if not expire.done:
                expire.step()
        expire.kill()
        for checkpoint_id in world.ids():
            checkpoint = Checkpoint(world.storage, load_record(world.storage, CheckpointId(checkpoint_id)))
            whole(checkpoint)
        world.check()


def test_f7_a_rollback_whose_source_expires_gives_up() -> None:
    with World() as world:
        world.run().publish().publish(full=True)
        rollback = world.driver("rollback", lambda storage: CheckpointStore(storage).rollback(1))
        rollback.until("write", "manifests/")
        world.expire()
        error = rollback.fail()
        assert isinstance(error, CheckpointExpired)
        assert world.ids() == [2]
        world.check()


def test_f7_a_rollback_that_has_looked_is_safe_from_expire() -> None:
    with World() as world:
        world.run().publish().publish(full=True)
        rollback = world.driver("rollback", lambda storage: CheckpointStore(storage).rollback(1))
        rollback.until("create")
        world.expire()
        permit = rollback.finish()
        assert permit.record.kind is CheckpointKind.ROLLBACK
        assert permit.record.parent.checkpoint_id == 2
        assert contents(permit.checkpoint())["position"] == [{"interval": 1}]
        world.check(rolled_back=True)


def test_f15_gc_that_misses_the_source_of_a_rollback_starts_over() -> None:
    with World() as world:
        world.run().publish().publish(full=True)
        gc = world.driver("gc", lambda storage: CheckpointStore(storage).collect_garbage(delete=True))
        gc.until("read", "checkpoints/")
        world.store.rollback(1)
        world.expire(keep=2)
        assert world.ids() == [2, 3]
        gc.finish()
        world.check(rolled_back=True)


def test_f17_gc_that_reads_a_stray_in_the_place_of_a_source_starts_over() -> None:
    with World() as world:
        run = world.run().publish()
        b = world.publisher("B").until("write", "manifests/")
        run.publish(full=True)
        gc = world.driver("gc", lambda storage: CheckpointStore(storage).collect_garbage(delete=True))
        gc.until("read", "checkpoints/")
        world.store.rollback(1)
        world.expire(keep=2)
        b.until("create").step()
        assert world.ids() == [1, 2, 3]
        gc.finish()
        overtaken(b)
        world.check(rolled_back=True)


def test_gc_without_a_newest_ends_without_deleting() -> None:
    with World() as world:
        world.publisher("A").until("create").kill()
        found = world.store.collect_garbage(delete=True)
        assert found.stopped is not None
        assert len(world.storage.list("")) == 2, "a segment and a manifest, of an attempt that may still publish"


def test_gc_never_touches_what_lies_above_the_newest() -> None:
    with World() as world:
        run = world.run().publish()
        a = world.publisher("A", run.permit, interval=1).until("create")
        world.store.collect_garbage(delete=True)
        a.finish()
        world.check()


def test_gc_ends_without_deleting_where_a_record_stands_and_its_manifest_does_not() -> None:
    with World() as world:
        run = world.run().publish().publish(full=True)
        world.publisher("dead", run.permit, interval=2).until("create").kill()
        run.publish(full=True)
        before = world.storage.list("segments/")
        world.storage.delete([load_record(world.storage, CheckpointId(1)).manifest.path])
        found = world.store.collect_garbage(delete=True)
        assert "manifests/00000000000000000001" in str(found.stopped)
        assert world.storage.list("segments/") == before


# --- not counter-examples --------------------------------------------------------------------------------------------


def test_a_creator_that_crashes_before_it_lists_has_published() -> None:
    with World() as world:
        world.publisher("A").until("create").step(Do.KILL_AFTER)
        assert world.sink.outputs == []
        world.restarter("B", publish=1).finish()
        assert sorted(world.sink.outputs) == [1, 2]
        world.check()


def test_expiry_of_the_parent_of_a_slow_attempt_costs_only_that_attempt() -> None:
    with World() as world:
        run = world.run().publish()
        slow = world.publisher("slow", run.permit, interval=1).until("create")
        world.restarter("B", publish=2).finish()
        world.expire()
        overtaken(slow)
        world.check()


def test_an_attempt_whose_parent_has_expired_before_it_was_read_is_told_that_it_was_overtaken() -> None:
    with World() as world:
        world.run().publish()
        permit = world.store.start(JOB)
        world.restarter("B", publish=2).finish()
        world.expire()
        assert permit is not None
        overtaken(world.publisher("slow", permit, interval=1))
        world.check()


def test_another_jobs_store_is_refused_and_stays_as_it_is() -> None:
    with World() as world:
        run = world.run().publish()
        before = world.storage.list("checkpoints/")
        with pytest.raises(JobMismatch):
            world.store.start("another")
        with pytest.raises(JobMismatch):
            world.store.begin(job_id="another", graph=GRAPH, states=STATES, parent=run.permit)
        stranger = world.store.begin(job_id="another", graph=GRAPH, states=(), parent=None)
        with pytest.raises(JobMismatch, match="'job'"):
            stranger.publish()
        assert world.storage.list("checkpoints/") == before
        world.check()


# --- every order -----------------------------------------------------------------------------------------------------


def protocol_only(request: Request) -> bool:
    """Only requests about records: what else a publisher does is named by its own attempt and meets nobody's."""
    return request.path.startswith(layout.RECORDS)


def permits(world: World) -> list[CommitPermit]:
    found = [driver.result for driver in world.drivers if driver.error is None]
    return [one.permit if isinstance(one, Run) else one for one in found]


def check_permits(world: World) -> None:
    found = [permit.ref.checkpoint_id for permit in permits(world)]
    assert len(found) == len(set(found)), f"two permits for one id: {found}"


def test_two_first_publishers_in_every_order() -> None:
    def make() -> World:
        world = World(stops=protocol_only)
        world.publisher("A")
        world.publisher("B")
        return world

    count = 0
    for world, _ in explore(make):
        count += 1
        assert len(permits(world)) == 1
        assert [type(driver.error) for driver in world.drivers if driver.error] == [PublishConflict]
        world.check()
    assert count >= 2


def faulty(world: World, taken: list[Step]) -> list[Step]:
    """Every order, and at most one fault, of either driver, at its create."""
    found = any_order(world, taken)
    if any(step.do is not Do.IT for step in taken):
        return found
    faults = (Do.LOSE, Do.DROP, Do.REFUSE, Do.FORBID, Do.KILL_AFTER)
    return found + [replace(step, do=do) for step in found if step.request.verb == "create" for do in faults]


def test_two_publishers_on_one_permit_in_every_order_with_a_fault_at_every_create() -> None:
    def make() -> World:
        world = World(stops=protocol_only)
        run = world.run().publish()
        world.publisher("A", run.permit, interval=1)
        world.publisher("B", run.permit, interval=1)
        return world

    count = 0
    for world, _ in explore(make, faulty):
        count += 1
        check_permits(world)
        world.check()
    assert count > 20


def live_and_expiring(world: World, run: Run) -> Callable[[Any], Run]:
    """A run that goes on from what another has published, and then removes all records but its own."""

    def body(storage: Any) -> Run:
        mine = Run(storage, world.sink, run.permit)
        mine.interval = run.interval
        mine.publish()
        retention.remove_records(storage, storage.list(layout.RECORDS)[:-1])
        return mine

    return body


def test_a_zombie_beside_a_run_that_publishes_and_expires_in_every_order_with_a_fault_at_every_create() -> None:
    def make() -> World:
        world = World(stops=protocol_only)
        run = world.run().publish()
        world.publisher("zombie")
        world.driver("live", live_and_expiring(world, run))
        return world

    count = 0
    for world, _ in explore(make, faulty):
        count += 1
        check_permits(world)
        assert world.drivers[0].error is not None
        world.check()
    assert count > 30


@pytest.mark.truth
def test_a_restart_beside_a_zombie_and_a_run_that_expires_in_every_order() -> None:
    def make() -> World:
        world = World(stops=protocol_only)
        run = world.run().publish()
        world.publisher("zombie")
        world.driver("live", live_and_expiring(world, run))
        world.restarter("restart")
        return world

    count = 0
    for world, _ in explore(make):
        count += 1
        world.check()
    assert count > 30


def records_and_manifests(request: Request) -> bool:
    return request.path.startswith((layout.RECORDS, layout.MANIFESTS))


def test_a_rollback_beside_expire_in_every_order() -> None:
    def make() -> World:
        world = World(stops=records_and_manifests)
        world.run().publish().publish(full=True)
        world.driver("rollback", lambda storage: CheckpointStore(storage).rollback(1))
        world.driver("expire", lambda storage: CheckpointStore(storage).expire(1))
        return world

    ends = set()
    for world, _ in explore(make):
        rollback, expire = world.drivers
        ends.add(type(rollback.error))
        assert expire.error is None
        world.check(rolled_back=rollback.error is None)
    assert ends == {type(None), CheckpointExpired}


def test_a_run_that_expires_beside_gc_in_every_order() -> None:
    def make() -> World:
        world = World(stops=records_and_manifests)
        run = world.run().publish()
        world.driver("gc", lambda storage: CheckpointStore(storage).collect_garbage(delete=True))
        world.driver("live", live_and_expiring(world, run))
        return world

    count = 0
    for world, _ in explore(make):
        count += 1
        assert [driver.error for driver in world.drivers] == [None, None]
        world.check()
    assert count > 10


def test_a_restart_beside_a_publisher_in_every_order() -> None:
    def make() -> World:
        world = World(stops=protocol_only)
        run = world.run().publish()
        world.publisher("A", run.permit, interval=1)
        world.restarter("B", publish=1)
        return world

    count = 0
    for world, _ in explore(make):
        count += 1
        check_permits(world)
        newest, *others = [record.checkpoint_id for record in world.store.history()]
        assert others == list(range(newest - 1, 0, -1)), "nobody has expired anything"
        world.check()
    assert count > 5


@pytest.mark.parametrize("seed", range(40))
def test_three_runs_expire_and_gc_in_a_random_order_with_faults(seed: int) -> None:
    dice = random.Random(seed)
    with World() as world:
        for name in "ABC":
            world.restarter(name, publish=3)
        world.driver("expire", lambda storage: CheckpointStore(storage).expire(1))
        world.driver("gc", lambda storage: CheckpointStore(storage).collect_garbage(delete=True))
        while runnable := [driver for driver in world.drivers if not driver.done]:
            driver = dice.choice(runnable)
            # Long stretches of one driver, as well as fine interleavings.
            for _ in range(dice.choice((1, 1, 3, 12))):
                if driver.done or driver.request is None:
                    break
                do = Do.IT
                if driver.request.verb == "create" and dice.random() < 0.3:
                    do = dice.choice((Do.LOSE, Do.DROP, Do.REFUSE, Do.FORBID, Do.KILL, Do.KILL_AFTER))
                elif dice.random() < 0.01:
                    do = Do.KILL
                driver.step(do)
            if driver.done and driver.name in ("expire", "gc") and len(world.drivers) < 12:
                body = {"expire": lambda s: CheckpointStore(s).expire(1), "gc": lambda s: CheckpointStore(s).expire(2)}
                world.driver(driver.name, body[driver.name])
        for driver in world.drivers:
            assert isinstance(driver.error, None | PublishConflict | OutcomeUnknown | NotFound | StorageError) or (
                type(driver.error).__name__ == "Killed"
            ), repr(driver.error)
        world.check()


# --- the rules are what holds ----------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def without(at: publication.Step, saw: Observation, instead: publication.Step) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(MOVES, (at, saw), instead)


def begin_by_listing(patch: Patch) -> None:
    begin = CheckpointStore.begin
    patch.setattr(CheckpointStore, "begin", lambda self, **how: begin(self, **{**how, "parent": self.start(JOB)}))


def never_start_over(patch: Patch) -> None:
    patch.setattr(history, "same_newest", lambda before, after: True)


def pass_over_a_missing_newest(patch: Patch) -> None:
    never_start_over(patch)
    patch.setattr(retention, "check_expired", lambda checkpoint_id, newest: None)


def ignore_unpublished_manifests(patch: Patch) -> None:
    patch.setattr(retention, "manifests_under", lambda storage, checkpoint_id: [])


def ignore_both(patch: Patch) -> None:
    never_start_over(patch)
    ignore_unpublished_manifests(patch)


def do_not_look(patch: Patch) -> None:
    patch.setattr(pending, "record_exists", lambda storage, ref: True)


def link_by_id(patch: Patch) -> None:
    patch.setattr(history, "is_link", lambda found, parent: found.checkpoint_id == parent.checkpoint_id)


def commit_under_the_carrier(patch: Patch) -> None:
    patch.setattr(Sink, "key", lambda self, permit, item: permit.ref.attempt_id + str(item["interval"]))


def clean_up_everything(patch: Patch) -> None:
    patch.setattr(Sink, "may_go", lambda self, checkpoint_id, newest: True)


def expire_one_after_the_other(patch: Patch) -> None:
    def remove(storage: Any, records: Any) -> None:
        doomed = [load_record(storage, layout.record_id(item.path)) for item in records]
        newest = load_record(storage, layout.record_id(storage.list(layout.RECORDS)[-1].path))
        kept = set(retention.reachable(load_manifest(storage, newest).full())["path"].to_pylist())
        for record in doomed:
            named = retention.reachable(load_manifest(storage, record).full())["path"].to_pylist()
            storage.delete([layout.record_path(record.checkpoint_id), record.manifest.path])
            storage.delete([path for path in named if path not in kept])

    patch.setattr(retention, "remove_records", remove)


def test_f5_at_every_step() -> None:
    for steps in range(20):
        test_f5_expire_removes_all_doomed_records_before_the_first_object(steps)


@pytest.mark.parametrize(
    ("take_away", "scenario"),
    [
        pytest.param(begin_by_listing, test_f1_begin_does_not_list_to_choose_a_parent, id="F1-begin"),
        pytest.param(
            without(publication.Step.READ_BACK, Observation.OURS, publication.Step.PERMITTED),
            test_f2_reading_back_ours_is_no_permit,
            id="F2-permit",
        ),
        pytest.param(
            without(publication.Step.LIST, Observation.NONE_GREATER, publication.Step.PERMITTED),
            test_f14_a_torn_listing_is_no_permit,
            id="F14-permit",
        ),
        pytest.param(
            without(publication.Step.LIST, Observation.GREATER, publication.Step.WITHDRAW),
            test_f8_the_overtaken_does_not_remove_what_others_have_gone_on_from,
            id="F8-overtaken",
        ),
        pytest.param(
            without(publication.Step.LOOK, Observation.GREATER, publication.Step.CREATE_AGAIN),
            test_f12_absence_after_expiry_is_not_a_reason_to_try_again,
            id="F12-absent",
        ),
        pytest.param(
            without(publication.Step.LOOK, Observation.SAME, publication.Step.LOST),
            test_a_create_that_lands_between_reading_back_and_listing_is_no_rivals,
            id="F12-late",
        ),
        pytest.param(
            without(publication.Step.CREATE_AGAIN, Observation.REFUSED, publication.Step.REFUSED),
            test_a_try_that_lands_after_a_later_one_was_refused_has_published,
            id="refused-again",
        ),
        pytest.param(
            without(publication.Step.CREATE, Observation.REFUSED, publication.Step.READ_BACK),
            test_a_refusal_of_the_first_create_is_told_at_once_and_nothing_is_published,
            id="refused-first",
        ),
        pytest.param(never_start_over, test_f3_a_restart_lists_again_after_it_has_read, id="F3-newest"),
        pytest.param(never_start_over, test_f3b_a_restart_beside_a_rescale_lists_again_too, id="F3b-newest"),
        pytest.param(pass_over_a_missing_newest, test_f4_gc_that_misses_the_newest_it_listed_starts_over, id="F4-gc"),
        pytest.param(
            never_start_over, test_f4b_gc_that_reads_a_stray_in_the_place_of_the_newest_starts_over, id="F4b-gc"
        ),
        pytest.param(expire_one_after_the_other, test_f5_at_every_step, id="F5-expire"),
        pytest.param(
            commit_under_the_carrier,
            test_f6_a_committable_is_committed_under_the_attempt_that_prepared_it,
            id="F6-commit-key",
        ),
        pytest.param(
            commit_under_the_carrier,
            test_f6b_what_is_carried_and_committed_late_is_committed_once,
            id="F6b-commit-key",
        ),
        pytest.param(do_not_look, test_f7_a_rollback_whose_source_expires_gives_up, id="F7-rollback"),
        pytest.param(
            ignore_unpublished_manifests, test_f7_a_rollback_that_has_looked_is_safe_from_expire, id="F7-gc-newest+1"
        ),
        pytest.param(link_by_id, test_f10_a_stray_is_no_checkpoint_for_anyone, id="F10-stray"),
        pytest.param(link_by_id, test_f13_nobody_rolls_back_to_a_stray, id="F13-stray"),
        pytest.param(
            clean_up_everything,
            test_f11_a_restart_does_not_clean_up_what_a_slow_attempt_is_about_to_commit,
            id="F11-clean-up",
        ),
        pytest.param(ignore_both, test_f15_gc_that_misses_the_source_of_a_rollback_starts_over, id="F15-gc"),
        pytest.param(ignore_both, test_f17_gc_that_reads_a_stray_in_the_place_of_a_source_starts_over, id="F17-gc"),
    ],
)
def test_the_rule_is_what_holds(
    take_away: Callable[[Patch], None], scenario: Callable[[], None], monkeypatch: Patch
) -> None:
    scenario()
    take_away(monkeypatch)
    with pytest.raises((AssertionError, CheckpointError, FileNotFoundError, pytest.fail.Exception)):
        scenario()


def test_the_table_of_moves_is_complete_and_ends() -> None:
    steps = set(publication.Step) - publication.ENDS
    assert {at for at, _ in MOVES} == steps
    assert set(MOVES.values()) - {at for at, _ in MOVES} == publication.ENDS
    assert {saw for _, saw in MOVES} == set(Observation)
    assert store.CommitPermit is CommitPermit
