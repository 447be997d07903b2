"""Looking into checkpoints: what changed, a state over a range, metadata as tables, documents.

Read ``over_time`` (one state in several checkpoints) and ``metadata``; ``matching`` says which rows
of two sides differ, ``comparing`` which have to be read, ``diff`` compares whole checkpoints.
``own_states`` describes the rows of a runtime's own states as a document; ``key_steps`` finds when
the rows of a key changed, ``top`` which keys, key groups and subtasks have most, ``sizes`` what a
store takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .below import below_document as below_document
    from .diff import (
        CheckpointDiff as CheckpointDiff,
        Renames as Renames,
        StateDiff as StateDiff,
        column_changes as column_changes,
        diff_checkpoints as diff_checkpoints,
        proof_document as proof_document,
        prove_checkpoints as prove_checkpoints,
    )
    from .key_steps import KeyStep as KeyStep, key_history as key_history, latest_declaration as latest_declaration
    from .matching import CHANGE as CHANGE
    from .metadata import (
        METADATA_TABLES as METADATA_TABLES,
        MetadataRows as MetadataRows,
        metadata_table as metadata_table,
    )
    from .over_time import (
        StateChanges as StateChanges,
        StateRange as StateRange,
        newest_declaration as newest_declaration,
    )
    from .own_states import contents as contents
    from .showing import savepoints_document as savepoints_document, shown as shown, survey_document as survey_document
    from .sizes import shared_bytes as shared_bytes, sizes_document as sizes_document
    from .top import top_document as top_document
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".below": "below_document",
            ".diff": "CheckpointDiff Renames StateDiff column_changes diff_checkpoints proof_document "
            "prove_checkpoints",
            ".key_steps": "KeyStep key_history latest_declaration",
            ".matching": "CHANGE",
            ".metadata": "METADATA_TABLES MetadataRows metadata_table",
            ".over_time": "StateChanges StateRange newest_declaration",
            ".own_states": "contents",
            ".showing": "savepoints_document shown survey_document",
            ".sizes": "shared_bytes sizes_document",
            ".top": "top_document",
        },
    )
