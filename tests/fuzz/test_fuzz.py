"""A few hundred changes of record, manifest, segment and store under right digests: a result, or an
error of the tree.
"""

from __future__ import annotations

import random
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from stateformat.errors import DamagedCheckpoint
from stateformat.manifest import decode_manifest, manifest_ref
from stateformat.validation import validate
from tests.forgery import Forger, get
from tests.fuzz import targets, thrift_tree as thrift
from tests.fuzz.mutations import Choices
from tests.fuzz.parquet_parts import Parts
from tests.worlds.stores import flights_store

RUNS = {"record": 60, "manifest": 30, "segment": 60, "store": 4}
FOREIGN_RUNS = {
    "spark folder": 60,
    "spark schemas": 300,
    "flink folder": 60,
    "flink metadata": 300,
    "flink kryo": 300,
    "rocksdb tables": 60,
    "foreign frames": 300,
    "flink shapes": 500,
    "spark shapes": 120,
    "rocksdb shapes": 500,
}


def test_every_target_is_tried() -> None:
    assert {*RUNS, *FOREIGN_RUNS} == {*targets.NAMES}


@pytest.mark.parametrize(("name", "runs"), [*RUNS.items(), *FOREIGN_RUNS.items()])
def test_changed_objects_give_a_result_or_an_error_of_the_tree(name: str, runs: int) -> None:
    test = targets.make(name)
    chosen = random.Random(1)
    for _ in range(runs):
        data = chosen.randbytes(chosen.randrange(48))
        try:
            test(data)
        except Exception as error:
            raise AssertionError(f"target {name}, bytes {data.hex()}: {error}") from error
    assert test.unmade <= runs // 20


@pytest.mark.parametrize(
    ("name", "found"),
    [
        # A list of 2**60 doubles where the bytes end, in what the tests read to vouch for a size.
        ("manifest", "013b00000000000000003b00000000050000ffff0000fffffff7f7ff59ffff"),
        # A footer that says more bytes than 64 bits hold, which the handle of the test was to say
        # too.
        ("segment", "3c001138a4dc34b434a4a42dff542b0011610a33303434111139304134"),
    ],
)
def test_what_the_fuzzer_once_found_is_read_or_refused(name: str, found: str) -> None:
    test = targets.make(name)
    test(bytes.fromhex(found))
    assert not test.unmade


def test_only_what_is_read_can_be_a_finding() -> None:
    def broken(choices: Choices) -> targets.Reading:
        raise OverflowError("of the tests")

    def reading(choices: Choices) -> targets.Reading:
        def read() -> None:
            raise OverflowError("of the product")

        return read

    test = targets.Target(broken)
    test(b"x")
    assert test.unmade == 1
    with pytest.raises(OverflowError, match="of the product"):
        targets.Target(reading)(b"x")


def test_a_slow_reading_is_a_finding_only_when_it_is_slow_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SECONDS_MAX", 0.01)
    calls: list[int] = []

    def prepare(slow: int) -> targets.Preparation:
        def read() -> None:
            calls.append(slow)
            end = time.process_time() + 0.02
            while len(calls) <= slow and time.process_time() < end:
                pass

        return lambda choices: read

    targets.Target(prepare(1))(b"x")
    assert calls == [1, 1]
    calls.clear()
    with pytest.raises(targets.Slow, match="processor time"):
        targets.Target(prepare(2))(b"x")


HOSTILE = [
    b"",
    b"\x19",  # A list of which nothing is there.
    b"\x19\xf7" + b"\xff" * 8 + b"\x7f" + bytes(99),  # Of 2**63 doubles.
    b"\x16" + b"\xff" * 99,  # A number without an end.
    b"\x1c" * 10_000,  # Structures in structures.
    b"\x19" + b"\x19" * 10_000,  # Lists in lists.
    b"\x18\x7f" + bytes(10),  # A string longer than what is there.
    b"\x1b\x00",  # A map.
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: f"{data[:4].hex()} of {len(data)}")
def test_the_tree_of_the_tests_refuses_what_is_none(data: bytes) -> None:
    with pytest.raises(thrift.Unreadable):
        thrift.parse(data)


def test_positions_beyond_the_dictionary_of_inline_segments_are_damage() -> None:
    store = flights_store("memory://positions")
    record = store.open().record
    table = Forger(store.storage, 2)
    parts = Parts(uncompressed(get(store.storage, record.manifest.path)))
    inline = parts.pages[-1]
    assert len(table.handles) > 20
    original = inline[-1][1]
    refusals = 0
    for at in range(len(original)):
        inline[-1][1] = original[:at] + b"\x7f" + original[at + 1 :]
        data = parts.data()
        buffer = pa.py_buffer(data)
        try:
            manifest = decode_manifest(buffer, manifest_ref(record.manifest.path, buffer))
            manifest.inline("")
            manifest.full()
        except DamagedCheckpoint:
            refusals += 1
    assert refusals > len(original) // 4


def uncompressed(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pq.read_table(pa.BufferReader(data)), sink, compression="none", store_schema=False)
    return sink.getvalue().to_pybytes()


RECORD = targets.make("record")


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=64))
def test_hypothesis_drives_the_same_targets(data: bytes) -> None:
    RECORD(data)


def test_the_forging_tools_change_nothing_by_themselves() -> None:
    store = flights_store("memory://untouched")
    parts = Forger(store.storage, 2)
    for at, handle in enumerate(parts.handles):
        if handle.rows:
            data = parts.bytes_of(at)
            body, footer = thrift.split_footer(data)
            assert thrift.join_footer(body, footer) == data
            taken = Parts(data)
            parts.set_bytes(at, taken.data())
    parts.seal()
    report = validate(store, level="full")
    assert not report.problems, report
