"""Two readers that share no code with the library: one has JSON and Parquet, one has SQL. SPEC.md must be enough for them.

Everything between the two rules below was written from SPEC.md section 11. It imports nothing of stateformat, and a test
says so. What it reads is compared with what the library reads: small and inline, large and in objects, in layers, with an
evolved schema, and rescaled, where handles are cuts of segments.
"""

from __future__ import annotations

import ast
import base64
import decimal
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# ======================================================================================================================

KNOWN = {"committables", "finished_operators", "in_flight", "layers", "rescaled"}
ROW_KEYS = {"value": [], "map": ["_map_key"], "list": ["_index"], "timers": ["_timestamp", "_tag"]}
Rows = list[dict[str, Any]]


class JsonAndParquet:
    """The newest checkpoint of a directory, with a JSON parser and a Parquet reader."""

    def __init__(self, root: Path) -> None:
        self.root = root
        newest = max((root / "checkpoints").iterdir(), key=lambda path: path.name)
        self.record = json.loads(newest.read_text(encoding="utf-8"))
        assert self.record["format"] == "stateformat"
        assert self.record["version"] == 1
        assert KNOWN.issuperset(self.record["required_features"])
        self.handles = pq.read_table(root / self.record["manifest"]["path"]).to_pylist()

    def state(self, operator: str, name: str) -> dict[str, Any]:
        found = [s for s in self.record["states"] if (s["operator"], s["name"]) == (operator, name)]
        assert len(found) == 1
        return found[0]

    def subtasks(self, operator: str, name: str) -> list[int | None]:
        mine = (h["subtask"] for h in self.handles if (h["operator"], h["state"]) == (operator, name))
        return list(dict.fromkeys(mine))

    def read(self, operator: str, name: str, subtask: int | None) -> Rows:
        """The rows of one subtask (None: of the coordinator), in the order of the format."""
        state = self.state(operator, name)
        layers: dict[int, Rows] = {}
        for handle in self.handles:
            if (handle["operator"], handle["state"], handle["subtask"]) == (operator, name, subtask) and handle["rows"]:
                layers.setdefault(handle["layer"], []).extend(self._rows(state, handle))
        if state["mode"] == "keyed":
            return merge(state, [layers[layer] for layer in sorted(layers)])
        rows = layers.get(0, [])
        if state["mode"] == "in_flight":
            rows.sort(key=lambda row: (row.get("_key_group", 0), row["_sender"], row["_seq"]))
        return progress(rows) if state["mode"] == "progress" else rows

    def _rows(self, state: dict[str, Any], handle: dict[str, Any]) -> Iterator[dict[str, Any]]:
        inline = handle["inline"]
        source = self.root / handle["path"] if inline is None else io.BytesIO(inline)
        table = pq.read_table(source).slice(handle["row_start"], handle["rows"])
        schemas = {schema["id"]: schema["fields"] for schema in state["schemas"]}
        written = {field["id"]: field["name"] for field in schemas[handle["schema_id"]]}
        for row in table.to_pylist():
            # The format's own columns stay; a map's key is a field, whose name begins like theirs.
            own = {n: value for n, value in row.items() if n.startswith("_") and n not in written.values()}
            fields = {
                field["name"]: row[written[field["id"]]] if field["id"] in written else default(field)
                for field in state["schemas"][-1]["fields"]
            }
            yield own | fields


def default(field: dict[str, Any]) -> Any:
    """Section 3.7, for the types that have one."""
    text, kind = field.get("default"), field["type"]
    if text is None or kind == "utf8":
        return text
    if kind == "bool":
        return text == "true"
    if kind in ("float", "double"):
        return float(text)
    if kind == "binary":
        return base64.b64decode(text)
    return decimal.Decimal(text) if kind.startswith("decimal") else int(text)


