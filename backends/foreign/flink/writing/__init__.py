"""Writes canonical savepoints: the inverse of ``layouts`` and of the serializers.

Read ``binaries`` (byte strings of many values), ``values`` (every serializer), ``template`` (what
only Flink knows, kept by an import), ``savepoint`` (rows to entries, and the whole savepoint).
"""
