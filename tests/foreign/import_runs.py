"""Importing fakes, and what is in the store afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from stateformat.backends.foreign.checkpoint import ForeignCheckpoint
from stateformat.backends.importing import Imported, ImportSpec, import_checkpoint
from stateformat.errors import InvalidInput
from stateformat.graph import SubtaskSet
from stateformat.keys import register_key_hash
from stateformat.schema import segment_schema
from stateformat.storage import Storage, open_storage
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.foreign.foreign_fakes import WORDS, FakeSource
from tests.rewrite.rewrite_jobs import new_store


def folder(path: Path) -> Storage:
    path.mkdir(parents=True, exist_ok=True)
    found = open_storage(str(path)).folder()
    assert found is not None
    return found


def foreign(source: FakeSource, path: Path) -> ForeignCheckpoint:
    return ForeignCheckpoint(folder(path / "foreign"), source, "a fake")


def imported(source: FakeSource, path: Path, **spec: Any) -> tuple[CheckpointStore, Imported]:
    store = new_store(path / "store")
    return store, import_checkpoint(foreign(source, path), store, ImportSpec(**spec))


def rows(store: CheckpointStore, operator: str, state: str) -> list[dict[str, Any]]:
    found = store.open().read(operator, state).table()
    return sorted(
        found.drop_columns([name for name in ("_key_group",) if name in found.column_names]).to_pylist(), key=repr
    )


def given(source: FakeSource, operator: str, state: str) -> list[dict[str, Any]]:
    schema = segment_schema(source.record.state(operator, state))
    kept = pa.schema([item for item in schema if item.name != "_key_group"])
    columns = [pa.array([row[item.name] for row in source.rows[operator, state]], item.type) for item in kept]
    return sorted(pa.table(columns, schema=kept).to_pylist(), key=repr)


def assert_valid(store: CheckpointStore) -> None:
    assert [problem.message for problem in validate(store, level="full").problems] == []


def assert_same_rows(store: CheckpointStore, source: FakeSource) -> None:
    for operator, state in source.rows:
        assert rows(store, operator, state) == given(source, operator, state), (operator, state)


def finished(source: FakeSource, uid: str, subtasks: SubtaskSet) -> FakeSource:
    graph = source.record.graph
    changed = graph.with_operators({uid: replace(graph.operator(uid), finished=subtasks)})
    return replace(source, record=replace(source.record, graph=changed), _tables={})


def file_log(path: Path, entries: dict[str, list[str]], *, first: str = "v1") -> None:
    """A log of Spark's file source: paths by the names of its files."""
    place = path / "foreign" / "sources" / "0"
    place.mkdir(parents=True)
    for name, paths in entries.items():
        lines = [json.dumps({"path": one, "timestamp": 1, "batchId": 0}) for one in paths]
        (place / name).write_text("\n".join([first, *lines]))


LOG = {"0": ["file:///in/a"], "1": ["file:///in/b", "file:/in/c%20d"], "2": ["file:///in/e"], "3": ["file:///in/f"]}


def _no_hash(columns: Any) -> Any:
    raise InvalidInput("only Java knows")


register_key_hash("test-user-hashcode", _no_hash)


NAMES = {
    "Counts": "totals",
    "counts/accState": "counts/totals",
    "counts/accState.key": "word",
    "counts/accState.value.count": "rows",
    "counts/accState.value.total": "sum",
}
DROPPED = [f"totals/{name}" for name in ("perDay", "last", "_timer_state/event_user-timers", "rules")]


def more() -> pa.Table:
    return pa.table({"word": [*WORDS[:20], "new", "new"], "x": [0.5] * 22})


def wanted(rows: dict[str, int], sums: dict[str, float]) -> list[dict[str, Any]]:
    for word in [*WORDS[:20], "new", "new"]:
        rows[word] = rows.get(word, 0) + 1
        sums[word] = sums.get(word, 0.0) + 0.5
    return [{"word": word, "rows": rows[word], "sum": sums[word]} for word in sorted(rows)]
