"""Every bomb gives an error with a sentence or the right rows, in bounded memory and time."""

from __future__ import annotations

import os

import pytest

from tests.stateformat.bombs import BOMBS, HARMLESS, MANIFESTS, RECORDS, SEGMENTS
from tests.stateformat.test_bombs import begin, results
from tests.tally import Tally

TIMEOUT_SECONDS = 1500
"""Ten times what a quiet machine with two cores takes; a slow bomb shows in processor time."""


@pytest.mark.truth
@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
def test_no_bomb_ends_a_process_fills_memory_or_hangs(tally: Tally) -> None:
    workers = min(2, os.cpu_count() or 1)
    processes = [begin(tuple(BOMBS)[number::workers]) for number in range(workers)]
    try:
        found = [each for process in processes for each in results(process, TIMEOUT_SECONDS)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(found) == len(BOMBS)
    for kind, bombs in (("record", RECORDS), ("manifest", MANIFESTS), ("segment", SEGMENTS)):
        mine = [each for each in found if each.name in bombs and each.name not in HARMLESS]
        most, slowest = max(each.grown_bytes for each in mine) >> 20, max(each.slowest_seconds for each in mine)
        note = f"10 actions each; memory grew by at most {most} MiB, the slowest took {slowest:.1f} s of CPU"
        noticed, wrong = sum(each.noticed for each in mine), sum(each.wrong for each in mine)
        tally.add(f"bomb: {kind}", tried=len(mine), noticed=noticed, wrong=wrong, note=note)
    wrong = sum(each.wrong for each in found if each.name in HARMLESS)
    tally.add("large, odd and legal", tried=len(HARMLESS), wrong=wrong, note="read right")
    assert not [each for each in found if each.wrong]
