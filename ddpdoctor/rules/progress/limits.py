"""torch's own time limit for the calls that ranks wait in, and ranks that came only after others had waited so long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Problem

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.groups import native_group, own_state
from ddpdoctor.rules.progress.places import places
from ddpdoctor.rules.progress.states import NATIVE_PHASES, Activity
from ddpdoctor.rules.progress.watchdog import NEARLY, came_late
from ddpdoctor.rules.progress.words import call_words, line_of, place_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.stacks import Frame

    from ddpdoctor.rules.progress.failures import Failure
    from ddpdoctor.rules.progress.groups import CallPosition
    from ddpdoctor.rules.progress.job_state import JobState
    from ddpdoctor.rules.progress.states import RankState


GRACE_NS = 30_000_000_000
"""Our choice: how long torch gets after its limit to act by itself: to raise, or to let NCCL's watchdog write its
dump."""
_OWN_LIMITS = frozenset({"barrier", "monitored_barrier"})
"""Calls that may have a longer limit than their group; torch ends them by itself."""


def is_limit_over(job: JobState) -> bool:
    """Return whether a rank has waited longer than torch's limit plus ``GRACE_NS``."""
    return any(_is_over(job, number, limit_s) for number, limit_s in limits_of(job).items())


def _is_over(job: JobState, number: int, limit_s: float) -> bool:
    state = job.states[number]
    waited_ns = state.since(job.time_ns)
    if waited_ns is None or state.call is None or state.call.op in _OWN_LIMITS:
        return False
    return waited_ns >= limit_s * 1e9 + GRACE_NS


def limit_words(job: JobState) -> list[str]:
    """Return torch's limit and how much of it is left, for the wait that ends first."""
    found = []
    for number, limit_s in limits_of(job).items():
        state = job.states[number]
        waited_ns = state.since(job.time_ns)
        if waited_ns is not None and state.call is not None:
            found.append((limit_s - waited_ns / 1e9, limit_s, state.call.op))
    if not found:
        return []
    left_s, limit_s, op = min(found)
    left = f"{long_words(left_s)} are left" if left_s > 0 else "it has passed"
    said = [f"torch's own timeout for this {op} is {long_words(limit_s)}; {left}"]
    if limit_s - left_s < job.facts.hang_timeout_s >= limit_s:  # a rank that waits for longer is not ended by torch
        said.append(
            f"--hang-timeout is {long_words(job.facts.hang_timeout_s)}, so torch ends the job before ddpdoctor judges "
            f"it: use a --hang-timeout below {long_words(limit_s)}"
        )
    return said


def long_words(duration_s: float) -> str:
    """Return "30 min", "29 min 52 s", "45 s", "2 h"."""
    hours, rest = divmod(round(duration_s), 3600)
    minutes, seconds = divmod(rest, 60)
    parts = [f"{value} {unit}" for value, unit in ((hours, "h"), (minutes, "min"), (seconds, "s")) if value]
    return " ".join(parts[:2]) or "0 s"


def limits_of(job: JobState) -> dict[int, float]:
    """Return the limits of the calls that ranks wait in; if a rank did not answer, use its peers' limit."""
    ranks = [state.rank for state in job.states.values()]
    of_peers = {group.name: group.timeout_s for rank in reversed(ranks) for group in rank.groups if group.timeout_s}
    limits = {number: _limit_s(job.states[number], of_peers) for number in job.waits.waiters}
    return {number: limit_s for number, limit_s in limits.items() if limit_s is not None}


def _limit_s(state: RankState, of_peers: Mapping[str, float]) -> float | None:
    call = state.call
    if call is None or state.doing is Activity.NEW_GROUP:
        return None
    if state.doing is Activity.INIT:
        return state.rank.init_timeout_s
    name = native_group(state) if call.op in NATIVE_PHASES else call.group
    own = own_state(state.rank, name)
    return own.timeout_s if own is not None and own.timeout_s is not None else of_peers.get(name)


TOGETHER_NS = 1_000_000_000
"""Our choice: longest gap between the last sample before a call and the start of the call."""


