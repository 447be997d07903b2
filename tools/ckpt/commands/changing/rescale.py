"""``ckpt rescale``: publishes a checkpoint at another parallelism, by metadata alone; or writes a
copy of a Structured Streaming query's at another number of partitions.
"""

from __future__ import annotations

from typing import Any

import click

from ...options import Address, AddressType, Session, command, other_store, parallelism_options, per_operator
from ...repartitioned import rescale_foreign
from ...text import draw_plan
from ._published import draw_published, published


@command("rescale")
@parallelism_options
@click.option(
    "--to",
    "target",
    type=AddressType("never"),
    metavar="URL",
    help="Publish in this empty store instead; of a Spark query, the empty folder of the copy.",
)
@click.option(
    "--provider",
    type=click.Choice(["rocksdb"]),
    help="Of a Spark query: move its state from the default store to RocksDB.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "spark"]),
    default="local",
    show_default=True,
    help="Of a Spark query: write it in this process, or as a Spark job.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan and publish nothing.")
def rescale(
    session: Session,
    address: Address,
    *,
    parallelism: int | None,
    operator_parallelism: tuple[tuple[str, int], ...],
    target: Address | None,
    provider: Any,
    engine: str,
    dry_run: bool,
) -> None:
    """Publish a checkpoint at another parallelism; metadata only.

    No segment is read or written: handles are cut and distributed anew, as `ckpt explain-restore`
    shows, and published as the newest checkpoint of the store. A running job stops at its next
    publication. With --to the store stays as it is, and its segments are copied to the new one.

    STORE may also be the checkpoint location of a Structured Streaming query. Its state is then
    written to the empty folder --to at --parallelism partitions, and the query goes on from there.
    The query must be stopped; its own checkpoint stays as it is.
    """
    from stateformat.backends.rewrite import publish_rescaled
    from stateformat.redistribution import plan_document

    others = () if target is None else (target.url,)
    store, checkpoint = session.checkpoint(address, *others)
    if checkpoint.system is not None:
        if operator_parallelism:
            raise click.UsageError("all operators of a query share one number of partitions; give --parallelism")
        rescale_foreign(session, address, checkpoint, target, parallelism, provider, engine=engine, dry_run=dry_run)
        return
    if provider is not None or engine != "local":
        raise click.UsageError("--provider and --engine are for the checkpoints of Structured Streaming queries")
    if parallelism is None and not operator_parallelism:
        raise click.UsageError("give --parallelism, or --operator-parallelism for one operator")
    topology = checkpoint.graph.at(parallelism, per_operator=per_operator(checkpoint, operator_parallelism))
    if dry_run:
        plan = checkpoint.plan_restore(topology)
        plan.check()
        session.output.show(plan_document(store.url, checkpoint.record, plan, system=checkpoint.system), draw_plan)
        return
    if target is None:
        session.publishes(store.url)
        there, permit = store, publish_rescaled(checkpoint, topology, store=store)
    else:
        there = other_store(session, store, target, address)
        session.publishes(there.url)
        with session.output.progress(f"Copying checkpoint {checkpoint.id}") as step:
            permit = publish_rescaled(
                checkpoint,
                topology,
                store=store,
                target=there,
                progress=lambda now: step(now.bytes_done, now.bytes_total),
            )
    session.output.show(published(there, permit, store, checkpoint.record), draw_published)
