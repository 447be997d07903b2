"""A function of a module beside the program is found by Spark's workers, which it cannot shadow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MINE = """
import pyarrow as pa

def double(key, rows, state):
    return [{"shard": key, "m": 2 * row[1]} for row in rows]

def plus_one(n):
    return n + 1
"""
MAIN = """
import sys
import pyarrow as pa
import stateformat
from pyspark.sql.functions import udf
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.spark import SparkOptions, SparkRuntime, session
from mine import double, plus_one

spark = session()
print("udf", spark.range(3).select(udf(plus_one, "long")("id")).agg({"plus_one(id)": "sum"}).first()[0])
flow = Dataflow("own", parallelism=2)
rows = flow.source(RateSource(total=20, shards=2), uid="rows").key_by("shard")
doubled = rows.apply_per_key(double, output={"shard": pa.int32(), "m": pa.int64()}, uid="doubled")
doubled.apply(FileSink(sys.argv[1] + "/out", durable=False), uid="out")
print(SparkRuntime(spark, stateformat.open(sys.argv[1] + "/store")).run(flow).sentence)
import pyarrow.dataset as ds
print("sum", sum(ds.dataset(sys.argv[1] + "/out", format="parquet").to_table()["m"].to_pylist()))
"""


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.parametrize("submit", [False, True])
def test_a_function_of_a_module_beside_the_program_runs_and_folders_of_our_names_shadow_nothing(
    tmp_path: Path, submit: bool
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for place in (project, elsewhere):
        for name in ("tools", "backends", "stateformat", "pyarrow"):
            if place is elsewhere or name in ("tools", "backends"):  # What lies beside a program shadows in its driver.
                (place / name).mkdir(parents=True)
                (place / name / "__init__.py").write_text(f"raise ImportError('the wrong {name} was imported')\n")
    (project / "mine.py").write_text(MINE)
    (project / "main.py").write_text(MAIN)
    binaries = Path(sys.executable).parent
    words = [binaries / "spark-submit", "--master", "local[2]"] if submit else [sys.executable]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYSPARK_PYTHON", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [*map(str, words), str(project / "main.py"), str(tmp_path)],
        cwd=elsewhere,
        env=kept | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "udf 6" in done.stdout
    assert "sum 180" in done.stdout
