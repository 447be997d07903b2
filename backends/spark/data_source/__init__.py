"""The Python data source ``stateformat``: state as DataFrames.

``spark.read.format("stateformat").option("operator", "counts").option("state", "total").load(url)``

Where the wheel is installed, Spark finds the data source by itself: the wheel puts the module
``pyspark_stateformat`` next to the package. Elsewhere, :func:`register_data_source` registers it in
a session.

``source`` is what Spark calls first; ``reader`` has the options, the tasks and what they read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .source import StateDataSource as StateDataSource, register_data_source as register_data_source
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {".source": "StateDataSource register_data_source"})
