"""Reading a published checkpoint.

Read ``checkpoint`` (what users and runs hold), ``task`` (what one worker reads), ``rows`` (what
users look at), ``pieces`` and ``scan`` (from slices to rows), ``merge`` (layers and schemas), then
``overlay`` (a key group that is too large to merge at once). ``wanted`` says which columns and rows
are read, ``key_values`` converts the keys that a user names, ``cutting`` cuts slices to key groups
and into parts. ``loading`` fetches record and manifest, ``whole_states`` makes slices of whole
states.

Imports are lazy: ``ckpt inspect`` starts a new process each time, and reads no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .checkpoint import Checkpoint as Checkpoint, StoreCheckpoint as StoreCheckpoint
    from .cutting import (
        Groups as Groups,
        key_group_of as key_group_of,
        split_between_owners as split_between_owners,
    )
    from .key_values import key_table as key_table, keys_from_json as keys_from_json
    from .loading import (
        load_columns as load_columns,
        load_manifest as load_manifest,
        load_record as load_record,
        missing_object as missing_object,
    )
    from .merge import evolve_table as evolve_table, merge_layers as merge_layers, rekey as rekey
    from .overlay import Keys as Keys, Overlay as Overlay
    from .rows import StateRows as StateRows
    from .task import ReadTask as ReadTask, SegmentTask as SegmentTask
    from .wanted import (
        EVERYTHING as EVERYTHING,
        Wanted as Wanted,
        checked_parts as checked_parts,
        chosen_columns as chosen_columns,
    )
    from .whole_states import whole_slices as whole_slices
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".checkpoint": "Checkpoint StoreCheckpoint",
            ".cutting": "Groups key_group_of split_between_owners",
            ".key_values": "key_table keys_from_json",
            ".loading": "load_columns load_manifest load_record missing_object",
            ".merge": "evolve_table merge_layers rekey",
            ".overlay": "Keys Overlay",
            ".rows": "StateRows",
            ".task": "ReadTask SegmentTask",
            ".wanted": "EVERYTHING Wanted checked_parts chosen_columns",
            ".whole_states": "whole_slices",
        },
    )
