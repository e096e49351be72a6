"""DD401, DD405 and DD406, and what the curve of all_reduce means for DistributedDataParallel."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.bandwidth import Advice, Assessment, Collective, Mode, describe_shared_gpus
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.words import format_size, format_time, grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, found, judged, skipped
from ddpdoctor.rules.bandwidth.curves import (
    EXPECT,
    cannot_tell,
    find_plateau,
    fit_line,
    name_case,
    size_at,
    sort_sweeps,
    time_at,
)
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Bench, Change, Wrong
    from ddpdoctor.rules.bandwidth.curves import FittedLine, Measured, Sweep


SHOWN = 6  # how many sizes are named as evidence; the table has them all
MEASURE_MORE = "Measure more: --pairs and --by-node find a slow rank, link or host."
UNDECIDED = {Assessment.NOISY, Assessment.NOT_REACHED, Assessment.NOT_DEFINED}
FIX = (
    "Measure longer (--budget 5m), with no other jobs on the machines, fewer ranks than CPUs, and a fixed clock "
    "(cpupower frequency-set -g performance; nvidia-smi -lgc)."
)


@rule("DD405", "below-reference", Severity.WARNING, "The bandwidth is below the expected or usual value")
def check_below(measured: Measured) -> Answer:
    """Report a bandwidth below --expect, below a saved run, or below what the same hardware gives elsewhere."""
    one_host = len({member.host for member in measured.bench.members}) == 1
    problems = []
    for curve in measured.curves:
        if curve.assessment is Assessment.BELOW and curve.reference is not None:
            source, spread = curve.reference.source, curve.plateau_spread
            shown = () if spread is None else (f"the sizes of the plateau differ by {spread:.0%}",)
            sure = source == EXPECT or (one_host and source.startswith("http"))
            problems.append(Problem(
                summary=f"{name_case(curve)}: {curve.verdict}",
                evidence=(*shown, *_reason_words(measured)),
                fix=_first_fix(measured),
                severity=Severity.ERROR if source == EXPECT else Severity.WARNING,
                confidence=Confidence.HIGH if sure else Confidence.MEDIUM,
            ))  # fmt: skip
    doubts: list[str] = []
    if measured.fail_below is not None:
        against_baseline, doubts = _compare_with_baseline(measured, measured.fail_below)
        problems += against_baseline
    if measured.expect_gb_s is not None:
        if not measured.curves:
            undecided = ["no measurement can be compared with --expect"]
        elif shared := describe_shared_gpus(measured.bench.members):
            undecided = [shared]
        else:
            undecided = [
                f"{name_case(curve)}: {curve.verdict}" for curve in measured.curves if curve.assessment in UNDECIDED
            ]
        doubts = [*undecided, *doubts]
    if doubts and all(problem.severity is not Severity.ERROR for problem in problems):
        # The user's own requirement stays open, whatever else is found.
        return Answer(outcome=Outcome.INCONCLUSIVE, seen="; ".join(doubts), problems=tuple(problems))
    if problems:
        return judged(problems, "; ".join(problem.summary for problem in problems))
    if measured.comparison is not None and measured.fail_below is not None:
        count = len(measured.comparison.changes)
        return judged((), f"none of {count} sizes is below {measured.fail_below:.0%} of the baseline")
    healthy = [
        f"{name_case(curve)}: {curve.verdict}" for curve in measured.curves if curve.assessment is Assessment.HEALTHY
    ]
    verdicts = dict.fromkeys(curve.verdict for curve in measured.curves)
    return judged((), "; ".join(healthy)) if healthy else skipped("; ".join(verdicts) or "nothing was measured")


def _compare_with_baseline(measured: Measured, fail_below: float) -> tuple[list[Problem], list[str]]:
    """Report the sizes that are below --fail-below of a saved run, and what cannot be judged."""
    comparison = measured.comparison
    if comparison is None or not comparison.changes:
        first = comparison.differences[:1] if comparison is not None else ()
        return [], ["".join(["the baseline has no case in common with this run", *(f" ({words})" for words in first)])]
    count = len(comparison.changes)
    below = sorted((change for change in comparison.changes if change.below), key=lambda change: change.ratio)
    noisy = [change for change in comparison.changes if cannot_tell(change, fail_below)]
    doubts = [f"too noisy to judge {len(noisy)} of {count} sizes: {_change(noisy[-1])}"] if noisy else []
    if not below:
        return [], doubts
    more = f" {len(below) - 1} more of {count} sizes are below it." if len(below) > 1 else ""
    summary = f"{_change(below[0])}: below --fail-below {fail_below:.0%} of {comparison.baseline}.{more}"
    evidence = (*map(_change, below[:SHOWN]), *comparison.differences, *_reason_words(measured))
    problem = Problem(summary=summary, evidence=evidence, fix=_first_fix(measured), severity=Severity.ERROR)
    return [problem], doubts


def _change(change: Change) -> str:
    return (
        f"{name_case(change)} {change.mode.value} of {format_size(change.size_bytes)} reaches {change.ratio:.0%} "
        f"({change.ratio_low:.0%}-{change.ratio_high:.0%}) of its earlier speed: {format_time(change.then_us)} then, "
        f"{format_time(change.now_us)} now"
    )


def _reason_words(measured: Measured) -> tuple[str, ...]:
    return tuple(f"{reason.text} [{reason.source}]" for reason in measured.reasons)


def _first_fix(measured: Measured) -> str:
    fixes = [reason.fix for reason in measured.reasons if reason.fix]
    return fixes[0] if fixes else MEASURE_MORE


@rule("DD406", "too-noisy", Severity.INFO, "The results vary too much to compare with a reference or a saved run")
def check_noise(measured: Measured) -> Answer:
    """Report figures that vary too much to answer the question that the user asked."""
    doubts = [
        f"{name_case(curve)} in {curve.mode.value} mode: {curve.verdict}"
        for curve in measured.curves
        if curve.assessment is Assessment.NOISY
    ]
    if measured.comparison is not None and measured.fail_below is not None:
        noisy = sum(cannot_tell(change, measured.fail_below) for change in measured.comparison.changes)
        if noisy:
            doubts.append(f"{noisy} of {len(measured.comparison.changes)} sizes against {measured.comparison.baseline}")
    if not doubts:
        held = measured.comparison is not None or any(curve.reference is not None for curve in measured.curves)
        return judged((), "the noise is low enough") if held else skipped("there is nothing to compare with")
    return found(f"Too noisy to judge: {doubts[0]}", "; ".join(doubts), evidence=tuple(doubts), fix=FIX)


SHOWN_WRONG = 8  # how many wrong elements are named; more would repeat the same
FIX_WRONG = (
    "Do not train on this machine. Look for memory errors (ddpdoctor check-env: DD307, DD308, DD311; dcgmi diag -r "
    "3; a test of the host's memory), and run with another transport (NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring): if the "
    "result stays wrong, the card or the memory is at fault."
)
ROOT = 0  # the rank that broadcasts, and the target of a reduce


@rule("DD401", "wrong-data", Severity.ERROR, "A collective gave wrong data", after=("start-trial",))
def check_wrong_data(measured: Measured) -> Answer:
    """Report results of collectives that differ from the exact result."""
    bench = measured.bench
    checked = sum(result.wrong is not None for result in bench.results)
    if not bench.wrong:
        if not checked:
            return skipped("no result was checked")
        return judged((), f"the results of {checked} measured cases are correct")
    by_blame: dict[tuple[tuple[int, ...], Confidence, str], list[Wrong]] = defaultdict(list)
    cases = grouped(((err.collective, err.dtype, err.redop, err.in_place, err.size_bytes), err) for err in bench.wrong)
    for wrongs in cases.values():
        by_blame[find_blame(bench, wrongs)] += wrongs
    problems = []
    for (ranks, confidence, why), wrongs in by_blame.items():
        first = min(wrongs, key=lambda wrong: (wrong.size_bytes, wrong.rank))
        more = f", and {len(wrongs) - 1} more wrong results" if len(wrongs) > 1 else ""
        shown = [_element(wrong) for wrong in wrongs[:SHOWN_WRONG]]
        if len(wrongs) > SHOWN_WRONG:
            shown.append(f"{len(wrongs) - SHOWN_WRONG} more")
        problems.append(Problem(
            summary=f"Wrong data: {_element(first)}{more}.",
            evidence=(*shown, why),
            fix=FIX_WRONG,
            confidence=confidence,
            ranks=ranks,
            hosts=tuple(dict.fromkeys(member.host for member in bench.members if member.rank in ranks)),
        ))  # fmt: skip
    return judged(problems, f"{len(bench.wrong)} wrong results")


def _element(wrong: Wrong) -> str:
    others = f" ({wrong.count} elements are wrong)" if wrong.count > 1 else ""
    element = f"element {wrong.index} is {wrong.found:.17g} instead of {wrong.expected:.17g}"
    return f"{name_case(wrong)} of {format_size(wrong.size_bytes)} on rank {wrong.rank}: {element}{others}"


def find_blame(bench: Bench, wrongs: Sequence[Wrong]) -> tuple[tuple[int, ...], Confidence, str]:
    """Return the ranks that may be to blame for the wrong results of one case, how sure that is, and why."""
    world = tuple(sorted(member.rank for member in bench.members))
    ranks = tuple(sorted({wrong.rank for wrong in wrongs}))
    suspects, why = world, "sender and receiver cannot be distinguished"
    collective = wrongs[0].collective
    if collective is Collective.REDUCE:
        why = "only the root has the result, and all ranks sent data"
    elif collective is Collective.BROADCAST:
        right = set(world) - set(ranks) - {ROOT}
        if right:
            return ranks, Confidence.MEDIUM, f"{rank_list(right)} received the same data correctly"
        if len(world) > 2:
            return (ROOT,), Confidence.MEDIUM, f"every rank that received data from rank {ROOT} has wrong data"
    elif collective in {Collective.SEND_RECV, Collective.ALL_TO_ALL}:
        # From one rank to another: to blame is the rank that all wrong messages have in common.
        ends = [{wrong.rank, _sender(bench, world, wrong)} for wrong in wrongs]
        common = set.intersection(*ends)
        if len(ends) > 1 and len(common) == 1:
            return tuple(common), Confidence.MEDIUM, "it sent or received every wrong message"
        suspects = tuple(sorted(set.union(*ends)))
    elif len(ranks) < len(world):
        right = set(world) - set(ranks)
        return ranks, Confidence.HIGH, f"the same call gave {rank_list(right)} the correct result"
    else:
        alike = len({(wrong.index, wrong.found) for wrong in wrongs}) == 1
        same = "all ranks have the same wrong number, so one of them sent it"
        why = f"{same if alike else 'no rank has the correct result'}: it is unknown which one is at fault"
    return suspects, Confidence.LOW, why


def _sender(bench: Bench, world: tuple[int, ...], wrong: Wrong) -> int:
    """Return who sent an element: the previous rank, or for all_to_all the rank whose part of the output it is in."""
    if wrong.collective is Collective.SEND_RECV:
        return world[(world.index(wrong.rank) - 1) % len(world)]
    alike = (
        result.count for result in bench.results if (result.size_bytes, result.dtype) == (wrong.size_bytes, wrong.dtype)
    )
    count = next(alike, 0)
    return world[min(wrong.index * len(world) // count, len(world) - 1)] if count else wrong.rank


MIB = 2**20
# ``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``: small, so that the first all-reduce starts early.
FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB  # the default of DistributedDataParallel's ``bucket_cap_mb``
SIGMAS = 2.0  # standard deviations on either side of a gain: about 95 %
# A smaller gain, as a share of the whole time, counts as none. Our choice: steps of a training job vary by more.
LEAST_GAIN = 0.02
NEAR_FULL = 0.9  # the share of the plateau at which the size of a bucket is no concern
UNITS = (("B", 10**9), ("M", 10**6), ("K", 10**3))
LAST_WORD = (
    "The real optimum depends on the model: on when its gradients are ready, and on how much communication backward "
    "hides."
)


def advise(bench: Bench, model_size: int | None) -> Advice | None:
    """Return what a DDP job of ``model_size`` parameters can expect, or None if no all_reduce over ranks was measured.

    Gradients are assumed to have the first dtype measured. Throughput mode is preferred, because DDP starts its
    all-reduces one after another without waiting.
    """
    dtypes = bench.settings.dtypes

    def place(sweep: Sweep) -> tuple[int, bool]:
        dtype = sweep[0].dtype
        return dtypes.index(dtype) if dtype in dtypes else len(dtypes), sweep[0].mode is Mode.LATENCY

    found = (sweep for sweep in sort_sweeps(bench.results) if sweep[0].collective is Collective.ALL_REDUCE)
    sweep = min(found, key=place, default=None)
    if sweep is None or len(bench.members) < 2:
        return None
    first, last, plateau = sweep[0], sweep[-1], find_plateau(sweep)
    is_measured = first.size_bytes <= BUCKET_BYTES <= last.size_bytes

    def time_us(size_bytes: float) -> float | None:
        """Return the time of a size. Beyond the largest measured size it needs a plateau, else it is None."""
        within = time_at(sweep, size_bytes)
        return within if within is not None or plateau is None else last.p50_us * size_bytes / last.size_bytes

    share, whole_us, model_bytes = None, None, None
    suggested: dict[str, Any] = dict.fromkeys(("try_mib", "gain_ms", "gain_low_ms", "gain_high_ms"))
    if (bucket_us := time_us(BUCKET_BYTES)) is None:
        largest = format_size(last.size_bytes)
        text = [f"The time of DDP's default bucket of 25 MiB is unknown: the largest measured size is {largest}."]
    else:
        said = f"DDP's default bucket of 25 MiB takes {format_time(bucket_us)}"
        if plateau is not None and last.busbw_gb_s is not None and is_measured:
            share = BUCKET_BYTES / bucket_us / 1e3 * last.busbw_gb_s / last.algbw_gb_s / plateau.gb_s
            # If the bucket already reaches the plateau, a disturbed size beyond it is no reason to ask for more.
            full = size_at(sweep, NEAR_FULL * plateau.gb_s) if share < NEAR_FULL else None
            enough = f", of which {NEAR_FULL:.0%} takes {full / MIB:.0f} MiB" if full and full > BUCKET_BYTES else ""
            said += f" and reaches {share:.0%} of the plateau{enough}"
        text = [f"{said}."]
    if model_size is not None:
        # All gradients, in a first bucket of 1 MiB, full buckets and the rest
        model_bytes = model_size * (first.size_bytes // first.count)
        start = min(FIRST_BUCKET_BYTES, model_bytes)
        full_ones, rest = divmod(model_bytes - start, BUCKET_BYTES)
        buckets = ((1, start), (full_ones, BUCKET_BYTES), (1 if rest else 0, rest))
        times_us = [None if (call_us := time_us(size)) is None else count * call_us for count, size in buckets if count]
        whole_us = None if None in times_us else sum(filter(None, times_us))
        unit, size = next(((unit, size) for unit, size in UNITS if model_size >= size), ("", 1))
        what = f"{model_size / size:.3g}{unit} gradients in {first.dtype} ({model_bytes / 1e9:.3g} GB)"
        if whole_us is None:
            text.append(f"The time of {what} is unknown: measure up to 32 MiB or more.")
        else:
            more = "" if is_measured else ", based on the plateau, because 25 MiB is larger than the measured sizes"
            text.append(f"{what} in such buckets take {format_time(whole_us)} without overlap{more}.")
            largest_bytes = min(model_bytes, last.size_bytes)
            gains, said = _suggest_bucket(fit_line(sweep), largest_bytes, model_bytes, whole_us)
            suggested.update(gains)
            text.append(said)
    return Advice(
        model_bytes=model_bytes, dtype=first.dtype, whole_ms=None if whole_us is None else whole_us / 1e3,
        bucket_mib=BUCKET_BYTES / MIB, bucket_share=share, text=(*text, LAST_WORD),
        **suggested,
    )  # fmt: skip


def _suggest_bucket(
    line: FittedLine | None, largest_bytes: int, model_bytes: int, whole_us: float
) -> tuple[dict[str, Any], str]:
    """Return the bucket near sqrt(alpha * bandwidth * gradients), the best if no communication is hidden.

    With t = alpha + S/B, gradients G and buckets of b, all buckets take alpha * G/b + G/B. Waiting for the first bucket
    to fill costs up to b/B more: all of it if the backward pass produces gradients no faster than they are sent,
    nothing if it takes no time. The square root is the minimum with b/B, and the gain is computed with it. The interval
    also covers the gain without b/B, and adds the uncertainty of the fit on both sides.

    Return its size and gain as fields of ``Advice``, and a sentence. Without one, the sentence says why.
    """
    none = "No other bucket_cap_mb can be suggested"
    if line is None:
        return {}, f"{none}: too few sizes were measured."
    if not line.fits:
        misfit = f"this curve does not follow alpha + S/B (the residual is {line.residual:.0%})"
        return {}, f"{none}: {misfit}, so try larger and smaller ones."
    mib = max(1, round(min(math.sqrt(line.alpha_us / line.us_per_byte * model_bytes), largest_bytes) / MIB))
    # It takes fewer calls (alpha each), and no wait for bytes that a smaller bucket does not have.
    fewer_calls = model_bytes / BUCKET_BYTES - model_bytes / (mib * MIB)
    ranges = []
    for smaller_bytes in (BUCKET_BYTES - mib * MIB, 0):
        variance = (
            fewer_calls**2 * line.var_alpha
            + smaller_bytes**2 * line.var_slope
            + 2 * fewer_calls * smaller_bytes * line.covariance
        )
        gain = line.alpha_us * fewer_calls + line.us_per_byte * smaller_bytes
        doubt = SIGMAS * math.sqrt(max(0.0, variance))
        ranges.append((gain - doubt, gain, gain + doubt))
    lows, (gain, _), highs = zip(*ranges, strict=True)
    low, high = min(lows), max(highs)
    if lows[0] <= 0 or gain < LEAST_GAIN * whole_us:
        return {}, "No other bucket_cap_mb is clearly better than the default of 25."
    limits = " and ".join(f"{format_time(abs(us))} {'lost' if us < 0 else 'saved'}" for us in (low, high))
    saved = f"it saves about {format_time(gain)} per step (between {limits}) if backward hides no communication"
    gains = {"gain_ms": gain / 1e3, "gain_low_ms": low / 1e3, "gain_high_ms": high / 1e3}
    return {"try_mib": mib, **gains}, f"Worth trying: bucket_cap_mb={mib}; {saved}."
