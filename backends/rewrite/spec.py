"""What a user may ask of a rewrite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import JobGraph
from stateformat.keys import MAX_PARALLELISM_LIMIT, key_hash
from stateformat.segments import WriteOptions


@dataclass(frozen=True)
class RewriteSpec:
    """How the checkpoint is to be afterwards. What is left out stays as it is.

    In any case layers are merged, every row has its state's current schema, and each state of each
    subtask is one segment.
    """

    parallelism: int | None = None
    """For every operator that is not fully finished."""
    per_operator: Mapping[str, int] = field(default_factory=dict)
    """Parallelism by uid; goes before ``parallelism``."""
    max_parallelism: int | None = None
    """For every operator: keys are hashed to key groups anew. A fully finished operator whose
    parallelism is greater keeps its own max parallelism, which means nothing any more."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Old uid to new uid. Edges and states follow."""
    states: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """New names of states, by their old uid and name."""
    columns: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)
    """By old uid and name of a state, new names of columns by their old ones. ``column.field``
    names a field of a struct, which becomes a column of its own."""
    key_hash: str | None = None
    """For every operator: the name of the function that hashes its keys, to key groups anew."""
    verify_keys: bool = False
    """Whether to compare the key group of each row with that of its key, where the hash is known.
    Our own reader has done so; of foreign checkpoints nobody has."""
    options: WriteOptions = field(default_factory=WriteOptions)
    """Codec, encoding and row groups of the new segments."""

    def check(self, graph: JobGraph) -> None:
        """Raises ``InvalidInput`` for values that are never right; the planner checks the rest."""
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
                else "an operator cannot be renamed to nothing; give a uid",
                kind=ErrorKind.INVALID_GRAPH,
            )

    def renamed(self, uid: str) -> str:
        """The uid that an operator will have."""
        return self.renames.get(uid, uid)
