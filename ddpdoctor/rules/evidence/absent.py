"""Finds the ranks that did not come to where others wait, and wait for nobody themselves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Absent, Doing, Finished, Reached, Shown, Stacked, Waiting
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import rank_list, verb
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.evidence.collecting import KILLED, SAMPLE_AGAIN, collect
from ddpdoctor.rules.evidence.stacks import innermost
from ddpdoctor.rules.evidence.state import Ruling, last_samples
from ddpdoctor.rules.evidence.words import MOST_QUOTES, coverage, places, quote, quotes, steps_words, who_words
from ddpdoctor.rules.progress.states import place_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.findings import Place
    from ddpdoctor.rules.evidence.state import RunState

# The sentences about ranks that did not come to where others wait


_STATES = {
    Doing.OWN: "is in its own code", Doing.DATA: "waits for a DataLoader worker", Doing.EXIT: "is exiting",
    Doing.INIT: "is in init_process_group", Doing.DEVICE: "waits for its device", Doing.COLLECTIVE: "waits for others",
    Doing.UNKNOWN: "is elsewhere",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Ranks that did not come to where others wait."""

    ranks: list[int]
    facts: Sequence[Absent]
    """What says so."""
    kind: str
    """What became of them."""
    confidence: Confidence
    contradicted: Sequence[Absent] = ()
    """What weaker sources say of other ranks."""


def absence(state: RunState, one: Absence, samples: dict[int, Stacked]) -> Problem:
    """Return the problem of ranks that did not come to where others wait."""
    ranks, absent, kind = one.ranks, one.facts, one.kind
    operation = absent[0].operation
    waiters = sorted({rank for fact in absent for rank in fact.waiters} - set(ranks)) or [
        rank for rank in state.waiting if rank not in ranks
    ]
    frames = [(rank, innermost(samples[rank].frames)) for rank in ranks if rank in samples]
    workers = _workers(state, samples, ranks)
    where = (*places(frames), *_worker_places(workers))
    target = "init_process_group" if absent[0].in_init else operation.words()
    did = {"early-exit": "exited before", "missing": "never joined"}.get(kind, "did not call")
    at = f"{verb(ranks, 'it is', 'they are')} {place_words(where[0])}, and " if where and kind == "stuck" else ""
    busy = next((fact.busy for fact in absent if fact.busy is not None), None)
    if busy is not None and not at:
        at = f'the last it wrote is "{busy.task}{f" {busy.share} %" if busy.share is not None else ""}", and '
    wait = f"{rank_list(waiters)} {verb(waiters, 'is', 'are')} waiting" if waiters else "other ranks are waiting"
    late = any(fact.late for fact in absent) and kind == "stuck"
    if late:
        did = "came too late to"
        wait = f"{rank_list(waiters) if waiters else 'other ranks'} had reached the time limit, waiting"
    who = who_words(state, ranks)
    whom = f" for {verb(ranks, 'it', 'them')}"
    if one.confidence is Confidence.LOW:
        did = {"early-exit": "may have exited before", "missing": "may not have joined"}.get(
            kind, "may have come too late to" if late else "may not have called"
        )
        whom = ""
    summary = f"{who} {did} {target}; {at}{wait}{whom}"
    if kind == "killed":
        summary = (
            f"{who} {verb(ranks, 'is', 'are')} gone: NCCL's RAS considers {verb(ranks, 'it', 'them')} dead; {wait}"
        )
        if one.confidence is Confidence.LOW:
            summary = f"{who} may be gone: NCCL's RAS considers {verb(ranks, 'it', 'them')} dead; {wait}"
    return Problem(
        summary=summary,
        confidence=one.confidence,
        ranks=tuple(ranks),
        hosts=state.hosts_of(ranks),
        where=where,
        evidence=(
            *_doing_words(state, samples, ranks),
            *_worker_words(workers),
            *quotes(absent),
            *quotes([busy] if busy is not None else []),
            *(f"a weaker source disagrees: {words}" for words in quotes(one.contradicted)),
            *quotes(fact for fact in state.all(Waiting) if fact.who.rank in waiters),
            *_waiter_places(state, samples, waiters),
            *_reached_words(state, ranks),
            *steps_words(state),
            *coverage(state),
        ),
        fix=_FIND_END
        if kind == "killed"
        else _LET_IT_END
        if busy is not None and not where
        else _absence_fix(ranks, where, workers)
        if where or not late
        else f"find out what {rank_list(ranks)} did before that call; if it may take so long, raise the limit: "
        "`init_process_group(timeout=timedelta(hours=2))`",
    )


_FIND_END = f"find out what ended the process or its host: its standard error, {KILLED}"
_LET_IT_END = (
    "do this work once before the job (a prepared data set, a filled cache), or let all ranks share it; else raise the "
    "limit: `init_process_group(timeout=timedelta(hours=2))`"
)


