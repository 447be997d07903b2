"""The driver of a job on Spark. Read ``run``, then ``epoch``, then ``split_assignment``."""

from __future__ import annotations

from . import epoch as epoch
from .run import SparkRun as SparkRun
