"""``ckpt copy``, ``pin`` and ``unpin``: a checkpoint in a store of its own, under a name below its
store, or no more; ``ckpt rollback``: an older one, published again as the newest. ``copy`` takes a
Spark query's, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from stateformat import words
from stateformat.pages.blocks import Block, Column, Facts, Heading, Note, Page, Table

from ...options import Address, AddressType, PairType, Session, command, other_store
from ...output import Document
from ...published import (
    Moved,
    moved_text,
    proof,
    prove_option,
    published,
    published_page,
    show_proved,
    source_document,
    totals_text,
)
from ...repartitioned import ONE_QUERY

if TYPE_CHECKING:
    from stateformat.backends.foreign.spark.offsets import SourceEdits
    from stateformat.reading import Checkpoint
    from stateformat.store import CheckpointStore


@command("copy")
@click.argument("target", type=AddressType("never"), required=False)
@click.option("--to", type=AddressType("never"), metavar="TARGET", help="The same as TARGET.")
@click.option(
    "--offsets",
    multiple=True,
    type=PairType("I=JSON", first=True),
    help="Of a Spark query: let source I go on at this offset, or at '-' from its beginning; repeatable.",
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    type=PairType("I=drop|add"),
    help="Of a Spark query: take source I out, or make room for one; before --offsets; repeatable.",
)
@click.option(
    "--conf",
    multiple=True,
    type=PairType("NAME=VALUE", first=True),
    help="Of a Spark query: a setting that its first batch has fixed; repeatable.",
)
@prove_option
def copy(
    session: Session,
    address: Address,
    *,
    target: Address | None,
    to: Address | None,
    offsets: tuple[tuple[str, str], ...],
    sources: tuple[tuple[str, str], ...],
    conf: tuple[tuple[str, str], ...],
    prove: bool,
) -> int:
    """Copy a checkpoint; take a Spark query back to a batch.

    The copy is a savepoint: a store of its own. TARGET is the path or URL of a store that does not
    exist yet or is empty. Every object keeps its path and bytes; its digest is verified during the
    copy. On the same disk objects are linked instead, so both stores share their bytes; between two
    places of one S3 server the server copies, and sizes are checked (`ckpt validate --level full`
    reads the digests). Run an interrupted copy again to complete it.

    STORE may also be the checkpoint location of a Structured Streaming query. TARGET is then an
    empty folder, and gets all that Spark needs to go on after the batch of @ID, or after the newest
    one: so a query goes back to any batch that `ckpt history` lists. The copy is validated in full
    before Spark can start on it; the original stays as it is.

    Its sources can go on elsewhere: I counts the sources of the query from 0, and `ckpt inspect`
    shows their offsets. JSON has the form that the source's offset has now. What the state has
    counted stays counted.
    """
    from stateformat.documents import published_document
    from stateformat.model import Capability

    if (target is None) == (to is None):
        raise click.UsageError("give the target once: TARGET, or --to TARGET")
    target = target or to
    assert target is not None
    store, checkpoint = session.checkpoint(address, target.url)
    if Capability.CARRY not in checkpoint.capabilities:
        wanted = _edits(sources, offsets, conf)
        return _copy_query(session, address, store, checkpoint, target, wanted, prove=prove)
    if offsets or sources or conf:
        raise click.UsageError("--offsets, --source and --conf are for the checkpoints of Structured Streaming queries")
    there = session.target(target, address.url)
    session.changes("run it again to complete the copy: what is there is not copied twice")
    with session.output.progress(f"Copying checkpoint {checkpoint.id}") as step:
        moved = Moved(step)
        record = store.copy(checkpoint, there, moved)
    document = {
        **published_document(there.url, record),
        "source": source_document(store, checkpoint.record),
        "manifest_bytes": record.manifest.size_bytes,
        "moved": moved.document,
        "proof": None,
    }
    if prove:
        from stateformat.inspecting import prove_checkpoints

        result = there.open(record.checkpoint_id)
        document["proof"] = proof(
            session,
            lambda step: prove_checkpoints(checkpoint, result, progress=step),
            copied=there,
            is_savepoint=True,
        )
    return show_proved(session, document, copied_page)


def _edits(
    sources: tuple[tuple[str, str], ...], offsets: tuple[tuple[str, str], ...], conf: tuple[tuple[str, str], ...]
) -> SourceEdits:
    from stateformat.backends.foreign.spark.offsets import SourceEdits

    for name, what in sources:
        if what not in ("drop", "add"):
            raise click.UsageError(
                f"--source {name}={what:.40}: a source can be dropped or added: {name}=drop, {name}=add"
            )
    for option, pairs in (("--offsets", offsets), ("--conf", conf)):
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise click.UsageError(f"{option}: {max(names, key=names.count)} is given twice")
    return SourceEdits(sources, dict(offsets), dict(conf))


def _copy_query(
    session: Session,
    address: Address,
    store: CheckpointStore,
    checkpoint: Checkpoint,
    target: Address,
    changes: SourceEdits,
    *,
    prove: bool,
) -> int:
    from stateformat.backends.foreign.spark.copying import copy_query, plan_copy
    from stateformat.backends.foreign.spark.edits import location_like
    from stateformat.backends.foreign.spark.source import query_of

    folder = checkpoint.storage
    source = query_of(getattr(checkpoint, "source", None), folder.url, str(checkpoint.system), "copy")
    there = session.folder(target, address.url)
    plan = plan_copy(source, there.url, changes)
    session.changes(
        f"{there.url} holds a part of the copy, if anything, on which Spark refuses to start: remove the folder and "
        "run it again"
    )
    with session.output.progress(f"Copying batch {plan.batch}") as step:
        files, size = copy_query(folder, there, plan, step)
    document: Document = {
        "store": there.url,
        "location": location_like("", there.url),
        "source": source_document(store, checkpoint.record),
        "query_id": plan.query_id,
        "batch": plan.batch,
        "newest_batch": plan.newest,
        "runs_again": plan.runs_again,
        "files": files,
        "bytes": size,
        "sources": [one._asdict() for one in plan.moved],
        "conf": dict(changes.conf),
        "proof": None,
    }
    if prove:
        from stateformat.inspecting import prove_checkpoints

        result = session.checkpoint(replace(target, format="spark"))[1]
        own = [f"spark.offsets.{name}" for one in plan.moved for name in (one.before, one.after) if name is not None]
        document["proof"] = proof(session, lambda step: prove_checkpoints(checkpoint, result, progress=step), own=own)
    return show_proved(session, document, query_page)


def query_page(document: Document) -> Iterator[Block]:
    """Make the page of a query's copy: how far it goes, and how the query goes on."""
    batch, newest = document["batch"], document["newest_batch"]
    yield Heading(f"Copied the query as of batch {batch}")
    yield Facts(
        [
            ("from", document["source"]["store"]),
            ("to", document["store"]),
            ("checkpointLocation", document["location"]),
            ("query", document["query_id"]),
            ("batch", f"{batch}, state version {batch + 1}{'' if batch == newest else f'; the newest is {newest}'}"),
            ("size", f"{words.plural(document['files'], 'file')}, {words.size(document['bytes'])}"),
        ]
    )
    if document["sources"]:
        yield Table(
            [
                Column("source"),
                Column("in the copy"),
                Column("was at", flexible=True),
                Column("goes on at", flexible=True),
            ],
            [
                (
                    *("-" if one[name] is None else one[name] for name in ("before", "after")),
                    "" if one["old"] is None else one["old"],
                    "" if one["after"] is None else "its beginning" if one["new"] is None else one["new"],
                )
                for one in document["sources"]
            ],
        )
        for one in document["sources"]:
            if one["note"]:
                yield Note(f"Source {one['before'] if one['after'] is None else one['after']}: {one['note']}.")
        yield Note("What the state has counted stays counted: of input that is read again, it is counted twice.")
    again = ", with the same input as before; later batches may divide the input differently"
    yield Note(f"Spark goes on from the copy with batch {batch + 1}{again if document['runs_again'] else ''}.")
    if batch < newest:
        yield Note(
            f"What batches {batch + 1} to {newest} put out is in the sink already. A file sink of Spark leaves out "
            "batches that its log (_spark_metadata) has: give the query another folder there."
        )
    yield Note(f"Of the batches before it the copy has only the state that this one needs. {ONE_QUERY}")


