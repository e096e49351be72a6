"""Gradients that DDP's reducer missed or got twice: of which parameters, why, on which ranks, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Fault
from ddpdoctor.model.known_errors import find_known
from ddpdoctor.model.words import first_names, grouped, rank_list
from ddpdoctor.rules.answers import Problem

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.clues import Clue
from ddpdoctor.rules.progress.places import places
from ddpdoctor.rules.progress.states import Activity
from ddpdoctor.rules.progress.words import line_of, verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.facts import ReducerSaid

    from ddpdoctor.rules.progress.conflicts import Conflict
    from ddpdoctor.rules.progress.failures import Failure
    from ddpdoctor.rules.progress.job_state import JobState

MAX_NAMED = 5
"""Our choice: most parameters that a sentence names."""
_SAYS = {
    Fault.UNFINISHED: "Expected to have finished reduction in the prior iteration",
    Fault.STATIC: "Your training graph has changed in this iteration",
    Fault.TWICE: "Expected to mark a variable ready only once",
}
"""What DDP says of each fault, in the words of the table of known errors, which has the fixes."""


def _fix(fault: Fault) -> str:
    known = find_known(_SAYS[fault])
    return known.fix if known is not None else ""


def reducer_summary(said: ReducerSaid) -> str:
    """Return what DDP complains about, in one clause with names."""
    named = names_words(said)
    if said.what is Fault.TWICE:
        return f"DDP got the gradient of {named} twice in one backward"
    static = " that had one in the first step, with static_graph=True" if said.what is Fault.STATIC else ""
    return f"the previous backward left {named} without a gradient{static}, and DDP is waiting for it"


def names_words(said: ReducerSaid) -> str:
    """Return "aux.weight, aux.bias (2 of 6 parameters)"."""
    if not said.names:
        return f"{said.count} parameters" if said.count else "a parameter"
    return f"{first_names(said.names, MAX_NAMED, count=said.count)} ({said.count} of {said.of} parameters)"


def reducer_clues(job: JobState, failure: Failure) -> tuple[Clue, ...]:
    """Return why gradients were missing or came twice, if that made a rank fail."""
    said = failure.error.reducer if failure.error is not None else None
    if said is None:
        return ()
    fix = _fix(said.what)
    if said.what is Fault.TWICE:
        return (Clue(said="a layer ran outside DDP's forward, or in two reentrant checkpoints", fix=fix),)
    if said.outputs:
        why = f"{said.outputs[0]} in the script depends on them, but the loss does not use it"
    else:
        why = _branch_words(job)
    return (Clue(said=why, fix=fix),)


def other_words(job: JobState) -> list[str]:
    """Return what else the ranks report: which left out other parameters, and which left out none."""
    reported = {n: said for n in job.states if (said := _said(job, n)) is not None and said.what is not Fault.TWICE}
    if not reported:
        return []
    by_names = grouped((said.names, number) for number, said in reported.items())
    found = option_words(job)
    if len(by_names) > 1:
        found += [f"{rank_list(those)} left out {', '.join(names[:MAX_NAMED])}" for names, those in by_names.items()]
    used = _users(job)
    if used and not option_words(job):
        found.append(f"{rank_list(used)} had all gradients and waited in backward for the other ranks")
    return found


def skipped_reduction(job: JobState, conflict: Conflict) -> Problem | None:
    """Return the finding if some ranks are past a backward that left gradients out and others wait to reduce it."""
    skipping = {part.rank: said for part in conflict.parts if (said := job.rank(part.rank).unfinished) is not None}
    waiting = [part.rank for part in conflict.parts if part.native and part.kind.op == "backward"]
    if not skipping or not waiting or set(skipping) & set(waiting):
        return None
    blamed = tuple(sorted(skipping))
    said = skipping[blamed[0]]
    return Problem(
        ranks=blamed,
        hosts=say.hosts_of(job, blamed),
        where=tuple(place for n in blamed for place in places(n, [skipping[n].site])),
        step=say.step_of(job, blamed),
        summary=f"backward on {say.who(job, blamed)} ({line_of(said.site)}) left {names_words(said)} without a "
        f"gradient, so DDP skipped the reduction that {rank_list(waiting)} {verb(waiting, 'is', 'are')} "
        "waiting in",
        evidence=(
            f"{rank_list(blamed)}: {_took_another_branch(waiting)}",
            *(f"{rank_list([part.rank])}: now in {part.kind.op} ({line_of(part.site)})" for part in conflict.parts),
            *say.progress_words(job, [part.rank for part in conflict.parts]),
            *say.cascade_words(job.failures, (), also=""),
        ),
        fix=_fix(Fault.UNFINISHED),
    )


def option_words(job: JobState) -> list[str]:
    """Return the ranks whose DDP was set to find unused parameters, if not all were."""
    reported = {n: _finds_unused(job, n) for n in job.states}
    where, elsewhere = ([n for n, finds in reported.items() if finds is value] for value in (True, False))
    if not where or not elsewhere:
        return []
    return [f"{rank_list(where)} passed find_unused_parameters=True to DDP, and {rank_list(elsewhere)} did not"]


def _finds_unused(job: JobState, number: int) -> bool | None:
    """Return whether all models of a rank (True) or none (False) were set so; None if mixed or not known."""
    reported = {model.finds_unused for model in job.rank(number).models}
    return reported.pop() if len(reported) == 1 else None


def _branch_words(job: JobState) -> str:
    users = [] if option_words(job) else _users(job)
    if users:
        return _took_another_branch(users)
    return "forward did not use them, or the loss does not depend on their output"


def _took_another_branch(users: Sequence[int]) -> str:
    return (
        "forward took a branch without them, or the loss does not depend on their output; on "
        f"{rank_list(users)} it does"
    )


def _said(job: JobState, number: int) -> ReducerSaid | None:
    """Return what the reducer of a rank complained about, when it failed or before."""
    rank = job.rank(number)
    return next((raised.reducer for raised in reversed(rank.raised) if raised.reducer is not None), rank.unfinished)


def _users(job: JobState) -> list[int]:
    """Return the ranks whose backward found all gradients: they were in it and waited for the others."""
    failed = {f.rank.rank for f in job.failures if f.call is not None and f.call.op == "backward"}
    native = {n for n, s in job.states.items() if s.doing is Activity.NATIVE and s.call and s.call.op == "backward"}
    return [n for n in sorted(failed | native) if _said(job, n) is None]
