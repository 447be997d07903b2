"""What expire and garbage collection remove, and what they never do. How they meet others is in
``test_publish_protocol``.

Expiry by age: age only chooses how far the deletion goes, and clocks that jump harm nothing.
Retention removes checkpoints before any one of the reads of whatever looks at many of them.

What has expired is said to have expired. It is no damage, nothing advises to repair it, and what is
still there is found as it is.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat import paths as layout
from stateformat.backends.exporting.source import batches_of, several_checkpoints
from stateformat.backends.querying import query
from stateformat.backends.storage import MemoryStorage
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, NotFound, StorageError
from stateformat.history import expire, reachable, record_ids, retention
from stateformat.inspecting import METADATA_TABLES, diff_checkpoints, key_history, metadata_table, sizes_document
from stateformat.manifest import handles_table
from stateformat.model import CheckpointId, Handle
from stateformat.reading import load_manifest, load_record
from stateformat.reporting import collect_report
from stateformat.segments import WriteOptions
from stateformat.storage import ObjectInfo
from stateformat.store import CheckpointStore
from stateformat.validation import newest_whole, validate, validate_all
from tests.stateformat.test_repairing import DELTA
from tests.worlds import stores
from tests.worlds.stepping import Run, Sink, World


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
    assert world.storage.leftovers() == []
    world.run().publish()
    dead = orphan(world, "segments/00000000000000000001/x-1.parquet")
    found = world.store.collect_garbage(delete=True)
    assert (found.segments, found.leftovers, found.unfinished) == ((dead,), (), ())


NOW = 1_000
"""Seconds. The age in all cases is 100 s."""
AGE_US = 100 * 10**6


def store_of(times: list[int], monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A store whose checkpoints 1, 2, … were published at these seconds, by a clock that jumps."""
    store, job = sf.open(f"memory://{uuid4().hex}"), stores.counts_job()
    permit = None
    with monkeypatch.context() as patch:
        for second in times:
            patch.setattr(time, "time_ns", lambda second=second: second * 10**9)
            permit = job.publish(store, permit)
    return store


def left(store: CheckpointStore) -> list[int]:
    return [int(number) for number in record_ids(store.storage)]


@pytest.mark.parametrize(
    ("times", "keep", "stays"),
    [
        ([100, 200, 890, 900, 901, 950], 1, [4, 5, 6]),
        ([100, 200, 890, 900, 901, 950], 4, [3, 4, 5, 6]),
        ([100, 200, 300, 400], 1, [4]),  # the newest never goes
        ([100, 200, 300, 400], 9, [1, 2, 3, 4]),
        ([950, 960, 970], 1, [1, 2, 3]),
        # The clock went back for a while: what is younger keeps all that is above it.
        ([100, 950, 200, 960], 1, [2, 3, 4]),
        ([950, 100, 200, 960], 1, [1, 2, 3, 4]),
        ([100, 1, 1, 1], 1, [4]),
        ([100, 1, 1, 1], 3, [2, 3, 4]),
        # A time of the future says nothing: it goes with the next that does.
        ([100, 9_999, 200, 950], 1, [4]),
        ([100, 9_999, 950, 960], 1, [2, 3, 4]),
        ([9_999, 9_999, 9_999], 1, [1, 2, 3]),
        ([9_999, 9_999, 200, 9_999], 1, [4]),
    ],
)
def test_what_is_beyond_the_number_and_older_goes_lowest_first(
    times: list[int], keep: int, stays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(times, monkeypatch)
    plan = store.expire(keep, older_than_us=AGE_US, now_us=NOW * 10**6, delete=False)
    assert left(store) == [*range(1, len(times) + 1)]
    done = store.expire(keep, older_than_us=AGE_US, now_us=NOW * 10**6)
    assert left(store) == stays
    assert plan.records == done.records
    assert sf.validate(store.storage, level="full").ok
    assert store.collect_garbage(delete=False).objects == ()


@pytest.mark.parametrize("seed", range(25))
def test_whatever_clocks_say_no_more_goes_than_by_number_and_a_prefix_goes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    times = [draw.choice((1, 500, 899, 900, 901, 999, 1_000, 1_001, 10**6)) for _ in range(draw.randint(1, 9))]
    keep, now = draw.randint(1, 4), draw.choice((0, 1, 1_000, 10**7))
    store = store_of(times, monkeypatch)
    store.expire(keep, older_than_us=AGE_US, now_us=now * 10**6)
    gone = len(times) - len(left(store))
    assert left(store) == [*range(gone + 1, len(times) + 1)]
    assert gone <= max(0, len(times) - keep)
    known = [second for second in times[:gone] if second <= now]
    assert all(second < now - 100 for second in known)
    assert bool(known) is bool(gone)
    if gone < len(times) - keep:
        # It ended at one that is younger, or nothing above says more.
        first_told = next((second for second in times[gone : len(times) - keep] if second <= now), None)
        assert first_told is None or first_told >= now - 100
    assert len(left(store)) >= 1


def test_a_record_that_cannot_be_read_goes_with_the_next_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, stays in (([100, 200, 300, 950], [4]), ([100, 200, 950, 960], [2, 3, 4])):
        store = store_of(times, monkeypatch)
        path = layout.record_path(CheckpointId(2))
        store.storage.delete([path])
        store.storage.create(path, b"{}\n")
        store.expire(older_than_us=AGE_US, now_us=NOW * 10**6)
        assert left(store) == stays


def test_few_records_are_read_to_learn_that_none_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of([*range(950, 970)], monkeypatch)
    asked: list[str] = []
    read = type(store.storage).read_range

    def reading(self: object, path: str, *more: int) -> object:
        asked.append(path)
        return read(self, path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.storage), "read_range", reading)
    from stateformat.history.retention import cut_by_age

    ids = [CheckpointId(number) for number in range(1, 20)]
    assert cut_by_age(store.storage, ids, 900 * 10**6, NOW * 10**6) == 0
    assert len(asked) <= 1


