"""DD901: a rank that could not be recorded in full."""

from __future__ import annotations

from dataclasses import replace

from ddpdoctor.model.facts import Life, Presence, Rank
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.registry import rule

from ddpdoctor.rules.progress import evidence as say
from ddpdoctor.rules.progress.hook_losses import LOSSES, UNKNOWN, losses_of
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.progress.words import verb

UPDATE = "update ddpdoctor; if that does not help, open an issue with your torch version"


@rule("DD901", "not-recorded", Severity.INFO, "A rank was not recorded completely")
def check_recorded(job: JobState) -> Answer:
    """Report ranks that ran without a recorder, with a damaged one, or on a torch that lacks one of its hooks."""
    unseen = grouped((why, number) for number in sorted(job.states) if (why := _why(job.rank(number))))
    found = [_finding(job, why, tuple(ranks)) for why, ranks in unseen.items()]
    return judged([*found, *_without_hooks(job), *_elsewhere(job)])


def _without_hooks(job: JobState) -> list[Problem]:
    """Report what torch lacks, once for all ranks that lack the same."""
    lacking = grouped((lacks, number) for number in sorted(job.states) if (lacks := job.rank(number).lacks))
    return [
        replace(
            _finding(job, "", tuple(ranks)),
            summary=f"{rank_list(ranks)} could not be recorded completely: this torch has {_lack_words(hooks)}",
            evidence=tuple(f"{hook}: {LOSSES.get(hook, UNKNOWN)}" for hook in hooks) if len(hooks) > 1 else (),
            fix=UPDATE,
        )
        for hooks, ranks in lacking.items()
    ]


def _lack_words(hooks: tuple[str, ...]) -> str:
    if len(hooks) == 1:
        return f"no {hooks[0]}, so {LOSSES.get(hooks[0], UNKNOWN)}"
    return f"no {', '.join(hooks)}"


def _elsewhere(job: JobState) -> list[Problem]:
    """Report the ranks that have no process here; if the user announced other nodes, only if it matters."""
    there = tuple(sorted(set(range(job.world)) - set(job.states)))
    expected = job.facts.nnodes > 1 and (job.cause is Cause.NONE or _all_have_one(job))
    if job.sees_all or expected or not job.states or not there:
        return []
    they = verb(there, "it", "them")
    if any(state.rank.initialized for state in job.states.values()):
        where = (
            f"{verb(there, 'runs', 'run')} on another host or in another container, where ddpdoctor cannot see {they}"
        )
    else:
        where = (
            f"{verb(there, 'was', 'were')} not seen here; {verb(there, 'it', 'they')} may run on another host or in "
            "another container"
        )
    fix = "start `ddpdoctor wrap` there too"
    summary = f"{rank_list(there)} of {job.world} {where}: {fix}"
    return [replace(_finding(job, "", there), hosts=(), summary=summary, fix=fix)]


def _all_have_one(job: JobState) -> bool:
    """Return whether each node was heard from, so that a ``wrap`` was started on it, whatever became of it."""
    members = job.facts.members
    return members is not None and all(node.presence is not Presence.ABSENT for node in members.nodes)


def _why(rank: Rank) -> str:
    if rank.lost:
        return rank.lost
    if rank.life is Life.NEVER_STARTED or rank.recorded:
        return ""
    return "the recorder was not loaded"


def _finding(job: JobState, why: str, ranks: tuple[int, ...]) -> Problem:
    losses = losses_of(why)
    return Problem(
        ranks=ranks,
        hosts=say.hosts_of(job, ranks),
        summary=f"{rank_list(ranks)} could not be recorded completely: {why}",
        evidence=losses,
        fix=UPDATE if losses else "free disk space for the run folder, and start Python without -I, -E and -S",
    )
