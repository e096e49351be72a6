"""``ddpdoctor wrap``: runs a training script as torchrun would, and watches it."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from ddpdoctor.cli import options as shared
from ddpdoctor.cli.actions import Actor, WebhookFormat, check_webhook, log_findings, status_of_verdict
from ddpdoctor.cli.metrics import MetricExport, check_metrics
from ddpdoctor.cli.options import ACTIONS, HANGS, METRICS, REPLICAS, REPORT, FailOn, Option, settings_of, typed
from ddpdoctor.cli.output import check_writable, say, severity_of
from ddpdoctor.launch.command_line import DebugLevel, OnHang, OutputFormat, SplitCommand, choose_ranks, read_source
from ddpdoctor.launch.placement import Style, WrapOptions, place
from ddpdoctor.launch.run_folder import REPORT_NAME, Starter, make_member_folder
from ddpdoctor.launch.starting import become_launcher, choose_debug_level, find_outer_run
from ddpdoctor.recorder.settings import RecorderSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTO = "auto"
# The distance of ``--check-every auto`` where a rank can measure nothing, such as without an optimizer of torch.
NOMINAL_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Run a training script like torchrun, and explain a hang or a crash.

    Takes torchrun's options. `-m MODULE` runs a module. After `--`, any command that starts ranks works: torchrun,
    accelerate, deepspeed, mpirun, a shell script. The exit status is the launcher's, or 124 if a hung job was stopped.
    """

    VARIABLES: ClassVar[str] = "DDPDOCTOR_"  # how the variables begin that set the options
    split: SplitCommand  # the command to run, and torchrun's options
    hang_timeout_s: Annotated[float, shared.HANG_TIMEOUT] = typed("300")
    on_hang: Annotated[OnHang, Option(panel=HANGS, metavar="WHEN", help="When to stop:")] = "auto"
    debug_level: Annotated[
        DebugLevel | None,
        Option(panel=HANGS, ignores_case=True, metavar="LEVEL", help="TORCH_DISTRIBUTED_DEBUG: DETAIL, INFO or OFF."),
    ] = None
    report_dir: Annotated[Path | None, shared.REPORT_DIR.but(help="The run folder: new, or without a report.")] = None
    format: Annotated[OutputFormat, shared.FORMAT.but(help="Format on stderr:")] = "text"
    html: Annotated[Path | None, shared.HTML] = None
    fail_on: Annotated[FailOn, shared.FAIL_ON] = "never"
    quiet: Annotated[bool, Option(panel=REPORT, help="Show only errors.")] = False
    ignore: Annotated[tuple[str, ...], shared.IGNORE] = ()
    check_every: Annotated[
        str, Option(panel=REPLICAS, metavar="N", help="Compare replicas every N steps, or by cost (auto).")
    ] = AUTO
    no_consistency: Annotated[bool, Option(panel=REPLICAS, help="Do not check replicas, gradients and data.")] = False
    allow_different: Annotated[tuple[str, ...], shared.ALLOW_DIFFERENT] = ()
    speed: Annotated[bool, Option(panel=REPORT, help="Show where a step's time goes and what to change.")] = False
    exchange_port: Annotated[int | None, shared.EXCHANGE_PORT] = None
    on_finding: Annotated[
        str | None, Option(panel=ACTIONS, metavar="COMMAND", help="Run this at a verdict, with the report on stdin.")
    ] = None
    webhook: Annotated[str | None, Option(panel=ACTIONS, metavar="URL", help="Post a verdict to this URL.")] = None
    webhook_format: Annotated[WebhookFormat, Option(panel=ACTIONS, metavar="FORMAT", help="Format:")] = "json"
    exclude_file: Annotated[
        Path | None, Option(panel=ACTIONS, metavar="FILE", help="Append hosts at fault, for `srun --exclude`.")
    ] = None
    exit_status_of_verdict: Annotated[
        bool, Option(panel=ACTIONS, help="Exit with 75 to retry elsewhere, 70 to give up.")
    ] = False
    log_findings: Annotated[bool, Option(panel=ACTIONS, help="Add findings to the script's own training logs.")] = False
    metrics_file: Annotated[
        Path | None, Option(panel=METRICS, metavar="FILE", help="Write metrics for Prometheus while the job runs.")
    ] = None
    metrics_every: Annotated[str, Option(panel=METRICS, metavar="DURATION", help="How often.")] = "15s"
    otlp: Annotated[bool, Option(panel=METRICS, help="Send metrics to an OpenTelemetry collector.")] = False


