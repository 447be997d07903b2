"""Every example of a concept runs as it stands and prints what it says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.servers.server import BUCKET, S3Server

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "concepts"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def run(example: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run a file in a folder of its own. Returns what it should print."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")
    return "".join(
        line.removeprefix("# ") for line in example.read_text().partition("# It prints:\n")[2].splitlines(True)
    )


@pytest.mark.parametrize("example", [pytest.param(p, id=p.stem) for p in EXAMPLES if p.stem != "on_s3"])
def test_an_example_prints_what_it_says(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(example, tmp_path, monkeypatch) == capsys.readouterr().out != ""


@pytest.mark.s3
def test_the_example_on_s3_prints_what_it_says(
    moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("ENDPOINT_URL", moto.endpoint), ("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret")):
        monkeypatch.setenv(f"AWS_{name}", value)
    printed = run(FOLDER / "on_s3.py", tmp_path, monkeypatch, f"s3://{BUCKET}/on-s3-example")
    assert printed == capsys.readouterr().out != ""


def test_an_example_is_small() -> None:
    assert len(EXAMPLES) >= 11
    assert max(len(example.read_text().splitlines()) for example in EXAMPLES) <= 75
