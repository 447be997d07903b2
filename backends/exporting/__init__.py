"""State in the formats of other tools: Parquet, partitioned or not, Iceberg and Delta tables.

Read ``source`` (what is exported), ``columns`` (what a format lacks or refuses), ``data_files``,
then ``iceberg`` or ``delta`` (one commit turns data files into a table; ``held``: which checkpoints
are in it), ``parquet`` (folders by value), and ``export``, the entry point for all. ``place`` is
the folder that is written into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .columns import Format as Format, Note as Note
    from .export import Exported as Exported, TableExport as TableExport, export_files as export_files
    from .parquet import check_partitions as check_partitions
    from .place import Place as Place
    from .source import (
        Source as Source,
        batches_of as batches_of,
        one_checkpoint as one_checkpoint,
        several_checkpoints as several_checkpoints,
    )
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".columns": "Format Note",
            ".export": "Exported TableExport export_files",
            ".parquet": "check_partitions",
            ".place": "Place",
            ".source": "Source batches_of one_checkpoint several_checkpoints",
        },
    )
