"""State in the formats of other tools: Parquet, partitioned or not, Iceberg and Delta tables.

Read ``source`` (what is exported, as which columns), ``files`` (the folder that is written into),
then ``iceberg`` or ``delta`` (one commit turns data files into a table), and ``export``, the entry
point for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .export import (
        Exported as Exported,
        TableExport as TableExport,
        check_partitions as check_partitions,
        export_files as export_files,
    )
    from .files import Place as Place
    from .source import (
        Format as Format,
        Note as Note,
        Source as Source,
        batches_of as batches_of,
        one_checkpoint as one_checkpoint,
        several_checkpoints as several_checkpoints,
    )
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".export": "Exported TableExport check_partitions export_files",
            ".files": "Place",
            ".source": "Format Note Source batches_of one_checkpoint several_checkpoints",
        },
    )
