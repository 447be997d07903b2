"""``ckpt rescale`` of a Structured Streaming query as a program for spark-submit.

    spark-submit --master yarn tools/jobs/rescale.py s3://bucket/query --parallelism 400 --to s3://bucket/copy

The same options, always on Spark: for states that outgrow one machine. Executors need this package
and the addresses of both folders: ``stateformat.backends.spark.sessions`` says how.
"""

from __future__ import annotations

import sys

from stateformat.backends.spark.sessions import session
from stateformat.tools.ckpt.main import main


def run(arguments: list[str]) -> int:
    """Run the command on the submitted session; returns the exit status of ``ckpt rescale``."""
    spark = session("ckpt rescale")
    try:
        return main(["rescale", "--engine", "spark", *arguments])
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
