"""The running state of a subtask: keyed value, map and list, timers, and lists without keys.

Everything is in memory, in numpy and Arrow, and works a batch at a time. ``stateformat`` defines
what is stored and how. The executor sends each subtask the records of its keys; putting a key of
another subtask is an error. Read ``subtask`` (all states of a subtask) and ``keyed_value`` (one of
them) first, then down:

=================  ===============================================  ===============================
``keyed_value`` …  the states: ``keyed_collections``, ``timers``    batches in, batches out
``rows``           rows in slots, normalized, found by key           holes are closed at one half
``index``          from keys to slots                                a hash table for whole batches
``columns``        columns as buffers, addressed by slot             numpy arrays, bytes, Arrow
``versions``       which rows have changed since when                versions by slot; deltas
``expiry``         which rows have expired                           seen at a read; go at a base
=================  ===============================================  ===============================
"""

from stateformat.states import Layer

from .keyed_collections import KeyedList, KeyedMap
from .keyed_value import KeyedValue
from .subtask import Entries, SubtaskStates
from .timers import TimerSet

__all__ = ["Entries", "KeyedList", "KeyedMap", "KeyedValue", "Layer", "SubtaskStates", "TimerSet"]
