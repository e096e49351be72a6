"""What `tune` tries and finds, and how speed scales with ranks."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from ddpdoctor.collect.run import read_job
from ddpdoctor.collect.run_files import read_trial
from ddpdoctor.diagnose.job import build_report
from ddpdoctor.diagnose.report import make_report
from ddpdoctor.model.findings import JobStatus, JobSummary
from ddpdoctor.model.reading import Unread
from ddpdoctor.model.tuning import (
    AGAIN,
    BASE,
    LaunchKind,
    ScalingResult,
    TrialRecord,
    TrialStop,
    TuneOutcome,
    TuneResult,
)
from ddpdoctor.model.words import count_of
from ddpdoctor.recorder.tune_trial import MEASURED_IN_LAUNCH, order_blocks
from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.progress.states import to_place
from ddpdoctor.rules.registry import rules_of
from ddpdoctor.rules.speed.predictions import MeasuredSize, basis_of, predict_sizes
from ddpdoctor.rules.speed.state import SpeedState, build_speed_state, call_site
from ddpdoctor.rules.tuning import trial as tried

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from ddpdoctor.model.facts import Job, JobEnd
    from ddpdoctor.model.findings import Judgment, Report
    from ddpdoctor.model.tuning import PredictedSize, RestartPlan, TriedBlock

ENOUGH_BLOCKS = 3  # our choice: their mean tells about how long the trial takes
FIRST_STEPS = 10  # the recorder tries no setting before that
WRAP_IT = "`ddpdoctor wrap --speed` shows where the time of a step goes in any job, without a trial."
SPAWNED_HELP = (
    "Let torchrun start them: take rank and world size from the environment, as init_process_group() does, and call "
    "the function of a rank directly. Then run `ddpdoctor tune --nproc-per-node N SCRIPT`."
)
# Why a trial has no result, and what to do, by how it ended.
SENTENCES = {
    TrialStop.NO_STEP: (
        "the script makes no steps with a torch optimizer",
        "A trial counts steps of torch.optim. " + WRAP_IT,
    ),
    TrialStop.NO_MODEL: (
        "the script trains, but not a DistributedDataParallel model",
        "A trial tries settings of DDP. " + WRAP_IT,
    ),
    TrialStop.SPAWNED: ("the script starts its ranks itself (torch.multiprocessing)", SPAWNED_HELP),
}


def build_tune_report(
    folder: Path, judgment: Judgment, end: JobEnd, restarted: TrialRecord | None = None
) -> Report:  # fmt: skip
    report = build_report(folder, judgment, end)
    trial, job = read_trial(folder), read_job(folder)
    trials = [record for record in (trial, restarted) if record is not None and record.has_result]
    if trials:
        if restarted is not None and not restarted.has_result:
            trials = [replace(trial, refused=(*trial.refused, *restarted.refused))]
        return _measured(report, job, trials)
    ended_badly = report.job is not None and report.job.ended_badly
    if ended_badly and trial.stop is TrialStop.CUT_SHORT:
        trying, number = (words_of_setting(trial.trying), trial.round + 1) if trial.trying else ("", 0)
        outcome = TuneOutcome(trying=trying, round=number, rounds=trial.rounds)
        return replace(report, data={"tune": outcome, **report.data})
    if restarted is None:
        problem, help_text = _why_none(job, trial)
    elif restarted.reason:
        problem = restarted.reason
        help_text = "Each launch has its own record folder below the run folder."
    else:
        refused = "; ".join(f"{tried.title_of_setting(setting)}: {reason}" for setting, reason in restarted.refused)
        problem, help_text = f"nothing can be tried: {refused}", WRAP_IT
    outcome = TuneOutcome(problem=problem, help=help_text)
    return replace(
        report, job=finished(report), verdict=None, findings=(), checks=(),
        data={"tune": outcome, **report.data},
    )  # fmt: skip


def words_of_setting(setting: str) -> str:
    return "the script's own settings" if setting in {BASE, AGAIN} else tried.title_of_setting(setting)


def read_outlook(folder: Path) -> str:
    """Return what a trial that has just begun will try and about how long that takes; "" if that is not known yet."""
    trial = read_trial(folder)
    steps_ms = [median(block.ranks_ms[0]) for block in trial.blocks]
    if len(steps_ms) < ENOUGH_BLOCKS:
        return ""
    count = count_of(len(trial.settings) - 2, "setting")
    seconds = trial.needed_steps * fmean(steps_ms) / 1e3
    return f"{count} in {count_of(trial.rounds, 'round')}: {trial.needed_steps} steps, {_rough_time(seconds)} in total"


def _rough_time(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds > 2 * 60 else f"about {seconds:.0f} s"


def _measured(report: Report, job: Job, trials: list[TrialRecord]) -> Report:
    """Return the report of a trial with a result. That the ranks were stopped midway is not a finding."""
    # What the first launch predicts of each setting
    settings = [setting for trial in trials for setting in trial.settings]
    forwards = max(trial.forwards for trial in trials)
    found = build_speed_state(job)
    state = None if isinstance(found, Unread) else found
    ddp = tried.predict_settings(job, settings, tried.base_step_ms(trials[0]), forwards)
    known = (rank.speed.surroundings for rank in job.ranks if rank.speed is not None)
    sites = ((rank.rank, rank.models[-1].site) for rank in job.ranks if rank.models)
    loaders = ((rank.rank, call_site(rank, "next_batch")) for rank in job.ranks)
    result = tried.conclude(
        *trials,
        predictions={**ddp, **tried.predict_restarts(state, settings)},
        frameworks=frozenset(name for context in known if context is not None for name in context.frameworks),
        where=tuple(to_place(number, site) for number, site in sites if site is not None),
        loaders_at=tuple(to_place(number, site) for number, site in loaders if site is not None),
    )
    judged = judge(rules_of("tuning"), {TuneResult: [result]})
    return make_report(
        command=report.command,
        started_at=report.started_at,
        ended_at=report.ended_at,
        job=finished(report),
        findings=judged.findings,
        checks=judged.checks,
        data={"tune": TuneOutcome(result=result, rounds=result.rounds), **report.data},
    )


def finished(report: Report) -> JobSummary:
    size = report.job.world_size if report.job is not None else None
    nodes = report.job.nnodes if report.job is not None else 1
    return JobSummary(world_size=size, nnodes=nodes, status=JobStatus.FINISHED, exit_status=0)


def _why_none(job: Job, trial: TrialRecord) -> tuple[str, str]:
    if trial.stop in SENTENCES:
        return SENTENCES[trial.stop]
    if trial.stop is TrialStop.SEVERAL_MODELS:
        return (
            f"the script has {trial.models} DistributedDataParallel models",
            "A trial can change the settings of one. Leave the others out of DDP for the trial. " + WRAP_IT,
        )
    if trial.stop is TrialStop.CANNOT_SWITCH:
        return f"the settings of this job cannot be changed while it runs: {trial.reason}", (
            "Disable that for the trial, or run `ddpdoctor wrap --speed` with and without a setting, and compare the "
            "two: `ddpdoctor report A --compare B`."
        )
    if trial.stop is TrialStop.FAILED:
        return f"the trial failed: {trial.reason}", "This is a bug in ddpdoctor: please report it."
    # The same for a job that ended before the trial did
    steps = max((rank.steps for rank in job.ranks), default=0)
    if not steps or not any(rank.models for rank in job.ranks):
        return SENTENCES[TrialStop.NO_STEP if any(rank.models for rank in job.ranks) else TrialStop.NO_MODEL]
    if not trial.needed_steps:
        return f"the script ended after {steps} optimizer steps, before a setting was tried", (
            f"A trial needs {FIRST_STEPS} steps before the first setting, and 8 for each setting in each round: about "
            "400. Let the script train for longer; the trial stops it."
        )
    return f"the script ended after {steps} optimizer steps, but this trial needs {trial.needed_steps}", (
        "Let the script train for longer (the trial stops it), or try fewer settings (--only)."
    )


def build_scaling_report(
    launched: Sequence[tuple[LaunchKind, int, Path]], command: tuple[str, ...], started_at: str, notes: tuple[str, ...]
) -> Report:
    """Return the report of launches that all have a result, each with its number of ranks and its run folder."""
    measured = [
        (launch, folder)
        for kind, ranks, folder in launched
        if (launch := tried.launch_of(kind, ranks, read_trial(folder), read_job(folder))) is not None
    ]
    launches = tuple(launch for launch, _ in measured)
    rows = tried.measure_scaling(launches)
    largest = max((run for run in launches if run.kind is LaunchKind.JOB), key=lambda run: run.ranks, default=None)
    folder = next((folder for launch, folder in measured if launch == largest), None)
    predicted: tuple[PredictedSize, ...] = ()
    reason = "no job of several ranks was measured"
    if folder is not None and largest is not None and rows and largest.ranks == rows[-1].ranks:
        forwards = max(1, read_trial(folder).forwards)
        basis = basis_of(read_job(folder).ranks, largest.step_ms, reductions=forwards)
        reason, row = basis.refusal, rows[-1]
        if not reason:  # the step at sizes that were not run
            spread_ms = largest.spread_ms
            size = MeasuredSize(ranks=row.ranks, step_ms=row.step_ms, efficiency=row.efficiency, spread_ms=spread_ms)
            predicted = predict_sizes(basis, size)
    spread, count = (largest.spread_ms / largest.step_ms, largest.ranks) if largest is not None else (0.0, 1)
    result = ScalingResult(
        launches=launches,
        rows=rows,
        predicted=predicted,
        reason=reason,
        spread=spread,
        measured_ranks=count,
        notes=notes,
    )
    job = JobSummary(world_size=result.measured_ranks, nnodes=1, status=JobStatus.FINISHED, exit_status=0)
    data = {"scaling": result}
    return make_report(command=command, started_at=started_at, findings=(), checks=(), job=job, data=data)


LAUNCH_STEPS = FIRST_STEPS + MEASURED_IN_LAUNCH
# A first launch that ended so can be followed by others.
ENDED = frozenset({TrialStop.DONE, TrialStop.CANNOT_SWITCH, TrialStop.SEVERAL_MODELS})


def read_plan(folder: Path, only: Collection[str], wall_s: float) -> RestartPlan | None:
    """Return what to try by restarts after a first launch of ``wall_s``, or None; ``only`` limits the settings."""
    trial = read_trial(folder)
    if trial.stop not in ENDED or not trial.blocks:
        return None
    found = build_speed_state(read_job(folder))
    state = None if isinstance(found, Unread) else found
    judged = judge(rules_of("speed"), {SpeedState: [state]}).findings if state is not None else ()
    plan = tried.plan_restarts(trial, state, {finding.kind for finding in judged}, only)
    # A launch takes as long as the first one, with fewer steps.
    step_s = fmean(median(block.ranks_ms[0]) for block in trial.blocks) / 1e3
    launch_s = max(0.0, wall_s - trial.needed_steps * step_s) + LAUNCH_STEPS * step_s
    return None if plan is None else replace(plan, launch_s=launch_s)


def order_launches(plan: RestartPlan, rounds: int) -> list[tuple[int, str]]:
    """Return round and setting of each launch. Each round has all settings and the script's own twice."""
    return order_blocks([BASE, AGAIN, *plan.settings], rounds)


