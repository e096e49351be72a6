"""``ddpdoctor tune``: tries settings in one job that is thrown away, and says which line to change."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import FORMAT, HANG_TIMEOUT, REPORT_DIR, Option, typed
from ddpdoctor.launch.command_line import OutputFormat, SplitCommand
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.tuning import BASE

if TYPE_CHECKING:
    from ddpdoctor.launch.command_line import WrapOptions
    from ddpdoctor.launch.session import JobOutcome
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.tuning import RestartPlan

LOOK_EVERY_S = 1.0
LEAST_ROUNDS = 4
"""Our choice: fewer ratios give no 95 % interval."""
SETTINGS = {
    "bucket_cap": "bucket_cap_mb",
    "gradient_as_bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph",
    "find_unused_off": "find_unused_parameters=False",
    "buffers_off": "broadcast_buffers=False",
    "accumulate": "no_sync() over 4 steps",
    "no_sync": "no_sync() within a step",
    "bf16_reduction": "reduction in bf16",
    "bf16_autocast": "autocast to bf16",
    "unreduced": "no reduction at all",
    "workers": "num_workers of the loaders",
    "threads": "OMP_NUM_THREADS",
}
"""What --only takes, and what it stands for."""
BY_RESTARTS = frozenset({"workers", "threads"})
"""Those that no running job can change."""
NOTICE = (
    "this is a trial: it starts the job, tries settings of DDP between steps, and then stops the job. The trained "
    "model is of no use. What torch.save writes is thrown away. Other files of the script are kept (safetensors, "
    "TensorBoard, wandb), so give the script its own output folder"
)
"""Said before the job starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Try DDP settings in one throwaway job, and name the one that saves most time.

    The job starts as under `ddpdoctor wrap`, and is stopped when all settings were tried. What torch.save writes is
    thrown away.
    """

    split: SplitCommand
    """The command to run, and torchrun's options."""
    rounds: Annotated[int, Option(min=LEAST_ROUNDS, metavar="N", help="How often to try each setting.")] = LEAST_ROUNDS
    only: Annotated[
        tuple[str, ...],
        Option(metavar="SETTING", help="Try only this setting; may be repeated."),
    ] = ()
    scaling: Annotated[
        str | None,
        Option(
            metavar="N,N",
            help="Measure how the job scales to these numbers of ranks.",
        ),
    ] = None
    hang_timeout_s: Annotated[float, HANG_TIMEOUT.but(variable="DDPDOCTOR_HANG_TIMEOUT")] = typed("300")
    report_dir: Annotated[
        Path | None,
        REPORT_DIR.but(
            variable="DDPDOCTOR_REPORT_DIR",
            help="The run folder: new, or without a report.",
        ),
    ] = None
    format: Annotated[OutputFormat, FORMAT.but(variable="DDPDOCTOR_FORMAT", help="Format on stderr:")] = "text"


def run(options: Options) -> int:
    """Run the trial, show what it measured, and return the exit status. Raises ``UserError``."""
    from ddpdoctor.cli.output import say
    from ddpdoctor.cli.running import run_and_show
    from ddpdoctor.launch.starting import find_outer_run

    if find_outer_run(os.environ) is not None:
        raise UserError("this already runs under ddpdoctor wrap", help="Run ddpdoctor tune by itself.")
    if options.scaling is not None:
        return _measure_sizes(options, options.scaling)
    is_in_turns = not options.only or not BY_RESTARTS.issuperset(options.only)
    prepared = _prepare(options, setting="" if is_in_turns else BASE)
    if not is_in_turns and not prepared.placement.alone:
        raise UserError(
            "settings that need restarts can be tried on one node only",
            help="Run ddpdoctor tune on one node by itself.",
        )
    say(sys.stderr, NOTICE)
    if is_in_turns:
        Thread(target=_say_outlook, args=(prepared.report_dir,), daemon=True).start()
    began_s = time.monotonic()
    plan_after = partial(_plan_after, options, prepared, began_s)
    outcome = run_and_show(prepared, make_report=_report, is_last=lambda one: plan_after(one) is None)
    plan = plan_after(outcome)
    return _status(outcome) if plan is None else _restart(options, prepared, outcome, plan)


