"""Plain Python for each key of a keyed stream: ``apply_per_key``.

The runtime works a piece at a time: it groups the rows, fetches the states of all keys, calls the
function key by key, and stores what has changed. Read ``operator``, then what it puts together:

* ``kept``: the states and timers of the keys of a piece, as objects;
* ``rows``: the rows of each key, and what a function returns or yields, as batches.
"""
