"""Checkpoints of Structured Streaming, read without Spark.

Read in this order: ``logs`` (which batches there are), ``schemas`` (what columns), ``key_columns``
(by which of them rows are dealt), ``stores`` (what a reader of a provider does), ``hdfs_store`` and
``rocksdb_store`` (such readers), ``unsafe_row`` (rows into Arrow), ``states`` (our names for all of
it), ``source`` (the checkpoint as a whole), ``checks`` (all that can be wrong with it).
"""

from __future__ import annotations

from .logs import recognises as recognises
from .source import SparkSource as SparkSource, sources as sources
