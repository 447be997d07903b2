"""A checkpoint into live keyed state, and what is then looked up, against the same rows to Arrow.

5M keys of (int64, int64) of one subtask in a local store by default options. Both sides read the
same segment; the other ends with a table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row, compare
from stateformat.backends.state import SubtaskStates
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.states import declare
from stateformat.store import open as open_store

ROWS, ASKED, GETS = 5_000_000, 50_000, 20
OPERATOR = Operator(OperatorId("op"), 1, 128)
STATE = declare.value_state("op", "totals", keys={"k": pa.int64()}, values={"v": pa.int64()})
LABEL = "the restore to Arrow"


def measure(line: str = "") -> Iterator[Row]:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder, durable=False)
        pending = store.begin(job_id="bench", graph=JobGraph((OPERATOR,)), states=(STATE,), parent=None)
        with pending.context.subtask("op", 0) as writer:
            writer.write("totals", pa.table({"k": random.permutation(ROWS), "v": random.integers(0, 1 << 40, ROWS)}))
        pending.add(writer)
        pending.publish()
        checkpoint = store.open()
        asked = [pa.record_batch({"k": random.integers(0, ROWS, ASKED)}) for _ in range(GETS)]

        def to_arrow() -> None:
            assert checkpoint.read("op", "totals", 0).table().num_rows == ROWS

        def live(gets: int) -> None:
            states = SubtaskStates(OPERATOR, 0, [STATE])
            states.begin(1)
            states.restore({"totals": checkpoint.read("op", "totals", 0)})
            for keys in asked[:gets]:
                _, found = states.value("totals").get(keys)
                assert found.all()

        what = f"restore of {ROWS:,} keys into live state"
        for gets, then, budget in (
            (0, "nothing is asked", ""),
            (1, f"then one `get` of {ASKED:,} keys", "≤ 3 ×"),
            (GETS, f"then {GETS} `get`s of {ASKED:,} keys", ""),
        ):
            if line in (name := f"{what}, {then}"):
                yield compare(name, lambda gets=gets: live(gets), to_arrow, label=LABEL, budget=budget)
