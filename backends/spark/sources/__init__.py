"""DataFrames as sources. Read ``offsets``, then ``source``; then ``files``, ``offset_table``.

``position_log`` stores positions that grow without end, and ``look_ahead`` finds the end of the
next range while an epoch runs. ``arrow`` checks columns and ``row_buffer`` passes rows to readers.
"""
