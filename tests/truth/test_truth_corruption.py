"""Every byte of every object of tiny stores flipped, objects cut at every third length, zeroed,
removed, swapped, replaced by older ones.
"""

from __future__ import annotations

import pytest

from tests.corruption import corruption, corruption_runs, corruption_stores
from tests.tally import Tally

PROCESSES = 2

pytestmark = [pytest.mark.truth, pytest.mark.timeout(3600)]

NOTES = {
    corruption.NEWEST: "the one before is the newest then, by design",
    **{
        f"{corruption.CUT}: {sort}": "both ends, and every third length between"
        for sort in ("record", "manifest", "segment")
    },
}


def test_every_damage_is_noticed_and_gives_right_rows_or_an_error(tally: Tally) -> None:
    stores = corruption_stores.stores()
    found = corruption_runs.try_apart(stores, processes=PROCESSES)
    wrong = [line for line, _ in found.wrong]
    for line in found.lines:
        right, errors = found.of(line, "right"), found.of(line, "error")
        read = f"read {right + errors:,} times: {right:,} right, {errors:,} errors"
        tally.add(
            line,
            tried=found.of(line, "tried"),
            noticed=found.of(line, "noticed"),
            wrong=wrong.count(line),
            note="; ".join(filter(None, (NOTES.get(line), read))),
        )
    assert not wrong, "\n".join(text for _, text in found.wrong[:20])
    total = sum(found.of(line, "tried") for line in found.lines)
    assert total == sum(len(corruption.cases(name, objects)) for name, objects in stores.items())
    size = sum(len(data) for objects in stores.values() for data in objects.values())
    assert size == sum(found.of(line, "tried") for line in found.lines if line.startswith(corruption.FLIP))
