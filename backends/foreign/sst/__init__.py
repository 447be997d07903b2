"""Table files of RocksDB (SST), and the merged content of a database of several of them.

Read ``blocks``, ``lanes``, ``table``, then ``merge``. A reader of the block-based format, versions
0 and 2 to 6, that needs no RocksDB and no manifest: every table names its column family and has
sequence numbers. Many blocks are read at once, entries by lanes; nothing loops over entries.
"""

from __future__ import annotations

from .blocks import ReadRange
from .merge import merged, newest, read_tables
from .table import DELETE, MERGE, PUT, Counter, Properties, Run, Table, Tombstone, batches, open_table, read_run

__all__ = [
    "DELETE",
    "MERGE",
    "PUT",
    "Counter",
    "Properties",
    "ReadRange",
    "Run",
    "Table",
    "Tombstone",
    "batches",
    "merged",
    "newest",
    "open_table",
    "read_run",
    "read_tables",
]
