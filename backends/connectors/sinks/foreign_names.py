"""The refusal of a committable that names what its sink cannot have made (DESIGN.md section 6)."""

from __future__ import annotations

from stateformat.errors import DamagedCheckpoint, ErrorKind


def foreign_name(sink: str, prepared: tuple[int, str], column: str, name: object) -> DamagedCheckpoint:
    """The error for the row of a sink that was ``prepared`` under a checkpoint and attempt id.

    ``sink`` is a phrase like "sink 'out'". The name is shown escaped and cut.
    """
    checkpoint_id, attempt_id = prepared
    shown, attempt = (f"{text[:200]!r}" + "…" * (len(text) > 200) for text in (str(name), attempt_id))
    return DamagedCheckpoint(
        f"a committable of {sink}, prepared for checkpoint {checkpoint_id} by attempt {attempt}, has {shown} as "
        f"{column!r}, which that sink cannot have written for that attempt. Nothing was committed or removed. "
        "Something else has written this checkpoint. Find out who can write to the store, then go back to a checkpoint "
        "before it with ckpt rollback",
        kind=ErrorKind.DAMAGED_SEGMENT,
        column=column,
        name=name,
    )


__all__ = ["foreign_name"]
