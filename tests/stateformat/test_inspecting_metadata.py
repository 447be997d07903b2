"""What a store holds, as tables: checkpoints, operators, states and handles."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest

from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointExpired, InvalidInput, NotFound
from stateformat.inspecting import METADATA_TABLES, metadata_table
from stateformat.store import CheckpointStore, open as open_store
from tests import data_world
from tests.segments import CountingStorage
from tests.stores import counts_store, flights_store, refused

SPARK = Path(__file__).parents[1] / "foreign" / "fixtures" / "spark-4.3.0" / "aggregate" / "checkpoint"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return data_world.data_store(str(tmp_path_factory.mktemp("shop")))


def rows(store: CheckpointStore, name: str, checkpoint_id: int | None = None) -> list[dict[str, Any]]:
    table = metadata_table(store, name, checkpoint_id)
    assert table.schema == METADATA_TABLES[name]
    table.validate(full=True)
    return table.to_pylist()


def test_checkpoints_are_those_of_the_history(shop: CheckpointStore) -> None:
    found = rows(shop, "checkpoints")
    for row, record in zip(found, shop.history(), strict=True):
        wanted = {
            "checkpoint_id": record.checkpoint_id,
            "attempt_id": record.attempt_id,
            "kind": record.kind.value,
            "parent_id": record.parent.checkpoint_id if record.parent else None,
            "job_id": "shop",
            "job_name": "Shop",
            "operators": 3,
            "finished_operators": 0,
            "rows": record.totals.rows,
            "bytes": record.totals.bytes,
            "stop": None,
            "rescaled_from": 3 if record.checkpoint_id == 4 else None,
        }
        assert row.items() >= wanted.items()
        assert int(row["created_at"].timestamp() * 1e6) == record.created_at_us
    assert rows(shop, "checkpoints", 4) == [found[2]]


def test_operators_say_what_has_finished(tmp_path: Path) -> None:
    store = flights_store(str(tmp_path))
    found = {row["operator"]: row for row in rows(store, "operators", 2)}
    assert (found["planes"]["status"], found["planes"]["finished_subtasks"]) == ("fully_finished", 4)
    assert found["airlines"]["status"] == "partially_finished"
    assert (found["airlines"]["finished_subtasks"], found["airlines"]["finishing_subtasks"]) == (1, 1)
    assert found["delays"].items() >= {"name": "Delays per plane", "parallelism": 4, "states": 6}.items()
    assert found["flights"]["coordinator"]
    assert [row["finished_operators"] for row in rows(store, "checkpoints")] == [1, 0]
    assert rows(store, "checkpoints")[0]["properties"] == [("owner", "ann"), ("purpose", "nightly run")]


def test_states_are_sums_over_handles(shop: CheckpointStore) -> None:
    handles = metadata_table(shop, "handles")
    with duckdb.connect() as connection:
        connection.register("handles", handles)
        wanted = connection.sql(
            """
            select checkpoint_id, operator, state, count(*) as handles, sum(rows)::bigint as rows,
                   count(distinct path) as segments
            from handles group by all
            """
        ).to_arrow_table()
        stored = connection.sql(
            """
            select checkpoint_id, operator, state, sum(size_bytes)::bigint as bytes
            from (select distinct checkpoint_id, operator, state, path, size_bytes from handles where path is not null)
            group by all
            """
        ).to_arrow_table()
    found = metadata_table(shop, "states")
    assert data_world.same_rows(found.select(wanted.column_names), wanted)
    by_state = {row["state"]: row["bytes"] for row in stored.to_pylist() if row["checkpoint_id"] == 6}
    newest = {row["state"]: row for row in found.to_pylist() if row["checkpoint_id"] == 6}
    assert {name: row["bytes"] for name, row in newest.items() if row["bytes"]} == by_state
    assert newest["refunds"].items() >= {"rows": 0, "bytes": 0, "layers": 0, "segments": 0}.items()
    assert newest["spent"].items() >= {"mode": "keyed", "kind": "value", "key_columns": ["user"], "schemas": 2}.items()
    assert [column["name"] for column in newest["spent"]["columns"]] == data_world.schema("totals", "spent").names
    default = next(column for column in newest["spent"]["columns"] if column["name"] == "vip")
    assert default == {"name": "vip", "type": "bool", "nullable": True, "id": 6, "default": "false"}
    assert newest["recent"]["columns"][0] == {
        "name": "_index",
        "type": "int64",
        "nullable": True,
        "id": None,
        "default": None,
    }
    layers = {row["checkpoint_id"]: row["layers"] for row in found.to_pylist() if row["state"] == "spent"}
    assert layers == {1: 1, 2: 2, 3: 3, 4: 3, 5: 4, 6: 5}


def test_another_systems_rows_are_null_and_no_data_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read", "group_rows"):
        monkeypatch.delattr(SparkSource, name)
    store = open_store(str(SPARK))
    for name in METADATA_TABLES:
        assert Counter(row["checkpoint_id"] for row in rows(store, name)).keys() == {1, 2, 3, 4, 5}
    assert {row["rows"] for row in rows(store, "states")} == {None}
    assert {row["rows"] for row in rows(store, "handles")} == {None}
    assert {row["mode"] for row in rows(store, "states", 3)} >= {"keyed"}


def test_records_are_read_once_and_manifests_once() -> None:
    storage = CountingStorage("inspecting-metadata")
    store = CheckpointStore(storage)
    counts_store("memory://inspecting-metadata", checkpoints=5)
    try:
        for name, reads in (("checkpoints", 5), ("operators", 5), ("states", 10), ("handles", 10)):
            before = storage.reads
            metadata_table(store, name)
            assert storage.reads - before == reads, name
        for name, reads in (("checkpoints", 3), ("handles", 4)):
            before = storage.reads
            metadata_table(store, name, 3)
            assert storage.reads - before == reads, name
        before = storage.reads
        feed = store.changes("counter", "counts", 4, 5)
        assert storage.reads - before == 2
        feed.table()
        # Two manifests; the state is inline.
        assert storage.reads - before == 4
        before = storage.reads
        store.changes("counter", "counts", 1, 5, every=True).table()
        assert storage.reads - before == 10
    finally:
        MemoryStorage.reset("inspecting-metadata")


def test_unknown_tables_and_checkpoints_are_sentences(shop: CheckpointStore, tmp_path: Path) -> None:
    words = "there is no table 'handle' of metadata; did you mean 'handles'?"
    refused(InvalidInput, lambda: metadata_table(shop, "handle"), words=words)
    refused(NotFound, lambda: metadata_table(shop, "states", 9), words="no checkpoint 9")
    expired = counts_store(str(tmp_path), checkpoints=3)
    expired.expire(1)
    refused(CheckpointExpired, lambda: metadata_table(expired, "handles", 1), words="has expired")


def test_the_page_of_the_tables_has_every_column_in_one_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metadata-tables.md").read_text()
    for name, schema in METADATA_TABLES.items():
        section = page.split(f"## `{name}`\n")[1].split("\n## ")[0]
        cells = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
        listed = {column: kind.strip() for names, kind in cells for column in re.findall(r"`(\w+)`", names)}
        assert listed.keys() == set(schema.names)
        for field in schema:
            said = listed[field.name].removesuffix(", null").replace(" ", "")
            assert (
                str(field.type).replace("element: ", "").replace(" ", "").startswith(said.split("<")[0].split("[")[0])
            )
            assert listed[field.name].endswith(", null") is field.nullable, field
