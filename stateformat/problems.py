"""What validation finds: problems, each with the clause of SPEC.md that it breaks and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ErrorKind
from .graph import shortened
from .model import CheckpointId

Severity = Literal["error", "warning"]

ADVICE_RESTORE = "`ckpt repair` says which whole checkpoint can take its place"
"""For stored bytes that are wrong: nothing can mend them."""
ADVICE_BEFORE = "no restore takes it; take a checkpoint from before that (`ckpt history` lists them)"
"""For what has finished in a way that cannot be gone on from."""
ADVICE_OTHER = "take another checkpoint (`ckpt history` lists them)"
"""For what is no checkpoint."""
ADVICE_WRITER = (
    "the program that wrote this broke the format; fix it. If all rows can still be read, `ckpt rewrite` writes them anew; "
    "if not, take another checkpoint (`ckpt history` lists them)"
)
"""For content that contradicts itself though its bytes are what was written."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. ``message`` is a sentence that names the object and the values that disagree; ``advice`` the next step.

    ``clause`` is a section of the specification, as ``SPEC 4.6``. ``path`` is the object, relative to the store; the rest
    says to which part of the checkpoint it belongs, as far as it does. An error makes the checkpoint unfit to restore
    from; a warning does not.
    """

    kind: ErrorKind
    clause: str
    message: str
    advice: str = ADVICE_WRITER
    path: str = ""
    operator: str = ""
    state: str = ""
    subtask: int | None = None
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} ({self.clause})"

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, without what is empty."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: str(value) if name == "kind" else value for name, value in found.items() if value not in ("", None)
        }


@dataclass(frozen=True, slots=True)
class Counts:
    """How much was looked at: records, handles, distinct segments, bytes whose digest was taken, rows that were decoded."""

    records: int = 0
    handles: int = 0
    segments: int = 0
    bytes: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a validation came to. ``checkpoint_id`` is None where the store has no checkpoint at all."""

    url: str
    checkpoint_id: CheckpointId | None
    level: Literal["quick", "full"]
    findings: tuple[Problem, ...] = ()
    counts: Counts = field(default_factory=Counts)

    def __repr__(self) -> str:
        found = f"{len(self.problems)} problems, {len(self.warnings)} warnings"
        return f"Report({shortened(self.url, 40)}, checkpoint {self.checkpoint_id}, {self.level}, {found})"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The errors, in the order of the checks: record, manifest, content, segments in order of the manifest."""
        return tuple(found for found in self.findings if found.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What is odd and does no harm to this checkpoint."""
        return tuple(found for found in self.findings if found.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.problems


def ordered(findings: Iterable[Problem]) -> tuple[Problem, ...]:
    """Findings without repetitions, in the order in which they were found."""
    return tuple(dict.fromkeys(findings))