def merge(state: dict[str, Any], layers: list[Rows]) -> Rows:
    """Section 5.4. Keys are compared as text: null equals null, NaN equals NaN."""
    columns = state["key_columns"]
    row_key = columns + ROW_KEYS[state["kind"]]
    kept: dict[str, dict[str, Any]] = {}
    for rows in layers:
        cleared = {repr([row[c] for c in columns]) for row in rows if row.get("_op", 0) == 2}
        kept = {key: row for key, row in kept.items() if repr([row[c] for c in columns]) not in cleared}
        for row in rows:
            key, operation = repr([row[c] for c in row_key]), row.get("_op", 0)
            if operation == 0:
                kept[key] = {name: value for name, value in row.items() if name != "_op"}
            elif operation == 1:
                kept.pop(key, None)
    return list(kept.values())


def progress(rows: Rows) -> Rows:
    """Section 6.2."""
    edges = dict.fromkeys(row["_edge"] for row in rows)
    of = {edge: [row for row in rows if row["_edge"] == edge] for edge in edges}
    return [
        {"_edge": e, "_watermark": min(r["_watermark"] for r in rs), "_ended": all(r["_ended"] for r in rs)}
        for e, rs in of.items()
    ]


class Sql:
    """The newest checkpoint of a directory, with DuckDB. Python puts names into statements and does nothing else."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.db = root, duckdb.connect()
        self.db.execute(f"SET VARIABLE newest = (SELECT max(file) FROM glob('{root}/checkpoints/*.json'))")
        self.db.execute(
            "CREATE TABLE record AS SELECT * FROM read_json(getvariable('newest'), maximum_object_size = 67108864)"
        )
        assert self.db.execute("SELECT format, version FROM record").fetchall() == [("stateformat", 1)]
        self.db.execute("CREATE TABLE states AS SELECT unnest(states, recursive := false) AS s FROM record")
        self.db.execute(f"SET VARIABLE manifest = (SELECT '{root}/' || manifest.path FROM record)")
        self.db.execute(
            "CREATE TABLE handles AS SELECT *, file_row_number AS place FROM "
            "read_parquet(getvariable('manifest'), file_row_number = true) WHERE rows > 0"
        )
        # An inline segment is the very file that it would have been: written out, it can be read as the others are.
        self.db.execute(f"ALTER TABLE handles ADD COLUMN file VARCHAR; UPDATE handles SET file = '{root}/' || path")
        self.db.execute(f"UPDATE handles SET file = '{scratch}/' || replace(path, '/', '-') WHERE inline IS NOT NULL")
        for (file,) in self.db.execute("SELECT DISTINCT file FROM handles WHERE inline IS NOT NULL").fetchall():
            self.db.execute(
                f"COPY (SELECT any_value(inline) FROM handles WHERE file = '{file}') TO '{file}' (FORMAT blob)"
            )

    def read(self, operator: str, name: str, subtask: int | None) -> Rows:
        """The rows of one subtask (None: of the coordinator), in the order of the format."""
        mine = f"operator = '{operator}' AND state = '{name}' AND subtask IS NOT DISTINCT FROM {'NULL' if subtask is None else subtask}"
        self.db.execute(f"SET VARIABLE files = (SELECT list(DISTINCT file) FROM handles WHERE {mine})")
        if self.db.execute("SELECT getvariable('files')").fetchall() == [(None,)]:
            return []
        mode, kind, keys = self.db.execute(
            "SELECT s.mode, s.kind, s.key_columns FROM states WHERE s.operator = ? AND s.name = ?", [operator, name]
        ).fetchone() or ("", "", [])
        self.db.execute(
            "CREATE OR REPLACE TEMP TABLE found AS "
            "SELECT f.* EXCLUDE (filename), h.layer AS layer_, h.place AS place_ FROM "
            "read_parquet(getvariable('files'), filename = true, file_row_number = true, union_by_name = true) f "
            f"JOIN (SELECT * FROM handles WHERE {mine}) h ON f.filename = h.file "
            "AND f.file_row_number BETWEEN h.row_start AND h.row_start + h.rows - 1"
        )
        columns = [row[0] for row in self.db.execute("DESCRIBE found").fetchall()]
        internal = [c for c in ("_op", "layer_", "place_", "file_row_number") if c in columns]
        if mode == "progress":
            query = "SELECT _edge, min(_watermark) AS _watermark, bool_and(_ended) AS _ended FROM found GROUP BY 1 ORDER BY min(place_), min(file_row_number)"
        elif mode == "keyed":
            query = self._merged(keys, keys + ROW_KEYS[kind], internal, "_op" in columns)
        else:
            channels = ["_key_group"] * ("_key_group" in columns) + ["_sender", "_seq"] * (mode == "in_flight")
            order = ", ".join([*channels, "place_", "file_row_number"])
            query = f"SELECT * EXCLUDE ({', '.join(internal)}) FROM found ORDER BY {order}"
        rows: Rows = self.db.sql(query).to_arrow_table().to_pylist()
        return rows

    @staticmethod
    def _merged(keys: list[str], row_key: list[str], internal: list[str], layered: bool) -> str:
        """Section 5.4: the greatest layer counts, unless a greater clear hits the key, and unless it is a delete."""
        if not layered:
            return f"SELECT * EXCLUDE ({', '.join(internal)}) FROM found"
        by_key, by_row_key = (", ".join(f'"{c}"' for c in columns) for columns in (keys, row_key))
        return (
            f"WITH marked AS (SELECT *, max(layer_) FILTER (_op = 2) OVER (PARTITION BY {by_key}) AS cleared FROM found) "
            f"SELECT * EXCLUDE (cleared, {', '.join(internal)}) FROM (SELECT * FROM marked WHERE coalesce(_op, 0) <> 2 "
            f"QUALIFY row_number() OVER (PARTITION BY {by_row_key} ORDER BY layer_ DESC) = 1) "
            "WHERE coalesce(_op, 0) = 0 AND layer_ >= coalesce(cleared, -1)"
        )


# ======================================================================================================================

import stateformat  # noqa: E402
from stateformat.graph import JobGraph, Operator, OperatorId  # noqa: E402
from stateformat.manifest import cut_handles  # noqa: E402
from stateformat.model import CheckpointKind, Mode  # noqa: E402
from stateformat.reading import Checkpoint  # noqa: E402
from stateformat.redistribution import rescale  # noqa: E402
from stateformat.segments import WriteOptions  # noqa: E402
from stateformat.states import declare  # noqa: E402
from stateformat.store import CheckpointStore  # noqa: E402
from stateformat.validation import validate  # noqa: E402
from tests.stores import Job, flights_job, flights_store, owned  # noqa: E402


def rescaled(store: CheckpointStore, parallelism: int) -> CheckpointStore:
    """The store with its newest checkpoint dealt out to another parallelism."""
    source = store.open()
    dealt = rescale(source, source.plan_restore(source.graph.at(parallelism)))
    pending = store.begin(
        job_id=source.record.job_id,
        graph=dealt.graph,
        states=dealt.states,
        parent=store.start(source.record.job_id),
        kind=CheckpointKind.RESCALE,
        source=source.record.ref,
        rescaled_from=dealt.rescaled_from,
    )
    pending.add_handles(cut_handles(source.manifest.full(), dealt.slices))
    pending.publish()
    return store


WORK = Operator(OperatorId("work"), 3, 64)
TYPES = pa.schema(
    [
        pa.field("b", pa.bool_()),
        pa.field("i8", pa.int8()),
        pa.field("i16", pa.int16()),
        pa.field("f", pa.float32()),
        pa.field("text", pa.string()),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us")),
        pa.field("utc", pa.timestamp("us", tz="UTC")),
        pa.field("money", pa.decimal128(12, 2)),
        pa.field("place", pa.struct([pa.field("x", pa.float64()), pa.field("tags", pa.list_(pa.string()))])),
        pa.field("counts", pa.map_(pa.string(), pa.int64())),
    ]
)


def typed_rows(count: int, base: int = 0) -> pa.Table:
    """Rows of every type, every third of them null, with a string key that is null once and a double key with NaN."""
    columns: dict[str, Any] = {
        "k": pa.array([None, *(f"key-{i}" for i in range(1, count))], pa.string()),
        "d": pa.array([float("nan") if i % 5 == 0 else i / 8 for i in range(count)]),
    }
    for field in TYPES:
        values = [None if i % 3 == 2 else value(field.name, i + base) for i in range(count)]
        columns[field.name] = pa.array(values, field.type)
    return pa.table(columns)


def value(name: str, i: int) -> Any:
    micros = 1_700_000_000_000_000 + 1_000_001 * i
    values: dict[str, Any] = {
        "b": i % 2 == 0,
        "text": f"text {i} é",
        "raw": bytes([i % 256, 0, 255]),
        "day": 19_000 + i,
        "at": micros,
        "utc": micros,
        "money": decimal.Decimal(i) / 4,
        "place": {"x": i / 2, "tags": ["a", None, str(i)] if i % 2 else []},
        "counts": [("one", i), ("two", None)],
        "f": i / 2,
    }
    return values.get(name, i % 100)


def typed_job(rows: pa.Table) -> Job:
    state = declare.value_state("work", "typed", keys={"k": pa.string(), "d": pa.float64()}, values=TYPES)
    return Job("typed", JobGraph((WORK,)), (state,), {("work", "typed"): lambda i: owned(rows, ["k", "d"], WORK, i)})


# DuckDB knows BYTE_STREAM_SPLIT for floats and integers, and not for the bytes of decimals.
PLAIN: Any = {"encoding": "plain"}


def typed_store(url: str) -> CheckpointStore:
    store = stateformat.open(url)
    typed_job(typed_rows(40)).publish(store, None, options=WriteOptions(**PLAIN))
    return store


def large_store(url: str) -> CheckpointStore:
    """Thousands of rows in objects of several row groups, by ``row_group_rows``."""
    store = stateformat.open(url)
    options = WriteOptions(inline_bytes_max=0, row_group_rows=500, codec="zstd", **PLAIN)
    typed_job(typed_rows(6000)).publish(store, None, options=options)
    return store


def layered_store(url: str) -> CheckpointStore:
    """A base and two deltas of a list state: upserts, deletes, clears, and rows written again after a clear."""
    store = stateformat.open(url)
    state = declare.list_state("work", "items", keys={"k": pa.int64()}, values={"v": pa.string()})

    def layer(entries: list[tuple[int, int | None, str | None, int]]) -> Any:
        table = pa.table(
            {
                "k": pa.array([e[0] for e in entries], pa.int64()),
                "_index": pa.array([e[1] for e in entries], pa.int64()),
                "v": pa.array([e[2] for e in entries], pa.string()),
                "_op": pa.array([e[3] for e in entries], pa.int8()),
            }
        )
        return lambda i: owned(table, ["k"], WORK, i)

    base = layer([(k, j, f"base {k}.{j}", 0) for k in range(50) for j in range(3)])
    deltas = [
        [*((k, 0, f"new {k}", 0) for k in range(10)), *((k, 1, None, 1) for k in range(5, 15))]
        + [(k, None, None, 2) for k in range(20, 30)]
        + [(k, 7, f"after the clear {k}", 0) for k in range(25, 35)],
        [(k, 7, None, 1) for k in range(25, 28)] + [(k, 0, "again", 0) for k in range(5, 8)] + [(k, None, None, 2) for k in range(3)],
    ]  # fmt: skip
    job = Job("layers", JobGraph((WORK,)), (state,), {("work", "items"): lambda i: base(i).drop_columns(["_op"])})
    permit = job.publish(store, None)
    for entries in deltas:
        permit = job.publish(store, permit, deltas={("work", "items"): layer(entries)})
    return store


def evolved_store(url: str) -> CheckpointStore:
    """A base in one schema and a delta in the next: renamed, dropped, added with and without a default, widened."""
    store = stateformat.open(url)
    keys = {"k": pa.int64()}
    before = declare.value_state(
        "work", "s", keys=keys, values={"old": pa.int32(), "gone": pa.string(), "f": pa.float32()}
    )
    after = declare.value_state(
        "work",
        "s",
        keys=keys,
        values=pa.schema(
            [
                pa.field("f", pa.float64()),
                pa.field("new", pa.int64()),
                pa.field("flag", pa.bool_(), nullable=False),
                pa.field("price", pa.decimal128(8, 2)),
                pa.field("note", pa.string()),
            ]
        ),
        previous=before,
        renames={"old": "new"},
        defaults={"flag": "true", "price": "9.50"},
    )
    base = pa.table({"k": range(30), "old": pa.array(range(30), pa.int32()), "gone": ["x"] * 30, "f": pa.array(np.arange(30) / 2, pa.float32())})  # fmt: skip
    delta = pa.table(
        {"k": range(5), "new": [2**40] * 5, "flag": [False] * 5, "price": pa.array([None] * 5, pa.decimal128(8, 2)), "note": ["n"] * 5, "f": [0.25] * 5, "_op": pa.array([0] * 5, pa.int8())}
    )  # fmt: skip
    graph = JobGraph((WORK,))
    first = Job("evolved", graph, (before,), {("work", "s"): lambda i: owned(base, ["k"], WORK, i)}).publish(
        store, None
    )
    Job("evolved", graph, (after,)).publish(
        store, first, deltas={("work", "s"): lambda i: owned(delta, ["k"], WORK, i)}
    )
    return store


def first_flights(url: str) -> CheckpointStore:
    """Every mode, all running, all segments in objects."""
    store = stateformat.open(url)
    flights_job().publish(store, None, options=WriteOptions(inline_bytes_max=0))
    return store


STORES: dict[str, Any] = {
    "every mode, inline, layered, part finished": flights_store,
    "every mode, in objects": first_flights,
    "every type": typed_store,
    "large": large_store,
    "layers with clears": layered_store,
    "evolved": evolved_store,
    "every mode at 3": lambda url: rescaled(first_flights(url), 3),
    "every mode at 7": lambda url: rescaled(first_flights(url), 7),
    "inline at 6": lambda url: rescaled(flights_store(url), 6),
    "large at 5, then 2": lambda url: rescaled(rescaled(large_store(url), 5), 2),
    "layers with clears at 4": lambda url: rescaled(layered_store(url), 4),
    "evolved at 5": lambda url: rescaled(evolved_store(url), 5),
}


UNMERGED = ("every mode, in objects", "every type", "large", "large at 5, then 2")


def comparable(rows: Rows, *, ordered: bool) -> list[str]:
    """Rows as text, which holds NaN equal to NaN; sorted where the format promises no order within a key group."""
    texts = [repr(sorted((name, plain(value)) for name, value in row.items())) for row in rows]
    return texts if ordered else sorted(texts)


def plain(value: Any) -> Any:
    """One spelling for what Arrow and SQL spell differently: map entries, and the time zone of instants."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tzinfo") and value.tzinfo is not None:
        return f"{value.timestamp():.6f} UTC"
    return value


