"""Flink 2.3 restores the savepoints that we write, at other parallelisms too, and says of them what
it said of those that it wrote itself.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stateformat
from stateformat.backends.foreign.flink.writing.savepoint import write_savepoint
from stateformat.backends.foreign.flink.writing.template import TEMPLATE_OPERATOR
from stateformat.backends.importing import ImportSpec, import_checkpoint
from stateformat.backends.rewrite import RewriteSpec, publish_rescaled, rewrite
from stateformat.graph import JobGraph
from stateformat.storage import folder_of, open_storage

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
pytestmark = pytest.mark.truth

RESTORED = (
    # Fixture, what is left out of it, Flink's state backend.
    ("flink-2.3.0/core-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/core-rocksdb-canonical", (), "rocksdb"),
    ("flink-2.3.0/brief-rocksdb-checkpoint", (), "rocksdb"),
    ("flink-2.3.0/brief-hashmap-native-snappy", (), "hashmap"),
    ("flink-2.3.0/keys-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/namespaces-hashmap-canonical", (), "rocksdb"),
    ("flink-2.3.0/shared-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/sql-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/ttl-hashmap-native", (), "hashmap"),
    ("flink-2.3.0/types-hashmap-canonical", ("types/base-pojo",), "hashmap"),
    ("flink-2.3.0/wide-rocksdb-canonical", (), "rocksdb"),
    ("flink-2.3.0/windows-hashmap-canonical", (), "hashmap"),
    ("flink-2.3.0/finished-hashmap-canonical", (), "hashmap"),
    ("flink-1.13.6/core-hashmap-canonical", (), "hashmap"),
    ("flink-1.20.5/ttl-hashmap-canonical", (), "rocksdb"),
)
PARALLELISMS = (0, 2, 5)
"""0 is that of the savepoint."""


def making() -> ModuleType:
    """The program that makes the fixtures."""
    spec = importlib.util.spec_from_file_location("make_flink", HERE / "making" / "make_flink.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["make_flink"] = found
    spec.loader.exec_module(found)
    return found


def imported(name: str, drop: tuple[str, ...], into: Path) -> stateformat.Checkpoint:
    """Import a fixture into a store of ours, with its key groups."""
    saved = FIXTURES / name / "savepoint"
    if not (saved / "_metadata").exists():
        saved = next(saved.glob("*/chk-*/_metadata")).parent.parent
    store = stateformat.open(str(into))
    import_checkpoint(stateformat.open(str(saved)).open(), store, ImportSpec(key_hash="keep", drop=drop))
    return store.open()


def export(checkpoint: stateformat.Checkpoint, into: Path) -> Path:
    folder = folder_of(open_storage(str(into)))
    assert folder is not None
    write_savepoint(checkpoint, folder)
    return into


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[dict[str, Any]]]:
    """What Flink says of each savepoint at each parallelism: all of them in one process of Java."""
    try:
        maker = making()
        classpath = maker.compiled("2.3.0")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Flink 2.3.0 cannot be installed from PyPI and compiled against here: {error}")
    home = tmp_path_factory.mktemp("restores")
    orders = []
    for name, drop, backend in RESTORED:
        plain = name.replace("/", "-")
        checkpoint = imported(name, drop, home / f"store-{plain}")
        savepoint = export(checkpoint, home / plain)
        orders += [f"dump {savepoint} {backend} {number} {home}/{plain}-{number}.jsonl" for number in PARALLELISMS]
    rescaled = stateformat.open(str(home / "rescaled"))
    source = stateformat.open(str(home / "store-flink-2.3.0-core-hashmap-canonical"))
    topology = JobGraph(
        tuple(
            replace(operator, parallelism=1 if operator.uid == TEMPLATE_OPERATOR else 5)
            for operator in source.open().graph.operators
        )
    )
    publish_rescaled(source.open(), topology, store=source, target=rescaled)
    rewritten = stateformat.open(str(home / "rewritten"))
    rewrite(source, source.open(), RewriteSpec(parallelism=3, max_parallelism=60), target=rewritten)
    for store, name in ((rescaled, "rescaled"), (rewritten, "rewritten")):
        savepoint = export(store.open(), home / f"{name}-savepoint")
        orders.append(f"dump {savepoint} hashmap 0 {home}/{name}-0.jsonl")
    maker.run(classpath, orders)

    def lines(name: str, number: int) -> list[dict[str, Any]]:
        path = home / f"{name.replace('/', '-')}-{number}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    return lines


def expected(name: str, drop: tuple[str, ...]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (FIXTURES / name / "expected.jsonl").read_text().splitlines()]
    return [line for line in found if f"{line['operator']}/{line['state']}" not in drop]


def comparable(lines: list[dict[str, Any]], *, placed: bool) -> list[str]:
    """Lines in an order of their own, without what a restore changes.

    Keyed state stays with its subtask where ``placed``. Lists are dealt anew where a subtask had
    finished; all subtasks have all of union and broadcast state: once is enough.
    """
    found = []
    once = set()
    for line in lines:
        kept = dict(line)
        if "key_group" not in kept or not placed:
            kept.pop("subtask")
        if line["kind"] in ("SPLIT_DISTRIBUTE", "UNION"):
            kept.pop("index")
        text = json.dumps(kept, sort_keys=True)
        if line["kind"] in ("UNION", "BROADCAST"):
            once.add(text)
        else:
            found.append(text)
    return sorted([*found, *once])


@pytest.mark.parametrize("number", PARALLELISMS)
@pytest.mark.parametrize(("name", "drop"), [one[:2] for one in RESTORED], ids=[one[0] for one in RESTORED])
def test_flink_restores_every_entry(
    said: Callable[[str, int], list[dict[str, Any]]], name: str, drop: tuple[str, ...], number: int
) -> None:
    wanted = comparable(expected(name, drop), placed=number == 0)
    assert len(wanted) > 10
    assert comparable(said(name, number), placed=number == 0) == wanted


def test_flink_restores_what_was_rescaled_in_our_store(said: Callable[[str, int], list[dict[str, Any]]]) -> None:
    found = said("rescaled", 0)
    assert {line["subtask"] for line in found if line["operator"] == "by-long"} == {0, 1, 2, 3, 4}
    wanted = expected("flink-2.3.0/core-hashmap-canonical", ())
    assert comparable(found, placed=False) == comparable(wanted, placed=False)


def test_flink_restores_what_was_hashed_to_other_key_groups(
    said: Callable[[str, int], list[dict[str, Any]]],
) -> None:
    def without_groups(lines: list[dict[str, Any]]) -> list[str]:
        return comparable([{**line, "key_group": 0} if "key_group" in line else line for line in lines], placed=False)

    found = said("rewritten", 0)
    assert max(line["key_group"] for line in found if "key_group" in line) < 60
    assert without_groups(found) == without_groups(expected("flink-2.3.0/core-hashmap-canonical", ()))
