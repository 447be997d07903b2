"""What commands print of stores and of other systems' checkpoints is taken at its word.

Each command that is named there is called, and must take what it was advised for.
"""

from __future__ import annotations

import functools
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from stateformat.segments import WriteOptions
from tests.advice.following import WIDE, Place, complaints, copied, lines_in, said
from tests.advice.sentences import HOLE
from tests.ckpt.ckpt_runs import run
from tests.worlds import stores

FIXTURES = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"

LOOK = """
history {s}
history {s}@1
inspect {s}@99
inspect {s} --rows 2
get {s} --key '"w1"'
get {s}
top {s}
top {s} --by bytes
du {s} --keep 1
validate {s}@{i}
validate {s} --level full
validate {s} --all --level full
validate {s} --newest-whole
sql {s} 'select * from states'
export {s} --to {n} --as flink-savepoint
export {s} --to {n}.csv
report {s} --to {n}.html
rollback {s}
rollback {s}@{i} --to {n}
repair {s}
repair {s}@{i}
copy {s} {n}
rewrite {s} --to {n}
pin {s} kept
gc {s} --keep 1
"""
PLAN = """
explain-restore {s} --parallelism 7
explain-restore {s} --parallelism 700
explain-restore {s} --max-parallelism 64
import {s} --to {n}
import {s} --to {n} --key-hash keep
rescale {s} --parallelism 3
rescale {s} --parallelism 3 --to {n}
"""


class Input(NamedTuple):
    """What commands are called with."""

    make: Callable[[Path], Path]
    """Makes it in an empty folder."""
    id: int = 1
    calls: str = LOOK + PLAN
    why: tuple[str, ...] = ()
    """What of the input itself may keep a command from doing what it is for."""


@functools.cache
def _five(folder: Path) -> Path:
    store, job = stores.counts_store(str(folder / "store")), stores.counts_job()
    for _ in range(4):
        job.publish(store, store.start(job.job_id), options=WriteOptions(inline_bytes_max=0))
    return folder / "store"


def five(folder: Path) -> Path:
    """Five checkpoints; the segments of the last four are objects."""
    return copied(_five(folder.parents[1]), folder / "store")


def damaged(pattern: str, change: Callable[[bytes], bytes] | None) -> Callable[[Path], Path]:
    """Five checkpoints, and an object of one of them is lost or changed."""

    def make(folder: Path) -> Path:
        store = five(folder)
        path = sorted(store.glob(pattern))[-1]
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()))
        return store

    return make


def fixture(name: str, pattern: str = "", change: Callable[[bytes], bytes] | None = None) -> Callable[[Path], Path]:
    """What Flink or Spark wrote; the newest file of a pattern is changed."""

    def make(folder: Path) -> Path:
        found = copied(FIXTURES / name, folder / "theirs")
        if change is not None:
            path = sorted(found.rglob(pattern))[-1]
            path.write_bytes(change(path.read_bytes()))
        return found

    return make


def flights(folder: Path) -> Path:
    """Something of everything."""
    stores.flights_store(str(folder / "store"))
    return folder / "store"


def empty(folder: Path) -> Path:
    """A folder without anything of ours."""
    (folder / "some").mkdir()
    return folder / "some"


def flipped(data: bytes) -> bytes:
    return data[:30] + bytes([data[30] ^ 1]) + data[31:]


GIVEN = {"SAVEPOINT": str(FIXTURES / "flink-2.3.0/core-hashmap-canonical/savepoint")}
LOST = ("damaged", "is missing from", "cut", "lost", "has 7")
INPUTS: dict[str, Input] = {
    "a store": Input(flights),
    "some checkpoints": Input(five, 3),
    "a lost segment": Input(damaged("segments/*5/*", None), 3, LOOK, LOST),
    "a flipped segment": Input(damaged("segments/*5/*", flipped), 3, LOOK, LOST),
    "a lost manifest": Input(damaged("manifests/*", None), 3, LOOK, LOST),
    "a cut record": Input(damaged("checkpoints/*5.json", lambda data: data[:100]), 3, LOOK, LOST),
    "a lost record": Input(damaged("checkpoints/*3.json", None), 2, LOOK, LOST),
    "no store": Input(empty, 1, LOOK + PLAN, ("is no store of checkpoints",)),
    "a Spark query": Input(fixture("spark-4.3.0/aggregate/checkpoint"), 4),
    "a damaged Spark query": Input(fixture("spark-4.3.0/aggregate/checkpoint", "*.delta", flipped), 4, LOOK, LOST),
    "a savepoint of Flink": Input(fixture("flink-2.3.0/core-hashmap-canonical/savepoint")),
    "a savepoint of Flink with values of its own": Input(
        fixture("flink-2.3.0/types-hashmap-canonical/savepoint"), why=("types/base-pojo cannot be read",)
    ),
}


