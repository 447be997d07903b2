"""What validation found, as JSON documents."""

from __future__ import annotations

from dataclasses import asdict

from ..findings import CheckpointResult, Recurring, Report, StoreReport
from .checkpoint import Document, problem_document


def report_document(report: Report) -> Document:
    """Return everything that is wrong with one checkpoint."""
    return {
        "store": report.url,
        "checkpoint_id": report.checkpoint_id,
        "level": report.level,
        "ok": report.ok,
        "checked": asdict(report.counts),
        "problems": [problem_document(problem) for problem in report.problems],
        "warnings": [problem_document(problem) for problem in report.warnings],
    }


def store_report_document(report: StoreReport) -> Document:
    """Return what was found in each checkpoint, and each problem once, with the ids that have
    it.
    """
    return {
        "store": report.url,
        "system": report.system,
        "level": report.level,
        "ok": report.ok,
        "newest": report.newest,
        "newest_whole": report.newest_whole,
        "checked": asdict(report.counts),
        "checkpoints": [_result(result) for result in report.checkpoints],
        "problems": [_finding(finding) for finding in report.of("error")],
        "warnings": [_finding(finding) for finding in report.of("warning")],
    }


def _result(result: CheckpointResult) -> Document:
    return {
        "checkpoint_id": result.checkpoint_id,
        "attempt_id": result.attempt_id,
        "kind": None if result.kind is None else result.kind.value,
        "created_at_us": result.created_at_us,
        "standing": result.standing,
        "certain": result.certain,
        "problem_count": result.problems,
        "warning_count": result.warnings,
    }


def _finding(finding: Recurring) -> Document:
    ranges = [list(pair) for pair in reversed(finding.ids)]
    return {**problem_document(finding.problem), "checkpoints": ranges}
