"""The attempts of a job that its launcher restarted: how each of them went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Finding, JobStatus, RankRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt, as ``data.sections`` of a report has it. Times are ISO 8601, UTC."""

    attempt: int
    """Counted from 0, as torchrun does."""
    started_at: str | None
    ended_at: str | None
    seconds: float | None
    """From the start of its first rank to the end of its last."""
    status: JobStatus
    """Of one that was restarted: failed, or interrupted where nothing was wrong with it, as when a node has joined."""
    verdict: Finding | None
    findings: tuple[Finding, ...]
    ranks: tuple[RankRow, ...]


def restarted_words(attempt: int) -> str:
    """Return how the summary of a finding begins that an earlier attempt had."""
    return f"attempt {attempt}, since restarted: "
