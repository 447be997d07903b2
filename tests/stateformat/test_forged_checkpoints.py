"""Checkpoints whose stored bytes were forged: damage is told before a row is read wrong, and
nothing of it is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.manifest import manifest_ref
from stateformat.parquet.footer import carries_arrow_schema
from stateformat.segments import WriteOptions
from tests.forgery import Forger, get, put, seal
from tests.worlds.stores import counts_job, counts_store, flights_store

OBJECTS = WriteOptions(inline_bytes_max=0)


def test_a_handle_that_stands_twice_gives_no_row_twice(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path))
    forger = Forger(store.storage, 1)
    at = forger.find("counter", "counts")
    forger.handles.insert(at, forger.handles[at])
    forger.seal()
    checkpoint = store.open()
    with pytest.raises(sf.DamagedCheckpoint, match="another handle of its subtask and layer"):
        checkpoint.plan_restore(checkpoint.graph)


@pytest.mark.parametrize("state", ["sums", "overtaken"])
def test_rows_that_two_handles_name_are_neither_read_nor_dealt_twice(tmp_path: Path, state: str) -> None:
    store = flights_store(str(tmp_path))
    forger = Forger(store.storage, 2)
    at = forger.find("delays", state)
    forger.handles.insert(at, forger.handles[at])
    forger.seal()
    checkpoint = store.open()
    with pytest.raises(sf.DamagedCheckpoint, match="in two handles of subtask 0, layer 0"):
        checkpoint.read("delays", state)
    for parallelism in (4, 3):
        with pytest.raises(sf.DamagedCheckpoint, match="another handle of its subtask and layer"):
            checkpoint.plan_restore(checkpoint.graph.at(parallelism=parallelism))


def test_keyed_rows_of_a_subtask_that_does_not_own_them_are_neither_planned_nor_read(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path))
    forger = Forger(store.storage, 1)
    first, second = (forger.find("counter", "counts", subtask) for subtask in (0, 1))
    one, two = forger.handles[first], forger.handles[second]
    forger.handles[first], forger.handles[second] = two._replace(subtask=0), one._replace(subtask=1)
    forger.seal()
    checkpoint = store.open()
    with pytest.raises(sf.DamagedCheckpoint, match="its subtask 0 owns 0 to 63"):
        checkpoint.plan_restore(checkpoint.graph.at(parallelism=3))
    with pytest.raises(sf.DamagedCheckpoint, match=r"at subtask 0, which owns 0 to 63.*`ckpt validate "):
        checkpoint.read("counter", "counts")


def restored(checkpoint: sf.Checkpoint) -> Any:
    return checkpoint.restore(checkpoint.plan_restore(checkpoint.graph), "counter", 0)


@pytest.mark.parametrize(
    ("forge", "ask", "words"),
    [
        (
            lambda record: record["states"][0].update(key_columns=["nobody"]),
            (restored,),
            r"has no field \['nobody'\] in schema 1",
        ),
        (
            lambda record: record["operators"][1].update(uid="other"),
            (lambda checkpoint: checkpoint.plan_restore(checkpoint.graph),),
            "'counter' belongs to an operator that the graph",
        ),
    ],
    ids=["key-column", "operator"],
)
def test_a_state_that_does_not_fit_its_record_is_damage_of_the_record(
    tmp_path: Path, forge: Callable[[Any], None], ask: tuple[Callable[[sf.Checkpoint], Any]], words: str
) -> None:
    store = counts_store(str(tmp_path))
    Forger(store.storage, 1).seal(forge)
    for read in (*ask, lambda checkpoint: checkpoint.read("counter", "counts")):
        with pytest.raises(sf.DamagedCheckpoint, match=words):
            read(store.open())


def test_nobody_rolls_back_to_a_checkpoint_of_another_job(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path), 2)
    Forger(store.storage, 1).seal(lambda members: members.update(job_id="other"))
    with pytest.raises(sf.JobMismatch, match="is of job 'other', and the newest, 2, of job 'counts'"):
        store.rollback(1)
    assert store.open().id == 2


def test_an_object_that_has_grown_without_end_does_not_fill_the_target_of_a_copy(tmp_path: Path) -> None:
    source = sf.open(str(tmp_path / "store"), durable=False)
    counts_job().publish(source, None, options=OBJECTS)
    path = tmp_path / "store" / str(Forger(source.storage, 1).handles[0].path)
    os.truncate(path, 1 << 26)
    target = sf.open(str(tmp_path / "copy"), durable=False)
    with pytest.raises(sf.DamagedCheckpoint, match=r"has at least \d+ bytes .* its checkpoint says \d{3,4} "):
        source.copy(source.open(), target)
    assert sum(file.stat().st_size for file in (tmp_path / "copy").rglob("*") if file.is_file()) < 10_000


class Watched(pa.ExtensionType):  # type: ignore[misc]
    """An extension type that notices when Arrow makes one of what stands in a file."""

    made = 0

    def __init__(self) -> None:
        super().__init__(pa.int64(), "stateformat.tests.watched")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Watched:
        cls.made += 1
        return cls()


@pytest.fixture
def watched() -> Iterator[type[Watched]]:
    pa.register_extension_type(Watched())
    yield Watched
    pa.unregister_extension_type("stateformat.tests.watched")


@pytest.mark.parametrize("inline_bytes_max", [0, 16_384])
def test_an_extension_type_in_a_segment_is_never_made(tmp_path: Path, watched: Any, inline_bytes_max: int) -> None:
    store = sf.open(str(tmp_path), durable=False)
    counts_job(2, 200).publish(store, None, options=WriteOptions(inline_bytes_max=inline_bytes_max))
    forger = Forger(store.storage, 1)
    at = forger.find("counter", "counts")
    rows = forger.table_of(at)
    column = pa.ExtensionArray.from_storage(Watched(), rows["n"].combine_chunks())
    forger.set_rows(at, rows.set_column(rows.column_names.index("n"), "n", column), store_schema=True)
    forger.seal()
    watched.made = 0
    checkpoint = store.open()
    for parallelism in (2, 3):
        plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism=parallelism))
        with pytest.raises(sf.DamagedCheckpoint, match="ARROW:schema"):
            checkpoint.restore(plan, "counter", 0)["counts"].table()
    assert "SPEC 3.7" in {problem.clause for problem in sf.validate(store, level="full").problems}
    assert watched.made == 0


def test_an_arrow_schema_in_a_manifest_is_passed_over(tmp_path: Path, watched: Any) -> None:
    store = counts_store(str(tmp_path))
    storage, path = store.storage, store.open().record.manifest.path
    table = pq.read_table(pa.BufferReader(get(storage, path)))
    numbers = pa.ExtensionArray.from_storage(Watched(), table["row_start"].combine_chunks())
    table = table.set_column(table.column_names.index("row_start"), "row_start", numbers)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, store_schema=True)
    reseal(store, path, sink.getvalue().to_pybytes())
    watched.made = 0
    checkpoint = store.open()
    plan = checkpoint.plan_restore(checkpoint.graph)
    assert checkpoint.restore(plan, "counter", 0)["counts"].table().num_rows > 0
    assert watched.made == 0


def reseal(store: sf.CheckpointStore, path: str, data: bytes) -> None:
    """Other bytes of a manifest, under a record that vouches for them."""
    found = pq.read_metadata(pa.BufferReader(data))
    record_path = "checkpoints/00000000000000000001.json"
    members = json.loads(get(store.storage, record_path))
    del members["digest"]
    members["manifest"] = {
        "path": path,
        "size_bytes": len(data),
        "digest": manifest_ref(path, pa.py_buffer(data)).digest,
        "uncompressed_bytes": sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups)),
    }
    put(store.storage, path, data)
    put(store.storage, record_path, seal(members))


@pytest.mark.parametrize("stored", [False, True])
def test_an_arrow_schema_is_found_in_a_footer_and_nowhere_else(stored: bool) -> None:
    sink = pa.BufferOutputStream()
    rows = pa.table({"ARROW:schema": ["ARROW:schema"], "n": [[{"x": 1.5}]]})
    with pq.ParquetWriter(sink, rows.schema, store_schema=stored) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({"said": "ARROW:schema"})
    data = sink.getvalue()
    assert carries_arrow_schema(data) is stored
    # A footer that cannot be walked is not opened either.
    footer = b"\x18\xff\xff\x7fARROW:schema"
    assert carries_arrow_schema(pa.py_buffer(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"))


def test_a_path_too_long_for_the_system_is_a_missing_object(tmp_path: Path) -> None:
    store = sf.open(str(tmp_path), durable=False)
    counts_job().publish(store, None, options=OBJECTS)
    forger = Forger(store.storage, 1)
    forger.change(forger.find("counter", "counts"), path="segments/00000000000000000001/" + "a" * 5000)
    forger.seal()
    with pytest.raises(sf.DamagedCheckpoint) as caught:
        store.open().read("counter", "counts").table()
    assert caught.value.kind is sf.ErrorKind.OBJECT_MISSING
