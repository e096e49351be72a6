"""The verbs of the command ``ddpdoctor``, as Typer has them."""

from __future__ import annotations

from typing import Annotated

import typer

from ddpdoctor import __version__
from ddpdoctor.cli import (
    allreduce_bench,
    check_checkpoint,
    check_consistency,
    check_data,
    check_env,
    check_rendezvous,
    demo,
    explain,
    report,
    wrap,
)

app = typer.Typer(
    name="ddpdoctor",
    help="Diagnoses distributed PyTorch training: which rank hung or died, at which line, why, and what to do.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)
app.command(
    "wrap",
    cls=wrap.WrapCommand,
    options_metavar=wrap.USAGE,
    short_help="Run a training script; say which rank hung or died, where, why.",
)(wrap.wrap)
app.command("check-env", short_help="Check whether machines are fit to train; under a launcher, all of them.")(
    check_env.check_env
)
app.command("check-rendezvous", short_help="Say whether a job over several nodes would start; if not, which host.")(
    check_rendezvous.check_rendezvous
)
app.command(
    "allreduce-bench",
    cls=allreduce_bench.BenchCommand,
    short_help="Measure collectives; say whether that is good, and what is slow.",
)(allreduce_bench.allreduce_bench)
app.command(
    "check-consistency",
    cls=allreduce_bench.BenchCommand,
    short_help="Train your model under DDP; say whether it stays one model.",
)(check_consistency.check_consistency)
app.command(
    "check-data",
    cls=allreduce_bench.BenchCommand,
    short_help="Say what each rank gets of the data.",
)(check_data.check_data)
app.command("check-checkpoint", short_help="Say whether a checkpoint is whole, and would load.")(
    check_checkpoint.check_checkpoint
)
app.command("demo", short_help="Run a tiny job with a seeded fault and diagnose it.")(demo.demo)
app.command("report", short_help="Draw a saved report again, offline.")(report.report)
app.command("explain", short_help="Explain a finding; --list shows all codes.")(explain.explain)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpdoctor {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
