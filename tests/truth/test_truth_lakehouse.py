"""Iceberg and Delta tables of state, read by DuckDB and its extensions in a separate environment.
Their wheels come from the package index: without it the tests fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.exporting import Format
from tests.ckpt.ckpt_runs import document
from tests.exporting.export_readers import ROWS, TYPES, types_store
from tests.worlds.data import NAMES, data_store, expected, expected_rows, same_rows

pytestmark = pytest.mark.truth

RELEASE = "1.5.5"
"""The newest DuckDB whose extensions are on the package index."""
EXTENSIONS = ("avro", "iceberg", "delta")
"""In the order in which they are loaded: Iceberg's manifests are Avro."""
READ = """
import importlib.util
import json
import pathlib
import sys

import duckdb

connection = duckdb.connect(config={"allow_unsigned_extensions": True})
for name in sys.argv[1].split(","):
    package = pathlib.Path(importlib.util.find_spec(f"duckdb_extension_{name}").origin).parent
    [file] = package.glob(f"extensions/v*/{name}.duckdb_extension")
    connection.execute(f"load '{file}'")
for query in json.load(sys.stdin):
    relation = connection.execute(query)
    names = [column[0] for column in relation.description]
    print(json.dumps([dict(zip(names, row)) for row in relation.fetchall()], default=repr))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with DuckDB of that release and its extensions."""
    folder = tmp_path_factory.mktemp("duckdb")
    venv.create(folder, symlinks=True)
    wheels = [f"duckdb=={RELEASE}", *(f"duckdb-extension-{name}=={RELEASE}" for name in EXTENSIONS)]
    installer = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    done = subprocess.run(
        [*installer, "--disable-pip-version-check", *wheels], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(wheels)} could not be installed; is the package index there? {done.stderr}"
    return folder / "bin" / "python"


def answers(python: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """Return the rows of each query; values that JSON cannot hold are written by ``repr``."""
    done = subprocess.run(
        [python, "-c", READ, ",".join(EXTENSIONS)],
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def as_json(rows: Any) -> list[dict[str, Any]]:
    return json.loads(json.dumps(list(rows), default=repr))


@pytest.mark.parametrize("file_format", list(Format))
def test_duckdb_reads_every_state_by_its_folder(python: Path, tmp_path: Path, file_format: Format) -> None:
    data_store(str(tmp_path / "store"))
    for at in (4, 6):
        found = document("export", f"{tmp_path / 'store'}@{at}", "--as", file_format, "--to", tmp_path / "lake")
    several = ("--operator", "totals", "--state", "spent", "--checkpoints", "1..5")
    document("export", tmp_path / "store", *several, "--as", file_format, "--to", tmp_path / "several")
    # DuckDB needs pytz to return an instant.
    instant = "* replace (epoch_us(seen) as seen)"
    scans = {
        (one["operator"], one["state"]): f"select * from {file_format}_scan('{one['path']}')" for one in found["states"]
    }
    scans["totals", "spent"] = scans["totals", "spent"].replace("*", instant, 1)
    over = f"select {instant} from {file_format}_scan('{tmp_path}/several')"
    *rows, several_rows = answers(python, *scans.values(), over)

    def micros(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "seen": int(row["seen"].timestamp()) * 1_000_000} if "seen" in row else row

    for name, mine in zip(scans, rows, strict=True):
        assert name in NAMES
        assert same_rows(mine, as_json(map(micros, expected(*name).to_pylist()))), name
    wanted = [
        {"_checkpoint_id": i, **micros(row)}
        for i in range(1, 6)
        for row in expected_rows("totals", "spent", i, columns_of=6)
    ]
    assert same_rows(several_rows, as_json(wanted))
    assert len(several_rows) == sum(len(expected("totals", "spent", i)) for i in range(1, 6))


@pytest.mark.parametrize("file_format", list(Format))
def test_duckdb_reads_every_type(python: Path, tmp_path: Path, file_format: Format) -> None:
    types_store(str(tmp_path / "store"))
    found = document("export", tmp_path / "store", "--as", file_format, "--to", tmp_path / "lake")
    [state] = found["states"]
    assert (state["operator"], state["rows"]) == (TYPES, len(ROWS))
    changed = "* replace (epoch_us(instant) as instant, counts::varchar as counts)"
    [rows] = answers(python, f"select {changed} from {file_format}_scan('{state['path']}')")
    inner = "y_z" if file_format is Format.ICEBERG else "y.z"
    for row, wanted in zip(rows, ROWS, strict=True):
        point = wanted["point"]
        if point and point["more"]:
            point = {"x": point["x"], "more": [item and {inner: item["y.z"]} for item in point["more"]]}
        instant = wanted["instant"] and int(wanted["instant"].timestamp() * 1_000_000)
        counts = wanted["counts"]
        text = None if counts is None else "{" + ", ".join(f"{k}={'NULL' if v is None else v}" for k, v in counts) + "}"
        said = as_json([{**wanted, "instant": instant, "counts": text, "point": point}])[0]
        assert [repr(value) for value in row.values()] == [repr(value) for value in said.values()]
