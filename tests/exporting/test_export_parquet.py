"""Partitioned Parquet and files of all states: whole or not there, and read by the tools of Hive's
folders.

``ckpt export`` into tables and folders: what it says, and what it refuses in a sentence.
"""

from __future__ import annotations

import datetime
import hashlib
import shlex
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import csv, dataset, parquet as pq

from stateformat.backends.exporting import (
    Format,
    Place,
    Source,
    export,
    export_files,
    one_checkpoint,
    several_checkpoints,
)
from stateformat.backends.exporting.source import _safe
from stateformat.errors import CheckpointExpired, InvalidInput
from stateformat.graph import JobGraph
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tables import ArrowStream
from tests.ckpt.ckpt_runs import document, failure, page, run
from tests.exporting.export_readers import TYPES, files_in, rows_of, types_store
from tests.worlds.data import NAMES, data_store, expected, expected_rows, same_rows
from tests.worlds.stores import Job, flights_store, operator, refused

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


SPENT_OPTIONS = ("--operator", "Totals per user", "--state", "spent")
FIXTURES = Path(__file__).parents[1] / "foreign" / "fixtures"
SAVED = FIXTURES / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"
QUERY = FIXTURES / "spark-4.3.0" / "join-outer" / "checkpoint"


@pytest.fixture(scope="module")
def exported_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    data_store(str(folder))
    return folder


@pytest.mark.parametrize("file_format", ["iceberg", "delta"])
def test_all_states_in_one_call(exported_world: Path, tmp_path: Path, file_format: str) -> None:
    found = document("export", exported_world, "--as", file_format, "--to", tmp_path)
    assert [(one["operator"], one["state"]) for one in found["states"]] == list(NAMES)
    assert found["rows"] == sum(len(expected(*name)) for name in NAMES)
    assert found["catalog"] == (f"{tmp_path}/catalog.db" if file_format == "iceberg" else None)
    for one, name in zip(found["states"], NAMES, strict=True):
        assert same_rows(rows_of(Format(file_format), Path(one["path"])), expected(*name))
    again = document("export", exported_world, "--as", file_format, "--to", tmp_path)
    assert (again["rows"], again["files"]) == (0, 0)
    assert all((one["added"], one["present"], one["version"]) == ([], [6], None) for one in again["states"])
    text = page("export", exported_world, "--as", file_format, "--to", tmp_path)
    assert "nothing: all of it was already there" in text
    newer = document("export", f"{exported_world}@3", "--operator", "totals", "--as", file_format, "--to", tmp_path)
    assert {one["operator"] for one in newer["states"]} == {"totals"}


def test_the_page_says_what_was_written_where_and_what_is_not_as_it_was(tmp_path: Path) -> None:
    types_store(str(tmp_path / "store"))
    text = page("export", tmp_path / "store", "--as", "iceberg", "--to", tmp_path / "lake")
    assert "Exported from checkpoint 1" in text
    assert "3 rows · 1 file" in text
    words = " ".join(text.split())
    assert f"{TYPES}/{TYPES}: tiny is int instead of int8: Iceberg has no int8" in words
    assert "a.b is named 'a_b_2': Iceberg has no '.' in names" in words
    found = document("export", tmp_path / "store", "--as", "delta", "--to", tmp_path / "delta")
    notes = found["states"][0]["notes"]
    assert {"column": "local", "message": "is timestamp_ntz, which needs a reader of Delta's version 3"} in notes


def test_several_checkpoints_are_told_apart_in_every_format(exported_world: Path, tmp_path: Path) -> None:
    wanted = [
        {"_checkpoint_id": i, **row}
        for i in (2, 3)
        for row in expected_rows("totals", "spent", i, columns_of=6)
        if row["orders"] > 7
    ]
    chosen = (*SPENT_OPTIONS, "--checkpoints", "2..3", "--where", "orders > 7", "--to")
    for file_format in Format:
        found = document("export", exported_world, *chosen, tmp_path / file_format, "--as", file_format)
        assert (found["checkpoint_ids"], found["where"]) == ([2, 3], "orders > 7")
        table = rows_of(file_format, tmp_path / file_format)
        assert same_rows(table, type(table).from_pylist(wanted, table.schema))
    found = document("export", exported_world, *chosen, tmp_path / "x.parquet")
    assert (found["rows"], found["checkpoint_id"]) == (len(wanted), 3)
    table = pq.read_table(tmp_path / "x.parquet")
    assert same_rows(table, type(table).from_pylist(wanted, table.schema))
    document("export", exported_world, *chosen, tmp_path / "x.csv")
    assert csv.read_csv(tmp_path / "x.csv")["_checkpoint_id"].unique().to_pylist() == [2, 3]
    assert "checkpoints 2 to 3" in run("export", exported_world, *chosen, "-", "--as", "jsonl").err
    whole = document(
        "export", exported_world, *SPENT_OPTIONS, "--all-checkpoints", "--as", "delta", "--to", tmp_path / "whole"
    )
    assert whole["states"][0]["added"] == [1, 2, 3, 4, 5, 6]
    ended = document(
        "export", exported_world, *SPENT_OPTIONS, "--checkpoints", "5..", "--as", "delta", "--to", tmp_path / "whole"
    )
    assert (ended["states"][0]["added"], ended["states"][0]["present"]) == ([], [5, 6])


