"""Repair and lost records, one test per counter-example of the model: ``r1`` … ``r9``, ``l1`` …
``l9``, and what protects.

As in ``test_publish_protocol``: each is the interleaving by which a protocol without one rule goes
wrong, and :func:`test_the_rule_is_what_holds` takes rules away and sees the same tests fail.
"""

from __future__ import annotations

from typing import Any

import pytest

import stateformat as sf
from stateformat import paths as layout
from stateformat.findings import Finding
from stateformat.history import records as history, retention
from stateformat.model import CheckpointId, CheckpointKind, Record
from stateformat.publication import pending, protocol as publication, repairing as repair
from stateformat.publication.protocol import Observation, Step
from stateformat.reading import StoreCheckpoint, load_record
from stateformat.store import CheckpointStore
from stateformat.validation import validate
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
from tests.worlds import stepping
from tests.worlds.stepping import GRAPH, JOB, STATES, Do, Driver, Run, World, contents, whole
from tests.worlds.stores import refused

rules = Rules()


def a_repair_is_a_child_like_any_other(patch: Patch) -> None:
    def see(found: Record | None, ours: Any) -> Observation:
        if found is None:
            return Observation.NO_PROOF
        return Observation.OUR_CHILD if found.parent == ours else Observation.NO_CHILD

    patch.setattr(publication, "see_child", see)


def look_first(patch: Patch) -> None:
    write, look = pending.PendingCheckpoint._write_manifest, pending.PendingCheckpoint._check_before_creating

    def both(self: Any, handles: Any) -> Any:
        look(self)
        return write(self, handles)

    patch.setattr(pending.PendingCheckpoint, "_write_manifest", both)
    patch.setattr(pending.PendingCheckpoint, "_check_before_creating", lambda self: None)


def everything_is_certain(patch: Patch) -> None:
    patch.setattr(history, "_certain", lambda chain, records: frozenset(record.ref for record in records.values()))


def pass_over_what_cannot_be_read(patch: Patch) -> None:
    patch.setattr(history.LossDetector, "left_behind", lambda self, checkpoint_id: True)
    patch.setattr(retention, "manifests_under", lambda storage, checkpoint_id: [])


def expire_by_names(patch: Patch) -> None:
    patch.setattr(retention, "why_not_expire", lambda storage, cut: None)


def take_damage_for_ours(patch: Patch) -> None:
    patch.setattr(publication._Requests, "_read_back", lambda self: Observation.OURS)


def a_gap_is_a_loss(patch: Patch) -> None:
    gaps = property(lambda self: sorted({*self._gaps, *self._linked}), lambda self, value: None)
    patch.setattr(history.LossDetector, "lost", gaps, raising=False)


def keep_what_the_newest_carries(patch: Patch) -> None:
    def carried(storage: Any, newest: Record) -> set[str]:
        items = contents(StoreCheckpoint(storage, newest))["prepared"]
        return {item["attempt"] for item in items[0]} if items else set()

    patch.setattr(stepping, "carried_attempts", carried)


def keep_what_records_carry(patch: Patch) -> None:
    patch.setattr(stepping, "manifests_under", lambda storage, checkpoint_id: [])


def nothing_is_lost(patch: Patch) -> None:
    patch.setattr(history.LossDetector, "read", lambda self, checkpoint_id, found: None)


def highest_first(patch: Patch) -> None:
    remove_records = retention.remove_records
    patch.setattr(retention, "remove_records", lambda storage, records: remove_records(storage, [*records][::-1]))


