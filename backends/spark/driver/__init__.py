"""The driver of a job on Spark. Read ``run``, then ``epoch``; ``split_assignment`` says what sources read."""

from __future__ import annotations

from . import epoch as epoch
from .run import SparkRun as SparkRun
