"""DD608: ranks that wait for each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.groups import group_words
from ddpdoctor.rules.progress.places import places
from ddpdoctor.rules.progress.stalled import closed, stalled_in
from ddpdoctor.rules.progress.states import WORK_WAIT
from ddpdoctor.rules.progress.waits import find_circles, find_met_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.stacks import Frame

    from ddpdoctor.rules.progress.job_state import JobState
    from ddpdoctor.rules.progress.states import RankState
    from ddpdoctor.rules.progress.waits import WaitCircle

MOST_NAMED = 6
"""Most links of a circle, and most circles, that a sentence names."""
_MEET = (
    "both the send and the recv were called: give them the same tag, group and size; otherwise check the network "
    "between the two ranks, or raise --hang-timeout if it is just slow"
)


@rule("DD608", "deadlock", Severity.ERROR, "Ranks wait for each other in a circle")
def check_deadlock(job: JobState) -> Answer:
    """Report ranks that wait for each other in a circle."""
    waiters = closed(job)
    if waiters is None:
        return skipped("a rank that waits for no other rank is holding up the job, or no rank is waiting")
    if stalled_in(job):
        return skipped("some ranks are in a collective that its whole group has called")
    circles = find_circles(job.states, job.positions)
    pairs = () if circles else find_met_pairs(job.states)
    if not circles and not pairs and len({position.group for position in job.positions.values()}) < 2:
        return passed()
    if not job.stands_still(()) or not set(waiters) <= job.quiet:
        return unknown("some ranks are still making progress")
    found = _finding(job, circles or pairs, waiters)
    on_device = any(job.states[n].on_device for circle in circles for n in circle.ranks)
    if on_device:
        found = replace(found, confidence=Confidence.MEDIUM)
    if not circles:
        found = replace(found, confidence=Confidence.LOW, fix=_MEET if pairs else found.fix)
    return judged([found], certain=bool(circles), may_resume=on_device)


def _finding(job: JobState, circles: Sequence[WaitCircle], waiters: tuple[int, ...]) -> Problem:
    blamed = tuple(sorted(n for circle in circles for n in circle.ranks)) or waiters
    summary = f"{say.who(job, blamed)} are waiting for each other"
    around = [_around_words(job, circle) for circle in circles[:MOST_NAMED]]
    return Problem(
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=tuple(place for n in blamed for place in places(n, _lines(job.states[n]))),
        step=say.step_of(job, blamed),
        summary=f"{summary}: {around[0]}" if around else summary,
        evidence=(*around[1:], *say.classes(job, blamed), *say.others(job, blamed)),
        fix="use groups and peers in the same order on all ranks",
    )


def _lines(state: RankState) -> list[Frame | None]:
    """Return the line of the call, and for an asynchronous call the line that waits for it."""
    waits = [call.site for call in state.rank.open_calls if call.op == WORK_WAIT and call.thread_is_main]
    return [say.line_at(state), *waits]


def _around_words(job: JobState, circle: WaitCircle) -> str:
    """Return "rank 0 is waiting in recv for rank 1, which is waiting in barrier for rank 0"."""
    links = circle.links[:MOST_NAMED]
    parts = [f"is waiting in {_call_words(job, waiter)} for rank {awaited}" for waiter, awaited in links]
    left = len(circle.links) - len(links)
    more = f", and so on through {left} more ranks back to rank {circle.ranks[0]}" if left else ""
    return f"rank {circle.ranks[0]} " + ", which ".join(parts) + more


def _call_words(job: JobState, number: int) -> str:
    """Return the operation as the user typed it, and for a collective its group."""
    call = job.states[number].call
    what = "a call" if call is None else call.api or call.op
    position = job.positions.get(number)
    if position is None:
        return what
    among = {other.group for other in job.positions.values()}
    return f"{what} of {group_words(position.group, job.world, among)}"