@pytest.fixture(autouse=True)
def segments_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The segments of these stores are no Parquet, so whether a checkpoint is whole is judged by
    reading it.
    """

    def check(storage: Any, checkpoint_id: CheckpointId, *, segments: Any) -> tuple[Finding, ...]:
        try:
            contents(StoreCheckpoint(storage, load_record(storage, checkpoint_id)))
        except sf.CheckpointError as error:
            return (Finding(error.kind, "SPEC 7", str(error)),)
        return ()

    monkeypatch.setattr(repair, "check_checkpoint", check)


def problems_of_the_history(world: World, checkpoint_id: int | None = None) -> list[Finding]:
    report = validate(world.store, checkpoint_id, level="full")
    return [problem for problem in report.problems if problem.clause.startswith("SPEC 8")]


def path_of(checkpoint_id: int) -> str:
    return layout.record_path(CheckpointId(checkpoint_id))


def damage(world: World, checkpoint_id: int) -> None:
    """From now on the bytes of a record are no record."""
    remove(world, checkpoint_id)
    world.storage.create(path_of(checkpoint_id), b"{")


def remove(world: World, checkpoint_id: int) -> None:
    """Lose a record."""
    world.storage.delete([path_of(checkpoint_id)])


def published(world: World, count: int, *, damaged: tuple[int, ...] = (), lost: int = 0) -> Run:
    """So many checkpoints, each with its state whole, by one run that lives; then these records are
    damaged or lost.
    """
    run = world.run()
    for _ in range(count):
        run.publish(full=True)
    if lost:
        remove(world, lost)
    for checkpoint_id in damaged:
        damage(world, checkpoint_id)
    return run


def repairing(world: World, source: int | None = None) -> Driver:
    return world.driver("repair", lambda storage: CheckpointStore(storage, sleep=lambda _: None).repair(source))


def ids_of(records: Any) -> list[int]:
    return [record.checkpoint_id for record in records]


def check(world: World, doubled: set[int]) -> None:
    """Every checkpoint whole, a run goes on from the newest, and only these intervals may be in the
    output twice.
    """
    for record in world.store.history():
        whole(StoreCheckpoint(world.storage, record))
    run = world.run()
    run.publish()
    outputs = world.sink.outputs
    assert set(outputs) == set(range(1, max(outputs) + 1)), outputs
    assert {interval for interval in outputs if outputs.count(interval) > 1} <= doubled, outputs


# --- repair ---------------------------------------------------------------------------------------


def test_r1_a_damaged_record_is_neither_moved_nor_removed_nor_written_over(world: World) -> None:
    run = published(world, 2, damaged=(2,))
    permit = world.store.repair(1)
    assert world.ids() == [1, 2, 3]
    assert world.storage.read(path_of(2)).to_pybytes() == b"{"
    assert permit.ref.checkpoint_id == 3
    # Who holds a permit for the damaged one collides with the repair, and gets no second permit for
    # its id.
    refused(sf.PublishConflict, run.publish, kind=sf.ErrorKind.PUBLISH_LOST)
    check(world, {2})


def test_a_repair_has_the_content_of_the_highest_whole_checkpoint_and_names_it(world: World) -> None:
    published(world, 3)
    attempts = world.attempts()
    damage(world, 3)
    permit = world.store.repair()
    assert permit.record.kind is CheckpointKind.ROLLBACK
    assert permit.record.content_of == (2, attempts[2])
    assert permit.record.parent == (3, attempts[3]), "by the name of its manifest"
    assert permit.record.properties[repair.REPAIRED_ID] == "3"
    assert "not JSON" in permit.record.properties[repair.REPAIRED_FAULT]
    assert contents(permit.checkpoint())["position"] == [{"interval": 2}]
    assert ids_of(world.store.history()) == [4, 2, 1], "history goes on at the source"
    assert [tuple(ref) for ref in world.store.strays()] == [(3, "")]
    assert "3" in permit.notes[0]
    assert "still commit" in permit.notes[0]
    run = world.run().publish()
    assert run.permit is not None
    assert repair.REPAIRED_ID not in run.permit.record.properties
    assert ids_of(world.store.history()) == [5, 4, 2, 1]
    check(world, {3})


def test_the_properties_of_a_repair_are_not_inherited_by_a_rollback_to_it(world: World) -> None:
    published(world, 2, damaged=(2,))
    world.store.repair(1)
    world.run().publish()
    assert world.store.rollback(3).record.properties == {}
    mine = {"stateformat.mine": "x"}
    with pytest.raises(sf.InvalidInput, match="keeps for itself"):
        world.store.begin(job_id=JOB, graph=GRAPH, states=STATES, parent=None, properties=mine)


def without_content_of(record: Record | None) -> Any:
    return record and record.parent


def test_who_does_not_know_the_member_sees_a_shorter_history(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    published(world, 3, damaged=(3,))
    world.store.repair()
    world.run().publish()
    monkeypatch.setattr(Record, "link", property(without_content_of))
    assert ids_of(history.read_history(world.storage).chain) == [5, 4], "a prefix, from the top"


@rules("R2-source", everything_is_certain)
def test_r2_what_stands_alone_beneath_the_damage_may_be_a_stray_and_is_taken_only_by_its_id(world: World) -> None:
    b = world.publisher("B").until("write", "segments/")
    world.run().publish().publish()
    world.expire()
    b.until("create").step().kill()
    stray = world.attempts()[1]
    damage(world, 2)
    assert world.ids() == [1, 2]
    refused(sf.DamagedCheckpoint, world.store.repair, r"no checkpoint .* is whole and certain")
    assert [(way.record.checkpoint_id, way.certain) for way in world.store.diagnose().ways] == [(1, False)]
    assert world.store.repair(1).record.content_of == (1, stray)


def test_a_source_is_certain_if_the_record_that_it_names_stands_or_another_names_it(world: World) -> None:
    published(world, 4)
    world.expire(keep=3)
    damage(world, 4)
    found = world.store.diagnose()
    assert [(way.record.checkpoint_id, way.certain) for way in found.ways] == [(3, True), (2, True)]
    assert found.chosen is not None
    assert (found.chosen.record.checkpoint_id, found.chosen.doubled) == (3, (4,))


@rules("R3-look", do_not_look)
def test_r3_a_repair_whose_source_expires_gives_up(world: World) -> None:
    published(world, 3)
    expire = world.expiring().until("delete")
    damage(world, 3)
    at_work = repairing(world).until("write", "manifests/")
    expire.finish()
    assert isinstance(at_work.fail(), sf.CheckpointExpired)
    assert world.ids() == [3]


@rules("R3b-look", look_first)
def test_r3b_a_repair_looks_at_its_source_after_its_manifest(world: World) -> None:
    published(world, 3)
    expire = world.expiring().until("delete")
    damage(world, 3)
    at_work = repairing(world).until("create")
    manifest = next(i for i, line in enumerate(at_work.trace) if line.startswith("write manifests/"))
    assert any(line.startswith(f"read {path_of(2)}") for line in at_work.trace[manifest:])
    # The source expires after the look: its objects are kept, for the manifest under newest + 1
    # names them.
    expire.finish()
    at_work.finish()
    assert ids_of(world.store.history()) == [4]
    check(world, {3})


def test_of_two_repairs_and_a_run_that_lives_one_publishes(world: World) -> None:
    run = published(world, 2)
    a = world.publisher("A", run.permit, interval=2).until("create")
    damage(world, 2)
    first, second = repairing(world, 1).until("create"), repairing(world, 1).until("create")
    second.finish()
    lost(first)
    lost(a)
    assert world.ids() == [1, 2, 3]
    check(world, {2})


def test_a_repair_goes_on_as_any_publication_does_after_a_lost_answer(world: World) -> None:
    published(world, 2, damaged=(2,))
    assert repairing(world, 1).until("create").step(Do.LOSE).finish().ref.checkpoint_id == 3
    check(world, {2})


def test_without_one_manifest_under_its_id_nobody_knows_what_the_damaged_record_was() -> None:
    for manifests in (0, 2):
        with World() as world:
            run = published(world, 2)
            if manifests:
                # Of a rival that was beaten, or is still alive.
                world.publisher("rival", Run(world.storage, world.sink, None).permit)
            assert run.permit is not None
            damage(world, 2)
            if manifests:
                other = layout.manifest_path(CheckpointId(2), layout.AttemptId("0" * 32))
                with world.storage.open_output(other) as output:
                    output.write(world.storage.read(run.permit.record.manifest.path))
            else:
                world.storage.delete([run.permit.record.manifest.path])
            permit = world.store.repair(1)
            assert permit.record.parent is None
            assert problems_of_the_history(world) == [], "a repair without parent is no problem of 8.2"
            check(world, {2})


def test_no_right_no_answer_and_a_newer_version_are_no_damage(world: World) -> None:
    published(world, 2)
    at_work = repairing(world).until("read", path_of(2)).step(Do.DROP)
    assert isinstance(at_work.fail(), sf.StorageError)
    data = world.storage.read(path_of(2)).to_pybytes()
    remove(world, 2)
    world.storage.create(path_of(2), data.replace(b'"version":1', b'"version":2'))
    assert world.store.diagnose().undecided is not None
    refused(sf.UnsupportedFormat, world.store.repair)
    assert world.ids() == [1, 2]


def test_a_store_of_which_nothing_is_wrong_is_not_repaired(world: World) -> None:
    published(world, 2)
    for source, told in ((None, "nothing is wrong"), (1, "rollback")):
        with pytest.raises(sf.InvalidInput, match=told):
            world.store.repair(source)
    assert world.ids() == [1, 2]


def test_a_newest_without_its_manifest_is_rolled_back(world: World) -> None:
    run = published(world, 3)
    assert run.permit is not None
    world.storage.delete([run.permit.record.manifest.path])
    found = world.store.diagnose()
    assert (found.fault, [problem.kind for problem in found.problems]) == (None, [sf.ErrorKind.OBJECT_MISSING])
    permit = world.store.repair()
    assert (permit.record.content_of, permit.record.parent) == (None, (3, world.attempts()[3]))
    assert contents(permit.checkpoint())["position"] == [{"interval": 2}]
    assert ids_of(world.store.history()) == [4, 3, 2, 1]


def test_a_damaged_source_is_passed_over_and_refused_by_name(world: World) -> None:
    published(world, 3)
    first, second = (load_record(world.storage, CheckpointId(i)) for i in (1, 2))
    world.storage.delete([second.manifest.path])
    damage(world, 3)
    refused(sf.DamagedCheckpoint, lambda: world.store.repair(2), r"2 of .* is not whole")
    permit = world.store.repair(1)
    assert permit.record.content_of == (1, first.attempt_id)
    assert ids_of(world.store.history()) == [4, 1]
    assert [ref.checkpoint_id for ref in world.store.strays()] == [2, 3]
    refused(sf.NotFound, lambda: world.store.rollback(2), "stray")


def test_a_newest_that_was_published_meanwhile_is_not_left_behind_unasked(world: World) -> None:
    run = published(world, 3)
    assert run.permit is not None
    world.storage.delete([run.permit.record.manifest.path])
    found = world.store.diagnose()
    run.publish(full=True)
    with pytest.raises(sf.PublishConflict, match=r"3 is not the newest .*: 4 was published meanwhile"):
        world.store.repair(diagnosis=found)
    assert world.ids() == [1, 2, 3, 4]


def test_two_damaged_records_on_top_are_both_told_and_repaired_at_once(world: World) -> None:
    published(world, 4, damaged=(3, 4))
    found = world.store.diagnose()
    assert (found.found.damaged, found.found.strays) == ((4, 3), ())
    assert [way.doubled for way in found.ways] == [(3, 4), (2, 3, 4)]
    permit = world.store.repair()
    source = load_record(world.storage, CheckpointId(2)).ref
    assert (permit.record.content_of, permit.notes[0][:18]) == (source, "left behind: 3, 4.")
    collected = world.store.collect_garbage(delete=True)
    assert collected.stopped is None, "nothing is left to repair"
    check(world, {3, 4})


def test_the_record_before_a_damaged_one_is_gone_and_its_output_is_repeated_too(world: World) -> None:
    published(world, 4, lost=3, damaged=(4,))
    found = world.store.diagnose()
    assert [way.doubled for way in found.ways] == [(3, 4), (2, 3, 4)]


def test_a_second_repair_goes_on_where_the_first_did(world: World) -> None:
    published(world, 3, damaged=(3,))
    world.store.repair()
    world.run().publish()
    fourth = load_record(world.storage, CheckpointId(4))
    damage(world, 5)
    assert world.store.repair().record.content_of == fourth.ref
    assert ids_of(world.store.history()) == [6, 4, 2, 1]


def test_what_a_run_that_opened_the_damaged_one_commits_late_is_committed_once(world: World) -> None:
    slow = world.run().publish()
    slow.sink_is_down = True
    slow.publish()
    damage(world, 2)
    world.store.repair(1)
    world.run().publish()
    slow.sink_is_down = False
    slow.commit()
    slow.commit()
    assert sorted(world.sink.outputs) == [1, 2, 2], "the damaged one's own output, once more, and no other"


# --- what the others have to do -------------------------------------------------------------------


def test_nobody_takes_an_older_one_for_an_unreadable_newest(world: World) -> None:
    published(world, 3, damaged=(3,))
    for ask in (
        lambda: world.store.start(JOB),
        lambda: world.store.open(),
        lambda: world.store.rollback(1),
        lambda: world.store.permit_of(world.store.open(2)),
    ):
        refused(sf.DamagedCheckpoint, ask, "ckpt repair")
    assert world.ids() == [1, 2, 3]


def test_an_id_needs_its_own_record_and_manifest_only(world: World) -> None:
    published(world, 5, damaged=(5, 3))
    for checkpoint_id in (4, 2, 1):
        assert contents(world.store.open(checkpoint_id))["position"] == [{"interval": checkpoint_id}]
        assert problems_of_the_history(world, checkpoint_id) == []
    refused(sf.DamagedCheckpoint, lambda: world.store.open(3))
    found = world.store.survey()
    assert (found.chain, ids_of(found.cut_off), found.damaged) == ((), [4, 2, 1], (5, 3))


@rules("R4-overtaken", a_repair_is_a_child_like_any_other)
def test_r4_the_publisher_of_a_damaged_record_leaves_it_and_so_does_the_one_before(world: World) -> None:
    run = published(world, 1)
    before = world.publisher("before", run.permit, interval=1).until("create").step()
    after = world.restarter("after", publish=1).until("create", path_of(3)).step()
    damage(world, 3)
    # The manifest's name is gone too, so that the repair names nobody.
    world.storage.delete([item.path for item in world.storage.list("manifests/00000000000000000003")])
    world.store.repair()
    overtaken(after)
    assert world.ids() == [1, 2, 3, 4], "the damaged record stays"
    overtaken(before)
    assert world.ids() == [1, 2, 3, 4], "and so does the source"
    assert ids_of(world.store.history()) == [4, 2, 1]


@rules("R5-gc", pass_over_what_cannot_be_read)
def test_r5_gc_does_not_pass_over_a_record_that_it_cannot_read(world: World) -> None:
    published(world, 3)
    before = world.storage.list("")
    for damaged in (2, 3):
        damage(world, damaged)
        found = world.store.collect_garbage(delete=True)
        assert found.stopped is not None
        assert str(damaged) in found.stopped
        assert [item.path for item in world.storage.list("")] == [item.path for item in before]


@rules("R5-gc-repaired", pass_over_what_cannot_be_read)
def test_r5_of_a_repaired_record_gc_keeps_every_manifest_under_its_id_and_what_they_name(world: World) -> None:
    run = published(world, 2)
    assert run.permit is not None
    manifest = run.permit.record.manifest.path
    damage(world, 2)
    world.store.repair(1)
    world.publisher("dead", run.permit, interval=2).until("create").kill()
    world.run().publish(full=True)
    found = world.store.collect_garbage(delete=True)
    assert found.stopped is None, "where everything is kept, nothing would be collected any more"
    assert found.manifests, "what the beaten one left behind"
    left = [item.path for item in world.storage.list("")]
    assert manifest in left
    assert any(path.startswith("segments/00000000000000000002/") for path in left)
    check(world, {2})


@rules("R6-expire", expire_by_names)
def test_r6_expire_reads_the_newest_before_it_deletes_a_record(world: World) -> None:
    published(world, 3, damaged=(3,))
    for delete in (False, True):
        found = world.store.expire(1, delete=delete)
        assert (found.records, found.deleted) == ((), False)
        assert "newest cannot be read" in str(found.stopped)
    assert world.ids() == [1, 2, 3]
    world.store.repair()
    assert world.store.expire(1).stopped is None
    check(world, {3})


def test_expire_stops_where_a_delete_fails(world: World) -> None:
    published(world, 4)
    expire = world.expiring().until("delete", path_of(2)).step(Do.DROP)
    assert isinstance(expire.fail(), sf.StorageError)
    assert world.ids() == [2, 3, 4]


@rules("R7-read-back", take_damage_for_ours)
def test_r7_a_damaged_record_is_never_taken_for_ours(world: World) -> None:
    zombie = world.publisher("zombie").until("create").step(Do.LOSE)
    damage(world, 1)
    lost(zombie)
    assert world.ids() == [1]


@rules("R8-overtaken", a_repair_is_a_child_like_any_other)
def test_r8_a_repair_is_no_reason_to_withdraw_whomever_it_names(world: World) -> None:
    run = published(world, 1)
    slow = world.publisher("slow", run.permit, interval=1).until("create").step()
    damage(world, 2)
    other = layout.manifest_path(CheckpointId(2), layout.AttemptId("0" * 32))
    with world.storage.open_output(other) as output:
        output.write(world.storage.read(load_record(world.storage, CheckpointId(1)).manifest.path))
    assert world.store.repair(1).record.parent is None, "R8b: two manifests lie under 2"
    overtaken(slow)
    assert world.ids() == [1, 2, 3]


def test_a_child_that_cannot_be_read_is_no_reason_to_withdraw_nor_proof_of_having_published(world: World) -> None:
    a = world.publisher("A").until("create").step()
    world.restarter("B", publish=1).finish()
    damage(world, 2)
    overtaken(a)
    assert world.ids() == [1, 2]


def left_uncommitted(world: World) -> None:
    """1 is committed, 2 is published and not, and 3 has gone back to 1."""
    run = world.run().publish()
    run.sink_is_down = True
    run.publish(full=True)
    world.store.rollback(1)


def restarted(world: World) -> Run:
    """A run that cleans up, and whose sink is not reached again before it ends."""
    return Run(world.storage, world.sink, sink_is_down=True).restart(clean_up=True)


@rules("R9b-clean-up", keep_what_the_newest_carries)
def test_r9b_clean_up_keeps_what_a_record_that_stands_carries(world: World) -> None:
    left_uncommitted(world)
    restarted(world)
    world.store.rollback(2)
    world.run()
    assert sorted(world.sink.outputs) == [1, 2], "nothing of 2 is lost"


@rules("R9-clean-up", keep_what_the_newest_carries)
def test_r9_clean_up_keeps_what_a_repair_over_a_rollback_may_go_back_to(world: World) -> None:
    left_uncommitted(world)
    restarted(world)
    damage(world, 3)
    assert restarted_or_refused(world)
    assert world.store.repair().record.content_of is not None
    world.run()
    assert sorted(world.sink.outputs) == [1, 2]


def restarted_or_refused(world: World) -> bool:
    try:
        restarted(world)
    except sf.DamagedCheckpoint:
        return True
    return False


@rules("R9c-clean-up", keep_what_records_carry)
def test_r9c_clean_up_keeps_what_a_manifest_under_newest_plus_one_carries(world: World) -> None:
    left_uncommitted(world)
    second = world.rolling_back(2).until("create")
    world.expire(keep=1)
    restarted(world)
    second.finish()
    world.run()
    assert sorted(world.sink.outputs) == [1, 2]


# --- lost records ---------------------------------------------------------------------------------


def told(world: World) -> list[int]:
    """The records that every reader calls lost."""
    found = [ref.checkpoint_id for ref in world.store.survey().lost]
    assert [int(problem.path[12:32]) for problem in problems_of_the_history(world)] == found
    stopped = str(world.store.collect_garbage(delete=False).stopped)
    assert ("was lost" in stopped) == bool(found)
    return found


def test_a_record_that_others_name_and_beneath_which_named_ones_stand_was_lost(world: World) -> None:
    published(world, 5, lost=4)
    assert told(world) == [4]
    found = world.store.survey()
    assert (ids_of(found.chain), ids_of(found.cut_off), found.strays) == ([5], [3, 2, 1], ())
    refused(sf.DamagedCheckpoint, world.store.history, r"4 .* was lost")
    refused(sf.DamagedCheckpoint, lambda: world.store.open(4), r"4 .* was lost")
    assert ids_of(world.store.history(1)) == [5]
    # What is cut off can be looked at; the newest is not touched by it.
    assert contents(world.store.open(3))["position"] == [{"interval": 3}]
    refused(sf.DamagedCheckpoint, lambda: world.store.rollback(3), r"4 .* was lost")
    world.run().publish()


def test_another_attempt_in_its_place_makes_a_record_no_less_lost(world: World) -> None:
    run = published(world, 2)
    zombie = world.publisher("zombie", run.permit, interval=2).until("create")
    run.publish(full=True).publish(full=True)
    remove(world, 3)
    zombie.step().kill()
    assert world.ids() == [1, 2, 3, 4]
    assert told(world) == [3]
    assert [ref.checkpoint_id for ref in world.store.strays()] == [3]


@rules("L1-proof", a_gap_is_a_loss)
def test_l1_a_manifest_without_its_record_is_no_sign_of_loss(world: World) -> None:
    published(world, 2)
    world.expiring().until("delete", path_of(1)).step().kill()
    assert len(world.storage.list("manifests/")) == 2
    assert told(world) == []
    assert ids_of(world.store.history()) == [2]


@rules("L2-proof", a_gap_is_a_loss)
def test_l2_an_older_record_that_stands_is_no_sign_of_loss(world: World) -> None:
    zombie = world.publisher("zombie").until("create")
    run = published(world, 3)
    world.expire()
    zombie.step().kill()
    assert world.ids() == [1, 3]
    assert told(world) == []
    assert [ref.checkpoint_id for ref in world.store.strays()] == [1], "a warning, as before"
    run.publish()
    check(world, set())


@rules("L3-proof", a_gap_is_a_loss)
def test_l3_nor_are_several_that_nobody_names(world: World) -> None:
    first = world.publisher("first").until("create")
    run = world.run().publish()
    second = world.publisher("second", run.permit, interval=1).until("create")
    run.publish().publish().publish()
    world.expire()
    first.step().kill()
    second.step().kill()
    assert world.ids() == [1, 2, 4]
    assert told(world) == []


@pytest.mark.parametrize("at", range(9))
def test_l4_what_was_listed_before_the_gap_was_seen_proves_nothing(world: World, at: int) -> None:
    """An expire that begins while somebody looks, after each of its steps."""
    published(world, 4)
    looker = world.driver("looker", lambda storage: history.survey(storage))
    for _ in range(at):
        if not looker.done:
            looker.step()
    world.expire()
    assert looker.finish().lost == ()


@rules("L5-order", highest_first)
def test_l5_an_expire_at_work_is_not_called_damage_in_any_order() -> None:
    def build(world: World) -> None:
        published(world, 4)
        world.driver("looker", lambda storage: history.survey(storage))
        world.driver("expire", lambda storage: retention.remove_records(storage, storage.list(layout.RECORDS)[:-1]))

    for world in orders(build, least=6):
        looker = world.drivers[0]
        assert looker.error is None
        assert looker.result.lost == ()


def test_what_a_repair_has_left_behind_is_not_missed(world: World) -> None:
    published(world, 5, lost=4)
    assert told(world) == [4]
    permit = world.store.repair(3)
    assert (permit.record.content_of, permit.record.parent) == ((3, world.attempts()[3]), (5, world.attempts()[5]))
    assert told(world) == []
    assert ids_of(world.store.history()) == [6, 3, 2, 1]
    assert [ref.checkpoint_id for ref in world.store.strays()] == [5]
    check(world, {4, 5})


def test_nor_is_what_a_repair_that_was_left_behind_has_left_behind(world: World) -> None:
    published(world, 6, damaged=(6,))
    world.store.repair(5)
    remove(world, 4)
    assert told(world) == [4]
    world.store.repair(3)
    assert told(world) == []
    assert ids_of(world.store.history()) == [8, 3, 2, 1]
    assert world.store.collect_garbage(delete=False).stopped is None
    check(world, {4, 5, 6})


def test_one_checkpoint_beneath_a_gap_is_too_few_to_prove_a_loss(world: World) -> None:
    published(world, 3, lost=2)
    assert told(world) == []
    report = validate(world.store, level="full")
    assert [warning.path for warning in report.warnings] == [path_of(1)]


@rules("L7-gc", nothing_is_lost)
def test_l7_gc_ends_where_a_loss_is_proven(world: World) -> None:
    published(world, 5, lost=4)
    before = world.storage.list("")
    found = world.store.collect_garbage(delete=True)
    assert (found.deleted, world.storage.list("")) == (False, before)
    assert "4" in str(found.stopped)


@rules("L8-expire", expire_by_names)
def test_l8_expire_deletes_nothing_beneath_a_lost_record_that_it_is_to_keep(world: World) -> None:
    run = published(world, 5, lost=4)
    before = world.storage.list("")
    found = world.store.expire(3)
    assert (found.records, found.deleted, world.storage.list("")) == ((), False, before)
    assert "4" in str(found.stopped)
    # At or below its cut it goes on: time heals the store.
    for _ in range(3):
        run.publish(full=True)
    assert world.store.expire(3).stopped is None
    assert world.ids() == [6, 7, 8]
    check(world, set())


def test_expire_goes_on_where_the_lost_record_is_the_first_that_it_does_not_keep(world: World) -> None:
    published(world, 5, lost=3)
    planned = world.store.expire(2, delete=False)
    assert (planned.stopped, [item.path for item in planned.records]) == (None, [path_of(1), path_of(2)])
    assert world.store.expire(2).stopped is None
    assert world.ids() == [4, 5]
    assert problems_of_the_history(world) == []
    check(world, set())


@rules("L9-overtaken", instead(Step.READ_CHILD, Observation.NO_PROOF, Step.WITHDRAW))
def test_l9_the_overtaken_stays_where_nothing_stands_above_it(world: World) -> None:
    run = published(world, 1)
    slow = world.publisher("slow", run.permit, interval=1).until("create").step()
    world.restarter("B", publish=2).finish()
    remove(world, 3)
    overtaken(slow)
    assert world.ids() == [1, 2, 4]
    assert told(world) == [3]


def test_ids_follow_by_one(world: World) -> None:
    published(world, 3)
    assert problems_of_the_history(world) == []
    record = world.storage.read(path_of(3)).to_pybytes()
    remove(world, 3)
    world.storage.create(
        path_of(3), resealed(record.replace(b'"parent":{"checkpoint_id":2', b'"parent":{"checkpoint_id":1'))
    )
    assert [problem.clause for problem in problems_of_the_history(world)] == ["SPEC 8.2"]


def resealed(data: bytes) -> bytes:
    """A record that was tampered with, with the digest of its bytes."""
    import xxhash

    body = data[:-46]
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def test_a_first_checkpoint_without_parent_has_id_1(world: World) -> None:
    published(world, 3)
    record = world.storage.read(path_of(3)).to_pybytes()
    start, end = record.index(b'"parent":'), record.index(b'"job_id"')
    remove(world, 3)
    world.storage.create(path_of(3), resealed(record[:start] + record[end:]))
    (problem,) = problems_of_the_history(world)
    assert (problem.clause, "id 1" in problem.message) == ("SPEC 8.2", True)


# --- every order ----------------------------------------------------------------------------------


@pytest.mark.truth
def test_a_repair_beside_expire_in_every_order() -> None:
    """An expire that had looked before the newest was damaged; whatever wins, the newest can be
    read or nothing was done.
    """

    def build(world: World) -> None:
        published(world, 3)
        world.expiring().until("delete")
        damage(world, 3)
        repairing(world)

    ends = set()
    for world in orders(build, stops=records_and_manifests):
        expire, at_work = world.drivers
        assert expire.error is None
        ends.add(type(at_work.error))
        if at_work.error is None:
            check(world, {3})
    assert ends == {type(None), sf.CheckpointExpired, sf.DamagedCheckpoint}


@pytest.mark.truth
def test_a_repair_beside_the_publisher_of_the_damaged_record_in_every_order() -> None:
    def build(world: World) -> None:
        run = published(world, 2)
        world.publisher("slow", run.permit, interval=2).until("create").step()
        damage(world, 3)
        repairing(world)

    ends = set()
    for world in orders(build):
        slow, at_work = world.drivers
        assert at_work.error is None
        assert world.ids() == [1, 2, 3, 4]
        # Who has listed before the repair has a permit for the damaged one, and may commit it.
        ends.add(type(slow.error))
        check(world, set() if slow.error else {3})
    assert ends == {type(None), sf.PublishConflict}


@pytest.mark.parametrize("rule", rules, ids=lambda rule: rule.id)
def test_the_rule_is_what_holds(rule: Rule, monkeypatch: Patch) -> None:
    rule.holds_the_scenario(monkeypatch)
