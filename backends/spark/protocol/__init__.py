"""What driver and workers send each other. Read ``messages`` first: what a task gets and reports.

``restore_point`` and ``driver_task`` hold what the driver knows about a task between epochs. Tasks
send each other ``frames``; ``dataframe_input`` makes frames of a DataFrame's rows.
"""
