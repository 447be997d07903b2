"""Iceberg and Delta tables of state: as plain Python says, written once, by one commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from stateformat.backends.exporting import (
    Format,
    Place,
    Source,
    TableExport,
    files,
    iceberg,
    one_checkpoint,
    several_checkpoints,
    source as source_of,
)
from stateformat.errors import CheckpointExpired, DamagedCheckpoint, InvalidInput, StorageError
from stateformat.graph import JobGraph
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tables import ArrowStream
from tests.exporting.export_readers import (
    COLUMNS,
    FORMATS,
    ROWS,
    TYPES,
    catalog_of,
    export_one,
    export_several,
    files_in,
    rows_by_catalog,
    rows_of,
    types_store,
    versions_of,
)
from tests.forgery import Forger
from tests.worlds.data import NAMES, data_store, expected, expected_rows, same_rows
from tests.worlds.stores import Job, counts_job, counts_store, operator, refused

SPENT = ("totals", "spent")
COUNTS = ("counter", "counts")
formats = pytest.mark.parametrize("file_format", FORMATS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return data_store(str(tmp_path_factory.mktemp("world")))


def counts(tmp_path: Path, checkpoints: int = 1, **job: int) -> CheckpointStore:
    return counts_store(str(tmp_path / "store"), checkpoints, **job)


@formats
def test_all_states_are_tables_with_the_rows_that_plain_python_says(
    world: CheckpointStore, tmp_path: Path, file_format: Format
) -> None:
    checkpoint = world.open()
    sources = [one_checkpoint(checkpoint, state) for state in checkpoint.states]
    with TableExport(sources, file_format, Place(str(tmp_path)), alone=False) as tables:
        found = tables.run()
    assert [(one.operator, one.state) for one in found] == list(NAMES)
    for one, name in zip(found, NAMES, strict=True):
        wanted = expected(*name)
        table = rows_of(file_format, Path(one.path))
        assert same_rows(table, wanted), name
        assert table.schema.names == wanted.schema.names
        assert (one.rows, one.added, one.path) == (len(wanted), (6,), str(tmp_path.joinpath(*name)))
        if file_format is Format.ICEBERG:
            assert same_rows(rows_by_catalog(tmp_path, *name), wanted), name


def in_iceberg(point: Any) -> Any:
    """A value of ``point``, as pyiceberg reads it: of a null list in a struct it makes an empty
    one, in its own tables too."""
    if point is None:
        return None
    return {"x": point["x"], "more": [item and {"y_z": item["y.z"]} for item in point["more"] or []]}


@formats
def test_every_type_comes_back_and_what_changed_is_said(tmp_path: Path, file_format: Format) -> None:
    store = types_store(str(tmp_path / "store"))
    done = export_one(store, file_format, tmp_path / "table", (TYPES, TYPES))
    found = rows_of(file_format, tmp_path / "table")
    renamed = {
        Format.ICEBERG: {"a.b": "a_b_2", "Text": "Text_2"},
        Format.DELTA: {"a b": "a_b_2", "Text": "Text_2"},
    }[file_format]
    assert found.schema.names == [renamed.get(name, name) for name in COLUMNS]
    wanted = [{renamed.get(name, name): value for name, value in row.items()} for row in ROWS]
    if file_format is Format.ICEBERG:
        wanted = [{**row, "point": in_iceberg(row["point"])} for row in wanted]
    assert same_rows(found, pa.Table.from_pylist(wanted, found.schema))
    said = {note.column: note.message for note in done.notes}
    widened = {"tiny", "small", "point.x", "point.more.element.y.z", "counts.value"}
    if file_format is Format.ICEBERG:
        assert said.keys() == widened | renamed.keys()
        assert said["tiny"] == "is int instead of int8: Iceberg has no int8"
        assert "has no '.' in names" in said["a.b"]
        # pyiceberg's own writer would make an empty list of the null one, in the file too.
        [file] = (tmp_path / "table" / "data").iterdir()
        assert pq.read_table(file)["point"].to_pylist()[2] == {"x": None, "more": None}
    else:
        assert said.keys() == {"local"} | renamed.keys()
        assert "has no ' ' in names" in said["a b"]
    assert "another column has this name for tools that ignore case" in said["Text"]
    assert found.schema.field("local").type == pa.timestamp("us")
    assert found.schema.field("instant").type == pa.timestamp("us", "UTC")
    assert found.schema.field("precise").type == pa.decimal128(38, 10)


@formats
def test_a_second_export_of_the_same_checkpoint_adds_nothing(
    world: CheckpointStore, tmp_path: Path, file_format: Format
) -> None:
    export_one(world, file_format, tmp_path, SPENT)
    before = files_in(tmp_path)
    again = export_one(world, file_format, tmp_path, SPENT)
    assert (again.added, again.present, again.rows, again.version) == ((), (6,), 0, None)
    assert (files_in(tmp_path), versions_of(file_format, tmp_path)) == (before, 1)


@formats
def test_another_checkpoint_replaces_the_rows_and_the_old_ones_stay_in_the_past(
    world: CheckpointStore, tmp_path: Path, file_format: Format
) -> None:
    export_one(world, file_format, tmp_path, SPENT, 4)
    export_one(world, file_format, tmp_path, SPENT, 6)
    found = rows_of(file_format, tmp_path)
    assert same_rows(found, expected(*SPENT))
    assert found.schema.names == expected(*SPENT).schema.names
    if file_format is Format.DELTA:
        from deltalake import DeltaTable

        past = DeltaTable(tmp_path, version=0).to_pyarrow_table()
    else:
        table = catalog_of(tmp_path).load_table(SPENT)
        past = table.scan(snapshot_id=table.snapshots()[0].snapshot_id).to_arrow()
        # The id of a field stays with it: through a new name, and from int to long.
        first, last = table.schemas()[0], table.schema()
        assert first.find_field("town").field_id == last.find_field("city").field_id
        assert first.find_field("orders").field_id == last.find_field("orders").field_id
    assert same_rows(past, expected(*SPENT, 4))
    export_one(world, file_format, tmp_path, SPENT, 4)
    assert same_rows(rows_of(file_format, tmp_path), expected(*SPENT, 4))


@formats
def test_a_condition_is_part_of_what_a_table_holds(world: CheckpointStore, tmp_path: Path, file_format: Format) -> None:
    few = export_one(world, file_format, tmp_path, SPENT, where="city = 'Bern' and vip")
    wanted = [row for row in expected_rows(*SPENT) if row["city"] == "Bern" and row["vip"]]
    assert few.rows == len(wanted) > 0
    assert same_rows(rows_of(file_format, tmp_path), wanted)
    assert export_one(world, file_format, tmp_path, SPENT, where="city = 'Bern' and vip").added == ()
    assert export_one(world, file_format, tmp_path, SPENT).rows == len(expected(*SPENT))
    refused(
        InvalidInput,
        lambda: export_one(world, file_format, tmp_path, SPENT, where="town is null"),
        "totals/spent: .*no column 'town'",
    )


def test_an_iceberg_table_of_an_older_release_is_gone_on_with(world: CheckpointStore, tmp_path: Path) -> None:
    export_several(world, Format.ICEBERG, tmp_path, SPENT, [2, 4])
    table = catalog_of(tmp_path).load_table(SPENT)
    new = [name for name in table.properties if not name.startswith("stateformat.")]
    assert {"commit.retry.num-retries", "write.metadata.metrics.column.seen"} <= {*new}
    with table.transaction() as older:
        older.remove_properties(*new)
    assert export_several(world, Format.ICEBERG, tmp_path, SPENT, range(1, 7)).added == (1, 3, 5, 6)
    assert same_rows(
        rows_by_catalog(tmp_path, *SPENT).drop(["vip"]), [without_vip(row) for row in at_each([*range(1, 7)])]
    )
    assert catalog_of(tmp_path).load_table(SPENT).properties["commit.retry.num-retries"] == "0"


def without_vip(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the column whose default Iceberg does not know in older rows."""
    return {name: value for name, value in row.items() if name != "vip"}


