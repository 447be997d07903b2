"""Makes ``fixtures/rocksdb-9.8.4`` with the RocksDB that PySpark 4.3 brings; needs Java 17.

``python tests/foreign/making/make_rocksdb.py``
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyspark

HERE = Path(__file__).parent
TARGET = HERE.parent / "fixtures" / "rocksdb-9.8.4"
KEYS = 50


def main() -> None:
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("rocksdbjni-9.8.4.jar")
    shutil.rmtree(TARGET, ignore_errors=True)
    subprocess.run(["java", "-cp", str(jar), str(HERE / "RocksTables.java"), str(TARGET), str(KEYS)], check=True)


if __name__ == "__main__":
    main()
