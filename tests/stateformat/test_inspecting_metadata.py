"""What a store holds, as tables: checkpoints, operators, states and handles.

The keys with most rows or bytes, against DuckDB; with memory for few sums, and with hot keys. What
a store costs: named and own bytes, what is shared, garbage, what retention would free.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointExpired, InvalidInput, NotFound
from stateformat.graph import JobGraph
from stateformat.inspecting import METADATA_TABLES, metadata_table, sizes_document, top as module, top_document
from stateformat.inspecting.top import BYTES, ROWS, HotKeys, even_keys, hot_keys
from stateformat.model import State
from stateformat.reading import Checkpoint, StateRows
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.stateformat.test_golden import GOLDEN
from tests.storage.linking import counted_store
from tests.worlds import data as data_world, stores
from tests.worlds.segments import CountingStorage
from tests.worlds.stores import Job, counts_store, flights_store, operator, owned, refused

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


OPERATOR = operator("op", 2)


def checkpoint_of(folder: Path, state: State, *layers: pa.Table) -> Checkpoint:
    """A checkpoint of one state, whole and then with deltas, at two subtasks."""
    store = open_store(str(folder), durable=False)
    keys = list(state.key_columns)
    rows = {("op", state.name): lambda subtask: owned(layers[0], keys, OPERATOR, subtask)}
    job = Job("hot", JobGraph((OPERATOR,)), (state,), rows)
    options = WriteOptions(row_group_rows=1000)
    permit = job.publish(store, None, options=options)
    for layer in layers[1:]:
        delta = {("op", state.name): lambda subtask, layer=layer: owned(layer, keys, OPERATOR, subtask)}
        permit = job.publish(store, permit, deltas=delta, options=options)
    return store.open()


def skewed(count: int, keys: int, seed: int) -> pa.Table:
    """Entries of lists: a tenth of all stands under key 7, other keys have a few each."""
    random = np.random.default_rng(seed)
    key = np.where(random.random(count) < 0.1, 7, random.integers(0, keys, count))
    table = pa.table({"k": key, "n": pa.array(range(count), pa.int64())})
    text = "select k, row_number() over (partition by k order by n) - 1 as _index, repeat('x', n % 40) as t from rows"
    return duckdb.from_arrow(table).query("rows", text).to_arrow_table()


def wanted(rows: StateRows, measure: str, limit: int) -> tuple[list[int], int, int, int]:
    """The greatest values, and keys, rows and bytes in all, by DuckDB."""
    table = rows.table()
    columns = [name for name in table.column_names if str(table.schema.field(name).type) == "string"]
    fixed = sum(8 for name in table.column_names if name not in columns)
    # A text takes its bytes and the four of its offset.
    size = " + ".join([str(fixed), *(f"coalesce(strlen({name}), 0) + 4" for name in columns)])
    keys = ", ".join(rows.state.key_columns)
    found = duckdb.from_arrow(table).query(
        "rows", f"select count(*) as {ROWS}, sum({size})::bigint as {BYTES} from rows group by {keys}"
    )
    sums = found.query("sums", f"select {measure}, {ROWS}, {BYTES} from sums order by 1 desc").fetchall()
    return [row[0] for row in sums[:limit]], len(sums), sum(row[1] for row in sums), sum(row[2] for row in sums)


def figures(found: HotKeys, measure: str) -> tuple[list[int], int, int, int]:
    return found.keys[measure].to_pylist(), found.key_count, found.rows, found.size_bytes


@pytest.mark.parametrize("held_bytes", [32 << 20, 8000, 500])
@pytest.mark.parametrize("by_group", [True, False])
@pytest.mark.parametrize("limit", [1, 100_000])
def test_the_greatest_keys_are_those_that_duckdb_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes: int, by_group: bool, limit: int
) -> None:
    """Whether all sums are held, complete groups leave, or sums are set aside in buckets."""
    monkeypatch.setattr(module, "HELD_BYTES", held_bytes)
    state = declare.list_state("op", "log", keys={"k": pa.int64()}, values={"t": pa.string()})
    rows = checkpoint_of(tmp_path, state, skewed(6000, 800, 1)).state(state)
    found = hot_keys(rows, ROWS, limit, by_group=by_group)
    greatest, keys, count, _ = wanted(rows, ROWS, limit)
    assert figures(found, ROWS)[:3] == (greatest, keys, count)
    assert found.keys["k"][0].as_py() == 7
    assert figures(hot_keys(rows, BYTES, limit, by_group=by_group), BYTES) == wanted(rows, BYTES, limit)


def test_layers_are_merged_before_rows_are_counted(tmp_path: Path) -> None:
    state = declare.map_state("op", "log", keys={"k": pa.string()}, map_key=pa.int64(), values={"v": pa.int64()})
    base = {"k": ["a"] * 5 + ["b"] * 3 + [None], "_map_key": [0, 1, 2, 3, 4, 0, 1, 2, 0], "v": [0] * 9}
    gone = {"k": ["a"] * 4 + ["b"], "_map_key": [0, 1, 2, 3, 7], "_op": pa.array([1, 1, 1, 1, 0], pa.int8())}
    gone["v"] = pa.array([None, None, None, None, 7], pa.int64())
    rows = checkpoint_of(tmp_path, state, pa.table(base), pa.table(gone)).state(state)
    found = hot_keys(rows, ROWS, 9, by_group=True)
    told = dict(zip(found.keys["k"].to_pylist(), found.keys[ROWS].to_pylist(), strict=True))
    assert told == {"b": 4, "a": 1, None: 1}
    assert found.key_count == 3


PAIR = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.string())])


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.float64(), [0.0, -0.0, float("nan"), None, 1.5]),
        (pa.bool_(), [True, False, None, True, True]),
        (pa.binary(), [b"\x00", b"", None, b"\xff", b""]),
        (PAIR, [{"a": 1, "b": "x"}, {"a": 1, "b": None}, None, {"a": None, "b": None}, {"a": 1, "b": "x"}]),
    ],
    ids=str,
)
def test_keys_of_every_type_are_summed_up(tmp_path: Path, kind: Any, values: list[Any]) -> None:
    state = declare.list_state("op", "log", keys={"k": kind}, values={"v": pa.int64()})
    count = len(values)
    table = pa.table(
        {"k": pa.array(values, kind), "_index": pa.array(range(count), pa.int64()), "v": pa.array(range(count))}
    )
    rows = checkpoint_of(tmp_path, state, table).state(state)
    found = hot_keys(rows, ROWS, 10, by_group=True)
    keys = {repr(0.0 if value == 0 and kind == pa.float64() else value) for value in values}
    assert (found.key_count, found.rows) == (len(keys), count)


@pytest.mark.parametrize(
    ("values", "by", "each"),
    [
        ({"v": pa.int64()}, ROWS, 1),
        ({"v": pa.int64()}, BYTES, 16),
        ({"t": pa.string()}, ROWS, 1),
        ({"t": pa.string()}, BYTES, None),
    ],
)
def test_what_every_key_has_is_known_without_reading(
    tmp_path: Path, values: Mapping[str, Any], by: str, each: int | None
) -> None:
    state = declare.value_state("op", "one", keys={"k": pa.int64()}, values=dict(values))
    empty = pa.table({"k": pa.array([], pa.int64()), **{name: pa.array([], kind) for name, kind in values.items()}})
    rows = checkpoint_of(tmp_path, state, empty).state(state)
    assert even_keys(rows, by) == each
    found = hot_keys(rows, by, 3, by_group=True)
    assert (found.keys.num_rows, found.key_count) == (0, 0)


def test_key_groups_and_subtasks_are_counted_by_the_manifest(tmp_path: Path) -> None:
    state = declare.list_state("op", "log", keys={"k": pa.int64()}, values={"t": pa.string()})
    checkpoint = checkpoint_of(tmp_path, state, skewed(30_000, 4000, 1))
    task = checkpoint.read("op", "log")
    table = task.table().append_column("one", pa.array(np.ones(30_000)))
    groups = (
        duckdb.from_arrow(table)
        .query("rows", "select _key_group, count(*) from rows group by 1 order by 2 desc, 1")
        .fetchall()
    )
    reads = sum(counts.calls for counts in checkpoint.storage.stats.operations.values())  # type: ignore[attr-defined]
    (found,) = top_document(checkpoint, [state], by="rows", limit=4, keys=False)
    assert sum(counts.calls for counts in checkpoint.storage.stats.operations.values()) == reads  # type: ignore[attr-defined]
    told = found["key_groups"]
    assert [(entry["key_group"], entry["rows"]) for entry in told["greatest"]] == groups[:4]
    assert (told["count"], told["with_rows"]) == (128, len(groups))
    assert told["skew"] == round(groups[0][1] * 128 / 30_000, 2)
    assert sum(entry["rows"] for entry in found["subtasks"]["greatest"]) == 30_000
    assert found["keys"] is None


@pytest.fixture(scope="module")
def _mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five checkpoints, some segments carried from one to the next, some inline; and garbage."""
    folder = tmp_path_factory.mktemp("sizes") / "store"
    store = stores.flights_store(str(folder))
    stores.rescale_newest(store, 3)
    stores.rescale_newest(store, 2)
    store.rollback(2)
    for name in ("segments/00000000000000000002/lost-0001.parquet", "manifests/00000000000000000002-lost.parquet"):
        with store.storage.open_output(name) as output:
            output.write(b"x" * 777)
    return folder