def at_each(ids: list[int]) -> list[dict[str, Any]]:
    """The rows of ``spent`` in checkpoints, in its newest columns."""
    return [{"_checkpoint_id": i, **row} for i in ids for row in expected_rows(*SPENT, i, columns_of=6)]


@formats
def test_of_several_checkpoints_those_that_are_missing_are_added(
    world: CheckpointStore, tmp_path: Path, file_format: Format
) -> None:
    assert export_several(world, file_format, tmp_path, SPENT, [2, 5]).added == (2, 5)
    assert same_rows(rows_of(file_format, tmp_path), at_each([2, 5]))
    more = export_several(world, file_format, tmp_path, SPENT, range(1, 6))
    assert (more.added, more.present) == ((1, 3, 4), (2, 5))
    assert same_rows(rows_of(file_format, tmp_path), at_each([1, 2, 3, 4, 5]))
    assert export_several(world, file_format, tmp_path, SPENT, [1, 5]).added == ()
    assert versions_of(file_format, tmp_path) == 2


def test_iceberg_brings_older_rows_to_the_newest_columns(tmp_path: Path) -> None:
    store = data_store(str(tmp_path / "store"), checkpoints=4)
    export_several(store, Format.ICEBERG, tmp_path / "table", SPENT, [3, 4])
    store = data_store(str(tmp_path / "other"))
    assert {one.job_id for one in store.history()} == {open_store(str(tmp_path / "store")).open().record.job_id}
    error = refused(
        InvalidInput, lambda: export_several(store, Format.ICEBERG, tmp_path / "table", SPENT, [4, 5, 6]), "attempt"
    )
    assert "another history; export to another folder" in str(error)
    export_several(store, Format.ICEBERG, tmp_path / "table", SPENT, [5, 6])
    assert rows_of(Format.ICEBERG, tmp_path / "table").num_rows == sum(len(expected(*SPENT, i)) for i in (3, 4, 5, 6))
    found = [row for row in rows_of(Format.ICEBERG, tmp_path / "table").to_pylist() if row["_checkpoint_id"] == 3]
    # A default of ours is no default of Iceberg's: what older files lack is null.
    assert same_rows([{**row, "vip": False} for row in found], at_each([3]))


