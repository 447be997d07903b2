"""``ckpt rewrite``: the data of a checkpoint written anew, in threads or on Spark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, Final

import click

from stateformat import words
from stateformat.pages.blocks import Block, Column, Heading, Table

from ...options import (
    Address,
    AddressType,
    PairType,
    Session,
    Whole,
    command,
    engine_option,
    other_store,
    parallelism_options,
    per_operator,
)
from ...output import Document
from ...published import proof, prove_option, published, published_page, show_proved
from ...repartitioned import rewrite_foreign
from ...transforms import Chosen, renames_of, transform_options, transforms_of

if TYPE_CHECKING:
    from stateformat.backends.rewrite import TransformedRows

_COLUMNS: Final = (
    Column("column", flexible=True),
    Column("what became of it", flexible=True),
    Column("type", flexible=True),
)


@command("rewrite", pandas=True)
@engine_option("Threads of this process, or a Spark job.")
@parallelism_options
@click.option("--max-parallelism", type=Whole(), metavar="N", help="Hash keys to N key groups anew.")
@click.option(
    "--rename",
    multiple=True,
    type=PairType("OLD=NEW"),
    metavar="OLD=NEW",
    help="Give an operator a new uid, or a state (OPERATOR/STATE=NEW) a new name.",
)
@click.option(
    "--codec",
    type=click.Choice(["lz4", "zstd", "none"]),
    default="lz4",
    show_default=True,
    help="Compression of the new segments.",
)
@click.option(
    "--encoding",
    type=click.Choice(["fast", "plain"]),
    default="fast",
    show_default=True,
    help="plain is for readers that lack BYTE_STREAM_SPLIT.",
)
@transform_options
@prove_option
@click.option(
    "--to",
    "target",
    type=AddressType("never"),
    metavar="URL",
    help="Publish in this empty store instead; of a Spark query, the empty folder of the copy.",
)
def rewrite(
    session: Session,
    address: Address,
    *,
    engine: str,
    parallelism: int | None,
    operator_parallelism: tuple[tuple[str, int], ...],
    max_parallelism: int | None,
    rename: tuple[tuple[str, str], ...],
    codec: Any,
    encoding: Any,
    chosen: Chosen,
    rename_column: tuple[tuple[str, str], ...],
    rekey: bool,
    prove: bool,
    target: Address | None,
) -> int:
    """Correct or delete rows, also of Spark queries; compact.

    Afterwards each state of each subtask is one segment, layers are merged, and every row has its
    state's current schema. Only a new --max-parallelism hashes keys again; nothing else is
    shuffled. The result is published as the newest checkpoint of the store, or with --to in
    another.

    --transform corrects state: the function takes the rows of a state as an Arrow table, piece by
    piece, and returns the rows that replace them. It is first called without rows, to learn its
    columns. The module is searched for on PYTHONPATH and in the current directory; a file is given
    as fixes.py:correct. OPERATOR/STATE may be left out if only one state has rows. --where deletes
    rows, in all states that have the columns of its condition.

    STORE may also be the checkpoint location of a Structured Streaming query, with --transform or
    --where. A copy of it is then written to the empty folder --to, and validated before Spark can
    start on it. The query goes on from there; it must be stopped, and its own checkpoint stays as
    it is. Columns and their types stay those of the query; what Spark derives from rows follows
    them.
    """
    from stateformat.backends.rewrite import (
        Engine,
        RewriteSpec,
        ThreadEngine,
        check_provable,
        prove_rewrite,
        rewrite as run,
    )
    from stateformat.model import Capability
    from stateformat.segments import WriteOptions

    store, checkpoint = session.checkpoint(address, *(() if target is None else (target.url,)))
    if Capability.CARRY not in checkpoint.capabilities:
        others = bool(operator_parallelism or max_parallelism or rename or rename_column)
        more: dict[str, Any] = {"engine": engine, "prove": prove, "rekey": rekey, "others": others}
        return rewrite_foreign(session, address, checkpoint, target, parallelism, chosen, **more)
    renames, states = renames_of(checkpoint, rename)
    spec = RewriteSpec(
        parallelism=parallelism,
        per_operator=per_operator(checkpoint, operator_parallelism),
        max_parallelism=max_parallelism,
        renames=renames,
        states=states,
        transforms=transforms_of(checkpoint, chosen, rename_column, rekey=rekey),
        options=WriteOptions(codec=codec, encoding=encoding),
    )
    if prove:
        check_provable(spec)
    other = None if target is None else other_store(session, store, target, address)
    there = other or store
    session.publishes(there.url)
    runner: Engine = ThreadEngine()
    if engine == "spark":
        from stateformat.backends.spark.rewrite import SparkEngine

        runner = SparkEngine()
    title = f"Rewriting checkpoint {checkpoint.id}"
    # What a function prints is not the result; it may run in other threads.
    with redirect_stdout(sys.stderr), session.output.progress(title, unit="rows") as step:
        done = run(store, checkpoint, spec, engine=runner, target=other, progress=step)
    document = {
        **published(there, done.permit, store, checkpoint.record),
        "written": {"segments": done.segments, "rows": done.rows, "bytes": done.bytes},
        "rehashed": [{"operator": operator, "state": state} for operator, state in done.rehashed],
        "transformed": [_transformed(one) for one in done.transformed],
        "proof": None,
    }
    if prove:
        result = done.permit.checkpoint()
        document["proof"] = proof(session, lambda step: prove_rewrite(checkpoint, result, spec, progress=step))
    return show_proved(session, document, page)


def _transformed(one: TransformedRows) -> Document:
    """What a function made of a state."""
    state = one.state
    return {
        "operator": state.operator,
        "state": state.state,
        "function": state.function,
        "rekeyed": state.rekeyed,
        "rows_before": one.read,
        "rows_after": one.written,
        "columns": [change._asdict() for change in state.columns],
    }


def page(document: Document) -> Iterator[Block]:
    """Make the page: what was published, and what became of the columns of transformed states."""
    yield from published_page(document)
    for one in document["transformed"]:
        rows = f"{words.count(one['rows_before'])} → {words.plural(one['rows_after'], 'row')}"
        rehashed = ", rehashed" if one["rekeyed"] else ""
        yield Heading(f"{one['operator']}/{one['state']} by {one['function']}", rows + rehashed)
        yield Table(_COLUMNS, [_change(change) for change in one["columns"]])


def _change(change: Document) -> tuple[str, str, str]:
    """A line about a column."""
    what = change["change"]
    if change["was"] not in (None, change["column"]) and change["column"]:
        what = f"{what}, was {change['was']}"
    kind = change["type"] or change["type_was"]
    if change["type"] and change["type_was"] not in (None, change["type"]):
        kind = f"{change['type_was']} → {change['type']}"
    return change["column"] or change["was"], what, kind
