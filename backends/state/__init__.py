"""The running state of a subtask: keyed value, map and list, timers, and lists without keys.

Everything is in memory, in numpy and Arrow, and works a batch at a time. ``stateformat`` says what
is stored and how. The executor sends each subtask the records of its keys; the key of another
subtask is refused when it is put.

Read ``subtask`` (all states of a subtask) and ``value`` (one of them) first, then down:

=================  ===============================================  ===============================
``value`` …        the states: ``collections``, ``timers``,          batches in, batches out
                   ``entries``
``chains``         the elements of each key                          for maps and lists
``store``          rows in slots, normalized, found by key           holes are closed at one half
``index``          from keys to slots                                a hash table for whole batches
``parts``          columns as buffers, addressed by slot             numpy arrays, bytes, Arrow
``ownership``      the keys that a subtask may have                  the error names ``key_by``
``changes``        which rows have changed since when                versions by slot; deltas
``spilling``       states on local disk                              arrays as they lie in memory
=================  ===============================================  ===============================
"""

from stateformat.states import Layer

from .keyed_collections import KeyedList, KeyedMap
from .keyed_value import KeyedValue
from .list_state import Entries
from .subtask import SubtaskStates
from .timers import TimerSet

__all__ = ["Entries", "KeyedList", "KeyedMap", "KeyedValue", "Layer", "SubtaskStates", "TimerSet"]
