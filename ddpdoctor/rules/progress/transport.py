"""DD611: ranks that are all inside a collective that does not complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.clues import fix_of
from ddpdoctor.rules.progress.limits import is_limit_over
from ddpdoctor.rules.progress.places import places
from ddpdoctor.rules.progress.stalled import closed, device_words, has_begun, queued_behind, stalled_in
from ddpdoctor.rules.progress.states import Activity
from ddpdoctor.rules.progress.transport_causes import check_words, likely_causes, lose_packets, transport_clues
from ddpdoctor.rules.progress.waits import by_position
from ddpdoctor.rules.progress.words import verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.rules.progress.groups import CallPosition
    from ddpdoctor.rules.progress.job_state import JobState

MOST_NAMED = 4
"""Most groups that a summary names."""


@rule("DD611", "transport", Severity.ERROR, "All ranks are in the same collective, and it does not complete")
def check_transport(job: JobState) -> Answer:
    """Report a collective that all ranks have come to but that does not end."""
    waiters = closed(job)
    if waiters is None:
        return skipped("a rank that waits for no other rank is holding up the job, or no rank is waiting")
    stalled = stalled_in(job)
    if queued_behind(job):
        return skipped("the devices of some ranks have not started it")
    if not stalled and not job.sees_all:
        return unknown("ranks on other nodes were not seen")
    if not stalled or not job.stands_still(()):
        return passed()
    if not set(waiters) <= job.quiet or not job.waited_long():
        return unknown("some ranks are still making progress")
    blamed = tuple(sorted({member for position in stalled for member in position.group.members}))
    computing = any(job.states[n].doing is Activity.NATIVE for n in waiters) and not lose_packets(job)
    finding = _finding(job, stalled, blamed)
    runs = has_begun(job, stalled) or is_limit_over(job)
    return judged([finding], certain=runs and not computing, may_resume=True)


def _stalled_words(job: JobState, stalled: Sequence[CallPosition]) -> str:
    inside = by_position(job.positions)
    said = [_one_stalled(job, position, inside[position]) for position in stalled[:MOST_NAMED]]
    left = len(stalled) - len(said)
    more = f"; {left} more groups" if left else ""
    return f"{'; '.join(said)}{more}, but {'it does' if len(stalled) == 1 else 'they do'} not complete"


def _one_stalled(job: JobState, position: CallPosition, inside: list[int]) -> str:
    number = f"collective {position.seq}" if position.seq is not None else "one collective"
    who = f"all {len(inside)} ranks" if len(inside) == len(job.waits.waiters) > 1 else rank_list(inside)
    come = "" if len(inside) == len(position.group.members) else ", which the whole group has called"
    return f"{who} {verb(inside, 'is', 'are')} in {number} of group {position.group.name}{come}"


def _finding(job: JobState, stalled: Sequence[CallPosition], blamed: tuple[int, ...]) -> Problem:
    sites = {n: say.line_at(job.states[n]) for n in blamed}
    group = stalled[0].group
    clues = transport_clues(job, group)
    return Problem(
        confidence=Confidence.MEDIUM if any(clue.fix for clue in clues) else Confidence.LOW,
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=tuple(place for n, frame in sites.items() for place in places(n, [frame])[:1]),
        step=say.step_of(job, blamed),
        summary=_stalled_words(job, stalled),
        evidence=(
            *(clue.said for clue in clues),
            *device_words(job, stalled),
            *say.classes(job, blamed),
            *say.others(job, blamed),
        ),
        fix=fix_of(clues, check_words(likely_causes(job, group))),
    )
