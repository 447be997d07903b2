"""Sources of rows: ``files``, and ``basic`` in memory or made up, with the enumerator of all."""
