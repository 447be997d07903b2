"""Programs that run a dataflow: `ckpt run` in this process, `tools/jobs/run.py` on Spark.

``loading`` makes the dataflow that a user names.
``start_plan`` says what a start would do. ``options`` are those of both programs, and ``reporting``
is what both print.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .loading import JobType as JobType, dataflow_of as dataflow_of
    from .options import Microseconds as Microseconds, run_options as run_options, runtime_options as runtime_options
    from .reporting import Reporter as Reporter, outcome_document as outcome_document
    from .start_plan import start_document as start_document
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".loading": "JobType dataflow_of",
            ".options": "Microseconds run_options runtime_options",
            ".reporting": "Reporter outcome_document",
            ".start_plan": "start_document",
        },
    )
