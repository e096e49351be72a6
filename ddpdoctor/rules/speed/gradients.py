"""DD803 to DD808 and DD813: what the ranks send each other in a step, and how to send less or overlap it better."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import PHASES, POINT_TO_POINT
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import format_size
from ddpdoctor.rules.answers import Answer, Problem, found, judged, passed, skipped, unknown
from ddpdoctor.rules.registry import rule

from .reduction import MANY_BUCKETS, MIB, best_cap, contention, gather, networks_of
from .state import MIN_STEP_MS, MIN_STEPS, SHARE, call_site, mean, places_of, up_to, usual

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.facts import CallKind, Rank
    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.model.steps import GradientTimes

    from .reduction import BucketGradients
    from .state import SpeedState

LARGE_TENSOR = 0.5  # the facts' figure: one tensor that holds more than half of the bytes is named
# Where cores are contested, the reduction waits for them too. Our choice: twice the share of another machine.
CONTESTED_SHARE = 0.2
# With fewer gradients than this a reduction is latency, and not a matter of bandwidth: the facts' figure.
LEAST_BYTES = MIB
LEAST_GAIN = 0.05  # Of the step. Our choice: predictions are off by about as much.
LEAST_OF_TRANSFER = 0.30  # our choice: what saves less of the reduction is not the buckets' fault
# Share of the step that must be saved. Our choice: half of what other causes must take, because the fix is one line and
# changes no number.
SAVED_SHARE = 0.05
# The share of steps from which a line counts as one that runs in each step. Our choice: every second step or more.
EACH_STEP = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedModel:
    """One DDP model, with what each rank recorded of its gradients."""

    group: str
    times: Mapping[int, GradientTimes]

    def built_at(self, state: SpeedState) -> tuple[Place, ...]:
        """Return where each rank built the model, if it built only one in that group."""
        seen = {rank: [model for model in state.rank(rank).models if model.group == self.group] for rank in self.times}
        only = ((rank, models[0].site) for rank, models in seen.items() if len(models) == 1)
        return places_of(only)


def reduced_models(state: SpeedState) -> list[ReducedModel]:
    """Return the models by group, in the order of their first reductions."""
    models: dict[tuple[str, int], dict[int, GradientTimes]] = {}
    for rank in state.ranks:
        for times in rank.gradient_times:
            models.setdefault((times.group, times.number), {})[rank.rank] = times
    return [ReducedModel(group=group, times=times) for (group, _), times in sorted(models.items())]


def gradients_of(state: SpeedState) -> BucketGradients | None:
    """Return the gradients of a job's only model, or None."""
    models = reduced_models(state)
    return gather(list(models[0].times.values())) if len(models) == 1 else None


def contested(state: SpeedState, gradients: BucketGradients | None) -> str:
    """Return why a prediction of another cap would not hold, or an empty string. With very many buckets it holds."""
    has_many = gradients is not None and len(gradients.bucket_bytes) > MANY_BUCKETS
    return "" if has_many else contention(state.ranks)


def overlap_of(state: SpeedState) -> float | None:
    """Return the share of the reduction that overlaps with backward, 0 to 1; None if it is unknown.

    The run shows how long the reduction outlasts backward. Its total time follows from the network with which a
    simulation of DDP's buckets reproduces the measured backward. No network is found if backward hides all of it. The
    medians of a run stand for its steps, so the result is only approximate. DDP's own counter of overlap is not used:
    it is the time from the first bucket to the end of backward, even while nothing is sent.
    """
    gradients = gradients_of(state)
    if gradients is None:
        return None
    sums_ms = [sum(map(network.time_ms, gradients.bucket_bytes)) for network in networks_of(gradients)]
    shares = [1 - gradients.exposed_ms / whole_ms for whole_ms in sums_ms if whole_ms]
    return min(1.0, max(0.0, median(shares))) if shares else None


