"""Turn a dataflow into tasks.

Read ``job_graph`` and ``runtime_states``, which make the graph and its states, then ``compile``,
which makes a job of them, and ``describing``, which shows it as text. ``partitioning`` sends
records along edges; ``loops`` finds the loops.
"""

from __future__ import annotations

from .compile import Job, Vertex, compile_job
from .describing import described
from .job_graph import graph_of, parallelism_of
from .loops import loops_of
from .partitioning import Router
from .runtime_states import (
    COMMITTABLES,
    ENUMERATOR,
    ENUMERATOR_LOG,
    PROGRESS,
    SPLITS,
    SPLITS_SCHEMA,
    in_flight_name,
    states_to_plan,
)

__all__ = [
    "COMMITTABLES",
    "ENUMERATOR",
    "ENUMERATOR_LOG",
    "PROGRESS",
    "SPLITS",
    "SPLITS_SCHEMA",
    "Job",
    "Router",
    "Vertex",
    "compile_job",
    "described",
    "graph_of",
    "in_flight_name",
    "loops_of",
    "parallelism_of",
    "states_to_plan",
]
