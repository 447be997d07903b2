"""Programs: the ``ckpt`` command and the spark-submit jobs. Nothing imports this package."""

if __name__ != "stateformat.tools":
    raise ImportError("import stateformat.tools: tools is a part of the package stateformat since 0.2.0")
