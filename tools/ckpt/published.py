"""What commands say that published a checkpoint: which one, from which, what changed, and with
``--prove`` what comparing source and result has shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from stateformat import words
from stateformat.pages.blocks import Block, Facts, Heading, Note, dotted, listed

from .exit_status import FINE, PROBLEMS
from .options import Session
from .output import Document, MakePage, Step

if TYPE_CHECKING:
    from stateformat.inspecting import CheckpointDiff
    from stateformat.model import Record
    from stateformat.publication import CommitPermit, CopyProgress
    from stateformat.store import CheckpointStore


CHANGES_SHOWN: Final = 20
"""Changed operators on a page; JSON lists all."""


def source_document(store: CheckpointStore, record: Record) -> Document:
    """The checkpoint that another one was made from, and its store."""
    return {"store": store.url, "checkpoint_id": record.checkpoint_id, "attempt_id": record.attempt_id}


class Moved:
    """The progress of a copy: shown, and told in the end."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.document: Document = {"bytes": 0, "shared_bytes": 0, "server_bytes": 0}
        """How the bytes of its segments came there; all 0 where it was whole before."""

    def __call__(self, now: CopyProgress) -> None:
        self.document = {"bytes": now.bytes_done, "shared_bytes": now.bytes_shared, "server_bytes": now.bytes_by_server}
        self._step(now.bytes_done, now.bytes_total)


def moved_text(document: Document) -> str:
    """The same in words; empty where every byte was copied and verified on its way."""
    shared, by_server = document["shared_bytes"], document["server_bytes"]
    return dotted(
        f"{words.size(shared)} by links, which take no room" if shared else "",
        f"{words.size(by_server)} by the server, sizes checked" if by_server else "",
    )


def totals_text(totals: Document, *more: str) -> str:
    """The size of a checkpoint in words, by its totals."""
    segments = words.plural(totals["segments"], "segment")
    return dotted(words.plural(totals["rows"], "row"), words.size(totals["bytes"]), segments, *more)


def published(there: CheckpointStore, permit: CommitPermit, store: CheckpointStore, source: Record) -> Document:
    """The checkpoint published ``there`` from ``source``, and the operators that changed."""
    from stateformat.documents import operator_size, published_document

    before = {operator.uid: operator_size(operator) for operator in source.graph.operators}
    after = {operator.uid: operator_size(operator) for operator in permit.record.graph.operators}
    return {
        **published_document(there.url, permit.record),
        "source": source_document(store, source),
        "changes": [
            {"uid": uid, "before": before.get(uid), "after": now}
            for uid, now in after.items()
            if before.get(uid) != now
        ],
        "notes": list(permit.notes),
    }


def published_page(document: Document) -> Iterator[Block]:
    """Make the page: what is now where, and each operator that changed."""
    source = document["source"]
    elsewhere = f" of {source['store']}" if source["store"] != document["store"] else ""
    yield Heading(f"Published checkpoint {document['checkpoint_id']}")
    yield Facts(
        [
            ("store", document["store"]),
            ("kind", document["kind"]),
            ("content of", f"checkpoint {source['checkpoint_id']}{elsewhere}"),
            ("parent", str(document["parent"]["checkpoint_id"]) if document["parent"] else "none"),
            ("size", totals_text(document["totals"])),
            *changes_facts(document["changes"]),
        ]
    )
    yield from (Note(words.sentence(note)) for note in document["notes"])


def changes_facts(changes: list[Document]) -> list[tuple[str, str]]:
    """A line for each operator that changed, for the head of a page."""

    def one(entry: Any) -> str:
        return f"{entry['parallelism']} of {entry['max_parallelism']} {entry['status'].replace('_', ' ')}"

    lines = [
        f"{each['uid']}: {one(each['before']) if each['before'] else 'new name'} → {one(each['after'])}"
        for each in changes
    ]
    return listed("operators", lines, CHANGES_SHOWN)


Progress = Callable[[int, int], None]

prove_option: Final = click.option(
    "--prove",
    is_flag=True,
    help="Then compare the result with its source, row by row where digests do not settle it; exit status 1 if it "
    "differs.",
)


def proof(
    session: Session,
    compare: Callable[[Progress], CheckpointDiff],
    *,
    copied: CheckpointStore | None = None,
    is_savepoint: bool = False,
    own: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Document:
    """What comparing has shown, as a document.

    ``left_out``: operators and states that the user asked to leave out; nothing else may differ.

    ``copied``: a store that has got copies of the source's segments. That their digests are equal
    in both manifests says nothing of what lies there, so all of it is read. ``is_savepoint``: it
    must have the whole record, too. ``own``: properties that the result has of its own.
    """
    from stateformat.documents import problem_document
    from stateformat.inspecting import proof_document
    from stateformat.validation import validate

    session.changes("the work is done and stands; only the proof was cut short")
    with session.output.progress("Proving") as step:
        document = proof_document(compare(step), copied=is_savepoint, own=own)
    document |= {"left_out": list(left_out), "verified_bytes": None, "problems": []}
    if copied is not None:
        with session.output.progress("Verifying what was copied") as step:
            report = validate(copied, level="full", progress=step)
        document["verified_bytes"] = report.counts.bytes
        document["problems"] = [problem_document(problem) for problem in report.problems]
        document["same"] = document["same"] and report.ok
    return document


def show_proved(session: Session, document: Document, make: MakePage) -> int:
    """Write the result of a command, with its ``proof`` if there is one; return the exit status."""

    def whole(page: Document) -> Iterator[Block]:
        yield from make(page)
        if page["proof"] is not None:
            from stateformat.pages.difference import proof_blocks

            yield from proof_blocks(page["proof"])

    session.output.show(document, whole)
    return FINE if document["proof"] is None or document["proof"]["same"] else PROBLEMS
