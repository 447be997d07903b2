"""Writes the golden checkpoints of the current format version: run once per version, kept for ever.

``make golden`` writes ``tests/golden/v1/`` anew; ``make_golden.py v1-ttl``, and ``v1-timers``, the store of that name.
Do that before a release only: afterwards the files are what older writers left behind, and ``test_golden`` proves on
every run that they are still read. Each store has beside it ``expected.json``: the rows of every state as plain
values, written down when the checkpoint was made.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import pyarrow as pa  # noqa: E402

import stateformat as sf  # noqa: E402
from stateformat.segments import WriteOptions  # noqa: E402
from stateformat.states import list_state, map_state, timers, value_state  # noqa: E402
from tests.worlds.stores import flights_job, flights_store, operator, owned, rescale_newest  # noqa: E402

VERSION = HERE / "v1"


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes as hexadecimal, the rest as it is."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def rows_of(checkpoint: sf.Checkpoint) -> dict[str, list[Any]]:
    """Every state's rows by ``operator/state/subtask``, in stored order, keyed ones sorted by their text; those that
    had expired too.
    """
    checkpoint = checkpoint.with_expired()
    found: dict[str, list[Any]] = {}
    for state in checkpoint.states:
        parallelism = checkpoint.graph.operator(state.operator).parallelism
        subtasks = [None] if state.mode in (sf.Mode.COORDINATOR, sf.Mode.COMMITTABLES) else range(parallelism)
        for subtask in subtasks:
            rows = [plain(row) for row in checkpoint.read(state.operator, state.name, subtask).table().to_pylist()]
            if state.mode is sf.Mode.KEYED:
                rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
            found[f"{state.operator}/{state.name}/{'-' if subtask is None else subtask}"] = rows
    return found


EXPIRING = HERE / "v1-ttl"
HOUR, NOON = 3_600_000_000, 1_790_000_000_000_000


def expiring_states() -> tuple[sf.State, ...]:
    """A value, a map and a list whose rows expire: by both clocks, refreshed in both ways."""
    keys, values = {"user": pa.string()}, {"n": pa.int64()}
    return (
        value_state("seen", "last", keys=keys, values=values, ttl=sf.Ttl(HOUR)),
        map_state("seen", "days", keys=keys, map_key=pa.date32(), values=values, ttl=sf.Ttl(2 * HOUR)),
        list_state("seen", "pages", keys=keys, values=values, ttl=sf.Ttl(HOUR, "processing_time", "read_and_write")),
    )


def expiring_rows(state: sf.State, users: range, now: int) -> pa.Table:
    """A row of each user, the last accessed just now, the others a quarter of an hour before one another."""
    own = {"_map_key": pa.array([19_000 + i for i in users], pa.date32()), "_index": pa.array(users, pa.int64())}
    times = pa.array([now - (users[-1] - i) * HOUR // 4 for i in users], pa.timestamp("us"))
    columns = {"user": [f"u{i}" for i in users], "n": pa.array(users, pa.int64()), "ttl_last_access": times}
    return pa.table({**columns, **{name: own[name] for name in state.row_key if name in own}})


def timed_states() -> tuple[sf.State, ...]:
    """Timers of processing time, and of event time beside them."""
    keys, values = {"user": pa.string()}, {"n": pa.int64()}
    return (
        timers("seen", "reminders", keys=keys, values=values, clock="processing_time"),
        timers("seen", "closing", keys=keys, values=values),
    )


def timed_rows(_: sf.State, users: range, now: int) -> pa.Table:
    """A timer of each user, the first due just now, the others an hour behind one another."""
    times = [now + (i - users[0]) * HOUR for i in users]
    names = [f"u{i}" for i in users]
    return pa.table({"user": names, "_timestamp": times, "_tag": ["t"] * len(users), "n": pa.array(users, pa.int64())})


TIMED = HERE / "v1-timers"
LATER = {
    EXPIRING.name: (expiring_states, expiring_rows),
    TIMED.name: (timed_states, timed_rows),
}
"""What came after the first release, a store for each: states, and rows of one for some users at a time."""


def write_later(name: str) -> None:
    """Write a store of two checkpoints, the second with deltas, an hour and a half later."""
    folder, (declare, rows_for) = HERE / name, LATER[name]
    shutil.rmtree(folder, ignore_errors=True)
    store, permit, states = sf.open(str(folder / "store")), None, declare()
    seen = operator("seen", 2)
    for now, users in ((NOON, range(12)), (NOON + HOUR * 3 // 2, range(10, 14))):
        delta = permit is not None
        pending = store.begin(job_id="seen", graph=sf.JobGraph((seen,)), states=states, parent=permit)
        for subtask in range(2):
            with pending.context.subtask("seen", subtask) as writer:
                for state in states:
                    rows = owned(rows_for(state, users, now), ["user"], seen, subtask)
                    rows = rows.append_column("_op", pa.array([0] * len(rows), pa.int8())) if delta else rows
                    writer.write(state.name, rows, delta=delta)
            pending.add(writer)
        pending.set_now("seen", event_time_us=now, processing_time_us=now)
        permit = pending.publish()
    checkpoints = [store.open(record.checkpoint_id) for record in store.history()]
    live = {
        str(one.id): {
            state.name: sorted(one.state(state).table()["user"].to_pylist()) for state in one.states if state.ttl
        }
        for one in checkpoints
    }
    expected = {"rows": {str(one.id): rows_of(one) for one in checkpoints}, "live": live}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Write every golden store and what is expected of it."""
    if sys.argv[1:]:
        write_later(sys.argv[1])
        return
    shutil.rmtree(VERSION, ignore_errors=True)
    flights_store(str(VERSION / "flights"))
    flights_store(str(VERSION / "rescaled"))
    rescale_newest(sf.open(str(VERSION / "rescaled")), 3)
    large = WriteOptions(inline_bytes_max=0, codec="zstd", encoding="plain")
    stopped = sf.open(str(VERSION / "stopped"))
    flights_job().publish(
        stopped, None, options=large, stop=sf.Stop(sf.StopMode.DRAIN, "request-1"), properties={"why": "golden"}
    )
    for folder in sorted(VERSION.iterdir()):
        store = sf.open(str(folder))
        expected = {str(record.checkpoint_id): rows_of(store.open(record.checkpoint_id)) for record in store.history()}
        (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
