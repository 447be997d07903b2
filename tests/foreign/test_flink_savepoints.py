"""Every fixture of Flink's, against what Flink said of it after it had restored it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.foreign.flink.source import FlinkSource
from stateformat.model import Kind, Mode
from stateformat.storage import folder_of, open_storage

FIXTURES = Path(__file__).parent / "fixtures"
SAVED = sorted(path.parent for path in FIXTURES.glob("flink-*/*/savepoint"))
NAMES = [f"{path.parent.name.removeprefix('flink-')}/{path.name}" for path in SAVED]


def opened(path: Path) -> FlinkSource:
    """Open the savepoint, or the newest checkpoint, below ``savepoint/``."""
    inner = path / "savepoint"
    if not (inner / "_metadata").exists():
        inner = next(inner.glob("*/chk-*/_metadata")).parent.parent
    folder = folder_of(open_storage(str(inner)))
    assert folder is not None
    return FlinkSource(folder)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain(value: Any) -> Any:
    """Return a value of ours in the fixtures' JSON."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Decimal):
        sign, digits, exponent = value.as_tuple()
        return f"{'-' if sign else ''}{''.join(map(str, digits))}E{exponent}"
    return value


def rows_of(source: FlinkSource, operator: str, state: str) -> Iterator[dict[str, Any]]:
    """Return the rows of a state as lines of ``expected.jsonl``, without ``kind``."""
    declared = source.record.state(operator, state)
    for part in source.parts:
        if (part.operator, part.state) != (operator, state):
            continue
        index = 0
        for batch in source.read(part):
            for row in batch.to_pylist():
                found = {"operator": operator, "state": state, "subtask": part.subtask}
                if declared.mode is Mode.KEYED:
                    yield found | keyed(declared.kind, row)
                elif declared.mode is Mode.BROADCAST:
                    yield found | {"map_key": plain(row["key"]), "value": plain(row["value"])}
                else:
                    yield found | {"index": index, "value": plain(row["value"])}
                index += 1


def keyed(kind: Kind | None, row: dict[str, Any]) -> dict[str, Any]:
    found = {"key_group": row["_key_group"], "key": plain(row["key"])}
    if kind is Kind.TIMERS:
        found["timestamp"] = row["_timestamp"] // 1000
    if kind is Kind.LIST:
        found["index"] = row["_index"]
    if kind is Kind.MAP:
        found["map_key"] = plain(row["_map_key"])
    found |= {name: plain(row[name]) for name in ("value", "ttl_last_access") if name in row}
    return found


def canonical_text(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


@pytest.mark.parametrize("path", SAVED, ids=NAMES)
def test_every_state_has_the_entries_that_flink_restored(path: Path):
    source = opened(path)
    expected: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in lines(path / "expected.jsonl"):
        row.pop("kind")
        expected.setdefault((row["operator"], row["state"]), []).append(row)
    declared = {(state.operator, state.name) for state in source.record.states if state.mode is not Mode.COORDINATOR}
    assert declared == set(expected)
    for (operator, state), rows in expected.items():
        found = list(rows_of(source, operator, state))
        assert canonical_text(found) == canonical_text(rows), f"{operator}/{state}"
