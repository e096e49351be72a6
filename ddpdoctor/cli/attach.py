"""``ddpdoctor attach``: inspects a running job from outside, without harm, and reports why it hangs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from ddpdoctor.cli.options import HTML, NODES, Option, ReportOptions
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.model.findings import now

STDOUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ReportOptions):
    """Find out why a running job makes no progress.

    Samples the ranks of this machine, a Slurm job or pods twice, and names the rank that holds up the others. It sends
    no signal to the job and does not modify it. The evidence is saved in a folder for `ddpdoctor analyze`.
    """

    pid: Annotated[int | None, Option(help="A rank of the job, or its launcher.", metavar="PID", min=1)] = None
    job: Annotated[str | None, Option(help="The job's name, if there are several.", metavar="NAME")] = None
    slurm: Annotated[
        str | None, Option(panel=NODES, metavar="JOBID", help="All nodes of this Slurm job, through srun --overlap.")
    ] = None
    kubectl: Annotated[
        str | None, Option(panel=NODES, metavar="SELECTOR", help="All pods with these labels, through kubectl exec.")
    ] = None
    namespace: Annotated[str | None, Option(panel=NODES, metavar="NAME", help="Namespace of the pods.")] = None
    container: Annotated[str | None, Option(panel=NODES, metavar="NAME", help="The container that runs the ranks.")] = (
        None
    )
    python: Annotated[str | None, Option(panel=NODES, metavar="PATH", help="A Python there that has ddpdoctor.")] = None
    node_only: Annotated[bool, Option(panel=NODES, help="Save the evidence of this machine; do not diagnose.")] = False
    folder: Annotated[Path, Option(metavar="DIR", help="Where to save the evidence.")] = Path()
    html: Annotated[Path | None, HTML] = None


def run(options: Options) -> int:
    from ddpdoctor.attach.look import attach
    from ddpdoctor.cli.output import check_outputs, deliver_check, say
    from ddpdoctor.diagnose.job import use_own_records
    from ddpdoctor.diagnose.logs import analyze

    several = {"--slurm": options.slurm, "--kubectl": options.kubectl}
    alone = {"--pid": options.pid, "--node-only": options.node_only or None}
    given = [name for name, value in (several | alone).items() if value is not None]
    if len(given) > 1 and set(given) & several.keys():
        raise UserError(f"use either {given[0]} or {given[1]}, not both", help="Leave one out.")
    if options.kubectl is None and (options.namespace or options.container):
        raise UserError("--namespace and --container need --kubectl", help="Give the pods: --kubectl SELECTOR.")
    if options.python is not None and not several.keys() & set(given):
        raise UserError("--python needs --slurm or --kubectl", help="On this machine, ddpdoctor uses its own Python.")
    if options.folder == STDOUT and not options.node_only:
        raise UserError("--folder - needs --node-only", help="Give a folder.")
    if options.node_only:
        if options.folder == STDOUT:
            from ddpdoctor.attach.remote import send_look

            return send_look(lambda folder: attach(folder, options.pid, options.job).folder, sys.stdout.buffer)
        print(attach(options.folder, options.pid, options.job).folder)
        return ExitStatus.OK
    outputs = check_outputs(options)
    started_at, tell = now(), partial(say, sys.stderr)
    is_here = options.slurm is None and options.kubectl is None
    here = attach(options.folder, options.pid, options.job) if is_here else None
    if here is not None:
        folder = here.folder
    elif options.slurm is not None:
        from ddpdoctor.attach.remote import attach_slurm

        folder = attach_slurm(options.slurm, options.folder, options.python or sys.executable, options.job, tell)
    else:
        from ddpdoctor.attach.remote import Pods, attach_kubectl

        pods = Pods(selector=options.kubectl or "", namespace=options.namespace, container=options.container)
        folder = attach_kubectl(pods, options.folder, options.python or "python", options.job, tell)
    tell(f"the evidence is in {folder}")
    report = analyze([str(folder)], tuple(sys.argv), started_at, verb="attach")
    return deliver_check(use_own_records(report, here.job) if here is not None else report, outputs)
