"""One package in the wheel, whatever it is built from, and the module by which Spark finds our data
source; it works beside folders of its parts' names, and on Spark's workers. An index takes both
files, and each extra is what its commands need.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import stateformat
from tests.servers.server import BUCKET
from tests.worlds.recipes import shell
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
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheels(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel from this checkout, and one from the sdist that is made of it."""
    place = tmp_path_factory.mktemp("built")
    with tarfile.open(sdist) as archive:
        archive.extractall(place / "unpacked", filter="data")
    unpacked = next((place / "unpacked").iterdir())
    return {"checkout": build("wheel", ROOT, place / "one"), "sdist": build("wheel", unpacked, place / "two")}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"stateformat-{stateformat.__version__}.dist-info/METADATA"))


def needed(wheel: Path, extras: Iterable[str]) -> set[str]:
    """The distributions that pip would install with the wheel."""
    waiting = [(each, {"", *extras}) for each in metadata(wheel).get_all("Requires-Dist", ())]
    found: set[str] = set()
    while waiting:
        text, chosen = waiting.pop()
        one = Requirement(text)
        if one.name in found or not any(one.marker is None or one.marker.evaluate({"extra": e}) for e in chosen):
            continue
        found.add(one.name)
        waiting += [(each, {"", *one.extras}) for each in distribution(one.name).requires or ()]
    return found


