"""What a user may request of a rewrite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import JobGraph
from stateformat.keys import MAX_PARALLELISM_LIMIT, key_hash
from stateformat.segments import WriteOptions


@dataclass(frozen=True)
class Transform:
    """A function that is applied to all rows of a state; without a function, columns are only
    renamed.
    """

    function: Callable[[Any], Any] | None = None
    """Takes a ``pa.Table`` and returns one (or a DataFrame that supports Arrow). It is called once
    with no rows, then with each piece of the state, up to 16 MiB, on any worker and maybe again:
    its result must depend only on its argument. A piece has the columns of the state's current
    schema and those of its kind (``_map_key``, ``_index``, ``_timestamp``, ``_tag``), layers
    merged.
    """
    renames: Mapping[str, str] = field(default_factory=dict)
    """New names of columns by their old ones; the columns keep their field ids. Columns that the
    function has not renamed itself are renamed after it.
    """
    rekey: bool = False
    """Whether keys change, so that rows are assigned to key groups and subtasks anew."""
    name: str = ""
    """What messages call the function; by default its own name."""

    @property
    def label(self) -> str:
        """What messages call the function."""
        if self.name or self.function is None:
            return self.name or "a renaming of columns"
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{self.function.__module__}:{name}"


@dataclass(frozen=True)
class RewriteSpec:
    """What the checkpoint is to be afterwards. Anything not given stays as it is.

    In any case layers are merged, every row has its state's current schema, and each state of each
    subtask is one segment.
    """

    parallelism: int | None = None
    """For every operator that is not fully finished."""
    per_operator: Mapping[str, int] = field(default_factory=dict)
    """Parallelism by uid; takes precedence over ``parallelism``."""
    max_parallelism: int | None = None
    """For every operator: keys are hashed to key groups anew. A fully finished operator whose
    parallelism is greater keeps its own max parallelism, which no longer has a meaning.
    """
    renames: Mapping[str, str] = field(default_factory=dict)
    """Old uid to new uid. Edges and states follow."""
    states: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """New names of states, by their old uid and name."""
    columns: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)
    """By old uid and name of a state, new names of columns by their old ones. ``column.field``
    names a field of a struct, which becomes a column of its own."""
    transforms: Mapping[tuple[str, str], Transform] = field(default_factory=dict)
    """Functions applied to the rows of states, by their old uid and name."""
    key_hash: str | None = None
    """For every operator: the name of the function that hashes its keys, to key groups anew."""
    verify_keys: bool = False
    """Whether to compare the key group of each row with that of its key, if the hash is known.
    stateformat's own reader has done so already; for other systems' checkpoints nothing has.
    """
    options: WriteOptions = field(default_factory=WriteOptions)
    """Codec, encoding and row groups of the new segments."""

    def check(self, graph: JobGraph) -> None:
        """Raise ``InvalidInput`` for values that are never right; the planner checks the rest."""
        if self.max_parallelism is not None and not 1 <= self.max_parallelism <= MAX_PARALLELISM_LIMIT:
            raise InvalidInput(
                f"max parallelism {self.max_parallelism} is not within 1 to {MAX_PARALLELISM_LIMIT}; choose another",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
        if self.key_hash is not None:
            key_hash(self.key_hash)
        for uid in (*self.per_operator, *self.renames):
            graph.operator(uid)
        after = [self.renamed(operator.uid) for operator in graph.operators]
        twice = sorted({uid for uid in after if after.count(uid) > 1})
        if self.renames and (twice or not all(after)):
            raise InvalidInput(
                f"after the renames two operators would be called {twice[0]!r}; uids are unique"
                if twice
                else "an operator cannot have an empty name; give a uid",
                kind=ErrorKind.INVALID_GRAPH,
            )

    def renamed(self, uid: str) -> str:
        """Return the uid that an operator will have."""
        return self.renames.get(uid, uid)
