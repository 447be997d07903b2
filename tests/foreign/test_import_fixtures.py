"""Every checkpoint of another system that is a fixture is imported, with both key hashes: each
state has the rows that its reader gives, and all is valid."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import stateformat
from stateformat.backends.foreign.checkpoint import ForeignCheckpoint
from stateformat.backends.importing import ImportSpec, import_checkpoint
from stateformat.errors import InvalidInput, UnsupportedFormat
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.reading import Checkpoint
from stateformat.validation import validate
from tests.rewrite.rewrite_jobs import new_store

FIXTURES = Path(__file__).parent / "fixtures"
METADATA = FIXTURES.glob("*/*/savepoint/**/_metadata")
FOLDERS = sorted(
    [
        *FIXTURES.glob("*/*/checkpoint"),
        # A checkpoint names files beside its own folder.
        *(path.parent.parent if path.parent.name.startswith("chk-") else path.parent for path in METADATA),
    ]
)


NEWEST = ("flink-2.3.0", "spark-4.3.0")
"""Fixtures of older versions are read among the tests that take longer."""


def named(folder: Path) -> str:
    return "/".join(folder.relative_to(FIXTURES).parts[:2])


EACH = [
    pytest.param(folder, id=named(folder), marks=[] if named(folder).startswith(NEWEST) else [pytest.mark.truth])
    for folder in FOLDERS
]


def contents(checkpoint: Checkpoint, operator: str, state: str) -> Counter[str]:
    """The rows of a state without their key groups, each as text."""
    rows = checkpoint.read(operator, state).table()
    kept = rows.drop_columns([name for name in ("_key_group",) if name in rows.column_names])
    return Counter(map(repr, zip(*map(plain, kept.columns), strict=True)))


def plain(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_date(column.type):
        # Java has days that Python has not.
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_struct(column.type):
        flat = [plain(part) for part in column.flatten()]
        return list(zip(column.is_valid().to_pylist(), *flat, strict=True))
    elif pa.types.is_list(column.type):
        lengths = pc.list_value_length(column).to_pylist()
        values = iter(plain(pc.list_flatten(column)))
        return [None if length is None else [next(values) for _ in range(length)] for length in lengths]
    elif pa.types.is_map(column.type):
        entries = pa.list_(pa.struct([column.type.key_field, column.type.item_field]))
        return plain(pa.chunked_array([chunk.cast(entries) for chunk in column.chunks], entries))
    return column.to_pylist()


def is_readable(checkpoint: Checkpoint, operator: str, state: str) -> bool:
    try:
        contents(checkpoint, operator, state)
    except UnsupportedFormat:
        return False
    return True


def unhashable(checkpoint: Checkpoint) -> list[str]:
    """States with a key column of bytes whose operator has a hash that is not ours."""
    return [
        f"{state.operator}/{state.name}"
        for state in checkpoint.states
        if any(item.type == "binary" for item in state.current.fields if item.name in state.key_columns)
        and checkpoint.graph.operator(state.operator).key_hash != DEFAULT_KEY_HASH
    ]


@pytest.mark.parametrize("key_hash", ["rehash", pytest.param("keep", marks=pytest.mark.truth)])
@pytest.mark.parametrize("folder", EACH)
def test_an_imported_fixture_has_every_row_of_every_state(folder: Path, key_hash: Any, tmp_path: Path) -> None:
    source = stateformat.open(folder).open()
    assert isinstance(source, ForeignCheckpoint)
    drop = [note.subject for note in source.notes if note.kind == "refused"]
    states = [state for state in source.states if state.operator not in drop]
    unreadable = [f"{one.operator}/{one.name}" for one in states if not is_readable(source, one.operator, one.name)]
    store = new_store(tmp_path / "store")
    if unreadable:
        with pytest.raises(UnsupportedFormat):
            import_checkpoint(source, store, ImportSpec(key_hash="keep", drop=drop))
    opaque = unhashable(source) if key_hash == "rehash" else []
    if opaque:
        with pytest.raises(InvalidInput, match="kept as bytes") as refused:
            import_checkpoint(source, store, ImportSpec(drop=[*drop, *unreadable]))
        assert refused.value.details["states"] == opaque
    left_out = [*drop, *unreadable, *opaque]
    import_checkpoint(source, store, ImportSpec(key_hash=key_hash, drop=left_out))
    assert [problem.message for problem in validate(store, level="full").problems] == []
    found = store.open()
    # Where the names of an operator's states cannot be read, nothing of it is imported.
    wanted = [state for state in states if f"{state.operator}/{state.name}" not in left_out]
    # With its key groups a savepoint keeps what it needs to be written again.
    kept = [state for state in found.states if state.operator != "flink-savepoint"]
    assert {(state.operator, state.name) for state in kept} == {(one.operator, one.name) for one in wanted}
    for state in wanted:
        assert contents(found, state.operator, state.name) == contents(source, state.operator, state.name), state.name
