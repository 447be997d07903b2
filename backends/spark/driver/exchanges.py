"""The exchange between two levels: RDDs of bytes, built from parts of PySpark's ``partitionBy``.

``partitionBy`` itself pickles lists of pairs, and holds ten pairs for each partition before it
sends any; our payloads may be megabytes each. Here each payload is sent at once, without pickling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.core.rdd import RDD
    from pyspark.sql import DataFrame


def nothing(context: SparkContext, partitions: int) -> RDD[bytes]:
    """Return an RDD with this many empty partitions."""
    return _of_bytes(context._jsc.parallelize([], partitions), context)


def column_of(frame: DataFrame) -> RDD[bytes]:
    """Return the single binary column of a DataFrame. Spark analyses and plans it here."""
    context = frame.sparkSession.sparkContext
    assert context._jvm is not None
    binary = context._jvm.org.apache.spark.sql.Encoders.BINARY()
    return _of_bytes(getattr(frame._jdf, "as")(binary).javaRDD(), context)


def transformed(rdd: RDD[bytes], function: Callable[[int, Iterator[bytes]], Iterator[bytes]]) -> RDD[bytes]:
    """Apply a function to each partition's number and payloads."""
    made: Any = rdd.mapPartitionsWithIndex(function)
    made._bypass_serializer = True
    return made


def exchanged(rdd: RDD[bytes], partitions: int) -> RDD[bytes]:
    """Send the payloads of ``frames.keyed`` to the partitions given before each."""
    jvm: Any = rdd.context._jvm
    pairs = jvm.PairwiseRDD(rdd._jrdd.rdd()).asJavaPairRDD()
    there = pairs.partitionBy(jvm.PythonPartitioner(partitions, 0))
    return _of_bytes(jvm.PythonRDD.valueOfPair(there), rdd.context)


def _of_bytes(jrdd: Any, context: SparkContext) -> RDD[bytes]:
    from pyspark.core.rdd import RDD
    from pyspark.serializers import NoOpSerializer

    return RDD(jrdd, context, NoOpSerializer())
