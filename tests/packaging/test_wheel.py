"""One package in the wheel, whatever it is built from, and the module by which Spark finds our data
source; it works beside folders of its parts' names, and on Spark's workers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pyarrow
import pytest

import stateformat
from tests.worlds.stores import counts_store

ROOT = Path(__file__).resolve().parents[2]
WINGS = ("backends", "redistribution", "tools")
FOUND_BY_SPARK = "pyspark_stateformat.py"
"""The one name beside our package: Spark imports every top-level module ``pyspark_…``."""
READ = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").getOrCreate()
counts = spark.read.format("stateformat").option("operator", "counter").option("state", "counts").load(sys.argv[1])
print(sorted(map(tuple, counts.collect())))
spark.stop()
"""
JOB = """
import sys
import backends, tools  # the user's own, beside this file
assert backends.MINE and tools.MINE
import pyarrow as pa
import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow

def flow(out):
    flow = Dataflow("sums", parallelism=2)
    rows = flow.source(MemorySource(pa.table({"k": ["a", "b", "a"], "n": [1, 2, 3]})), uid="rows")
    rows.key_by("k").aggregate({"n": ("n", "sum")}, emit="end", uid="sums").apply(out, uid="out")
    return flow

store, out = stateformat.open(sys.argv[2]), CollectSink()
if sys.argv[1] == "local":
    from stateformat.backends.local import LocalRuntime
    LocalRuntime(store).run(flow(out))
else:
    from stateformat.backends.spark import SparkRuntime, register_data_source, session
    with session() as spark:
        where = spark.range(1).rdd.map(lambda _: __import__("stateformat").__file__).collect()
        print("workers import", *where)
        SparkRuntime(spark, store).run(flow(out))
        register_data_source(spark)  # Spark looks for data sources before it adds --py-files
        checkpoints = spark.read.format("stateformat").option("table", "checkpoints").load(sys.argv[2])
        print("the data source finds", checkpoints.count() == len(store.history()))
print(out.table().sort_by("k").to_pydict())
"""


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYSPARK_PYTHON", "PYTHONSAFEPATH", "PYTHONPATH")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False
    )


def build(kind: str, source: Path, target: Path) -> Path:
    done = run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target, cwd=source)
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel from this checkout, and one from the sdist that is made of it."""
    place = tmp_path_factory.mktemp("built")
    with tarfile.open(build("sdist", ROOT, place / "sdist")) as archive:
        archive.extractall(place / "unpacked", filter="data")
    unpacked = next((place / "unpacked").iterdir())
    return {"checkout": build("wheel", ROOT, place / "one"), "sdist": build("wheel", unpacked, place / "two")}


def environment(folder: Path, wheel: Path | None) -> Path:
    """The ``bin`` of a fresh environment with our dependencies, and with the wheel if there is
    one.
    """
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "dependencies.pth").write_text(f"{Path(pyarrow.__file__).parents[1]}\n")
    if wheel is not None:
        installer = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
        done = run(*installer, "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("environment"), wheels["sdist"])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with packages named as our parts are."""
    folder = tmp_path / "project"
    for name in WINGS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("MINE = True\n")
    (folder / "job.py").write_text(JOB)
    return folder


@pytest.mark.parametrize("source", ["checkout", "sdist"])
def test_a_wheel_holds_one_package_every_module_and_what_spark_looks_for(wheels: dict[str, Path], source: str) -> None:
    names = zipfile.ZipFile(wheels[source]).namelist()
    assert {name.split("/")[0] for name in names} - {"stateformat"} == {
        f"stateformat-{stateformat.__version__}.data",
        f"stateformat-{stateformat.__version__}.dist-info",
        FOUND_BY_SPARK,
    }
    package = ROOT / "stateformat"
    starts = (package, *(package / wing for wing in WINGS))  # links, which `rglob` follows only as a start
    here = {str(path.relative_to(ROOT)) for start in starts for path in start.rglob("*.py")}
    moved = {path for path in here if path.endswith(f"/{FOUND_BY_SPARK}")}
    assert {name for name in names if name.endswith(".py")} == here - moved | {FOUND_BY_SPARK}
    assert {"stateformat/SPEC.md", "stateformat/py.typed"} <= set(names)
    shared = [name.partition(".data/")[2] for name in names if ".data/" in name]
    assert shared == ["data/share/man/man1/ckpt.1"]


def test_ckpt_and_a_local_job_run_beside_folders_of_the_same_names(installed: Path, project: Path) -> None:
    done = run(installed / "python", "job.py", "local", "../store", cwd=project)
    assert done.stdout.endswith("{'k': ['a', 'b'], 'n': [4, 2]}\n"), done.stderr
    done = run(installed / "ckpt", "inspect", "../store", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "Checkpoint 1" in done.stdout


@pytest.mark.spark
@pytest.mark.truth
def test_spark_workers_take_the_package_from_py_files(wheels: dict[str, Path], project: Path, tmp_path: Path) -> None:
    bare = environment(tmp_path / "bare", None)
    assert run(bare / "python", "-c", "import stateformat", cwd=tmp_path).returncode == 1
    package = shutil.copy(wheels["checkout"], tmp_path / "stateformat.zip")
    submit = [Path(pyarrow.__file__).parents[1] / "pyspark" / "bin" / "spark-submit", "--master", "local[2]"]
    path = f"{bare}{os.pathsep}{os.environ['PATH']}"
    done = run(*submit, "--py-files", package, "job.py", "spark", tmp_path / "store", cwd=project, PATH=path)
    assert done.stdout.endswith("{'k': ['a', 'b'], 'n': [4, 2]}\n"), done.stderr[-3000:]
    assert "stateformat.zip" in done.stdout
    assert "the data source finds True" in done.stdout


@pytest.mark.parametrize("wing", WINGS)
def test_a_copy_without_links_is_not_built(wing: str, tmp_path: Path) -> None:
    # What git, or a ZIP of the repository, leaves in place of a link where there are none.
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "stateformat", tmp_path / "stateformat", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "stateformat" / wing)
    (tmp_path / "stateformat" / wing).write_text(f"../{wing}")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=tmp_path)
    assert done.returncode == 1
    assert f"stateformat/{wing} is not a folder" in done.stderr
    assert "core.symlinks" in done.stderr


@pytest.mark.truth
@pytest.mark.spark
def test_spark_finds_the_data_source_of_an_installed_wheel_by_itself(
    installed: Path, project: Path, tmp_path: Path
) -> None:
    counts_store(str(tmp_path / "store"), keys=2)
    (project / "read.py").write_text(READ)
    done = run(
        installed / "python", "read.py", tmp_path / "store", cwd=project, PYSPARK_PYTHON=str(installed / "python")
    )
    assert done.stdout.endswith("[('w0', 0), ('w1', 1)]\n"), done.stderr[-3000:]


def test_what_spark_looks_for_raises_nothing_where_something_is_missing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "stateformat" / "backends" / "spark" / "data_source" / FOUND_BY_SPARK, tmp_path)
    bare = [sys.executable, "-S", "-c", "import pyspark_stateformat as found; print(hasattr(found, 'DefaultSource'))"]
    assert run(*bare, cwd=tmp_path).stdout == "False\n"


def test_an_editable_install_has_what_spark_looks_for(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", tmp_path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert FOUND_BY_SPARK in names
    assert not [name for name in names if name.startswith("stateformat/")]