def library_rows(checkpoint: Checkpoint, operator: str, state: str, subtask: int | None) -> Rows:
    rows: Rows = checkpoint.read(operator, state, subtask).table().to_pylist()
    return rows


@pytest.mark.parametrize("name", STORES)
def test_json_and_parquet_are_enough(name: str, tmp_path: Path) -> None:
    store = STORES[name](str(tmp_path / "store"))
    checkpoint = store.open()
    reader = JsonAndParquet(tmp_path / "store")
    compared = compare(checkpoint, reader, reader)
    # Layers hide rows, and progress is merged; elsewhere every row of the manifest has been compared.
    everything = checkpoint.record.totals.rows
    assert compared == everything if name in UNMERGED else 0 < compared <= everything
    assert validate(store, level="full").findings == ()


@pytest.mark.parametrize("name", [name for name in STORES if "evolved" not in name])
def test_sql_is_enough(name: str, tmp_path: Path) -> None:
    store = STORES[name](str(tmp_path / "store"))
    (tmp_path / "scratch").mkdir()
    reader = Sql(tmp_path / "store", tmp_path / "scratch")
    assert compare(store.open(), reader, JsonAndParquet(tmp_path / "store")) > 0


def compare(checkpoint: Checkpoint, reader: JsonAndParquet | Sql, names: JsonAndParquet) -> int:
    """Every state of every subtask against the library; how many rows that were."""
    count = 0
    assert names.record["checkpoint_id"] == checkpoint.id
    for state in checkpoint.states:
        ordered = state.mode is not Mode.KEYED
        for subtask in names.subtasks(state.operator, state.name):
            if subtask is None:
                continue  # The library reads a coordinator's state whole, below.
            theirs = reader.read(state.operator, state.name, subtask)
            ours = library_rows(checkpoint, state.operator, state.name, subtask)
            assert comparable(theirs, ordered=ordered) == comparable(ours, ordered=ordered), (state.name, subtask)
            count += len(theirs)
        if state.mode is Mode.COORDINATOR:
            theirs = reader.read(state.operator, state.name, None)
            ours = library_rows(checkpoint, state.operator, state.name, None)
            assert comparable(theirs, ordered=True) == comparable(ours, ordered=True)
            count += len(theirs)
    return count


