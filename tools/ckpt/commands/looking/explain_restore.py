"""``ckpt explain-restore``: the plan of a restore, before anything runs. Opens no segment."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...exit_status import FINE, PROBLEMS
from ...options import Address, Session, Whole, command, parallelism_options, per_operator
from ...pages import restore_page
from ...programs import JobType

if TYPE_CHECKING:
    from stateformat.backends.dataflow.flow import Dataflow
    from stateformat.graph import JobGraph
    from stateformat.model import State
    from stateformat.reading import Checkpoint

    from ...functions import FunctionName
    from ...output import Document


@command("explain-restore", pandas="flow", foreign=True)
@click.option(
    "--flow",
    type=JobType(),
    metavar="JOB",
    help="Check whether a program can continue from here: FILE.py:FUNCTION or MODULE:FUNCTION, which returns its "
    "Dataflow.",
)
@parallelism_options
@click.option("--max-parallelism", type=Whole(), metavar="N", help="Key groups of every operator.")
@click.option("--unaligned", is_flag=True, help="With --flow: plan for an unaligned run.")
@click.option(
    "--topology",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Another job graph, as JSON, in place of the options above.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="UID[/STATE[.COLUMN]]",
    help="Give up an operator, one of its states, or a column; repeatable.",
)
def explain_restore(
    session: Session,
    address: Address,
    *,
    flow: FunctionName | None,
    parallelism: int | None,
    operator_parallelism: tuple[tuple[str, int], ...],
    max_parallelism: int | None,
    unaligned: bool,
    topology: Path | None,
    drop: tuple[str, ...],
) -> int:
    """Show what a restore would do, or why it would be refused.

    Without options the job stays as it is. With --flow the page shows what starting a program in
    this store would do, column by column, and what to change in the program if it would be refused;
    the options are those of the run. With --topology a file declares the states. Nothing is run or
    written, and no segment is opened; the rows of a Flink or Spark checkpoint, whose metadata has
    no row counts, are counted first. Exit status: 1 if the restore would be refused; the page lists
    every reason and what to do about it.
    """
    if flow is not None:
        if topology is not None or max_parallelism is not None:
            other = "--topology" if topology is not None else "--max-parallelism"
            raise click.UsageError(f"--flow names a program, which says what {other} would; leave one of them out")
        document = _of_program(session, address, flow, parallelism, dict(operator_parallelism), drop, unaligned)
        session.output.show(document, restore_page)
        return PROBLEMS if document["refused"] else FINE
    if unaligned:
        raise click.UsageError("--unaligned is an option of a run; name the program with --flow")
    from stateformat.redistribution import plan_document

    store, checkpoint = session.checkpoint(address)
    drop = tuple(_dropped(checkpoint, name) for name in drop)
    states: tuple[State, ...] = ()
    if topology is None:
        chosen = checkpoint.graph.at(
            parallelism, per_operator=per_operator(checkpoint, operator_parallelism), max_parallelism=max_parallelism
        )
        chosen = without(chosen, set(drop))
    else:
        if parallelism is not None or operator_parallelism or max_parallelism is not None:
            raise click.UsageError("--topology says how parallel each operator is; leave the other options out")
        from ...topology import read_topology

        chosen, states, drop = read_topology(topology, checkpoint.record, drop)
    plan = checkpoint.plan_restore(chosen, states=states, drop=drop, to_show=True)
    document = plan_document(store.url, checkpoint.record, plan, system=checkpoint.system)
    session.output.show({**document, "start": None}, restore_page)
    return PROBLEMS if plan.refused else FINE


def _of_program(
    session: Session,
    address: Address,
    program: FunctionName,
    parallelism: int | None,
    operator_parallelism: dict[str, int],
    drop: tuple[str, ...],
    unaligned: bool,
) -> Document:
    """The document of a start of a program."""
    from stateformat.backends.runtime import Options
    from stateformat.errors import NotFound
    from stateformat.history import NO_RECORDS

    from ...programs import dataflow_of
    from ...start_plan import start_document

    def start_spark() -> object:
        from stateformat.backends.spark.sessions import lent_session

        session.output.note(f"{program} takes a SparkSession, so one is started on this machine")
        return sessions.enter_context(lent_session("ckpt explain-restore"))

    with ExitStack() as sessions:
        flow = dataflow_of(program, start_spark=start_spark)
        options = Options(
            parallelism=parallelism,
            per_operator=_uids(flow, operator_parallelism),
            drop=drop,
            unaligned=unaligned,
        )
        store = session.store(address)
        try:
            checkpoint: Checkpoint | None = store.open(address.checkpoint_id)
        except NotFound as error:
            if error.kind not in NO_RECORDS or address.checkpoint_id is not None:
                raise
            checkpoint = None
        return start_document(store, checkpoint, flow, options, program)


def _uids(flow: Dataflow, given: dict[str, int]) -> dict[str, int]:
    """Parallelism by uid; a name that only one step has stands for its uid."""
    names: dict[str, list[str]] = {}
    for uid, step in flow.steps.items():
        names.setdefault(step.name, []).append(uid)
    one = {name: uids[0] for name, uids in names.items() if len(uids) == 1}
    return {text if text in flow.steps else one.get(text, text): number for text, number in given.items()}


def _dropped(checkpoint: Checkpoint, name: str) -> str:
    """What to give up, with the operator by uid: ``UID``, ``UID/STATE`` or ``UID/STATE.COLUMN``."""
    from stateformat.states import labels_of, named

    labels = labels_of(checkpoint.graph.operators)
    found = named(name, checkpoint.record.states, labels)
    if found is None:
        for label in (label for label in labels if name.startswith(f"{label}/")):
            checkpoint.record.state(labels[label], name[len(label) + 1 :])  # Its error lists the states.
        return checkpoint.operator_uid(name)
    if found.state is None:
        return found.operator
    return f"{found.operator}/{found.state}" + ("" if found.column is None else f".{found.column}")


def without(graph: JobGraph, uids: set[str]) -> JobGraph:
    """The graph without some operators and their edges."""
    return replace(
        graph,
        operators=tuple(operator for operator in graph.operators if operator.uid not in uids),
        edges=tuple(edge for edge in graph.edges if edge.source not in uids and edge.target not in uids),
    )
