"""Builds the reports of `check-consistency`, for a trial or for files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.reports import check_report
from ddpdoctor.model.codec import encode
from ddpdoctor.model.diff import DiffFacts
from ddpdoctor.model.facts import GroupState, Job, Life, Rank
from ddpdoctor.model.findings import JobStatus, JobSummary, RankRow, Report
from ddpdoctor.model.trial import Trial
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from ddpdoctor.model.facts import ModelSeen
    from ddpdoctor.model.trial import Participant

VERB = "check-consistency"


def build_report(trial: Trial, command: tuple[str, ...], started_at: str) -> Report:
    """Judge a trial and build its report."""
    hosts = list(dict.fromkeys(one.host for one in trial.participants))
    world_size = len(trial.participants)
    return check_report(
        rules_of("consistency"),
        {Job: [_job(trial)], Trial: [trial]},
        {"verb": VERB, "world_size": world_size, "hosts": hosts, "trial": encode(_without_copies(trial))},
        command,
        started_at,
        job=JobSummary(world_size=world_size, nnodes=len(hosts), status=JobStatus.FINISHED, exit_status=None),
        ranks=(_row(one, trial) for one in trial.participants),
    )


def build_diff_report(facts: DiffFacts, command: tuple[str, ...], started_at: str) -> Report:
    """Judge compared files and build the report."""
    data = {"verb": VERB, "diff": encode(facts)}
    return check_report(rules_of("consistency"), {DiffFacts: [facts]}, data, command, started_at)


def _job(trial: Trial) -> Job:
    """Return a trial as a running job, so that the rules for jobs can judge its models and replicas."""
    everybody = tuple(one.rank for one in trial.participants)
    return Job(
        now_ns=0,
        hang_timeout_s=trial.settings.limit_s,
        ranks=tuple(_rank(one, model, everybody) for one, model in zip(trial.participants, trial.models, strict=True)),
        world_size=len(everybody),
        nnodes=len({one.host for one in trial.participants}),
        local_ranks_expected=None,
        ended=False,
        consistency=trial.consistency,
    )


def _rank(one: Participant, model: ModelSeen, everybody: tuple[int, ...]) -> Rank:
    group = GroupState(name=model.group, ranks=everybody, backend="", enqueued=0)
    return Rank(
        rank=one.rank,
        local_rank=one.local_rank,
        host=one.host,
        pid=one.pid,
        attempt=0,
        life=Life.RUNNING,
        recorded=True,
        world_size=len(everybody),
        initialized=True,
        groups=(group,),
        models=(model,),
    )


def _row(one: Participant, trial: Trial) -> RankRow:
    return RankRow(
        rank=one.rank,
        local_rank=one.local_rank,
        host=one.host,
        pid=one.pid,
        state="finished" if trial.consistency is not None else "model built",
        step=trial.settings.steps if trial.consistency is not None else None,
        gpu=int(one.device.removeprefix("cuda:")) if one.device.startswith("cuda:") else None,
    )


def _without_copies(trial: Trial) -> Trial:
    """Keep only one model if all ranks have equal ones."""
    same: Any = len({model.digest for model in trial.models}) == 1
    return replace(trial, models=trial.models[:1]) if same else trial
