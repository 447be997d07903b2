"""Programs: the ``ckpt`` command and the spark-submit jobs. Nothing imports this package."""
