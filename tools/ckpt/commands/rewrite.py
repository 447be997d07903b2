"""``ckpt rewrite``: the data of a checkpoint written anew, in threads or on Spark."""

from __future__ import annotations

from typing import Any

import click

from ..options import (
    Address,
    AddressType,
    PairType,
    Session,
    command,
    other_store,
    parallelism_options,
    per_operator,
)
from ._published import draw_published, published


@command("rewrite", pandas=True)
@click.option(
    "--engine",
    type=click.Choice(["local", "spark"]),
    default="local",
    show_default=True,
    help="Threads of this process, or a Spark job.",
)
@parallelism_options
@click.option("--max-parallelism", type=click.IntRange(min=1), metavar="N", help="Hash keys to N key groups anew.")
@click.option(
    "--rename", multiple=True, type=PairType("OLD=NEW"), metavar="OLD=NEW", help="Give an operator a new uid."
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
@click.option("--to", "target", type=AddressType("never"), metavar="URL", help="Publish in this empty store instead.")
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
    target: Address | None,
) -> None:
    """Rewrite the data: align, compact, re-encode, re-hash.

    Afterwards each state of each subtask is one segment, layers are merged, and every row has its
    state's current schema. Only a new --max-parallelism hashes keys again; nothing else is
    shuffled. The result is published as the newest checkpoint of the store, or with --to in another
    one.
    """
    from stateformat.backends.rewrite import Engine, RewriteSpec, ThreadEngine, rewrite as run
    from stateformat.segments import WriteOptions

    store, checkpoint = session.checkpoint(address, *(() if target is None else (target.url,)))
    spec = RewriteSpec(
        parallelism=parallelism,
        per_operator=per_operator(checkpoint, operator_parallelism),
        max_parallelism=max_parallelism,
        renames={checkpoint.operator_uid(old): new for old, new in rename},
        options=WriteOptions(codec=codec, encoding=encoding),
    )
    other = None if target is None else other_store(session, store, target, address)
    there = other or store
    session.publishes(there.url)
    runner: Engine = ThreadEngine()
    if engine == "spark":
        from stateformat.backends.spark.rewrite import SparkEngine

        runner = SparkEngine()
    with session.output.progress(f"Rewriting checkpoint {checkpoint.id}", unit="rows") as step:
        done = run(store, checkpoint, spec, engine=runner, target=other, progress=step)
    document = {
        **published(there, done.permit, store, checkpoint.record),
        "written": {"segments": done.segments, "rows": done.rows, "bytes": done.bytes},
        "rehashed": [{"operator": operator, "state": state} for operator, state in done.rehashed],
    }
    session.output.show(document, draw_published)
