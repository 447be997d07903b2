"""What expire and garbage collection remove, and what they never do. How they meet others is in
``test_publish_protocol``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from stateformat import paths as layout
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import ErrorKind, InvalidInput, NotFound, StorageError
from stateformat.history import reachable, retention
from stateformat.manifest import handles_table
from stateformat.model import CheckpointId, Handle
from stateformat.reading import Checkpoint, load_manifest, load_record
from stateformat.storage import ObjectInfo, TellsLeftovers
from stateformat.store import CheckpointStore
from tests.stepping import JOB, Run, Sink, World, contents, whole


def needed_by_hand(storage: Any) -> set[str]:
    """What the records of a store need, said once more: without Arrow, from the manifests' rows."""
    found = set()
    for item in storage.list("checkpoints/"):
        record = load_record(storage, CheckpointId(int(item.path[12:32])))
        found |= {item.path, record.manifest.path}
        for row in load_manifest(storage, record).full().to_pylist():
            if row["path"] is not None and row["inline"] is None:
                found.add(row["path"])
    return found


def everything(storage: Any) -> set[str]:
    return {item.path for item in storage.list("")}


# --- reachable ------------------------------------------------------------------------------------


def handle(path: str | None, *, inline: bytes | None = None, size_bytes: int = 5) -> Handle:
    rows = 0 if path is None else 1
    return Handle(
        "o", "s", "union", 0, 0, None, 1, path, rows=rows, size_bytes=size_bytes, digest=b"d" * 16, inline=inline
    )


def test_reachable_names_each_segment_once_and_says_which_lie_in_the_manifest() -> None:
    table = handles_table(
        [
            handle("segments/b"),
            handle("segments/a", inline=b"x"),
            handle(None),
            handle("segments/b"),
            handle("segments/c"),
        ]
    )
    found = reachable(table)
    assert found.schema == retention.REACHABLE_SCHEMA
    assert found["path"].to_pylist() == ["segments/b", "segments/a", "segments/c"]
    assert found["inline"].to_pylist() == [False, True, False]
    assert found["size_bytes"].to_pylist() == [5, 5, 5]
    assert reachable(table.drop_columns(["inline"]))["inline"].to_pylist() == [False, False, False]
    assert reachable(table.slice(0, 0)).num_rows == 0
    assert reachable(pa.concat_tables([table, table]))["path"].to_pylist() == found["path"].to_pylist()


def test_reachable_is_linear_in_handles() -> None:
    row = handles_table([handle("segments/x")])
    column = row.schema.get_field_index("path")
    table = pa.concat_tables([row] * 1000).combine_chunks()
    table = pa.concat_tables([table] * 300).combine_chunks()
    paths = pa.array([f"segments/{i % 150_000}" for i in range(300_000)])
    found = reachable(table.set_column(column, row.schema.field("path"), paths))
    assert found.num_rows == 150_000
    assert found["path"][149_999].as_py() == "segments/149999"


# --- expire ---------------------------------------------------------------------------------------


def test_expire_keeps_the_newest_and_what_they_lie_on(world: World) -> None:
    world.run().publish().publish().publish(full=True).publish()
    before = everything(world.storage)
    plan = world.store.expire(2, delete=False)
    assert everything(world.storage) == before, "a plan changes nothing"
    done = world.store.expire(2)
    assert (plan.deleted, done.deleted) == (False, True)
    assert (plan.newest, plan.records, plan.manifests, plan.segments) == (
        done.newest,
        done.records,
        done.manifests,
        done.segments,
    )
    assert [layout.record_id(item.path) for item in done.records] == [1, 2]
    assert world.ids() == [3, 4]
    assert before - everything(world.storage) == {item.path for item in done.objects}
    assert everything(world.storage) == needed_by_hand(world.storage)
    assert done.size_bytes == sum(item.size_bytes for item in done.objects) > 0
    world.check()


def test_the_base_of_an_expired_checkpoint_stays_as_long_as_a_layer_lies_on_it(world: World) -> None:
    run = world.run().publish(full=True)
    (base,) = everything(world.storage) & {item.path for item in world.storage.list("segments/")}
    for _ in range(3):
        run.publish()
        world.expire(1)
        assert base in everything(world.storage)
    run.publish(full=True)
    world.expire(1)
    assert base not in everything(world.storage)
    world.check()


def test_retention_counts_ids_and_not_records(world: World) -> None:
    run = world.run().publish().publish().publish()
    world.expire(1)
    run.publish()
    assert world.store.expire(3).records == ()
    assert world.ids() == [3, 4]
    world.check()


def test_expire_keeps_at_least_the_newest(world: World) -> None:
    world.run().publish()
    for wrong in (0, -3):
        with pytest.raises(InvalidInput, match="at least 1"):
            world.store.expire(wrong)
    assert world.store.expire(1).objects == ()
    world.check()


