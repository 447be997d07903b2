"""Make the fixtures of Spark anew, all or those named: ``make_spark.py [NAME …]``.

Each older Spark gets an environment of its own in ``~/.cache/stateformat-fixtures``; the newest is
that of this interpreter, and its state readers say what the checkpoints of all versions hold.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
CACHE = Path.home() / ".cache" / "stateformat-fixtures"
WORK = Path("/tmp/stateformat-fixtures")
"""Spark keeps absolute paths in its logs: always this one."""
ENVIRONMENTS = {
    "3.5.9": ["pyspark==3.5.9", "numpy<2", "pandas==2.1.4", "pyarrow==15.0.2", "setuptools"],
    "4.0.5": [
        "pyspark==4.0.5",
        "numpy<2.3",
        "pandas==2.2.3",
        "pyarrow==18.1.0",
        "protobuf",
        "grpcio",
        "googleapis-common-protos",
    ],
}
OLD = "3.0.3"
"""The last that writes no schemas. Its own Scala library, 2.12.10, does not run on Java 17: that of
Spark 3.5 takes its place, and a program in Java makes the queries.
"""
OPENED = ("java.lang", "java.lang.invoke", "java.net", "java.nio", "java.util", "sun.nio.ch")
PROGRAM = HERE / "spark_fixtures.py"


def environment(version: str) -> str:
    """The interpreter of the environment with Spark ``version``, which is made if need be."""
    root = CACHE / f"spark-{version}"
    python = root / "bin" / "python"
    if not (root / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", root], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *ENVIRONMENTS[version]], check=True)
        (root / "ready").touch()
    return str(python)


def run(python: str, *arguments: str) -> None:
    subprocess.run([python, str(PROGRAM), str(WORK), *arguments], check=True, env={**os.environ, "TZ": "UTC"})


def make_old() -> None:
    """Make the fixtures of :data:`OLD` with its jars, from the source distribution on PyPI."""
    jars = CACHE / f"spark-{OLD}"
    if not (jars / "ready").exists():
        for version, wanted in ((OLD, "*.jar"), ("3.5.9", "scala-library-*.jar")):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*pip, "-d", jars, f"pyspark=={version}"], check=True)
            unpack = [
                "tar",
                "xzf",
                jars / f"pyspark-{version}.tar.gz",
                "-C",
                jars,
                "--strip-components=3",
                "--wildcards",
            ]
            subprocess.run([*unpack, f"*/deps/jars/{wanted}"], check=True)
        (jars / "scala-library-2.12.10.jar").unlink()
        (jars / "ready").touch()
    opened = [f"--add-{how}=java.base/{name}=ALL-UNNAMED" for name in OPENED for how in ("opens", "exports")]
    program = HERE / "spark" / "OldQueries.java"
    subprocess.run(["java", *opened, "-cp", f"{jars}/*", program, WORK / f"old-spark-{OLD}"], check=True)


def keep(made: Path) -> None:
    """Copy what belongs to a fixture. Hadoop's checksum files stay in the one that shows them."""
    target = FIXTURES / made.parent.name / made.name
    shutil.rmtree(target, ignore_errors=True)
    hidden = () if made.name.endswith("-with-crc") else (".*.crc",)
    shutil.copytree(made, target, ignore=shutil.ignore_patterns("input", "told", "classes", *hidden))


def main() -> None:
    names = sys.argv[1:]
    shutil.rmtree(WORK, ignore_errors=True)
    for version in ENVIRONMENTS:
        run(environment(version), *names)
    run(sys.executable, *names)
    run(sys.executable, "--say", *names)
    if not names:
        make_old()
        for old in FIXTURES.glob("*spark-*"):
            shutil.rmtree(old)
    for made in sorted(WORK.glob("*spark-*/*")):
        keep(made)


if __name__ == "__main__":
    main()
