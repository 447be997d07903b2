"""Flink's savepoints and checkpoints, read without Flink.

Read ``metadata`` (``_metadata`` to values), ``headers`` (which states a stream has, of which
serializers), ``lanes`` and then ``scalars``, ``compound``, ``sql_types``, ``binary_rows``,
``avro``, ``kryo``, ``kryo_lanes``, ``kryo_columns`` (values to Arrow), ``walk`` and ``layouts``
(how keyed state is laid out in a stream), ``streams`` (where streams are), ``keyed`` (keyed state
of one subtask), ``contents`` (all of a checkpoint in stateformat's terms), ``source`` (the
checkpoint as a whole), ``checks`` (everything that can be wrong with it). ``key_hash`` computes
Flink's key groups; ``writing`` makes canonical savepoints.
"""

from __future__ import annotations

from .checks import check_source as check_source
from .key_hash import FLINK_KEY_HASH as FLINK_KEY_HASH, USER_KEY_HASH as USER_KEY_HASH
from .source import FlinkSource as FlinkSource, recognises as recognises, sources as sources
