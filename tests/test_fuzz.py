"""A few hundred changes of record, manifest, segment and store under right digests: a result, or an error of the tree."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stateformat.errors import DamagedCheckpoint
from stateformat.manifest import decode_manifest
from stateformat.model import ManifestRef
from stateformat.validation import validate
from tests.forgery import Forger, get
from tests.fuzz import targets
from tests.fuzz import thrift_tree as thrift
from tests.fuzz.parquet_parts import Parts
from tests.stores import flights_store


@pytest.mark.parametrize(("name", "runs"), [("record", 60), ("manifest", 30), ("segment", 60), ("store", 4)])
def test_changed_objects_give_a_result_or_an_error_of_the_tree(name: str, runs: int) -> None:
    test = targets.make(name)
    chosen = random.Random(1)
    for _ in range(runs):
        data = chosen.randbytes(chosen.randrange(48))
        try:
            test(data)
        except Exception as error:
            raise AssertionError(f"target {name}, bytes {data.hex()}: {error}") from error


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
        groups = thrift.get(parts.footer, 4)[1]
        uncompressed_bytes = sum(thrift.unzigzag(thrift.get(group, 2)) for group in groups)
        ref = ManifestRef(record.manifest.path, len(data), xxhash.xxh3_128_hexdigest(data), uncompressed_bytes)
        try:
            manifest = decode_manifest(pa.py_buffer(data), ref)
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