@pytest.fixture
def mixed(_mixed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_mixed, tmp_path / "store"))


def plainly(folder: Path) -> dict[str, Any]:
    """The same by walking: what each record names, in sets."""
    named: dict[int, set[str]] = {}
    of_state: dict[tuple[str, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    inline: dict[int, dict[str, int]] = {}
    for path in (folder / "checkpoints").iterdir():
        record = json.loads(path.read_bytes())
        number = record["checkpoint_id"]
        rows = pq.read_table(folder / record["manifest"]["path"]).to_pylist()
        named[number] = {f"checkpoints/{path.name}", record["manifest"]["path"]}
        inline[number] = {row["path"]: len(row["inline"]) for row in rows if row["inline"] is not None}
        for row in rows:
            if row["path"] is not None and row["inline"] is None:
                named[number].add(row["path"])
                of_state[row["operator"], row["state"]][number].add(row["path"])
    # What lies beside the folders is no part of a store.
    files = {str(path.relative_to(folder)): path for path in folder.glob("*/**/*") if path.is_file()}
    size = {name: path.stat().st_size for name, path in files.items()}

    def total(paths: set[str]) -> int:
        return sum(size[path] for path in paths)

    return {
        "bytes": sum(size.values()),
        "objects": len(size),
        "checkpoints": {
            number: {
                "bytes": total(paths),
                "own_bytes": total(paths - set().union(*(named[other] for other in named if other != number))),
                "inline_bytes": sum(inline[number].values()),
            }
            for number, paths in named.items()
        },
        "states": {
            key: {"bytes": total(set().union(*ids.values())), "newest_bytes": total(ids[max(named)])}
            for key, ids in of_state.items()
        },
        "folders": {
            f"{name}/": sum(size[path] for path in size if path.startswith(f"{name}/"))
            for name in ("checkpoints", "manifests", "segments", "requests")
        },
    }


@pytest.mark.parametrize("which", ["mixed", "golden"])
def test_the_sizes_are_those_of_a_plain_walk(which: str, mixed: Path, tmp_path: Path) -> None:
    folder = mixed if which == "mixed" else Path(shutil.copytree(GOLDEN[-1], tmp_path / "golden"))
    found, plain = sizes_document(sf.open(str(folder))), plainly(folder)
    assert (found["bytes"], found["objects"], found["shared_bytes"]) == (plain["bytes"], plain["objects"], 0)
    for one in found["checkpoints"]:
        expected = plain["checkpoints"][one["checkpoint_id"]]
        assert {name: one[name] for name in expected} == expected
        assert one["missing"] == 0
        own = sum(state["own_bytes"] for state in one["states"])
        assert own <= one["own_bytes"]
    assert len(found["checkpoints"]) == len(plain["checkpoints"])
    states = {(one["operator"], one["state"]): one for one in found["states"]}
    for key, expected in plain["states"].items():
        assert {name: states[key][name] for name in expected} == expected
        assert states[key]["own_bytes"] == states[key]["bytes"]
    folders = {one["folder"]: one["bytes"] for one in found["folders"]}
    assert {name: folders[name] for name in plain["folders"]} == plain["folders"]
    if which == "mixed":
        assert found["garbage"]["bytes"] == 2 * 777
        garbage = {one["folder"]: one["garbage_bytes"] for one in found["folders"]}
        assert (garbage["segments/"], garbage["manifests/"], garbage["checkpoints/"]) == (777, 777, 0)


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_what_keep_would_free_is_what_retention_frees(keep: int, mixed: Path) -> None:
    store = sf.open(str(mixed))
    found = sizes_document(store, keep=keep)
    planned = store.expire(keep, delete=False)
    assert found["keep"] == {
        "keep": keep,
        "records": len(planned.records),
        "objects": len(planned.objects) + len(planned.leftovers),
        "bytes": planned.size_bytes,
        "shared_bytes": 0,
        "stopped": planned.stopped,
    }
    before = plainly(mixed)["bytes"]
    store.expire(keep)
    assert before - plainly(mixed)["bytes"] == found["keep"]["bytes"]
    assert sizes_document(store)["garbage"]["objects"] == 0


@pytest.mark.parametrize("seed", range(8))
def test_damage_is_told_as_retention_tells_it(seed: int, mixed: Path) -> None:
    draw = random.Random(seed)
    store = sf.open(str(mixed))
    folder = draw.choice(["checkpoints", "manifests"])
    victim = draw.choice(sorted((mixed / folder).glob("0*")))
    if draw.random() < 0.5:
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-9])
    try:
        planned, collected = store.expire(2, delete=False), store.collect_garbage(delete=False)
    except NotFound:
        return
    found = sizes_document(store, keep=2)
    assert (found["keep"]["stopped"], found["keep"]["bytes"]) == (planned.stopped, planned.size_bytes)
    assert (found["garbage"]["stopped"], found["garbage"]["bytes"]) == (collected.stopped, collected.size_bytes)


