"""``ckpt import``: a checkpoint of another system as the first of a store of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from stateformat import words
from stateformat.pages.blocks import Block, Facts, Heading, Note, listed, more
from stateformat.words import label

from ...options import Address, AddressType, AgeType, PairType, Session, Whole, command, engine_option
from ...output import Document
from ...published import CHANGES_SHOWN, changes_facts, proof, prove_option, published, show_proved, totals_text

if TYPE_CHECKING:
    from stateformat.backends.importing import Imported
    from stateformat.model import Record
    from stateformat.ttl import Ttl

NOTES_SHOWN: Final = 20
"""Notes on a page; JSON lists all."""


@command("import", pandas=True, foreign=True)
@click.option(
    "--to", "target", type=AddressType("never"), metavar="STORE", required=True, help="The empty store to publish in."
)
@click.option(
    "--key-hash",
    type=click.Choice(["rehash", "keep"]),
    default="rehash",
    show_default=True,
    help="Hash keys as our runtimes do, or keep their key groups, so that the state can go back.",
)
@click.option(
    "--max-parallelism",
    type=Whole(),
    metavar="N",
    help="Number of key groups.  [default: as it is; 128 for Spark]",
)
@click.option("--job-id", metavar="ID", help="The job's id: as in the dataflow that continues.")
@click.option("--job-name", metavar="NAME", help="The job's name.")
@click.option(
    "--map",
    "names",
    multiple=True,
    type=PairType("OLD=NEW"),
    metavar="OLD=NEW",
    help="Rename UID, UID/STATE, UID/STATE.COLUMN, or a field UID/STATE.COLUMN.FIELD; repeatable.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="UID[/STATE]",
    help="Leave an operator or one of its states out; repeatable.",
)
@click.option(
    "--ttl",
    multiple=True,
    type=PairType("UID/STATE=AGE"),
    metavar="UID/STATE=AGE",
    help="Rows of a Flink state with a TTL live this long after their last access: 12h, 7d; repeatable.",
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    type=PairType("UID=KIND[:NUMBER]"),
    metavar="UID=KIND",
    help="Continue source UID where the query is: files, rate; :1 for its second source, @ROW for a row.",
)
@engine_option("Threads of this process, or a Spark job.")
@prove_option
def import_(
    session: Session,
    address: Address,
    *,
    target: Address,
    key_hash: Any,
    max_parallelism: int | None,
    job_id: str | None,
    job_name: str | None,
    names: tuple[tuple[str, str], ...],
    drop: tuple[str, ...],
    ttl: tuple[tuple[str, str], ...],
    sources: tuple[tuple[str, str], ...],
    engine: str,
    prove: bool,
) -> int:
    """Make a checkpoint of a Flink savepoint or a Spark query.

    STORE is the folder of a Flink savepoint or checkpoint, or the checkpoint location of a
    Structured Streaming query, which stay as they are. The state becomes checkpoint 1 of the store
    --to, which must be empty. The page lists everything renamed, opaque or left out.
    """
    from stateformat.backends.importing import ImportSpec, check_places, import_checkpoint, prove_import
    from stateformat.backends.rewrite import Engine, ThreadEngine

    store, checkpoint = session.checkpoint(address, target.url)
    there = session.target(target, address.url)
    check_places(checkpoint, there)
    spec = ImportSpec(
        key_hash=key_hash,
        max_parallelism=max_parallelism,
        job_id=job_id,
        job_name=job_name,
        names=_once("--map", names),
        drop=drop,
        ttl={name: _ttl(text) for name, text in _once("--ttl", ttl).items()},
        sources=_once("--source", sources),
    )
    runner: Engine = ThreadEngine()
    if engine == "spark":
        from stateformat.backends.spark.rewrite import SparkEngine

        runner = SparkEngine()
    session.publishes(there.url)
    with session.output.progress(f"Importing checkpoint {checkpoint.id}", unit="rows") as step:
        done = import_checkpoint(checkpoint, there, spec, engine=runner, progress=step)
    document = {
        **published(there, done.rewritten.permit, store, checkpoint.record),
        "system": checkpoint.system,
        "job_id": done.record.job_id,
        "job_name": done.record.job_name,
        "written": {"segments": done.rewritten.segments, "rows": done.rewritten.rows, "bytes": done.rewritten.bytes},
        "key_hashes": _key_hashes(done.record),
        "dropped": list(drop),
        "finished": [
            {"uid": one.uid, "subtasks": [list(pair) for pair in one.done.ranges], "parallelism": one.parallelism}
            for one in checkpoint.graph.operators
            if one.done
        ],
        "watermark_ms": _number(done.record.properties.get("spark.watermark_ms")),
        **_told(done),
        "proof": None,
    }
    if prove:
        result = done.rewritten.permit.checkpoint()
        document["proof"] = proof(
            session, lambda step: prove_import(checkpoint, result, spec, progress=step), left_out=drop
        )
    return show_proved(session, document, page)


def _key_hashes(record: Record) -> list[str]:
    """Those of operators with keyed state, or of all if there is none."""
    keyed = {state.operator for state in record.states if state.mode.value == "keyed"}
    operators = record.graph.operators
    return sorted({one.key_hash or "" for one in operators if one.uid in keyed or not keyed})


def _ttl(text: str) -> Ttl:
    from stateformat.ttl import Ttl

    context = click.get_current_context()
    return Ttl(AgeType().convert(text, None, context), "processing_time")


def _once(option: str, pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise click.UsageError(f"{option} gives {name!r} twice: {found[name]!r} and {value!r}")
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _told(done: Imported) -> Document:
    return {
        "remarks": [{"kind": one.kind, "subject": one.subject, "message": one.message} for one in done.notes],
        "positions": [{"uid": uid, "behind": said} for uid, said in done.positions],
        "offsets": [{"source": number, "offset": text} for number, text in done.left],
    }


def page(document: Document) -> Iterator[Block]:
    """Make the page: what was imported from where, what changed, and what must be known."""
    source = document["source"]
    watermark = document["watermark_ms"]
    besides = document["totals"]["rows"] - document["written"]["rows"]
    # What --source and --key-hash keep add: positions, and what a savepoint of Flink's needs.
    added = [f"{words.plural(besides, 'row')} of the import's own"] if besides else []
    finished = [
        f"{one['uid']}: {words.ranges(one['subtasks'])} of {one['parallelism']}" for one in document["finished"]
    ]
    yield Heading(f"Imported checkpoint {source['checkpoint_id']} as checkpoint {document['checkpoint_id']}")
    yield Facts(
        [
            ("from", source["store"]),
            ("which is", document["system"]),
            ("store", document["store"]),
            ("job", words.named(document["job_id"], document["job_name"])),
            ("key hash", ", ".join(document["key_hashes"])),
            ("size", totals_text(document["totals"], *added)),
            ("left out", ", ".join(document["dropped"])),
            *changes_facts([one for one in document["changes"] if one["uid"] != "flink-savepoint"]),
            *listed("finished", finished, CHANGES_SHOWN),
            ("watermark", words.precise_moment(watermark * 1000) if watermark else ""),
            *((one["uid"], f"goes on {one['behind']}") for one in document["positions"]),
        ]
    )
    for one in document["offsets"]:
        yield Note(
            f"Source {one['source']} of the query stays at {label(one['offset'])[:300]}, kept as property "
            f"spark.offsets.{one['source']}. Begin the source that goes on there."
        )
    for note in document["remarks"][:NOTES_SHOWN]:
        subject = f" ({note['subject']})" if note["subject"] else ""
        yield Note(f"{note['kind'].capitalize()}{subject}: {words.sentence(note['message'])}")
    if len(document["remarks"]) > NOTES_SHOWN:
        yield Note(more(len(document["remarks"]) - NOTES_SHOWN, "remark"))
    yield from (Note(words.sentence(text)) for text in document["notes"])
