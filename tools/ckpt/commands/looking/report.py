"""``ckpt report``: one page about a store, for a browser: history, graph, states, findings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from stateformat import words
from stateformat.pages.blocks import Block, Facts, Heading, Note, Said, dotted
from stateformat.words import label

from ...exit_status import FINE, PROBLEMS
from ...files import check_outside, new_file, remote_folder
from ...options import Address, Session, TargetType, Whole, command, id_of, is_local
from ...output import Document
from ...pages import verdict

if TYPE_CHECKING:
    from stateformat.reporting import ReportLevel

PAGE: Final = "report.html"


@command("report", foreign=True)
@click.option(
    "--to",
    "target",
    type=TargetType(),
    metavar="FILE",
    help=f"The page to write; - is standard output.  [default: {PAGE}]",
)
@click.option("--force", is_flag=True, help="Replace a file that is not a report.")
@click.option(
    "--level",
    type=click.Choice(["metadata", "quick", "full"]),
    help="What to validate.  [default: quick; metadata from 1,000 segments on]",
)
@click.option(
    "--limit",
    type=Whole(),
    default=200,
    show_default=True,
    metavar="N",
    help="Only the newest N checkpoints of the history.",
)
def report(
    session: Session,
    address: Address,
    *,
    target: str | None,
    force: bool,
    level: ReportLevel | None,
    limit: int,
) -> int:
    """Write an HTML page about a store, to open in a browser.

    It shows the job graph, sizes and rows over the history, states with their skew over subtasks
    and key groups, what would be freed, and what validation finds. The page needs no network and
    runs no script. An older report of the same name is replaced. With --format json the facts are
    printed, and a page is written only with --to. Exit status: 1 if anything is damaged or wrong;
    the page is written all the same.
    """
    from stateformat.pages.report import report_page
    from stateformat.reporting import collect_report

    if target is None and not session.output.as_json:
        target = PAGE
    if target == "-" and session.output.as_json:
        raise click.UsageError("--to - and --format json both take standard output; leave one of them out")
    store = session.store(address, *(() if target is None else (target,)))
    place = None
    if target is not None:
        check_outside(target, store.url, None)
        place = remote_folder(session, address, target, force=force or _is_report(target))
    with session.output.progress(f"Looking at {address}") as step:
        document = collect_report(
            store, id_of(address), now_us=time.time_ns() // 1000, level=level, limit=limit, progress=step
        )
    size_bytes = None
    if target is not None:
        check_outside(target, store.url, document["system"])
        html = "".join(report_page(document)).encode()
        session.changes(
            "standard output has a part of the page" if target == "-" else f"{label(target)} was not written"
        )
        with new_file(target, place, force=force or _is_report(target)) as file:
            file.write(html)
        size_bytes = len(html)
    if target != "-":
        written = None if target is None else str(Path(target).absolute()) if is_local(target) else target
        session.output.show({**document, "path": written, "size_bytes": size_bytes}, page)
    return PROBLEMS if document["faults"] or not document["validation"]["ok"] else FINE


def _is_report(target: str) -> bool:
    """Whether a local file is a page that an earlier call has written, so that it may go."""
    from stateformat.pages.elements import GENERATOR

    try:
        with Path(target).open("rb") as file:
            return is_local(target) and GENERATOR.encode() in file.read(512)
    except (OSError, ValueError):
        return False


def page(document: Document) -> Iterator[Block]:
    """Make the page on the terminal: where the other one is, and the most urgent of it."""
    checkpoint, found = document["checkpoint"], document["validation"]
    there, older = len(document["history"]["checkpoints"]), document["history"]["older"]
    shown = [
        f"checkpoint {checkpoint['checkpoint_id']}" if checkpoint else "no checkpoint",
        words.plural(there, "checkpoint") + (f" of {words.count(there + older)}" if older else "") + " of history",
        words.plural(len(document["states"]), "state"),
    ]
    yield Heading("Report")
    yield Facts(
        [
            ("store", document["store"]),
            ("page", document["path"] or ""),
            ("size", words.size(document["size_bytes"] or 0)),
            ("shows", dotted(*shown)),
        ]
    )
    faults = [fault["message"] for fault in document["faults"]]
    if faults:
        yield Note(Said(words.sentence(faults[0]), "bad"))
    yield verdict(max(len(found["problems"]), len(faults)), len(found["warnings"]))
