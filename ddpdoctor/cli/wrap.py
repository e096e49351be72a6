"""``ddpdoctor wrap``: runs a training script under watch, as torchrun would run it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ddpdoctor.cli.help import Verb, write_torchrun_options
from ddpdoctor.cli.plain import DEBUG_VARIABLE
from ddpdoctor.launch.command.options import DebugLevel, FailOn, OnHang, OutputFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.command.command_line import SplitCommand

USAGE = "[OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]... | [OPTIONS] -- COMMAND [ARGS]..."
_SPLIT = "ddpdoctor.split"


class WrapCommand(Verb):
    """Gives Typer only the options that are ddpdoctor's own; torchrun's and the script's go past it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the command line first, and leave the rest of it in ``ctx.meta``."""
        from ddpdoctor.launch.command.command_line import split_command

        split = split_command(args, self._own_options(ctx))
        ctx.meta[_SPLIT] = split
        return super().parse_args(ctx, list(split.own))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write our options, then the names of torchrun's."""
        super().format_options(ctx, formatter)
        write_torchrun_options(formatter)

    def _own_options(self, ctx: Any) -> Mapping[str, bool]:
        """Each option of ours, and whether it takes a value."""
        params = self.get_params(ctx)
        return {name: not getattr(param, "is_flag", False) for param in params for name in param.opts}


def wrap(
    ctx: typer.Context,
    *,
    hang_timeout: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            envvar="DDPDOCTOR_HANG_TIMEOUT",
            help="How long a rank may make no progress while another waits for it: 8, 8.0, 8s, 5m.",
        ),
    ] = "300",
    on_hang: Annotated[
        OnHang,
        typer.Option(
            envvar="DDPDOCTOR_ON_HANG",
            help="When a job that hangs is stopped (exit status 124): auto once it can never go on, kill at the first "
            "report, report never.",
        ),
    ] = "auto",
    debug_level: Annotated[
        DebugLevel | None,
        typer.Option(
            envvar="DDPDOCTOR_DEBUG_LEVEL",
            case_sensitive=False,
            metavar="DETAIL|INFO|OFF",
            help=f"What {DEBUG_VARIABLE} is set to. By default DETAIL over Gloo and OFF over NCCL, unless it is set "
            "already. DETAIL lets torch compare every collective over all ranks before it runs, and slows small ones.",
        ),
    ] = None,
    report_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="DDPDOCTOR_REPORT_DIR",
            help="The run folder, new or without a report.  [default: ddpdoctor-report/<time>-<script>]",
        ),
    ] = None,
    format: Annotated[  # noqa: A002  the option's name
        OutputFormat, typer.Option(envvar="DDPDOCTOR_FORMAT", help="How the report is written to stderr.")
    ] = "text",
    fail_on: Annotated[
        FailOn,
        typer.Option(
            envvar="DDPDOCTOR_FAIL_ON",
            help="Exit with status 1 if the job succeeds with a finding at least this severe. For CI.",
        ),
    ] = "never",
    quiet: Annotated[
        bool, typer.Option("--quiet", envvar="DDPDOCTOR_QUIET", help="Write nothing but findings of severity error.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", envvar="DDPDOCTOR_IGNORE", help="Leave findings of this code out; repeatable."),
    ] = None,
    check_every: Annotated[
        str,
        typer.Option(
            metavar="N",
            envvar="DDPDOCTOR_CHECK_EVERY",
            help="Compare the replicas at every N-th optimizer step, at steps 1, 2, 4, 8, ... before it, and at the "
            "end.",
        ),
    ] = "50",
    no_consistency: Annotated[
        bool,
        typer.Option(
            "--no-consistency",
            envvar="DDPDOCTOR_NO_CONSISTENCY",
            help="Look neither at replicas, nor at gradients that are not finite, nor at how data is shared out.",
        ),
    ] = False,
    allow_different: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            envvar="DDPDOCTOR_ALLOW_DIFFERENT",
            help="Tensors of these names are meant to differ between ranks, as 'expert.*'; repeatable.",
        ),
    ] = None,
    exchange_port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT",
            envvar="DDPDOCTOR_EXCHANGE_PORT",
            help="Where the nodes of a job meet, on the first of them.  [default: the one after the rendezvous's port; "
            "under Slurm one derived from the job]",
        ),
    ] = None,
) -> None:
    """Run a training script as torchrun would, and say which rank hung or died, at which line, and why.

    Takes torchrun's options too, and passes them on. Everything after SCRIPT belongs to the script; `-m MODULE`
    runs a module. After `--` comes any COMMAND that starts ranks, or is one: torchrun, accelerate, deepspeed, mpirun,
    a shell script, `python train.py`. The exit status is the launcher's own, or 124 where a hung job was stopped.
    """
    from ddpdoctor.cli.plain import Asked
    from ddpdoctor.cli.wrapping import run_wrap

    asked = Asked(
        split=cast("SplitCommand", ctx.meta[_SPLIT]),
        hang_timeout=hang_timeout,
        on_hang=on_hang,
        debug_level=debug_level,
        report_dir=report_dir,
        format=format,
        fail_on=fail_on,
        quiet=quiet,
        ignore=tuple(ignore or ()),
        check_every=check_every,
        no_consistency=no_consistency,
        allow_different=tuple(allow_different or ()),
        exchange_port=exchange_port,
    )
    raise typer.Exit(run_wrap(asked))
