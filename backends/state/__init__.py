"""The running state of a subtask: keyed value, map and list, timers, and entries, in Arrow and numpy, a batch at a time.

Pure memory: what is stored and how is said by ``stateformat``, of which this reads and writes whole states. The
executor sends each subtask the records of its keys; a key of another subtask is refused when it is put (``ownership``).

==================  ===============================================  ==============================================
``parts``           columns taken apart, addressed by slot            numpy arrays, arenas of bytes, Arrow arrays
``index``           from keys to slots                                a hash table, searched a batch at a time
``store``           rows in slots, fitted, found by key               holes are closed when they are more than half
``chains``          which elements belong to which key                for maps and lists
``ownership``       the keys that a subtask may have                 errors with the operator, the key, and ``key_by``
``changes``         which rows have changed since when            stamps by slot; deltas, and what they are put on
``spilling``        states on local disk                          arrays as they lie in memory
``value`` …         the states themselves, and ``subtask``: all of them
==================  ===============================================  ==============================================
"""

from backends.state.collections import KeyedList, KeyedMap
from backends.state.entries import Entries
from backends.state.subtask import SubtaskStates
from backends.state.timers import TimerSet
from backends.state.value import KeyedValue
from stateformat.folding import Layer

__all__ = ["Entries", "KeyedList", "KeyedMap", "KeyedValue", "Layer", "SubtaskStates", "TimerSet"]
