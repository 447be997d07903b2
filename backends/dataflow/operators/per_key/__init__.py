"""Plain Python for each key of a keyed stream: ``apply_per_key``.

The runtime works a piece at a time: it groups the rows, fetches the states of all keys, calls the
function key by key, and stores what has changed. Read ``operator``, then what it puts together:

==============  =================================================================================
``signature``   what a function takes, by its annotations
``grouping``    the rows of each key, as tuples, numpy or Arrow
``kept``        the states of the keys of a piece, as objects
``matching``    which elements a list had before it was changed
``key_timers``  the timers that a function sets and deletes
``emitted``     what a function returns or yields, as batches
``conversion``  columns as Python values, and back
``few_…``       Python's collector, made rarer meanwhile
==============  =================================================================================
"""
