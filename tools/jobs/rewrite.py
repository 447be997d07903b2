"""``ckpt rewrite`` as a program for spark-submit: the same options, always on Spark.

    spark-submit --master yarn tools/jobs/rewrite.py s3://bucket/store --max-parallelism 1024

The driver publishes, so its exit status counts (client mode shows it). Executors need this package
and the address of the store: ``stateformat.backends.spark.sessions`` says how.
"""

from __future__ import annotations

import sys

from stateformat.backends.spark.sessions import session
from stateformat.tools.ckpt.main import main


def run(arguments: list[str]) -> int:
    """Run the command on the submitted session; returns the exit status of ``ckpt rewrite``."""
    spark = session("ckpt rewrite")
    try:
        return main(["rewrite", "--engine", "spark", *arguments])
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
