"""From the command line of `allreduce-bench` to its exit status: start ranks, or be one; report what came of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpdoctor.cli.bench_options import Demands, read_demands, read_settings
from ddpdoctor.cli.durations import parse_duration
from ddpdoctor.cli.output import save_report, say, show_error, show_report
from ddpdoctor.diagnose.bandwidth_machines import MachineReader, find_launch
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.cli.bench_options import Asked
    from ddpdoctor.model.bandwidth import Bench, Settings
    from ddpdoctor.model.launch import Launch


def run(asked: Asked, env: Mapping[str, str]) -> int:
    """Run the bench, or this rank's part of it; return the exit status. Raises ``UserError``."""
    launch = find_launch(env)
    if launch.launcher is Launcher.NONE:
        return _start_ranks(asked, launch, env)
    return _be_rank(asked, launch, env)


def _start_ranks(asked: Asked, launch: Launch, env: Mapping[str, str]) -> int:
    """Check all that can be checked, so that it is said once; then start ranks, unless this one is enough."""
    from ddpdoctor.launch.ranks import choose_ranks, run_ranks

    _prepare(asked)
    count, note = (asked.nproc, "") if asked.nproc is not None else choose_ranks(env)
    if note:
        say(sys.stderr, note)
    if count == 1:
        return _be_rank(asked, launch, env)
    return run_ranks(sys.argv[1:], count, env)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    settings: Settings
    demands: Demands
    baseline: Any


def _prepare(asked: Asked) -> _Prepared:
    """Check the whole command line; raises ``UserError``. Only what is written to is not touched yet."""
    from ddpdoctor.cli.bench_files import check_files, read_compared

    settings, demands = read_settings(asked), read_demands(asked)
    parse_duration(asked.timeout, "--timeout")
    check_files(asked)
    return _Prepared(settings=settings, demands=demands, baseline=read_compared(asked))


def _be_rank(asked: Asked, launch: Launch, env: Mapping[str, str]) -> int:
    from ddpdoctor.probes.bandwidth.session import Job, run_rank

    prepared, error = _try_to_prepare(asked, launch)
    reader = MachineReader(launch, env)
    started_at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    job = Job(
        launch=launch,
        env=env,
        settings=None if prepared is None else prepared.settings,
        error=error,
        timeout_s=parse_duration(asked.timeout, "--timeout"),
        read_machines=reader,
        report=partial(_report, asked, prepared, reader, started_at),
        show_error=show_error,
        progress=lambda *_: None,
    )
    return run_rank(job)


def _try_to_prepare(asked: Asked, launch: Launch) -> tuple[_Prepared | None, UserError | None]:
    """Under a launcher all ranks have the same mistake, and rank 0 alone tells it: see the agreement."""
    try:
        if asked.nproc is not None and launch.launcher not in {Launcher.NONE, Launcher.OWN}:
            raise UserError(
                f"--nproc-per-node is for a start without a launcher, and {launch.launcher.value} has started this rank",
                help="Give the number of ranks to torchrun or srun instead.",
            )
        return _prepare(asked), None
    except UserError as error:
        return None, error


def _report(asked: Asked, prepared: _Prepared, reader: MachineReader, started_at: str, bench: Bench) -> int:
    """Judge, show and save a bench, on the rank that reports; return the exit status."""
    from ddpdoctor.diagnose.bandwidth import Wanted, build_report, exit_status

    report = build_report(
        bench,
        Wanted(
            command=asked.command,
            started_at=started_at,
            fleet=reader.fleet,
            baseline=prepared.baseline,
            fail_below=prepared.demands.fail_below,
            expect_gb_s=prepared.demands.expect_gb_s,
            use_reference=asked.use_reference,
            model_size=prepared.demands.model_size,
        ),
    )
    if asked.output is None:
        show_report(report, asked.format, sys.stdout, None)
    if asked.report_dir is not None:
        save_report(asked.report_dir, report)
    return exit_status(report, None if asked.fail_on is None else Severity(asked.fail_on))
