"""Functions applied to the rows of a Structured Streaming query, in a copy that it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput

from ..foreign.spark.repartition.plan import RepartitionPlan, plan_repartition
from ..foreign.spark.source import SparkSource
from .transforming import Transform, Transformation, plan_transformation


@dataclass(frozen=True)
class _InTypes:
    """A function whose integers and floats get the types that they had: ``if_else(…, 5, n)`` makes
    64 bits of 32. A float is rounded; a number that does not fit is refused.
    """

    function: Callable[[Any], Any]

    def __call__(self, rows: pa.Table) -> Any:
        made = self.function(rows)
        if not isinstance(made, pa.Table):
            return made
        for at, name in enumerate(made.column_names):
            was = rows.schema.field(name).type if name in rows.column_names else pa.null()
            now = made.schema.field(at).type
            if now != was and any(kind(was) and kind(now) for kind in (pa.types.is_integer, pa.types.is_floating)):
                fitted = made.column(at).cast(was)
                if pa.types.is_floating(was) and not pc.is_finite(fitted).equals(pc.is_finite(made.column(at))):
                    raise ValueError(f"column {name!r} has a number that {was} cannot hold")
                made = made.set_column(at, name, fitted)
        return made


def plan_query_rewrite(
    source: SparkSource,
    target_url: str,
    transforms: Mapping[tuple[str, str], Transform],
    parallelism: int | None = None,
) -> RepartitionPlan:
    """Plan the copy of a batch in which functions have changed rows, by operator and state.

    Keys stay in their partitions unless a transform rekeys. Raises as ``plan_repartition``, and
    ``InvalidInput`` for columns that are not those of the query.
    """
    functions: dict[tuple[str, str], Transformation] = {}
    for place, transform in transforms.items():
        if transform.function is not None:
            transform = replace(transform, function=_InTypes(transform.function), name=transform.label)
        made = plan_transformation(source.record.state(*place), transform, *place)
        other = [one for one in made.columns() if one.change != "kept"]
        if other:
            name = other[0].column or other[0].was
            raise InvalidInput(
                f"{transform.label} makes column {name!r} of {'/'.join(place)} {other[0].change}, and the program of "
                "the query says which columns its state has: return those, with their names and types",
                kind=ErrorKind.SCHEMA_MISMATCH,
                operator=place[0],
                state=place[1],
                column=name,
            )
        functions[place] = made
    return plan_repartition(source.folder, target_url, parallelism, source=source, functions=functions)
