"""``ddpdoctor check-env``: checks whether this machine, or all machines of a job, can train."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ddpdoctor.cli import options as shared
from ddpdoctor.cli.options import REPORT, Argument, FailOn, Option, ReportFormat, settings_of, typed
from ddpdoctor.cli.output import Outputs, check_outputs, deliver_check, write
from ddpdoctor.model.errors import ExitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Check this machine: versions, variables, limits, network and GPUs.

    Under torchrun or srun, it checks all machines of the job. Needs no GPU and no root.
    """

    checks: Annotated[
        tuple[str, ...], Argument(metavar="CHECK", help="Only these: shm, DD121, or DD1 (all DD1xx).")
    ] = ()
    show_list: Annotated[bool, shared.LIST.but(help="List the checks and what each reads.")] = False
    skip: Annotated[tuple[str, ...], Option(metavar="CHECK", help="Skip this check; may be repeated.")] = ()
    expect_version: Annotated[tuple[str, ...], Option(metavar="NAME==V", help="Version every node must have.")] = ()
    verbose: Annotated[bool, shared.VERBOSE] = False
    deep: Annotated[bool, Option(help="Also use each GPU and measure the disks. Slower.")] = False
    no_torch: Annotated[bool, Option(help="Do not import torch.")] = False
    format: Annotated[ReportFormat, shared.FORMAT] = "text"
    fail_on: Annotated[FailOn, shared.FAIL_ON] = "error"
    ignore: Annotated[tuple[str, ...], shared.IGNORE] = ()
    redact: Annotated[bool, Option(panel=REPORT, help="Hide host names, addresses and user names.")] = False
    report_dir: Annotated[Path | None, shared.REPORT_DIR] = None
    output: Annotated[Path | None, shared.OUTPUT] = None
    timeout_s: Annotated[float, shared.TIMEOUT.but(help="How long to wait for the other ranks.")] = typed("30")
    nnodes: Annotated[int | None, shared.NNODES.but(min=1, help="Number of nodes, without a launcher.")] = None
    node_rank: Annotated[int | None, shared.NODE_RANK] = None
    master_addr: Annotated[str | None, shared.MASTER_ADDR] = None
    master_port: Annotated[int | None, shared.MASTER_PORT] = None


def run(options: Options) -> int:
    from ddpdoctor.collect.launch import seen_ranks
    from ddpdoctor.diagnose.machines import start_torch_early

    # This process reports if it is rank 0, or node 0 of those started by hand.
    if not options.show_list and not (options.node_rank or seen_ranks(os.environ).rank):
        check_outputs(options)
    # If the user chose checks, they may not need torch, or their names may be wrong.
    early = not (options.checks or options.skip or options.show_list or options.no_torch)
    torch_child = start_torch_early(os.environ) if early else None
    from ddpdoctor.diagnose.machines import CheckEnvOptions, check_environment, list_checks

    own = {"use_torch": not options.no_torch, "command": tuple(sys.argv), "torch_child": torch_child}
    wanted = settings_of(options, CheckEnvOptions, **own)
    if options.show_list:
        write(sys.stdout, "\n".join(list_checks(wanted)) + "\n")
        return ExitStatus.OK
    report = check_environment(wanted, os.environ)
    return ExitStatus.OK if report is None else deliver_check(report, settings_of(options, Outputs))
