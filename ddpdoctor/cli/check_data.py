"""``ddpdoctor check-data``: is the data really shared out, and what does each rank get of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ddpdoctor.launch.command.options import FailOn, ReportFormat


def check_data(
    *,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function of yours that returns the DataLoader of this rank; it is asked for its indices.",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, max=16, metavar="N", help="With --dataset: passes to look at.")] = 2,
    set_epoch: Annotated[
        bool,
        typer.Option(
            "--set-epoch/--no-set-epoch", help="With --dataset: call the sampler's set_epoch before each pass, or not."
        ),
    ] = True,
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The arithmetic alone: length of the dataset.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks; with --dataset and no launcher: start so many here."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of each rank's loader.  [default: 1]")
    ] = None,
    drop_last: Annotated[
        bool, typer.Option("--drop-last", help="The loader leaves out a last batch that is not full.")
    ] = False,
    sampler_drop_last: Annotated[
        bool, typer.Option("--sampler-drop-last", help="DistributedSampler(drop_last=True): nothing is repeated.")
    ] = False,
    no_sampler: Annotated[
        bool, typer.Option("--no-sampler", help="Nothing shares out: every rank goes over all samples.")
    ] = False,
    split: Annotated[
        bool, typer.Option("--split", help="Split by hand, without padding: samples[rank::world_size].")
    ] = False,
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="Whether the sampler shuffles.")] = True,
    grad_accumulation: Annotated[
        int, typer.Option(min=1, metavar="K", help="Batches whose gradients are added up for one step.")
    ] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every check with what it saw, and notes.")] = (
        False
    ),
    format: Annotated[  # noqa: A002 - the option's name
        ReportFormat, typer.Option(help="How the report is written to stdout.")
    ] = "text",
    fail_on: Annotated[FailOn, typer.Option(help="The least severe finding for which the exit status is 1.")] = "error",
    report_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Save report.json in this folder too.")] = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="With --dataset: how long to wait for the slowest rank.")
    ] = "10m",
) -> None:
    """Say what each rank gets of the data: by arithmetic alone, or by asking your own loader.

    With --samples nothing is run and torch is not needed. With --dataset, under torchrun, each rank makes its loader
    and draws its indices, without loading the samples; rank 0 tells exactly what is shared, repeated and missed.
    """
    given = {
        "samples": samples,
        "world_size": world_size,
        "batch_size": batch_size,
        "drop_last": drop_last,
        "sampler_drop_last": sampler_drop_last,
        "no_sampler": no_sampler,
        "split": split,
        "shuffle": shuffle,
        "grad_accumulation": grad_accumulation,
    }
    from ddpdoctor.cli.data_options import read_plan, refuse_arithmetic
    from ddpdoctor.cli.showing import Shown, show_check

    shown = Shown(verbose=verbose, format=format, fail_on=fail_on, report_dir=report_dir)
    if dataset is None:
        from ddpdoctor.diagnose.check_data import plan_report

        raise typer.Exit(show_check(plan_report(read_plan(given), tuple(sys.argv)), shown))
    refuse_arithmetic(given)
    from ddpdoctor.cli.data_ranks import LoaderAsked, run

    asked = LoaderAsked(
        function=dataset,
        epochs=epochs,
        set_epoch=set_epoch,
        accumulation=grad_accumulation,
        world_size=world_size,
        timeout=timeout,
        command=tuple(sys.argv),
        shown=shown,
    )
    raise typer.Exit(run(asked, os.environ))
