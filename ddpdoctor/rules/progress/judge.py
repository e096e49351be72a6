"""Puts a job before all rules of progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Judgement
from ddpdoctor.rules.registry import rule_of
from ddpdoctor.rules.ruling import crashed, run_rule
from ddpdoctor.rules.verdict import order_findings

from . import absent, circles, ended, leaving, mismatch, models, straggler, stuck, transport, unrecorded
from .limits import is_limit_over
from .scene import build_scene

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.ruling import Ruling

    from .scene import Scene

CHECKS = (
    models.check_models,
    stuck.check_stuck,
    mismatch.check_mismatch,
    ended.check_early_exit,
    ended.check_crash,
    ended.check_killed,
    absent.check_stopped,
    absent.check_missing,
    circles.check_deadlock,
    leaving.check_exit_hang,
    straggler.check_straggler,
    transport.check_transport,
    leaving.check_exit_abort,
    unrecorded.check_recorded,
)
"""The rules of this family, by code."""


def judge(job: Job) -> Judgement:
    """Return what the rules say of a job, while it runs or at its end. A rule that raises is a crashed check."""
    rules = [rule_of(check) for check in CHECKS]
    try:
        scene = build_scene(job)
    except Exception as error:  # noqa: BLE001 - the wall around a rule
        return Judgement(findings=(), checks=tuple(crashed(rule, error) for rule in rules), certain=False)
    ruled = [run_rule(rule, scene) for rule in rules]
    found = [ruling for ruling, _ in ruled if ruling.findings]
    findings = [finding for ruling in found for finding in ruling.findings]
    return Judgement(
        findings=order_findings(findings),
        checks=tuple(check for _, check in ruled),
        certain=any(ruling.certain for ruling in found),
        proven=any(_is_proven(scene, ruling) for ruling in found),
    )


def _is_proven(scene: Scene, ruling: Ruling) -> bool:
    """Return whether a job that hangs can never go on: by the rule, or since torch's own time limit has passed."""
    return ruling.certain and (not ruling.may_resume or is_limit_over(scene))
