"""One class for all that is wrong, whoever finds it: what, where, and what to do next.

The rules yield findings. ``begin`` and ``publish`` raise them, ``validate`` lists them, a restore
refuses for them, and ``repair`` chooses by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ErrorKind
from .graph import shortened
from .model import CheckpointId, CheckpointKind

Severity = Literal["error", "warning"]
Level = Literal["quick", "full"]
"""What a validation reads: ``quick`` the record, manifest, sizes and footers, ``full`` every
byte and row.
"""

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

UNDECIDED = frozenset(
    {
        ErrorKind.STORAGE_FAILED,
        ErrorKind.STORAGE_REFUSED,
        ErrorKind.STORAGE_UNSUITABLE,
        ErrorKind.HISTORY_UNSTABLE,
        ErrorKind.UNSUPPORTED_VERSION,
        ErrorKind.UNSUPPORTED_FEATURE,
    }
)
"""Kinds of errors after which the bytes may be right: no damage."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule that is broken. An error means that a checkpoint must not be restored, or not into
    this topology; a warning does not.
    """

    kind: ErrorKind
    clause: str
    """The section of the specification, such as ``SPEC 4.6``; empty for a rule of restores."""
    message: str
    """A sentence that names the object and the values that conflict."""
    advice: str = ADVICE_WRITER
    path: str = ""
    """The object, relative to the store."""
    operator: str = ""
    state: str = ""
    subtask: int | None = None
    severity: Severity = "error"
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of a refusal, the values for programs: strings, integers, booleans, and lists of them."""

    @property
    def code(self) -> ErrorKind:
        """The kind, as refusals call it."""
        return self.kind

    def __str__(self) -> str:
        if self.clause:
            return f"{self.severity}: {self.message} ({self.clause})"
        return f"{self.message}{self.advice and f'; {self.advice}'} [{self.kind}]"

    def to_json(self) -> dict[str, Any] | str:
        """Return the finding as plain values, without ``details``; empty ones are left out.

        Errors show a refusal as its sentence.
        """
        if not self.clause:
            return str(self)
        found = {name: getattr(self, name) for name in self.__slots__ if name != "details"}
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
    files: int = 0
    """Files of another system's checkpoint, which has no records, handles and segments."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a validation."""

    url: str
    checkpoint_id: CheckpointId | None
    """None if the store has no checkpoint."""
    level: Level
    findings: tuple[Finding, ...] = ()
    counts: Counts = field(default_factory=Counts)

    def __repr__(self) -> str:
        found = f"{len(self.problems)} problems, {len(self.warnings)} warnings"
        return f"Report({shortened(self.url, 40)}, checkpoint {self.checkpoint_id}, {self.level}, {found})"

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The errors, in the order of the checks: record, manifest, content, segments."""
        return tuple(found for found in self.findings if found.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that do not harm this checkpoint."""
        return tuple(found for found in self.findings if found.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not self.problems


Standing = Literal["whole", "damaged", "undecided", "lost", "expired"]
"""What was found of a checkpoint. ``undecided``: it, or a part of it, could not be read now, or is
of a newer version. ``lost``: other records prove that its record was there. ``expired``: retention
has removed it meanwhile."""


@dataclass(frozen=True, slots=True)
class CheckpointResult:
    """What was found of one checkpoint."""

    checkpoint_id: CheckpointId
    attempt_id: str
    """Empty where its record cannot be read."""
    kind: CheckpointKind | None
    created_at_us: int | None
    standing: Standing
    problems: int
    warnings: int
    certain: bool = True
    """False: it is cut off from the newest, and may be a stray."""


@dataclass(slots=True)
class Recurring:
    """A finding, and the checkpoints that have it."""

    problem: Finding
    """As the newest of them has it."""
    ids: list[tuple[CheckpointId, CheckpointId]]
    """Ranges of checkpoint ids, both ends included, the newest first."""

    def add(self, checkpoint_id: CheckpointId) -> None:
        """Add a checkpoint; ids come downwards."""
        low, high = self.ids[-1]
        if low == checkpoint_id:
            return
        if low == checkpoint_id + 1:
            self.ids[-1] = checkpoint_id, high
        else:
            self.ids.append((checkpoint_id, checkpoint_id))


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The validation of the checkpoints of a store, newest first."""

    url: str
    level: Level
    newest: CheckpointId | None
    checkpoints: tuple[CheckpointResult, ...] = ()
    """Those that were looked at."""
    findings: tuple[Recurring, ...] = ()
    counts: Counts = field(default_factory=Counts)
    """What was read; a segment that several checkpoints name counts once."""
    system: str | None = None
    """What it is, in a sentence, if it is another system's and no store."""

    def __repr__(self) -> str:
        bad = sum(each.standing != "whole" for each in self.checkpoints)
        return f"StoreReport({shortened(self.url, 40)}, {len(self.checkpoints)} checkpoints, {bad} not whole)"

    def of(self, severity: Severity) -> tuple[Recurring, ...]:
        """Return the findings of a severity, in the order in which they were found."""
        return tuple(finding for finding in self.findings if finding.problem.severity == severity)

    @property
    def ok(self) -> bool:
        """Whether there is no error in any checkpoint looked at."""
        return not self.of("error")

    @property
    def newest_whole(self) -> CheckpointId | None:
        """The newest checkpoint that is wholly good; None where none looked at is."""
        whole = (each.checkpoint_id for each in self.checkpoints if each.standing == "whole" and each.certain)
        return next(whole, None)


def all_messages(findings: Iterable[Finding]) -> str:
    """Return what is wrong as one sentence, each message once."""
    return "; ".join(dict.fromkeys(found.message for found in findings))


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings without repetitions, in the order in which they were found."""
    return tuple(dict.fromkeys(findings))