@rule(
    "DD803", "communication-bound", Severity.WARNING, "Reducing gradients takes a large part of the step",
    after=("bucket-size", "accumulation-sync"),
)  # fmt: skip
def check_communication(state: SpeedState) -> Answer:
    """Report a job whose reductions take long with any bucket size."""
    counts = [median(rank.reductions) for rank in state.steps.ranks.values()]
    exposed_ms = state.steps.transfer_ms["exposed"]
    transfer_ms = min(mean(exposed_ms), median(exposed_ms or (0.0,)))  # a few steps of a busy machine do not count
    needed_ms = transfer_ms / max(1, int(min(counts)))
    share = state.share(needed_ms)
    seen = f"beyond backward, the reduction takes {state.of_step(needed_ms)}"
    gradients = gradients_of(state)
    is_contested = bool(contested(state, gradients))
    if answer := state.too_little(share, seen, CONTESTED_SHARE if is_contested else SHARE):
        return answer
    if gradients is not None and sum(gradients.bucket_bytes) < LEAST_BYTES:
        return passed(f"{seen}; all gradients together are under 1 MiB")
    networks = networks_of(gradients) if gradients is not None and not is_contested else ()
    if gradients is not None and networks:
        _, (_, saved_ms, _) = best_cap(gradients, networks)
        if saved_ms >= min(needed_ms, gradients.exposed_ms) / 3:
            return passed(f"{seen}; another bucket size would save {state.share(saved_ms):.0%} of the step")
    evidence = [seen]
    if gradients is not None:
        total, largest = sum(gradients.sizes_bytes), max(gradients.sizes_bytes)
        evidence.append(f"{format_size(total)} of gradients are reduced in each backward")
        if largest > LARGE_TENSOR * total:
            evidence.append(f"one tensor has {largest / total:.0%} of them; an embedding can use sparse=True")
    return found(
        confidence=Confidence.HIGH if networks else Confidence.MEDIUM,
        summary=f"gradient reduction takes {share:.0%} of the step beyond backward"
        + (", and no bucket size helps" if networks else ""),
        ranks=tuple(state.steps.ranks),
        where=state.places(lambda rank: call_site(rank, "backward")),
        evidence=tuple(evidence),
        fix="use larger batches, accumulation with no_sync, or DDP's bf16 hook, which changes the results; run "
        "`ddpdoctor allreduce-bench` to check the network",
        share=share / 2,
    )


@rule(
    "DD804", "bucket-size", Severity.WARNING,
    "Another DDP bucket size would overlap more of the reduction with backward",
)  # fmt: skip
def check_buckets(state: SpeedState) -> Answer:
    """Report buckets that are so large or so small that gradients are reduced after backward instead of during it."""
    transfer_ms = mean(state.steps.transfer_ms["exposed"])
    share = state.share(transfer_ms)
    models = reduced_models(state)
    if not models:
        return skipped("the times when gradients are ready were not recorded")
    if share < SHARE or state.budget.wall_ms < MIN_STEP_MS:
        return passed(f"the reduction of gradients takes {share:.0%} of a step")
    if len(models) > 1:
        return unknown(f"the reductions of the {len(models)} DDP models cannot be distinguished")
    gradients = gradients_of(state)
    if gradients is None:
        return unknown("the ranks have different gradients")
    if reason := contested(state, gradients):
        return unknown(reason)
    networks = networks_of(gradients)
    if not networks:
        return passed()
    cap_bytes, (low_ms, mid_ms, high_ms) = best_cap(gradients, networks)
    # The saving is predicted from a few backwards: compared with these, not with the mean of a busy machine.
    simulated_ms = min(transfer_ms, gradients.exposed_ms)
    if state.share(low_ms) < LEAST_GAIN or mid_ms < LEAST_OF_TRANSFER * simulated_ms:
        return passed()
    sizes, cap, later_ms = gradients.bucket_bytes, f"{cap_bytes / MIB:g}", gradients.exposed_ms
    count = f"{len(sizes)} buckets, the largest with {format_size(max(sizes))}" if len(sizes) > 1 else "one bucket"
    low, mid, high = (state.share(min(time_ms, transfer_ms)) for time_ms in (low_ms, mid_ms, high_ms))
    return found(
        summary=f"gradient reduction that does not overlap with backward takes {share:.0%} of the step; another "
        f"bucket size should save about {mid:.0%} of the step",
        evidence=(
            f"{format_size(sum(sizes))} of gradients are reduced in {count}",
            f"backward computes for {gradients.compute_end_ms:.3g} ms, and the reduction ends {later_ms:.3g} ms later",
            f"predicted for {cap} MiB: {low:.0%} to {high:.0%} less time per step",
        ),
        fix=state.knob("bucket_cap", mib=cap),
        confidence=Confidence.MEDIUM,
        ranks=tuple(sorted(models[0].times)),
        where=models[0].built_at(state),
        share=mid,
    )


