"""DD504: a rank's own gradients held inf or NaN before the reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import Origin
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.consistency.problems import hosts_of
from ddpdoctor.rules.progress.states import to_place
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.consistency import NonFinite
    from ddpdoctor.model.facts import Job, Rank

NOT_LOOKED = "local gradients were not checked"
MAX_RANKS = 4
"""Ranks whose gradients are described one by one. Our choice."""
LONG_ROW = 20
"""Skipped steps in a row that earn a gradient scaler a warning. Our choice, see the rule's page."""
_FIXES = {
    Origin.INPUT: "check this rank's samples in that step, and fix or drop those with inf or NaN",
    Origin.PARAMETER: "check what changed the parameters in the previous step: the learning rate, an overflow in the "
    "reduction (a half-precision communication hook), or loaded weights",
    Origin.LOSS: "look for a logarithm, root or division by zero in the loss and the model, or an overflow in half "
    "precision",
    Origin.GRADIENT: "run that step on this rank with torch.autograd.set_detect_anomaly(True) to find the operation",
}


@rule("DD504", "nonfinite-grad", Severity.ERROR, "A rank had inf or NaN in its own gradients before the reduction")
def check_local_gradients(job: Job) -> Answer:
    """Report the rank whose gradients were the first to hold inf or NaN, before DDP averaged them with the others."""
    looked = [rank for rank in job.ranks if rank.nonfinite is not None]
    if not looked:
        return skipped(NOT_LOOKED)
    models = _by_model(looked)
    findings = (_judge(job, _sightings(job, looked, seen)) for seen in models)
    return judged(finding for finding in findings if finding is not None)


def _by_model(looked: Iterable[Rank]) -> list[list[tuple[Rank, NonFinite]]]:
    """Group what ranks saw by model. Groups of different ranks may share a name."""
    pairs = ((rank, seen) for rank in looked for seen in rank.nonfinite or ())
    found = grouped(((_members(rank, seen.group), seen.group, seen.model), (rank, seen)) for rank, seen in pairs)
    return list(found.values())


def _members(rank: Rank, name: str) -> tuple[int, ...]:
    """Return the ranks of a group as this rank recorded them, or nothing if it did not."""
    return next((group.ranks for group in rank.groups if group.name == name), ())


def _sightings(job: Job, looked: list[Rank], seen: list[tuple[Rank, NonFinite]]) -> list[NonFiniteStep]:
    """Return the steps of one model, the earliest first."""
    by_step: dict[int, dict[int, NonFinite]] = {}
    for rank, one in seen:
        by_step.setdefault(one.step, {})[rank.rank] = one
    members = set(_members(*_owner(seen))) or {rank.rank for rank in job.ranks}
    known = {rank.rank for rank in looked}
    return [
        NonFiniteStep(
            step=step,
            by_rank=found,
            others=tuple(sorted((members & known) - set(found))),
            unseen=tuple(sorted(members - known)),
        )
        for step, found in sorted(by_step.items())
    ]


def _owner(seen: list[tuple[Rank, NonFinite]]) -> tuple[Rank, str]:
    rank, one = seen[0]
    return rank, one.group


def _judge(job: Job, sightings: list[NonFiniteStep]) -> Problem | None:
    used = [at for at, sighting in enumerate(sightings) if sighting.used]
    if used:
        cause = sightings[_cause(sightings, used[0])]
        sureness = Confidence.MEDIUM if cause.origins == {Origin.PARAMETER} else Confidence.HIGH
        return _finding(job, cause, Severity.ERROR, sureness, _used_words(cause))
    scaled = [sighting for sighting in sightings if any(seen.scaled for seen in sighting.by_rank.values())]
    if scaled:
        return _finding(job, scaled[0], Severity.WARNING, Confidence.HIGH, _skipped_words(scaled[0]))
    summary = f"{_computed(sightings[0])}; no optimizer used it"
    return _finding(job, sightings[0], Severity.INFO, Confidence.HIGH, summary)


def _cause(sightings: list[NonFiniteStep], at: int) -> int:
    """Return the index of the first sighting that was used, or of the one a step earlier if that explains it.

    A rank that ended in between never saw that its gradients were used, but the others have NaN in their parameters.
    """
    before = at - 1
    if sightings[at].origins != {Origin.PARAMETER} or before < 0:
        return at
    return before if sightings[before].step == sightings[at].step - 1 else at


