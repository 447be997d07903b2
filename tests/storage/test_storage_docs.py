"""The storage that ``docs/storages.md`` shows passes the suite as the page runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "storages.md"


def test_the_storage_of_the_guide_passes_the_suite(tmp_path: Path) -> None:
    text = PAGE.read_text()
    blocks = dict(re.findall(r"```(python|toml|py)\n(.*?)```", text, re.DOTALL))
    (tmp_path / "sqlite_storage.py").write_text(blocks["python"])
    # As long as the page has it, the races prove no more here than a few rounds.
    few = "\n    race_threads, race_rounds, listing_rounds = 8, 3, 8\n"
    (tmp_path / "test_sqlite_storage.py").write_text(blocks["py"] + few)
    registered = re.fullmatch(r'\[project\.entry-points\."(.*)"\]\n(.*)\n', blocks["toml"])
    assert registered is not None
    package = tmp_path / "sqlite_storage-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite_storage\nVersion: 1.0\n")
    entry = registered[2].replace('"', "")
    (package / "entry_points.txt").write_text(f"[{registered[1]}]\n{entry}\n")
    run = ["-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *run, "test_sqlite_storage.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed", done.stdout, re.MULTILINE), done.stdout
