"""Checkpoints of other systems, read as if they were ours: Flink's and Structured Streaming's.

Pure functions from bytes to Arrow; no JVM, no pyspark. Read ``source`` (what every format
provides), ``byte_strings``, ``framing``, ``cursor``, then ``spark`` or ``flink``.
"""
