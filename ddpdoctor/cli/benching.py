"""From the command line of `allreduce-bench` to its exit status: start ranks, or be one; report what came of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.cli.bench_files import check_files, read_compared, save_plot, save_text
from ddpdoctor.cli.bench_options import read_settings, read_timeout, read_wanted
from ddpdoctor.cli.output import save_report, say, show_error, show_report
from ddpdoctor.cli.progress import ShownProgress
from ddpdoctor.diagnose.bandwidth import build_report, exit_status
from ddpdoctor.diagnose.bandwidth_machines import MachineReader, find_launch
from ddpdoctor.launch.processes.ranks import choose_ranks, end_with_parent, run_ranks
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.node import Launcher
from ddpdoctor.probes.bandwidth.member import load_torch
from ddpdoctor.probes.bandwidth.session import Job, run_rank, run_wrong_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.cli.bench_options import Asked
    from ddpdoctor.diagnose.bandwidth import Wanted
    from ddpdoctor.model.bandwidth import Bench, Settings
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.launch import Launch

WRONG_LIMIT_S = 10.0
"""Ours: how long a rank whose command line is wrong tries to tell rank 0, before it tells the user itself."""


def run(asked: Asked, env: Mapping[str, str]) -> int:
    """Run the bench, or this rank's part of it; return the exit status. Raises ``UserError``."""
    launch = find_launch(env)
    if launch.launcher is Launcher.NONE:
        return _start_ranks(asked, launch, env)
    if launch.launcher is Launcher.OWN:
        end_with_parent(int(launch.run))
    try:
        prepared = _prepare(asked, launch, launch.world_size)
        load_torch()
    except UserError as error:
        return run_wrong_rank(launch, env, error, WRONG_LIMIT_S, show_error)
    return _be_rank(asked, prepared, launch, env)


def refuse(error: UserError, env: Mapping[str, str]) -> int | None:
    """Tell a wrong command line once, though all ranks of a launcher have it; return the status.

    None where there is no launcher, and nothing has been told.
    """
    launch = find_launch(env)
    if launch.launcher is Launcher.NONE:
        return None
    return run_wrong_rank(launch, env, error, WRONG_LIMIT_S, show_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    settings: Settings
    wanted: Wanted
    timeout_s: float


def _prepare(asked: Asked, launch: Launch, world_size: int) -> _Prepared:
    """Check all that can be checked before ranks meet; files on rank 0 only, which is where they are."""
    if asked.nproc is not None and launch.launcher not in {Launcher.NONE, Launcher.OWN}:
        raise UserError(
            f"--nproc-per-node is for a start without a launcher; this process is rank {launch.rank} of one",
            help="Give the number of ranks to the launcher: torchrun --nproc-per-node, srun --ntasks-per-node.",
        )
    prepared = _Prepared(settings=read_settings(asked), wanted=read_wanted(asked), timeout_s=read_timeout(asked))
    if launch.rank != 0:
        return prepared
    check_files(asked)
    return replace(prepared, wanted=replace(prepared.wanted, baseline=read_compared(asked.compare, world_size)))


def _start_ranks(asked: Asked, launch: Launch, env: Mapping[str, str]) -> int:
    """Start ranks on this machine, unless this one is enough."""
    count, note = (asked.nproc, "") if asked.nproc is not None else choose_ranks(env)
    prepared = _prepare(asked, launch, count)
    if note:
        say(sys.stderr, note)
    if count == 1:
        load_torch()
        return _be_rank(asked, prepared, launch, env)
    return run_ranks(sys.argv[1:], count, env)


def _be_rank(asked: Asked, prepared: _Prepared, launch: Launch, env: Mapping[str, str]) -> int:
    reader = MachineReader(launch, env)
    with ShownProgress(sys.stderr, wanted=launch.rank == 0) as progress:
        job = Job(
            launch=launch,
            env=env,
            settings=prepared.settings,
            timeout_s=prepared.timeout_s,
            read_machines=reader,
            report=partial(_report, asked, prepared.wanted, reader, progress),
            show_error=show_error,
            progress=progress.show,
        )
        return run_rank(job)


def _report(asked: Asked, wanted: Wanted, reader: MachineReader, progress: ShownProgress, bench: Bench) -> int:
    """Judge, show and save a bench, on the rank that reports; return the exit status."""
    progress.stop()
    report = build_report(bench, replace(wanted, fleet=reader.fleet))
    _show(asked, report)
    return exit_status(report, None if asked.fail_on == "never" else Severity(asked.fail_on))


def _show(asked: Asked, report: Report) -> None:
    """Save first what is to be saved: a reader who has seen enough may close the pipe."""
    if asked.report_dir is not None:
        save_report(asked.report_dir, report)
    if asked.plot is not None:
        save_plot(report, asked.plot)
    if asked.output is None:
        show_report(report, asked.format, sys.stdout, asked.report_dir)
    else:
        save_text(report, asked.format, asked.output)
