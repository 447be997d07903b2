"""The checkpoint in flight, as the driver knows it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pyarrow as pa

from stateformat.publication import PendingCheckpoint

from ..dataflow import events as ev
from ..dataflow.events import CheckpointPlan


@dataclass
class InFlightCheckpoint:
    """One checkpoint from beginning to end; without ``checkpoint``, one round of the loops."""

    barrier: ev.Barrier
    plan: CheckpointPlan
    begun_us: int
    checkpoint: PendingCheckpoint | None = None
    coordinators: dict[str, pa.Table] = field(default_factory=dict)
    """What the operators' coordinators returned for their snapshots, by uid."""
    messages: dict[str, list[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    """What subtasks have sent to them since, before their own snapshots."""
    overdue: bool = False
    """Whether its barrier was turned unaligned."""
    unchanged: bool = False
    """Whether it is not published, because nothing has moved since the newest one."""
    timed_out: bool = False
    """Whether the coordinator was told that it takes too long."""

    def coordinator_rows(self, uid: str, schema: pa.Schema) -> pa.Table:
        """The state of a coordinator: its own rows, then the messages that it has to get again."""
        own = self.coordinators[uid]
        messages = self.messages.get(uid, [])
        columns = {name: [None] * len(messages) for name in schema.names if name not in ("message_from", "message")}
        sent = pa.table({**columns, "message_from": [n for n, _ in messages], "message": [m for _, m in messages]})
        missing = [name for name in schema.names if name not in own.column_names]
        for name in missing:
            own = own.append_column(schema.field(name), pa.nulls(own.num_rows, schema.field(name).type))
        return pa.concat_tables([own.select(schema.names).cast(schema), sent.select(schema.names).cast(schema)])
