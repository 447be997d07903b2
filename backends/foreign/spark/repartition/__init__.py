"""A Structured Streaming checkpoint written at another number of partitions, or with other rows,
without Spark.

Read in this order: ``plan`` (what is read and written, from logs and listings), ``run`` (the two
functions that every engine runs, and the order of writing), ``editing`` (rows given to a function,
and what follows from them), ``store_files`` (files of state stores and of RocksDB, written);
``proving`` is what a copy must hold.
"""