def test_delta_refuses_a_wider_type_where_older_rows_stay(tmp_path: Path) -> None:
    store = data_store(str(tmp_path / "store"), checkpoints=4)
    export_several(store, Format.DELTA, tmp_path / "table", SPENT, [3, 4])
    newer = data_store(str(tmp_path / "other"))
    error = refused(InvalidInput, lambda: export_several(newer, Format.DELTA, tmp_path / "table", SPENT, [5, 6]))
    assert "column 'orders' is integer in the Delta table" in str(error)
    assert "long in the state now" in str(error)
    assert versions_of(Format.DELTA, tmp_path / "table") == 1


def evolving(tmp_path: Path) -> CheckpointStore:
    """Two checkpoints; the second has a new column, a timestamp without zone."""
    first = declare.even_split_state("op", "s", columns={"n": pa.int32()})
    second = declare.even_split_state("op", "s", columns={"n": pa.int64(), "at": pa.timestamp("us")}, previous=first)
    store, permit = open_store(str(tmp_path / "store")), None
    for state, table in ((first, {"n": [1]}), (second, {"n": [2], "at": pa.array([7], pa.timestamp("us"))})):
        rows = pa.table(table)
        job = Job("grows", JobGraph((operator("op", 1),)), (state,), {("op", "s"): lambda _, rows=rows: rows})
        permit = job.publish(store, permit)
    return store


@formats
def test_new_columns_are_added(tmp_path: Path, file_format: Format) -> None:
    store = evolving(tmp_path)
    for ids in ([1], [1, 2]):
        export_several(store, file_format, tmp_path / "several", ("op", "s"), ids)
    found = rows_of(file_format, tmp_path / "several").to_pylist()
    assert sorted((row["_checkpoint_id"], row["n"], row["at"] is None) for row in found) == [
        (1, 1, True),
        (2, 2, False),
    ]
    for at in (1, 2, 1):
        export_one(store, file_format, tmp_path / "one", ("op", "s"), at)
        assert rows_of(file_format, tmp_path / "one")["n"].to_pylist() == [at]


