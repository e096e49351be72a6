"""``ddpdoctor allreduce-bench``: what the network gives, whether that is good, and what is slow."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ddpdoctor.cli.help import Verb
from ddpdoctor.launch.command.options import FailOn

BenchFormat = Literal["text", "json", "csv", "markdown", "nccl-tests"]
ModeChoice = Literal["latency", "throughput", "both"]
Backend = Literal["gloo", "nccl"]


UsageError: Any = typer.BadParameter.__bases__[0]
"""What is raised for a wrong command line: of click, or of the click that newer versions of Typer have in them."""


class BenchCommand(Verb):
    """Has a wrong command line told once, and not by each rank of a launcher."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; without a launcher, what is wrong is told as with every verb."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            from ddpdoctor.cli.benching import refuse
            from ddpdoctor.model.errors import UserError

            told = UserError(error.format_message(), help=f"ddpdoctor {ctx.info_name} --help lists the options.")
            status = refuse(told, os.environ)
            if status is None:
                raise
            raise typer.Exit(status) from error


def allreduce_bench(
    *,
    collective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send_recv, or all; with "
            "commas or repeated.  [default: all_reduce]",
        ),
    ] = None,
    min_size: Annotated[str, typer.Option(metavar="SIZE", help="The smallest size: 1KiB, 4096.")] = "1KiB",
    max_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="The largest size. Those that the budget or free memory leaves out are named."
        ),
    ] = "1GiB",
    factor: Annotated[int, typer.Option(min=2, metavar="N", help="Each size is so many times the one before.")] = 2,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="float32, bfloat16, …; with commas or repeated.  [default: float32]"),
    ] = None,
    op: Annotated[str, typer.Option(metavar="NAME", help="How to reduce: sum, prod, min, max, avg.")] = "sum",
    mode: Annotated[
        ModeChoice,
        typer.Option(help="Calls one by one behind a barrier, or in batches back to back as nccl-tests does."),
    ] = "both",
    in_place: Annotated[bool, typer.Option("--in-place", help="Reduce into the buffer that is sent.")] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Rotate buffers beyond the last-level cache, instead of warm ones.")
    ] = False,
    backend: Annotated[
        Backend | None,
        typer.Option(help="[default: nccl where every rank has a GPU of its own, else gloo]"),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Without torchrun or srun: start so many ranks on this machine.  [default: one a GPU, else 2]",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="For checking and measuring; decides sizes and repeats. --pairs and --by-node have as much each.",
        ),
    ] = "30s",
    iters: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Timed calls of each case.  [default: by the budget]")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Calls before them.  [default: by the budget]")
    ] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Measure every pair of ranks too, and name a slow rank or link.")
    ] = False,
    by_node: Annotated[
        bool, typer.Option("--by-node", help="Measure every host alone and every two, and name a slow one.")
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="REPORT", help="A saved run to compare with, size by size: report.json or its folder."),
    ] = None,
    fail_below: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="With --compare: an error where a size is below this share: 90%."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="BANDWIDTH", help="An error where the plateau's bus bandwidth is below: 460GB/s."),
    ] = None,
    reference: Annotated[
        Literal["auto", "none"], typer.Option(help="Hold the plateau against the table of known hardware, or not.")
    ] = "auto",
    model_size: Annotated[
        str | None,
        typer.Option(metavar="N", help="Parameters of your model, for what the curve means for DDP: 350M, 7B."),
    ] = None,
    format: Annotated[  # noqa: A002 - the option's name
        BenchFormat, typer.Option(help="How the report is written to stdout, or to --output.")
    ] = "text",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report to a file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves too: a .png, .svg or .html.")
    ] = None,
    report_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Save report.json in this folder too.")] = None,
    fail_on: Annotated[FailOn, typer.Option(help="The least severe finding for which the exit status is 1.")] = "error",
    hang_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long no call may complete before the bench is said to hang.")
    ] = "60s",
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for the slowest rank to start: 60, 2m.")
    ] = "60s",
) -> None:
    """Measure collectives between ranks, say whether that is good, and what is slow.

    Under torchrun or srun it is a rank of that job; without, it starts ranks on this machine. Needs only torch.
    Sizes and bandwidths are nccl-tests': MiB is 2**20, GB/s is 1e9 bytes a second.
    """
    from ddpdoctor.cli.bench_options import Asked
    from ddpdoctor.cli.benching import run

    asked = Asked(
        collectives=tuple(collective or ()),
        min_size=min_size,
        max_size=max_size,
        factor=factor,
        dtypes=tuple(dtype or ()),
        op=op,
        mode=mode,
        in_place=in_place,
        cold=cold,
        backend=backend,
        nproc=nproc_per_node,
        budget=budget,
        iterations=iters,
        warmup=warmup,
        pairs=pairs,
        by_node=by_node,
        compare=compare,
        fail_below=fail_below,
        expect=expect,
        reference=reference,
        model_size=model_size,
        format=format,
        output=output,
        plot=plot,
        report_dir=report_dir,
        fail_on=fail_on,
        hang_timeout=hang_timeout,
        timeout=timeout,
        command=tuple(sys.argv),
    )
    raise typer.Exit(run(asked, dict(os.environ)))
