"""The engine that rewrites on Spark: ``engine`` runs on the driver, ``executor`` in workers."""

from .engine import SparkEngine

__all__ = ["SparkEngine"]
