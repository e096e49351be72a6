"""``ddpdoctor tune``: tries settings in one throwaway job, and names the line to change."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli.options import FORMAT, HANG_TIMEOUT, REPORT_DIR, Option, typed
from ddpdoctor.cli.output import save_report, say, show_report
from ddpdoctor.launch.command_line import OutputFormat, SplitCommand
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.findings import now
from ddpdoctor.model.tuning import AGAIN, BASE, LaunchKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.cli.running import MakeReport
    from ddpdoctor.launch.placement import WrapOptions
    from ddpdoctor.launch.session import JobOutcome
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.tuning import RestartPlan, TrialRecord, TriedBlock

THREADS = "OMP_NUM_THREADS"
INTERRUPTED = "interrupted before it was tried in every round"
MOST_RANKS = 64  # our choice: more ranks on one machine tell nothing
WORDS = {
    LaunchKind.ALONE: "one rank with all cores",
    LaunchKind.SHARE: "one rank with its share of the cores",
    LaunchKind.JOB: "all ranks",
}
LOOK_EVERY_S = 1.0
LEAST_ROUNDS = 4  # our choice: fewer ratios give no 95 % interval
# What --only takes, and what it stands for.
SETTINGS = {
    "bucket_cap": "bucket_cap_mb", "gradient_as_bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph", "find_unused_off": "find_unused_parameters=False",
    "buffers_off": "broadcast_buffers=False", "accumulate": "no_sync() over 4 steps",
    "no_sync": "no_sync() within a step", "bf16_reduction": "reduction in bf16", "bf16_autocast": "autocast to bf16",
    "unreduced": "no reduction at all", "workers": "num_workers of the loaders", "threads": "OMP_NUM_THREADS",
}  # fmt: skip
BY_RESTARTS = frozenset({"workers", "threads"})  # those that no running job can change
# Said before the job starts.
NOTICE = (
    "this is a trial: it starts the job, tries settings of DDP between steps, and then stops the job. The trained "
    "model is unusable, so what torch.save writes is discarded. Other files of the script are kept (safetensors, "
    "TensorBoard, wandb), so give the script its own output folder"
)


def launch_quietly(prepared: WrapOptions, make_report: MakeReport) -> JobOutcome:
    """Run one of several launches. Its report is shown only if something is wrong."""
    from ddpdoctor.cli.running import run_and_show

    return run_and_show(replace(prepared, quiet=True), make_report=make_report)


@contextmanager
def with_threads(count: str) -> Iterator[None]:
    """Give ranks a number of threads. The launcher inherits it."""
    before = {name: value for name, value in os.environ.items() if name == THREADS}
    os.environ[THREADS] = count
    try:
        yield
    finally:
        del os.environ[THREADS]
        os.environ.update(before)


class Restarts:
    """The launches of a trial and their results so far. Each has a folder in ``folder``, that of the first."""

    def __init__(self, plan: RestartPlan, options: Options, folder: Path) -> None:
        self.plan, self.options, self.folder = plan, options, folder
        self.rounds = options.rounds
        self.blocks: list[TriedBlock] = []
        self.refused = dict(plan.refused)
        self.stopped = ""  # why no more launches are made
        self.status = int(ExitStatus.OK)  # if the launches were stopped: the exit status of the last one

    def run(self) -> TrialRecord:
        """Make all launches, and return what they measured. Ctrl-C ends the current one, and no other begins."""
        from ddpdoctor.diagnose.tuning import describe_plan, order_launches, restarts_record

        say(sys.stderr, describe_plan(self.plan, self.rounds))
        launches = order_launches(self.plan, self.rounds)
        try:
            for count, (number, setting) in enumerate(launches, 1):
                if not self.stopped and setting not in self.refused:
                    self._launch(f"launch {count} of {len(launches)}", number, setting)
        except KeyboardInterrupt:
            self.stopped, self.status = INTERRUPTED, ExitStatus.INTERRUPTED
        return restarts_record(self.plan, self.rounds, self.blocks, self.refused, self.stopped)

    def _launch(self, label: str, number: int, setting: str) -> None:
        """Make one launch. A setting under which the job fails is not tried again. If its own fail, none is."""
        from ddpdoctor.diagnose.tuning import build_launch_report, read_launch, why_unmeasured, words_of_setting

        say(sys.stderr, f"{label}: {words_of_setting(setting)} (round {number + 1} of {self.rounds})")

        def make_report(outcome: JobOutcome) -> Report:
            return build_launch_report(
                outcome.folder, outcome.judgment, outcome.end, setting=setting, number=number, rounds=self.rounds
            )

        folder = self.folder / f"round-{number + 1}-{setting.replace('=', '-')}"
        prepared = _prepare_wrap(replace(self.options, report_dir=folder), setting=setting)
        name, _, value = setting.partition("=")
        with with_threads(value) if name == "threads" else nullcontext():
            outcome = launch_quietly(prepared, make_report)
        block = None if outcome.end.interrupted else read_launch(outcome.folder, setting, number)
        if block is not None:
            self.blocks.append(block)
            return
        interrupted = outcome.end.interrupted
        reason = INTERRUPTED if interrupted else why_unmeasured(outcome.folder, make_report(outcome), setting)
        say(sys.stderr, f"{label} has no result: {words_of_setting(setting)}: {reason}")
        if interrupted or setting in {BASE, AGAIN}:
            self.stopped = INTERRUPTED if interrupted else f"{reason}: the script's own settings"
            self.status = outcome.exit_status or ExitStatus.INCONCLUSIVE
        else:
            self.refused[setting] = reason


@contextmanager
def _share_of(ranks: int) -> Iterator[None]:
    """Give one rank the cores and threads that it has when all ranks run. The launcher inherits both."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: max(1, len(cores) // ranks)])
    try:
        with with_threads(os.environ.get(THREADS) or "1"):  # torchrun sets 1 where there are several ranks
            yield
    finally:
        os.sched_setaffinity(0, cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Try DDP settings in one throwaway job, and name the one that saves most time.

    The job starts as under `ddpdoctor wrap`, and is stopped when all settings have been tried. What torch.save writes
    is discarded.
    """

    split: SplitCommand  # the command to run, and torchrun's options
    rounds: Annotated[int, Option(min=LEAST_ROUNDS, metavar="N", help="How often to try each setting.")] = LEAST_ROUNDS
    only: Annotated[tuple[str, ...], Option(metavar="SETTING", help="Try only this setting; may be repeated.")] = ()
    scaling: Annotated[
        str | None, Option(metavar="N,N", help="Measure how the job scales to these numbers of ranks.")
    ] = None
    hang_timeout_s: Annotated[float, HANG_TIMEOUT.but(variable="DDPDOCTOR_HANG_TIMEOUT")] = typed("300")
    report_dir: Annotated[
        Path | None, REPORT_DIR.but(variable="DDPDOCTOR_REPORT_DIR", help="The run folder: new, or without a report.")
    ] = None
    format: Annotated[OutputFormat, FORMAT.but(variable="DDPDOCTOR_FORMAT", help="Format on stderr:")] = "text"


def run(options: Options) -> int:
    from ddpdoctor.cli.running import run_and_show
    from ddpdoctor.launch.starting import find_outer_run

    if find_outer_run(os.environ) is not None:
        raise UserError("this already runs under ddpdoctor wrap", help="Run ddpdoctor tune by itself.")
    if options.scaling is not None:
        if options.only:
            raise UserError("--scaling cannot be used with --only")
        words = [word.strip() for word in options.scaling.split(",")]
        if not all(word.isdigit() and 0 < int(word) <= MOST_RANKS for word in words) or {*words} == {"1"}:
            what = f"--scaling is {options.scaling!r}, which is not a list of rank counts"
            raise UserError(what, help=f"Give numbers from 1 to {MOST_RANKS}, one of them above 1: --scaling 1,2,4.")
        say(sys.stderr, NOTICE)
        return _measure_sizes(options, tuple(sorted({int(word) for word in words})))
    is_in_turns = not options.only or not BY_RESTARTS.issuperset(options.only)
    prepared = _prepare_wrap(options, setting="" if is_in_turns else BASE)
    if not is_in_turns and not prepared.placement.alone:
        what = "settings that need restarts can be tried on one node only"
        raise UserError(what, help="Run ddpdoctor tune on one node by itself.")
    say(sys.stderr, NOTICE)
    if is_in_turns:
        Thread(target=_say_outlook, args=(prepared.report_dir,), daemon=True).start()
    began_s = time.monotonic()

    def plan_after(outcome: JobOutcome) -> RestartPlan | None:
        """Return what to try by restarts after the first launch, or None if it was the only one."""
        from ddpdoctor.diagnose.tuning import read_plan

        if outcome.exit_status or outcome.end.interrupted or not prepared.placement.alone:
            return None
        return read_plan(outcome.folder, options.only, time.monotonic() - began_s)

    outcome = run_and_show(prepared, make_report=_report, is_last=lambda job: plan_after(job) is None)
    if (plan := plan_after(outcome)) is not None:
        from ddpdoctor.diagnose.tuning import build_tune_report

        restarts = Restarts(plan, options, prepared.report_dir)
        report = build_tune_report(outcome.folder, outcome.judgment, outcome.end, restarts.run())
        save_report(prepared.report_file.parent, report, prepared.report_file.name)
        show_report(report, prepared.format, sys.stderr, prepared.report_dir)
        has_result = restarts.status != ExitStatus.INTERRUPTED and report.data["tune"].result is not None
        return ExitStatus.OK if has_result else restarts.status or ExitStatus.WRONG_USE
    trial = _report(outcome).data["tune"]
    if trial.result is not None:
        return ExitStatus.OK
    # A trial that cannot have a result, or one that came to none because of the job.
    return ExitStatus.WRONG_USE if trial.problem else outcome.exit_status


def _measure_sizes(options: Options, sizes: tuple[int, ...]) -> int:
    """Launch the job with each number of ranks, show the efficiency; return the exit status. Raises ``UserError``."""
    from ddpdoctor.diagnose.tuning import build_scaling_report

    split = options.split
    if split.is_command:
        what = "--scaling needs a script, because it chooses the number of ranks"
        raise UserError(what, help="Give the script: ddpdoctor tune --scaling 1,2,4 train.py")
    if any(word.startswith(("--nproc", "--nnodes")) for word in split.torchrun):
        raise UserError("--scaling cannot be used with --nproc-per-node or --nnodes", help="Leave them out.")

    def prepare(count: int, folder: Path | None) -> WrapOptions:
        with_ranks = replace(split, torchrun=(*split.torchrun, f"--nproc-per-node={count}"))
        return _prepare_wrap(replace(options, split=with_ranks, report_dir=folder, only=("unreduced",)))

    started_at, cores = now(), len(os.sched_getaffinity(0))
    larger = [(kind, size) for size in sizes if size > 1 for kind in (LaunchKind.SHARE, LaunchKind.JOB)]
    planned = [(LaunchKind.ALONE, 1), *larger]
    first = prepare(1, options.report_dir)
    done = []
    for number, (kind, ranks) in enumerate(planned, 1):
        say(sys.stderr, f"launch {number} of {len(planned)}: {WORDS[kind]}, for {ranks}")
        folder = first.report_dir / f"{kind.value}-{ranks}"
        with _share_of(ranks) if kind is LaunchKind.SHARE else nullcontext():
            outcome = launch_quietly(prepare(ranks if kind is LaunchKind.JOB else 1, folder), _report)
            has_result = _report(outcome).data["tune"].result is not None
        if not has_result:
            say(sys.stderr, f"no efficiency: launch {number} has no result; its run folder is {folder}")
            return outcome.exit_status or ExitStatus.INCONCLUSIVE
        done.append((kind, ranks, outcome.folder))
    note = f"{cores} cores for up to {max(sizes)} ranks: contention includes the cost of sharing cores"
    notes = (note,) if max(sizes) > cores else ()
    report = build_scaling_report(done, first.command, started_at, notes)
    save_report(first.report_dir, report)
    show_report(report, first.format, sys.stderr, first.report_dir)
    return ExitStatus.OK


def _prepare_wrap(options: Options, setting: str = "") -> WrapOptions:
    """Prepare the job as ``wrap`` does, without what would distort steps. A launch may have one setting throughout."""
    from ddpdoctor.cli.wrap import Options as Wrapped
    from ddpdoctor.cli.wrap import prepare
    from ddpdoctor.recorder.settings import RecorderSettings

    for name in options.only:
        if name not in SETTINGS:
            known = ", ".join(SETTINGS)
            raise UserError(f"unknown setting {name}", help=f"Nothing was started. Known settings: {known}.")
    wrapped = Wrapped(
        split=options.split, hang_timeout_s=options.hang_timeout_s, on_hang="kill", debug_level="OFF",
        report_dir=options.report_dir, format=options.format, no_consistency=True,
    )  # fmt: skip
    in_turns = [name for name in options.only if name not in BY_RESTARTS]
    ranks = RecorderSettings(tune_rounds=options.rounds, tune_only=",".join(in_turns), tune_setting=setting)
    return replace(prepare(wrapped, os.environ), ranks=ranks)


def _say_outlook(folder: Path) -> None:
    """Print once how long the trial takes, as soon as that is known: nothing else shows progress."""
    from ddpdoctor.diagnose.tuning import read_outlook

    while not (outlook := read_outlook(folder)):
        time.sleep(LOOK_EVERY_S)
    say(sys.stderr, outlook)


def _report(outcome: JobOutcome) -> Report:
    from ddpdoctor.diagnose.tuning import build_tune_report

    return build_tune_report(outcome.folder, outcome.judgment, outcome.end)
