"""The runtime core: what a dataflow is, and every decision of running it. No storage, no Spark, no clock."""
