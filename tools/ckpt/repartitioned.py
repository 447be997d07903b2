"""``ckpt rescale`` and ``rewrite`` of a Structured Streaming query: a copy at another number of
partitions, or with other rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from stateformat import words
from stateformat.pages.blocks import Block, Column, Facts, Heading, Note, Table, dotted

from .exit_status import FINE
from .options import Address, Session
from .output import Document
from .published import proof, show_proved
from .transforms import Chosen, transforms_of

if TYPE_CHECKING:
    from stateformat.backends.foreign.spark.repartition.plan import RepartitionPlan
    from stateformat.backends.foreign.spark.repartition.run import Outcome
    from stateformat.backends.foreign.spark.source import SparkSource
    from stateformat.model import State
    from stateformat.reading import Checkpoint
    from stateformat.storage import Storage

STORES_SHOWN: Final = 20
"""Stores on a page; JSON lists all."""
ONE_QUERY: Final = (
    "Both folders are the same query. Run it on one of them, never on both: they would write the same batches to the "
    "same sink."
)
PROVIDER_NAMES: Final = {"hdfs": "default store", "rocksdb": "RocksDB"}


def rescale_foreign(
    session: Session,
    address: Address,
    checkpoint: Checkpoint,
    target: Address | None,
    parallelism: int | None,
    provider: Literal["rocksdb"] | None,
    *,
    engine: str,
    prove: bool,
    dry_run: bool,
) -> int:
    """Write a query's checkpoint at another number of partitions, and show what was written.

    Returns the exit status.
    """
    from stateformat.backends.foreign.spark.copying import check_target
    from stateformat.backends.foreign.spark.repartition.plan import plan_repartition
    from stateformat.backends.foreign.spark.source import query_of

    source = query_of(getattr(checkpoint, "source", None), checkpoint.storage.url, str(checkpoint.system), "rescale")
    if parallelism is None or target is None:
        raise click.UsageError(
            f"{checkpoint.storage.url} is {checkpoint.system}, whose rescaled copy goes to a new folder: give "
            "--parallelism N, and --to with an empty folder"
        )
    folder = checkpoint.storage
    there = session.folder(target, address.url)
    plan = plan_repartition(folder, there.url, parallelism, provider, source=source)
    check_target(folder, there)
    if dry_run:
        session.output.show(_document(folder, there, plan, None), page)
        return FINE
    outcome = _written(session, folder, there, plan, engine)
    document = _document(folder, there, plan, outcome)
    if prove:
        from stateformat.inspecting import prove_checkpoints

        result = session.checkpoint(replace(target, format="spark"))[1]
        document["proof"] = proof(
            session,
            lambda step: prove_checkpoints(checkpoint, result, progress=step),
            own=("spark.state_partitions", "spark.state_store_provider"),
        )
    return show_proved(session, document, page)


def rewrite_foreign(
    session: Session,
    address: Address,
    checkpoint: Checkpoint,
    target: Address | None,
    parallelism: int | None,
    chosen: Chosen,
    *,
    engine: str,
    prove: bool,
    rekey: bool,
    others: bool,
) -> int:
    """Write a query's checkpoint with other rows, and show what became of them.

    ``others``: whether options were given that are for stores alone. Returns the exit status.
    """
    from stateformat.backends.foreign import ForeignCheckpoint
    from stateformat.backends.foreign.spark.copying import check_target
    from stateformat.backends.foreign.spark.repartition.proving import EditedSource
    from stateformat.backends.foreign.spark.source import SparkSource, query_of
    from stateformat.backends.rewrite import plan_query_rewrite

    folder = checkpoint.storage
    source = query_of(getattr(checkpoint, "source", None), folder.url, str(checkpoint.system), "rewrite")
    if target is None:
        raise click.UsageError(
            f"{folder.url} is {checkpoint.system}, whose rewritten copy goes to a new folder: give --to with an empty "
            "one"
        )
    if others:
        raise click.UsageError(
            "a query has its own names, and one number of partitions: leave --operator-parallelism, --max-parallelism, "
            "--rename and --rename-column out"
        )
    if prove and rekey:
        raise click.UsageError("a proof follows keys, which --rekey changes; look at the copy with `ckpt diff`")
    there = session.folder(target, address.url)
    # What functions print is not the result.
    with redirect_stdout(sys.stderr):
        transforms = transforms_of(checkpoint, chosen, (), rekey=rekey, follows=_follows)
        plan = plan_query_rewrite(source, there.url, transforms, parallelism)
        check_target(folder, there)
        outcome = _written(session, folder, there, plan, engine)
    result = session.checkpoint(replace(target, format="spark"))[1]
    document = _document(folder, there, plan, outcome)
    document["transformed"] = [
        {
            "operator": operator,
            "state": state,
            "function": transform.label,
            "rows_before": _rows_of(source, operator, state),
            "rows_after": _rows_of(SparkSource(there), operator, state),
        }
        for (operator, state), transform in transforms.items()
    ]
    changed = {(one["operator"], one["state"]) for one in document["transformed"]}
    document["untouched"] = [
        {"operator": state.operator, "state": state.name}
        for state in checkpoint.record.states
        if (state.operator, state.name) not in changed and not _follows(state)
    ]
    if prove:
        from stateformat.inspecting import prove_checkpoints

        wanted = ForeignCheckpoint(folder, EditedSource(source, plan), str(checkpoint.system))
        document["proof"] = proof(
            session,
            lambda step: prove_checkpoints(wanted, result, progress=step),
            own=("spark.state_partitions",),
        )
    return show_proved(session, document, rewritten_page)


def _follows(state: State) -> bool:
    from stateformat.backends.foreign.spark.repartition.editing import leader

    return leader(state.name) is not None


def _rows_of(source: SparkSource, operator: str, state: str) -> int:
    parts = [part for part in source.parts if (part.operator, part.state) == (operator, state)]
    return sum(int(source.group_rows(part).sum()) for part in parts)


def _written(session: Session, folder: Storage, there: Storage, plan: RepartitionPlan, engine: str) -> Outcome:
    from stateformat.backends.foreign.spark.repartition.run import Engine, LocalEngine, repartition

    runner: Engine = LocalEngine()
    if engine == "spark":
        from stateformat.backends.spark.rewrite import SparkRepartition

        runner = SparkRepartition()
    session.changes(
        f"{there.url} holds a part of the copy, if anything, on which Spark refuses to start: remove the folder and "
        "run it again"
    )
    with session.output.progress(f"Writing {plan.after} partitions") as step:

        def progress(what: str, done: int, total: int) -> None:
            # Reading is one half of the bar, writing the other.
            half = plan.size_bytes
            step(done if what == "reading" else half + half * done // max(1, total), 2 * half)

        return repartition(folder, there, plan, engine=runner, progress=progress)


def _document(folder: Storage, there: Storage, plan: RepartitionPlan, outcome: Outcome | None) -> Document:
    """What was written, or would be."""
    from stateformat.backends.foreign.spark.edits import location_like

    return {
        "store": there.url,
        "location": location_like("", there.url),
        "source": {"store": folder.url, "checkpoint_id": plan.batch + 1},
        "written": outcome is not None,
        "query_id": plan.query_id,
        "batch": plan.batch,
        "partitions": {"before": plan.before, "after": plan.after},
        "provider": {"before": plan.provider_before, "after": plan.provider_after},
        "stores": [_store(plan, number, outcome) for number in range(len(plan.units))],
        "read_bytes": plan.size_bytes,
        "files": None if outcome is None else outcome.files,
        "bytes": None if outcome is None else outcome.size_bytes,
        "left_out": [plan.left_out[0], plan.left_out[-1]] if plan.left_out else None,
        "notes": list(plan.notes),
        "proof": None,
    }


def _store(plan: RepartitionPlan, number: int, outcome: Outcome | None) -> dict[str, Any]:
    unit = plan.units[number]
    found: dict[str, Any] = {
        "operator": unit.operator.uid,
        "name": unit.operator.name,
        "store": unit.name,
        "partitions": unit.targets,
        "keys": None,
        "min_keys": None,
        "max_keys": None,
        "bytes": None,
    }
    if outcome is not None:
        keys, sizes = outcome.keys[number], outcome.sizes[number]
        found |= {
            "keys": int(keys.sum()),
            "min_keys": int(keys.min()),
            "max_keys": int(keys.max()),
            "bytes": int(sizes.sum()),
        }
    return found


def page(document: Document) -> Iterator[Block]:
    """Make the page: what lies where, how evenly, what is not there, and how to go on."""
    before, after = document["partitions"]["before"], document["partitions"]["after"]
    done = "Wrote" if document["written"] else "Would write"
    providers = [PROVIDER_NAMES[document["provider"][one]] for one in ("before", "after")]
    changed = f"instead of {words.count(before)}" if before != after else "as before"
    yield Heading(f"{done} the query at {words.plural(after, 'partition')} {changed}")
    yield Facts(
        [
            ("from", document["source"]["store"]),
            ("to", document["store"]),
            ("checkpointLocation", document["location"]),
            ("query", document["query_id"]),
            ("newest batch", f"{document['batch']}, state version {document['batch'] + 1}"),
            ("state in", " → ".join(dict.fromkeys(providers))),
            ("size", _size(document)),
        ]
    )
    yield _stores(document)
    yield from map(Note, _remarks(document))


def rewritten_page(document: Document) -> Iterator[Block]:
    """Make the page of a rewrite: how many rows each state had and has, and all of the above."""
    yield from page(document)
    columns = [
        Column("state", flexible=True),
        Column("by", flexible=True),
        Column("rows", right=True),
        Column("now", right=True),
    ]
    rows = [
        (
            f"{one['operator']}/{one['state']}",
            one["function"],
            words.count(one["rows_before"]),
            words.count(one["rows_after"]),
        )
        for one in document["transformed"]
    ]
    if rows:
        yield Heading("What was changed")
        yield Table(columns, rows, STORES_SHOWN, "state")
    if rows and document["untouched"]:
        names = (f"{one['operator']}/{one['state']}" for one in document["untouched"])
        yield Note(f"Not changed: {', '.join(names)}.")


def _size(document: Document) -> str:
    if not document["written"]:
        return f"{words.size(document['read_bytes'])} to read"
    keys = sum(one["keys"] for one in document["stores"])
    return dotted(words.plural(keys, "key"), words.size(document["bytes"]), words.plural(document["files"], "file"))


def _stores(document: Document) -> Table:
    columns = [
        Column("operator", flexible=True),
        Column("store", flexible=True),
        Column("partitions", right=True),
        Column("keys", right=True),
        Column("least", right=True, optional=1),
        Column("most", right=True, optional=1),
        Column("size", right=True, optional=2),
    ]
    rows = [
        (
            words.named(one["operator"], one["name"]),
            one["store"],
            *(words.count(one[name]) for name in ("partitions", "keys", "min_keys", "max_keys")),
            "-" if one["bytes"] is None else words.size(one["bytes"]),
        )
        for one in document["stores"]
    ]
    return Table(columns, rows, STORES_SHOWN, "store")


def _remarks(document: Document) -> Iterator[str]:
    if document["written"]:
        yield ONE_QUERY
        yield (
            "Start it on the copy with this checkpointLocation and nothing else changed: the copy sets the number of "
            "partitions and the provider, and the session's settings for them do not apply. Keep the copy where it is "
            "once it has run."
        )
    if document["left_out"]:
        first, last = document["left_out"]
        which = f"batch {first}" if first == last else f"batches {first} to {last}"
        yield f"State of {which} is not in the copy: Spark's state reader cannot go back to it there."
    for note in document["notes"]:
        yield words.sentence(note)
