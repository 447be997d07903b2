"""``ckpt explain-restore``: the plan of a restore, before anything runs. Opens no segment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...exit_status import FINE, PROBLEMS
from ...options import Address, Session, command, parallelism_options, per_operator
from ...text import draw_plan

if TYPE_CHECKING:
    from stateformat.graph import JobGraph
    from stateformat.model import State
    from stateformat.reading import Checkpoint


@command("explain-restore", foreign=True)
@parallelism_options
@click.option("--max-parallelism", type=click.IntRange(min=1), metavar="N", help="Key groups of every operator.")
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
    parallelism: int | None,
    operator_parallelism: tuple[tuple[str, int], ...],
    max_parallelism: int | None,
    topology: Path | None,
    drop: tuple[str, ...],
) -> int:
    """Show who would restore what at another parallelism.

    Without options the job stays as it is. With --topology a program declares its states, and the
    page says what becomes of each column. Nothing is written, and no segment is opened; of another
    system's checkpoint, whose metadata does not say it, rows are counted first. Exit status 1 if
    the restore would be refused; the page lists every reason and what to do about it.
    """
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
    plan = checkpoint.plan_restore(chosen, states=states, drop=drop)
    session.output.show(plan_document(store.url, checkpoint.record, plan, system=checkpoint.system), draw_plan)
    return PROBLEMS if plan.refused else FINE


def _dropped(checkpoint: Checkpoint, name: str) -> str:
    """What to give up, with the operator by uid: ``UID``, ``UID/STATE`` or ``UID/STATE.COLUMN``."""
    known = {text for operator in checkpoint.graph.operators for text in (operator.uid, operator.name)}
    if name not in known:
        # Uids and names of states may contain a slash.
        for end in (i for i, char in enumerate(name) if char == "/" and name[:i] in known):
            uid, rest = checkpoint.operator_uid(name[:end]), name[end + 1 :]
            states = {state.name for state in checkpoint.states if state.operator == uid}
            if rest in states or not any(rest.startswith(f"{state}.") for state in states):
                rest = checkpoint.record.state(uid, rest).name  # For an unknown state, its error lists the known ones.
            return f"{uid}/{rest}"
    return checkpoint.operator_uid(name)


def without(graph: JobGraph, uids: set[str]) -> JobGraph:
    """The graph without some operators and their edges."""
    return replace(
        graph,
        operators=tuple(operator for operator in graph.operators if operator.uid not in uids),
        edges=tuple(edge for edge in graph.edges if edge.source not in uids and edge.target not in uids),
    )