@pytest.mark.parametrize("parallelism", [1, 2, 5, 64])
@pytest.mark.parametrize("name", ["large", "layers with clears", "evolved"])
def test_a_subtask_of_another_parallelism_owns_the_rows_of_its_key_groups(
    name: str, parallelism: int, tmp_path: Path
) -> None:
    # Section 11, last sentence, by the independent reader, against a restore plan of the library.
    checkpoint = STORES[name](str(tmp_path / "store")).open()
    reader = JsonAndParquet(tmp_path / "store")
    (state,) = checkpoint.states
    rows = [row for i in reader.subtasks("work", state.name) for row in reader.read("work", state.name, i)]
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism))
    for subtask in range(0, parallelism, 7):
        first, behind = -(-subtask * 64 // parallelism), -(-(subtask + 1) * 64 // parallelism)
        mine = [row for row in rows if first <= row["_key_group"] < behind]
        restored = checkpoint.restore(plan, "work", subtask)[state.name].table().to_pylist()
        assert comparable(mine, ordered=False) == comparable(restored, ordered=False)


def test_the_oracles_see_what_the_stores_hold(tmp_path: Path) -> None:
    # Said here by hand, so that two readers that agree on nothing at all would be noticed.
    layered_store(str(tmp_path / "store"))
    reader = JsonAndParquet(tmp_path / "store")
    items = {(r["k"], r["_index"]): r["v"] for i in range(3) for r in reader.read("work", "items", i)}
    assert [items.get((k, 0)) for k in (0, 3, 5, 9, 10)] == [None, "new 3", "again", "new 9", "base 10.0"]
    assert [items.get((k, 1)) for k in (4, 5, 14, 15)] == ["base 4.1", None, None, "base 15.1"]
    assert [items.get((22, j)) for j in (0, 1, 7)] == [None, None, None]
    assert [items.get((k, 7)) for k in (27, 28, 34)] == [None, "after the clear 28", "after the clear 34"]
    assert [items.get((k, 2)) for k in (29, 30)] == [None, "base 30.2"]


def test_the_readers_import_nothing_of_ours() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    rule = "# " + "=" * 118
    reader = source.split(rule)[1]
    assert len(reader.splitlines()) < 200
    assert "import" not in reader
    above = ast.parse(source.split(rule)[0])
    modules = {
        name.split(".")[0]
        for node in ast.walk(above)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    assert modules.isdisjoint({"stateformat", "redistribution", "backends", "tools", "tests"})
