"""Plans the launches that try settings by restarts, reads what each measured, and builds the report of one."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.collect.run.trial_record import read_trial
from ddpdoctor.diagnose.build import build_report
from ddpdoctor.diagnose.tuning import FIRST_STEPS, finished, words_of_setting
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import JobStatus
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.reading import Unread
from ddpdoctor.model.tuning import AGAIN, BASE, TrialRecord, TrialStop, TuneOutcome
from ddpdoctor.recorder.tuning.plan import MEASURED_IN_LAUNCH, order_blocks
from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.registry import rules_of
from ddpdoctor.rules.speed.state import SpeedState, build_speed_state
from ddpdoctor.rules.tuning.restarts import plan_restarts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from ddpdoctor.model.findings import Judgment, Report
    from ddpdoctor.model.run import JobEnd
    from ddpdoctor.model.tuning import RestartPlan, TriedBlock

LAUNCH_STEPS = FIRST_STEPS + MEASURED_IN_LAUNCH
ENDED = frozenset({TrialStop.DONE, TrialStop.CANNOT_SWITCH, TrialStop.SEVERAL_MODELS})
"""A first launch that ended so can be followed by others."""


def read_plan(folder: Path, only: Collection[str], wall_s: float) -> RestartPlan | None:
    """Return what to try by restarts after a first launch, or None if nothing calls for them.

    Args:
        folder: Its run folder.
        only: Names of the settings to try; empty: all that fit.
        wall_s: How long it took.
    """
    trial = read_trial(folder)
    if trial.stop not in ENDED or not trial.blocks:
        return None
    found = build_speed_state(read_job(folder))
    state = None if isinstance(found, Unread) else found
    judged = judge(rules_of("speed"), {SpeedState: [state]}).findings if state is not None else ()
    plan = plan_restarts(trial, state, {finding.kind for finding in judged}, only)
    return None if plan is None else replace(plan, launch_s=_launch_s(trial, wall_s))


def _launch_s(trial: TrialRecord, wall_s: float) -> float:
    """Return about how long a launch takes: the start of the first one, and fewer steps."""
    step_s = fmean(median(block.ranks_ms[0]) for block in trial.blocks) / 1e3
    return max(0.0, wall_s - trial.needed_steps * step_s) + LAUNCH_STEPS * step_s


def order_launches(plan: RestartPlan, rounds: int) -> list[tuple[int, str]]:
    """Return round and setting of each launch. Each round has all settings and the script's own twice."""
    return order_blocks([BASE, AGAIN, *plan.settings], rounds)


def describe_plan(plan: RestartPlan, rounds: int) -> str:
    """Return what is tried, in how many launches, and about how long that takes."""
    count = len(order_launches(plan, rounds))
    seconds = count * plan.launch_s
    last = f"about {seconds / 60:.0f} min" if seconds > 2 * 60 else f"about {seconds:.0f} s"
    titles = ", ".join(map(words_of_setting, plan.settings))
    return f"{plan.why}. Tried by restarts: {titles}, in {count_of(rounds, 'round')}: {count} launches, {last} in all"


def build_launch_report(
    folder: Path, judgment: Judgment, end: JobEnd, *, setting: str, number: int, rounds: int
) -> Report:
    """Return the report of a launch: that of any job, and which setting was in effect if it ended badly.

    Raises:
        UserError: the folder is no run folder.
    """
    report = build_report(folder, judgment, end)
    if report.job is not None and report.job.ended_badly:
        outcome = TuneOutcome(trying=words_of_setting(setting), round=number + 1, rounds=rounds)
        return replace(report, data={"tune": encode(outcome), **report.data})
    return replace(report, job=finished(report), verdict=None, findings=(), checks=())


def read_launch(folder: Path, setting: str, number: int) -> TriedBlock | None:
    """Return the steps that a launch measured, as a block of a round, or None."""
    found = next((block for block in read_trial(folder).blocks if block.setting == setting), None)
    return None if found is None else replace(found, round=number)


def why_unmeasured(folder: Path, report: Report, setting: str) -> str:
    """Return why a launch has measured nothing."""
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
    return TrialRecord(
        settings=(BASE, AGAIN, *plan.settings),
        rounds=rounds,
        blocks=tuple(blocks),
        refused=tuple(refused.items()),
        stop=TrialStop.DONE,
        by_restarts=True,
    )
