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
from ddpdoctor.cli.help import Verb, Verbs

app = typer.Typer(
    name="ddpdoctor",
    help="Diagnoses distributed PyTorch training: which rank hung or died, at which line, why, and what to do.",
    cls=Verbs,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
app.command(
    "wrap",
    cls=wrap.WrapCommand,
    options_metavar=wrap.USAGE,
    short_help="Run a training script under watch.",
)(wrap.wrap)
app.command("check-env", cls=Verb, short_help="Check whether machines are fit to train.")(check_env.check_env)
app.command("check-rendezvous", cls=Verb, short_help="Check whether a job over several nodes would start.")(
    check_rendezvous.check_rendezvous
)
app.command(
    "allreduce-bench",
    cls=allreduce_bench.BenchCommand,
    short_help="Measure collectives, and name what is slow.",
)(allreduce_bench.allreduce_bench)
app.command(
    "check-consistency",
    cls=allreduce_bench.BenchCommand,
    short_help="Check whether all replicas stay one model.",
)(check_consistency.check_consistency)
app.command(
    "check-data",
    cls=allreduce_bench.BenchCommand,
    short_help="Check how data is split between ranks.",
)(check_data.check_data)
app.command("check-checkpoint", cls=Verb, short_help="Check whether a checkpoint is whole and would load.")(
    check_checkpoint.check_checkpoint
)
app.command("demo", cls=Verb, short_help="Diagnose a tiny job with a fault, to see how it looks.")(demo.demo)
app.command("report", cls=Verb, short_help="Show the report of a saved run again.")(report.report)
app.command("explain", cls=Verb, short_help="Explain a code, such as DD601.")(explain.explain)


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
