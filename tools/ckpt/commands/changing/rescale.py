"""``ckpt rescale``: publishes a checkpoint at another parallelism, by metadata alone; or writes a
copy of a Structured Streaming query's at another number of partitions.
"""

from __future__ import annotations

from typing import Any

import click

from ...exit_status import FINE
from ...options import (
    Address,
    AddressType,
    Session,
    command,
    engine_option,
    other_store,
    parallelism_options,
    per_operator,
)
from ...pages import restore_page
from ...published import proof, prove_option, published, published_page, show_proved
from ...repartitioned import rescale_foreign
from ..running.asking import ask_job, timeout_option


@command("rescale")
@parallelism_options
@click.option(
    "--to",
    "target",
    type=AddressType("never"),
    metavar="URL",
    help="Publish in this empty store instead; of a Spark query, the empty folder of the copy; with --running, the "
    "store for the savepoint.",
)
@click.option(
    "--provider",
    type=click.Choice(["rocksdb"]),
    help="Of a Spark query: move its state from the default store to RocksDB.",
)
@engine_option("Of a Spark query: write it in this process, or as a Spark job.")
@prove_option
@click.option("--dry-run", is_flag=True, help="Show the plan; publish nothing, and do not ask the job.")
@click.option("--running", is_flag=True, help="Ask the running job to continue at this parallelism, and wait.")
@timeout_option
def rescale(
    session: Session,
    address: Address,
    *,
    parallelism: int | None,
    operator_parallelism: tuple[tuple[str, int], ...],
    target: Address | None,
    provider: Any,
    engine: str,
    prove: bool,
    dry_run: bool,
    running: bool,
    timeout: float,
) -> int:
    """Change the parallelism, or the partitions of a Spark query.

    This takes metadata alone: no segment is read or written. Handles are cut and distributed anew,
    as `ckpt explain-restore` shows, and published as the newest checkpoint of the store. A running
    job ends at its next publication, because another has published in its store. With --to the
    store stays as it is, and its segments are copied to the new one.

    With --running this command publishes nothing: the job stops with a savepoint, continues at the
    new parallelism in the same process, and answers. What a start would refuse is refused before
    anything stops. If the job cannot start at the new parallelism, it continues at the old one.

    STORE may also be the checkpoint location of a Structured Streaming query. Its state is then
    written to the empty folder --to in --parallelism partitions, and the query can continue from
    there. The query must be stopped; its own checkpoint stays as it is.

    Exit status with --running: 0 rescaled; 1 refused, failed, or the job has ended; 3 no run
    answered, or the savepoint is missing.
    """
    from stateformat.backends.rewrite import publish_rescaled
    from stateformat.model import Capability
    from stateformat.redistribution import plan_document

    others = () if target is None else (target.url,)
    store, checkpoint = session.checkpoint(address, *others)
    if Capability.CARRY not in checkpoint.capabilities:
        if operator_parallelism:
            raise click.UsageError("all operators of a query share one number of partitions; give --parallelism")
        if running:
            raise click.UsageError("--running asks a job of this library, and STORE is a Structured Streaming query's")
        more: dict[str, Any] = {"engine": engine, "prove": prove, "dry_run": dry_run}
        return rescale_foreign(session, address, checkpoint, target, parallelism, provider, **more)
    if provider is not None or engine != "local":
        raise click.UsageError("--provider and --engine are for the checkpoints of Structured Streaming queries")
    if parallelism is None and not operator_parallelism:
        raise click.UsageError("give --parallelism, or --operator-parallelism for one operator")
    own = per_operator(checkpoint, operator_parallelism)
    if running and address.checkpoint_id is not None:
        raise click.UsageError(f"a running job goes on from where it is; leave @{address.checkpoint_id} out")
    if running and prove:
        raise click.UsageError("the job keeps running, so there is nothing to prove; `ckpt diff` compares")
    if running and not dry_run:
        wanted = {"parallelism": parallelism, "operators": own}
        return ask_job(session, address, target, timeout, "rescale", wanted)
    topology = checkpoint.graph.at(parallelism, per_operator=own)
    if dry_run:
        plan = checkpoint.plan_restore(topology, to_show=True)
        plan.check()
        session.output.show(plan_document(store.url, checkpoint.record, plan, system=checkpoint.system), restore_page)
        return FINE
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
    document = {**published(there, permit, store, checkpoint.record), "proof": None}
    if prove:
        from stateformat.inspecting import prove_checkpoints

        result = permit.checkpoint()
        document["proof"] = proof(
            session,
            lambda step: prove_checkpoints(checkpoint, result, progress=step),
            copied=None if target is None else there,
        )
    return show_proved(session, document, published_page)
