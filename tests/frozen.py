"""What every command says of forty stores, to compare two versions of the code.

``python -m tests.frozen OUT`` writes a text file for each store into the folder OUT: every command
with its exit status, standard output and standard error, as text and as JSON. Run it before a
change and after it; ``diff -r BEFORE AFTER`` shows what the change changed. Ids, digests, sizes
that depend on them, times and the temporary folder are replaced by words, so two runs of one
version are equal.

The stores are ours of every version, sound and broken ones of the corpus, and checkpoints of Flink
and Spark, whole, cut short, and with a flipped byte. Commands that write work on a copy.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.ckpt.ckpt_runs import _standard

TESTS: Final = Path(__file__).resolve().parent
STORES: Final = (
    *(f"golden/{name}" for name in ("v1/flights", "v1/rescaled", "v1/stopped", "v1-runtime/store", "v1-timers/store", "v1-ttl/store")),
    *(f"corpus/sound/{name}" for name in ("crossed", "evolved", "finished", "history", "layers", "repaired", "wide")),
    *(f"corpus/broken/{name}" for name in ("2.3-manifest-missing", "2.3-segment-missing", "3.1-digest-differs", "3.3-unknown-feature", "3.5-partly-finished-behind-running", "4.1-row-range-beyond-the-segment")),
    *(f"foreign/fixtures/flink-{name}/savepoint" for name in ("1.13.6/core-hashmap-canonical", "1.15.4/brief-rocksdb-native", "2.3.0/brief-rocksdb-checkpoint", "2.3.0/sql-hashmap-canonical", "2.3.0/ttl-hashmap-native", "2.3.0/windows-hashmap-canonical")),
    *(f"foreign/fixtures/spark-{name}/checkpoint" for name in ("3.5.9/dedupe", "3.5.9/session-rocksdb", "4.0.5/transform-rocksdb-changelog", "4.3.0/aggregate", "4.3.0/join-outer", "4.3.0/two")),
)  # fmt: skip
"""Folders below tests/, as they are."""
HURT: Final = (
    "golden/v1/flights", "corpus/sound/layers", "foreign/fixtures/flink-2.3.0/core-hashmap-canonical/savepoint",
    "foreign/fixtures/spark-4.3.0/aggregate/checkpoint", "foreign/fixtures/spark-3.5.9/session-rocksdb/checkpoint",
)  # fmt: skip
"""Each once with its largest file cut by half, and once with a byte flipped in the middle of it:
with the above, forty-one.
"""
READ: Final = (
    "history S", "inspect S", "inspect S --rows 3", "inspect S@1", "get S --key 1", "get S --key \"a\" --all", "top S",
    "top S --by bytes", "diff S S", "diff S@1 S", "du S", "validate S", "validate S --level full", "validate S --all",
    "explain-restore S", "explain-restore S --parallelism 3", "explain-restore S --parallelism 100000", "export S --as jsonl --to OUT",
    "sql S \"from states\"", "gc S", "repair S", "report S --to PAGE",
)  # fmt: skip
WRITE: Final = (
    "rescale S --parallelism 3 --to OUT", "rescale S --parallelism 3", "rewrite S", "rewrite S --max-parallelism 64 --to OUT", "rollback S@1", "copy S OUT",
    "import S --to OUT --prove", "pin S@1 kept", "unpin S kept", "gc S --keep 1 --delete",
    "export S --as flink-savepoint --to OUT", "repair S --yes",
)  # fmt: skip
"""Commands that write, or would: the refusals of what does not apply are of interest, too."""
VOLATILE: Final = (
    (re.compile(r"\b[0-9a-f]{32}\b|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|xxh[0-9a-z-]*:[0-9a-f]+"), "<id>"),
    (re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?Z?"), "<time>"),
    (re.compile(r'"(\w*(created|made|written|took|seconds|age)\w*)":\s*[\d.]+'), r'"\1": <time>'),
    (re.compile(r"\b\d+(\.\d+)? (ms|s|min|h|days?)\b( (old|ago))?"), "<time>"),
)


def worlds(folder: Path) -> Iterator[tuple[str, Path]]:
    """The stores by name, each a fresh copy below the folder."""
    for place in STORES:
        yield place, shutil.copytree(TESTS / place, folder / place)
    for place in HURT:
        for damage in ("cut", "flipped"):
            copy = shutil.copytree(TESTS / place, folder / damage / place)
            largest = max(
                (path for path in copy.rglob("*") if path.is_file()), key=lambda path: (path.stat().st_size, path)
            )
            data = bytearray(largest.read_bytes())
            half = len(data) // 2
            data[half] ^= 0x40
            largest.write_bytes(data[:half] if damage == "cut" else data)
            yield f"{damage}/{place}", copy


def said(arguments: Sequence[str], hidden: Path) -> str:
    """A call of ``ckpt`` in this process, without what differs from run to run."""
    from stateformat.tools.ckpt.main import main

    with _standard("stdout", "utf-8") as out, _standard("stderr", "utf-8") as err:
        status = main(list(arguments))
        text = f"exit {status}\n{out.getvalue().decode()}\n{err.getvalue().decode()}".replace(str(hidden), "<folder>")
    for pattern, word in VOLATILE:
        text = pattern.sub(word, text)
    return text


def without_sizes(text: str) -> str:
    """Of what was written: ids and times compress to more or fewer bytes."""
    return re.sub(r"\b[\d,.]+ ?([KMG]i?)?B\b", "<size>", re.sub(r'"(\w*bytes)": \d+', r'"\1": <size>', text))


def called(
    form: str, store: Path, folder: Path, *, writes: bool, say: Callable[[Sequence[str], Path], str] = said
) -> str:
    """What a command says of the store; one that writes gets a copy."""
    work = folder / "work"
    work.mkdir()
    try:
        at = shutil.copytree(store, work / "store") if writes else store
        places = {"S": str(at), "S@1": f"{at}@1", "OUT": str(work / "out"), "PAGE": str(work / "page.html")}
        text = say([places.get(word, word) for word in shlex.split(form)], work if writes else folder)
        return without_sizes(text) if writes else text
    finally:
        shutil.rmtree(work)


def freeze(out: Path) -> int:
    """Write one file for each store; return how many calls there were."""
    os.environ.update(COLUMNS="80", NO_COLOR="1", TZ="UTC")
    calls = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, store in worlds(folder / "stores"):
            lines = []
            for form in (*READ, *WRITE):
                for more in ("", " --format json"):
                    lines.append(f"## ckpt {form}{more}\n{called(form + more, store, folder, writes=form in WRITE)}")
                    calls += 1
            (out / f"{name.replace('/', '.')}.txt").write_text("\n".join(lines))
            shutil.rmtree(store)
    return calls


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    print(f"{freeze(given.out)} calls on {len(STORES) + 2 * len(HURT)} stores")
