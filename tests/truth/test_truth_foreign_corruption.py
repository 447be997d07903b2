"""Files of Flink and Spark, each damaged in many places: a finding, an error of ours, or the same
rows. Where a format has no checksum, a flipped bit may give another value, which cannot be noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stateformat.backends.foreign import formats
from stateformat.errors import CheckpointError
from tests.fuzz.foreign_targets import FIXTURES, DictFolder, files_of
from tests.tally import Tally

TRIES = 100
"""How many damages of each kind are tried on each checkpoint."""
CHECKPOINTS: list[tuple[str, Any]] = [
    ("spark-4.3.0/aggregate/checkpoint", formats.spark),
    ("spark-4.3.0/aggregate-rocksdb/checkpoint", formats.spark),
    ("spark-3.5.9/join-outer/checkpoint", formats.spark),
    ("flink-2.3.0/core-hashmap-canonical/savepoint", formats.flink),
    ("flink-2.3.0/shared-hashmap-canonical-snappy/savepoint", formats.flink),
    ("flink-2.3.0/brief-rocksdb-native/savepoint", formats.flink),
]


def flipped(files: dict[str, bytes], path: str, chosen: random.Random) -> dict[str, bytes]:
    data = bytearray(files[path])
    data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    return {**files, path: bytes(data)}


def cut(files: dict[str, bytes], path: str, chosen: random.Random) -> dict[str, bytes]:
    return {**files, path: files[path][: chosen.randrange(len(files[path]))]}


def removed(files: dict[str, bytes], path: str, chosen: random.Random) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name != path}


def swapped(files: dict[str, bytes], path: str, chosen: random.Random) -> dict[str, bytes]:
    """Swap with the same file of another partition (Spark), or with another file (Flink)."""
    if path.startswith("state/"):
        parts = path.split("/")
        others = [other for other in files if other.split("/")[:2] + other.split("/")[3:] == parts[:2] + parts[3:]]
    else:
        others = [other for other in files if "/" not in path + other and "_metadata" not in (path, other)]
    other = chosen.choice(others or [path])
    return {**files, path: files[other], other: files[path]}


KINDS: dict[str, Callable[[dict[str, bytes], str, random.Random], dict[str, bytes]]] = {
    "one bit flipped": flipped,
    "truncated": cut,
    "removed": removed,
    "two files swapped": swapped,
}


def rows_of(files: dict[str, bytes], form: Any) -> list[tuple[str, str, str]] | None:
    """Return the rows of every state, as text; None if the damage is noticed."""
    folder: Any = DictFolder(files)
    try:
        opened = form(folder, None)
        if opened is None or not opened.validate(None, "full", None).ok:
            return None
        checkpoint = opened.open()
        return [
            (
                state.operator,
                state.name,
                str(sorted(map(repr, checkpoint.read(state.operator, state.name).table().to_pylist()))),
            )
            for state in checkpoint.states
        ]
    except CheckpointError:
        return None


def changes(files: dict[str, bytes], kind: str) -> Iterator[dict[str, bytes]]:
    chosen = random.Random(1)
    newest = max((path for path in files if path.startswith("commits/")), key=lambda path: int(path[8:]), default="")
    # Without its commit, the newest batch does not exist, and the query is at the one before.
    paths = sorted(path for path, data in files.items() if data and (kind, path) != ("removed", newest))
    tries = len(paths) if kind == "removed" else TRIES
    for number in range(tries):
        path = paths[number] if kind == "removed" else chosen.choice(paths)
        changed = KINDS[kind](files, path, chosen)
        if changed != files:
            yield changed


def can_know(place: str, kind: str, path: str) -> bool:
    """Return whether the damage can be noticed from the files alone.

    Flink has checksums only where it compresses, and in RocksDB's files, but not in its metadata.
    Its operator state has no keys that could show a swap. Spark's schemas have no checksums.
    """
    if kind == "one bit flipped":
        return not place.startswith("flink") and not path.endswith("/schema")
    return not (kind == "two files swapped" and "shared" in place)


@pytest.mark.truth
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("place", "form"), CHECKPOINTS, ids=[place for place, _ in CHECKPOINTS])
def test_damage_of_foreign_files_is_noticed_or_harmless(place: str, form: Any, kind: str, tally: Tally) -> None:
    files = files_of(FIXTURES / place)
    whole = rows_of(files, form)
    assert whole is not None
    tried = noticed = wrong = values = 0
    for changed in changes(files, kind):
        tried += 1
        found = rows_of(changed, form)
        noticed += found is None
        if found is not None and found != whole:
            paths = [path for path in changed if changed[path] != files.get(path)]
            if can_know(place, kind, paths[0] if paths else ""):
                wrong += 1
            else:
                values += 1
    note = f"{values} that nobody can know" if values else ""
    tally.add(f"foreign, {kind}: {place.rsplit('/', 1)[0]}", tried=tried, noticed=noticed, wrong=wrong, note=note)
    assert not wrong
    assert noticed
