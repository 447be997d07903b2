"""``--prove``: after the work, source and result are compared, and one line says what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from stateformat.pages.blocks import Block

from .exit_status import FINE, PROBLEMS
from .options import Session
from .output import Document, MakePage

if TYPE_CHECKING:
    from stateformat.inspecting import CheckpointDiff
    from stateformat.store import CheckpointStore

F = TypeVar("F", bound=Callable[..., Any])
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
