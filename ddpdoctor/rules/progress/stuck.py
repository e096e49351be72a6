"""DD601: a living rank does not come to the collective that the others wait in."""

from __future__ import annotations

from ddpdoctor.model.findings import Confidence, Place, Severity
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.causes import busy_at, clues_of, compiles
from ddpdoctor.rules.progress.clues import fix_of, sentences
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.progress.limits import find_late, late_problem, limit_words
from ddpdoctor.rules.progress.lock_causes import is_held_outside, is_left_behind, is_surely_left, left_behind_words
from ddpdoctor.rules.progress.places import innermost_user, own_error, places, places_held_up
from ddpdoctor.rules.progress.stalled import closed, queued_behind
from ddpdoctor.rules.progress.states import Activity
from ddpdoctor.rules.progress.stores import judge_stores, left_file, left_file_problem
from ddpdoctor.rules.progress.words import place_words, verb

_HOLDS_UP = frozenset({Activity.USER, Activity.DATA, Activity.BACKWARD, Activity.NATIVE})


ALONE_PATIENCE = 4
"""How many hang timeouts a rank gets if others have ended and nobody waits for it. Our choice: a last export may be
long."""


@rule("DD601", "stuck", Severity.ERROR, "A rank is stuck, and the others wait for it")
def check_stuck(job: JobState) -> Answer:
    """Report a rank that is in no collective and makes no progress while others wait for it."""
    if job.cause not in (Cause.HANG, Cause.NONE):
        return skipped(job.cause.value)
    left = left_file(job) if job.waits.waiters and not job.waits.blockers and job.waited_long() else None
    if left is not None and set(job.living) <= job.quiet:
        return judged([left_file_problem(job, *left)], certain=True)
    if not job.waits.waiters:
        return _all_stuck(job)
    held = tuple(n for n in job.waits.blockers if job.states[n].doing in _HOLDS_UP)
    if not held:
        return _nobody_held(job)
    blamed = tuple(n for n in held if n in job.quiet)
    if not blamed:
        return unknown(f"{rank_list(held)} {verb(held, 'is', 'are')} still making progress")
    if not any(job.rank(n).initialized for n in job.states) and not job.waited_long():
        return unknown("no rank has waited for the whole --hang-timeout yet")
    return _stuck(job, blamed, _sureness(job, blamed))


def _nobody_held(job: JobState) -> Answer:
    """Judge a job in which every rank waits: one came too late, its device is behind, or they look for a store."""
    late = find_late(job)
    if late:
        return judged([late_problem(job, late)], certain=not job.is_ending())
    behind = queued_behind(job) if closed(job) is not None else ()
    if behind and set(job.waits.waiters) <= job.quiet and job.waited_long():
        return _behind(job, behind)
    return judge_stores(job)


def _behind(job: JobState, blamed: tuple[int, ...]) -> Answer:
    """Report ranks whose device still runs work queued before a collective that the others are in."""
    sites = {n: say.line_at(job.states[n]) for n in blamed}
    where = tuple(place for n, frame in sites.items() for place in places(n, [frame])[:1])
    at = f" {place_words(where[0])}" if len({(p.file, p.line) for p in where}) == 1 else ""
    mine = verb(blamed, "has queued its call", "have queued their calls")
    device = verb(blamed, "its device has not started it", "their devices have not started them")
    waiters = say.waiters_words(job, blamed)
    finding = Problem(
        confidence=Confidence.MEDIUM,
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=where,
        step=say.step_of(job, blamed),
        summary=f"{say.who(job, blamed)} {mine}{at}, but {device}" + (f"; {waiters}" if waiters else ""),
        evidence=(
            "torch times the kernels: the other ranks' kernels have started, and these have not",
            *say.classes(job, blamed), *say.others(job, blamed), *limit_words(job),
        ),
        fix="use a profiler to find a slow kernel before that call on these ranks; check for a throttled or hung GPU "
        "with nvidia-smi and `ddpdoctor check-env`",
    )  # fmt: skip
    return judged([finding], may_resume=True)


def _sureness(job: JobState, blamed: tuple[int, ...]) -> Confidence:
    busy = [busy_at(job, n) for n in blamed]
    if not _all_recorded(job, blamed) or any(one is not None and one.may_spin for one in busy):
        return Confidence.LOW
    if any(busy):
        return Confidence.MEDIUM
    inside = any(job.states[n].doing in (Activity.BACKWARD, Activity.NATIVE) or compiles(job.rank(n)) for n in blamed)
    return Confidence.MEDIUM if inside else Confidence.HIGH


def _all_recorded(job: JobState, blamed: tuple[int, ...]) -> bool:
    return all(job.rank(n).recorded for n in blamed)


