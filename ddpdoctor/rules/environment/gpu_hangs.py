"""DD327 and DD328: GPUs that fail or hang under work, and processes that hang in the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reading import need
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.environment.devices import gpu_list, verb
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.gpus import GpuWork, StuckProcess
    from ddpdoctor.model.node import Node

LONG_S = 60.0
"""No regular work of the driver takes longer. gpud and gcm wait for minutes before they report it."""


@rule(
    "DD327", "gpu-alloc", Severity.ERROR, "A GPU hangs, fails or computes wrong results",
    group=CheckGroup.GPUS, needs=("gpu_trial",), reads="memory and matrix products on every GPU",
)  # fmt: skip
def check_gpu_alloc(node: Node) -> Answer:
    """Report GPUs that hang, fail or compute wrongly when they are given work (`--deep`)."""
    trial = need(node.gpu_trial)
    late = [work for work in trial.work if work.timed_out]
    wrong = [work for work in trial.work if not work.ok and not work.timed_out]
    problems = []
    if late:
        what = f"{verb(late, 'does', 'do')} not finish a few matrix products"
        problems.append(_failed(late, what, "sudo dmesg | grep -E 'NVRM|Xid'; reboot the node, and try again"))
    if wrong:
        what = f"{verb(wrong, 'fails', 'fail')} under load, or {verb(wrong, 'computes', 'compute')} wrong results"
        problems.append(_failed(wrong, what, "sudo dmesg | grep -E 'NVRM|Xid'; dcgmi diag -r 3; reset or reboot"))
    slowest = max((work.seconds for work in trial.work), default=0.0)
    return judged(problems, f"{len(trial.work)} GPUs tested, the slowest took {slowest:.1f} s")


def _failed(work: Sequence[GpuWork], what: str, fix: str) -> Problem:
    return Problem(
        summary=f"{gpu_list([one.index for one in work])} {what}",
        evidence=tuple(f"GPU {one.index} as torch counts: {one.error}" for one in work),
        fix=fix,
    )


@rule(
    "DD328", "dstate", Severity.ERROR, "A process hangs inside the NVIDIA driver",
    group=CheckGroup.GPUS, needs=("stuck_processes",), reads="/proc/PID/stat, wchan, stack, status; /dev/kmsg",
)  # fmt: skip
def check_dstate(node: Node) -> Answer:
    """Report processes that hang inside the driver and that no signal can end."""
    stuck = need(node.stuck_processes)
    long = [one for one in stuck if (one.seconds or 0.0) >= LONG_S]
    short = [one for one in stuck if one not in long]
    fix = "sudo dmesg | grep -E 'NVRM|Xid|blocked for'; reboot the node: no signal can end such a process"
    problems = []
    if long:
        problems.append(_stuck(long, "and its GPU is unlikely to recover", fix))
    if short:
        words = "for at least a second"
        problems.append(_stuck(short, words, fix, severity=Severity.WARNING, confidence=Confidence.MEDIUM))
    return judged(problems, f"{len(stuck)} processes hang in the driver")


def _stuck(
    stuck: list[StuckProcess], words: str, fix: str, *, severity: Severity | None = None,
    confidence: Confidence = Confidence.HIGH,
) -> Problem:  # fmt: skip
    names = ", ".join(dict.fromkeys(one.name for one in stuck))
    return Problem(
        summary=f"{names} {verb(stuck, 'hangs', 'hang')} inside the NVIDIA driver, {words}",
        evidence=tuple(
            f"pid {one.pid} ({one.name}) in {one.wchan or 'an unknown function'}, {_seconds(one)}" for one in stuck
        ),
        fix=fix,
        severity=severity,
        confidence=confidence,
    )


def _seconds(one: StuckProcess) -> str:
    return "for an unknown time" if one.seconds is None else f"for at least {one.seconds:.0f} s"
