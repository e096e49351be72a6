"""``ddpdoctor check-env``: is this machine, and are all of them together, fit to train."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpdoctor.launch.command.options import FailOn, ReportFormat

if TYPE_CHECKING:
    from ddpdoctor.diagnose.check_env import Entry, Wanted

NODES_HELP = "Launchers say this themselves; by hand, start the command on every node with these four."


def check_env(
    checks: Annotated[
        list[str] | None,
        typer.Argument(metavar="CHECK", help="Checks by id (shm), code (DD121) or beginning of codes (DD1)."),
    ] = None,
    *,
    show_list: Annotated[bool, typer.Option("--list", help="List the checks and what each reads.")] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Leave checks out; repeatable, or with commas."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every check with what it saw.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Give each GPU work, copy between GPUs, and measure disks: takes longer.")
    ] = False,
    no_torch: Annotated[
        bool, typer.Option("--no-torch", help="Do not import torch; read versions from package metadata.")
    ] = False,
    format: Annotated[  # noqa: A002 - the option's name
        ReportFormat, typer.Option(help="How the report is written to stdout.")
    ] = "text",
    fail_on: Annotated[FailOn, typer.Option(help="The least severe finding for which the exit status is 1.")] = "error",
    redact: Annotated[
        bool, typer.Option("--redact", help="Hide host names, addresses and user names in the report.")
    ] = False,
    report_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Save report.json in this folder too.")] = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait for the other ranks: 30, 30s, 2m.")
    ] = "30",
    nnodes: Annotated[int | None, typer.Option(min=1, metavar="N", help=NODES_HELP)] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="This node's number, from 0.")] = None,
    master_addr: Annotated[str | None, typer.Option(metavar="HOST", help="Name or address of node 0.")] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="PORT", help="A free port on it.")
    ] = None,
) -> None:
    """Check whether this machine is fit to train; under torchrun or srun, all of them together.

    Prints what is wrong, what was seen, and what to do. Needs no GPU and no rights.
    """
    from ddpdoctor.cli.durations import parse_duration
    from ddpdoctor.diagnose.torch_start import start_torch_early

    timeout_s = parse_duration(timeout, "--timeout")
    # Chosen checks may not need torch, and may not be there at all.
    early = not (checks or skip or show_list or no_torch)
    torch_child = start_torch_early(os.environ) if early else None
    from ddpdoctor.diagnose.check_env import Wanted, list_checks

    wanted = Wanted(
        checks=tuple(checks or ()),
        skip=tuple(skip or ()),
        deep=deep,
        use_torch=not no_torch,
        redact=redact,
        timeout_s=timeout_s,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        command=tuple(sys.argv),
        torch_child=torch_child,
    )
    if show_list:
        _print_list(list_checks(wanted))
        return
    raise typer.Exit(_run(wanted, format, None if fail_on == "never" else fail_on, report_dir, verbose=verbose))


def _run(
    wanted: Wanted, output_format: ReportFormat, fail_on: str | None, report_dir: Path | None, *, verbose: bool
) -> int:
    from ddpdoctor.cli.output import save_report, show_report
    from ddpdoctor.diagnose.check_env import check_environment
    from ddpdoctor.launch.folders.report_dir import make_report_dir
    from ddpdoctor.model.exit_status import report_status
    from ddpdoctor.model.findings import Severity

    report = check_environment(wanted, os.environ)
    if report is None:
        return 0
    least = None if fail_on is None else Severity(fail_on)
    show_report(report, output_format, sys.stdout, report_dir, verbose=verbose, fail_on=least)
    if report_dir is not None:
        save_report(make_report_dir(report_dir), report)
    return report_status(report, least)


def _print_list(entries: tuple[Entry, ...]) -> None:
    from ddpdoctor.cli.output import write

    width = max(len(entry.kind) for entry in entries)
    for entry in entries:
        line = f"{entry.code}  {entry.kind:<{width}}  {entry.severity:<7}  {entry.group:<9}  {entry.reads}"
        write(sys.stdout, line.rstrip() + "\n")
