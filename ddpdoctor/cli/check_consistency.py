"""``ddpdoctor check-consistency``: is a model one and the same on all ranks, step by step; do files hold the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ddpdoctor.launch.command.options import FailOn, ReportFormat

Backend = Literal["gloo", "nccl"]


def check_consistency(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="With --diff: checkpoints of ranks or runs.")
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="package.module:build_model, which returns a Module, or (Module, optimizer), or (Module, optimizer, "
            "loss_fn).",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="package.module:make_batch; make_batch(rank, world_size, step) returns a batch.  [default: made up, "
            "by the first Linear, Conv2d or Embedding]",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="package.module:train_step; train_step(model, batch) returns the loss, or has called backward.  "
            "[default: the loss_fn, or the output's loss]",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Optimizer steps to make.")] = 5,
    reference: Annotated[
        bool, typer.Option("--reference", help="Compare DDP's gradient with that of one process on the whole batch.")
    ] = False,
    twice: Annotated[
        bool, typer.Option("--twice", help="Run a second time with the same seed, and compare bit by bit.")
    ] = False,
    allow_different: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Names of tensors that may differ between ranks; repeatable."),
    ] = None,
    find_unused_parameters: Annotated[
        bool, typer.Option("--find-unused-parameters", help="As DDP's argument, for models that leave some out.")
    ] = False,
    backend: Annotated[
        Backend | None, typer.Option(help="[default: nccl where every rank has a GPU of its own, else gloo]")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="For building, batches and steps.")] = 0,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Without torchrun or srun: start so many ranks on this machine."),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Compare files by the names of tensors; needs no ranks.")
    ] = False,
    format: Annotated[  # noqa: A002 - the option's name
        ReportFormat, typer.Option(help="How the report is written to stdout.")
    ] = "text",
    report_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Save report.json in this folder too.")] = None,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(
            help="The least severe finding for which the exit status is 1.  [default: error; with --diff warning]"
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long a rank may take to start, to build, or for a step.")
    ] = "2m",
) -> None:
    """Train your model for a few steps under DDP and compare all ranks, step by step.

    Under torchrun or srun it is a rank of that job; without, it starts ranks on this machine. With --diff it compares
    files instead, of any two ranks or runs.
    """
    from ddpdoctor.cli.consistency_checking import Asked, run

    asked = Asked(
        files=tuple(files or ()),
        diff=diff,
        model=model or "",
        batch=batch or "",
        step=step or "",
        steps=steps,
        reference=reference,
        twice=twice,
        allowed=tuple(allow_different or ()),
        unused=find_unused_parameters,
        backend=backend or "",
        seed=seed,
        nproc=nproc_per_node,
        format=format,
        report_dir=report_dir,
        fail_on=fail_on,
        timeout=timeout,
        command=tuple(sys.argv),
    )
    raise typer.Exit(run(asked, dict(os.environ)))
