"""The publication protocol, one test per counter-example of the model that it was checked with.

Every test named ``f1`` … ``f17`` is the interleaving by which a protocol without one rule loses or
repeats output, or deletes what is needed. At the end of each the world is checked: one history,
every checkpoint of it whole, every interval in the output exactly once.
:func:`test_the_rule_is_what_holds` takes the rule away and sees the same test fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import stateformat as sf
from stateformat import paths as layout, store
from stateformat.history import records as history, retention
from stateformat.model import CheckpointId, CheckpointKind
from stateformat.publication import CommitPermit
from stateformat.publication.protocol import ENDS, MOVES, Observation, Step as Steps
from stateformat.reading import StoreCheckpoint, load_manifest, load_record
from stateformat.store import CheckpointStore
from tests.stateformat.publication_world import (
    Patch,
    Rule,
    Rules,
    do_not_look,
    instead,
    lost,
    orders,
    overtaken,
    records_and_manifests,
)
from tests.worlds.stepping import GRAPH, JOB, STATES, Do, Run, Sink, Step, World, any_order, contents, whole
from tests.worlds.stores import refused

rules = Rules()


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


def republish(storage: Any, permit: CommitPermit, kind: CheckpointKind = CheckpointKind.RESCALE) -> CommitPermit:
    """What a rescale does to the history: a child of the newest with the same content, from
    metadata alone.
    """
    found = CheckpointStore(storage, sleep=lambda seconds: None).begin(
        job_id=JOB, graph=GRAPH, states=STATES, parent=permit, kind=kind, source=permit.ref
    )
    found.add_handles(permit.checkpoint().manifest.full())
    return found.publish()


# --- begin ----------------------------------------------------------------------------------------


@rules("F1-begin", begin_by_listing)
def test_f1_begin_does_not_list_to_choose_a_parent(world: World) -> None:
    world.publisher("A").finish()
    # B still computes from nothing. It begins only now, when a newest is there that it never had.
    b = world.publisher("B")
    lost(b)
    assert not [line for line in b.trace[: b.trace.index(next(x for x in b.trace if "create" in x))] if "list" in line]
    world.check()


def test_f1_a_running_job_does_not_undo_a_rescale(world: World) -> None:
    run = world.run().publish()
    assert run.permit is not None
    republish(world.storage, run.permit)
    with pytest.raises(sf.PublishConflict) as caught:
        run.publish()
    assert caught.value.kind is sf.ErrorKind.PUBLISH_LOST
    assert caught.value.details["newest"] == 2
    world.check()


def test_the_first_of_two_first_checkpoints_wins(world: World) -> None:
    a, b = world.publisher("A"), world.publisher("B")
    b.until("create")
    a.finish()
    lost(b)
    world.check()


# --- permit ---------------------------------------------------------------------------------------


@rules("F2-permit", instead(Steps.READ_BACK, Observation.OURS, Steps.PERMITTED))
def test_f2_reading_back_ours_is_no_permit(world: World) -> None:
    b = world.publisher("B").until("create")
    world.run().publish().publish()
    world.expire()
    b.step(Do.LOSE)
    assert b.stands_at("read", "checkpoints/")
    overtaken(b)
    assert world.ids() == [2], "the stray is withdrawn"
    world.check()


@rules("F14-permit", instead(Steps.LIST, Observation.NONE_GREATER, Steps.PERMITTED))
def test_f14_a_torn_listing_is_no_permit(world: World) -> None:
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


def test_a_permit_comes_only_from_publishing_and_starting(world: World) -> None:
    run = world.run().publish()
    assert run.permit is not None
    refused(sf.InvalidInput, lambda: CommitPermit(run.permit.record, world.storage), "make a CommitPermit")
    again = world.store.start(JOB)
    assert again is not None
    assert again.ref == run.permit.ref


@pytest.mark.parametrize("answer", [Do.LOSE, Do.DROP, Do.REFUSE])
def test_a_lost_answer_and_a_conflict_that_is_none_end_in_one_permit(world: World, answer: Do) -> None:
    run = world.publisher("A").until("create").step(answer).finish()
    assert run.permit.ref.checkpoint_id == 1
    assert world.attempts() == {1: run.permit.ref.attempt_id}
    world.check()


@pytest.mark.parametrize("verb", ["read", "list", "delete"])
def test_requests_that_fail_are_tried_again(world: World, verb: str) -> None:
    b = world.publisher("B").until("create")
    world.run().publish().publish()
    world.expire()
    b.step(Do.LOSE).until(verb).step(Do.DROP)
    overtaken(b)
    assert world.ids() == [2]
    world.check()


def test_a_storage_that_stays_silent_ends_in_unknown_and_a_restart_reads_the_truth(world: World) -> None:
    a = world.publisher("A").until("create").step(Do.LOSE)
    while not a.done:
        a.step(Do.DROP)
    assert isinstance(a.error, sf.OutcomeUnknown)
    assert a.error.details["checkpoint_id"] == 1
    assert world.sink.outputs == []
    world.restarter("B").finish()
    assert world.sink.outputs == [1], "the record is there, so its output is committed by whoever restarts"
    world.check()


@rules("refused-first", instead(Steps.CREATE, Observation.REFUSED, Steps.READ_BACK))
def test_a_refusal_of_the_first_create_is_told_at_once_and_nothing_is_published(world: World) -> None:
    a = world.publisher("A").until("create").step(Do.FORBID)
    assert a.done, "no request follows"
    assert isinstance(a.error, sf.StorageError)
    assert a.error.kind is sf.ErrorKind.STORAGE_REFUSED
    assert str(a.error).startswith("checkpoint 1 was not published: not permitted")
    assert (world.ids(), world.sink.outputs) == ([], [])
    world.restarter("B", publish=1).finish()
    world.check()


@pytest.mark.parametrize("before", [Do.DROP, Do.REFUSE, Do.LATE])
def test_a_refusal_after_a_try_whose_answer_was_lost_says_nothing_of_that_try(world: World, before: Do) -> None:
    a = world.publisher("A").until("create").step(before).until("create").step(Do.FORBID)
    while not a.done:
        a.step(Do.FORBID if a.stands_at("create") else Do.IT)
    assert isinstance(a.error, sf.OutcomeUnknown)
    assert "not permitted" in str(a.error)
    a.land()
    assert world.ids() == ([1] if before is Do.LATE else [])
    world.restarter("B", publish=1).finish()
    world.check()


@rules("refused-again", instead(Steps.CREATE_AGAIN, Observation.REFUSED, Steps.REFUSED))
def test_a_try_that_lands_after_a_later_one_was_refused_has_published(world: World) -> None:
    a = world.publisher("A").until("create").step(Do.LATE).until("create").step(Do.FORBID)
    a.land()
    assert a.finish().permit.ref.checkpoint_id == 1
    world.check()


def test_every_create_of_a_publication_has_the_same_bytes(world: World) -> None:
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


# --- overtaken ------------------------------------------------------------------------------------


@rules("F8-overtaken", instead(Steps.LIST, Observation.GREATER, Steps.WITHDRAW))
def test_f8_the_overtaken_does_not_remove_what_others_have_gone_on_from(world: World) -> None:
    a = world.publisher("A").until("create").step()
    world.restarter("B", publish=1).finish()
    first = world.attempts()[1]
    error = overtaken(a, published=True)
    assert "gone on from it" in str(error)
    assert world.attempts()[1] == first
    assert [record.checkpoint_id for record in world.store.history()] == [2, 1]
    world.check()


def test_a_child_that_names_another_attempt_is_not_ours(world: World) -> None:
    b = world.publisher("B").until("create")
    world.run().publish().publish()
    world.expire()
    b.step()
    overtaken(b)
    assert f"delete {layout.record_path(CheckpointId(1))}: IT" in b.trace
    assert world.ids() == [2]


def test_a_child_that_cannot_be_read_may_be_ours_so_the_record_stays(world: World) -> None:
    a = world.publisher("A").until("create").step()
    world.restarter("B", publish=1).finish()
    path = layout.record_path(CheckpointId(2))
    data = world.storage.read(path).to_pybytes()
    world.storage.delete([path])
    world.storage.create(path, data.replace(b'"job"', b'"jab"'))
    error = a.fail()
    assert isinstance(error, sf.PublishConflict)
    assert world.ids() == [1, 2]


def test_the_overtaken_that_crashes_before_it_removes_leaves_a_stray(world: World) -> None:
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


# --- absent ---------------------------------------------------------------------------------------


@rules("F12-absent", instead(Steps.LOOK, Observation.GREATER, Steps.CREATE_AGAIN))
def test_f12_absence_after_expiry_is_not_a_reason_to_try_again(world: World) -> None:
    a = world.publisher("A").until("create").step(Do.LOSE)
    world.restarter("B", publish=1).finish()
    world.expire()
    lost(a)
    assert world.ids() == [2]
    world.check()


@rules("F12-late", instead(Steps.LOOK, Observation.SAME, Steps.LOST))
def test_a_create_that_lands_between_reading_back_and_listing_is_no_rivals(world: World) -> None:
    a = world.publisher("A").until("create").step(Do.LATE).until("list")
    a.land()
    assert a.finish().permit.ref.checkpoint_id == 1
    assert world.ids() == [1]
    world.check()


def test_f16_a_create_that_lands_late_touches_neither_newest_nor_permits_nor_output(world: World) -> None:
    a = world.publisher("A").until("create").step(Do.LATE)
    run = a.finish()
    run = Run(world.storage, world.sink, run.permit)
    run.interval = 1
    run.publish(full=True)
    reader = StoreCheckpoint(world.storage, load_record(world.storage, CheckpointId(1)))
    c = world.restarter("C").until("read", "manifests/")
    run.publish(full=True)
    world.expire()
    a.land()
    assert world.ids() == [1, 3]
    assert c.finish().permit.ref.checkpoint_id == 3
    # The old id looks damaged until the next expire; garbage is not collected meanwhile, for the
    # stray may need it.
    refused(sf.DamagedCheckpoint, lambda: load_manifest(world.storage, reader.record))
    assert world.store.collect_garbage(delete=True).stopped is not None
    assert world.expire().stopped is None
    assert world.ids() == [3]
    world.check()


def test_f16_a_restart_that_misses_an_object_lists_again_before_it_calls_that_damage(world: World) -> None:
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


# --- newest ---------------------------------------------------------------------------------------


def publish_again(world: World, run: Run) -> CommitPermit:
    permit = run.publish().permit
    assert permit is not None
    return permit


def rescale_over(world: World, run: Run) -> CommitPermit:
    assert run.permit is not None
    return republish(world.storage, run.permit)


@pytest.mark.parametrize("go_on", [publish_again, rescale_over])
def test_f3_a_restart_lists_again_after_it_has_read(world: World, go_on: Callable[..., CommitPermit]) -> None:
    run = world.run().publish()
    b = world.publisher("B").until("write", "manifests/")
    c = world.restarter("C").until("read", "checkpoints/")
    newest = go_on(world, run)
    world.expire()
    b.until("create").step()
    assert c.finish().permit.ref == newest.ref
    overtaken(b)
    world.check()


for name, go_on in (("F3-newest", publish_again), ("F3b-newest", rescale_over)):
    rules(name, never_start_over)(partial(test_f3_a_restart_lists_again_after_it_has_read, go_on=go_on))


def test_a_restart_never_falls_back_to_an_older_checkpoint(world: World) -> None:
    world.run().publish().publish()
    path = layout.record_path(CheckpointId(2))
    data = world.storage.read(path).to_pybytes()
    world.storage.delete([path])
    world.storage.create(path, data.replace(b'"job"', b'"jab"'))
    refused(sf.DamagedCheckpoint, lambda: world.store.start(JOB), "00002")


def test_a_history_that_will_not_hold_still_is_given_up_with_a_sentence(world: World) -> None:
    run = world.run().publish()
    c = world.restarter("C")
    while not c.done:
        if c.stands_at("read", "checkpoints/"):
            run.publish()
        c.step()
    assert isinstance(c.error, sf.StorageError)
    assert c.error.kind is sf.ErrorKind.HISTORY_UNSTABLE
    world.check()


# --- strays ---------------------------------------------------------------------------------------


def with_stray(world: World) -> Run:
    """1 and 2 were published and 1 has expired; then B, which has died since, has created 1 with
    content of its own.
    """
    b = world.publisher("B").until("write", "manifests/")
    run = world.run().publish().publish()
    world.expire()
    b.until("create").step().kill()
    assert world.ids() == [1, 2]
    return run


@rules("F10-stray", link_by_id)
def test_f10_a_stray_is_no_checkpoint_for_anyone(world: World) -> None:
    run = with_stray(world)
    assert [record.checkpoint_id for record in world.store.history()] == [2]
    assert [tuple(ref) for ref in world.store.strays()] == [(1, world.attempts()[1])]
    refused(sf.NotFound, lambda: world.store.open(1), "stray")
    # Retention counts ids, not records: a stray is not one of those to keep.
    run.publish()
    world.expire(keep=2)
    assert world.ids() == [2, 3]
    world.check()


@rules("F13-stray", link_by_id)
def test_f13_nobody_rolls_back_to_a_stray(world: World) -> None:
    with_stray(world)
    refused(sf.NotFound, lambda: world.store.rollback(1), "stray")
    assert world.ids() == [1, 2]
    world.check()


# --- readers --------------------------------------------------------------------------------------


def test_f9_a_reader_of_an_expired_checkpoint_is_not_told_of_damage(world: World) -> None:
    run = world.run().publish()
    b = world.publisher("B").until("create")
    reader = world.driver("reader", lambda storage: CheckpointStore(storage).open(1).manifest)
    reader.until("read", "manifests/")
    run.publish()
    world.expire()
    b.step()
    error = reader.fail()
    assert isinstance(error, sf.CheckpointExpired)
    overtaken(b)
    world.check()


def test_a_missing_object_of_a_checkpoint_that_stands_is_damage(world: World) -> None:
    run = world.run().publish()
    assert run.permit is not None
    world.storage.delete([run.permit.record.manifest.path])
    with pytest.raises(sf.DamagedCheckpoint) as caught:
        _ = world.store.open().manifest
    assert caught.value.kind is sf.ErrorKind.OBJECT_MISSING


# --- sinks ----------------------------------------------------------------------------------------


@rules("F6-commit-key", commit_under_the_carrier)
def test_f6_a_committable_is_committed_under_the_attempt_that_prepared_it(world: World) -> None:
    run = world.run().publish()
    assert run.permit is not None
    republish(world.storage, run.permit)
    assert world.run().permit is not None
    assert world.sink.outputs == [1]
    world.check()


@rules("F6b-commit-key", commit_under_the_carrier)
def test_f6b_what_is_carried_and_committed_late_is_committed_once(world: World) -> None:
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


@rules("F11-clean-up", clean_up_everything)
def test_f11_a_restart_does_not_clean_up_what_a_slow_attempt_is_about_to_commit(world: World) -> None:
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


# --- expire and garbage ---------------------------------------------------------------------------


@rules("F4-gc", pass_over_a_missing_newest)
def test_f4_gc_that_misses_the_newest_it_listed_starts_over(world: World) -> None:
    run = world.run().publish()
    gc = world.gc().until("read", "checkpoints/")
    run.publish().publish()
    world.expire()
    assert world.ids() == [3]
    assert gc.finish().newest == 3
    world.check()


@rules("F4b-gc", never_start_over)
def test_f4b_gc_that_reads_a_stray_in_the_place_of_the_newest_starts_over(world: World) -> None:
    run = world.run().publish()
    b = world.publisher("B").until("write", "manifests/")
    gc = world.gc().until("read", "checkpoints/")
    run.publish()
    world.expire()
    b.until("create").step()
    assert gc.finish().newest == 2
    overtaken(b)
    world.check()


@rules("F5-expire", expire_one_after_the_other)
def test_f5_expire_removes_all_doomed_records_before_the_first_object() -> None:
    for steps in range(20):
        with World() as world:
            # 2 lies on top of the base of 1; 3 is whole.
            world.run().publish().publish().publish(full=True)
            expire = world.expiring()
            for _ in range(steps):
                if not expire.done:
                    expire.step()
            expire.kill()
            for checkpoint_id in world.ids():
                whole(StoreCheckpoint(world.storage, load_record(world.storage, CheckpointId(checkpoint_id))))
            world.check()


@rules("F7-rollback", do_not_look)
def test_f7_a_rollback_whose_source_expires_gives_up(world: World) -> None:
    world.run().publish().publish(full=True)
    rollback = world.rolling_back(1).until("write", "manifests/")
    world.expire()
    error = rollback.fail()
    assert isinstance(error, sf.CheckpointExpired)
    assert world.ids() == [2]
    world.check()


@rules("F7-gc-newest+1", ignore_unpublished_manifests)
def test_f7_a_rollback_that_has_looked_is_safe_from_expire(world: World) -> None:
    world.run().publish().publish(full=True)
    rollback = world.rolling_back(1).until("create")
    world.expire()
    permit = rollback.finish()
    assert permit.record.kind is CheckpointKind.ROLLBACK
    assert permit.record.parent.checkpoint_id == 2
    assert contents(permit.checkpoint())["position"] == [{"interval": 1}]
    world.check(rolled_back=True)


@rules("F15-gc", ignore_both)
def test_f15_gc_that_misses_the_source_of_a_rollback_starts_over(world: World) -> None:
    world.run().publish().publish(full=True)
    gc = world.gc().until("read", "checkpoints/")
    world.store.rollback(1)
    world.expire(keep=2)
    assert world.ids() == [2, 3]
    gc.finish()
    world.check(rolled_back=True)


@rules("F17-gc", ignore_both)
def test_f17_gc_that_reads_a_stray_in_the_place_of_a_source_starts_over(world: World) -> None:
    run = world.run().publish()
    b = world.publisher("B").until("write", "manifests/")
    run.publish(full=True)
    gc = world.gc().until("read", "checkpoints/")
    world.store.rollback(1)
    world.expire(keep=2)
    b.until("create").step()
    assert world.ids() == [1, 2, 3]
    gc.finish()
    overtaken(b)
    world.check(rolled_back=True)


def test_gc_without_a_newest_ends_without_deleting(world: World) -> None:
    world.publisher("A").until("create").kill()
    found = world.store.collect_garbage(delete=True)
    assert found.stopped is not None
    assert len(world.storage.list("")) == 2, "a segment and a manifest, of an attempt that may still publish"


def test_gc_never_touches_what_lies_above_the_newest(world: World) -> None:
    run = world.run().publish()
    a = world.publisher("A", run.permit, interval=1).until("create")
    world.store.collect_garbage(delete=True)
    a.finish()
    world.check()


def test_gc_ends_without_deleting_where_a_record_stands_and_its_manifest_does_not(world: World) -> None:
    run = world.run().publish().publish(full=True)
    world.publisher("dead", run.permit, interval=2).until("create").kill()
    run.publish(full=True)
    before = world.storage.list("segments/")
    world.storage.delete([load_record(world.storage, CheckpointId(1)).manifest.path])
    found = world.store.collect_garbage(delete=True)
    assert "manifests/00000000000000000001" in str(found.stopped)
    assert world.storage.list("segments/") == before


# --- not counter-examples -------------------------------------------------------------------------


def test_a_creator_that_crashes_before_it_lists_has_published(world: World) -> None:
    world.publisher("A").until("create").step(Do.KILL_AFTER)
    assert world.sink.outputs == []
    world.restarter("B", publish=1).finish()
    assert sorted(world.sink.outputs) == [1, 2]
    world.check()


def test_expiry_of_the_parent_of_a_slow_attempt_costs_only_that_attempt(world: World) -> None:
    run = world.run().publish()
    slow = world.publisher("slow", run.permit, interval=1).until("create")
    world.restarter("B", publish=2).finish()
    world.expire()
    overtaken(slow)
    world.check()


def test_an_attempt_whose_parent_has_expired_before_it_was_read_is_told_that_it_was_overtaken(world: World) -> None:
    world.run().publish()
    permit = world.store.start(JOB)
    world.restarter("B", publish=2).finish()
    world.expire()
    assert permit is not None
    overtaken(world.publisher("slow", permit, interval=1))
    world.check()


def test_another_jobs_store_is_refused_and_stays_as_it_is(world: World) -> None:
    run = world.run().publish()
    before = world.storage.list("checkpoints/")
    refused(sf.JobMismatch, lambda: world.store.start("another"))
    refused(sf.JobMismatch, lambda: world.store.begin(job_id="another", graph=GRAPH, states=STATES, parent=run.permit))
    stranger = world.store.begin(job_id="another", graph=GRAPH, states=(), parent=None)
    refused(sf.JobMismatch, stranger.publish, "'job'")
    assert world.storage.list("checkpoints/") == before
    world.check()


# --- every order ----------------------------------------------------------------------------------


def permits(world: World) -> list[CommitPermit]:
    found = [driver.result for driver in world.drivers if driver.error is None]
    return [one.permit if isinstance(one, Run) else one for one in found]


def check_permits(world: World) -> None:
    found = [permit.ref.checkpoint_id for permit in permits(world)]
    assert len(found) == len(set(found)), f"two permits for one id: {found}"


def test_two_first_publishers_in_every_order() -> None:
    for world in orders(lambda world: (world.publisher("A"), world.publisher("B"))):
        assert len(permits(world)) == 1
        assert [type(driver.error) for driver in world.drivers if driver.error] == [sf.PublishConflict]
        world.check()


def faulty(world: World, taken: list[Step]) -> list[Step]:
    """Every order, and at most one fault, of either driver, at its create."""
    found = any_order(world, taken)
    if any(step.do is not Do.IT for step in taken):
        return found
    faults = (Do.LOSE, Do.DROP, Do.REFUSE, Do.FORBID, Do.KILL_AFTER)
    return found + [replace(step, do=do) for step in found if step.request.verb == "create" for do in faults]


@pytest.mark.truth
def test_two_publishers_on_one_permit_in_every_order_with_a_fault_at_every_create() -> None:
    def build(world: World) -> None:
        run = world.run().publish()
        for name in "AB":
            world.publisher(name, run.permit, interval=1)

    for world in orders(build, faulty, least=21):
        check_permits(world)
        world.check()


def live_and_expiring(world: World, run: Run) -> Callable[[Any], Run]:
    """A run that goes on from what another has published, and then removes all records but its
    own.
    """

    def body(storage: Any) -> Run:
        mine = Run(storage, world.sink, run.permit)
        mine.interval = run.interval
        mine.publish()
        retention.remove_records(storage, storage.list(layout.RECORDS)[:-1])
        return mine

    return body


def zombie_and_live(world: World) -> None:
    run = world.run().publish()
    world.publisher("zombie")
    world.driver("live", live_and_expiring(world, run))


@pytest.mark.truth
def test_a_zombie_beside_a_run_that_publishes_and_expires_in_every_order_with_a_fault_at_every_create() -> None:
    for world in orders(zombie_and_live, faulty, least=31):
        check_permits(world)
        assert world.drivers[0].error is not None
        world.check()


@pytest.mark.truth
def test_a_restart_beside_a_zombie_and_a_run_that_expires_in_every_order() -> None:
    def build(world: World) -> None:
        zombie_and_live(world)
        world.restarter("restart")

    for world in orders(build, least=31):
        world.check()


def test_a_rollback_beside_expire_in_every_order() -> None:
    def build(world: World) -> None:
        world.run().publish().publish(full=True)
        world.rolling_back(1)
        world.expiring()

    ends = set()
    for world in orders(build, stops=records_and_manifests):
        rollback, expire = world.drivers
        ends.add(type(rollback.error))
        assert expire.error is None
        world.check(rolled_back=rollback.error is None)
    assert ends == {type(None), sf.CheckpointExpired}


def test_a_run_that_expires_beside_gc_in_every_order() -> None:
    def build(world: World) -> None:
        run = world.run().publish()
        world.gc()
        world.driver("live", live_and_expiring(world, run))

    for world in orders(build, stops=records_and_manifests, least=11):
        assert [driver.error for driver in world.drivers] == [None, None]
        world.check()


def test_a_restart_beside_a_publisher_in_every_order() -> None:
    def build(world: World) -> None:
        world.publisher("A", world.run().publish().permit, interval=1)
        world.restarter("B", publish=1)

    for world in orders(build, least=6):
        check_permits(world)
        newest, *others = [record.checkpoint_id for record in world.store.history()]
        assert others == list(range(newest - 1, 0, -1)), "nobody has expired anything"
        world.check()


@pytest.mark.parametrize("seed", range(40))
def test_three_runs_expire_and_gc_in_a_random_order_with_faults(seed: int) -> None:
    dice = random.Random(seed)
    with World() as world:
        for name in "ABC":
            world.restarter(name, publish=3)
        world.expiring()
        world.gc()
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
            assert isinstance(
                driver.error, None | sf.PublishConflict | sf.OutcomeUnknown | sf.NotFound | sf.StorageError
            ) or (type(driver.error).__name__ == "Killed"), repr(driver.error)
        world.check()


@pytest.mark.parametrize("rule", rules, ids=lambda rule: rule.id)
def test_the_rule_is_what_holds(rule: Rule, monkeypatch: Patch) -> None:
    rule.holds_the_scenario(monkeypatch)


def test_the_table_of_moves_is_complete_and_ends() -> None:
    steps = set(Steps) - ENDS
    assert {at for at, _ in MOVES} == steps
    assert set(MOVES.values()) - {at for at, _ in MOVES} == ENDS
    assert {saw for _, saw in MOVES} == set(Observation)
    assert store.CommitPermit is CommitPermit
