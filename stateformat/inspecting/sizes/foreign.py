"""The sizes of another system's checkpoints: the files in the folder, and what states refer to.

The metadata of a state does not show which files a checkpoint shares with others, so nothing counts
as its own, and nothing as garbage.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...manifest import integers, state_runs


def foreign_sizes(store: Any) -> dict[str, Any]:
    """``sizes_document`` for a folder of another system's checkpoints. Raises ``NotFound``."""
    records = store.survey().checkpoints
    opened = [store.checkpoint_of(record) for record in records]
    checkpoints = [_checkpoint(checkpoint) for checkpoint in opened]
    folder = store.storage.folder()
    files: dict[str, list[int]] = defaultdict(list)
    for item in folder.list("") if folder is not None else ():
        first, slash, _ = item.path.partition("/")
        files[f"{first}/" if slash else ""].append(item.size_bytes)
    states: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in checkpoints[:1]:
        for one in entry["states"]:
            states[one["operator"], one["state"]] = {
                "operator": one["operator"], "state": one["state"], "bytes": None, "own_bytes": None, "objects": None,
                "newest_bytes": one["bytes"], "newest_inline_bytes": one["inline_bytes"],
            }  # fmt: skip
    return {
        "store": store.url,
        "system": opened[0].system if opened else None,
        "newest": records[0].checkpoint_id if records else None,
        "objects": sum(map(len, files.values())),
        "bytes": sum(map(sum, files.values())),
        "shared_bytes": 0,
        "folders": [
            {
                "folder": name, "savepoint": None, "checkpoint_id": None, "objects": len(files[name]),
                "bytes": sum(files[name]), "shared_bytes": 0, "garbage_bytes": None,
            }
            for name in sorted(files)
        ],
        "states": [*states.values()],
        "checkpoints": checkpoints,
        "unreadable": [],
        "unfinished": None,
        "garbage": None,
        "keep": None,
    }  # fmt: skip


def _checkpoint(checkpoint: Any) -> dict[str, Any]:
    record, parts = checkpoint.record, checkpoint.outline
    sizes = integers(parts["size_bytes"], null=0)
    paths = pc.fill_null(parts["path"], "")
    inline = pc.starts_with(paths, "inline#").to_numpy().astype(bool)
    # Parts of one file are told apart by what follows its name.
    files = pc.replace_substring_regex(paths, r"(?s)#[^#]*$", "").filter(pa.array(~inline & (sizes > 0)))
    return {
        "checkpoint_id": record.checkpoint_id,
        "attempt_id": record.attempt_id,
        "kind": record.kind.value,
        "created_at_us": record.created_at_us,
        "bytes": int(sizes.sum()),
        "own_bytes": None,
        "manifest_bytes": None,
        "inline_bytes": int(sizes[inline].sum()),
        "objects": pc.count_distinct(files).as_py(),
        "missing": None,
        "states": [
            {
                "operator": operator,
                "state": state,
                "bytes": int(sizes[start:stop][~inline[start:stop]].sum()),
                "inline_bytes": int(sizes[start:stop][inline[start:stop]].sum()),
                "own_bytes": None,
            }
            for (operator, state), start, stop in state_runs(parts)
        ],
    }
