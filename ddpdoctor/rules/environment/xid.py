"""DD311: Xid errors that the NVIDIA driver wrote to the kernel's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_age
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import Unread, Why, known, need
from ddpdoctor.model.sides import grouped
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.devices import ranks_on
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.gpus import Gpu, Xid
    from ddpdoctor.model.node import Node

REBOOT = "drain the node and reboot; if it comes back, have the GPU replaced"
RESET = "sudo nvidia-smi -r -i {index} when no process uses it, or reboot"
CODES: dict[int, tuple[Severity, str, str]] = {
    48: (Severity.ERROR, "a memory error that ECC could not correct", RESET),
    64: (Severity.ERROR, "a bad memory row or page that could not be taken out of use", REBOOT),
    74: (Severity.ERROR, "an NVLink error", "nvidia-smi nvlink -e -i {index}; drain the node and reset all its GPUs"),
    79: (Severity.ERROR, "it fell off the bus", REBOOT),
    95: (Severity.ERROR, "a memory error that was not contained: all its processes may have been hit", RESET),
    119: (Severity.ERROR, "its system processor (GSP) does not answer", REBOOT),
    120: (Severity.ERROR, "an error of its system processor (GSP)", REBOOT),
    140: (Severity.ERROR, "a memory error that ECC could not recover from", RESET),
    63: (Severity.WARNING, "a bad memory row or page that stays in use until the next reset", RESET),
    92: (Severity.WARNING, "very many corrected memory errors", RESET),
    94: (Severity.WARNING, "a memory error that ended one process and was contained", RESET),
    13: (Severity.INFO, "a fault in a program's kernel", "look for the error in the program that was running"),
    31: (
        Severity.INFO,
        "a program's access to an invalid address",
        "look for the error in the program that was running",
    ),
    43: (
        Severity.INFO,
        "a program fault that ended the program",
        "look for the error in the program that was running",
    ),
    45: (Severity.INFO, "the end of a program that had failed or was killed", "check what failed before it"),
}
"""Severity, meaning and fix of each number. Numbers and meanings come from NVIDIA's Xid catalog,
docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html; severities follow gcm and gpud."""
OTHER = (Severity.INFO, "an error that ddpdoctor does not know", "see https://docs.nvidia.com/deploy/xid-errors")


@rule(
    "DD311", "xid", Severity.ERROR, "The driver reported GPU errors (Xid) since boot",
    group=CheckGroup.GPUS, needs=("kernel_log", "gpus"), reads="/dev/kmsg: NVRM: Xid",
)  # fmt: skip
def check_xid(node: Node) -> Answer:
    """Report Xid errors of this node's GPUs since boot."""
    if isinstance(node.gpus, Unread) and node.gpus.why is Why.ABSENT:
        return skipped(node.gpus.reason)  # in a container, the log and the GPUs in it are the host's
    gpus = known(node.gpus)
    devices = {gpu.bus_id: gpu for gpu in gpus.devices if gpu.bus_id} if gpus is not None else {}
    xids = [xid for xid in need(node.kernel_log).xids if not devices or xid.bus_id in devices or _lost(node)]
    rows = grouped(((xid.bus_id, xid.code), xid) for xid in xids)
    problems = [_problem(node, devices.get(bus_id), those) for (bus_id, _), those in rows.items()]
    return judged(problems, f"{len(xids)} Xid errors since boot")


def _lost(node: Node) -> bool:
    """Say whether a GPU has no known bus id, so that a line may belong to it."""
    gpus = known(node.gpus)
    return gpus is not None and any(not gpu.bus_id for gpu in gpus.devices)


def _problem(node: Node, gpu: Gpu | None, xids: list[Xid]) -> Problem:
    last = min(xids, key=lambda xid: xid.age_s if xid.age_s is not None else float("inf"))
    severity, meaning, fix = CODES.get(last.code, OTHER)
    where = f"GPU {gpu.index}" if gpu is not None else f"The GPU at {last.bus_id}"
    times = f", {len(xids)} times" if len(xids) > 1 else ""
    age = "" if last.age_s is None else f" {format_age(last.age_s)} ago"
    return Problem(
        summary=f"{where} had Xid {last.code}: {meaning}",
        evidence=(f"{last.bus_id}{age}{times}: {last.text}",),
        fix=fix.replace("{index}", str(gpu.index) if gpu is not None else last.bus_id),
        severity=severity,
        ranks=ranks_on(node, [gpu]) if gpu is not None and severity is not Severity.INFO else (),
    )
