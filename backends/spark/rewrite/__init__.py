"""The rewrite job on Spark: ``SparkEngine`` plans stages on the driver, ``executor`` runs in the Python workers."""

from .engine import SparkEngine

__all__ = ["SparkEngine"]
