"""``ckpt gc``: shows, or with ``--delete`` removes, what retention and orphans would free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from stateformat import words
from stateformat.pages.blocks import Block, Column, Facts, Heading, Note, Said, Table

from ...exit_status import FINE, PROBLEMS
from ...options import Address, AgeType, Session, Whole, command
from ...output import Document

if TYPE_CHECKING:
    from stateformat.storage import Leftover, ObjectInfo

FOLDERS: Final = {"records": "checkpoints/", "segments": "segments/", "manifests": "manifests/", "leftovers": ""}
"""The folder of each sort of object; leftovers are in all of them."""

SHOWN: Final = 20
"""Objects of each sort on a page; JSON lists all."""


@command("gc", checkpoint="never")
@click.option("--keep", type=Whole(), metavar="N", help="Expire all but the newest N checkpoints. Default: none.")
@click.option(
    "--older-than",
    "older_than_us",
    type=AgeType(),
    metavar="AGE",
    help="Expire only what is older than AGE (7d, 12h, 30m, 90s). Without --keep, all but the newest may go.",
)
@click.option("--delete", is_flag=True, help="Delete. Without it nothing is changed.")
def gc(session: Session, address: Address, *, keep: int | None, older_than_us: int | None, delete: bool) -> int:
    """Show, or with --delete remove, what retention would free.

    Garbage is what no checkpoint names: expired records with their data, and what crashed or beaten
    attempts left behind, temporary files included. What a running job writes lies above the newest
    checkpoint and is never touched. If a record or manifest is damaged or lost, it is unknown what
    that checkpoint needs: nothing is deleted, and the exit status is 1. Pins and other savepoints
    below the store stay.
    """
    from stateformat.history import record_ids, require_records
    from stateformat.inspecting import shared_bytes

    store = session.store(address)
    require_records(store.storage, record_ids(store.storage))
    if delete:
        session.changes("what was deleted stays deleted, and the rest is still there; run it again to finish")
    storage = store.storage
    # Before anything is deleted: afterwards nothing says what the others have kept.
    shared = storage.shared("")
    with session.output.progress("Looking for garbage"):
        if keep is None and older_than_us is None:
            found = store.collect_garbage(delete=delete)
        else:
            found = store.expire(keep, older_than_us=older_than_us, delete=delete)
    document = {
        "store": store.url,
        "newest": found.newest,
        "keep": keep,
        "older_than_us": older_than_us,
        "deleted": found.deleted,
        "stopped": found.stopped,
        "records": _objects(found.records),
        "segments": _objects(found.segments),
        "manifests": _objects(found.manifests),
        "leftovers": _leftovers(found.leftovers),
        "unfinished": _leftovers(found.unfinished),
        "bytes": found.size_bytes,
        "shared_bytes": shared_bytes(found.objects, shared),
        "savepoints": storage.savepoints(),
    }
    session.output.show(document, page)
    return PROBLEMS if found.stopped else FINE


def _kept(keep: int | None, older_than_us: int | None) -> str:
    if keep is None and older_than_us is None:
        return "every checkpoint"
    newest = "the newest checkpoint" if (keep or 1) == 1 else f"the newest {words.plural(keep or 1, 'checkpoint')}"
    return newest if older_than_us is None else f"{newest}, and what is younger than {_length(older_than_us)}"


def _length(length_us: int) -> str:
    """A length of time in the greatest unit that it is whole in."""
    for unit, of_unit in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if length_us and length_us % (of_unit * 10**6) == 0:
            return f"{length_us // (of_unit * 10**6)} {unit}"
    return f"{length_us / 1e6:g} s"


def _objects(found: Sequence[ObjectInfo]) -> list[Document]:
    return [{"path": item.path, "size_bytes": item.size_bytes} for item in found]


def _leftovers(found: Sequence[Leftover]) -> list[Document]:
    return [{"path": item.name, "size_bytes": item.size_bytes} for item in found]


def page(document: Document) -> Iterator[Block]:
    """Make the page: the sums, the objects, and what to do next."""
    kept = _kept(document["keep"], document["older_than_us"])
    newest = f", newest {document['newest']}" if document["newest"] is not None else ""
    counts = ", ".join(words.plural(len(document[name]), name.removesuffix("s")) for name in FOLDERS if document[name])
    unfinished = len(document["unfinished"])
    savepoints, shared = len(document["savepoints"]), document["shared_bytes"]
    facts = [
        ("store", document["store"]),
        ("keeps", f"{kept}{newest}"),
        (
            "freed" if document["deleted"] else "would free",
            f"{counts}, {words.size(document['bytes'])}" if counts else "nothing",
        ),
        ("of these", f"{words.size(shared)} stay: a pin or a copy shares them" if shared else ""),
        ("savepoints", f"{savepoints} in savepoints/, never touched" if savepoints else ""),
        (
            "not touched",
            f"{words.plural(unfinished, 'temporary file')} of writers that may be alive" if unfinished else "",
        ),
    ]
    yield Heading("Garbage")
    yield Facts(facts)
    for name, folder in FOLDERS.items():
        rows = [(item["path"].removeprefix(folder), words.size(item["size_bytes"])) for item in document[name][:SHOWN]]
        title = Column(f"{name} in {folder}" if folder else name, flexible=True)
        if rows:
            yield Table([title, Column("bytes", right=True)], rows, left=len(document[name]) - len(rows))
    if document["stopped"]:
        yield Note(Said(words.sentence(f"stopped: {document['stopped']}"), "bad"))
    elif counts and not document["deleted"]:
        yield Note("Nothing was changed. Run it again with --delete to delete these.")
