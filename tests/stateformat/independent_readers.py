"""Two readers that share no code with the library: one has JSON and Parquet, one has SQL.

They were written from SPEC.md section 11, which must be enough for them, and import nothing of
ours.
"""

from __future__ import annotations

import base64
import decimal
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq

KNOWN = {"committables", "finished_operators", "in_flight", "layers", "processing_time_timers", "rescaled"}
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
    """The newest checkpoint of a directory, with DuckDB. Python puts names into statements and does
    nothing else.
    """

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
        # An inline segment is the very file that it would have been: written out, it can be read as
        # the others are.
        self.db.execute(f"ALTER TABLE handles ADD COLUMN file VARCHAR; UPDATE handles SET file = '{root}/' || path")
        self.db.execute(f"UPDATE handles SET file = '{scratch}/' || replace(path, '/', '-') WHERE inline IS NOT NULL")
        for (file,) in self.db.execute("SELECT DISTINCT file FROM handles WHERE inline IS NOT NULL").fetchall():
            self.db.execute(
                f"COPY (SELECT any_value(inline) FROM handles WHERE file = '{file}') TO '{file}' (FORMAT blob)"
            )

    def read(self, operator: str, name: str, subtask: int | None) -> Rows:
        """The rows of one subtask (None: of the coordinator), in the order of the format."""
        wanted = "NULL" if subtask is None else subtask
        mine = f"operator = '{operator}' AND state = '{name}' AND subtask IS NOT DISTINCT FROM {wanted}"
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
            query = (
                "SELECT _edge, min(_watermark) AS _watermark, bool_and(_ended) AS _ended FROM found "
                "GROUP BY 1 ORDER BY min(place_), min(file_row_number)"
            )
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
        """Section 5.4: the greatest layer counts, unless a greater clear hits the key, and unless
        it is a delete.
        """
        if not layered:
            return f"SELECT * EXCLUDE ({', '.join(internal)}) FROM found"
        by_key, by_row_key = (", ".join(f'"{c}"' for c in columns) for columns in (keys, row_key))
        return (
            f"WITH marked AS (SELECT *, max(layer_) FILTER (_op = 2) OVER (PARTITION BY {by_key}) AS cleared "
            f"FROM found) SELECT * EXCLUDE (cleared, {', '.join(internal)}) FROM "
            "(SELECT * FROM marked WHERE coalesce(_op, 0) <> 2 "
            f"QUALIFY row_number() OVER (PARTITION BY {by_row_key} ORDER BY layer_ DESC) = 1) "
            "WHERE coalesce(_op, 0) = 0 AND layer_ >= coalesce(cleared, -1)"
        )
