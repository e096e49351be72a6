"""From the command line of `check-consistency` to its exit status: start ranks, be one, or compare files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.cli.durations import parse_duration
from ddpdoctor.cli.output import save_report, say, show_error, show_report
from ddpdoctor.launch.folders.report_dir import make_report_dir
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.trial import TrialSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ddpdoctor.launch.command.options import FailOn, ReportFormat
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.trial import Trial

DIFF_FAILS_ON = Severity.WARNING
"""With --diff: files that differ, in buffers only too, are what was asked for."""
WRONG_LIMIT_S = 10.0
"""Ours: how long a rank whose command line is wrong tries to tell rank 0, before it tells the user itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line as it was typed."""

    files: tuple[Path, ...]
    diff: bool
    model: str
    batch: str
    step: str
    steps: int
    reference: bool
    twice: bool
    allowed: tuple[str, ...]
    unused: bool
    backend: str
    seed: int
    nproc: int | None
    format: ReportFormat
    report_dir: Path | None
    fail_on: FailOn | None
    timeout: str
    command: tuple[str, ...]


def run(asked: Asked, env: Mapping[str, str]) -> int:
    """Compare files, or ranks; return the exit status. Raises ``UserError``."""
    if asked.diff:
        return _compare_files(asked)
    from ddpdoctor.diagnose.bandwidth_machines import find_launch
    from ddpdoctor.launch.processes.ranks import end_with_parent
    from ddpdoctor.probes.bandwidth.member import load_torch

    launch = find_launch(env)
    try:
        settings = _read_settings(asked, launch)
        if launch.launcher is Launcher.NONE:
            return _start_ranks(asked, settings, launch, env)
        if launch.launcher is Launcher.OWN:
            end_with_parent(int(launch.run))
        load_torch()
    except UserError as error:
        return _refuse(launch, env, error)
    return _be_rank(asked, settings, launch, env)


def _read_settings(asked: Asked, launch: Launch) -> TrialSettings:
    if asked.files:
        raise UserError(
            f"{asked.files[0]} is a file, and files are compared with --diff only",
            help="ddpdoctor check-consistency --diff FILE FILE...",
        )
    if not asked.model:
        raise UserError(
            "nothing to check: neither --model nor --diff was given",
            help="torchrun --nproc-per-node 2 -m ddpdoctor check-consistency --model package.module:build_model",
        )
    if asked.nproc is not None and launch.launcher not in {Launcher.NONE, Launcher.OWN}:
        raise UserError(
            f"--nproc-per-node is for a start without a launcher; this process is rank {launch.rank} of one",
            help="Give the number of ranks to the launcher: torchrun --nproc-per-node, srun --ntasks-per-node.",
        )
    if asked.report_dir is not None and launch.rank == 0 and launch.launcher is not Launcher.NONE:
        make_report_dir(asked.report_dir)
    return TrialSettings(
        model=asked.model,
        batch=asked.batch,
        step=asked.step,
        steps=asked.steps,
        seed=asked.seed,
        backend=asked.backend,
        reference=asked.reference,
        twice=asked.twice,
        unused=asked.unused,
        allowed=asked.allowed,
        limit_s=parse_duration(asked.timeout, "--timeout"),
    )


def _refuse(launch: Launch, env: Mapping[str, str], error: UserError) -> int:
    """Tell a wrong command line once, though all ranks of a launcher have it."""
    if launch.launcher is Launcher.NONE:
        raise error
    from ddpdoctor.probes.bandwidth.session import run_wrong_rank

    return run_wrong_rank(launch, env, error, WRONG_LIMIT_S, show_error)


def _start_ranks(asked: Asked, settings: TrialSettings, launch: Launch, env: Mapping[str, str]) -> int:
    """Start ranks on this machine, unless this one is enough."""
    from ddpdoctor.launch.processes.ranks import choose_ranks, run_ranks
    from ddpdoctor.probes.bandwidth.member import load_torch

    count, note = (asked.nproc, "") if asked.nproc is not None else choose_ranks(env)
    if note:
        say(sys.stderr, note)
    if count == 1:
        if asked.report_dir is not None:
            make_report_dir(asked.report_dir)
        load_torch()
        return _be_rank(asked, settings, launch, env)
    return run_ranks(sys.argv[1:], count, env)


def _be_rank(asked: Asked, settings: TrialSettings, launch: Launch, env: Mapping[str, str]) -> int:
    from ddpdoctor.diagnose.check_env import now
    from ddpdoctor.probes.consistency.session import Job, run_rank

    report = partial(_report, asked, now())
    return run_rank(Job(launch=launch, env=env, settings=settings, report=report, show_error=show_error))


def _report(asked: Asked, started_at: str, trial: Trial) -> int:
    """Judge, show and save a trial, on the rank that reports; return the exit status."""
    from ddpdoctor.diagnose.consistency import build_report

    return _show(asked, build_report(trial, asked.command, started_at), Severity.ERROR)


def _show(asked: Asked, report: Report, usual: Severity) -> int:
    """Show and save a report; return the exit status: ``usual`` is the least severity of a failure.

    Save first what is to be saved: a reader who has seen enough may close the pipe.
    """
    from ddpdoctor.model.exit_status import report_status

    asked_for = usual if asked.fail_on is None else asked.fail_on
    least = None if asked_for == "never" else Severity(asked_for)
    if asked.report_dir is not None:
        save_report(asked.report_dir, report)
    show_report(report, asked.format, sys.stdout, asked.report_dir, fail_on=least)
    return report_status(report, least)


def _compare_files(asked: Asked) -> int:
    if len(asked.files) < 2:
        raise UserError(
            f"--diff needs at least two files, and was given {len(asked.files)}",
            help="ddpdoctor check-consistency --diff FILE FILE...",
        )
    from ddpdoctor.diagnose.check_env import now
    from ddpdoctor.diagnose.consistency import build_diff_report
    from ddpdoctor.probes.bandwidth.member import load_torch
    from ddpdoctor.probes.consistency.diff import compare_files

    load_torch()
    if asked.report_dir is not None:
        make_report_dir(asked.report_dir)
    started_at = now()
    return _show(asked, build_diff_report(compare_files(asked.files), asked.command, started_at), DIFF_FAILS_ON)
