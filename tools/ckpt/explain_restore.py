"""``ckpt explain-restore``: the plan of a restore, before anything runs. Opens no segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tools.ckpt.address import Address
from tools.ckpt.common import Session, command, operator_uid
from tools.ckpt.failures import FINE, PROBLEMS
from tools.ckpt.json_text import Column, Rows
from tools.ckpt.output import Document
from tools.ckpt.parallelism import parallelism_options, per_operator
from tools.ckpt.plan_page import draw

if TYPE_CHECKING:
    from redistribution.plan import RestorePlan
    from stateformat.checkpoint import Checkpoint
    from stateformat.model import JobGraph, State


@command("explain-restore")
@parallelism_options
@click.option("--max-parallelism", type=click.IntRange(min=1), metavar="N", help="Key groups of every operator.")
@click.option(
    "--topology",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Another job graph, as JSON, in place of the options above.",
)
@click.option("--drop", multiple=True, metavar="UID[/STATE]", help="Give up an operator or a state of it; repeatable.")
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

    Without options: the same job as it is. Nothing is written, and no segment is opened. Exit status 1 when the restore
    would be refused; every reason is told, with what to do about it.
    """
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
        from tools.ckpt.topology import read_topology

        chosen, states = read_topology(topology, checkpoint.record)
    plan = checkpoint.plan_restore(chosen, states=states, drop=drop)
    session.output.show(plan_document(store.url, checkpoint, plan), draw)
    return PROBLEMS if plan.refused else FINE


def _dropped(checkpoint: Checkpoint, name: str) -> str:
    """What is to be given up, with the operator's uid where its name was typed: ``UID`` or ``UID/STATE``."""
    known = {text for operator in checkpoint.graph.operators for text in (operator.uid, operator.name)}
    if name not in known:
        # Both uids and names of states may hold a slash.
        for end in (i for i, char in enumerate(name) if char == "/" and name[:i] in known):
            uid = operator_uid(checkpoint, name[:end])
            return f"{uid}/{checkpoint.record.state(uid, name[end + 1 :]).name}"
    return operator_uid(checkpoint, name)


def without(graph: JobGraph, uids: set[str]) -> JobGraph:
    """The graph without some operators and their edges."""
    return replace(
        graph,
        operators=tuple(operator for operator in graph.operators if operator.uid not in uids),
        edges=tuple(edge for edge in graph.edges if edge.source not in uids and edge.target not in uids),
    )


def plan_document(store: str, checkpoint: Checkpoint, plan: RestorePlan) -> Document:
    """The plan as ``RestorePlan.to_json`` writes it, and beside it what each subtask reads, and which states there are.

    What is as long as the plan stays in columns (``json_text``) until it is written.
    """
    operators = {operator.uid: operator for operator in plan.operators}
    states = [
        {
            "operator": state.operator,
            "name": state.name,
            "mode": state.mode.value,
            "kind": state.kind.value if state.kind else None,
            "rule": rule(checkpoint, plan, state.operator, state.name),
        }
        for state in checkpoint.states
        if state.operator in operators
    ]
    whole = plan.to_document()
    return {
        "store": store,
        "refused": plan.refused,
        "load": list(_loads(plan)),
        "states": states,
        "committable_rows": int(plan.committables["rows"].to_numpy().sum()),
        "plan": {**whole, "slices": {name: Column(column) for name, column in whole["slices"].items()}},
    }


def _loads(plan: RestorePlan) -> Iterator[Document]:
    """Per operator that is started what its subtasks read, together and each."""
    load = plan.load()
    columns = {name: load[name].to_numpy() for name in ("subtask", "rows", "bytes")}
    start = 0
    for operator in plan.operators:
        if not operator.starts:
            continue
        own = {name: column[start : start + operator.parallelism] for name, column in columns.items()}
        start += operator.parallelism
        yield {
            "operator": str(operator.uid),
            "rows": int(own["rows"].sum()),
            "bytes": int(own["bytes"].sum()),
            "subtasks": Rows(**own),
        }


def rule(checkpoint: Checkpoint, plan: RestorePlan, uid: str, name: str) -> str:
    """What becomes of a state, in words (docs/redistribution.md has the rules in full)."""
    from redistribution.operator_plan import Action
    from stateformat.model import Mode, Status

    state = checkpoint.record.state(uid, name)
    operator = plan.by_operator[uid]
    if state.mode is Mode.COMMITTABLES and operator.action is not Action.DROPPED:
        return "committed before anything starts"
    if uid in plan.drop or f"{uid}/{name}" in plan.drop:
        return "given up"
    if operator.action is Action.DROPPED:
        return "not in the topology"
    if operator.action is Action.SKIP_FINISHED:
        return "none: the operator has finished"
    same = operator.parallelism == operator.old_parallelism and operator.status is Status.RUNNING
    number = operator.parallelism
    return {
        Mode.KEYED: "each keeps its key groups" if same else f"key groups are cut anew for {number} subtasks",
        Mode.EVEN_SPLIT: "each keeps its own entries" if same else f"entries are dealt out in {number} even chunks",
        Mode.UNION: "every subtask gets every entry",
        Mode.BROADCAST: "every subtask gets one copy",
        Mode.COORDINATOR: "handed over whole",
        Mode.PROGRESS: "each keeps its own" if same else "least watermark; ended where all had ended",
        Mode.IN_FLIGHT: (
            "replayed by the owner of the key" if state.key_columns else "replayed in order, channel by channel"
        ),
    }[state.mode]