def test_iceberg_follows_what_changes_inside_columns(tmp_path: Path) -> None:
    def point(number: pa.DataType, *new: tuple[str, pa.DataType]) -> pa.DataType:
        return pa.struct([*new, ("x", pa.int32()), ("l", pa.list_(pa.struct([("a", number)])))])

    kinds = ({"p": point(pa.int32()), "m": pa.int32()}, {"m": pa.int64(), "q": point(pa.int64(), ("y", pa.bool_()))})
    first = declare.even_split_state("op", "s", columns=kinds[0])
    second = declare.even_split_state("op", "s", columns=kinds[1], previous=first, renames={"p": "q"})
    rows = ({"p": {"x": 1, "l": [{"a": 2}]}, "m": 3}, {"m": 2**40, "q": {"y": True, "x": 4, "l": [{"a": 2**41}]}})
    store, permit = open_store(str(tmp_path / "store")), None
    for state, row, kind in zip((first, second), rows, kinds, strict=True):
        table = pa.Table.from_pylist([row], pa.schema(list(kind.items())))
        job = Job("grows", JobGraph((operator("op", 1),)), (state,), {("op", "s"): lambda _, table=table: table})
        permit = job.publish(store, permit)
    schemas = []
    for at in (1, 2, 1):
        export_one(store, Format.ICEBERG, tmp_path / "table", ("op", "s"), at)
        assert rows_by_catalog(tmp_path / "table", "op", "s").to_pylist() == [rows[at - 1]]
        schemas.append(catalog_of(tmp_path / "table").load_table(("op", "s")).schema())
    before, after, _ = schemas
    for old, new in (("p", "q"), ("p.x", "q.x"), ("p.l", "q.l"), ("p.l.element.a", "q.l.element.a"), ("m", "m")):
        assert before.find_field(old).field_id == after.find_field(new).field_id, old


class Breaking(ArrowStream):
    """Rows in batches of a hundred, whose stream breaks after some of them."""

    def __init__(self, stream: ArrowStream, after: int) -> None:
        self._stream, self._after = stream, after

    @property
    def schema(self) -> pa.Schema:
        return self._stream.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        whole = self._stream.table()
        for start in range(0, 100 * self._after, 100):
            yield from whole.slice(start, 100).to_batches()
        raise CheckpointExpired("checkpoint 2 is gone")


def breaking(source: Source, after: int) -> Source:
    return replace(source, rows_of=lambda ids: Breaking(source.rows_of(ids), after))


@formats
@pytest.mark.parametrize("there", [False, True])
def test_an_export_that_fails_half_way_leaves_the_table_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: Format, there: bool
) -> None:
    store, table = counts(tmp_path, 2, keys=2000), tmp_path / "table"
    if there:
        export_one(store, file_format, table, COUNTS, 1)
    before = files_in(table)
    monkeypatch.setattr(files, "FILE_BYTES", 1)
    monkeypatch.setattr(files, "GROUP_ROWS", 100)
    written: list[Any] = []
    inner = files.write_file
    monkeypatch.setattr(files, "write_file", lambda *given: written.append(inner(*given)) or written[-1])
    checkpoint = store.open(2)
    source = breaking(one_checkpoint(checkpoint, checkpoint.record.state(*COUNTS)), 10)
    with TableExport([source], file_format, Place(str(table)), alone=True) as tables:
        refused(CheckpointExpired, tables.run, "checkpoint 2 is gone")
    assert len(written) > 3
    assert files_in(table) - {"catalog.db"} == before - {"catalog.db"}
    if there:
        assert len(rows_of(file_format, table)) == 2000
    else:
        assert files_in(table) <= {"catalog.db"}


