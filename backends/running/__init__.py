"""What every executor has in common: the driver of a run, the worker of a task, restarts, stops, and how a job ends.

Nothing here decides what the protocol is (``backends.dataflow`` does) or how events get from one to the other (an executor does).
"""
