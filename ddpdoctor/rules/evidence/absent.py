"""Finds the ranks that did not come to where others wait, and wait for nobody themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Absent, Doing, Finished, Shown, Stacked, Waiting
from ddpdoctor.model.findings import Confidence
from ddpdoctor.rules.evidence import absence_words as words
from ddpdoctor.rules.evidence.collecting import SAMPLE_AGAIN, collect
from ddpdoctor.rules.evidence.state import Ruling, last_samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.rules.evidence.state import RunState

ALL_RANKS = "all ranks"
"""What RAS's reader calls the communicator that has all ranks."""


def find_absent(state: RunState) -> Ruling | None:
    """Return a ruling about ranks that are absent. Of sources that contradict each other the strongest counts."""
    absent = [fact for fact in state.all(Absent) if fact.who.rank is not None]
    if not absent:
        return None
    samples = last_samples(state.facts)
    roots = [fact for fact in absent if not _waits(state, fact, samples.get(_rank(fact)))] or absent
    roots = [fact for fact in roots if not _waits_for(_rank(fact), roots)] or roots
    strongest = max(fact.shown for fact in roots)
    ranks = sorted({_rank(fact) for fact in roots if fact.shown is strongest})
    others = sorted({_rank(fact) for fact in roots} - set(ranks))
    unseen = [rank for rank in ranks if rank not in state.seen and not _is_known(absent, rank)]
    if unseen:
        return Ruling(reason=words.unseen_suspects(ranks), collect=collect(state))
    ranks = _least_able(ranks, samples)
    those = [fact for fact in absent if fact.who.rank in ranks]
    if all(fact.moves for fact in those):
        return Ruling(reason=words.slow_suspects(state, ranks, samples), collect=(SAMPLE_AGAIN,))
    kind = _kind(state, ranks, those, samples)
    contradicted = [fact for fact in roots if fact.who.rank in others and not set(fact.waiters).isdisjoint(ranks)]
    sure = Confidence.LOW if contradicted else _sureness(state, ranks, those)
    found = words.Absence(ranks=ranks, facts=those, kind=kind, confidence=sure, contradicted=contradicted)
    return Ruling(kind=kind, problem=words.absence(state, found, samples))


def _rank(fact: Absent) -> int:
    assert fact.who.rank is not None
    return fact.who.rank


def _is_known(absent: Iterable[Absent], rank: int) -> bool:
    """Return whether a rank is absent for sure, or its lines are lacking where those of the others stand."""
    return any(fact.certain or fact.expected for fact in absent if fact.who.rank == rank)


def _waits(state: RunState, absent: Absent, sample: Stacked | None) -> bool:
    """Return whether a rank that did not come waits elsewhere for others."""
    if sample is not None:
        return sample.doing in {Doing.COLLECTIVE, Doing.DEVICE}
    waits = (fact for fact in state.of(_rank(absent), Waiting) if not fact.in_init)
    return any(not _is_contradicted(fact, absent) for fact in waits)


def _is_contradicted(wait: Waiting, absent: Absent) -> bool:
    """Return whether NCCL did not launch what torch waits for: the device has not come to it."""
    of_all = absent.shown is Shown.COUNTS and absent.operation.group_words == ALL_RANKS
    return of_all and wait.timed_out and not wait.operation.group


def _waits_for(rank: int, absent: Iterable[Absent]) -> bool:
    """Return whether a rank waits for another one that is absent, and not that one for it."""
    others = {_rank(fact) for fact in absent if rank in fact.waiters and _rank(fact) != rank}
    back = {waiter for fact in absent if _rank(fact) == rank for waiter in fact.waiters}
    return bool(others - back)


def _least_able(ranks: list[int], samples: dict[int, Stacked]) -> list[int]:
    """Return the ranks that are seen in their own code, a loader or at their exit, if some are; else all of them."""
    elsewhere = [
        rank for rank in ranks if rank in samples and samples[rank].doing in {Doing.OWN, Doing.DATA, Doing.EXIT}
    ]
    return elsewhere or ranks


def _kind(state: RunState, ranks: list[int], absent: list[Absent], samples: dict[int, Stacked]) -> str:
    finished = all(state.of(rank, Finished) for rank in ranks)
    exiting = all(rank in samples and samples[rank].doing is Doing.EXIT for rank in ranks)
    if finished or exiting:
        return "early-exit"
    if all(any(fact.dead for fact in absent if fact.who.rank == rank) for rank in ranks):
        return "killed"
    return "missing" if all(fact.in_init for fact in absent) and not any(rank in samples for rank in ranks) else "stuck"


def _sureness(state: RunState, ranks: list[int], absent: Sequence[Absent]) -> Confidence:
    """High only if the absent rank is seen doing something else in two samples; low if ranks were not seen."""
    counted = all(fact.shown is Shown.COUNTS for fact in absent)  # RAS speaks for all ranks
    if any(not fact.certain for fact in absent) or (state.unseen and not counted):
        return Confidence.LOW
    twice = all(len(state.samples_of(rank)) > 1 for rank in ranks)
    return Confidence.HIGH if twice else Confidence.MEDIUM