def _finding(job: Job, cause: NonFiniteStep, severity: Severity, sureness: Confidence, summary: str) -> Problem:
    return Problem(
        severity=severity,
        confidence=sureness,
        summary=summary,
        ranks=cause.ranks,
        hosts=hosts_of(job, cause.ranks),
        where=tuple(
            to_place(rank, seen.where) for rank, seen in sorted(cause.by_rank.items()) if seen.where is not None
        ),
        step=cause.step,
        tensor=next(iter(cause.first.tensors), None),
        evidence=(*_seen_by_rank(cause), *_rest(cause)),
        fix=_FIXES[cause.first.origin],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteStep:
    """Ranks whose own gradients of one step of one model were not finite."""

    step: int
    by_rank: dict[int, NonFinite]
    others: tuple[int, ...]
    """Ranks of the same group whose gradients were checked and were finite in this step."""
    unseen: tuple[int, ...]
    """Ranks of the group whose gradients were not checked."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks, sorted."""
        return tuple(sorted(self.by_rank))

    @property
    def first(self) -> NonFinite:
        """Return what the lowest of the ranks saw."""
        return self.by_rank[min(self.by_rank)]

    @property
    def used(self) -> bool:
        """Return whether training used these gradients."""
        return any(seen.used for seen in self.by_rank.values())

    @property
    def origins(self) -> set[Origin]:
        """Return what was the first to be non-finite, over all ranks."""
        return {seen.origin for seen in self.by_rank.values()}


def _used_words(cause: NonFiniteStep) -> str:
    """Return the summary of gradients that an optimizer used."""
    if cause.origins == {Origin.PARAMETER}:
        return (
            f"{rank_list(cause.ranks)} had inf or NaN in parameters before the backward of step {cause.step}, but "
            "no earlier local gradient had"
        )
    spread = "the reduction spread it to all ranks" if cause.others or cause.unseen else "the optimizer used it"
    return f"{_computed(cause)}; {spread}"


def _skipped_words(cause: NonFiniteStep) -> str:
    """Return the summary for steps that a gradient scaler skipped because of these gradients."""
    longest = max(seen.in_a_row for seen in cause.by_rank.values())
    if longest >= LONG_ROW:
        return (
            f"the gradient scaler skipped {longest} steps in a row up to step {cause.step}: the gradients of "
            f"{rank_list(cause.ranks)} have inf or NaN at any scale"
        )
    return f"{_computed(cause)}; the gradient scaler skipped the step, so the batches of all ranks are lost"


def _computed(cause: NonFiniteStep) -> str:
    value = "NaN" if any(seen.is_nan for seen in cause.by_rank.values()) else "inf"
    tensor = next(iter(cause.first.tensors), "a parameter")
    return (
        f"{rank_list(cause.ranks)} computed {value} as the gradient of {tensor} in step {cause.step}, {_first(cause)}"
    )


def _first(cause: NonFiniteStep) -> str:
    """Say what was the first to be non-finite."""
    if cause.origins == {Origin.GRADIENT}:
        return "and the loss and the input were finite"
    names = [origin.value for origin in Origin if origin in cause.origins and origin is not Origin.GRADIENT]
    return f"and its {' or '.join(names)} was not finite before"


def _seen_by_rank(cause: NonFiniteStep) -> list[str]:
    """Return what each rank saw in that step."""
    lines = [_rank_words(rank, cause.by_rank[rank]) for rank in cause.ranks[:MAX_RANKS]]
    more = len(cause.ranks) - MAX_RANKS
    return [*lines, f"the same on {more} more ranks"] if more > 0 else lines


def _rank_words(rank: int, seen: NonFinite) -> str:
    names = ", ".join(seen.tensors)
    dots = ", ..." if seen.count > len(seen.tensors) else ""
    held = "NaN" if seen.is_nan else "inf"
    note = f"; {seen.note}" if seen.note else ""
    return f"rank {rank}: {held} in the gradients of {seen.count} of {seen.of} parameters ({names}{dots}){note}"


def _rest(cause: NonFiniteStep) -> list[str]:
    """Return what is known of the group's other ranks, and how often it happened."""
    lines = []
    if cause.others:
        lines.append(
            f"the gradients of {rank_list(cause.others)} were finite in step {cause.step}, before the reduction"
        )
    if cause.unseen:
        lines.append(f"the gradients of {rank_list(cause.unseen)} were not checked")
    often = max(seen.times for seen in cause.by_rank.values())
    if not cause.used and often > 1:
        lines.append(f"this happened in {often} backwards so far")
    return lines
