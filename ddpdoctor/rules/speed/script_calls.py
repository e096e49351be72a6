"""DD808 and DD813: collectives that the script itself makes in every step."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.facts import PHASES, POINT_TO_POINT
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import rule

from .steps import usual
from .words import SHARE, is_small, ms, place, up_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import CallKind, Rank
    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.speed import HandReduced
    from ddpdoctor.model.stacks import Frame

    from .state import SpeedState

EACH_STEP = 0.5
"""The share of steps from which a line counts as one that runs in each step. Our choice: every second step or more."""


@rule(
    "DD808", "sync-each-step", Severity.WARNING, "The script's own collectives take a large part of each step",
    after=("hand-made-reduce", "data-parallel"),
)  # fmt: skip
def check_sync(state: SpeedState) -> Answer:
    """Report collectives of the script that take long in every step.

    ## What it means

    Beside DDP, the script calls collectives in each step: it gathers outputs, averages a metric, or waits at a barrier.
    All ranks must come together for that, and computation stops meanwhile.

    ## How it is recognized

    The recorder times the script's collectives and its waits for asynchronous ones. Pickling in `all_gather_object` and
    `broadcast_object_list` is a part of the call. Of each step the shortest time of all ranks counts, which is the
    transfer. Waiting for a slow rank would only move elsewhere without the call, and
    does not count. The transfer must be 10 % of a step of at least 10 ms. The line that takes most of it is named, if
    it runs in every second step or more. Calls that reduce gradients are left to `hand-made-reduce`, and those of a
    model in DataParallel to `data-parallel`.

    ## How sure

    High: the calls are timed.

    ## What to do

    Call it every N steps, or once at the end of the epoch on sums that each rank keeps. Where the result is needed
    later, pass `async_op=True` and wait for the work when the result is used. Gather scalars instead of whole outputs.

    ## Example

        all_gather (train.py:48) runs in every step: up to 42 % of the step
    """
    transfer_ms = usual(state.steps.transfer_ms["calls"])
    share = state.share(transfer_ms)
    seen = f"the script's collectives take {ms(transfer_ms)} of a {ms(state.budget.wall_ms)} step"
    if share < SHARE:
        return passed(seen)
    if small := is_small(state):
        return skipped(small)
    if any(rank.speed and rank.speed.hand_reduced for rank in state.ranks):
        return passed("they reduce gradients")
    if any(rank.speed and rank.speed.data_parallel for rank in state.ranks):
        return passed(f"{seen}; the model uses DataParallel, and the script makes its reductions")
    found = {rank.rank: _line(rank) for rank in state.ranks}
    lines = {number: line for number, line in found.items() if line is not None}
    if not lines:
        return passed(f"{seen}, and no line runs in at least every second step")
    op, frame = next(iter(lines.values()))
    problem = Problem(
        summary=f"{op} ({frame.file.rpartition('/')[2]}:{frame.line}) runs in every step: {up_to(share)}",
        ranks=tuple(state.steps.ranks),
        where=tuple(place(number, line[1]) for number, line in lines.items()),
        evidence=(seen + ", not counting waits for slower ranks",),
        fix="call it every N steps, or once per epoch on local sums; or pass async_op=True and wait when you need the "
        "result",
        share=share,
    )
    return judged([problem])


def _line(rank: Rank) -> tuple[str, Frame] | None:
    """Return the operation and the line of a rank's collectives that took most time, if it runs in each step."""
    log = pack_calls(rank.recent_calls)
    ends = [call.started_ns for call in log.of_kinds(lambda kind: kind.op == "backward")]
    took: dict[tuple[str, Frame], int] = {}
    steps: dict[tuple[str, Frame], set[int]] = {}
    for call in log.of_kinds(lambda kind: kind.thread_is_main and _is_waited_for(kind)):
        if call.site is not None and call.ended_ns:
            key = call.api, call.site
            took[key] = took.get(key, 0) + call.ended_ns - call.started_ns
            steps.setdefault(key, set()).add(bisect_left(ends, call.started_ns))
    often = [key for key in took if len(steps[key]) >= EACH_STEP * len(ends)]
    return max(often, key=lambda key: took[key], default=None)


def _is_waited_for(kind: CallKind) -> bool:
    is_collective = kind.op not in PHASES and kind.op not in POINT_TO_POINT
    return kind.op == "work_wait" or (is_collective and not kind.is_async)


@rule("DD813", "hand-made-reduce", Severity.WARNING, "The script reduces gradients tensor by tensor, without DDP")
def check_hand_made(state: SpeedState) -> Answer:
    """Report a script that gives its gradients to all_reduce one by one.

    ## What it means

    The script averages gradients itself, with one collective for each tensor after backward. Each call pays the latency
    of the network, and none runs while backward still computes. DDP puts gradients into buckets and reduces a bucket as
    soon as its gradients are ready.

    ## How it is recognized

    In one early step the recorder compares the memory that all_reduce is given with the gradients that the optimizer
    then uses. At least two gradients must have been reduced, each by its own call. Copies are compared by their shapes:
    there must be one for each gradient, and DDP must not have reduced any gradient in that step. One call on a flat
    tensor is not reported, and neither is averaging every N steps. The script's collectives must be 10 % of a step of
    at least 10 ms.

    ## How sure

    High: the tensors are the optimizer's gradients. Medium if copies were reduced.

    ## What to do

    Wrap the model in `DistributedDataParallel` and drop the loop. If that is not possible, copy the gradients into one
    flat tensor and reduce that.

    ## Example

        60 gradients are reduced one by one after backward: up to 55 % of the step
    """
    reduced = {
        rank.rank: rank.speed.hand_reduced for rank in state.ranks if rank.speed is not None and rank.speed.hand_reduced
    }
    if not reduced:
        return passed("the script does not call all_reduce on single gradients")
    if small := is_small(state):
        return skipped(small)
    transfer_ms = usual(state.steps.transfer_ms["calls"])
    share = state.share(transfer_ms)
    most = max(one.gradients for one in reduced.values())
    seen = f"{most} calls take {ms(transfer_ms)} of a {ms(state.budget.wall_ms)} step"
    if share < SHARE:
        return passed(seen)
    where: tuple[Place, ...] = tuple(place(number, one.site) for number, one in reduced.items() if one.site is not None)
    problem = Problem(
        confidence=Confidence.MEDIUM if any(one.copied for one in reduced.values()) else Confidence.HIGH,
        summary=f"{most} gradients are reduced one by one after backward: {up_to(share)}",
        ranks=tuple(reduced),
        where=where,
        evidence=(seen, _given(reduced.values())),
        fix=(
            "wrap the model in torch.nn.parallel.DistributedDataParallel and remove the loop, or reduce one flat tensor"
        ),
        share=share,
    )
    return judged([problem])


def _given(reduced: Iterable[HandReduced]) -> str:
    if any(one.copied for one in reduced):
        return "the script calls all_reduce once for each gradient shape of the optimizer"
    return "the script calls all_reduce once for each gradient of the optimizer"
