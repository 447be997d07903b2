"""What Spark looks for: a module named ``pyspark_…`` with a ``DefaultSource``.

In a wheel this file stands beside the package, not in it. At the first use of a data source, a
worker of Spark's imports every such module on its path, and one that raises ends the query of
whoever asked, for whatever source. So nothing is raised here: without ``DefaultSource`` Spark goes
on, and says that it does not know ``stateformat``.
"""

from contextlib import suppress

with suppress(Exception):
    from stateformat.backends.spark.data_source import StateDataSource as DefaultSource

__all__ = ["DefaultSource"]
