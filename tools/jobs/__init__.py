"""Programs for spark-submit: ``run`` runs a dataflow, ``rewrite`` rewrites a checkpoint, and
``import_checkpoint`` makes one of a Flink savepoint or a Structured Streaming query.
"""