def _doing_words(state: RunState, samples: dict[int, Stacked], ranks: Iterable[int]) -> list[str]:
    found = []
    for rank in ranks:
        if rank in samples:
            sample = samples[rank]
            at = place_words(innermost(sample.frames))
            twice = " in every sample" if len(state.samples_of(rank)) > 1 else ""
            found.append(f"rank {rank} {_STATES[sample.doing]}, {at}{twice} ({quote(sample)})")
    return found


def _workers(state: RunState, samples: dict[int, Stacked], ranks: Iterable[int]) -> list[Stacked]:
    """Return the last stacks of the workers that a rank's loader waits for."""
    loading = [rank for rank in ranks if rank in samples and samples[rank].doing is Doing.DATA]
    found = {fact.who.pid: fact for rank in loading for fact in state.of(rank, Stacked) if fact.worker}
    return list(found.values())[:MOST_QUOTES]


def _worker_places(workers: Iterable[Stacked]) -> tuple[Place, ...]:
    return tuple(dict.fromkeys(places((fact.who.rank or 0, innermost(fact.frames)) for fact in workers)))


def _worker_words(workers: Iterable[Stacked]) -> list[str]:
    found = [(fact, innermost(fact.frames)) for fact in workers]
    return [
        f"the worker of rank {fact.who.rank} with pid {fact.who.pid} is {place_words(frame)}"
        for fact, frame in found
        if frame is not None and fact.who.pid is not None
    ]


def _waiter_places(state: RunState, samples: dict[int, Stacked], waiters: Iterable[int]) -> list[str]:
    """Return at which lines the others wait: from stacks, else from where the operation was enqueued."""
    lines: dict[str, list[int]] = defaultdict(list)
    enqueued = {fact.who.rank: fact.frames for fact in state.all(Waiting) if fact.frames}
    for rank in waiters:
        frames = samples[rank].frames if rank in samples else enqueued.get(rank, ())
        if frames:
            lines[place_words(innermost(frames))].append(rank)
    return [f"{rank_list(ranks)} {verb(ranks, 'waits', 'wait')} {place}" for place, ranks in lines.items()]


def _reached_words(state: RunState, ranks: Iterable[int]) -> list[str]:
    found = []
    for fact in state.all(Reached):
        if fact.who.rank in set(ranks) and fact.enqueued is not None:
            group = f" of {fact.group_words}" if fact.group_words else ""
            found.append(f"rank {fact.who.rank} had {fact.done_words()} collective #{fact.enqueued}{group}")
    return list(dict.fromkeys(found))[:MOST_QUOTES]


def _absence_fix(ranks: list[int], where: tuple[Place, ...], workers: Sequence[Stacked]) -> str:
    if workers and (frame := innermost(workers[0].frames)) is not None:
        return f"check what the DataLoader workers of {rank_list(ranks)} do {place_words(frame)}"
    if where:
        does = verb(ranks, "does", "do")
        return f"check what {rank_list(ranks)} {does} {place_words(where[0])}, and why the other ranks do not"
    its = "its" if len(ranks) == 1 else "their"
    return (
        f"find out what {rank_list(ranks)} did instead: {its} log and standard error; "
        f"{its} stack, if the job still runs, with `ddpdoctor attach` on {its} host"
    )


def unseen_suspects(ranks: Iterable[int]) -> str:
    """Say that the cause may be with ranks that were not seen."""
    return f"others wait for {rank_list(ranks)}, but there is no evidence from it, so the cause is unknown"


def slow_suspects(state: RunState, ranks: Sequence[int], samples: dict[int, Stacked]) -> str:
    """Say that others wait for ranks that move: they may be slow, or in an endless loop."""
    at = "; ".join(place_words(innermost(samples[rank].frames)) for rank in ranks if rank in samples)
    return (
        f"others wait for {who_words(state, ranks)}, which moved between the samples ({at}): "
        "it may just be slow, or in an endless loop"
    )


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
        return Ruling(reason=unseen_suspects(ranks), collect=collect(state))
    ranks = _least_able(ranks, samples)
    those = [fact for fact in absent if fact.who.rank in ranks]
    if all(fact.moves for fact in those):
        return Ruling(reason=slow_suspects(state, ranks, samples), collect=(SAMPLE_AGAIN,))
    kind = _kind(state, ranks, those, samples)
    contradicted = [fact for fact in roots if fact.who.rank in others and not set(fact.waiters).isdisjoint(ranks)]
    sure = Confidence.LOW if contradicted else _sureness(state, ranks, those)
    found = Absence(ranks=ranks, facts=those, kind=kind, confidence=sure, contradicted=contradicted)
    return Ruling(kind=kind, problem=absence(state, found, samples))


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
