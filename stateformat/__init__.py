"""stateformat: an open checkpoint format on Arrow and Parquet, and its library."""