def find_late(job: JobState) -> tuple[int, ...]:
    """Return the ranks that came to a collective after another had given up waiting for them there."""
    limits = limits_of(job) if job.failures else {}
    gave_up: dict[CallPosition, int] = {}
    for failure in job.failures:
        position = job.positions.get(failure.rank.rank)
        given_up_ns = _gave_up_ns(failure, limits.get(failure.rank.rank))
        if position is not None and given_up_ns is not None:
            gave_up[position] = min(given_up_ns, gave_up.get(position, given_up_ns))
    calls = ((n, job.states[n].call, gave_up.get(position)) for n, position in job.positions.items())
    found = {n for n, call, since in calls if call is not None and since and call.started_ns >= since}
    return tuple(sorted(found | came_late(state.rank for state in job.states.values()).keys()))


def _gave_up_ns(failure: Failure, limit_s: float | None) -> int | None:
    """Return when a rank failed in a call because torch's own time limit had passed, or None if it did not.

    The script may have handled the error for a while before the error ended the rank.
    """
    if failure.call is None or failure.error is None or limit_s is None:
        return None
    ended_ns = failure.call.ended_ns or failure.time_ns
    return ended_ns if ended_ns - failure.call.started_ns >= NEARLY * limit_s * 1e9 else None


def lines_before(job: JobState, number: int) -> tuple[Frame, ...]:
    """Return the user's lines where a rank was sampled before its pending call, the most frequent first."""
    call, seen = job.states[number].call, job.rank(number).before_call
    if call is None or seen is None:
        return ()
    at_once = call.ended_ns is not None and call.ended_ns - call.started_ns <= TOGETHER_NS
    fits = abs(seen.until_ns - call.started_ns) <= TOGETHER_NS if seen.until_ns else at_once
    return seen.lines if fits else ()


def late_problem(job: JobState, late: tuple[int, ...]) -> Problem:
    """Return the finding: where the late ranks were meanwhile, and how long the others had waited."""
    waiters = [failure for failure in job.failures if failure.rank.rank not in late]
    on_device = came_late(state.rank for state in job.states.values())
    first = waiters[0].rank.rank
    waited = on_device[late[0]][2] if late[0] in on_device else waiters[0].call
    limit_s = limits_of(job).get(first)
    gone = f"after {long_words(limit_s)}" if limit_s is not None else "after torch's own timeout"
    who = rank_list(failure.rank.rank for failure in waiters)
    known = lines_before(job, late[0])
    was = f"; before that it was {place_words(known[0])}" if known and len(late) == 1 else ""
    op = waited.op if waited is not None else "the call"
    calls = [(n, on_device[n][0] if n in on_device else job.states[n].call) for n in late]
    sites = {n: call.site if n in on_device and call is not None else say.line_at(job.states[n]) for n, call in calls}
    where = tuple(place for n in late for place in places(n, lines_before(job, n) or (sites[n],)))
    return Problem(
        confidence=Confidence.HIGH if known else Confidence.MEDIUM,
        ranks=late,
        hosts=say.hosts_of(job, late),
        where=where,
        step=say.step_of(job, late),
        summary=f"{say.who(job, late)} called {op} too late: {who} had timed out there {gone}{was}",
        evidence=(
            *(
                f"rank {n} called {call_words(call)} ({line_of(call.site)}) "
                f"{(call.started_ns - waited.started_ns) / 1e9:.1f} s after rank {first}"
                for n, call in calls
                if call is not None and waited is not None
            ),
            *limit_words(job),
            *say.cascade_words(job.failures, late),
        ),
        fix=busy_fix(job),
    )


def busy_fix(job: JobState) -> str:
    """Return what to do about work that takes long."""
    limits = limits_of(job).values()
    beyond = f"more than {long_words(min(limits))}" if limits else "longer than torch's own timeout"
    return (
        f"split this work between the ranks, or do it before init_process_group; if the others must wait {beyond}, "
        "raise the group's timeout: init_process_group(timeout=timedelta(hours=2))"
    )
