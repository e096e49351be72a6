"""``ddpdoctor check-checkpoint``: is a checkpoint whole, and would it load into the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ddpdoctor.launch.command.options import FailOn, ReportFormat


def check_checkpoint(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Files, or folders of them; distributed checkpoints too.")
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="A function of yours that returns the model to load into."),
    ] = None,
    same: Annotated[
        bool, typer.Option("--same", help="The files are copies of one checkpoint: report where they differ.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Read the index only: neither checksums nor values.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every check with what it saw, and notes.")
    ] = False,
    format: Annotated[  # noqa: A002 - the option's name
        ReportFormat, typer.Option(help="How the report is written to stdout.")
    ] = "text",
    fail_on: Annotated[FailOn, typer.Option(help="The least severe finding for which the exit status is 1.")] = "error",
    report_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Save report.json in this folder too.")] = None,
) -> None:
    """Check checkpoints: damage by tensor, missing parts, names and shapes against the model, NaN.

    Nothing that is in a file is run. Values are read through a map of the file, so that it need not fit in memory.
    """
    from ddpdoctor.cli.progress import ShownProgress
    from ddpdoctor.cli.showing import Shown, show_check
    from ddpdoctor.diagnose.check_env import now
    from ddpdoctor.diagnose.checkpoints import checkpoint_report
    from ddpdoctor.probes.checkpoint.session import Wanted, read_checkpoints

    started_at = now()
    wanted = Wanted(paths=tuple(files), model=model, same=same, quick=quick)
    with ShownProgress(sys.stderr, wanted=True) as progress:
        seen = read_checkpoints(wanted, lambda path: progress.show(f"reading {path}", 0.0, None))
    shown = Shown(verbose=verbose, format=format, fail_on=fail_on, report_dir=report_dir)
    raise typer.Exit(show_check(checkpoint_report(seen, tuple(sys.argv), started_at), shown))
