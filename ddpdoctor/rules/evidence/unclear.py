"""Says why the evidence does not name a cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Doing, ErrorLine, Exited, Failed, Hint, Link, Moving, Nature, ProcessState, Stacked
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.rules.evidence import words
from ddpdoctor.rules.evidence.state import last_samples
from ddpdoctor.rules.progress.words import verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.rules.evidence.state import RunState

_TELLING = frozenset({"ras-ahead", "ras-unnamed", "damaged"})
"""Notes that say why the cause cannot be told."""


def why_unclear(state: RunState) -> str:
    """Return the most exact reason."""
    return next(reason for find in (_of_waits, _of_ends, _of_looks, _of_lines) for reason in find(state))


def _of_lines(state: RunState) -> Iterator[str]:
    lines = state.all(ErrorLine)
    if lines:
        more = f" (and {len(lines) - 1} more such lines)" if len(lines) > 1 else ""
        yield f"the log has an error that ddpdoctor does not know{more}, and no other failure: {words.quote(lines[-1])}"
    yield "no failure was found, but nothing shows that the job succeeded"


def _of_waits(state: RunState) -> Iterator[str]:
    yield from (fact.words for fact in state.all(Hint) if fact.kind in _TELLING)
    waiting = state.waiting
    if waiting:
        lacking = f"; there is no evidence from {rank_list(state.unseen)}" if state.unseen else ""
        yield f"{rank_list(waiting)} waited for other ranks, but the evidence does not show which ones{lacking}"
    yield from (fact.words for fact in state.all(Hint) if fact.kind == "told-to-dump")


def _of_ends(state: RunState) -> Iterator[str]:
    failed = {fact.nature: fact for fact in reversed(state.all(Failed))}
    if Nature.PEER_LOST in failed:
        yield "the evidence only has errors of ranks that lost another rank, not the failure itself"
    if Nature.TIMED_OUT in failed:
        said = words.quote(failed[Nature.TIMED_OUT])
        yield f"a wait for other ranks timed out, but the evidence does not show which ones: {said}"
    if Nature.STOPPED in failed:
        yield f"processes were told to stop, but the evidence does not show why: {words.quote(failed[Nature.STOPPED])}"
    if Nature.FOLLOWS in failed:
        said = words.quote(failed[Nature.FOLLOWS])
        yield f"the evidence only has reports of a failure, not the failure itself: {said}"
    if state.all(Link):
        yield "the evidence only shows that the other side closed connections, not why"
    if state.all(Exited):
        yield "the evidence only shows that ranks were stopped, not why"


def _of_looks(state: RunState) -> Iterator[str]:
    data = _wait_for_data(state)
    if data:
        yield f"{rank_list(data)} {verb(data, 'waits', 'wait')} for workers of a DataLoader"
    if state.all(ProcessState):
        where = "no rank was seen to wait for another" if state.all(Stacked) else "no stack of a rank was seen"
        yield f"there is no sign of progress, and {where}"
    if state.all(Moving) and not state.went_wrong and not state.all(ErrorLine):
        yield "the log ends while the job makes progress, so it is unknown whether it continued, ended or hung"


def _wait_for_data(state: RunState) -> list[int]:
    """Return the ranks that wait for workers of their DataLoaders, if all ranks do."""
    samples = last_samples(state.facts)
    return sorted(samples) if all(one.doing is Doing.DATA for one in samples.values()) else []