@pytest.mark.parametrize("file_format", ["parquet", "csv", "jsonl"])
def test_files_of_all_states(exported_world: Path, tmp_path: Path, file_format: str) -> None:
    found = document("export", exported_world, "--as", file_format, "--to", tmp_path / "out")
    assert files_in(tmp_path / "out") == {f"{operator}/{state}.{file_format}" for operator, state in NAMES}
    assert [one["rows"] for one in found["states"]] == [len(expected(*name)) for name in NAMES]
    assert (
        "holds "
        in failure("export", exported_world, "--as", file_format, "--to", tmp_path / "out", status=2)["message"]
    )


def test_states_of_every_mode_and_kind_are_tables(tmp_path: Path) -> None:
    store: CheckpointStore = flights_store(str(tmp_path / "store"))
    for file_format in Format:
        for at in (1, 2):
            found = document(
                "export", f"{tmp_path / 'store'}@{at}", "--as", file_format, "--to", tmp_path / file_format
            )
        for one in found["states"]:
            wanted = store.open().state(one["operator"], one["state"]).table()
            assert same_rows(rows_of(file_format, Path(one["path"])), wanted), one
        several = document(
            *(
                "export",
                tmp_path / "store",
                "--all-checkpoints",
                "--as",
                file_format,
                "--to",
                tmp_path / f"{file_format}s",
            )
        )
        assert all(one["added"] == [1, 2] for one in several["states"])


@pytest.mark.parametrize("file_format", ["iceberg", "delta"])
@pytest.mark.parametrize("foreign", [SAVED, QUERY], ids=["flink", "spark"])
def test_checkpoints_of_other_systems_become_tables(tmp_path: Path, file_format: str, foreign: Path) -> None:
    found = document("export", foreign, "--as", file_format, "--to", tmp_path)
    assert found["rows"] > 0
    assert all(one["added"] for one in found["states"])
    for one in found["states"]:
        assert len(rows_of(Format(file_format), Path(one["path"]))) == one["rows"]
    again = document("export", foreign, "--as", file_format, "--to", tmp_path)
    assert again["rows"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--as iceberg --to x --force", "--force replaces a file"),
        ("--to x", "'x' is the folder of all states; add --as iceberg, delta"),
        ("--to x.csv", "Missing option '--operator'; a file holds one state"),
        ("--state spent --as delta --to x", "Missing option '--operator'"),
        ("--operator nope --as delta --to x", "has no operator 'nope'"),
        ("--operator totals --state spnt --as delta --to x", "did you mean 'spent'"),
        ("--as delta --partition-by a --to x", "--partition-by writes Parquet"),
        ("--as delta --checkpoints 7..9 --to x", "no checkpoint 7"),
        ("--as delta --checkpoints 5..2 --to x", "ends before it begins"),
        ("--as delta --checkpoints 2 --to x", "is not a range of checkpoints"),
        ("--as delta --checkpoints 0..2 --to x", "is not a range of checkpoints"),
        ("--as delta --checkpoints .. --to x", "is not a range of checkpoints"),
        ("--as delta --checkpoints 2..3 --all-checkpoints --to x", "contradict each other"),
        ("--as delta --checkpoints 2..3 --subtask 0 --to x", "--subtask is of one checkpoint"),
        ("--as delta --subtask 7 --operator totals --to x", "subtasks 0 to 2"),
        ("--as delta --where vip --to x", "orders/positions: .*no column 'vip'"),
        ("--operator totals --state spent --as delta --where 'oders > 1' --to x", "no column 'oders'"),
        ("--operator totals --state spent --as delta --where orders --to x", "BOOLEAN|boolean|condition"),
        ("--as delta --to s3://", "names? no|no address|is no "),
        ("--as iceberg --to memory://x", "cannot hold tables"),
        ("--as iceberg --to -", "--to - is standard output, and this goes into a folder"),
        ("--as parquet --operator totals --state spent --partition-by city --to -", "is standard output"),
        ("--as flink-savepoint --where a --to x", "writes all operators"),
        ("--as flink-savepoint --all-checkpoints --to x", "writes all operators"),
        ("--as flink-savepoint --partition-by a --to x", "writes all operators"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    exported_world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("export", exported_world, *shlex.split(options))
    assert found.status in (2, 3), found
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(" ".join(found.err.split()))
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("how", ["--as iceberg", "--as delta", "--operator totals --state spent --partition-by city"])
def test_a_file_is_no_folder(exported_world: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "a.csv").write_text("n")
    error = failure("export", exported_world, *shlex.split(how), "--to", tmp_path / "a.csv", status=2)
    assert "a.csv is a file; give a folder that is new or empty" in error["message"]


def test_the_table_of_another_state_is_told_by_both_names(exported_world: Path, tmp_path: Path) -> None:
    rates, spent = (
        ("export", exported_world, "--as", "delta", "--to", tmp_path / "t", "--operator", "totals", "--state", one)
        for one in ("rates", "spent")
    )
    document(*rates)
    assert (
        "t is of state 'rates' of operator 'totals', job 'shop', and this export is of state 'spent' of operator 'totals', "
        "job 'shop'; export to another folder"
    ) in failure(*spent, status=2)["message"]


def test_a_place_in_the_store_is_refused(exported_world: Path) -> None:
    for place in ("segments/x", "manifests"):
        error = failure("export", exported_world, "--as", "delta", "--to", exported_world / place, status=2)
        assert "garbage collection would delete it" in error["message"]
    error = failure("export", SAVED, "--as", "delta", "--to", SAVED / "out", status=2)
    assert "stays as it is" in error["message"]


def test_one_checkpoint_is_not_several(exported_world: Path, tmp_path: Path) -> None:
    error = failure(
        "export", f"{exported_world}@2", "--as", "delta", "--all-checkpoints", "--to", tmp_path / "x", status=2
    )
    assert "@2 is one checkpoint" in error["message"]