def test_bytes_that_a_pin_shares_with_the_store_count_once_and_are_not_freed(tmp_path: Path) -> None:
    store = counted_store(str(tmp_path / "store"))
    before = sizes_document(store, keep=1)
    store.pin(1, "p")
    after = sizes_document(store, keep=1)
    record = next((tmp_path / "store/savepoints/p/checkpoints").iterdir()).stat().st_size
    assert after["bytes"] == before["bytes"] + record
    (pin,) = (one for one in after["folders"] if one["savepoint"] == "p")
    assert (pin["checkpoint_id"], pin["bytes"] - pin["shared_bytes"]) == (1, record)
    assert after["shared_bytes"] == pin["shared_bytes"] == after["keep"]["shared_bytes"]
    assert after["keep"]["bytes"] == before["keep"]["bytes"]
    (mine,) = (one for one in after["checkpoints"] if one["checkpoint_id"] == 1)
    assert mine["own_bytes"] == mine["bytes"] - pin["shared_bytes"]
    blocks = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert after["bytes"] == blocks - after["shared_bytes"]
    store.expire(1)
    last = sizes_document(store)
    (pin,) = (one for one in last["folders"] if one["savepoint"] == "p")
    assert (last["shared_bytes"], pin["shared_bytes"]) == (0, 0)