@rule(
    "DD805", "accumulation-sync", Severity.WARNING, "Gradients are reduced after every micro-batch of an optimizer step"
)
def check_accumulation(state: SpeedState) -> Answer:
    """Report a DDP model whose gradients are reduced several times in each optimizer step."""
    times = min(int(median(rank.reductions)) for rank in state.steps.ranks.values())
    if times < 2:
        return passed("gradients are reduced once per optimizer step" if times else "no reduction was seen")
    if small := state.is_small():
        return skipped(small)
    transfer_ms = mean(state.steps.transfer_ms["exposed"])
    share = state.share(transfer_ms * (times - 1) / times)
    if share < SAVED_SHARE:
        return passed(f"{times} reductions per optimizer step take {state.of_step(transfer_ms)}")
    beyond = f"beyond backward's own computation, the reductions take {state.of_step(transfer_ms)}"
    return found(
        summary=f"gradients are reduced {times} times per optimizer step, but once is enough: {up_to(share)}",
        ranks=tuple(state.steps.ranks),
        where=state.places(lambda rank: call_site(rank, "backward")),
        evidence=(f"{times} backwards with a reduction per optimizer step; {beyond}",),
        fix=state.knob("accumulate"),
        share=share,
    )


@rule("DD806", "find-unused-needless", Severity.WARNING, "DDP searches for unused parameters, but there are none")
def check_unused(state: SpeedState) -> Answer:
    """Report a model with find_unused_parameters=True in which every parameter is used in every step."""
    models = [model for model in reduced_models(state) if any(time.finds_unused for time in model.times.values())]
    if not models:
        return skipped("no DDP model on CPUs has find_unused_parameters=True, or too few steps were recorded")
    problems = []
    for model in models:
        ranks = model.times.values()
        if not all(rank.same_unused and rank.reductions >= MIN_STEPS and not rank.static_graph for rank in ranks):
            continue
        if any(rank.unused_bytes for rank in ranks):
            what, severity = "the same parameters are unused in every step", Severity.INFO
            fix = "freeze these parameters, or replace the flag with static_graph=True"
        else:
            what, severity = "no parameter is unused in any step", None
            fix = f"{state.knob('find_unused_off')}, unless the model has rarely used branches"
        problems.append(Problem(
            summary=f"find_unused_parameters=True is not needed: {what}",
            evidence=(f"DDP reported the unused parameters of {state.budget.count} steps",),
            fix=fix, severity=severity, ranks=tuple(sorted(model.times)), where=model.built_at(state),
        ))  # fmt: skip
    return judged(problems) if problems else passed("the unused parameters change, or the run is too short to tell")


@rule("DD807", "buffer-broadcast", Severity.WARNING, "Broadcasting DDP buffers takes a large part of the step")
def check_buffers(state: SpeedState) -> Answer:
    """Report a DDP model whose buffers take long to broadcast before each forward."""
    transfer_ms = usual(state.steps.transfer_ms["buffers"])
    share = state.share(transfer_ms)
    seen = f"the broadcast takes {state.of_step(transfer_ms)}"
    if answer := state.too_little(share, seen):
        return answer
    return found(
        summary=f"DDP broadcasts buffers before each forward: {up_to(share)}",
        ranks=tuple(state.steps.ranks),
        where=state.places(lambda rank: next((model.site for model in rank.models if model.site is not None), None)),
        evidence=(seen,),
        fix="keep constants in a plain attribute instead of a buffer (persistent=False buffers are sent too), or pass "
        f"{state.knob('buffers_off')} if the buffers may differ between ranks",
        share=share,
    )


