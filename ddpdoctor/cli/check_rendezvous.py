"""``ddpdoctor check-rendezvous``: would this job start, and if not, which host keeps it from that."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpdoctor.launch.command.options import FailOn, ReportFormat

if TYPE_CHECKING:
    from ddpdoctor.diagnose.rendezvous.wanted import RendezvousChecked
    from ddpdoctor.model.findings import Severity

PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
MAX_PORT = 65535


def check_rendezvous(
    *,
    nnodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Nodes of the job, as torchrun takes it: 2, or 1:4 of an elastic job."),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="This node's number, from 0; not needed with --rdzv-endpoint."),
    ] = None,
    master_addr: Annotated[str | None, typer.Option(metavar="HOST", help="Name or address of node 0.")] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=MAX_PORT, metavar="PORT", help="Of the store there.  [default: 29500]")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="As for torchrun's c10d rendezvous: who hosts it is found out."),
    ] = None,
    rdzv_backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="c10d or static.  [default: c10d with an endpoint]")
    ] = None,
    rdzv_id: Annotated[str | None, typer.Option(metavar="ID", help="Of the job, the same on all nodes.")] = None,
    rdzv_conf: Annotated[
        str | None, typer.Option(metavar="K=V,...", help="As for torchrun; is_host=1 says that this node hosts.")
    ] = None,
    port_range: Annotated[
        str | None,
        typer.Option(metavar="LO-HI", help="Connect the pairs on ports of this range.  [default: any that are free]"),
    ] = None,
    exchange_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_PORT,
            metavar="PORT",
            envvar="DDPDOCTOR_EXCHANGE_PORT",
            show_envvar=False,
            help="Where the nodes' ddpdoctors meet on the first host.  [default: the store's port + 1]",
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long nodes wait for each other: 30, 30s, 2m.")
    ] = "30s",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every check with what it saw.")] = False,
    format: Annotated[  # noqa: A002 - the option's name
        ReportFormat, typer.Option(help="How the report is written to stdout.")
    ] = "text",
    fail_on: Annotated[FailOn, typer.Option(help="The least severe finding for which the exit status is 1.")] = "error",
    report_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Save report.json here, or node-N.json; a shared folder is a way to meet too."
        ),
    ] = None,
) -> None:
    """Find out whether a job over several nodes would start, and which host keeps it from that.

    Start it on every node, in any order, or under torchrun or srun, which say everything themselves. Names, the store,
    who comes, every pair of hosts, large payloads and a real start are tried, each with its own limit.
    """  # fmt: skip
    from ddpdoctor.cli.durations import parse_duration
    from ddpdoctor.diagnose.rendezvous.check import check_rendezvous as check
    from ddpdoctor.diagnose.rendezvous.wanted import RendezvousWanted
    from ddpdoctor.launch.folders.report_dir import make_private
    from ddpdoctor.model.findings import Severity
    from ddpdoctor.model.launch import NodeOptions

    wanted = RendezvousWanted(
        options=NodeOptions(
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            rdzv_backend=rdzv_backend,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_id=rdzv_id,
            rdzv_conf=rdzv_conf,
            exchange_port=exchange_port,
        ),
        port_range=parse_ports(port_range),
        timeout_s=parse_duration(timeout, "--timeout"),
        folder=report_dir,
        command=tuple(sys.argv),
    )
    if report_dir is not None:
        make_private(report_dir)
    least = None if fail_on == "never" else Severity(fail_on)
    checked = check(wanted, os.environ)
    if checked is not None:
        raise typer.Exit(_finish(checked, format, least, report_dir, verbose=verbose))


def parse_ports(text: str | None) -> tuple[int, int] | None:
    """Read "40000-40100", both ends among them; None for None. Raises ``UserError`` for anything else."""
    if text is None:
        return None
    from ddpdoctor.model.errors import UserError

    found = PORTS.fullmatch(text.strip())
    low, high = (int(found[1]), int(found[2])) if found is not None else (0, 0)
    if not 0 < low <= high <= MAX_PORT:
        raise UserError(f"--port-range {text} is no range of ports", help="Such as 40000-40100.")
    return low, high


def _finish(
    checked: RendezvousChecked,
    output_format: ReportFormat,
    least: Severity | None,
    report_dir: Path | None,
    *,
    verbose: bool,
) -> int:
    """Save and show what one node has to say; return its exit status, which is the same on all that were judged."""
    from ddpdoctor.cli.output import save_report, show_report
    from ddpdoctor.launch.folders.report_dir import REPORT_NAME
    from ddpdoctor.model.exit_status import report_status

    if report_dir is not None:
        name = REPORT_NAME if checked.judged else f"node-{checked.number}.json"
        save_report(report_dir, checked.report, name)
    if checked.shows:
        show_report(checked.report, output_format, sys.stdout, report_dir, verbose=verbose, fail_on=least)
    return report_status(checked.report, least)