@formats
def test_damage_is_named_and_nothing_is_written(tmp_path: Path, file_format: Format) -> None:
    store = tmp_path / "store"
    counts_job(keys=2000).publish(open_store(str(store)), None, options=WriteOptions(inline_bytes_max=0))
    victim = sorted((store / "segments").rglob("*.parquet"))[1]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    error = refused(
        DamagedCheckpoint, lambda: export_one(open_store(str(store)), file_format, tmp_path / "table", COUNTS)
    )
    assert victim.name in str(error)
    assert files_in(tmp_path / "table") <= {"catalog.db"}


@formats
def test_of_all_states_none_is_changed_when_one_cannot_be_read(
    world: CheckpointStore, tmp_path: Path, file_format: Format
) -> None:
    checkpoint = world.open()
    sources = [one_checkpoint(checkpoint, state) for state in checkpoint.states]
    sources[-1] = breaking(sources[-1], 0)
    with TableExport(sources, file_format, Place(str(tmp_path)), alone=False) as tables:
        refused(CheckpointExpired, tables.run, "checkpoint 2 is gone")
    assert files_in(tmp_path) <= {"catalog.db"}


@formats
def test_of_two_exports_at_once_one_adds_nothing(tmp_path: Path, file_format: Format) -> None:
    store = counts(tmp_path, 2)
    export_several(store, file_format, tmp_path / "table", COUNTS, [1])
    records = store.history()
    source = several_checkpoints(store, records, records[0], *COUNTS)
    exports = [TableExport([source], file_format, Place(str(tmp_path / "table")), alone=True) for _ in range(2)]
    assert exports[0].run()[0].added == (2,)
    refused(StorageError, exports[1].run, "nothing was added: export again")
    for export in exports:
        export.close()
    assert len(rows_of(file_format, tmp_path / "table")) == 40
    named = {path for path in files_in(tmp_path / "table") if path.endswith("zstd.parquet")}
    assert len(named) == 2, "the files of the export that came too late are left"


@formats
def test_two_first_exports_at_once_make_one_table(tmp_path: Path, file_format: Format) -> None:
    store = counts(tmp_path)
    checkpoint = store.open()
    source = one_checkpoint(checkpoint, checkpoint.record.state(*COUNTS))
    barrier = threading.Barrier(2)
    outcomes: list[object] = []

    def export() -> None:
        try:
            with TableExport([source], file_format, Place(str(tmp_path / "table")), alone=True) as tables:
                barrier.wait(30)
                outcomes.append(tables.run()[0].added)
        except StorageError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=export) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (1,) in outcomes, outcomes
    assert len(rows_of(file_format, tmp_path / "table")) == 20
    assert export_one(store, file_format, tmp_path / "table", COUNTS).added == ()


def test_a_catalog_that_another_export_makes_meanwhile_costs_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.catalog.sql import SqlCatalog
    from sqlalchemy.exc import OperationalError

    def contested(*_: object) -> None:
        raise OperationalError("CREATE TABLE", {}, Exception("table iceberg_tables already exists"))

    store = counts(tmp_path)
    with monkeypatch.context() as racing:
        racing.setattr(SqlCatalog, "create_namespace_if_not_exists", contested)
        refused(StorageError, lambda: export_one(store, Format.ICEBERG, tmp_path / "table", COUNTS), "already exists;")
    assert files_in(tmp_path / "table") == {"catalog.db"}, "the winner's, who may be about to use it"
    assert export_one(store, Format.ICEBERG, tmp_path / "table", COUNTS).added == (1,)


def test_the_hint_is_mended_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = counts(tmp_path, 2)
    export_one(store, Format.ICEBERG, tmp_path / "table", COUNTS, 1)
    with monkeypatch.context() as crashing:
        crashing.setattr(iceberg.IcebergTarget, "mend", lambda self: None)
        export_one(store, Format.ICEBERG, tmp_path / "table", COUNTS, 2)
    assert versions_of(Format.ICEBERG, tmp_path / "table") == 1
    assert export_one(store, Format.ICEBERG, tmp_path / "table", COUNTS, 2).added == ()
    assert versions_of(Format.ICEBERG, tmp_path / "table") == 3, "one that deletes, one that appends"