def run(options: Options) -> int:
    from ddpdoctor.cli.running import after_the_job, outcome_report, run_and_show
    from ddpdoctor.model.errors import ExitStatus

    outer = find_outer_run(os.environ)
    prepared = prepare(options, os.environ, outer)
    if outer is not None:
        if not prepared.quiet:
            already = "another ddpdoctor wrap already watches this job with its own options"
            say(sys.stderr, f"{already}; its report is in {prepared.report_dir}")
        become_launcher(prepared)
    actor = settings_of(options, Actor)
    every_s = shared.parse_duration(options.metrics_every, "--metrics-every")
    export = settings_of(options, MetricExport, job=prepared, metrics_every_s=every_s)
    outcome = run_and_show(prepared, act=actor.act, started=export.start)
    status = outcome.exit_status

    def log() -> None:
        if options.log_findings:
            log_findings(outcome.folder, outcome_report(outcome), prepared.report_file)

    def settle_status() -> None:
        nonlocal status
        if options.fail_on != "never" and status == 0 and report().has_found(severity_of(options.fail_on)):
            status = ExitStatus.FOUND
        elif options.exit_status_of_verdict:
            status = status_of_verdict(report(), status)

    # The ranks have ended. From here on only the user's own options change the status.
    report = partial(outcome_report, outcome)
    after_the_job(outcome, partial(export.finish, outcome.folder, report), log, actor.finish, settle_status)
    return status


def prepare(
    options: Options, env: Mapping[str, str], outer: Path | None = None, command: tuple[str, ...] = ()
) -> WrapOptions:
    """Check everything that is possible before the start, and make the run folder last. Raises ``UserError``.

    ``outer`` is the run folder of a ``wrap`` around this one; then none is made. ``command`` replaces the command line
    in the report.
    """
    if options.webhook:
        check_webhook(options.webhook)
    if options.exclude_file is not None:
        check_writable(options.exclude_file, "--exclude-file")
    shared.parse_duration(options.metrics_every, "--metrics-every")
    if options.metrics_file is not None or options.otlp:
        check_metrics(options.metrics_file, env, otlp=options.otlp)
    command = command or tuple(sys.argv)
    split = options.split
    if not split.is_command:  # torchrun's flags have variables; it complains itself about one that is no number
        texts = {name: env.get(name, "").strip() for name in ("PET_MODULE", "PET_NO_PYTHON")}
        given = {name for name, text in texts.items() if text.isdigit() and int(text)}
        is_module, no_python = split.is_module or "PET_MODULE" in given, split.no_python or "PET_NO_PYTHON" in given
        split = replace(split, is_module=is_module, no_python=no_python)
    source = read_source(split, env)
    ignore = options.ignore
    if ignore:
        from ddpdoctor.diagnose.files import check_codes

        ignore = check_codes(ignore)
    placement = place(split, env, options.exchange_port)
    by_torchrun = placement.style is Style.TORCHRUN
    nproc_args, note = choose_ranks(split.torchrun, source, env) if by_torchrun else ((), None)
    if options.html is not None:
        check_writable(options.html, "--html")
    # Under another wrap, that one's options apply. The variable is then the one that it set for its ranks.
    compares, is_auto = not options.no_consistency and outer is None, options.check_every == AUTO
    every = NOMINAL_STEPS if is_auto or not compares else shared.parse_steps(options.check_every, "--check-every")
    every = every if compares else 0
    ranks = settings_of(options, RecorderSettings, check_every=every, check_auto=is_auto and compares)
    if outer is None:
        starter = Starter(
            script=options.split.script, is_module=options.split.is_module, command=command, host=socket.gethostname(),
            env=env, now=datetime.now(),  # noqa: DTZ005  local time, as people look for it
        )  # fmt: skip
        folder, report_file = make_member_folder(options.report_dir, placement, starter)
    else:  # only the wrap around this one writes a report
        folder, report_file = outer, outer / REPORT_NAME
    return settings_of(
        options,
        WrapOptions,
        debug_level=choose_debug_level(options.debug_level, env, alone=placement.alone, for_speed=options.speed),
        report_dir=folder, report_file=report_file, placement=placement, ignore=ignore, ranks=ranks, nproc_note=note,
        command=command, split=replace(split, torchrun=(*nproc_args, *placement.torchrun_args, *split.torchrun)),
    )  # fmt: skip
