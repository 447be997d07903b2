"""Table files of RocksDB (SST), and the merged content of a database of several of them.

Read ``blocks``, ``table``, then ``merge``. A reader of the block-based format, versions
0 and 2 to 6, that needs no RocksDB and no manifest: every table names its column family and has
sequence numbers. Many blocks are read at once, entries by lanes; nothing loops over entries.
"""