def test_a_store_that_is_not_there_is_not_found_and_an_empty_one_has_no_garbage(tmp_path: Path) -> None:
    for ask in (lambda store: store.expire(1), lambda store: store.collect_garbage(delete=True)):
        with pytest.raises(NotFound) as caught:
            ask(CheckpointStore(LocalStorage(tmp_path / "gone")))
        assert caught.value.kind is ErrorKind.STORE_NOT_FOUND
        found = ask(CheckpointStore(LocalStorage(tmp_path)))
        assert found.objects == ()
        assert "no checkpoint" in str(found.stopped)


def test_a_damaged_record_beyond_retention_is_removed_with_the_rest(world: World) -> None:
    world.run().publish().publish().publish(full=True)
    path = layout.record_path(CheckpointId(1))
    world.storage.delete([path])
    world.storage.create(path, b"{}\n")
    assert "0001.json" in str(world.store.collect_garbage(delete=True).stopped)
    assert world.expire().stopped is None
    assert everything(world.storage) == needed_by_hand(world.storage)
    world.check()


# --- garbage --------------------------------------------------------------------------------------


def orphan(world: World, path: str) -> ObjectInfo:
    with world.storage.open_output(path) as output:
        output.write(b"orphan")
    return ObjectInfo(path, 6)


def test_gc_removes_what_attempts_left_behind_and_nothing_else(world: World) -> None:
    run = world.run().publish().publish()
    dead = [
        orphan(world, "segments/00000000000000000001/x-1.parquet"),
        orphan(world, "segments/00000000000000000002/x-2.parquet"),
    ]
    manifest = orphan(world, "manifests/00000000000000000002-dead.parquet")
    alive = [
        orphan(world, "segments/00000000000000000003/x-3.parquet"),
        orphan(world, "segments/notes.txt"),
        orphan(world, "requests/stop"),
    ]
    found = world.store.collect_garbage(delete=False)
    assert (found.segments, found.manifests, found.records) == (tuple(dead), (manifest,), ())
    assert (found.size_bytes, found.deleted, found.newest) == (18, False, 2)
    before = everything(world.storage)
    assert world.store.collect_garbage(delete=True).objects == found.objects
    assert before - everything(world.storage) == {item.path for item in found.objects}
    assert everything(world.storage) >= {item.path for item in alive}
    # The attempts at 3 belong to the past once 3 is there.
    run.publish()
    assert [item.path for item in world.store.collect_garbage(delete=True).segments] == [alive[0].path]
    world.check()


def test_gc_stops_at_a_manifest_that_it_cannot_read_published_or_not(world: World) -> None:
    world.run().publish()
    dead = orphan(world, "segments/00000000000000000001/x-1.parquet")
    unpublished = orphan(world, "manifests/00000000000000000002-torn.parquet")
    found = world.store.collect_garbage(delete=True)
    assert unpublished.path in str(found.stopped)
    assert "if no run is writing" in str(found.stopped)
    assert (found.objects, found.deleted) == ((), False)
    assert dead.path in everything(world.storage)
    world.storage.delete([unpublished.path])
    record = load_record(world.storage, CheckpointId(1))
    data = bytearray(world.storage.read(record.manifest.path).to_pybytes())
    data[50] ^= 1
    world.storage.delete([record.manifest.path])
    with world.storage.open_output(record.manifest.path) as output:
        output.write(bytes(data))
    found = world.store.collect_garbage(delete=True)
    assert record.manifest.path in str(found.stopped)
    assert dead.path in everything(world.storage)


def test_gc_removes_temporary_files_of_attempts_that_have_ended_and_tells_the_others(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, durable=False)
    run = Run(storage, Sink()).publish()
    store = CheckpointStore(storage)
    places = (
        "checkpoints/{:020}.json",
        "manifests/{:020}-slow.parquet",
        "segments/{:020}/slow-1.parquet",
        # So long that its temporary name has no room for all of it.
        "segments/{:020}/" + "x" * 247 + ".parquet",
    )
    ended, living = ([place.format(number) for place in places] for number in (1, 2))
    outputs = [storage.open_output(path) for path in (*ended, *living, "requests/stop")]
    planned = store.collect_garbage(delete=False)
    assert len(storage.leftovers()) == 9, "a plan changes nothing"
    done = store.collect_garbage(delete=True)
    assert (done.leftovers, done.unfinished) == (planned.leftovers, planned.unfinished)
    assert [item.path for item in done.leftovers[:3]] == ended[:3]
    assert ended[3].startswith(done.leftovers[3].path)
    assert len(done.leftovers[3].name.rpartition("/")[2]) == 255
    assert [item.path for item in done.unfinished[:4]] == [*living[:2], "requests/stop", living[2]]
    assert done.objects == ()
    assert [item.name for item in storage.leftovers()] == [item.name for item in done.unfinished]
    # What a live attempt writes becomes visible; once it has lost, it is garbage like the rest.
    outputs[6].close()
    run.publish()
    after = store.collect_garbage(delete=True)
    assert [item.path for item in after.segments] == [living[2]]
    assert len(after.leftovers) == 3
    assert [item.path for item in storage.leftovers()] == ["requests/stop"]
    for output in outputs:
        output.abort()
    assert storage.leftovers() == []
    assert not (tmp_path / "segments/00000000000000000001").exists() or any(
        (tmp_path / "segments/00000000000000000001").iterdir()
    ), "an empty directory goes with the last file of it"


