"""Tells the errors that a job has caught and logged from those that ended a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Absent, Exited, Failed, Finished, Hint, Moving, Waiting, Who

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.evidence import Fact


def set_apart_handled(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Return the facts, with notes in place of the errors after which the same writer went on or ended well."""
    signs = [
        fact for fact in facts if isinstance(fact, Moving) or (isinstance(fact, Finished) and not fact.process_only)
    ]
    exits = [fact for fact in facts if isinstance(fact, Exited) and fact.code is not None]
    return tuple(
        _note(fact) if _went_on(fact, signs) and not any(_explains(fact, one) for one in exits) else fact
        for fact in facts
    )


def _explains(fact: Fact, exited: Exited) -> bool:
    """Return whether a process may have ended by this error. What it had still to print may come after the error."""
    ranks = {fact.who.rank, exited.who.rank}
    return isinstance(fact, Failed) and (len(ranks) == 1 or None in ranks)


def _went_on(fact: Fact, signs: Iterable[Moving | Finished]) -> bool:
    """Return whether the writer of an error went on, or the job after somebody was late."""
    of_job = _is_of_job(fact)
    if not of_job and not isinstance(fact, Failed) and not (isinstance(fact, Exited) and fact.who == Who()):
        return False
    return any(
        sign.spot.source == fact.spot.source
        and (of_job or sign.who == fact.who)
        and _is_after(sign, fact, at_once=isinstance(fact, Failed) and fact.alone)
        for sign in signs
    )


def _is_of_job(fact: Fact) -> bool:
    """Return whether it holds up the whole job as long as it lasts: somebody is late, at the start or later."""
    if isinstance(fact, Waiting):
        return fact.in_init and not fact.timed_out
    return isinstance(fact, Absent) and fact.expected


def _is_after(sign: Moving | Finished, fact: Fact, *, at_once: bool) -> bool:
    """Return whether the job went on: for some steps, or, after a line that need not be a failure, for one."""
    line = sign.steady_from if isinstance(sign, Moving) and not at_once else sign.spot.line
    return line is not None and fact.spot.line is not None and line > fact.spot.line


def _note(fact: Fact) -> Hint:
    words = f"{fact.type} was caught: {fact.message}".rstrip(": ") if isinstance(fact, Failed) else fact.said
    words = f"{words}; the job went on"
    return Hint(who=fact.who, spot=fact.spot, time=fact.time, said=fact.said, words=words, kind="handled")
