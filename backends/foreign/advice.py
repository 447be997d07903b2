"""What can be done with the checkpoint of another system, and what to do in place of a command or
after a finding.

One table of tasks: docs/foreign.md begins with it, every sentence that a command gives for such a
folder has its words, and tests do what each says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

FLINK: Final = "a Flink checkpoint or savepoint"
SPARK: Final = "the checkpoint of a Spark query"

_HISTORY: Final = "`ckpt history {url}` shows what is there now"
_IMPORT: Final = "`ckpt import {url} --to STORE` makes a store of it"
_STARTS: Final = (
    "import it with `ckpt import {url} --to STORE --job-id {job_id}`, and the program goes on from the new store"
)


class Way(NamedTuple):
    """Whether a task can be done, and how, or what can be done instead."""

    can: bool
    told: str


_LOOK: Final = Way(True, "`ckpt inspect {url}` shows operators, states, keys, columns and sizes")
_QUERY: Final = Way(True, "`ckpt sql {url} 'from OPERATOR.STATE'` has each state as a table")
_VALIDATE: Final = Way(True, "`ckpt validate {url} --level full` reads what a restart reads and says what is wrong")
_HOT: Final = Way(
    True, "`ckpt top {url}` ranks keys by rows, with --by COLUMN by the sum of a column; key groups and subtasks, too"
)

TASKS: Final[Mapping[str, Mapping[str, Way]]] = {
    "look into it": {SPARK: _LOOK, FLINK: _LOOK},
    "query it": {SPARK: _QUERY, FLINK: _QUERY},
    "validate it": {SPARK: _VALIDATE, FLINK: _VALIDATE},
    "find a hot key": {SPARK: _HOT, FLINK: _HOT},
    "change the partitions": {
        SPARK: Way(True, "`ckpt rescale {url} --parallelism N --to COPY` writes a copy from which the query goes on"),
        FLINK: Way(
            True,
            "Flink restores it at another parallelism by itself: start the job from it with the new one (`flink run -p "
            "N -s PATH`)",
        ),
    },
    "correct a value": {
        SPARK: Way(
            True,
            "`ckpt rewrite {url} --transform OPERATOR/STATE=FILE:FUNCTION --to COPY` writes a copy from which the "
            "query goes on",
        ),
        FLINK: Way(
            True,
            "`ckpt import {url} --to STORE --key-hash keep` makes a store of it, which `ckpt rewrite` takes and `ckpt "
            "export STORE --as flink-savepoint --to COPY` makes a savepoint of again",
        ),
    },
    "delete rows": {
        SPARK: Way(
            True,
            "`ckpt rewrite {url} --where CONDITION --to COPY` writes a copy without them, in all states that have the "
            "columns, and in what Spark derives from those",
        ),
        FLINK: Way(
            True,
            "`ckpt import {url} --to STORE --key-hash keep` makes a store of it, which `ckpt rewrite` takes with "
            "--where, and `ckpt export STORE --as flink-savepoint --to COPY` makes a savepoint of it again",
        ),
    },
    "rename": {
        SPARK: Way(
            False,
            "operators of a query have numbers; `ckpt import {url} --to STORE --map OLD=NEW` renames for a program of "
            "this library",
        ),
        FLINK: Way(
            False,
            "a savepoint is written with the uids it was read with; `ckpt import {url} --to STORE --map OLD=NEW` "
            "renames for a program of this library",
        ),
    },
    "drop a state": {
        SPARK: Way(
            False,
            "`ckpt import {url} --to STORE --drop UID/STATE` leaves it out for a program of this library, and for no "
            "query",
        ),
        FLINK: Way(
            True,
            "`ckpt import {url} --to STORE --key-hash keep --drop UID/STATE` leaves it out, and `ckpt export STORE "
            "--as flink-savepoint --to COPY` writes the rest",
        ),
    },
    "go back to an older one": {
        SPARK: Way(
            True, "`ckpt copy {url}@ID --to COPY` writes a folder from which the query goes on after an older batch"
        ),
        FLINK: Way(True, "start the job from an older savepoint or checkpoint (`flink run -s PATH`)"),
    },
    "repair it": {
        SPARK: Way(
            True,
            "`ckpt repair {url}` says which is the newest batch that a copy can have whole, and writes it --to COPY",
        ),
        FLINK: Way(
            False, "put damaged files back from a copy, or start the job from an older one (`flink run -s PATH`)"
        ),
    },
    "let its sources go on elsewhere": {
        SPARK: Way(True, "`ckpt copy {url} --to COPY --offsets SOURCE=OFFSET` writes a copy whose sources begin there"),
        FLINK: Way(False, "the state of sources is bytes here, and goes back as those bytes"),
    },
    "move it": {
        SPARK: Way(True, "`ckpt copy {url} --to COPY` keeps a copy that it has validated, of an older batch with @ID"),
        FLINK: Way(
            True,
            "`ckpt export {url} --as flink-savepoint --to COPY` makes a savepoint in one folder, of a checkpoint, too",
        ),
    },
    "go back to its system after an import": {
        SPARK: Way(
            False, "what `ckpt import` makes goes on in a program of this library; the query has its own folder"
        ),
        FLINK: Way(
            True,
            "`ckpt export STORE --as flink-savepoint --to COPY`, if it was imported with `--key-hash keep` and no "
            "operator, state or column has another name or type",
        ),
    },
}
"""What people want to do, for each system. ``{url}`` stands for the folder."""


def _way(task: str, system: str) -> str:
    return TASKS[task][system].told


_BACK: Final = _way("go back to an older one", SPARK)
_FROM_PATH: Final = _way("go back to an older one", FLINK)
_COPY_OF_QUERY: Final = _way("move it", SPARK)
_COPY_OF_SAVEPOINT: Final = (
    "Copy a savepoint as the folder that it is (cp -r); the files of a checkpoint may lie elsewhere: "
    f"{_way('move it', FLINK)}"
)

_TABLE: Final[Mapping[str, Mapping[str, str]]] = {
    SPARK: {
        "pin": _COPY_OF_QUERY,
        "unpin": f"It has no pins. {_HISTORY}",
        "gc": "Spark itself removes old batches; `ckpt du {url}` shows what they take",
        "rollback": _BACK,
        "stop": f"Stop the query in Spark: its folder is whole then. {_HISTORY}",
        "savepoint": _COPY_OF_QUERY,
        "run": f"{_IMPORT}, and a program can go on from that",
        "damage": f"put the file back from a copy. {_way('repair it', SPARK)}",
        "validate": f"`ckpt history {{url}}` lists the batches. {_way('repair it', SPARK)}",
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
        "rescale": (f"{_way('change the partitions', FLINK)}. {_IMPORT}, which `ckpt rescale` takes"),
        "rewrite": _way("correct a value", FLINK),
        "stop": "Stop the job in Flink (`flink stop`)",
        "savepoint": "Ask Flink for one (`flink savepoint`)",
        "watch": f"Only stores and Spark queries are followed; {_HISTORY}",
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
