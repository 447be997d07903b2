"""Small stores that would grow beyond measure are refused; what is merely odd is read (SPEC.md
7.4).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.stateformat.bombs import HARMLESS, MIB, SECONDS_MAX

ROOT = Path(__file__).resolve().parents[2]
GROWTH_BYTES_MAX = 640 * MIB
"""Four pieces of 128 MiB at a time and what lies around them; a manifest takes at most 256 MiB."""
QUICK = (
    "record_nested_100_000_deep",
    "manifest_of_structs_in_structs",
    "segment_whose_page_claims_2_gib",
    "segment_of_2_40_rows",
)


class Attacked(NamedTuple):
    """What became of one bomb."""

    name: str
    noticed: bool
    faults: list[str]
    grown_bytes: int
    slowest_seconds: float

    @property
    def wrong(self) -> bool:
        missed = self.noticed is (self.name in HARMLESS)
        too_much = self.grown_bytes > GROWTH_BYTES_MAX or self.slowest_seconds > SECONDS_MAX
        return bool(self.faults) or missed or too_much


def begin(names: tuple[str, ...]) -> subprocess.Popen[str]:
    """Attack with these bombs, in a process of its own."""
    command = [sys.executable, "-m", "tests.stateformat.bombs", *names]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")


def results(process: subprocess.Popen[str], seconds: float = 280) -> list[Attacked]:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return [Attacked(*json.loads(line)) for line in out.splitlines()]


@pytest.fixture(scope="module")
def attacked() -> dict[str, Attacked]:
    return {found.name: found for found in results(begin(QUICK))}


@pytest.mark.parametrize("name", QUICK)
def test_a_bomb_is_refused_in_a_sentence_in_little_memory_and_at_once(name: str, attacked: dict[str, Attacked]) -> None:
    assert not attacked[name].wrong, attacked[name]
