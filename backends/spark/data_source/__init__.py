"""The Python data source ``stateformat``: state as DataFrames.

``spark.read.format("stateformat").option("operator", "counts").option("state", "total").load(url)``

Spark finds it by itself where the wheel is installed: ``pyspark_stateformat`` stands beside the
package then. Elsewhere :func:`register_data_source` makes it known to a session.

Read ``options`` (the options of a read), ``source`` (what Spark calls first), ``streams`` (what is
read), ``reader`` (its tasks), ``filters`` (keys from filters), ``types`` (columns of Spark),
``failures`` (errors as sentences).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .registering import register_data_source as register_data_source
    from .source import StateDataSource as StateDataSource
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__, {".registering": "register_data_source", ".source": "StateDataSource"}
    )
