"""One file per command: its options and one call."""
