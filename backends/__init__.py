"""What runs: storages, state backends, the dataflow core and its executors."""