MET: dict[str, tuple[str, ...]] = {
    "a store": (
        "; `ckpt history` lists what is there",
        "--operator {} --state {}",
        "`ckpt rewrite {}`",
        "is already a stateformat checkpoint",
        "Footers were read, but no rows: --level full",
    ),
    "a lost segment": (
        "; `ckpt validate {}@{}` lists everything that is wrong",
        "still exists and names it; `ckpt validate",
        "`ckpt repair` says which whole checkpoint",
        "` lists every way out, and what each would lose",
        "Sinks then see the input of",
        "You can copy out a whole checkpoint first",
        "A job can go on from",
        "shows what {} would restore",
    ),
    "a flipped segment": ("It holds state", "It was not copied; `ckpt validate`"),
    "a cut record": ("`ckpt repair` says what can be done",),
    "a lost record": ("are cut off. They can be inspected",),
    "a Spark query": (
        "copies the query itself",
        "`ckpt import {} --to STORE`",
        "Spark itself removes old batches",
        "keeps a copy that it has validated",
    ),
    "a damaged Spark query": (
        "or read another checkpoint (`ckpt history` lists them)",
        "says which is the newest batch that a copy can have whole",
        "--to COPY` writes the copy",
        "writes a folder from which the query goes on",
        "lists the batches.",
        "--to STORE` makes a store of {}.",
    ),
    "a savepoint of Flink": (
        "`ckpt rescale` takes",
        "Flink itself removes old checkpoints",
        "makes a savepoint of again",
        "lists what is wrong. Put damaged files back",
    ),
    "a savepoint of Flink with values of its own": ("` leaves it out, if the rest is worth", "--format json lists all"),
}
"""Sentences that are printed of each, by a piece of them."""


LONG = {name for name in INPUTS if name.startswith("a savepoint")}
"""What takes some ten seconds each."""


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.truth] * (each in LONG)) for each in INPUTS])
def test_every_command_that_is_advised_takes_what_it_is_advised_for(name: str, tmp_path: Path) -> None:
    made = INPUTS[name]
    (tmp_path / "made" / "it").mkdir(parents=True)
    source, wrong, seen = made.make(tmp_path / "made" / "it"), list[str](), set[str]()
    told = set[str]()
    for number, call in enumerate(filter(None, made.calls.split("\n"))):
        folder = tmp_path / f"tried-{number}"
        store = copied(source, folder / "it")
        found = run(*shlex.split(call.format(s=store, i=made.id, n=folder / "new")), COLUMNS=WIDE)
        text = said(found).replace(str(folder), "FOLDER")
        told |= {sentence.text for sentence, _ in complaints(text)}
        place = Place(store, made.id, GIVEN)
        for line in lines_in(text):
            if line in seen:
                continue
            seen.add(line)
            if place.made and place.made[-1].exists() and not line.count(" "):
                place.store = place.made[-1]  # `import` makes what `rescale` takes.
            argv, refused = place.tried(line.replace("FOLDER", str(folder)))
            if refused is not None and not any(why in refused for why in made.why):
                wrong.append(f"{call}: {text}\n    {shlex.join(argv)}\n    {refused}".replace(str(folder), ""))
            if refused is None and call.startswith("explain-restore") and argv[0] in ("import", "rescale", "rewrite"):
                changed = Path(argv[argv.index("--to") + 1]) if "--to" in argv else store
                again = run(*shlex.split(call.format(s=changed, i=made.id, n=folder / "again")), COLUMNS=WIDE)
                told_again = said(again).replace(str(changed), "FOLDER/it").replace(str(folder), "FOLDER")
                if line in lines_in(told_again) and f"`ckpt {line}`" in told_again:
                    wrong.append(f"{call}: {text}\n    {shlex.join(argv)}\n    did not help: {told_again}")
            if argv[0] not in ("import", "rescale"):
                shutil.rmtree(folder / "it", ignore_errors=True)
                copied(source, folder / "it")
        shutil.rmtree(folder)
    for piece in MET.get(name, ()):
        assert any(piece.replace("{}", HOLE) in text for text in told), f"nothing was told with {piece!r}"
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong)
