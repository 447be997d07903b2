"""The events and commands of the runtime core, as values: use it as ``events as ev``.

``Task`` and ``Coordinator`` take **events** and return **commands**. They decide, an executor acts:
it carries the commands out, in the order given, before it delivers the next event. Read

1. ``elements``: what travels in channels;
2. ``task``: the events and commands of a task;
3. ``plan`` and ``coordinator``: the events and commands of the coordinator.

Barrier numbers ascend within a run, one for each trigger; they are never ids of checkpoints.
Timestamps are int64 microseconds of event time.
"""

from .coordinator import *  # noqa: F403
from .elements import *  # noqa: F403
from .plan import *  # noqa: F403
from .task import *  # noqa: F403