def test_the_bytes_that_gc_frees_count_what_writers_left(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, durable=False)
    Run(storage, Sink()).publish()
    (tmp_path / "manifests" / f".tmp-{1:016x}-{1:020}-dead.parquet").write_bytes(b"x" * 1000)
    (tmp_path / "manifests" / f".tmp-{2:016x}-{2:020}-dead.parquet").write_bytes(b"x" * 1000)
    assert CheckpointStore(storage).collect_garbage(delete=False).size_bytes == 1000


def test_nothing_is_discarded_where_what_is_needed_is_unknown(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, durable=False)
    store = CheckpointStore(storage)
    with storage.open_output("segments/00000000000000000001/slow-1.parquet"):
        found = store.collect_garbage(delete=True)
        assert (len(found.unfinished), found.leftovers) == (1, ())
        assert "no checkpoint" in str(found.stopped)
    Run(storage, Sink()).publish()
    storage.create(layout.record_path(CheckpointId(2)), b"{}")
    with storage.open_output("segments/00000000000000000001/slow-2.parquet"):
        found = store.collect_garbage(delete=True)
        assert (len(found.unfinished), found.leftovers, found.deleted) == (1, (), False)
    assert len(storage.list("segments/00000000000000000001/")) == 3


def test_retention_works_where_leftovers_may_not_be_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Forbidding(LocalStorage):
        def leftovers(self) -> Any:
            raise StorageError("listing uploads is not permitted")

    storage = Forbidding(tmp_path, durable=False)
    Run(storage, Sink()).publish().publish(full=True)
    found = CheckpointStore(storage).expire(1)
    assert (len(found.records), len(found.segments), found.leftovers) == (1, 1, ())
    assert "listing uploads is not permitted" in caplog.text


def test_a_storage_without_leftovers_is_collected_like_any_other(world: World) -> None:
    assert not isinstance(world.storage, TellsLeftovers)
    world.run().publish()
    dead = orphan(world, "segments/00000000000000000001/x-1.parquet")
    found = world.store.collect_garbage(delete=True)
    assert (found.segments, found.leftovers, found.unfinished) == ((dead,), (), ())


# --- any history ----------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.just(("layer", 0)),
        st.just(("whole", 0)),
        st.tuples(st.just("expire"), st.integers(1, 4)),
        st.tuples(st.just("rollback"), st.integers(1, 5)),
        st.just(("gc", 0)),
        st.just(("crash", 0)),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.truth
@settings(max_examples=60, deadline=None, derandomize=True)
@given(STEPS)
def test_whatever_is_published_expired_and_rolled_back_everything_listed_stays_whole(
    steps: list[tuple[str, int]],
) -> None:
    with World() as world:
        run = world.run()
        kept: dict[int, Any] = {}
        for step, number in steps:
            if step in ("layer", "whole"):
                run.publish(full=step == "whole")
                assert run.permit is not None
                kept[run.permit.ref.checkpoint_id] = contents(run.permit.checkpoint())
            elif step == "crash":
                world.publisher("dead", run.permit, interval=run.interval).until("create").kill()
            elif step == "expire" and kept:
                world.store.expire(number)
                kept = {i: held for i, held in kept.items() if i > max(kept) - number}
            elif step == "rollback" and max(kept, default=0) - number in kept:
                permit = world.store.rollback(max(kept) - number)
                kept[permit.ref.checkpoint_id] = kept[max(kept) - number]
                run = world.run()
            elif step == "gc" and kept:
                world.store.collect_garbage(delete=True)
            assert world.ids() == sorted(kept)
            for checkpoint_id, held in kept.items():
                record = load_record(world.storage, CheckpointId(checkpoint_id))
                assert whole(Checkpoint(world.storage, record)) == held
        if kept:
            world.store.collect_garbage(delete=True)
            newest = max(kept)
            rest = {path for path in everything(world.storage) if (layout.owner_id(path) or 0) <= newest}
            assert rest == needed_by_hand(world.storage)
            start = world.store.start(JOB)
            assert start is not None
            assert start.ref.checkpoint_id == newest
