"""The checkpoint that is in flight: what the driver has gathered for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pyarrow as pa

from stateformat.publication import PendingCheckpoint

from ..dataflow import events as ev
from ..dataflow.events import CheckpointPlan


@dataclass
class InFlightCheckpoint:
    """One checkpoint (or, with ``checkpoint`` None, one round of the loops) from its begin to its end.

    ``coordinators``: what the operators' coordinators kept when it began, by uid. ``messages``: what subtasks have sent to them
    since, before their own snapshots.
    """

    barrier: ev.Barrier
    plan: CheckpointPlan
    begun_us: int
    checkpoint: PendingCheckpoint | None = None
    coordinators: dict[str, pa.Table] = field(default_factory=dict)
    messages: dict[str, list[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    overdue: bool = False
    """Whether its barrier was told to overtake."""
    _told: bool = False

    def is_late(self, begun_before_us: int) -> bool:
        """Whether it began before then; says so once."""
        late = not self._told and self.begun_us < begun_before_us
        self._told = self._told or late
        return late

    def coordinator_rows(self, uid: str, schema: pa.Schema) -> pa.Table:
        """What is written for a coordinator: its own rows, then the messages that it has to be given again."""
        own = self.coordinators[uid]
        messages = self.messages.get(uid, [])
        columns = {name: [None] * len(messages) for name in schema.names if name not in ("message_from", "message")}
        sent = pa.table({**columns, "message_from": [n for n, _ in messages], "message": [m for _, m in messages]})
        missing = [name for name in schema.names if name not in own.column_names]
        for name in missing:
            own = own.append_column(schema.field(name), pa.nulls(own.num_rows, schema.field(name).type))
        return pa.concat_tables([own.select(schema.names).cast(schema), sent.select(schema.names).cast(schema)])
