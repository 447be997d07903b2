"""Crashes of a local store, enumerated: after every system call, with everything that was not
synced kept or lost.

The fast tests record the calls inside the process, the truth tests with strace. Other tests have a
second run after a first that died, and calls that fail.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stateformat import paths as layout
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import CheckpointError, OutcomeUnknown, PublishConflict, StorageError
from stateformat.history import record_ids
from stateformat.storage import CreateOutcome
from stateformat.store import CheckpointStore
from tests.crashes.crash_calls import SystemCalls, traced
from tests.crashes.crash_disk import Call, Disk
from tests.crashes.crash_recording import Recording, second_run
from tests.crashes.crash_scenarios import (
    SCENARIOS,
    STORE,
    go_on,
    in_small_steps,
    publish,
    restart,
    storage_at,
    temporary_files,
    whole,
)
from tests.tally import Tally

TRUTH = [pytest.mark.truth, pytest.mark.timeout(900)]


def by_the_kernel(tally: Tally) -> Callable[[Path, str], list[Call]]:
    """Return a recorder that uses strace, and skips the test if strace cannot run."""

    def record(base: Path, name: str) -> list[Call]:
        try:
            return traced(base, "tests.crashes.crash_scenarios", name, str(base))
        except RuntimeError as error:
            tally.skip("crash after each system call", str(error))
            pytest.skip(str(error))

    return record


# --- one run, and a crash after each of its calls -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("first publish", False), *(pytest.param(name, True, marks=TRUTH) for name in SCENARIOS)],
)
def test_a_crash_after_any_call_leaves_only_whole_checkpoints_and_all_that_were_told(
    tmp_path: Path, name: str, kernel: bool, tally: Tally
) -> None:
    recording = Recording(tmp_path, name, record=by_the_kernel(tally) if kernel else None)
    found = recording.replay()
    tally.add(
        f"crash after each {'system ' if kernel else ''}call: {name}",
        tried=found.states,
        wrong=len(found.problems),
        note=f"{len(recording.calls)} calls, {recording.judge.judged} different states",
    )
    assert found.problems == []
    assert kernel or found.states > 5 * len(recording.calls)


def shapes(calls: list[Call]) -> list[tuple[str, str, int]]:
    """Return what was done, without the random parts of names. Timestamps and ids have the same
    length in every run.
    """
    return [(call.verb, call.path.rpartition("/")[0], len(call.data)) for call in calls if call.verb != "mark"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=TRUTH) for name in SCENARIOS])
def test_the_two_recorders_agree(tmp_path: Path, name: str, tally: Tally) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").mkdir()
    inside = shapes(Recording(tmp_path / "inside", name).calls)
    outside = shapes(Recording(tmp_path / "outside", name, record=by_the_kernel(tally)).calls)
    # The time in a record may have a digit more or less, because trailing zeros are left out.
    assert [call[:2] for call in inside] == [call[:2] for call in outside]
    assert sum(call[2] for call in inside) == pytest.approx(sum(call[2] for call in outside), abs=64)


@pytest.mark.parametrize(
    "name",
    [
        "first publish",
        *(
            pytest.param(name, marks=TRUTH)
            for name in ("second publish", "expire", "copy", "copy by links", "rollback")
        ),
    ],
)
def test_each_sync_that_has_something_to_do_is_needed(tmp_path: Path, name: str, tally: Tally) -> None:
    """The other syncs are of directories that another process may have made, or filled, just before
    it died.
    """
    recording = Recording(tmp_path, name)
    useless = recording.replay(closely=False).useless
    assert all(not Path(recording.calls[number].path).suffix for number in useless), "a file's sync has always work"
    needed = [number for number in recording.syncs() if number not in useless]
    closely = name == "expire"
    missed = [recording.calls[number].path for number in needed if recording.missed_without(number, closely=closely)]
    tally.add(f"a sync left out: {name}", tried=len(needed), noticed=len(needed) - len(missed), wrong=len(missed))
    assert missed == []
    assert needed
    if name == "first publish":
        # The useless one is of the directory in which the first missing directory is made: it
        # existed before.
        assert ([recording.calls[number].path for number in useless], len(needed)) == ([""], 14)


def test_a_store_that_never_syncs_is_torn_by_a_power_failure_but_not_by_death(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "first publish", durable=False)
    assert recording.syncs() == []
    problems = recording.replay(only_marks=True, closely=False).problems
    assert {problem.partition(" ")[0] for problem in problems} == {"power"}
    assert "was told to be there and is gone" in problems[0]
    assert "is torn" in recording.replay(stop=True, closely=False).problems[0]


# --- a second run after a first that died ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "anywhere"),
    [
        ("first publish", False),
        ("copy", False),
        ("copy by links", False),
        *(
            pytest.param(name, True, marks=TRUTH)
            for name in ("first publish", "second publish", "copy", "copy by links", "rollback", "expire")
        ),
    ],
)
def test_what_a_run_relies_on_survives_though_its_writer_died_before_it_was_durable(
    tmp_path: Path, name: str, anywhere: bool, tally: Tally
) -> None:
    recording = Recording(tmp_path, name)
    moments = recording.after("link") + recording.after("mkdir")
    if anywhere:
        # The other calls change nothing that is visible, or no object.
        seen = ("write", "mark", "sync")
        moments = [0, *(number + 1 for number, call in enumerate(recording.calls) if call.verb not in seen)]
    found = [second_run(recording, tmp_path, moment, closely=anywhere) for moment in moments]
    problems = [problem for replay in found for problem in replay.problems]
    tried = sum(replay.states for replay in found)
    tally.add(f"death, restart, power failure: {name}", tried=tried, wrong=len(problems))
    assert problems == []


def test_a_restart_that_trusts_what_it_sees_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(tmp_path, "first publish")
    monkeypatch.setattr(LocalStorage, "make_durable", lambda self, paths: None)
    record_linked = recording.after("link")[-1]
    found = second_run(recording, tmp_path, record_linked, closely=False)
    assert "was told to be there and is gone" in found.problems[0]


# --- calls that fail ------------------------------------------------------------------------------


class Fails:
    """Raises at the ``number``-th call, counted from 0, with one of these verbs."""

    def __init__(self, number: int, verbs: tuple[str, ...], code: int, *, under: str = "") -> None:
        self.left, self.verbs, self.code, self.under = number, verbs, code, under
        self.hit: Call | None = None

    def __call__(self, call: Call) -> None:
        if self.hit is None and call.verb in self.verbs and call.path.startswith(self.under):
            if not self.left:
                self.hit = call
                raise OSError(self.code, os.strerror(self.code), call.path)
            self.left -= 1


FAULTS = [
    pytest.param(("sync",), errno.EIO, id="EIO at a sync"),
    pytest.param(("create", "mkdir", "write", "link"), errno.ENOSPC, id="ENOSPC at a write"),
    pytest.param(("open", "create"), errno.EMFILE, id="EMFILE at an open"),
    pytest.param(("unlink",), errno.EIO, id="EIO at an unlink"),
]


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize(("verbs", "code"), FAULTS)
def test_a_publish_of_which_a_call_fails_tells_the_truth(
    tmp_path: Path, verbs: tuple[str, ...], code: int, tally: Tally
) -> None:
    tried = 0
    for number in range(1000):
        base = tmp_path / str(number)
        base.mkdir()
        SCENARIOS["first publish"].prepare(base)
        storage, fails = storage_at(base / STORE), Fails(number, verbs, code)
        before = descriptors()
        told = published = None
        with SystemCalls(base, fails), in_small_steps(str):
            try:
                published = publish(storage, None)
            except CheckpointError as error:
                told = error
        if fails.hit is None:
            assert published is not None
            break
        tried += 1
        where = f"{code} at {fails.hit.verb} {fails.hit.path}: {told!r}"
        assert descriptors() <= before, where  # Others may close theirs meanwhile.
        ids = record_ids(LocalStorage(base / STORE)) if (base / STORE).exists() else []
        # Published: it exists. Outcome unknown: either. Another error: it does not exist.
        assert published is None or ids == [1], where
        assert published is not None or isinstance(told, OutcomeUnknown) or ids == [], where
        assert whole(storage) == "", where
        if "unlink" not in verbs:
            assert temporary_files(storage) == [], where
        go_on(storage)
        CheckpointStore(storage).collect_garbage(delete=True)
        assert whole(storage) == "", where
        assert temporary_files(storage) == [], where
    tally.add(f"a call of a publish fails: {os.strerror(code)}", tried=tried, wrong=0)
    assert tried >= len(verbs) * 4


@pytest.mark.parametrize(("verbs", "code"), FAULTS[:3])
def test_the_outcome_of_a_create_of_which_a_call_fails_is_the_truth(
    tmp_path: Path, verbs: tuple[str, ...], code: int
) -> None:
    record = layout.record_path(1)  # type: ignore[arg-type]
    for number in range(100):
        base = tmp_path / str(number)
        base.mkdir()
        storage, fails = LocalStorage(base / "store"), Fails(number, verbs, code)
        outcome = None
        visible = False
        with SystemCalls(base, fails):
            try:
                outcome = storage.create(record, b"first")
            except StorageError as error:
                visible = bool(error.details.get("visible"))
        stands = (base / "store" / record).exists()
        assert stands is (visible or outcome is CreateOutcome.CREATED)
        if fails.hit is None:
            break
        assert outcome is None
        # It may be tried again, and then it exists.
        assert storage.create(record, b"first") is (CreateOutcome.CONFLICT if stands else CreateOutcome.CREATED)
        assert storage.leftovers() == []
    assert number > 1


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO], ids=["EEXIST", "EIO"])
def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As on NFS, where the client repeats a request and finds the link that its first try made."""
    real = os.link

    def link_and_fail(*arguments: Any, **more: Any) -> None:
        real(*arguments, **more)
        raise OSError(code, os.strerror(code))

    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(os, "link", link_and_fail)
    permit = publish(storage, None)
    assert permit.ref.checkpoint_id == 1
    assert storage.create(layout.record_path(permit.ref.checkpoint_id), b"rival") is CreateOutcome.CONFLICT
    assert storage.leftovers() == []
    assert whole(storage) == ""