def test_an_age_is_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="0 or more"):
        store_of([1], monkeypatch).expire(older_than_us=-1)


def test_nothing_expires_unless_it_is_said_how_much_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of([1, 2, 3], monkeypatch)
    with pytest.raises(InvalidInput, match="how many checkpoints to keep, or for how long"):
        store.expire()
    assert left(store) == [1, 2, 3]


CHECKPOINTS = 4


class Expiring(MemoryStorage):
    """Retention runs before the call number ``at``, and leaves the newest checkpoint."""

    at = -1
    calls = 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            expire(MemoryStorage(self._name), 1)

    def read(self, path: str) -> pa.Buffer:
        self._count()
        return super().read(path)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        self._count()
        return super().read_range(path, offset, length)

    def list(self, prefix: str) -> Any:
        self._count()
        return super().list(prefix)


@cache
def _objects() -> dict[str, bytes]:
    """All objects of a store of four checkpoints."""
    store, job = CheckpointStore(MemoryStorage("expired-meanwhile-all")), stores.counts_job(keys=20)
    options = WriteOptions(inline_bytes_max=0)
    permit = job.publish(store, None, options=options)
    # The newest is whole again, so that every segment of the others goes with them.
    for deltas in (DELTA, DELTA, {}):
        permit = job.publish(store, permit, deltas=deltas, options=options)
    return {item.path: store.storage.read(item.path).to_pybytes() for item in store.storage.list("")}


def _filled(number: int) -> Expiring:
    storage = Expiring(f"expired-meanwhile-{number}")
    MemoryStorage.reset(storage._name)
    for path, data in _objects().items():
        storage.create(path, data)
    return storage


def _validated(level: Any, number: int | None, store: CheckpointStore) -> list[str]:
    report = validate(store, number, level=level)
    return [str(problem) for problem in report.problems if problem.kind is not ErrorKind.CHECKPOINT_EXPIRED]


def _all_validated(level: Any, store: CheckpointStore) -> list[str]:
    report = validate_all(store, level=level)
    assert {one.standing for one in report.checkpoints} <= {"whole", "expired"}, report
    assert report.checkpoints[0].standing == "whole"
    return [str(finding.problem) for finding in report.findings]


def _searched(store: CheckpointStore) -> list[str]:
    assert newest_whole(store).newest_whole == CHECKPOINTS
    return []


def _key_followed(store: CheckpointStore) -> list[str]:
    newest, *others = store.checkpoints()
    state = newest.record.state("counter", "counts")
    key = newest.state(state).table().select(["word"]).slice(0, 1)
    steps = key_history([newest, *others], state, key)
    return [str(step) for step in steps if not hasattr(step, "record") and "expired" not in str(step)]


def _compared(store: CheckpointStore) -> list[str]:
    found = diff_checkpoints(store.open(1), store.open(2))
    assert found.states
    return []


def _asked(store: CheckpointStore) -> list[str]:
    query(store, "select count(*) from counter.counts", all_checkpoints=True).table()
    return []


def _exported(store: CheckpointStore) -> list[str]:
    records = store.history()
    source = several_checkpoints(store, records, records[0], "counter", "counts")
    list(batches_of(source.stream(), lambda _: None))
    return []


def _reported(level: Any, store: CheckpointStore) -> list[str]:
    text = json.dumps(collect_report(store, level=level), default=str)
    return [text for word in ("missing from", "not in the store", "repair") if word in text]


def _tables(store: CheckpointStore) -> list[str]:
    for name in METADATA_TABLES:
        metadata_table(store, name)
    return []


def _garbage(keep: int | None, store: CheckpointStore) -> list[str]:
    found = store.collect_garbage(delete=False) if keep is None else store.expire(keep, delete=False)
    return [found.stopped] if found.stopped else []


def _sized(store: CheckpointStore) -> list[str]:
    document = sizes_document(store, keep=1)
    return [str(document["garbage"]["stopped"])] if document["garbage"]["stopped"] else []


LOOKS: dict[str, Callable[[CheckpointStore], list[str]]] = {
    "validate": partial(_validated, "quick", 2),
    "validate --level full": partial(_validated, "full", 1),
    "validate, the newest": partial(_validated, "full", None),
    "validate --all": partial(_all_validated, "quick"),
    "validate --all --level full": partial(_all_validated, "full"),
    "newest_whole": _searched,
    "get --all": _key_followed,
    "diff": _compared,
    "sql --all": _asked,
    "sql, metadata": _tables,
    "export --all": _exported,
    "report": partial(_reported, "quick"),
    "gc": partial(_garbage, None),
    "gc --keep": partial(_garbage, 1),
    "du": _sized,
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_has_expired_meanwhile_is_not_called_damaged(name: str) -> None:
    number, look = [*LOOKS].index(name), LOOKS[name]
    undisturbed = _filled(number)
    assert look(CheckpointStore(undisturbed)) == []
    raised: list[NotFound] = []
    for at in range(1, undisturbed.calls + 1):
        storage = _filled(number)
        storage.at = at
        try:
            assert look(CheckpointStore(storage)) == [], at
        except NotFound as error:
            raised.append(error)
        except CheckpointError as error:
            raise AssertionError(f"retention before call {at} of {undisturbed.calls}: {error}") from error
    assert not [error for error in raised if "expired" not in str(error) and "no checkpoint" not in str(error)]
