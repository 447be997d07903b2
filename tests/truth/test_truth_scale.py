"""A checkpoint of one million handles through every command, with what each took."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import stateformat as sf
from tests.tally import Tally
from tests.truth.scale_commands import Took, call

pytestmark = pytest.mark.truth
OPERATORS = SUBTASKS = 1000
SECONDS_MAX = 30.0
"""A machine of today takes ten; a slower one gets three times as long."""
PEAK_BYTES_MAX_LOOKING = 560_000_000
"""Commands take 0.41 to 0.49 GB: 0.08 for a process that has imported pyarrow, 0.24 for all
handles. A plan that is shown keeps 0.09 of the handles, and its slices take 0.12.
"""
PEAK_BYTES_MAX_RESCALED = 1_800_000_000
"""A rescale makes more than two million handles from the million: nearly each is cut in two."""
PAGE_LINES_MAX = 250


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the store in a separate process: a command's memory peak starts at its parent's."""
    folder = tmp_path_factory.mktemp("million") / "store"
    make = "import sys, pathlib, benchmarks.scale_stores as s; s.many_handles(pathlib.Path(sys.argv[1]), 1000, 1000)"
    subprocess.run([sys.executable, "-c", make, folder], check=True)
    assert sf.open(str(folder)).open().record.totals.handles == OPERATORS * SUBTASKS
    return folder


def _judge(tally: Tally, name: str, took: Took, *, peak_bytes_max: int, is_page: bool = True) -> None:
    checks = {
        f"exit status {took.status}: {took.err}": took.status != 0,
        f"{took.seconds:.1f} s": took.seconds > SECONDS_MAX,
        f"{took.peak_bytes:,} bytes of memory": took.peak_bytes > peak_bytes_max,
        "a page without end": is_page and len(took.out.splitlines()) > PAGE_LINES_MAX,
    }
    wrong = [what for what, broken in checks.items() if broken]
    tally.add(f"one million handles: {name}", tried=1, wrong=len(wrong), note=took.note)
    assert not wrong, wrong


@pytest.mark.parametrize(
    "options",
    [
        "inspect",
        "inspect --operator operator-0500",
        "inspect --operator operator-0500 --state state --rows 5",
        "explain-restore --parallelism 1200",
        "validate --level quick",
        "rescale --parallelism 1200 --dry-run",
        "gc --keep 1",
        "du --keep 1 --price 0.023",
        "get --operator operator-0500 --state state --key 5",
        "top --no-keys",
        "repair",
        "history",
    ],
)
def test_every_command_answers_with_a_page(options: str, store: Path, tmp_path: Path, tally: Tally) -> None:
    command, *rest = options.split()
    _judge(tally, options, call(tmp_path, command, store, *rest), peak_bytes_max=PEAK_BYTES_MAX_LOOKING)


def test_json_is_whole(store: Path, tmp_path: Path, tally: Tally) -> None:
    inspected = call(tmp_path, "inspect", store, "--format", "json")
    _judge(tally, "inspect --format json", inspected, is_page=False, peak_bytes_max=PEAK_BYTES_MAX_LOOKING)
    assert sum(len(state["subtasks"]) for state in inspected.document["states"]) == OPERATORS * SUBTASKS
    del inspected
    planned = call(tmp_path, "explain-restore", store, "--parallelism", "1200", "--format", "json")
    _judge(tally, "explain-restore --format json", planned, is_page=False, peak_bytes_max=PEAK_BYTES_MAX_LOOKING)
    assert sum(len(load["subtasks"]) for load in planned.document["load"]) == 1200 * OPERATORS


def test_it_is_rescaled_and_the_result_is_right(store: Path, tmp_path: Path, tally: Tally) -> None:
    target = tmp_path / "rescaled"
    took = call(tmp_path, "rescale", store, "--parallelism", "1200", "--to", target)
    _judge(tally, "rescale --to another store", took, peak_bytes_max=PEAK_BYTES_MAX_RESCALED)
    took = call(tmp_path, "validate", target)
    _judge(tally, "validate --level quick, rescaled", took, peak_bytes_max=PEAK_BYTES_MAX_RESCALED)
