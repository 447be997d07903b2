"""Checkpoints of Structured Streaming, read without Spark.

Read in this order: ``logs`` (which batches there are), ``schemas`` (what columns), ``stores`` (what
a reader of a provider does), such readers: ``hdfs_store``, and ``rocksdb_store`` with
``rocksdb_keys``; ``unsafe_row`` (rows into Arrow), ``states`` (which columns determine a row's
partition, column families, stateformat's names for them), ``source`` (the checkpoint as a whole),
``checks`` (everything that can be wrong with it); then ``repartition``, which writes one.
"""
