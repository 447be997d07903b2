"""What users see of a job: its progress, how it ended, and whether it starts again."""

from __future__ import annotations

from .cost import FailureCost as FailureCost, cost_in as cost_in
from .held_time import LOOK_EVERY_US as LOOK_EVERY_US, TimeWatch as TimeWatch
from .outcome import (
    GraceExceeded as GraceExceeded,
    JobFailed as JobFailed,
    JobOutcome as JobOutcome,
    JobPaused as JobPaused,
    RestartPolicy as RestartPolicy,
    RunDiscarded as RunDiscarded,
)
from .progress import (
    EpochProgress as EpochProgress,
    Progress as Progress,
    ProgressLine as ProgressLine,
    ProgressLog as ProgressLog,
    late_words as late_words,
)