def _plan_after(options: Options, prepared: WrapOptions, began_s: float, outcome: JobOutcome) -> RestartPlan | None:
    """Return what to try by restarts after the first launch, or None if it was the only one."""
    from ddpdoctor.diagnose.tuning import read_plan

    if outcome.exit_status or outcome.end.interrupted or not prepared.placement.alone:
        return None
    return read_plan(outcome.folder, options.only, time.monotonic() - began_s)


def _restart(options: Options, first: WrapOptions, outcome: JobOutcome, plan: RestartPlan) -> int:
    """Try settings by restarts, show the report of all launches, and return the exit status."""
    from ddpdoctor.cli.output import save_report, show_report
    from ddpdoctor.cli.restarts import Restarts
    from ddpdoctor.diagnose.tuning import build_tune_report

    def prepare(setting: str, folder: Path) -> WrapOptions:
        return _prepare(replace(options, report_dir=folder), setting=setting)

    restarts = Restarts(plan, options.rounds, first.report_dir, prepare)
    report = build_tune_report(outcome.folder, outcome.judgment, outcome.end, restarts.run())
    save_report(first.report_file.parent, report, first.report_file.name)
    show_report(report, first.format, sys.stderr, first.report_dir)
    if restarts.status == ExitStatus.INTERRUPTED or report.data["tune"]["result"] is None:
        return restarts.status or ExitStatus.WRONG_USE
    return ExitStatus.OK


def _measure_sizes(options: Options, sizes: str) -> int:
    """Run the job with several numbers of ranks. Raises ``UserError``."""
    from ddpdoctor.cli.launches import launch_quietly
    from ddpdoctor.cli.output import say
    from ddpdoctor.cli.scaling import measure_sizes, parse_sizes

    if options.only:
        raise UserError("--scaling cannot be used with --only")
    wanted = parse_sizes(sizes)
    say(sys.stderr, NOTICE)

    def prepare(split: SplitCommand, folder: Path | None) -> WrapOptions:
        return _prepare(replace(options, split=split, report_dir=folder or options.report_dir, only=("unreduced",)))

    def launch(prepared: WrapOptions) -> tuple[JobOutcome, bool]:
        outcome = launch_quietly(prepared, _report)
        return outcome, _report(outcome).data["tune"]["result"] is not None

    return measure_sizes(options.split, wanted, prepare, launch)


def _prepare(options: Options, setting: str = "") -> WrapOptions:
    """Prepare the job as ``wrap`` does, without what would distort steps. A launch may have one setting throughout."""
    from ddpdoctor.cli.wrap import Options as Wrapped
    from ddpdoctor.cli.wrap import prepare
    from ddpdoctor.recorder.settings import RecorderSettings

    for name in options.only:
        if name not in SETTINGS:
            raise UserError(
                f"there is no setting {name}", help=f"Nothing was started. There are: {', '.join(SETTINGS)}."
            )
    wrapped = Wrapped(
        split=options.split,
        hang_timeout_s=options.hang_timeout_s,
        on_hang="kill",
        debug_level="OFF",
        report_dir=options.report_dir,
        format=options.format,
        no_consistency=True,
    )
    in_turns = [name for name in options.only if name not in BY_RESTARTS]
    ranks = RecorderSettings(tune_rounds=options.rounds, tune_only=",".join(in_turns), tune_setting=setting)
    return replace(prepare(wrapped, os.environ), ranks=ranks)


def _say_outlook(folder: Path) -> None:
    """Say once how long the trial takes, as soon as that is known: nothing else shows that it goes on."""
    from ddpdoctor.cli.output import say
    from ddpdoctor.diagnose.tuning import read_outlook

    while not (outlook := read_outlook(folder)):
        time.sleep(LOOK_EVERY_S)
    say(sys.stderr, outlook)


def _report(outcome: JobOutcome) -> Report:
    from ddpdoctor.diagnose.tuning import build_tune_report

    return build_tune_report(outcome.folder, outcome.judgment, outcome.end)


def _status(outcome: JobOutcome) -> int:
    """Return 0 for a trial with a result, 2 for one that cannot have one, and else the job's own status."""
    trial = _report(outcome).data["tune"]
    if trial["result"] is not None:
        return ExitStatus.OK
    return ExitStatus.WRONG_USE if trial["problem"] else outcome.exit_status
