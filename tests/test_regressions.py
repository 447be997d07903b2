"""Defects that somebody who tried to break the library has found, one test each, so that they stay mended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.parquet.footer import carries_arrow_schema
from stateformat.validation import validate
from tests.forgery import Forger, get, put
from tests.segments import CountingStorage
from tests.stores import counts_job, counts_store, edge, flights_store, operator

KEYS = {"k": pa.int64()}
OBJECTS = sf.WriteOptions(inline_bytes_max=0)


def value(previous: sf.State | None = None, *, keys: Any = KEYS, values: Any, **evolution: Any) -> sf.State:
    return sf.value_state("o", "s", keys=keys, values=values, previous=previous, **evolution)


def publish(store: sf.CheckpointStore, parent: Any, state: sf.State, rows: pa.Table | None, **more: Any) -> Any:
    """A checkpoint of one operator at parallelism 1 with one state: written whole, or carried where rows are None."""
    graph = sf.JobGraph((operator("o", 1),), ())
    pending = store.begin(job_id="j", graph=graph, states=[state], parent=parent, **more)
    with pending.context.subtask("o", 0) as writer:
        writer.carry("s") if rows is None else writer.write("s", rows)
    pending.add(writer)
    return pending.publish()


# ---- evolution -------------------------------------------------------------------------------------------------------


def test_a_column_renamed_to_the_name_of_a_dropped_one_keeps_its_own_rows() -> None:
    store = sf.open("memory://rename-over")
    old = value(values={"a": pa.int64(), "b": pa.int64()})
    permit = publish(store, None, old, pa.table({"k": [1], "a": [10], "b": [100]}))
    publish(store, permit, value(old, values={"b": pa.int64()}, renames={"a": "b"}), None)
    assert store.open().read("o", "s").table()["b"].to_pylist() == [10]


def test_a_nested_column_renamed_to_the_name_of_a_dropped_one_keeps_its_own_rows() -> None:
    store = sf.open("memory://rename-nested")
    one = pa.struct([("x", pa.int32())])
    old = value(values={"a": one, "b": one})
    rows = pa.table({"k": [1], "a": pa.array([{"x": 1}], one), "b": pa.array([{"x": 2}], one)})
    publish(store, publish(store, None, old, rows), value(old, values={"b": one}, renames={"a": "b"}), None)
    assert store.open().read("o", "s").table()["b"].to_pylist() == [{"x": 1}]


def test_columns_whose_dotted_names_look_nested_keep_ids_of_their_own() -> None:
    old = value(values={"a": pa.struct([("b", pa.int32())]), "a.b": pa.int32()})
    new = value(old, values={"a": pa.struct([("b", pa.int64())]), "a.b": pa.int32()})
    assert new.current.fields[2] == old.current.fields[2]
    assert new.current.fields[1].id == old.current.fields[1].id


@pytest.mark.parametrize("renames", [{"a": "elsewhere"}, {"a": "c", "b": "c"}])
def test_renames_that_lead_nowhere_or_collide_are_refused(renames: dict[str, str]) -> None:
    old = value(values={"a": pa.int64(), "b": pa.int64()})
    with pytest.raises(sf.InvalidInput, match=r"cannot rename|one name"):
        value(old, values={"c": pa.int64()}, renames=renames)


def test_the_default_of_rows_from_before_a_column_never_changes() -> None:
    first = value(values={"a": pa.int64()})
    second = value(first, values={"a": pa.int64(), "b": pa.int64()}, defaults={"b": "0"})
    with pytest.raises(sf.InvalidState, match="has the default '0' in rows from before it and would have '7'"):
        value(second, values={"a": pa.int64(), "b": pa.int64()}, defaults={"b": "7"})
    assert value(second, values={"b": pa.int64()}).current.fields[1].default == "0"


@pytest.mark.parametrize("kind", [pa.int64(), pa.struct([("x", pa.int64())])])
def test_a_column_that_may_hold_nulls_does_not_become_one_that_may_not(kind: pa.DataType) -> None:
    strict = pa.struct([pa.field("x", pa.int64(), nullable=False)]) if pa.types.is_struct(kind) else kind
    old = value(values=[pa.field("a", kind)])
    with pytest.raises(sf.InvalidState, match="may hold nulls and would be declared without"):
        value(old, values=[pa.field("a", strict, nullable=pa.types.is_struct(kind))])
    assert value(value(values=[pa.field("a", kind, nullable=False)]), values=[pa.field("a", kind)]).current.id == 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.int8(), "1_0"),
        (pa.int32(), " 5 "),
        (pa.int64(), "٣"),
        (pa.float64(), "inf"),
        (pa.float32(), "1e300"),
        (pa.date32(), "20200101"),
        (pa.decimal128(5, 2), "1e2"),
    ],
)
def test_a_default_that_other_readers_would_not_understand_is_refused(kind: pa.DataType, text: str) -> None:
    with pytest.raises(sf.InvalidInput, match="is no default for type"):
        value(value(values={"a": pa.int64()}), values={"a": pa.int64(), "b": kind}, defaults={"b": text})


def test_a_state_does_not_evolve_from_another_state() -> None:
    old = value(values={"a": pa.int64()})
    with pytest.raises(sf.InvalidInput, match="which is another state"):
        sf.value_state("o", "other", keys=KEYS, values={"a": pa.int64()}, previous=old)


# ---- keys and owners -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_owners_are_those_of_the_rows_as_they_will_be_written(words: pa.DataType) -> None:
    state = value(keys={"k": pa.int32(), "w": pa.string()}, values={"v": pa.int64()})
    graph = sf.JobGraph((operator("o", 3),), ())
    pending = sf.open(f"memory://owners-{words}").begin(job_id="j", graph=graph, states=[state], parent=None)
    numbers = pa.array(range(50), pa.int64())
    rows = pa.table({"k": numbers, "w": pa.array([f"w{i}" for i in range(50)]).cast(words), "v": numbers})
    owners = pending.context.owners("o", "s", rows)
    for subtask in range(3):
        with pending.context.subtask("o", subtask) as writer:
            writer.write("s", rows.filter(pa.array(owners == subtask)))
        pending.add(writer)
    assert pending.publish().ref.checkpoint_id == 1


def test_bytes_that_are_no_snapshot_are_refused_in_a_sentence() -> None:
    job = counts_job()
    pending = sf.open("memory://bytes").begin(job_id="j", graph=job.graph, states=job.states, parent=None)
    with pytest.raises(sf.InvalidInput, match="7 bytes that should be a snapshot are none"):
        pending.add(b"garbage")


# ---- restoring -------------------------------------------------------------------------------------------------------


def test_the_plan_of_another_checkpoint_restores_nothing() -> None:
    store = counts_store("memory://other-plan", checkpoints=2)
    old, new = store.open(1), store.open(2)
    with pytest.raises(sf.InvalidInput, match="the plan is for checkpoint 1"):
        new.restore(old.plan_restore(old.graph), "counter", 0)


def test_an_operator_that_the_checkpoint_does_not_know_starts_with_nothing() -> None:
    checkpoint = counts_store("memory://new-operator").open()
    graph = sf.JobGraph((*checkpoint.graph.operators, operator("new", 3)), checkpoint.graph.edges)
    plan = checkpoint.plan_restore(graph)
    assert checkpoint.restore(plan, "new", 2) == {}
    with pytest.raises(sf.InvalidInput, match="nor the topology has an operator 'neither'"):
        checkpoint.restore(plan, "neither", 0)


@pytest.mark.parametrize("subtask", [-1, 2, 7])
def test_a_subtask_that_is_not_planned_is_refused_rather_than_empty(subtask: int) -> None:
    checkpoint = counts_store(f"memory://subtask{subtask}").open()
    with pytest.raises(sf.InvalidInput, match="planned at parallelism 2"):
        checkpoint.restore(checkpoint.plan_restore(checkpoint.graph), "counter", subtask)


def test_layers_go_on_at_a_parallelism_at_which_some_subtasks_have_no_rows() -> None:
    store = counts_store("memory://carried", keys=5)
    permit = store.start("counts")
    assert permit is not None
    checkpoint = permit.checkpoint()
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism=20))
    pending = store.begin(
        job_id="counts", graph=plan.topology, states=checkpoint.states, parent=permit, carried=checkpoint.carried(plan)
    )
    change = pa.table({"word": [f"w{i}" for i in range(3, 9)], "n": [0] * 6, "_op": pa.array([0] * 6, pa.int8())})
    owners = pending.context.owners("counter", "counts", change)
    for subtask in range(20):
        pending.add(pending.context.subtask("lines", subtask))
        with pending.context.subtask("counter", subtask) as writer:
            writer.write("counts", change.filter(pa.array(owners == subtask)), delta=True)
        pending.add(writer)
    pending.publish()
    rows = store.open().read("counter", "counts").table()
    found = dict(zip(rows["word"].to_pylist(), rows["n"].to_pylist(), strict=True))
    assert found == {"w0": 0, "w1": 1, "w2": 2, **{f"w{i}": 0 for i in range(3, 9)}}
    assert validate(store, level="full").problems == ()


def test_what_a_rescale_has_cut_for_many_is_read_at_once_by_few() -> None:
    from stateformat.manifest import cut_handles
    from stateformat.redistribution import rescale

    storage = CountingStorage("many-cuts")
    store = sf.CheckpointStore(storage)
    counts_job(1, 500).publish(store, None, options=OBJECTS)
    checkpoint = store.open()
    dealt = rescale(checkpoint, checkpoint.plan_restore(checkpoint.graph.at(parallelism=128)))
    pending = store.begin(
        job_id="counts",
        graph=dealt.graph,
        states=dealt.states,
        parent=store.start("counts"),
        kind=sf.CheckpointKind.RESCALE,
        rescaled_from=dealt.rescaled_from,
    )
    pending.add_handles(cut_handles(checkpoint.manifest.full(), dealt.slices))
    pending.publish()
    many = store.open()
    plan = many.plan_restore(many.graph.at(parallelism=1))
    before = storage.reads
    rows = many.restore(plan, "counter", 0)["counts"].table()
    assert sorted(rows["n"].to_pylist()) == list(range(500))
    assert len(plan.slices_of("counter", 0)) > 100
    # One request: the segment, whole.
    assert storage.reads - before == 1


# ---- content ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitioner", [sf.Partitioner.FORWARD, sf.Partitioner.RESCALE, sf.Partitioner.BROADCAST])
def test_records_in_flight_that_no_restore_could_give_back_are_not_published(partitioner: sf.Partitioner) -> None:
    graph = sf.JobGraph((operator("a", 1), operator("b", 1)), (edge("a", "b", partitioner),))
    state = sf.in_flight_state("b", "flying", edge="a-b", columns={"v": pa.int64()})
    pending = sf.open(f"memory://flying-{partitioner}").begin(job_id="j", graph=graph, states=[state], parent=None)
    pending.add(pending.context.subtask("a", 0))
    zero = pa.array([0], pa.int32())
    with pending.context.subtask("b", 0) as writer:
        writer.write("flying", pa.table({"_sender": zero, "_receiver": zero, "_seq": [0], "v": [1]}))
    pending.add(writer)
    with pytest.raises(sf.InvalidState, match=f"1 records in flight on {partitioner} edge"):
        pending.publish()


def test_a_handle_that_stands_twice_gives_no_row_twice(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path))
    forger = Forger(store.storage, 1)
    at = forger.find("counter", "counts")
    forger.handles.insert(at, forger.handles[at])
    forger.seal()
    checkpoint = store.open()
    with pytest.raises(sf.DamagedCheckpoint, match="another handle of its subtask and layer"):
        checkpoint.plan_restore(checkpoint.graph)


def test_keyed_rows_of_a_subtask_that_does_not_own_them_are_damage(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path))
    forger = Forger(store.storage, 1)
    first, second = forger.find("counter", "counts", 0), forger.find("counter", "counts", 1)
    forger.handles[first], forger.handles[second] = (
        forger.handles[second]._replace(subtask=0),
        forger.handles[first]._replace(subtask=1),
    )
    forger.seal()
    checkpoint = store.open()
    with pytest.raises(sf.DamagedCheckpoint, match="its subtask 0 owns 0 to 63"):
        checkpoint.plan_restore(checkpoint.graph.at(parallelism=3))


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


def test_key_groups_at_a_subtask_that_does_not_own_them_are_not_read(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path))
    forger = Forger(store.storage, 1)
    first, second = (forger.find("counter", "counts", subtask) for subtask in (0, 1))
    one, two = forger.handles[first], forger.handles[second]
    forger.handles[first], forger.handles[second] = two._replace(subtask=0), one._replace(subtask=1)
    forger.seal()
    with pytest.raises(sf.DamagedCheckpoint, match=r"at subtask 0, which owns 0 to 63.*`ckpt validate "):
        store.open().read("counter", "counts")


def test_a_key_column_that_no_schema_has_is_damage_of_the_record(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path))
    Forger(store.storage, 1).seal(lambda members: members["states"][0].update(key_columns=["nobody"]))
    checkpoint = store.open()
    plan = checkpoint.plan_restore(checkpoint.graph)
    for read in (lambda: checkpoint.read("counter", "counts"), lambda: checkpoint.restore(plan, "counter", 0)):
        with pytest.raises(sf.DamagedCheckpoint, match=r"has no field \['nobody'\] in schema 1"):
            read()


def test_a_state_of_no_operator_is_damage_of_the_record_and_no_misuse(tmp_path: Path) -> None:
    store = counts_store(str(tmp_path))
    Forger(store.storage, 1).seal(lambda members: members["operators"][1].update(uid="other"))
    checkpoint = store.open()
    with pytest.raises(sf.DamagedCheckpoint, match="'counter' belongs to an operator that the graph"):
        checkpoint.plan_restore(checkpoint.graph)
    with pytest.raises(sf.DamagedCheckpoint, match="'counter' belongs to an operator that the graph lacks"):
        checkpoint.read("counter", "counts")


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


# ---- hostile stores --------------------------------------------------------------------------------------------------


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
def watched() -> Any:
    pa.register_extension_type(Watched())
    yield Watched
    pa.unregister_extension_type("stateformat.tests.watched")


@pytest.mark.parametrize("inline_bytes_max", [0, 16_384])
def test_an_extension_type_in_a_segment_is_never_made(tmp_path: Path, watched: Any, inline_bytes_max: int) -> None:
    store = sf.open(str(tmp_path), durable=False)
    counts_job(2, 200).publish(store, None, options=sf.WriteOptions(inline_bytes_max=inline_bytes_max))
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
    assert "SPEC 3.7" in {problem.clause for problem in validate(store, level="full").problems}
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
    from stateformat.manifest import manifest_ref
    from tests.forgery import seal

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


def test_a_column_called_like_the_arrow_schema_is_a_column() -> None:
    store = sf.open("memory://called-so")
    publish(store, None, value(values={"ARROW:schema": pa.int64()}), pa.table({"k": [1], "ARROW:schema": [7]}))
    assert store.open().read("o", "s").table()["ARROW:schema"].to_pylist() == [7]
    assert validate(store, level="full").problems == ()


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


def test_a_store_whose_first_checkpoint_appears_meanwhile_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    from stateformat.history import records as history
    from stateformat.validation import validator as validation

    store = sf.open("memory://meanwhile")
    listed = history.record_ids

    def late(storage: Any) -> Any:
        ids = listed(storage)
        if not ids:
            counts_job().publish(store, None)
        return ids

    monkeypatch.setattr(validation, "record_ids", late)
    assert validate(store).checkpoint_id == 1
