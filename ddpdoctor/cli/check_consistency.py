"""``ddpdoctor check-consistency``: checks whether a model stays equal on all ranks, or whether files are equal."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddpdoctor.cli import options as shared
from ddpdoctor.cli.options import COMPARE, Argument, Backend, FailOn, Option, ReportFormat, settings_of, typed
from ddpdoctor.cli.output import Outputs, check_outputs, deliver_check, show_error
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import now
from ddpdoctor.model.trial import TrialSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.cli.output import Outputs
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Train your model for a few steps under DDP, and compare all ranks.

    Runs in the ranks of torchrun or srun, or starts ranks on this machine. With --diff, it compares files instead.
    """

    files: Annotated[tuple[Path, ...], Argument(metavar="FILE", help="With --diff: the files to compare.")] = ()
    model: Annotated[str, shared.MODEL.but(metavar="NAME", help="Function that returns the model.")] = ""
    batch: Annotated[str, Option(metavar="NAME", help="Function that returns a batch.  [default: random]")] = ""
    step: Annotated[str, Option(metavar="NAME", help="Function that does forward and backward.")] = ""
    steps: Annotated[int, Option(min=1, metavar="N", help="Optimizer steps to run.")] = 5
    reference: Annotated[bool, shared.REFERENCE.but(help="Compare DDP's gradient with one process.")] = False
    twice: Annotated[bool, Option(help="Run twice with one seed, and compare all bits.")] = False
    allow_different: Annotated[tuple[str, ...], shared.ALLOW_DIFFERENT] = ()
    unused: Annotated[
        bool, Option(names=("--find-unused-parameters",), help="Pass find_unused_parameters=True to DDP.")
    ] = False
    backend: Annotated[Backend | None, shared.BACKEND] = None
    seed: Annotated[int, Option(metavar="N", help="Seed of model, batches and steps.")] = 0
    nproc_per_node: Annotated[int | None, shared.NPROC_PER_NODE] = None
    diff: Annotated[bool, Option(panel=COMPARE, help="Compare files by tensor name; starts no ranks.")] = False
    format: Annotated[ReportFormat, shared.FORMAT] = "text"
    report_dir: Annotated[Path | None, shared.REPORT_DIR] = None
    output: Annotated[Path | None, shared.OUTPUT] = None
    fail_on: Annotated[FailOn | None, shared.FAIL_ON] = None
    ignore: Annotated[tuple[str, ...], shared.IGNORE] = ()
    limit_s: Annotated[float, shared.TIMEOUT.but(help="Longest start, model build or step.")] = typed("2m")


def run(options: Options) -> int:
    if options.diff:
        from ddpdoctor.diagnose.files import build_diff_report
        from ddpdoctor.probes.diff import compare_files
        from ddpdoctor.probes.loading import load_torch

        if len(options.files) < 2:
            what = f"--diff needs at least two files, but got {len(options.files)}"
            raise UserError(what, help="ddpdoctor check-consistency --diff FILE FILE...")
        outputs = check_outputs(options, fail_on=options.fail_on or "warning")  # any difference matters
        load_torch()
        started_at = now()
        return deliver_check(build_diff_report(compare_files(options.files), tuple(sys.argv), started_at), outputs)
    from ddpdoctor.cli.ranks import run_in_ranks

    env = dict(os.environ)
    return run_in_ranks(options.nproc_per_node, env, partial(_trial_setup, options), partial(_take_part, options, env))


def _trial_setup(options: Options, launch: Launch, _: int) -> TrialSettings:
    """Check everything that is possible before the ranks connect. Only rank 0 checks files: they are on its host."""
    if options.files:
        what = f"{options.files[0]} is a file, and files are compared only with --diff"
        raise UserError(what, help="ddpdoctor check-consistency --diff FILE FILE...")
    if not options.model:
        raise UserError(
            "nothing to check: neither --model nor --diff was given",
            help="torchrun --nproc-per-node 2 -m ddpdoctor check-consistency --model package.module:build_model",
        )
    if launch.rank == 0:
        check_outputs(options, fail_on="error")
    return settings_of(options, TrialSettings, backend=options.backend or "")


def _take_part(options: Options, env: Mapping[str, str], launch: Launch, settings: TrialSettings) -> int:
    from ddpdoctor.probes.consistency.session import run_rank

    started_at = now()

    def report(trial: Trial) -> int:
        """Judge, save and show a trial on the reporting rank; return the exit status."""
        from ddpdoctor.diagnose.files import build_report

        outputs = settings_of(options, Outputs, fail_on=options.fail_on or "error")
        return deliver_check(build_report(trial, tuple(sys.argv), started_at), outputs)

    return run_rank(launch, env, settings, report, show_error)
