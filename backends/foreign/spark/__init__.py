"""Checkpoints of Structured Streaming, read without Spark.

Read in this order: ``logs`` (which batches there are), ``schemas`` (what columns), ``key_columns``
(which of them determine a row's partition), ``stores`` (what a reader of a provider does), such
readers: ``hdfs_store`` with ``chains``, and ``rocksdb_store`` with ``rocksdb_files``,
``rocksdb_keys`` and ``changelogs``; ``unsafe_row`` (rows into Arrow), ``families`` (column families
as states), ``states`` (stateformat's names for them), ``source`` (the checkpoint as a whole),
``checks`` (everything that can be wrong with it); then ``repartition``, which writes one.
"""