def describe_plan(plan: RestartPlan, rounds: int) -> str:
    count = len(order_launches(plan, rounds))
    titles = ", ".join(map(words_of_setting, plan.settings))
    size = f"{count} launches, {_rough_time(count * plan.launch_s)} in total"
    return f"{plan.why}. Tried by restarts: {titles}, in {count_of(rounds, 'round')}: {size}"


def build_launch_report(
    folder: Path, judgment: Judgment, end: JobEnd, *, setting: str, number: int, rounds: int
) -> Report:
    report = build_report(folder, judgment, end)
    if report.job is not None and report.job.ended_badly:
        outcome = TuneOutcome(trying=words_of_setting(setting), round=number + 1, rounds=rounds)
        return replace(report, data={"tune": outcome, **report.data})
    return replace(report, job=finished(report), verdict=None, findings=(), checks=())


def read_launch(folder: Path, setting: str, number: int) -> TriedBlock | None:
    found = next((block for block in read_trial(folder).blocks if block.setting == setting), None)
    return None if found is None else replace(found, round=number)


def why_unmeasured(folder: Path, report: Report, setting: str) -> str:
    refused = dict(read_trial(folder).refused)
    if setting in refused:
        return refused[setting]
    if report.job is not None and report.job.status is JobStatus.HUNG:
        return "the job hung with it"
    if report.verdict is not None:
        return f"the job failed with it: {report.verdict.summary}"
    if report.job is not None and report.job.ended_badly:
        return f"the job failed with it, with exit status {report.job.exit_status}"
    return f"the script ended before {LAUNCH_STEPS} optimizer steps"


def restarts_record(
    plan: RestartPlan, rounds: int, blocks: Sequence[TriedBlock], refused: Mapping[str, str], stopped: str
) -> TrialRecord:
    """Return what launches measured, as the record of a trial. ``stopped`` is why they ended early, or ""."""
    if stopped:
        left = {**dict.fromkeys(plan.settings, stopped), **refused}
        return TrialRecord(refused=tuple(left.items()), reason=stopped, by_restarts=True)
    settings, pairs = (BASE, AGAIN, *plan.settings), tuple(refused.items())
    return TrialRecord(
        settings=settings, rounds=rounds, blocks=tuple(blocks), refused=pairs, stop=TrialStop.DONE, by_restarts=True
    )