@formats
def test_what_is_no_table_of_this_state_is_left_alone(
    world: CheckpointStore, tmp_path: Path, file_format: Format
) -> None:
    export_one(world, file_format, tmp_path / "spent", SPENT)
    export_several(world, file_format, tmp_path / "several", SPENT, [5, 6], where="orders > 3")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "from.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    other = counts(tmp_path)
    cases = (
        (lambda: export_one(world, file_format, tmp_path / "spent", ("totals", "baskets")), "baskets"),
        (lambda: export_one(other, file_format, tmp_path / "spent", COUNTS), "counts"),
        (
            lambda: export_several(world, file_format, tmp_path / "spent", SPENT, [5]),
            "holds the rows of one checkpoint",
        ),
        (lambda: export_one(world, file_format, tmp_path / "several", SPENT), "holds the rows of several checkpoints"),
        (lambda: export_several(world, file_format, tmp_path / "several", SPENT, [5]), "orders > 3|other rows"),
        (lambda: export_one(world, file_format, tmp_path / "letters", SPENT), "holds files"),
    )
    before = files_in(tmp_path)
    for call, words in cases:
        error = refused(InvalidInput, call, words)
        assert "export to" in str(error)
    assert files_in(tmp_path) == before


@formats
def test_a_table_of_somebody_else_is_refused(tmp_path: Path, file_format: Format) -> None:
    table = tmp_path / "table"
    if file_format is Format.DELTA:
        from deltalake import write_deltalake

        write_deltalake(table, pa.table({"a": [1]}))
    else:
        from pyiceberg.catalog.sql import SqlCatalog

        table.mkdir()
        catalog = SqlCatalog("stateformat", uri=f"sqlite:///{table}/catalog.db")
        catalog.create_namespace("counter")
        catalog.create_table(COUNTS, pa.schema([("a", pa.int64())]), location=str(table))
        catalog.close()
    refused(
        InvalidInput,
        lambda: export_one(counts(tmp_path), file_format, table, COUNTS),
        "a table that no export of a state has written",
    )


def test_an_iceberg_table_of_another_catalog_is_refused(tmp_path: Path) -> None:
    store = counts(tmp_path, 2)
    checkpoint = store.open(1)
    sources = [one_checkpoint(checkpoint, state) for state in checkpoint.states]
    with TableExport(sources, Format.ICEBERG, Place(str(tmp_path / "all")), alone=False) as tables:
        tables.run()
    table = tmp_path.joinpath("all", *COUNTS)
    refused(InvalidInput, lambda: export_one(store, Format.ICEBERG, table, COUNTS), "not in the catalog")
    hint = table / "metadata" / "version-hint.text"
    hint.write_text("00009-ffff")
    with pytest.raises(InvalidInput, match="has gone on to 00009-ffff"):
        TableExport(sources, Format.ICEBERG, Place(str(tmp_path / "all")), alone=False)


@formats
def test_a_folder_that_is_a_table_holds_no_others(tmp_path: Path, file_format: Format) -> None:
    store = counts(tmp_path)
    export_one(store, file_format, tmp_path / "lake", COUNTS)
    before = files_in(tmp_path / "lake")
    checkpoint = store.open()
    sources = [one_checkpoint(checkpoint, state) for state in checkpoint.states]

    def export_all() -> None:
        with TableExport(sources, file_format, Place(str(tmp_path / "lake")), alone=False) as tables:
            tables.run()

    refused(InvalidInput, export_all, "all states to another folder|is itself a Delta table")
    assert files_in(tmp_path / "lake") == before


@formats
def test_a_library_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_format: Format
) -> None:
    monkeypatch.setattr(source_of, "version", lambda _library: "0.9.1")
    error = refused(InvalidInput, lambda: export_one(counts(tmp_path), file_format, tmp_path / "table", COUNTS))
    assert "0.9.1 is installed" in str(error)
    assert f"pip install --upgrade 'stateformat[{file_format}]'" in str(error)


