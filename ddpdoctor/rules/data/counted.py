"""What exact counts of indices add to their sums. Only `check-data` has such counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.data.contents import same_contents

if TYPE_CHECKING:
    from ddpdoctor.model.data import Drawn, Pass
    from ddpdoctor.rules.data.shared import Replicas


def with_counts(replicas: Replicas, answer: Answer) -> Answer:
    """Add exact counts to the findings from sums."""
    words = [_count_words(one) for one in _counted(replicas) if one.unique is not None][:1]
    return replace(answer, problems=tuple(replace(one, evidence=(*words, *one.evidence)) for one in answer.problems))


def find_overlap(replicas: Replicas) -> Answer | None:
    """Judge shares by samples that overlap or are left out, which sums do not show. None without counts."""
    counted = [one for one in _counted(replicas) if one.unique is not None and one.missed is not None]
    if not counted or replicas.drawn is None or replicas.size == 1:
        return None
    for one in counted:
        if any(row.repeated for row in one.ranks):
            return skipped("ranks draw with replacement, or repeat samples: shares are not meant to fit")
        beyond = _drawn_in_vain(one, replicas.drawn)
        if beyond and not one.alike:
            problem = _overlap(one, beyond)
            return judged([problem], problem.summary)
    return passed("the shares of the ranks fit together")


def _counted(replicas: Replicas) -> tuple[Pass, ...]:
    """Return the passes with exact counts, or nothing if equal indices do not mean equal samples."""
    loaders = [loader for those in replicas.loaders.values() for loader in those]
    if replicas.drawn is None or not loaders:
        return ()
    first = loaders[0]
    alike = all(same_contents((first, other), (first.epochs[0], other.epochs[0])) is not False for other in loaders[1:])
    return replicas.drawn.passes if alike else ()


def _count_words(one: Pass) -> str:
    return (
        f"counted index by index in pass {one.number}: {one.drawn} drawn in all, {one.unique} different, "
        f"{one.shared} of them by two ranks or more; {one.missed} drawn by none"
    )


def _drawn_in_vain(one: Pass, drawn: Drawn) -> int:
    """Count samples drawn again while others are not drawn at all, which padding never causes."""
    return min(one.drawn - (one.unique or 0), one.missed or 0) if drawn.samples else 0


def _overlap(one: Pass, beyond: int) -> Problem:
    return Problem(
        severity=Severity.WARNING,
        confidence=Confidence.MEDIUM,
        ranks=tuple(row.rank for row in one.ranks),
        summary=f"in pass {one.number} {beyond} samples are drawn once more than needed, and as many by no rank",
        evidence=(_count_words(one),),
        fix="let one order decide for all ranks: the same seed on all, each rank its own part; or DistributedSampler",
    )
