"""What validation finds: problems, each with a clause of SPEC.md and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ErrorKind
from .graph import shortened
from .model import CheckpointId

Severity = Literal["error", "warning"]

ADVICE_RESTORE = "`ckpt repair` says which whole checkpoint can take its place"
"""For stored bytes that are wrong."""
ADVICE_BEFORE = "no restore takes it; take a checkpoint from before that (`ckpt history` lists them)"
"""For an operator that finished in a way that no run can go on from."""
ADVICE_STORAGE = "try again; check the storage if it stays so"
ADVICE_OTHER = "take another checkpoint (`ckpt history` lists them)"
"""For a record that is no checkpoint."""
ADVICE_WRITER = (
    "the program that wrote this broke the format; fix it. If all rows can still be read, `ckpt rewrite` writes them "
    "anew; if not, take another checkpoint (`ckpt history` lists them)"
)
"""For content that contradicts itself, though its bytes are what was written."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. An error makes the checkpoint unfit to restore from; a warning does not."""

    kind: ErrorKind
    clause: str
    """The section of the specification, as ``SPEC 4.6``."""
    message: str
    """A sentence that names the object and the values that disagree."""
    advice: str = ADVICE_WRITER
    path: str = ""
    """The object, relative to the store."""
    operator: str = ""
    state: str = ""
    subtask: int | None = None
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.message} ({self.clause})"

    def to_json(self) -> dict[str, Any]:
        """Return the problem as plain values, without empty ones."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: str(value) if name == "kind" else value for name, value in found.items() if value not in ("", None)
        }


@dataclass(frozen=True, slots=True)
class Counts:
    """How much a validation looked at."""

    records: int = 0
    handles: int = 0
    segments: int = 0
    """Distinct segments."""
    bytes: int = 0
    """Bytes whose digest was computed."""
    rows: int = 0
    """Rows that were decoded."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a validation."""

    url: str
    checkpoint_id: CheckpointId | None
    """None where the store has no checkpoint at all."""
    level: Literal["quick", "full"]
    findings: tuple[Problem, ...] = ()
    counts: Counts = field(default_factory=Counts)

    def __repr__(self) -> str:
        found = f"{len(self.problems)} problems, {len(self.warnings)} warnings"
        return f"Report({shortened(self.url, 40)}, checkpoint {self.checkpoint_id}, {self.level}, {found})"

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The errors, in the order of the checks: record, manifest, content, segments."""
        return tuple(found for found in self.findings if found.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Findings that do no harm to this checkpoint."""
        return tuple(found for found in self.findings if found.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.problems


def ordered(findings: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return findings without repetitions, in the order in which they were found."""
    return tuple(dict.fromkeys(findings))
