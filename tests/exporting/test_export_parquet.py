"""Partitioned Parquet and files of all states: whole or not there, and read by the tools of Hive's
folders."""

from __future__ import annotations

import datetime
import hashlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import dataset, parquet as pq

from stateformat.backends.exporting import Place, Source, export, export_files, one_checkpoint, several_checkpoints
from stateformat.backends.exporting.source import _safe
from stateformat.errors import CheckpointExpired, InvalidInput
from stateformat.graph import JobGraph
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tables import ArrowStream
from tests.data_world import NAMES, data_store, expected, expected_rows, same_rows
from tests.exporting.export_readers import files_in
from tests.stores import Job, operator, refused

SPENT = ("totals", "spent")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return data_store(str(tmp_path_factory.mktemp("world")))


def source(store: CheckpointStore, name: tuple[str, str], **chosen: Any) -> Source:
    checkpoint = store.open()
    return one_checkpoint(checkpoint, checkpoint.record.state(*name), **chosen)


def write(file: Any, schema: pa.Schema, batches: Any) -> int:
    rows = 0
    with pq.ParquetWriter(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def partitioned(one: Source, to: Path, *columns: str) -> Any:
    return export_files([one], Place(str(to)), ".parquet", write, partition_by=columns, alone=True)[0]


def store_of(tmp_path: Path, table: pa.Table) -> Source:
    """One state with these rows."""
    state = declare.even_split_state("op", "s", columns=dict(zip(table.schema.names, table.schema.types, strict=True)))
    at = operator("op", 1)
    store = open_store(str(tmp_path / "store"))
    Job("j", JobGraph((at,)), (state,), {("op", "s"): lambda _subtask: table}).publish(store, None)
    return source(store, ("op", "s"))


def test_a_folder_for_each_value_is_read_by_pyarrow_and_duckdb(world: CheckpointStore, tmp_path: Path) -> None:
    done = partitioned(source(world, SPENT), tmp_path / "out", "city", "vip")
    wanted = expected(*SPENT)
    assert done.rows == len(wanted)
    types = pa.schema([("city", pa.string()), ("vip", pa.bool_())])
    found = dataset.dataset(tmp_path / "out", partitioning=dataset.HivePartitioning(types)).to_table()
    assert same_rows(found.select(wanted.schema.names), wanted)
    counted = duckdb.sql(
        f"select city, vip, count(*) n from read_parquet('{tmp_path}/out/**', hive_partitioning = true) group by all"
    ).fetchall()
    pairs = {(row["city"], row["vip"]) for row in expected_rows(*SPENT)}
    assert {(city, {True: True, "true": True, None: None}.get(vip, False)) for city, vip, _ in counted} == pairs
    assert sum(n for *_, n in counted) == len(wanted)
    assert done.files == len(pairs) == len(files_in(tmp_path / "out"))
    assert (tmp_path / "out" / "city=__HIVE_DEFAULT_PARTITION__" / "vip=false" / "part-00000.parquet").exists()
    assert pq.read_schema(tmp_path / "out" / "city=Bern" / "vip=true" / "part-00000.parquet").names == [
        *("user", "orders", "euros", "seen", "tier")
    ]


@pytest.mark.parametrize(
    ("values", "kind", "folders"),
    [
        ([1, None, -2], pa.int8(), {"c=1", "c=__HIVE_DEFAULT_PARTITION__", "c=-2"}),
        (["a/b", "x=y", "Zürich"], pa.string(), {"c=a%2Fb", "c=x%3Dy", "c=Z%C3%BCrich"}),
        (["..", "a b", "%"], pa.string(), {"c=..", "c=a b", "c=%25"}),
        ([datetime.date(2026, 3, 1)] * 3, pa.date32(), {"c=2026-03-01"}),
        ([Decimal("1.50"), None, None], pa.decimal128(4, 2), {"c=1.50", "c=__HIVE_DEFAULT_PARTITION__"}),
        ([True, False, True], pa.bool_(), {"c=true", "c=false"}),
    ],
)
def test_values_become_names_that_readers_give_back(
    tmp_path: Path, values: list[Any], kind: pa.DataType, folders: set[str]
) -> None:
    table = pa.table({"c": pa.array(values, kind), "n": [1, 2, 3]})
    partitioned(store_of(tmp_path, table), tmp_path / "out", "c")
    assert {path.name for path in (tmp_path / "out").iterdir()} == folders
    # pyarrow makes no decimals of names.
    types = pa.schema([("c", pa.string() if pa.types.is_decimal(kind) else kind)])
    found = dataset.dataset(tmp_path / "out", partitioning=dataset.HivePartitioning(types)).to_table()
    assert same_rows(found.select(["c", "n"]).cast(table.schema), table)


def test_several_checkpoints_are_folders_too(world: CheckpointStore, tmp_path: Path) -> None:
    records = world.history()
    chosen = [record for record in records if record.checkpoint_id in (1, 5)]
    partitioned(several_checkpoints(world, chosen, records[0], *SPENT), tmp_path / "out", "_checkpoint_id")
    found = dataset.dataset(tmp_path / "out", partitioning="hive").to_table()
    wanted = [{"_checkpoint_id": i, **row} for i in (1, 5) for row in expected_rows(*SPENT, i, columns_of=6)]
    assert same_rows(found, pa.Table.from_pylist(wanted, found.schema))


def test_all_states_go_into_files_of_their_names(world: CheckpointStore, tmp_path: Path) -> None:
    done = export_files([source(world, name) for name in NAMES], Place(str(tmp_path / "out")), ".parquet", write)
    assert files_in(tmp_path / "out") == {f"{operator}/{state}.parquet" for operator, state in NAMES}
    for one, name in zip(done, NAMES, strict=True):
        assert same_rows(pq.read_table(one.path), expected(*name))


def test_names_that_are_no_folders_get_a_digest(tmp_path: Path) -> None:
    at = operator("../a:1", 1)
    names = ("s", "S", "ß", "x" * 300, "con.d")
    states = [declare.even_split_state(at.uid, name, columns={"n": pa.int64()}) for name in names]
    rows = {(at.uid, name): lambda _, n=n: pa.table({"n": [n]}) for n, name in enumerate(names)}
    store = open_store(str(tmp_path / "store"))
    Job("j", JobGraph((at,)), tuple(states), rows).publish(store, None)
    sources = [source(store, (at.uid, name)) for name in names]
    done = export_files(sources, Place(str(tmp_path / "out")), ".parquet", write)
    paths = [Path(one.path).relative_to(tmp_path / "out") for one in done]
    assert [pq.read_table(tmp_path / "out" / path)["n"].to_pylist() for path in paths] == [[n] for n in range(5)]
    assert len({str(path).lower() for path in paths}) == 5
    assert paths[0].name == "s.parquet"
    assert [str(path) for path in paths] == [
        str(Path(one.path).relative_to(tmp_path / "again"))
        for one in export_files(sources[::-1], Place(str(tmp_path / "again")), ".parquet", write)[::-1]
    ]


def test_what_is_there_is_never_replaced(world: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("mine")
    refused(InvalidInput, lambda: partitioned(source(world, SPENT), tmp_path / "out", "city"), "holds letter.txt")
    refused(
        InvalidInput, lambda: partitioned(source(world, SPENT), tmp_path / "out" / "letter.txt", "city"), "is a file"
    )
    assert files_in(tmp_path) == {"out/letter.txt"}


def test_a_failure_leaves_no_folder(world: CheckpointStore, tmp_path: Path) -> None:
    from dataclasses import replace

    class Broken(ArrowStream):
        schema = expected(*SPENT).schema

        def batches(self) -> Any:
            yield from expected(*SPENT).to_batches()
            raise CheckpointExpired("gone")

    broken = replace(source(world, SPENT), rows_of=lambda ids: Broken())
    refused(CheckpointExpired, lambda: partitioned(broken, tmp_path / "deep" / "out", "city"), "gone")
    assert files_in(tmp_path) == set()
    assert not (tmp_path / "deep" / "out").exists()


def test_columns_that_cannot_be_folders_are_refused(
    world: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = (
        (SPENT, ("euros",), "is double, which cannot be a folder name"),
        (("totals", "recent"), ("shop",), "cannot be a folder name"),
        (("totals", "reminders"), ("note",), "is binary, which cannot be a folder name"),
        (SPENT, ("citty",), "did you mean 'city'"),
        (SPENT, ("city", "city"), "named twice"),
        (("orders", "unassigned"), ("path",), "a file needs one"),
    )
    for name, columns, words in cases:
        refused(
            InvalidInput,
            lambda name=name, columns=columns: partitioned(source(world, name), tmp_path / "o", *columns),
            words,
        )
    monkeypatch.setattr(export, "PARTITIONS_MAX", 5)
    refused(InvalidInput, lambda: partitioned(source(world, SPENT), tmp_path / "o", "city"), "more than 5 values")
    long = store_of(tmp_path, pa.table({"c": ["x" * 300], "n": [1]}))
    refused(InvalidInput, lambda: partitioned(long, tmp_path / "o", "c"), "makes a name of 302 bytes")
    assert not (tmp_path / "o").exists()


def test_no_folder_looks_like_an_option_and_no_two_names_get_one() -> None:
    digits = hashlib.sha256(b"a.b").hexdigest()[:8]
    made_up = f"a_b_{digits}"
    names = {"-rf", "--help", "-", "A", "a", "a.b", made_up, made_up.upper()}
    found = _safe(names)
    assert not [folder for folder in found.values() if folder.startswith("-")]
    assert len({folder.lower() for folder in found.values()}) == len(names)
    assert (found["a"], found[made_up]) == ("a", made_up)
    assert _safe({"a.b"}) == {"a.b": made_up}, "as earlier releases name it"