@formats
def test_one_state_goes_where_the_export_of_all_puts_it(tmp_path: Path, file_format: Format) -> None:
    states = tuple(
        declare.value_state(uid, name, keys={"word": pa.string()}, values={"n": pa.int64()})
        for uid, name in (("Counter", "N"), ("Counter", "n"), ("counter", "n"))
    )
    graph = JobGraph((operator("Counter", 1), operator("counter", 1)), ())
    table = pa.table({"word": ["a"], "n": [1]})
    rows = {(state.operator, state.name): lambda _: table for state in states}
    store = open_store(str(tmp_path / "store"))
    Job("job", graph, states, rows).publish(store, None)
    checkpoint, places = store.open(), []
    for chosen in (states, *((state,) for state in states)):
        sources = [one_checkpoint(checkpoint, state) for state in chosen]
        with TableExport(sources, file_format, Place(str(tmp_path / "lake")), alone=False) as tables:
            places.append([(one.path, one.added) for one in tables.run()])
    assert [[(path, ())] for path, _ in places[0]] == places[1:]
    assert len({path.lower() for path, _ in places[0]}) == 3


@formats
def test_dates_and_times_that_python_has_no_objects_for(tmp_path: Path, file_format: Format) -> None:
    columns = {"day": pa.date32(), "at": pa.timestamp("us"), "seen": pa.timestamp("us", "UTC")}
    far = 400_000 * 86_400_000_000  # µs: about a thousand years
    table = pa.table({"word": ["old", "now", "far"]})
    for name, kind in columns.items():
        step = far * 9 if kind != pa.date32() else 400_000 * 9
        storage = pa.int32() if kind == pa.date32() else pa.int64()
        table = table.append_column(name, pa.array([-step, 0, step], storage).cast(kind))
    store, job = open_store(str(tmp_path / "store")), counts_job(parallelism=1)
    state = declare.value_state("counter", "counts", keys={"word": pa.string()}, values=columns)
    replace(job, states=(state,), rows={COUNTS: lambda _: table}).publish(store, None)
    export_one(store, file_format, tmp_path / "table", COUNTS)
    found = rows_of(file_format, tmp_path / "table").select(table.schema.names).sort_by("day")
    for name in columns:
        number = pa.int32() if name == "day" else pa.int64()
        assert found[name].cast(number).to_pylist() == table[name].cast(number).to_pylist()


@formats
@pytest.mark.parametrize("name", ["with space", "a#b", "ümlaut"])
def test_a_folder_may_have_any_name(tmp_path: Path, file_format: Format, name: str) -> None:
    store = counts(tmp_path, 2)
    for at in (1, 2):
        export_one(store, file_format, tmp_path / name, COUNTS, at)
    if file_format is Format.DELTA:
        from urllib.parse import quote

        from deltalake import DeltaTable

        assert len(DeltaTable("file://" + quote(str(tmp_path / name))).to_pyarrow_table()) == 20
    else:
        assert len(rows_of(file_format, tmp_path / name)) == 20
    assert files_in(tmp_path) == {path for path in files_in(tmp_path) if path.startswith((name, "store"))}


@pytest.mark.parametrize("name", ["a?b", "a%20b", "a%41", "50%"])
def test_a_catalog_lies_where_it_was_asked_for(tmp_path: Path, name: str) -> None:
    store = counts(tmp_path, 2)
    for at in (1, 2, 2):
        export_one(store, Format.ICEBERG, tmp_path / name, COUNTS, at)
    assert len(rows_of(Format.ICEBERG, tmp_path / name)) == 20
    assert (tmp_path / name / "catalog.db").exists()
    assert files_in(tmp_path) == {path for path in files_in(tmp_path) if path.startswith((name, "store"))}


def test_a_name_that_deltalake_would_read_as_another_is_refused(tmp_path: Path) -> None:
    refused(InvalidInput, lambda: export_one(counts(tmp_path), Format.DELTA, tmp_path / "a%41", COUNTS), "without one")
    assert files_in(tmp_path) == {path for path in files_in(tmp_path) if path.startswith("store")}


