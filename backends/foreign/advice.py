"""What to do with the checkpoint of another system, in place of a command or after a finding.

One table: every sentence that a command gives for such a folder is made of it, and a test tries
each. It also has the versions that are read, which docs/foreign.md repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FLINK: Final = "a Flink checkpoint or savepoint"
SPARK: Final = "the checkpoint of a Spark query"

_HISTORY: Final = "`ckpt history {url}` shows what is there now"
_IMPORT: Final = "`ckpt import {url} --to STORE` makes a store of it"
_BACK: Final = "`ckpt copy {url}@ID --to COPY` writes a folder from which the query goes on after an older batch"
_FROM_PATH: Final = "start the job from an older savepoint or checkpoint (`flink run -s PATH`)"
_STARTS: Final = (
    "import it with `ckpt import {url} --to STORE --job-id {job_id}`, and the program goes on from the new store"
)

_COPY_OF_QUERY: Final = "`ckpt copy {url} --to COPY` keeps a copy that it has validated, of an older batch with @ID"
_COPY_OF_SAVEPOINT: Final = (
    "Copy a savepoint as the folder that it is (cp -r); the files of a checkpoint may lie elsewhere: take a savepoint "
    "(`flink savepoint`)"
)


_TABLE: Final[Mapping[str, Mapping[str, str]]] = {
    SPARK: {
        "pin": _COPY_OF_QUERY,
        "unpin": f"It has no pins. {_HISTORY}",
        "gc": "Spark itself removes old batches; `ckpt du {url}` shows what they take",
        "rollback": _BACK,
        "repair": (
            "`ckpt validate {url} --all --level full` says which batches are whole. Put damaged files back from a copy "
            f"of the folder, or go back to a whole batch: {_BACK}"
        ),
        "rewrite": (
            f"{_IMPORT}, which `ckpt rewrite` takes, and which no query goes on from. For another number of partitions "
            "`ckpt rescale {url} --parallelism N --to COPY` writes a copy that one does"
        ),
        "stop": f"Stop the query in Spark: its folder is whole then. {_HISTORY}",
        "savepoint": _COPY_OF_QUERY,
        "watch": f"Only stores are followed; {_HISTORY}",
        "run": f"{_IMPORT}, and a program can go on from that",
        "damage": f"put the file back from a copy, or go back to a whole batch: {_BACK}",
        "validate": f"`ckpt history {{url}}` lists the batches. {_BACK}",
        "start": _STARTS,
    },
    FLINK: {
        "copy": _COPY_OF_SAVEPOINT,
        "pin": _COPY_OF_SAVEPOINT,
        "unpin": f"It has no pins. {_HISTORY}",
        "gc": "Flink itself removes old checkpoints; `ckpt du {url}` shows what they take",
        "rollback": f"To go back, {_FROM_PATH}",
        "repair": (
            "`ckpt validate {url} --level full` lists what is wrong. Put damaged files back from a copy, or "
            f"{_FROM_PATH}"
        ),
        "rescale": (
            "Flink restores it at another parallelism by itself: start the job from it with the new one (`flink run -p "
            f"N -s PATH`). {_IMPORT}, which `ckpt rescale` takes"
        ),
        "rewrite": (
            "`ckpt import {url} --to STORE --key-hash keep` makes a store of it, which `ckpt rewrite` takes and `ckpt "
            "export STORE --as flink-savepoint --to COPY` makes a savepoint of again"
        ),
        "stop": "Stop the job in Flink (`flink stop`)",
        "savepoint": "Ask Flink for one (`flink savepoint`)",
        "watch": f"Only stores are followed; {_HISTORY}",
        "run": f"{_IMPORT}, and a program can go on from that",
        "validate": f"Put damaged files back from a copy, or {_FROM_PATH}",
        "start": _STARTS,
    },
}


def advice_for(system: str, subject: str, url: str = "", **values: object) -> str:
    """Return what to do; ``""`` if the table has nothing. The end mark is left to the caller.

    ``subject``: a command that does not take such a folder, ``damage``, ``validate`` (no checkpoint
    is whole), or ``start`` (of a program, ``job_id``).
    """
    return _TABLE.get(system, {}).get(subject, "").format(url=url or "QUERY", **values)