@rule(
    "DD808", "sync-each-step", Severity.WARNING, "The script's own collectives take a large part of each step",
    after=("hand-made-reduce", "data-parallel"),
)  # fmt: skip
def check_sync(state: SpeedState) -> Answer:
    """Report collectives of the script that take long in every step."""
    transfer_ms = usual(state.steps.transfer_ms["calls"])
    share = state.share(transfer_ms)
    seen = f"the script's collectives take {state.of_step(transfer_ms)}"
    if answer := state.too_little(share, seen):
        return answer
    if any(rank.speed and rank.speed.hand_reduced for rank in state.ranks):
        return passed("they reduce gradients")
    if any(rank.speed and rank.speed.data_parallel for rank in state.ranks):
        return passed(f"{seen}; the model uses DataParallel, and the script makes its reductions")
    lines = {rank.rank: line for rank in state.ranks if (line := _line_of_each_step(rank)) is not None}
    if not lines:
        return passed(f"{seen}, and no line runs in at least every second step")
    op, frame = next(iter(lines.values()))
    return found(
        summary=f"{op} ({frame.file.rpartition('/')[2]}:{frame.line}) runs in every step: {up_to(share)}",
        ranks=tuple(state.steps.ranks),
        where=places_of((number, line) for number, (_, line) in lines.items()),
        evidence=(seen + ", not counting waits for slower ranks",),
        fix="call it every N steps, or once per epoch on local sums; or pass async_op=True and wait when you need the "
        "result",
        share=share,
    )


def _line_of_each_step(rank: Rank) -> tuple[str, Frame] | None:
    """Return the operation and the line of a rank's collectives that took most time, if it runs in each step."""

    def is_waited_for(kind: CallKind) -> bool:
        is_collective = kind.op not in PHASES and kind.op not in POINT_TO_POINT and not kind.is_async
        return kind.thread_is_main and (kind.op == "work_wait" or is_collective)

    log = rank.recent_calls
    ends = [call.started_ns for call in log.of_kinds(lambda kind: kind.op == "backward")]
    took: dict[tuple[str, Frame], int] = {}
    steps: dict[tuple[str, Frame], set[int]] = {}
    for call in log.of_kinds(is_waited_for):
        if call.site is not None and call.ended_ns:
            key = call.api, call.site
            took[key] = took.get(key, 0) + call.ended_ns - call.started_ns
            steps.setdefault(key, set()).add(bisect_left(ends, call.started_ns))
    often = [key for key in took if len(steps[key]) >= EACH_STEP * len(ends)]
    return max(often, key=lambda key: took[key], default=None)


@rule("DD813", "hand-made-reduce", Severity.WARNING, "The script reduces gradients tensor by tensor, without DDP")
def check_hand_made(state: SpeedState) -> Answer:
    """Report a script that passes its gradients to all_reduce one by one."""
    reduced = {rank.rank: rank.speed.hand_reduced for rank in state.ranks if rank.speed and rank.speed.hand_reduced}
    if not reduced:
        return passed("the script does not call all_reduce on single gradients")
    if small := state.is_small():
        return skipped(small)
    transfer_ms = usual(state.steps.transfer_ms["calls"])
    share = state.share(transfer_ms)
    most = max(seen.gradients for seen in reduced.values())
    seen = f"{most} calls take {state.of_step(transfer_ms)}"
    if share < SHARE:
        return passed(seen)
    copied = any(seen.copied for seen in reduced.values())
    given = "gradient shape" if copied else "gradient"
    return found(
        confidence=Confidence.MEDIUM if copied else Confidence.HIGH,
        summary=f"{most} gradients are reduced one by one after backward: {up_to(share)}",
        ranks=tuple(reduced),
        where=places_of((number, seen.site) for number, seen in reduced.items()),
        evidence=(seen, f"the script calls all_reduce once for each {given} of the optimizer"),
        fix="wrap the model in torch.nn.parallel.DistributedDataParallel and remove the loop, or reduce one flat "
        "tensor",
        share=share,
    )
