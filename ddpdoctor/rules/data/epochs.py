"""DD702: every epoch has the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome, Severity
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.data import words
from ddpdoctor.rules.data.shared import Shared, judge_loaders, was_trained
from ddpdoctor.rules.progress.states import to_place
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.data import Drawn, EpochSeen, LoaderSeen
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.data.shared import Replicas

MIN_DRAWN = 2
"""A pass of one index has only one order."""


@rule("DD702", "no-set-epoch", Severity.ERROR, "Every epoch has the same order", after=("optimizer-drift",))
def check_epochs(replicas: Replicas) -> Answer:
    """Report a distributed sampler that shuffles, but whose epoch is never set."""
    drawn = replicas.drawn
    more = "" if drawn is None else "; this check does not look for set_epoch in your script"
    answer = judge_loaders(replicas, _judge, f"passes have different orders{more}")
    if answer.outcome is not Outcome.PASSED or drawn is None or not _is_stubborn(replicas, drawn):
        return answer
    return judged([_stubborn(replicas, drawn)], _stubborn(replicas, drawn).summary)


def _is_stubborn(replicas: Replicas, drawn: Drawn) -> bool:
    """Return whether a sampler gives the same order in each pass, although ``set_epoch`` was called."""
    loaders = [loader for those in replicas.loaders.values() for loader in those]
    return drawn.set_epoch and all(
        len(one.epochs) > 1 and len({epoch.order for epoch in one.epochs}) == 1 for one in loaders
    )


def _stubborn(replicas: Replicas, drawn: Drawn) -> Problem:
    ranks = tuple(replicas.hosts)
    return Problem(
        ranks=ranks,
        summary=f"{rank_list(ranks)} draw in the same order in each pass, although the script calls set_epoch",
        evidence=(f"sampler {drawn.sampler} with shuffling enabled",),
        fix="make the sampler's order depend on its epoch, for example with a generator seeded with seed + epoch",
    )


def _judge(replicas: Replicas, shared: Shared) -> Answer:
    reason = _unfit(replicas, shared)
    if reason:
        return skipped(f"{words.name_of(shared.first())}: {reason}")
    passes = {rank: _trained(replicas, shared.seen[rank]) for rank in shared.ranks}
    if any(_is_reordered(epochs) for epochs in passes.values()):
        return passed()
    return judged([_finding(replicas, shared, passes)])


def _unfit(replicas: Replicas, shared: Shared) -> str:
    """Return why it is unknown whether a loader reshuffles, or "" if it can be judged."""
    for loader in shared.seen.values():
        sampler = loader.sampler
        if sampler is None or sampler.replicas is None:
            return "it has no distributed sampler"
        if not sampler.shuffle:
            return "its sampler does not shuffle, as far as known"
        passes = _trained(replicas, loader)
        if len(passes) < 2 or any(epoch.drawn < MIN_DRAWN for epoch in passes):
            return "fewer than two training passes were seen on each rank"
        if any(epoch.set_epoch is None or not epoch.first for epoch in passes):
            return "its sampler has no epoch, or its samples were not seen"
    return ""


def _trained(replicas: Replicas, loader: LoaderSeen) -> list[EpochSeen]:
    return [epoch for epoch in loader.epochs if was_trained(epoch) or not replicas.trained_only]


def _is_reordered(epochs: list[EpochSeen]) -> bool:
    """Return whether the epoch was set to another value, or the order changed."""
    one = epochs[0]
    for other in epochs[1:]:
        if other.set_epoch != one.set_epoch or other.first != one.first:
            return True
        if other.drawn == one.drawn and other.order != one.order:
            return True
    return False


def _finding(replicas: Replicas, shared: Shared, passes: dict[int, list[EpochSeen]]) -> Problem:
    loader = shared.first()
    seen = passes[shared.ranks[0]]
    count = loader.passes if len(seen) == len(loader.epochs) else len(seen)
    calls = _stray_calls(shared, passes)
    called = next(iter(calls.values()), None)
    why = (
        f"the script never calls set_epoch on the sampler of {words.name_of(loader)}, or always with the same number"
        if called is None
        else f"{_line(called)} calls set_epoch on another sampler, not that of {words.name_of(loader)}"
    )
    return Problem(
        ranks=shared.ranks,
        hosts=words.hosts_of(replicas, shared.ranks),
        where=(*(to_place(rank, site) for rank, site in calls.items()), *words.places_of(shared, shared.ranks)),
        summary=f"{count} epochs had the same order: {why}",
        evidence=_evidence(shared, seen, called),
        fix="call sampler.set_epoch(epoch) before the loop over the DataLoader, in each epoch and on all ranks"
        if called is None
        else "pass that sampler to the DataLoader (sampler=...), or call loader.sampler.set_epoch(epoch)",
    )


def _stray_calls(shared: Shared, passes: dict[int, list[EpochSeen]]) -> dict[int, Frame]:
    """Return, by rank, the line that set the epoch of an unused sampler while this one was looped over."""
    found: dict[int, Frame] = {}
    for rank in shared.ranks:
        first, last = passes[rank][0], passes[rank][-1]
        for call in shared.seen[rank].stray_calls:
            if first.begun_ns <= call.time_ns and (last.ended_ns is None or call.time_ns <= last.ended_ns):
                found.setdefault(rank, call.site)
    return found


def _line(frame: Frame) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line}"


def _evidence(shared: Shared, seen: list[EpochSeen], called: Frame | None) -> tuple[str, ...]:
    rank, sampler = shared.ranks[0], shared.first().sampler
    epoch = f"its epoch was {seen[0].set_epoch} in each pass on {rank_list(shared.ranks)}"
    again = f"the same indices in the same order in pass {seen[-1].number}"
    other = [f"{_line(called)} sets the epoch of a sampler that no DataLoader uses"] if called is not None else []
    return (
        *other,
        f"sampler {sampler.type if sampler is not None else ''}: shuffle=True, and {epoch}",
        f"pass {seen[0].number}: rank {rank} {words.drawn_words(seen[0])}, and {again}",
    )
