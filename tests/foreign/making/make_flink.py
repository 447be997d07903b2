"""Make the Flink fixtures anew: ``python tests/foreign/making/make_flink.py [NAME ...]``.

Flink's jars come from PyPI (``apache-flink-libraries``) and stay in a cache outside the repository;
the programs in ``flink/`` are compiled against each version and run in a local environment. Of each
fixture there is the savepoint, and what Flink says after it has restored it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "stateformat-fixtures"
# Metadata of checkpoints has absolute paths: these, on every machine.
MADE = Path("/tmp/flink-fixtures")
SERIALIZERS = "flink-2.3.0/serializers/values.jsonl"
PRIVATE = (
    "java.lang",
    "java.lang.reflect",
    "java.math",
    "java.net",
    "java.nio",
    "java.text",
    "java.time",
    "java.util",
    "java.util.concurrent",
)


class Fixture(NamedTuple):
    """One job's state in one form."""

    version: str
    job: str
    backend: str
    form: str

    @property
    def name(self) -> str:
        """Its folder below ``fixtures/``."""
        form = self.form.replace("+", "-")
        return f"flink-{self.version}/{self.job}-{self.backend}-{form}"


FORMS = {
    "core": "hashmap-canonical rocksdb-canonical",
    "brief": "hashmap-canonical+inline hashmap-canonical+snappy hashmap-native hashmap-native+snappy"
    " hashmap-checkpoint hashmap-checkpoint+snappy hashmap-checkpoint+changelog rocksdb-canonical"
    " rocksdb-canonical+snappy rocksdb-native rocksdb-checkpoint rocksdb-checkpoint+changelog rocksdb-checkpoint+heap",
    "keys": "hashmap-canonical",
    "types": "hashmap-canonical",
    "windows": "hashmap-canonical hashmap-native",
    "namespaces": "hashmap-canonical rocksdb-checkpoint rocksdb-checkpoint+heap",
    "ttl": "hashmap-canonical hashmap-native rocksdb-checkpoint",
    "shared": "hashmap-canonical hashmap-canonical+snappy",
    "wide": "hashmap-canonical rocksdb-canonical",
    "sink": "hashmap-canonical+inline",
    "finished": "hashmap-canonical",
    "sql": "hashmap-canonical hashmap-native",
}
OLDER = {
    "1.13.6": {
        "core": "hashmap-canonical",
        "brief": "rocksdb-canonical hashmap-checkpoint rocksdb-checkpoint rocksdb-checkpoint+full"
        " rocksdb-checkpoint+full+snappy rocksdb-checkpoint+heap",
        "types": "hashmap-canonical",
        "windows": "hashmap-canonical",
        "ttl": "hashmap-canonical",
        "shared": "hashmap-canonical+snappy",
        "sql": "hashmap-canonical",
    },
    "1.14.6": {"brief": "rocksdb-checkpoint+full"},
    "1.15.4": {"brief": "hashmap-native rocksdb-canonical rocksdb-native"},
    "1.17.2": {"brief": "rocksdb-checkpoint+full rocksdb-checkpoint+heap"},
    "1.20.5": {
        "brief": "hashmap-native hashmap-checkpoint+changelog",
        "types": "hashmap-canonical",
        "ttl": "hashmap-canonical",
        "shared": "hashmap-canonical+snappy",
        "finished": "hashmap-canonical",
        "generic": "hashmap-canonical hashmap-native rocksdb-checkpoint",
    },
}


def _all() -> Iterator[Fixture]:
    for version, jobs in {"2.3.0": FORMS, **OLDER}.items():
        for job, forms in jobs.items():
            for form in forms.split():
                backend, _, way = form.partition("-")
                yield Fixture(version, job, backend, way)


def jars(version: str) -> list[Path]:
    """Return Flink's jars; installs them into the cache if they are not there."""
    home = CACHE / version
    found = sorted(home.rglob("lib/*.jar"))
    if found:
        return found
    loads = CACHE / "downloads"
    wanted = f"apache-flink-libraries=={version}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", wanted, "-d", str(loads)]
    subprocess.run(command, check=True)
    for packed in loads.glob(f"apache?flink?libraries-{version}*"):
        if packed.suffix == ".whl":
            with zipfile.ZipFile(packed) as wheel:
                wheel.extractall(home)
        else:
            with tarfile.open(packed) as sdist:
                sdist.extractall(home, filter="data")
        packed.unlink()
    return sorted(home.rglob("lib/*.jar"))


def compiled(version: str) -> str:
    """Compile the programs for a version; return the class path to run them with."""
    libraries = jars(version)
    # Of this process alone: another may compile for the same version meanwhile.
    classes = Path(tempfile.mkdtemp(prefix="flink-classes-"))
    atexit.register(shutil.rmtree, classes, ignore_errors=True)
    generation = HERE / "flink" / f"v{version[0]}"
    sources = [*HERE.glob("flink/*.java"), *generation.glob("*.java")]
    path = ":".join(map(str, libraries))
    command = ["javac", "-nowarn", "-Xlint:none", "-d", str(classes), "-cp", path]
    subprocess.run([*command, *map(str, sorted(sources))], check=True)
    settings = classes / "log4j2.properties"
    settings.write_text("rootLogger.level = OFF\n")
    return f"{classes}:{path}"


def run(classpath: str, orders: Sequence[str]) -> None:
    """Carry out orders, which ``Main.java`` explains, in one process."""
    script = Path(classpath.partition(":")[0]) / "orders"
    script.write_text("\n".join(orders) + "\n")
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in PRIVATE]
    command = ["java", "-Xmx1g", "-Duser.timezone=UTC", *opened, "-cp", classpath, "fixtures.Main"]
    subprocess.run([*command, str(script)], check=True)


def serializers() -> None:
    """Write what Flink's serializers make of values that no job has (``Serializers.java``)."""
    target = FIXTURES / SERIALIZERS
    target.parent.mkdir(parents=True, exist_ok=True)
    opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in PRIVATE]
    command = ["java", "-Duser.timezone=UTC", *opened, "-cp", compiled("2.3.0"), "fixtures.Serializers", str(target)]
    subprocess.run(command, check=True)


def _make(version: str, fixtures: Sequence[Fixture]) -> None:
    orders = []
    for fixture in fixtures:
        made = MADE / fixture.name
        shutil.rmtree(made, ignore_errors=True)
        orders.append(f"make {fixture.job} {fixture.backend} {fixture.form} {made}/savepoint")
        if "changelog" not in fixture.form:
            said = f"{made}/expected.jsonl"
            orders.append(f"dump {made}/savepoint {fixture.backend} 0 {said}")
    try:
        run(compiled(version), orders)
    finally:
        _take(fixtures)


def _take(fixtures: Sequence[Fixture]) -> None:
    """Those that are made whole replace what stands in the repository."""
    for fixture in fixtures:
        wanted = "savepoint" if "changelog" in fixture.form else "expected_metadata.jsonl"
        if not (MADE / fixture.name / wanted).exists():
            continue
        target = FIXTURES / fixture.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(MADE / fixture.name, target)


def main(names: Sequence[str]) -> None:
    """Make the fixtures of these names, or all."""
    chosen = [fixture for fixture in _all() if not names or fixture.name in names]
    for version in sorted({fixture.version for fixture in chosen}):
        _make(version, [fixture for fixture in chosen if fixture.version == version])
    if not names or SERIALIZERS in names:
        serializers()


if __name__ == "__main__":
    main(sys.argv[1:])