def _all_stuck(job: JobState) -> Answer:
    """Judge a job in which no rank waits for another."""
    blamed = tuple(n for n in job.living if job.states[n].doing in _HOLDS_UP)
    if not blamed or not job.was_left_running() or not set(blamed) <= job.quiet:
        return passed()
    if not any(job.rank(n).initialized for n in job.states) and not _wait_outside(job, blamed):
        return unknown("no rank has called init_process_group yet, so none is waiting")
    if len(blamed) < len(job.states) and not all(_is_patience_over(job, n) for n in blamed):
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} still running; no rank is waiting")
    if any(busy_at(job, n) for n in blamed) and not all(_is_patience_over(job, n) for n in blamed):
        return unknown(f"{rank_list(blamed)} {verb(blamed, 'is', 'are')} busy; no rank is waiting")
    unread = _unread(job, blamed)
    if unread:
        if not all(_is_patience_over(job, n) for n in blamed):
            return unknown(_unread_words(unread))
        return _stuck(job, blamed, Confidence.LOW)
    sure = all(is_surely_left(job.rank(n).causes) for n in blamed)
    return _stuck(job, blamed, Confidence.LOW if not job.sees_all else Confidence.HIGH if sure else Confidence.MEDIUM)


def _unread(job: JobState, blamed: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of which torch did not say what they wait for on their devices: they may wait for each other."""
    return tuple(n for n in blamed if job.rank(n).device_unread)


def _unread_words(unread: tuple[int, ...]) -> str:
    return f"torch did not say what {rank_list(unread)} {verb(unread, 'has', 'have')} pending on the device"


def _wait_outside(job: JobState, blamed: tuple[int, ...]) -> bool:
    """Return whether ranks that prepare wait for something outside the job: a stale lock or another's.

    The holder of a lock may release it, so it gets time.
    """
    if all(is_left_behind(job.rank(n).causes) for n in blamed):
        return True
    return all(is_held_outside(job, job.rank(n)) and _is_patience_over(job, n) for n in blamed)


def _is_patience_over(job: JobState, number: int) -> bool:
    rank = job.rank(number)
    last = max(rank.last_progress_ns or 0, rank.started_ns or 0)
    return job.time_ns - last >= ALONE_PATIENCE * job.timeout_ns


def _stuck(job: JobState, blamed: tuple[int, ...], confidence: Confidence) -> Answer:
    where = tuple(place for n in blamed for place in places_held_up(job.rank(n), waits_for_child=_in_loader(job, n)))
    error = own_error(job.rank(blamed[0])) if len(blamed) == 1 else None
    raised_at = innermost_user(error.frames) if error is not None else None
    mine = [place for place in where if place.rank == blamed[0]]
    after = [p for p in mine if raised_at is None or (p.file, p.line) != (raised_at.file, raised_at.line)]
    first = next(iter(after or mine), None)
    one_line = len({(p.file, p.line) for p in where}) == 1 or len(blamed) == 1
    at = f" {place_words(first)}" if one_line else ""
    waiters = say.waiters_words(job, blamed)
    unread = _unread(job, blamed)
    left = left_behind_words(job.rank(blamed[0]).causes) if one_line else ""
    before = f"raised {error.type} {place_words(raised_at)} and " if error is not None else ""
    summary = f"{say.who(job, blamed)} {before}{_doing_words(job, blamed, at)}{left}"
    seen = [*say.classes(job, blamed), *say.others(job, blamed)]
    seen += [*say.handled_words(job, blamed)]
    seen += [*say.progress_words(job, blamed), *say.process_words(job, blamed)]
    seen += [*limit_words(job), *say.cascade_words(job.failures, blamed)]
    clues = {n: clues_of(job, n) for n in blamed[: say.MAX_CLASSES]}
    finding = Problem(
        confidence=confidence,
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=where,
        step=say.step_of(job, blamed),
        summary=f"{summary}; {waiters}"
        if waiters
        else summary
        if left
        else f"{summary}; {_unread_words(unread) if unread else 'no rank is waiting for another'}",
        evidence=(*sentences(clues), *seen),
        fix=fix_of((clue for found in clues.values() for clue in found), _stuck_fix(job, blamed[0], first)),
    )
    works = any(compiles(job.rank(n)) or is_held_outside(job, job.rank(n)) for n in blamed)
    certain = _is_certain(job, blamed) and not works
    in_vain = all(is_surely_left(job.rank(n).causes) for n in blamed)
    return judged([finding], certain=certain, may_resume=not in_vain)


def _doing_words(job: JobState, blamed: tuple[int, ...], at: str) -> str:
    """Return "is busy in tokenize (train.py:12): it reads 40 MB/s", or "is stuck in tokenize (train.py:12)"."""
    busy = [one for n in blamed if (one := busy_at(job, n)) is not None]
    if len(busy) < len(blamed):
        return f"{verb(blamed, 'is', 'are')} stuck{at}"
    return f"{verb(blamed, 'is', 'are')} busy{at}" + (f": {busy[0].sentence}" if len(blamed) == 1 else "")


def _is_certain(job: JobState, blamed: tuple[int, ...]) -> bool:
    """Return whether the job cannot go on. It might, if a silent rank may wait for ranks that nobody sees."""
    known = job.sees_all or bool(job.waits.waiters)
    return known and job.stands_still(blamed) and _all_recorded(job, blamed)


def _in_loader(job: JobState, number: int) -> bool:
    return job.states[number].doing is Activity.DATA


def _stuck_fix(job: JobState, number: int, place: Place | None) -> str:
    at = place_words(place)
    if _in_loader(job, number):
        return f"see what the dataset does {at}; DataLoader(timeout=60) turns such a wait into an error"
    return (
        f"see what rank {number} waits for {at} and give that wait a timeout; if it is just slow, raise --hang-timeout"
    )
