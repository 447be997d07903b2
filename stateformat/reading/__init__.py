"""Reading a published checkpoint.

Read ``checkpoint`` (what users and runs hold), ``scan`` (from slices to rows), ``merge`` (layers
and schemas), then ``overlay`` (a key group that is too large to merge at once).

The door is lazy: ``ckpt inspect`` is a cold process, and reads no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .checkpoint import (
        Checkpoint as Checkpoint,
        ReadTask as ReadTask,
        load_manifest as load_manifest,
        load_record as load_record,
        missing_object as missing_object,
        whole_slices as whole_slices,
    )
    from .merge import evolve_table as evolve_table, rekey as rekey
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".checkpoint": "Checkpoint ReadTask load_manifest load_record missing_object whole_slices",
            ".merge": "evolve_table rekey",
        },
    )
