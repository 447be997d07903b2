"""Flink's savepoints and checkpoints.

Read ``metadata`` (``_metadata`` to descriptions), ``serializers`` (snapshots of serializers, and
values to Arrow), ``header`` (which states a stream has).
"""
