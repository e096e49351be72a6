"""DD901: a rank that could not be recorded in full, and what is lost without each hook."""

from __future__ import annotations

import pkgutil
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Life, Presence
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import grouped, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Mapping

UNKNOWN = "its purpose is unknown"  # used for a hook that only a newer recorder knows
UPDATE = "update ddpdoctor; if that does not help, open an issue with your torch version"


@cache
def read_losses(table: str) -> Mapping[str, str]:
    """Return what is lost by name, of a table of ``lost_hooks.toml``: "hooks", or "failures" by their first word."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    rows = toml.loads((pkgutil.get_data(__package__, "lost_hooks.toml") or b"").decode())[table]
    return MappingProxyType({name: loss for loss, names in rows.items() for name in names})


def losses_of(failures: str) -> tuple[str, ...]:
    lost = read_losses("failures")
    parts = dict.fromkeys(failure.partition(":")[0] for failure in failures.split("; "))
    return tuple(f"{part} failed, so {loss}" for part in parts if (loss := lost.get(part.partition(" ")[0])))


@rule("DD901", "not-recorded", Severity.INFO, "A rank was not recorded completely")
def check_recorded(job: JobState) -> Answer:
    """Report ranks that ran without a recorder, with a damaged one, or on a torch that lacks one of its hooks."""
    ranks = [job.ranks[n] for n in sorted(job.states)]
    bare = {rank.rank for rank in ranks if not rank.recorded and rank.life is not Life.NEVER_STARTED}
    whys = ((rank.lost or "the recorder was not loaded" * (rank.rank in bare), rank.rank) for rank in ranks)
    unseen = grouped((why, number) for why, number in whys if why)
    found = [_loss_problem(job, why, tuple(numbers)) for why, numbers in unseen.items()]
    for hooks, numbers in grouped((rank.lacks, rank.rank) for rank in ranks if rank.lacks).items():
        lost = [read_losses("hooks").get(hook, UNKNOWN) for hook in hooks]
        what = f"{hooks[0]}, so {lost[0]}" if len(hooks) == 1 else ", ".join(hooks)
        summary = f"{rank_list(numbers)} could not be recorded completely: this torch has no {what}"
        evidence = tuple(map(": ".join, zip(hooks, lost, strict=True))) if len(hooks) > 1 else ()
        found.append(replace(_loss_problem(job, "", tuple(numbers)), summary=summary, evidence=evidence, fix=UPDATE))
    # Ranks that have no process here; if the user announced other nodes, only if it matters: not if each was heard
    # from, so that a ``wrap`` was started on it, whatever became of it.
    there = tuple(sorted(set(range(job.world)) - set(job.states)))
    members = job.facts.members
    heard = members is not None and all(node.presence is not Presence.ABSENT for node in members.nodes)
    expected = job.facts.nnodes > 1 and (job.cause is Cause.NONE or heard)
    if job.sees_all or expected or not job.states or not there:
        return judged(found)
    they = verb(there, "it", "them")
    where = (
        f"{verb(there, 'was', 'were')} not seen here; {verb(there, 'it', 'they')} may run on another host or in "
        "another container"
    )
    if any(rank.initialized for rank in job.ranks.values()):
        place = "on another host or in another container, where ddpdoctor cannot see"
        where = f"{verb(there, 'runs', 'run')} {place} {they}"
    fix = "start `ddpdoctor wrap` there too"
    summary = f"{rank_list(there)} of {job.world} {where}: {fix}"
    return judged([*found, replace(_loss_problem(job, "", there), hosts=(), summary=summary, fix=fix)])


def _loss_problem(job: JobState, why: str, ranks: tuple[int, ...]) -> Problem:
    losses = losses_of(why)
    return say.problem_of(
        job,
        ranks,
        summary=f"{rank_list(ranks)} could not be recorded completely: {why}",
        evidence=losses,
        fix=UPDATE if losses else "free disk space for the run folder, and start Python without -I, -E and -S",
        step=None,
    )
