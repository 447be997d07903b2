"""The tables of a subtask of Flink, as entries by key groups: against a model in a dict."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from stateformat.backends.foreign.flink import keyed
from stateformat.backends.foreign.flink.keyed import Database, TableSource, open_database
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from tests.foreign.rocks_tables import DELETE, MERGE, PUT, Record, model, table

GROUPS = range(40, 60)


@dataclass(frozen=True)
class Slices:
    octets: bytes

    def __call__(self, at: int, length: int) -> bytes:
        return self.octets[at : at + length]


def database(files: list[bytes], prefix: int, first: int = GROUPS[0], last: int = GROUPS[-1]) -> Database:
    sources = [TableSource(f"{number:06}.sst", len(octets), Slices(octets)) for number, octets in enumerate(files)]
    return open_database(sources, prefix, first, last)


def records(prefix: int, groups: range) -> list[Record]:
    rng = random.Random(prefix)
    found = []
    for sequence in range(1, 600):
        group = rng.choice(groups)
        key = group.to_bytes(prefix, "big") + b"key-%d" % rng.randrange(12)
        kind = rng.choice([PUT, MERGE, MERGE, DELETE])
        found.append((key, sequence, kind, b"" if kind == DELETE else b"%d" % sequence))
    return found


def contents(some: Database, state: str, first: int | None = None, last: int | None = None) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for entries in some.entries(state, first, last):
        keys = entries.keys.to_arrow().to_pylist()
        assert entries.groups.tolist() == [int.from_bytes(key[: some.prefix], "big") for key in keys]
        assert not found or max(found) < min(keys)
        found |= dict(zip(keys, entries.values.to_arrow().to_pylist(), strict=True))
    return found


@pytest.mark.parametrize("prefix", [1, 2])
@pytest.mark.parametrize("budget", [1, 2000, 1 << 24])
def test_entries_come_by_key_group_and_only_those_of_the_handle(
    prefix: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "RANGE_BYTES", budget)
    # Files of a rescaled operator hold foreign key groups too.
    mine = records(prefix, range(30, 70))
    other = records(prefix, GROUPS)
    files = [table(mine[part::3], family="counts", per_block=5) for part in range(3)]
    files += [table(other, family="other state")]
    some = database(files, prefix)
    want = {key: value for key, value in model(mine).items() if int.from_bytes(key[:prefix], "big") in GROUPS}
    assert contents(some, "counts") == want
    assert contents(some, "other state") == model(other)
    assert contents(some, "no such state") == {}
    part = {key: value for key, value in want.items() if 45 <= int.from_bytes(key[:prefix], "big") <= 50}
    assert contents(some, "counts", 45, 50) == part
    counts = some.group_entries("counts")
    assert counts.tolist() == [sum(key.startswith(group.to_bytes(prefix, "big")) for key in want) for group in GROUPS]
    some.verify()


def test_what_lies_outside_of_the_handle_by_range_deletions_is_not_read() -> None:
    # As Flink 2 clips a restored database to its key groups.
    every = records(1, range(30, 70))
    stones = [(bytes([0]), bytes([GROUPS[0]]), 9001), (bytes([GROUPS[-1] + 1]), bytes([128]), 9002)]
    some = database([table(every, family="s"), table([], family="s", ranges=stones)], 1, 0, 127)
    want = {key: value for key, value in model(every).items() if key[0] in GROUPS}
    assert contents(some, "s") == want


def test_the_last_key_group_of_all_is_read() -> None:
    every = [(group.to_bytes(2, "big") + b"k", group, PUT, b"v") for group in (0, 255, 256, 32767)]
    some = database([table(every, family="s")], 2, 0, 32767)
    assert contents(some, "s") == model(every)
    assert contents(some, "s", 32767, 32767) == {b"\x7f\xffk": b"v"}


def test_wrong_numbers_are_found_by_verify() -> None:
    some = database([table(records(1, GROUPS), family="s", says={"merge.operands": 1})], 1)
    with pytest.raises(DamagedCheckpoint, match="merge operands, its properties say 1"):
        some.verify()


def test_values_merged_by_something_else_are_refused() -> None:
    octets = table(records(1, GROUPS), family="s", merge="MaxOperator")
    with pytest.raises(UnsupportedFormat, match="merged by MaxOperator"):
        contents(database([octets], 1), "s")
