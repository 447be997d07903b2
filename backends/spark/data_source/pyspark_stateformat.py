"""The module that Spark looks for: it is named ``pyspark_…`` and has a ``DefaultSource``.

The wheel puts this file next to the package, not into it. At the first use of any data source, a
Spark worker imports every such module on its path. If one raises, the query fails, whichever source
it uses. So this module never raises: without ``DefaultSource`` Spark goes on, and says that it does
not know ``stateformat``.
"""

from contextlib import suppress

with suppress(Exception):
    from stateformat.backends.spark.data_source import StateDataSource as DefaultSource

__all__ = ["DefaultSource"]
