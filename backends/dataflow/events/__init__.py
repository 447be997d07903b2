"""The events and commands of the runtime core, as values: ``from stateformat.backends.dataflow import events as
ev``.

:class:`~stateformat.backends.dataflow.task.task.Task` and :class:`~stateformat.backends.dataflow.coordinator.coordinator.Coordinator` take
**events** and return **commands**. They decide, an executor acts: it carries the commands out, in
the order given, before it delivers the next event. Here are

1. what travels in channels (``elements.py``);
2. the events and commands of a task (``task.py``);
3. the events and commands of the coordinator (``coordinator.py``).

Barrier numbers ascend within a run, one for each trigger; they are never ids of checkpoints.
Timestamps are int64 microseconds of event time.
"""

from .coordinator import *  # noqa: F403
from .elements import *  # noqa: F403
from .plan import *  # noqa: F403
from .task import *  # noqa: F403
