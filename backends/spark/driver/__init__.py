"""The driver of a job on Spark: ``run``, ``epoch``, ``split_assignment``."""

from __future__ import annotations

from .run import SparkRun

__all__ = ["SparkRun"]
