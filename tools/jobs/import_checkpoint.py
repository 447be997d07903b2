"""``ckpt import`` as a program for spark-submit: the same options, always on Spark.

    spark-submit --master yarn tools/jobs/import_checkpoint.py s3://flink/savepoint-1 --to s3://bucket/store

The driver publishes, so its exit status counts (client mode shows it). Executors need this package
and the addresses of both places: ``stateformat.backends.spark.sessions`` says how.
"""

from __future__ import annotations

import sys

from stateformat.backends.spark.sessions import session
from stateformat.tools.ckpt.main import main


def run(arguments: list[str]) -> int:
    """Run the command on the submitted session; returns the exit status of ``ckpt import``."""
    spark = session("ckpt import")
    try:
        return main(["import", "--engine", "spark", *arguments])
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