def test_a_price_is_per_decimal_gigabyte(mixed: Path) -> None:
    found = sizes_document(sf.open(str(mixed)), keep=1, price=1e9)
    assert found["price"]["month"] == pytest.approx(found["bytes"])
    assert found["price"]["garbage_month"] == pytest.approx(found["garbage"]["bytes"])
    assert found["price"]["keep_month"] == pytest.approx(found["keep"]["bytes"])
    assert sizes_document(sf.open(str(mixed)))["price"] is None


def test_a_store_that_changes_meanwhile_is_read_again(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stateformat.inspecting import sizes

    store = sf.open(str(mixed))
    shared, ran = sizes._shared, list[int]()

    def expire_once(storage: Any) -> Any:
        if not ran:
            ran.append(1)
            store.expire(1)
        return shared(storage)

    monkeypatch.setattr(sizes, "_shared", expire_once)
    found = sizes_document(store)
    assert [one["checkpoint_id"] for one in found["checkpoints"]] == [5]
    assert found["garbage"]["stopped"] is None
    assert found["bytes"] == plainly(mixed)["bytes"]


def test_nothing_can_be_kept_of_a_store_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        sizes_document(sf.open(str(tmp_path / "nowhere")))
    store = sf.open(str(tmp_path / "store"))
    stores.counts_job().publish(store, None, options=WriteOptions(inline_bytes_max=0))
    with pytest.raises(InvalidInput, match="at least 1"):
        sizes_document(store, keep=0)
    assert isinstance(store, CheckpointStore)
