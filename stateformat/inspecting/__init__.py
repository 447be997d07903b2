"""Looking into checkpoints: what changed, a state over a range, metadata as tables, documents.

Read ``subjects`` (one state in several checkpoints), ``metadata`` and ``range``; ``changes`` and
``diff`` are based on the package ``comparing``. ``own_states`` describes the rows of a runtime's
own states as a document; ``key_steps`` finds when the rows of a key changed, ``top`` which keys,
key groups and subtasks have most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .changes import StateChanges as StateChanges
    from .comparing import CHANGE as CHANGE
    from .diff import (
        CheckpointDiff as CheckpointDiff,
        Renames as Renames,
        StateDiff as StateDiff,
        diff_checkpoints as diff_checkpoints,
        proof_document as proof_document,
        prove_checkpoints as prove_checkpoints,
    )
    from .key_steps import KeyStep as KeyStep, key_history as key_history, latest_declaration as latest_declaration
    from .metadata import (
        METADATA_TABLES as METADATA_TABLES,
        MetadataRows as MetadataRows,
        metadata_table as metadata_table,
    )
    from .own_states import contents as contents
    from .range import StateRange as StateRange
    from .savepoints import savepoints_document as savepoints_document
    from .showing import shown as shown
    from .sizes import shared_bytes as shared_bytes, sizes_document as sizes_document
    from .subjects import newest_declaration as newest_declaration
    from .top import top_document as top_document
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".changes": "StateChanges",
            ".comparing": "CHANGE",
            ".own_states": "contents",
            ".diff": "CheckpointDiff Renames StateDiff diff_checkpoints proof_document prove_checkpoints",
            ".key_steps": "KeyStep key_history latest_declaration",
            ".metadata": "METADATA_TABLES MetadataRows metadata_table",
            ".range": "StateRange",
            ".savepoints": "savepoints_document",
            ".showing": "shown",
            ".sizes": "shared_bytes sizes_document",
            ".subjects": "newest_declaration",
            ".top": "top_document",
        },
    )
