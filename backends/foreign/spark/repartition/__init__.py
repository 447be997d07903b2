"""A Structured Streaming checkpoint written at another number of partitions, without Spark.

Read in this order: ``plan`` (what is read and written, from logs and listings), ``work`` (the two
functions that every engine runs), ``run`` (both, and the order of writing). Below them: ``logs``
(Spark's logs, edited), ``store_files`` and ``table_files`` (files of state stores and of RocksDB,
written), ``row_parts`` (rows cut in two, as RocksDB's keys are).
"""
