"""DD704: ranks have different numbers of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import count_of, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.data import words
from ddpdoctor.rules.data.shared import Shared, judge_loaders, was_trained
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.data import EpochSeen
    from ddpdoctor.rules.data.shared import Replicas


@rule(
    "DD704",
    "uneven-batches",
    Severity.ERROR,
    "Ranks have different numbers of batches",
    after=("optimizer-drift",),
)
def check_batches(replicas: Replicas) -> Answer:
    """Report ranks that ran out of batches while others went on."""
    return judge_loaders(replicas, _judge, "all ranks have the same number of batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uneven:
    """A pass in which ranks had different numbers of batches."""

    number: int
    batches: Mapping[int, int]
    going_on: bool
    """Whether the ranks with the most batches had not reached their end."""
    short: tuple[int, ...]
    """Ranks that reached the end of their batches and trained on fewer than others."""


def _judge(replicas: Replicas, shared: Shared) -> Answer:
    name = words.name_of(shared.first())
    if any(loader.in_join for loader in shared.seen.values()):
        return skipped(f"{name}: it is used inside join, which handles uneven batches")
    ended = False
    for number, passes in shared.passes().items():
        found = _uneven(replicas, shared, number, passes)
        if found is not None:
            return judged([_finding(replicas, shared, found)])
        ended = ended or sum(epoch.complete for epoch in passes.values()) > 1
    return passed() if ended else skipped(f"{name}: fewer than two ranks completed a pass")


def _uneven(replicas: Replicas, shared: Shared, number: int, passes: Mapping[int, EpochSeen]) -> _Uneven | None:
    if replicas.trained_only:
        passes = {rank: epoch for rank, epoch in passes.items() if was_trained(epoch)}
    batches = {rank: epoch.batches for rank, epoch in passes.items()}
    short = tuple(
        rank
        for rank, epoch in passes.items()
        if epoch.complete
        and any(_went_on(shared, rank, other, batches) for other in passes)
        and (shared.seen[rank].epochs[-1].complete or not replicas.trained_only)
    )
    going_on = bool(batches) and not all(passes[rank].complete for rank in _longest(batches))
    return _Uneven(number=number, batches=batches, going_on=going_on, short=short) if short else None


def _longest(batches: Mapping[int, int]) -> list[int]:
    most = max(batches.values())
    return sorted(rank for rank, count in batches.items() if count == most)


def _went_on(shared: Shared, rank: int, other: int, batches: Mapping[int, int]) -> bool:
    """Return whether another rank got more batches in a pass and trained on more over all passes."""
    mine, others = shared.seen[rank].trained_batches, shared.seen[other].trained_batches
    return batches[other] > batches[rank] and (others > mine or not others)


def _finding(replicas: Replicas, shared: Shared, found: _Uneven) -> Problem:
    loader = shared.first()
    longest = _longest(found.batches)
    most = f"{found.batches[longest[0]]}{' so far' if found.going_on else ''}"
    fewest = {rank: found.batches[rank] for rank in found.short}
    return Problem(
        severity=Severity.ERROR if replicas.ended_badly else Severity.WARNING,
        ranks=found.short,
        hosts=words.hosts_of(replicas, found.short),
        where=words.places_of(shared, found.short),
        summary=f"{rank_list(found.short)} {verb(found.short, 'has', 'have')} {_numbers(fewest)} in pass "
        f"{found.number}, but {rank_list(longest)} {verb(longest, 'has', 'have')} {most}: {words.name_of(loader)}",
        evidence=_evidence(shared, found),
        fix="give all ranks the same number of batches (DistributedSampler, drop_last=True), or wrap the loop in "
        "`with model.join():`",
    )  # fmt: skip


def _evidence(shared: Shared, found: _Uneven) -> tuple[str, ...]:
    trained = {rank: loader.trained_batches for rank, loader in shared.seen.items()}
    samples = {rank: loader.samples for rank, loader in shared.seen.items() if loader.samples is not None}
    return tuple(filter(None, (
        f"batches of pass {found.number}: {words.by_rank(dict(found.batches))}",
        f"batches trained on in total: {words.by_rank(dict(trained))}" if any(trained.values()) else "",
        f"samples: {words.by_rank(dict(samples))}" if samples else "",
        words.shared_out(shared.first(), shared.size) if len(set(samples.values())) == 1 else "",
    )))  # fmt: skip


def _numbers(batches: Mapping[int, int]) -> str:
    counts = sorted(set(batches.values()))
    if len(counts) == 1:
        return count_of(counts[0], "batch", "batches")
    return f"{counts[0]} to {counts[-1]} batches"