def copied_page(document: Document) -> Page:
    """The page: what was copied, from where to where."""
    manifest = f"manifest {words.size(document['manifest_bytes'])}"
    facts = [
        ("from", document["source"]["store"]),
        ("to", document["store"]),
        ("kind", document["kind"]),
        ("size", totals_text(document["totals"], manifest)),
        ("moved", moved_text(document["moved"])),
    ]
    return [Heading(f"Copied checkpoint {document['checkpoint_id']}"), Facts(facts)]


@command("pin")
@click.argument("name", metavar="NAME")
def pin(session: Session, address: Address, *, name: str) -> None:
    """Keep a checkpoint under a name, out of reach of retention.

    Makes a savepoint in savepoints/NAME/ below the store, by links or copies on the server where
    the storage has them. Its address is STORE@NAME, which works wherever STORE@ID does. NAME is a
    letter followed by letters, digits, '.', '_' and '-'. Pinning a checkpoint again under the same
    name changes nothing, or completes an interrupted pin. `ckpt history` lists the pins of a store,
    `ckpt unpin` removes one.
    """
    from stateformat import pins
    from stateformat.documents import published_document

    store, checkpoint = session.checkpoint(address)
    session.changes("run it again to complete the pin: what is there is not copied twice")
    with session.output.progress(f"Pinning checkpoint {checkpoint.id}") as step:
        moved = Moved(step)
        made = pins.pin(checkpoint, name, progress=moved)
    document = {
        **published_document(made.url, made.record),
        "name": name,
        "made": made.made,
        "source": source_document(store, checkpoint.record),
        "moved": moved.document,
    }
    session.output.show(document, pinned_page)


