"""The Python data source ``stateformat``: state as DataFrames.

``spark.read.format("stateformat").option("operator", "counts").option("state", "total").load(url)``

Where the wheel is installed, Spark finds the data source by itself: the wheel puts the module
``pyspark_stateformat`` next to the package. Elsewhere, :func:`register_data_source` registers it in
a session.

Read ``options`` (the options of a read), ``source`` (what Spark calls first), ``streams`` (what is
read), ``reader`` (the tasks of a read), ``filters`` (from filters to keys), ``types`` (Spark's
columns), ``failures`` (errors as sentences).
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
