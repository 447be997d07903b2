"""Check by one listing that the segments a checkpoint names are in the store."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..errors import DamagedCheckpoint, ErrorKind
from ..storage import Storage


def check_present(storage: Storage, handles: pa.Table, paths: pa.Array, source: int) -> None:
    """Raise ``DamagedCheckpoint`` if an object of ``paths`` is missing or has another size."""
    # Group before filtering: a million handles may name a hundred segments.
    named = (
        handles.select(["path", "size_bytes"]).group_by("path", use_threads=False).aggregate([("size_bytes", "max")])
    )
    named = named.filter(pc.is_in(named["path"], value_set=paths))
    there: Mapping[str, int] = {item.path: item.size_bytes for item in storage.list(layout.SEGMENTS)}
    missing, wrong = [], []
    for path, size_bytes in zip(named["path"].to_pylist(), named["size_bytes_max"].to_pylist(), strict=True):
        if path not in there:
            missing.append(path)
        elif there[path] != size_bytes:
            wrong.append(f"{path} has {there[path]:,} bytes, not {size_bytes:,}")
    if missing or wrong:
        more = f", and {len(missing) - 1:,} more of its segments" if len(missing) > 1 else ""
        fault = f"{missing[0]} is not in the store{more}" if missing else wrong[0]
        raise DamagedCheckpoint(
            f"checkpoint {source} of {storage.url} is damaged: {fault}. Nothing was published. `ckpt validate` lists "
            "all that is wrong, `ckpt history` the other checkpoints",
            kind=ErrorKind.OBJECT_MISSING if missing else ErrorKind.OBJECT_SIZE_DIFFERS,
            path=missing[0] if missing else wrong[0].split(" ", 1)[0],
            checkpoint_id=source,
        )
