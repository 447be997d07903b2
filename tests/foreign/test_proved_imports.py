"""Every fixture that can be imported is proved to be the same content as its import."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateformat.backends.importing import ImportSpec, KeyHash, import_checkpoint, prove_import
from stateformat.errors import CheckpointError
from stateformat.store import open as open_store

FIXTURES = Path(__file__).parent / "fixtures"
FLINK = sorted(path.parent for path in FIXTURES.glob("flink-*/*/*/_metadata") if path.is_file())
SPARK = sorted(path.parent for path in FIXTURES.glob("spark-*/*/*/metadata") if (path.parent / "offsets").exists())
FEW = {"finished-hashmap-canonical", "core-rocksdb-canonical", "join-outer", "transform-rocksdb"}


def cases() -> list[object]:
    found = []
    for path in (*FLINK, *SPARK):
        few = path.parent.name in FEW and path.parts[-3] in ("flink-2.3.0", "spark-4.3.0")
        name = "/".join(path.parts[-3:-1])
        found.append(pytest.param(path, id=name, marks=[] if few else [pytest.mark.truth]))
    return found


@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
@pytest.mark.parametrize("path", cases())
def test_an_import_has_lost_nothing(tmp_path: Path, path: Path, key_hash: KeyHash) -> None:
    checkpoint = open_store(str(path), allow_outside=True).open()
    refused = sorted({note.subject for note in checkpoint.notes if note.kind == "refused"})
    spec = ImportSpec(key_hash=key_hash, drop=refused)
    try:
        done = import_checkpoint(checkpoint, open_store(str(tmp_path)), spec)
    except CheckpointError:
        # What cannot be imported, other tests tell of; most can.
        assert path.parent.name not in FEW
        return
    proof = prove_import(checkpoint, done.rewritten.permit.checkpoint(), spec)
    assert proof.same, [state for state in proof.states if not state.same]


def test_there_are_fixtures() -> None:
    assert len(FLINK) > 30
    assert len(SPARK) > 30
