"""What runs: storages, state backends, the dataflow core and its executors."""

if __name__ != "stateformat.backends":
    raise ImportError("import stateformat.backends: backends is a part of the package stateformat since 0.2.0")