def environment(folder: Path, wheel: Path, *extras: str, install: bool = True) -> Path:
    """The ``bin`` of a fresh environment with the wheel and links to what it needs."""
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in needed(wheel, extras):
        one = distribution(name)
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(one.locate_file(top))
    if install:
        installer = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
        done = run(*installer, "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def core(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where nothing is installed but the wheel and what it always needs."""
    return environment(tmp_path_factory.mktemp("core"), wheels["sdist"])


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
    makes_docs = {path for path in here if path.startswith("stateformat/tools/ckpt/docs/")}
    assert {name for name in names if name.endswith(".py")} == here - moved - makes_docs | {FOUND_BY_SPARK}
    assert {"stateformat/SPEC.md", "stateformat/py.typed", "stateformat/schemas/ckpt.json"} <= set(names)
    shared = [name.partition(".data/")[2] for name in names if ".data/" in name]
    assert shared == ["data/share/man/man1/ckpt.1"]


def test_ckpt_and_a_local_job_run_beside_folders_of_the_same_names(core: Path, project: Path) -> None:
    done = run(core / "python", "job.py", "local", "../store", cwd=project)
    assert done.stdout.endswith("{'k': ['a', 'b'], 'n': [4, 2]}\n"), done.stderr
    done = run(core / "ckpt", "inspect", "../store", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "Checkpoint 1" in done.stdout


@pytest.mark.spark
@pytest.mark.truth
def test_spark_workers_take_the_package_from_py_files(wheels: dict[str, Path], project: Path, tmp_path: Path) -> None:
    bare = environment(tmp_path / "bare", wheels["checkout"], "spark", install=False)
    assert run(bare / "python", "-c", "import stateformat", cwd=tmp_path).returncode == 1
    package = shutil.copy(wheels["checkout"], tmp_path / "stateformat.zip")
    submit = [distribution("pyspark").locate_file("pyspark/bin/spark-submit"), "--master", "local[2]"]
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
    wheels: dict[str, Path], project: Path, tmp_path: Path
) -> None:
    installed = environment(tmp_path / "installed", wheels["sdist"], "spark")
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


# ---- what an index takes


def test_the_sdist_holds_what_the_wheel_is_built_from_and_little_more(sdist: Path, wheels: dict[str, Path]) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    beside = {name for name in names if not name.startswith("stateformat/")}
    assert beside == {
        *(".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "docs/ckpt.1", "hatch_build.py"),
        "pyproject.toml",
    }
    for file in (sdist, wheels["checkout"]):
        assert file.stat().st_size < 2_000_000, file


def test_what_an_index_shows_links_to_files_of_this_version_that_exist(wheels: dict[str, Path]) -> None:
    shown = metadata(wheels["sdist"])
    page = shown.get_payload()
    assert isinstance(page, str)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", page)
    tag = f"v{stateformat.__version__}"
    places = {
        "": f"https://github.com/stateformat/stateformat/blob/{tag}/",
        "!": f"https://raw.githubusercontent.com/stateformat/stateformat/{tag}/",
    }
    ours = [link for image, link in links if link.startswith(places[image])]
    assert len(ours) > 20
    assert not [link for link in ours if not (ROOT / link.partition(f"/{tag}/")[2].partition("#")[0]).exists()]
    assert not [link for _, link in links if "://" not in link]
    assert page.count("](") == len(links), "a link that the pattern does not know"
    assert (shown["Description-Content-Type"], shown["License-Expression"]) == ("text/markdown", "Apache-2.0")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        shown.get_all("Classifier", ())
    )


def test_twine_finds_nothing_wrong(sdist: Path, wheels: dict[str, Path], tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", sdist, wheels["sdist"], cwd=tmp_path)
    assert done.stdout.count("PASSED") == 2, done.stdout + done.stderr


# ---- what a user types first

FIXTURES = ROOT / "tests" / "foreign" / "fixtures"
LOOK = """
ckpt inspect $QUERY
ckpt inspect $SAVEPOINT
ckpt validate $QUERY --level full
"""


def look(bin_folder: Path, folder: Path) -> str:
    """What the first commands print of a Spark query and a savepoint of Flink."""
    query = shutil.copytree(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint", folder / "query")
    savepoint = shutil.copytree(FIXTURES / "flink-2.3.0" / "core-rocksdb-canonical" / "savepoint", folder / "savepoint")
    path = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    return shell(f"cd {folder}\nQUERY={query} SAVEPOINT={savepoint}\n{LOOK}", path, first=bin_folder)


def test_the_first_commands_need_no_extra(core: Path, tmp_path: Path) -> None:
    printed = look(core, tmp_path)
    assert all(name in printed for name in ("stateStoreSave (operator-0)", "by-string", "no problems")), printed


def interpreter(minor: int) -> Path | None:
    """A Python of that version that runs, on the path or of pyenv."""
    found = [shutil.which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
    for place in filter(None, found):
        if subprocess.run([place, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(place)
    return None


@pytest.mark.truth
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_pip_installs_the_wheel_on_each_python_and_the_first_commands_run(
    minor: int, wheels: dict[str, Path], tmp_path: Path
) -> None:
    python = interpreter(minor)
    if python is None:
        pytest.skip(
            f"Python 3.{minor} is not installed here; its classifier and the code's syntax are all that is known"
        )
    assert run(python, "-m", "venv", tmp_path / "place", cwd=tmp_path).returncode == 0
    place = tmp_path / "place" / "bin"
    done = run(place / "pip", "install", "--disable-pip-version-check", wheels["sdist"], cwd=tmp_path)
    if "No matching distribution found" in done.stderr:
        pytest.skip(f"no index gives this machine what the wheel needs: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    listed = run(place / "pip", "list", "--format", "freeze", cwd=tmp_path).stdout
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert names - {"pip", "setuptools"} == {"click", "fsspec", "numpy", "pyarrow", "stateformat", "xxhash"}
    assert "no problems" in look(place, tmp_path)


# ---- extras

EXTRAS = {
    "s3": ("ckpt inspect s3://bucket/store", "needs obstore"),
    "gcs": ("ckpt inspect gs://bucket/store", "needs obstore"),
    "azure": ("ckpt inspect az://container/store", "needs obstore"),
    "spark": ("ckpt rewrite store --max-parallelism 64 --engine spark --to copy", "Spark is not installed"),
    "sql": ("ckpt sql store 'select count(*) from counter.counts'", "queries need DuckDB"),
    "iceberg": ("ckpt export store --as iceberg --to lake", "need pyiceberg"),
    "delta": ("ckpt export store --as delta --to lake", "need deltalake"),
    "postgres": (
        """python -c "from stateformat.backends.connectors import SqlSink
SqlSink('postgresql://localhost:1/db', 'counts', key='word', staging='staged')" """,
        "needs psycopg",
    ),
}
"""Of each extra, what needs it, and how the sentence begins that names it where it is missing."""
SERVERS = {"s3": ("s3", "moto"), "gcs": ("gs", "gcs"), "azure": ("az", "azurite")}
"""Of each extra for object stores, the scheme and the fixture of the server."""
PUBLISH = """
import json, sys
from stateformat.storage import open_storage
storage = open_storage(sys.argv[1], **json.loads(sys.argv[2]))
print(*(storage.create("checkpoints/00000000000000000001.json", body).name for body in (b"one", b"two")))
print(bytes(storage.read("checkpoints/00000000000000000001.json")).decode())
"""


def test_the_readme_says_what_each_extra_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for_authors = {"all", "conformance", "demo", "dev"}
    assert set(project) - for_authors == set(EXTRAS)
    told = re.search(r"Extras: (.*?) `make demo`", (ROOT / "README.md").read_text(), re.DOTALL)
    assert told is not None
    assert set(re.findall(r"`(\w+)`", told[1])) == set(EXTRAS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_needs_an_extra_names_it_where_it_is_missing(extra: str, core: Path, tmp_path: Path) -> None:
    counts_store(str(tmp_path / "store"))
    command, begins = EXTRAS[extra]
    done = run("bash", "-c", command, cwd=tmp_path, PATH=f"{core}{os.pathsep}{os.environ['PATH']}")
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert begins in said
    assert f"pip install 'stateformat[{extra}]'" in said
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "lake").exists()


@pytest.mark.truth
@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - SERVERS.keys()))
def test_what_needs_an_extra_needs_no_other(extra: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    counts_store(str(tmp_path / "store"))
    place = environment(tmp_path / "place", wheels["sdist"], extra)
    path = f"{place}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", "-c", EXTRAS[extra][0], cwd=tmp_path, PATH=path, PYSPARK_PYTHON=str(place / "python"))
    assert done.returncode == 0, done.stderr


@pytest.mark.truth
@pytest.mark.parametrize("extra", SERVERS)
def test_an_object_store_needs_no_other_extra(
    extra: str, wheels: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    scheme, server = SERVERS[extra]
    options = json.dumps(request.getfixturevalue(server).options())
    place = environment(tmp_path / "place", wheels["sdist"], extra)
    done = run(place / "python", "-c", PUBLISH, f"{scheme}://{BUCKET}/alone", options, cwd=tmp_path)
    assert done.stdout == "CREATED CONFLICT\none\n", done.stderr
