"""The operators of one chain in one subtask.

Read ``chain``, ``chained_operator``, and ``source_reader``. ``committables`` and ``in_flight`` are
parts of a snapshot; ``gathered_batches`` joins small batches; ``errors`` records what user code
raised and where.
"""