@formats
def test_what_a_killed_export_left_does_not_stop_the_next_one(tmp_path: Path, file_format: Format) -> None:
    store, table = counts(tmp_path), tmp_path / "table"
    checkpoint = store.open()
    source = one_checkpoint(checkpoint, checkpoint.record.state(*COUNTS))
    with TableExport([source], file_format, Place(str(table)), alone=True) as tables:
        # As far as a process came that died before its commit.
        left = tables.targets[0].write(source.stream().batches())
    assert {file.path for file in left} <= files_in(table)
    assert export_one(store, file_format, table, COUNTS).added == (1,)
    assert len(rows_of(file_format, table)) == 20


def test_iceberg_refuses_a_type_that_older_rows_cannot_become(tmp_path: Path) -> None:
    store = data_store(str(tmp_path / "store"))
    export_several(store, Format.ICEBERG, tmp_path / "table", SPENT, [5, 6])
    older = data_store(str(tmp_path / "older"), checkpoints=4)
    before = files_in(tmp_path / "table")
    error = refused(InvalidInput, lambda: export_several(older, Format.ICEBERG, tmp_path / "table", SPENT, [3, 4]))
    assert "column 'orders' is long in the Iceberg table, and int32 in the state now" in str(error)
    assert files_in(tmp_path / "table") == before


@formats
def test_text_that_is_no_text_is_in_no_table(tmp_path: Path, file_format: Format) -> None:
    forger = Forger(counts(tmp_path).storage, 1)
    at = forger.find("counter", "counts", 1)
    rows = forger.table_of(at)
    word = rows.schema.get_field_index("word")
    forger.set_rows(at, rows.set_column(word, "word", pa.array([b"\xff\xfe"] * len(rows)).view(pa.string())))
    forger.seal()
    store = open_store(str(tmp_path / "store"))
    refused(DamagedCheckpoint, lambda: export_one(store, file_format, tmp_path / "table", COUNTS), "Invalid UTF8")
    assert files_in(tmp_path / "table") <= {"catalog.db"}


@formats
def test_a_checkpoint_that_expires_before_it_is_read_is_a_sentence(tmp_path: Path, file_format: Format) -> None:
    store, permit = open_store(str(tmp_path / "store")), None
    for _ in range(3):
        permit = counts_job(keys=2000).publish(store, permit, options=WriteOptions(inline_bytes_max=0))
    export_several(store, file_format, tmp_path / "table", COUNTS, [3])
    records = store.history()
    source = several_checkpoints(store, records, records[0], *COUNTS)
    with TableExport([source], file_format, Place(str(tmp_path / "table")), alone=True) as tables:
        store.expire(1)
        refused(CheckpointExpired, tables.run, "checkpoint 1 .*expire|expire.*1|gone|removed")
    assert len(rows_of(file_format, tmp_path / "table")) == 2000


def test_nothing_is_read_again_to_plan_all_states_of_several_checkpoints(tmp_path: Path) -> None:
    data_store(str(tmp_path / "store"))
    store = open_store(str(tmp_path / "store"))
    records = store.history()
    before = store.stats.total.calls
    sources = [several_checkpoints(store, records, records[0], *name) for name in NAMES]
    assert [source.stream().schema.names[0] for source in sources] == ["_checkpoint_id"] * len(NAMES)
    assert store.stats.total.calls == before


def test_a_table_of_one_state_costs_few_reads(tmp_path: Path) -> None:
    """The record, the manifest, and the segments of the state and no others, each once."""
    job = counts_job(keys=2000)
    job.publish(open_store(str(tmp_path / "store")), None, options=WriteOptions(inline_bytes_max=0))
    store = open_store(str(tmp_path / "store"))
    export_one(store, Format.DELTA, tmp_path / "table", COUNTS)
    counted = store.stats.operations
    touched = sum(counted[name].calls for name in ("read", "read_range", "open_input") if name in counted)
    assert touched <= 2 + 2 * job.graph.operator("counter").parallelism
    first = store.stats.copy()
    checkpoint = store.open()
    again = one_checkpoint(checkpoint, checkpoint.record.state(*COUNTS))
    with TableExport([again], Format.DELTA, Place(str(tmp_path / "table")), alone=True) as tables:
        assert tables.run()[0].added == ()
    assert store.stats.since(first).total.size_bytes < 40_000, "an export that adds nothing reads segments"
