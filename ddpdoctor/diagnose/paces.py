"""The usual step of each rank, for report.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.steps import Phase, pace_of

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job, Rank


def pace_rows(job: Job) -> list[dict[str, Any]]:
    """Return one row per rank that recorded steps: their number, and medians in milliseconds without waiting."""
    return [row for row in map(_row, job.ranks) if row is not None]


def _row(rank: Rank) -> dict[str, Any] | None:
    times = rank.step_times
    pace = pace_of(times) if times is not None else None
    if times is None or pace is None:
        return None
    return {
        "rank": rank.rank,
        "steps": pace.steps,
        "end_with": times.ends_with.value,
        "step_ms": round(pace.step_ms, 3),
        "before_forward_ms": round(pace.busy_ms[Phase.BEFORE], 3),
        "forward_ms": round(pace.busy_ms[Phase.FORWARD], 3),
        "between_ms": round(pace.busy_ms[Phase.BETWEEN], 3),
        "backward_ms": round(pace.busy_ms[Phase.BACKWARD], 3),
        "waited_ms": round(pace.waited_ms, 3),
    }
