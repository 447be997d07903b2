"""The store of tests/worlds/data.py has what its head says, wherever it lies."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow.compute as pc
import pytest

from stateformat.store import CheckpointStore
from tests.servers.server import BUCKET, S3Server
from tests.worlds.data import NAMES, NEWEST, PARALLELISMS, data_store, expected, expected_changes, same_rows


def assert_right(store: CheckpointStore) -> None:
    for checkpoint_id in PARALLELISMS:
        checkpoint = store.open(checkpoint_id)
        for name in NAMES:
            found, wanted = checkpoint.state(*name).table(), expected(*name, checkpoint_id)
            assert found.schema == wanted.schema, name
            assert same_rows(found, wanted), name


def test_every_state_of_every_checkpoint_is_what_plain_python_says() -> None:
    assert_right(data_store("memory://data-world"))


@pytest.mark.s3
def test_it_lies_on_s3_as_well(moto: S3Server) -> None:
    assert_right(data_store(f"s3://{BUCKET}/data-world", **moto.options()))


def test_it_has_layers_inline_and_in_segments_of_both_schemas_a_rescale_and_null_keys(tmp_path: Path) -> None:
    store = data_store(str(tmp_path))
    assert [store.open(n).record.kind for n in PARALLELISMS].index("rescale") + 1 == 4
    handles = store.open().handles
    spent = handles.filter(pc.equal(handles["state"], "spent"))
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("segments/**/*.parquet")}
    apart = [
        {"inline" if path not in files else f"schema {schema}" for path, schema, layer in rows if layer == at}
        for rows in [list(zip(*(spent[name].to_pylist() for name in ("path", "schema_id", "layer")), strict=True))]
        for at in range(5)
    ]
    assert apart[:3] == [{"schema 1"}, {"schema 1"}, {"inline"}]
    assert "schema 2" in apart[3]
    assert apart[4] == {"inline"}
    assert {path.split("-")[1] for path in files} == {"spent", "baskets"}
    for name in ("spent", "baskets", "by_day"):
        assert any(row["user"] is None for row in expected("totals", name, 1).select(["user"]).to_pylist())


def test_who_reads_its_segments_gets_a_wrong_count_without_a_word(tmp_path: Path) -> None:
    data_store(str(tmp_path))
    [(found,)] = duckdb.sql(f"select count(*) from '{tmp_path}/segments/**/*spent*.parquet'").fetchall()
    assert (found, len(expected("totals", "spent"))) == (11840, 5739)
    with pytest.raises(duckdb.IOException, match="No files found"):
        duckdb.sql(f"from '{tmp_path}/segments/**/*recent*.parquet'")


def test_what_changed_leads_from_one_checkpoint_to_another() -> None:
    for name in (name for name in NAMES if name[0] == "totals" and name[1] != "rates"):
        for start in PARALLELISMS:
            changes = expected_changes(*name, start, NEWEST)
            kinds = {kind: sum(row["_change"] == kind for row in changes) for kind in ("insert", "delete")}
            grown = len(expected(*name)) - len(expected(*name, start))
            assert grown == kinds["insert"] - kinds["delete"]
    assert {row["_change"] for row in expected_changes("totals", "spent", 1, NEWEST)} == {
        "insert",
        "delete",
        "update_before",
        "update_after",
    }
    assert expected_changes("totals", "baskets", 3, 4) == []
