"""``ckpt top``: the keys, key groups and subtasks with most rows or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from stateformat import words

from ...options import Address, Session, command
from ...output import Document
from ...pages import top_page
from .inspect import chosen_states

if TYPE_CHECKING:
    from stateformat.model import State
    from stateformat.reading import Checkpoint
    from stateformat.store import CheckpointStore


MEASURES: Final = ("rows", "bytes")


@command("top", foreign=True, expired=True)
@click.option("--operator", metavar="UID", help="Only this operator, by uid or name.")
@click.option("--state", metavar="NAME", help="Only states of this name.")
@click.option(
    "--by",
    metavar="rows|bytes|COLUMN",
    default="rows",
    show_default=True,
    help="Rank by rows, by bytes, or by the sum of a column.",
)
@click.option("--per", multiple=True, metavar="COLUMN", help="Take only this column of the key together; repeatable.")
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=10_000),
    default=5,
    show_default=True,
    metavar="N",
    help="Keys, key groups and subtasks of each state.",
)
@click.option("--no-keys", is_flag=True, help="Only key groups and subtasks, from the manifest: reads no rows.")
def top(
    session: Session,
    address: Address,
    *,
    operator: str | None,
    state: str | None,
    by: str,
    per: tuple[str, ...],
    limit: int,
    no_keys: bool,
) -> None:
    """Show which keys, key groups and subtasks are largest.

    The skew is the largest over the mean: 1 is even, 8 means that one has eight times its share.
    Rows and stored bytes of key groups and subtasks come from the manifest and count all layers.
    Keys are read, with their layers merged: --by rows reads only the key columns, --by bytes also
    the columns whose values vary in size. The bytes of a key are those of its values in memory. The
    figures are exact, however many keys there are. Each key is shown as `ckpt get --key` takes it.

    --by COLUMN ranks keys by the sum of that column. Of keys with several columns, such as a window
    and a shop, --per shop adds up all windows of a shop. Both need DuckDB (the extra "sql").
    """
    from stateformat.inspecting import top_document

    store, checkpoint = session.checkpoint(address)
    checkpoint = session.shown(checkpoint)
    uid = None if operator is None else checkpoint.operator_uid(operator)
    states = chosen_states(checkpoint, uid, state)
    is_summed = by not in MEASURES or bool(per)
    if is_summed:
        states = _with_columns(checkpoint, states, [*per, *([] if by in MEASURES else [by])])
        if by not in MEASURES and not (states := [state for state in states if _is_number(state, by)]):
            raise click.UsageError(f"--by takes a column of numbers, and {by!r} has none")
    if is_summed and (no_keys or by == "bytes"):
        raise click.UsageError("--by COLUMN and --per are sums over keys; leave --no-keys and --by bytes out")
    with session.output.progress("Reading keys", unit="rows") as step:
        measure = by if by in MEASURES else "rows"
        found = top_document(
            checkpoint, states, by=measure, limit=limit, keys=not (no_keys or is_summed), progress=step
        )
    if is_summed:
        for entry in found:
            entry["keys"] = _summed(store, checkpoint, entry, by, per, limit)
    document = {
        "store": checkpoint.storage.url,
        "checkpoint_id": checkpoint.id,
        "created_at": words.moment(checkpoint.record.created_at_us),
        "created_at_us": checkpoint.record.created_at_us,
        "system": checkpoint.system,
        "by": by,
        "per": list(per),
        "limit": limit,
        "states": found,
    }
    session.output.show(document, top_page)


def _with_columns(checkpoint: Checkpoint, states: Sequence[State], names: Sequence[str]) -> list[State]:
    """The states with keys that have all these columns; ``InvalidInput`` if there are none."""
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.model import known_names
    from stateformat.schema import row_schema

    keyed = [state for state in states if state.key_columns]
    found = [state for state in keyed if {*names} <= {*row_schema(state).names}]
    if not found:
        columns = [*dict.fromkeys(name for state in keyed for name in row_schema(state).names)]
        missing = next((name for name in names if name not in columns), names[0])
        raise InvalidInput(
            f"no state with keys in checkpoint {checkpoint.id} has the column {missing!r}; "
            f"{known_names(columns, missing)}",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )
    return found


def _is_number(state: State, name: str) -> bool:
    import pyarrow as pa

    from stateformat.schema import row_schema

    kind = row_schema(state).field(name).type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _summed(
    store: CheckpointStore, checkpoint: Checkpoint, entry: Document, by: str, per: Sequence[str], limit: int
) -> Document:
    """What ``top_document`` has of keys, by the sum of a column, or of rows, over parts of keys."""
    from stateformat.backends.querying import Answer, Relations, quoted
    from stateformat.documents import objects

    relations = Relations.of_checkpoint(store, checkpoint)
    place = entry["operator"], entry["state"]
    table = next(one for one in relations.all if one.state and (one.state.operator, one.state.name) == place)
    names = dict(zip(table.source.schema.names, table.names, strict=True))
    columns = [*(per or entry["key_columns"])]
    key = ", ".join(f"{quoted(names[name])} as {quoted(f'key {i}')}" for i, name in enumerate(columns))
    order = ", ".join(quoted(f"key {i}") for i in range(len(columns)))
    what = "count(*)" if by in MEASURES else f"sum({quoted(names[by])})"
    answer = Answer.to(
        relations,
        f"with sums as (select {key}, count(*) as n, {what} as total from {table.sql_name} group by all) "  # noqa: S608 - quoted
        "select sums.*, count(*) over () as keys, sum(n) over ()::bigint as rows, sum(total) over ()::double as whole "
        f"from sums order by total desc nulls last, {order} limit {limit}",
    )
    rows = objects(answer.batches(), limit)
    first: Document = rows[0] if rows else {"keys": 0, "rows": 0, "whole": 0.0, "total": 0}
    whole, greatest = first["whole"] or 0, float(first["total"] or 0)
    return {
        "each": None,
        "count": first["keys"],
        "rows": first["rows"],
        "bytes": None,
        "sum": whole,
        "skew": round(greatest * first["keys"] / whole, 2) if whole else 1.0,
        "greatest": [
            {
                "key": {name: row[f"key {i}"] for i, name in enumerate(columns)},
                "key_group": None,
                "rows": row["n"],
                "bytes": None,
                "sum": None if row["total"] is None else float(row["total"]),
            }
            for row in rows
        ],
    }
