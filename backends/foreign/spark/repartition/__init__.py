"""A Structured Streaming checkpoint written at another number of partitions, without Spark.

Read in this order: ``plan`` (what is read and written, from logs and listings), ``run`` (the two
functions that every engine runs, and the order of writing), ``store_files`` (files of state stores
and of RocksDB, written).
"""