def pinned_page(document: Document) -> Page:
    """The page: which checkpoint, and the address that it has now."""
    facts = [
        ("address", f"{document['source']['store']}@{document['name']}"),
        ("lies in", document["store"]),
        ("size", totals_text(document["totals"])),
        ("moved", moved_text(document["moved"])),
    ]
    done = "Pinned" if document["made"] else "Pinned before:"
    return [Heading(f"{done} checkpoint {document['checkpoint_id']} as {document['name']}"), Facts(facts)]


@command("unpin")
@click.argument("name", metavar="[NAME]", required=False)
def unpin(session: Session, address: Address, *, name: str | None) -> None:
    """Remove a pin, or another savepoint below the store.

    Name it by STORE@NAME, or by STORE NAME. What lies in savepoints/NAME/, a store with one
    checkpoint, is removed, its record first; the store itself stays as it is, and so do checkpoints
    that share its bytes. A savepoint in which a job has gone on is the job's store, and is refused.
    Run an interrupted unpin again to finish it.
    """
    from stateformat import pins
    from stateformat.documents import reference
    from stateformat.storage import split_name

    url, named = (address.url, name) if name is not None else split_name(address.url)
    if named is None or address.checkpoint_id is not None or address.format is not None:
        raise click.UsageError("give the name of a pin: STORE@NAME, or STORE NAME; `ckpt history STORE` lists them")
    store = session.store(Address(url, whole=True))
    session.changes("run it again to finish: without its record the savepoint is no checkpoint any more")
    removed = pins.unpin(store.storage, named)
    record = None if removed is None else removed.record
    document = {
        "store": store.url,
        "name": named,
        "removed": None if record is None else reference(record.ref),
    }
    session.output.show(document, unpinned_page)


def unpinned_page(document: Document) -> Page:
    """The page: what was removed."""
    removed = document["removed"]
    of = f"checkpoint {removed['checkpoint_id']}" if removed else "what an interrupted pin or unpin had left"
    facts = [("store", document["store"]), ("removed", f"savepoints/{document['name']}/: {of}")]
    return [Heading(f"Unpinned {document['name']}"), Facts(facts)]


@command("rollback", checkpoint="always")
@click.option("--to", "target", type=AddressType("never"), metavar="URL", help="Publish in this empty store instead.")
def rollback(session: Session, address: Address, *, target: Address | None) -> None:
    """Make an older checkpoint the newest again; metadata only.

    Publishes newest + 1 with the content of STORE@ID. Nothing is deleted, and no data is copied. A
    running job stops at its next publication. Output that the skipped checkpoints have committed
    stays committed. With --to the store stays as it is; the new one begins with a copy of the
    content.
    """
    store, source = session.checkpoint(address, *(() if target is None else (target.url,)))
    if target is None:
        session.publishes(store.url)
        there, permit = store, store.rollback(source.id)
    else:
        there = other_store(session, store, target, address)
        session.publishes(there.url)
        with session.output.progress(f"Copying checkpoint {source.id}") as step:
            permit = there.start_from(source, progress=lambda now: step(now.bytes_done, now.bytes_total))
    session.output.show(published(there, permit, store, source.record), published_page)
