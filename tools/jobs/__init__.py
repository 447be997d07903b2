"""Programs for spark-submit: ``run`` runs a dataflow, ``rewrite`` rewrites a checkpoint,
``import_checkpoint`` makes one of a Flink savepoint or a Structured Streaming query, and
``rescale`` writes such a query's own checkpoint at another number of partitions.
"""
