"""The recipes of docs/foreign.md run as they stand, on a fixture of each system."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import stateformat

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "foreign" / "fixtures"
PAGE = (ROOT / "docs" / "foreign.md").read_text()
RECIPES = dict(re.findall(r"<!-- recipe: (\w+) -->\n```bash\n(.*?)```", PAGE, re.DOTALL))


def run(recipe: str, folder: Path, **variables: Path | int) -> str:
    """What the shell prints; ``ckpt`` is that of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run(
        ["bash", "-euc", recipe], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_recipe_is_run() -> None:
    assert set(RECIPES) == {"back", "partitions", "query"}


def test_a_spark_query_gets_another_number_of_partitions(tmp_path: Path) -> None:
    query = shutil.copytree(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint", tmp_path / "query")
    run(RECIPES["partitions"], tmp_path, QUERY=query, COPY=tmp_path / "copy")
    before, after = stateformat.open(query).open(), stateformat.open(tmp_path / "copy").open()
    assert [operator.parallelism for operator in before.graph.operators] == [3]
    assert [operator.parallelism for operator in after.graph.operators] == [12]
    contents = [
        Counter(map(repr, one.read("operator-0", "default").table().drop_columns(["_key_group"]).to_pylist()))
        for one in (before, after)
    ]
    assert contents[0] == contents[1]
    assert sorted(path.name for path in (tmp_path / "copy" / "state" / "0").iterdir() if path.name.isdigit()) == sorted(
        map(str, range(12))
    )


def test_a_spark_query_goes_back_to_an_older_batch(tmp_path: Path) -> None:
    query = shutil.copytree(FIXTURES / "spark-4.3.0" / "totals-with-crc" / "checkpoint", tmp_path / "query")
    places = {"QUERY": query, "OLDER": tmp_path / "older", "COPY": tmp_path / "copy"}
    newest, older = (record.checkpoint_id for record in stateformat.open(query).history()[:2])
    run(RECIPES["back"], tmp_path, BATCH=older - 1, PARTITIONS=3, **places)
    assert [record.checkpoint_id for record in stateformat.open(query).history()[:2]] == [newest, older]
    found, wanted = (
        sorted(map(repr, one.read("operator-0", "default").table().to_pylist()))
        for one in (stateformat.open(places["COPY"]).open(), stateformat.open(query).open(older))
    )
    assert found == wanted
    assert stateformat.open(places["COPY"]).open().id == older
    assert not list((tmp_path / "copy" / "state").rglob(f"{newest}.*"))
    # A checksum of Hadoop's beside which its file is gone keeps Spark from writing that file again.
    orphans = [path for path in (tmp_path / "copy").rglob(".*.crc") if not (path.parent / path.name[1:-4]).exists()]
    assert not orphans


@pytest.mark.parametrize("form", ["core-hashmap-canonical", "core-rocksdb-canonical"])
def test_a_flink_savepoint_is_queried(tmp_path: Path, form: str) -> None:
    printed = run(RECIPES["query"], tmp_path, SAVEPOINT=FIXTURES / "flink-2.3.0" / form / "savepoint")
    [head, *found, _, count] = printed.splitlines()[-6:]
    assert (head.split(), count) == (["key", "mean"], "3 rows")
    entries = [
        json.loads(line) for line in (FIXTURES / "flink-2.3.0" / form / "expected.jsonl").read_text().splitlines()
    ]
    means = [one["value"] for one in entries if (one["operator"], one["state"]) == ("by-string", "mean")]
    greatest = sorted((value["f1"] / value["f0"] for value in means), reverse=True)[:3]
    assert [float(line.split()[-1]) for line in found] == greatest
