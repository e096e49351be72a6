"""DD815: the GPU waits for the host, which cannot queue work as fast as the GPU does it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import rule

from .steps import MOST_WARM_UP
from .words import ms, percent

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Rank
    from ddpdoctor.model.speed import DeviceSteps

    from .state import SpeedState

PACE = 0.9
"""Where the host takes this share of the GPU's time for the same phase, the GPU does nothing but follow. Our choice."""
LEAST_SHARE = 0.3
"""Of the step that forward and backward must take. Our choice."""
PHASES = ("forward", "backward")


@rule("DD815", "host-bound", Severity.WARNING, "The GPUs wait for the host to queue their work")
def check_host(state: SpeedState) -> Answer:
    """Report jobs whose GPUs are faster than the host queues work for them.

    ## What it means

    The host puts kernels into the GPU's queue and runs ahead of it. With many small kernels, or with operations that
    wait for the GPU (`.item()`, `.cpu()`, boolean masks), the queue is empty, and the GPU idles between kernels. A
    faster GPU changes nothing then.

    ## How it is recognized

    In one step of twenty, CUDA events mark where the phases of the step begin. On every rank, forward and backward must
    take as long on the host as on the GPU, and the GPU must have come to each mark before the host sets the next one.
    A GPU that has enough to do is behind. The rule is skipped on CPU.

    ## How sure

    Medium: the events say that the GPU follows the host, and not how long the kernels alone would take.

    ## What to do

    Use `torch.compile` or CUDA graphs, larger batches, and a fused optimizer (`fused=True`). Read values of the loss
    rarely. `torch.cuda.set_sync_debug_mode("warn")` names each line that waits for the GPU.

    ## Example

        the GPUs wait for the host: forward and backward take 31 ms on the host and 32 ms on the GPU
    """
    known = [(rank, rank.speed.device) for rank in state.ranks if rank.speed is not None and rank.speed.device]
    if not state.budget.is_device or not known:
        return skipped("no step was measured on a GPU")
    measured = [steps for _, steps in known if steps is not None]
    host_ms = median(sum(_host_ms(steps)) for steps in measured)
    device_ms = median(sum(_device_ms(steps)) for steps in measured)
    seen = f"forward and backward take {ms(host_ms)} on the host and {ms(device_ms)} on the GPU"
    share = state.share(device_ms)
    if share < LEAST_SHARE or not all(map(_follows, measured)):
        return passed(seen)
    return judged([_problem(state, [rank for rank, _ in known], seen, share)])


def _problem(state: SpeedState, ranks: list[Rank], seen: str, share: float) -> Problem:
    return Problem(
        summary=f"the GPUs wait for the host: {seen}",
        ranks=tuple(rank.rank for rank in ranks),
        evidence=(
            f"forward and backward take {percent(share)} of a {ms(state.budget.wall_ms)} step",
            "the GPU reached each mark before the host queued the next one",
        ),
        fix=(
            "use torch.compile or CUDA graphs, larger batches, fused=True in the optimizer, and fewer .item() and "
            ".cpu() calls"
        ),
        confidence=Confidence.MEDIUM,
    )


def _follows(steps: DeviceSteps) -> bool:
    late = [behind for number, behind in zip(steps.numbers, steps.behind, strict=True) if number > MOST_WARM_UP]
    pairs = zip(_host_ms(steps), _device_ms(steps), strict=True)
    return not median(late) and all(host >= PACE * device for host, device in pairs)


def _host_ms(steps: DeviceSteps) -> tuple[float, ...]:
    return tuple(median(steps.host_ms[phase]) for phase in PHASES)


def _device_ms(steps: DeviceSteps) -> tuple[float, ...]:
    return tuple(median(steps.device_ms[phase]) for phase in PHASES)