def test_a_conflict_is_told_when_what_stands_there_is_durable(tmp_path: Path) -> None:
    """After a conflict the record is read back. It may be our own, left by a copy that died, and
    then gets a permit.
    """
    storage = LocalStorage(tmp_path / "store")
    storage.create("checkpoints/x", b"first")
    with SystemCalls(tmp_path) as calls:
        assert storage.create("checkpoints/x", b"second") is CreateOutcome.CONFLICT
    assert [call.path for call in calls.calls if call.verb == "sync"][-1] == "store/checkpoints"


# --- attempts that have lost ----------------------------------------------------------------------


def after_link(calls: SystemCalls, do: Callable[[], Any], *, at: str) -> Callable[[Call], None]:
    """Make ``calls`` call ``do`` just before the first link to a name that begins with ``at``."""
    done = []

    def hook(call: Call) -> None:
        if call.verb == "link" and call.target.startswith(at) and not done:
            done.append(call)
            do()

    calls._before = hook
    return hook


def test_a_publisher_whose_temporary_record_was_collected_has_lost_and_says_so(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    first = publish(storage, None)

    def rival_wins_and_gc_runs() -> None:
        publish(LocalStorage(tmp_path / "store"), first)
        found = CheckpointStore(LocalStorage(tmp_path / "store")).collect_garbage(delete=True)
        assert [item.path for item in found.leftovers] == ["checkpoints/00000000000000000002.json"]

    calls = SystemCalls(tmp_path)
    after_link(calls, rival_wins_and_gc_runs, at="store/checkpoints/")
    with calls, pytest.raises(PublishConflict, match="was lost to another run"):
        publish(storage, first)
    assert record_ids(storage) == [1, 2]
    assert whole(storage) == ""


def test_a_worker_whose_temporary_segment_was_collected_is_told_to_restart(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    permit = publish(storage, None)
    slow = storage.open_output("segments/00000000000000000002/slow-1.parquet")
    slow.write(b"half")
    living = storage.open_output("segments/00000000000000000003/next-1.parquet")
    publish(storage, permit)
    found = CheckpointStore(storage).collect_garbage(delete=True)
    assert [item.path for item in found.leftovers] == ["segments/00000000000000000002/slow-1.parquet"]
    assert [item.path for item in found.unfinished] == ["segments/00000000000000000003/next-1.parquet"]
    before = descriptors()
    with pytest.raises(StorageError, match=r"slow-1\.parquet was not written .* gc does so .*Restart"):
        slow.close()
    assert len(descriptors()) == len(before) - 2
    living.close()
    assert [item.path for item in storage.list("segments/00000000000000000003/")] == [
        "segments/00000000000000000003/next-1.parquet"
    ]
    assert whole(storage) == ""


def test_a_record_keeps_standing_when_gc_takes_its_other_name(tmp_path: Path) -> None:
    """gc runs between the writer's link and unlink: the writer finds its temporary name gone, and
    goes on.
    """
    storage = LocalStorage(tmp_path / "store")

    def collect(call: Call) -> None:
        if call.verb == "unlink" and call.path.startswith("store/checkpoints/") and not collecting:
            collecting.append(call)
            found = CheckpointStore(LocalStorage(tmp_path / "store")).collect_garbage(delete=True)
            assert [item.path for item in found.leftovers] == ["checkpoints/00000000000000000001.json"]

    collecting: list[Call] = []
    with SystemCalls(tmp_path, collect):
        permit = publish(storage, None)
    assert collecting
    assert restart(storage) == permit
    assert whole(storage) == ""


# --- the model of a disk, where files are written over and renamed --------------------------------


def test_the_model_keeps_or_loses_each_unsynced_write_of_a_file_that_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"aaaabbbb")
    disk = Disk(tmp_path)
    for call in (
        Call("write", "db", b"1111", offset=0),
        Call("write", "db", b"2222", offset=6),
        Call("sync", "", covers=9),
    ):
        disk.apply(call)
    left = {tree["db"] for _, tree in disk.crashes(random.Random(1))}
    assert left >= {b"aaaabbbb", b"1111bb2222", b"1111bbbb", b"aaaabb2222"}
    assert {len(data or b"") for data in left} == {8, 10}
    disk.apply(Call("truncate", "db", offset=4))
    assert {tree["db"] for _, tree in disk.crashes(random.Random(1))} >= {b"aaaabbbb", b"1111"}
    disk.apply(Call("sync", "db", covers=99))
    assert {tree["db"] for _, tree in disk.crashes(random.Random(1))} == {b"1111"}


def test_the_model_keeps_or_loses_a_rename_as_one_and_brings_back_what_was_unlinked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "journal").write_bytes(b"j")
    disk = Disk(tmp_path)
    for call in (Call("rename", "a", target="b"), Call("unlink", "journal"), Call("ensure", "c"), Call("ensure", "b")):
        disk.apply(call)
    names = {frozenset(tree) for _, tree in disk.crashes(random.Random(1))}
    both = [{"b"}, {"a"}]
    assert names == {frozenset(x | y | z) for x in both for y in ({"journal"}, set()) for z in ({"c"}, set())}
    disk.apply(Call("sync", "", covers=99))
    assert {frozenset(tree) for _, tree in disk.crashes(random.Random(1))} == {frozenset({"b", "c"})}
