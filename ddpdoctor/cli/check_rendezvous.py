"""``ddpdoctor check-rendezvous``: checks whether a job would start, and if not, which host prevents it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ddpdoctor.cli import options as shared
from ddpdoctor.cli.options import NODES, Option, ReportOptions, settings_of, typed
from ddpdoctor.model.errors import ExitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ReportOptions):
    """Check that the nodes of a job can connect and start.

    Run it on every node, or under torchrun or srun, where it needs no options. It tests names, the store, every pair
    of hosts, large payloads and a real start.
    """

    nnodes: Annotated[str | None, shared.NNODES.but(help="Number of nodes: 2, or 1:4 for an elastic job.")] = None
    node_rank: Annotated[int | None, shared.NODE_RANK.but(help="This node's number, from 0.")] = None
    master_addr: Annotated[str | None, shared.MASTER_ADDR] = None
    master_port: Annotated[int | None, shared.MASTER_PORT.but(help="Port of the store.  [default: 29500]")] = None
    rdzv_endpoint: Annotated[str | None, Option(panel=NODES, metavar="HOST:PORT", help="torchrun's c10d endpoint.")] = (
        None
    )
    rdzv_backend: Annotated[
        str | None, Option(metavar="NAME", help="c10d or static.  [default: c10d with an endpoint]")
    ] = None
    rdzv_id: Annotated[str | None, Option(metavar="ID", help="Id of the job, the same on all nodes.")] = None
    rdzv_conf: Annotated[str | None, Option(metavar="K=V,...", help="torchrun's rendezvous options.")] = None
    port_range: Annotated[
        tuple[int, int] | None,
        Option(metavar="LO-HI", parse=shared.parse_ports, help="Ports to test between the nodes.  [default: any]"),
    ] = None
    exchange_port: Annotated[
        int | None, shared.EXCHANGE_PORT.but(help="Port the nodes connect to.  [default: store's port + 1]")
    ] = None
    timeout_s: Annotated[float, shared.TIMEOUT.but(help="How long nodes wait for each other.")] = typed("30s")
    report_dir: Annotated[Path | None, shared.REPORT_DIR.but(help="Save the report here; may be a shared folder.")] = (
        None
    )
    output: Annotated[Path | None, shared.OUTPUT] = None


def run(options: Options) -> int:
    from ddpdoctor.cli.output import Outputs, check_files, deliver, severity_of
    from ddpdoctor.diagnose.files import check_codes
    from ddpdoctor.diagnose.rendezvous import RendezvousOptions, check_rendezvous
    from ddpdoctor.launch.run_folder import REPORT_NAME, make_private
    from ddpdoctor.model.launch import NodeOptions

    outputs = settings_of(options, Outputs)
    check_files(outputs)
    if options.ignore:
        check_codes(options.ignore)
    if options.report_dir is not None:
        make_private(options.report_dir)  # other nodes that share it may already have written to it
    wanted = settings_of(
        options, RendezvousOptions, options=settings_of(options, NodeOptions), folder=options.report_dir,
        command=tuple(sys.argv),
    )  # fmt: skip
    checked = check_rendezvous(wanted, os.environ)
    if checked is None:
        return ExitStatus.OK
    name = REPORT_NAME if checked.judged else f"node-{checked.number}.json"
    return deliver(checked.report, outputs, name, shows=checked.shows).exit_status(severity_of(options.fail_on))
