"""DD327 and DD328: GPUs that do not do their work, and processes that hang in the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reading import need
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.environment.devices import gpu_list, verb
from ddpdoctor.rules.registry import Group, rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.gpus import GpuWork, StuckProcess
    from ddpdoctor.model.node import Node

LONG_S = 60.0
"""Past this, nothing that the driver does by right takes so long: gpud and gcm watch for minutes of it."""


@rule(
    "DD327", "gpu-alloc", Severity.ERROR, "A GPU does not do the work that it is given",
    group=Group.GPUS, needs=("gpu_trial",), reads="memory and matrix products on every GPU",
)  # fmt: skip
def check_gpu_alloc(node: Node) -> Answer:
    """Report GPUs that hang, fail or compute wrongly when they are given work (`--deep`).

    ## What it means

    A GPU can look well to every question and still hang at the first kernel, or return wrong numbers, which no error
    ever tells: the loss just does not fall.

    ## How it is recognised

    Each GPU, in a process of its own with a limit of 60 s (ours): a tenth of its free memory, at most 2 GiB, is filled
    with a pattern and read back; matrices of -1, 0 and 1 are multiplied in float32 and bfloat16, with a product that
    is known and exact in both. Any difference, error, or no result in time is an error.

    ## What else looks like it

    A GPU whose memory others have taken fails with "out of memory": see other-procs. Where torch cannot be imported or
    CUDA does not start, this check cannot tell.

    ## What to do

    Wrong results or a hang: take the node out of use, reset or reboot, try again, and run `dcgmi diag -r 3`.
    """
    trial = need(node.gpu_trial)
    late = [work for work in trial.work if work.timed_out]
    wrong = [work for work in trial.work if not work.ok and not work.timed_out]
    problems = []
    if late:
        what = f"{verb(late, 'does', 'do')} not finish a few matrix products"
        problems.append(_failed(late, what, "sudo dmesg | grep -E 'NVRM|Xid'; reboot the node, and try again"))
    if wrong:
        what = f"{verb(wrong, 'fails', 'fail')} when given work, or {verb(wrong, 'computes', 'compute')} wrongly"
        problems.append(_failed(wrong, what, "sudo dmesg | grep -E 'NVRM|Xid'; dcgmi diag -r 3; reset or reboot"))
    slowest = max((work.seconds for work in trial.work), default=0.0)
    return judged(problems, f"{len(trial.work)} GPUs given work, the slowest took {slowest:.1f} s")


def _failed(work: Sequence[GpuWork], what: str, fix: str) -> Problem:
    return Problem(
        summary=f"{gpu_list([one.index for one in work])} {what}",
        evidence=tuple(f"GPU {one.index} as torch counts: {one.error}" for one in work),
        fix=fix,
    )


@rule(
    "DD328", "dstate", Severity.ERROR, "A process hangs inside the NVIDIA driver",
    group=Group.GPUS, needs=("stuck_processes",), reads="/proc/PID/stat, wchan, stack, status; /dev/kmsg",
)  # fmt: skip
def check_dstate(node: Node) -> Answer:
    """Report processes in a sleep inside the driver that no signal ends.

    ## What it means

    A GPU or its driver does not answer, and who asks it waits in state D: `nvidia-smi` hangs, `kill -9` does nothing,
    and the next job that touches the GPU hangs too.

    ## How it is recognised

    Processes in state D that sleep in a function of the NVIDIA modules, or are tools that do nothing but ask it, in two
    looks a second apart between which they neither ran nor were switched. An error from 60 s on, which the kernel's
    own watchdog says ("blocked for more than 122 seconds", in its log). Where it does not say, or the log may not be
    read, a warning: it hangs for a second at least.

    ## What else looks like it

    A file system that hangs makes state D as well, in another function. To wake GPUs takes seconds without persistence
    mode, and a process that does it is switched meanwhile.

    ## What to do

    Reboot the node; before, `sudo dmesg | grep -E 'NVRM|Xid'` tells which GPU it is.
    """
    stuck = need(node.stuck_processes)
    long = [one for one in stuck if (one.seconds or 0.0) >= LONG_S]
    short = [one for one in stuck if one not in long]
    fix = "sudo dmesg | grep -E 'NVRM|Xid|blocked for'; reboot the node: no signal ends such a process"
    problems = []
    if long:
        problems.append(_stuck(long, "and the GPU that it waits for is unlikely to come back", fix))
    if short:
        words = "for a second at least"
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
            f"pid {one.pid} ({one.name}) in {one.wchan or 'a function that is not shown'}, {_seconds(one)}"
            for one in stuck
        ),
        fix=fix,
        severity=severity,
        confidence=confidence,
    )


def _seconds(one: StuckProcess) -> str:
    return "time not known" if one.seconds is None else f"for {one.seconds:.0f} s at least"
