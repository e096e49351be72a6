"""DD401, DD405 and DD406, and what the curve of all_reduce means for DistributedDataParallel."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Advice, Assessment, Collective, Mode, describe_shared_gpus
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.words import format_size, format_time, grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
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

    from ddpdoctor.model.bandwidth import Bench, Change, Comparison, Curve, Wrong
    from ddpdoctor.rules.bandwidth.curves import FittedLine, Measured, Plateau, Sweep


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
    problems = [_against_number(measured, curve) for curve in measured.curves if curve.assessment is Assessment.BELOW]
    comparison = measured.comparison
    if comparison is not None and measured.fail_below is not None:
        problems += _against_baseline(measured, comparison, measured.fail_below)
    doubts: list[str] = []
    if measured.expect_gb_s is not None:
        if not measured.curves:
            doubts.append("no measurement can be compared with --expect")
        elif shared := describe_shared_gpus(measured.bench.members):
            doubts.append(shared)
        else:
            undecided = [
                curve for curve in measured.curves if curve.assessment in UNDECIDED - {Assessment.NO_REFERENCE}
            ]
            doubts += [f"{name_case(curve)}: {curve.verdict}" for curve in undecided]
    doubts += _doubts_of_baseline(measured)
    if doubts and all(problem.severity is not Severity.ERROR for problem in problems):
        # The user's own requirement stays open, whatever else is found.
        return Answer(outcome=Outcome.INCONCLUSIVE, seen="; ".join(doubts), problems=tuple(problems))
    return (
        judged(problems, "; ".join(problem.summary for problem in problems)) if problems else _answer_healthy(measured)
    )


def _against_number(measured: Measured, curve: Curve) -> Problem:
    demanded = curve.reference is not None and curve.reference.source == EXPECT
    spread = (
        f"the sizes of the plateau differ by {curve.plateau_spread:.0%}" if curve.plateau_spread is not None else None
    )
    assert curve.reference is not None
    if curve.reference.source == EXPECT:
        confidence = Confidence.HIGH
    else:
        one_host = len({member.host for member in measured.bench.members}) == 1
        confidence = Confidence.HIGH if one_host and curve.reference.source.startswith("http") else Confidence.MEDIUM
    return Problem(
        summary=f"{name_case(curve)}: {curve.verdict}",
        evidence=tuple(one for one in (spread, *_reasons(measured)) if one),
        fix=_fix(measured),
        severity=Severity.ERROR if demanded else Severity.WARNING,
        confidence=confidence,
    )


def _against_baseline(measured: Measured, comparison: Comparison, fail_below: float) -> list[Problem]:
    below = [change for change in comparison.changes if change.below]
    if not below:
        return []
    worst = min(below, key=lambda change: change.ratio)
    more = f" {len(below) - 1} more of {len(comparison.changes)} sizes are below it." if len(below) > 1 else ""
    shown = [_change(change) for change in sorted(below, key=lambda change: change.ratio)[:SHOWN]]
    return [
        Problem(
            summary=f"{_change(worst)}: below --fail-below {fail_below:.0%} of {comparison.baseline}.{more}",
            evidence=(*shown, *comparison.differences, *_reasons(measured)),
            fix=_fix(measured),
            severity=Severity.ERROR,
        )
    ]


def _change(change: Change) -> str:
    return (
        f"{name_case(change)} {change.mode.value} of {format_size(change.size_bytes)} reaches {change.ratio:.0%} "
        f"({change.ratio_low:.0%}-{change.ratio_high:.0%}) of its earlier speed: {format_time(change.then_us)} then, "
        f"{format_time(change.now_us)} now"
    )


def _doubts_of_baseline(measured: Measured) -> list[str]:
    if measured.fail_below is None:
        return []
    comparison = measured.comparison
    if comparison is None or not comparison.changes:
        differences = "" if comparison is None else "".join(f" ({one})" for one in comparison.differences[:1])
        return [f"the baseline has no case in common with this run{differences}"]
    noisy = [change for change in comparison.changes if cannot_tell(change, measured.fail_below)]
    if not noisy:
        return []
    return [f"too noisy to judge {len(noisy)} of {len(comparison.changes)} sizes: {_change(noisy[-1])}"]


def _answer_healthy(measured: Measured) -> Answer:
    if measured.comparison is not None and measured.fail_below is not None:
        return judged(
            (), f"none of {len(measured.comparison.changes)} sizes is below {measured.fail_below:.0%} of the baseline"
        )
    healthy = [curve for curve in measured.curves if curve.assessment is Assessment.HEALTHY]
    if healthy:
        return judged((), "; ".join(f"{name_case(curve)}: {curve.verdict}" for curve in healthy))
    verdicts = dict.fromkeys(curve.verdict for curve in measured.curves)
    return skipped("; ".join(verdicts) or "nothing was measured")


def _reasons(measured: Measured) -> tuple[str, ...]:
    return tuple(f"{reason.text} [{reason.source}]" for reason in measured.reasons)


def _fix(measured: Measured) -> str:
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
    return judged(
        [Problem(summary=f"Too noisy to judge: {doubts[0]}", evidence=tuple(doubts), fix=FIX)], "; ".join(doubts)
    )


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
    checked = sum(one.wrong is not None for one in bench.results)
    if not bench.wrong:
        if not checked:
            return skipped("no result was checked")
        return judged((), f"the results of {checked} measured cases are correct")
    by_blame: dict[WrongDataBlame, list[Wrong]] = defaultdict(list)
    cases = grouped(((one.collective, one.dtype, one.redop, one.in_place, one.size_bytes), one) for one in bench.wrong)
    for wrongs in list(cases.values()):
        by_blame[find_blame(bench, wrongs)] += wrongs
    return judged(
        [_problem(bench, blame, wrongs) for blame, wrongs in by_blame.items()], f"{len(bench.wrong)} wrong results"
    )


def _problem(bench: Bench, blame: WrongDataBlame, wrongs: list[Wrong]) -> Problem:
    first = min(wrongs, key=lambda one: (one.size_bytes, one.rank))
    more = f", and {len(wrongs) - 1} more wrong results" if len(wrongs) > 1 else ""
    shown = [_element(one) for one in wrongs[:SHOWN_WRONG]]
    if len(wrongs) > SHOWN_WRONG:
        shown.append(f"{len(wrongs) - SHOWN_WRONG} more")
    return Problem(
        summary=f"Wrong data: {_element(first)}{more}.",
        evidence=(*shown, blame.why),
        fix=FIX_WRONG,
        confidence=blame.confidence,
        ranks=blame.ranks,
        hosts=tuple(dict.fromkeys(member.host for member in bench.members if member.rank in blame.ranks)),
    )


def _element(one: Wrong) -> str:
    others = f" ({one.count} elements are wrong)" if one.count > 1 else ""
    element = f"element {one.index} is {one.found:.17g} instead of {one.expected:.17g}"
    return f"{name_case(one)} of {format_size(one.size_bytes)} on rank {one.rank}: {element}{others}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongDataBlame:
    """The ranks that can be to blame, how sure that is, and why."""

    ranks: tuple[int, ...]
    confidence: Confidence
    why: str


def find_blame(bench: Bench, wrongs: Sequence[Wrong]) -> WrongDataBlame:
    """Return the ranks that can be to blame for the wrong results of one case (at least one result)."""
    world = tuple(sorted(member.rank for member in bench.members))
    collective = wrongs[0].collective
    if collective is Collective.REDUCE:
        return _low(world, "only the root has the result, and all ranks sent data")
    if collective is Collective.BROADCAST:
        return _blame_broadcast(world, wrongs)
    if collective in {Collective.SEND_RECV, Collective.ALL_TO_ALL}:
        return _blame_messages(bench, world, wrongs)
    ranks = _ranks(wrongs)
    if len(ranks) < len(world):
        right = rank_list(set(world) - set(ranks))
        return WrongDataBlame(
            ranks=ranks, confidence=Confidence.HIGH, why=f"the same call gave {right} the correct result"
        )
    alike = len({(one.index, one.found) for one in wrongs}) == 1
    why = "all ranks have the same wrong number, so one of them sent it" if alike else "no rank has the correct result"
    return _low(world, f"{why}: it is unknown which one is at fault")


def _blame_broadcast(world: tuple[int, ...], wrongs: Sequence[Wrong]) -> WrongDataBlame:
    ranks = _ranks(wrongs)
    right = set(world) - set(ranks) - {ROOT}
    if right:
        why = f"{rank_list(right)} received the same data correctly"
        return WrongDataBlame(ranks=ranks, confidence=Confidence.MEDIUM, why=why)
    if len(world) > 2:
        why = f"every rank that received data from rank {ROOT} has wrong data"
        return WrongDataBlame(ranks=(ROOT,), confidence=Confidence.MEDIUM, why=why)
    return _low(world, "sender and receiver cannot be distinguished")


def _blame_messages(bench: Bench, world: tuple[int, ...], wrongs: Sequence[Wrong]) -> WrongDataBlame:
    """Blame ranks for messages from one rank to another: the rank that all wrong messages have in common."""
    ends = [{one.rank, _sender(bench, world, one)} for one in wrongs]
    common = set.intersection(*ends)
    if len(ends) > 1 and len(common) == 1:
        why = "it sent or received every wrong message"
        return WrongDataBlame(ranks=tuple(common), confidence=Confidence.MEDIUM, why=why)
    return _low(tuple(sorted(set.union(*ends))), "sender and receiver cannot be distinguished")


def _sender(bench: Bench, world: tuple[int, ...], wrong: Wrong) -> int:
    """Return who sent an element: the previous rank, or for all_to_all the rank whose part of the output it is in."""
    if wrong.collective is Collective.SEND_RECV:
        return world[(world.index(wrong.rank) - 1) % len(world)]
    count = next(
        (one.count for one in bench.results if (one.size_bytes, one.dtype) == (wrong.size_bytes, wrong.dtype)), 0
    )
    return world[min(wrong.index * len(world) // count, len(world) - 1)] if count else wrong.rank


def _low(ranks: tuple[int, ...], why: str) -> WrongDataBlame:
    return WrongDataBlame(ranks=ranks, confidence=Confidence.LOW, why=why)


def _ranks(wrongs: Sequence[Wrong]) -> tuple[int, ...]:
    return tuple(sorted({one.rank for one in wrongs}))


MIB = 2**20
# ``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``: small, so that the first all-reduce starts early.
FIRST_BUCKET_BYTES = MIB
BUCKET_BYTES = 25 * MIB  # the default of DistributedDataParallel's ``bucket_cap_mb``
SIGMAS = 2.0  # standard deviations on either side of a gain: about 95 %
# A smaller gain, as a share of the whole time, counts as none. Our choice: steps of a training job vary by more.
LEAST_GAIN = 0.02
NEAR_FULL = 0.9  # the share of the plateau at which the size of a bucket is no concern
LAST_WORD = (
    "The real optimum depends on the model: on when its gradients are ready, and on how much communication backward "
    "hides."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Basis:
    """The curve that the advice is based on."""

    sweep: Sweep
    plateau: Plateau | None
    line: FittedLine | None

    def time_us(self, size_bytes: float) -> float | None:
        """Return the time of a size in us. Beyond the largest measured size it needs a plateau, else it is None."""
        within = time_at(self.sweep, size_bytes)
        if within is not None or self.plateau is None:
            return within
        last = self.sweep.points[-1]
        return last.p50_us * size_bytes / last.size_bytes

    def measured(self, size_bytes: float) -> bool:
        """Return whether a size is within the measured range."""
        points = self.sweep.points
        return points[0].size_bytes <= size_bytes <= points[-1].size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """Another bucket size and what it gains. Without one, ``mib`` is None and ``why_not`` may say why."""

    mib: int | None = None
    gain_us: float = 0.0
    low_us: float = 0.0
    high_us: float = 0.0
    why_not: str = ""


def advise(bench: Bench, model_size: int | None) -> Advice | None:
    """Return what a DDP job of ``model_size`` parameters can expect, or None if no all_reduce over ranks was measured.

    Gradients are assumed to have the first dtype measured. Throughput mode is preferred, because DDP starts its
    all-reduces one after another without waiting.
    """
    dtypes = bench.settings.dtypes

    def place(sweep: Sweep) -> tuple[int, bool]:
        dtype = sweep.first.dtype
        return dtypes.index(dtype) if dtype in dtypes else len(dtypes), sweep.first.mode is Mode.LATENCY

    found = (one for one in sort_sweeps(bench.results) if one.first.collective is Collective.ALL_REDUCE)
    sweep = min(found, key=place, default=None)
    if sweep is None or len(bench.members) < 2:
        return None
    basis = _Basis(sweep=sweep, plateau=find_plateau(sweep), line=fit_line(sweep))
    model_bytes = None if model_size is None else model_size * sweep.element_bytes
    whole_us = None if model_bytes is None else _whole_us(basis, model_bytes)
    other = _try_other(basis, model_bytes, whole_us)
    share = _share(basis, BUCKET_BYTES)
    say_try: tuple[str, ...] = ()
    if other.mib is not None:
        limits = f"between {_saved(other.low_us)} and {_saved(other.high_us)}"
        saved = f"it saves about {format_time(other.gain_us)} per step ({limits}) if backward hides no communication"
        say_try = (f"Worth trying: bucket_cap_mb={other.mib}; {saved}.",)
    elif other.why_not and model_bytes is not None:
        say_try = (other.why_not,)
    return Advice(
        model_bytes=model_bytes,
        dtype=sweep.first.dtype,
        whole_ms=None if whole_us is None else whole_us / 1e3,
        bucket_mib=BUCKET_BYTES / MIB,
        bucket_share=share,
        try_mib=other.mib,
        gain_ms=other.gain_us / 1e3 if other.mib else None,
        gain_low_ms=other.low_us / 1e3 if other.mib else None,
        gain_high_ms=other.high_us / 1e3 if other.mib else None,
        text=(_say_bucket(basis, share), *_say_whole(basis, model_size, model_bytes, whole_us), *say_try, LAST_WORD),
    )


def _whole_us(basis: _Basis, model_bytes: int) -> float | None:
    """Return the time in us of all gradients: a first bucket of 1 MiB, full buckets, and the rest."""
    first = min(FIRST_BUCKET_BYTES, model_bytes)
    full, rest = divmod(model_bytes - first, BUCKET_BYTES)
    parts = [(1, first), (full, BUCKET_BYTES), (1 if rest else 0, rest)]
    total = 0.0
    for count, size in parts:
        time_us = basis.time_us(size) if count else 0.0
        if time_us is None:
            return None
        total += count * time_us
    return total


def _share(basis: _Basis, size_bytes: int) -> float | None:
    """Return the share of the plateau that one message size reaches; None without a plateau or if not measured."""
    if basis.plateau is None or not basis.measured(size_bytes):
        return None
    time_us = time_at(basis.sweep, size_bytes)
    point = basis.sweep.points[-1]
    if time_us is None or point.busbw_gb_s is None:
        return None
    factor = point.busbw_gb_s / point.algbw_gb_s
    return size_bytes / time_us / 1e3 * factor / basis.plateau.gb_s


def _try_other(basis: _Basis, model_bytes: int | None, whole_us: float | None) -> _Try:
    """Return the bucket near sqrt(alpha * bandwidth * gradients), the best if no communication is hidden.

    With t = alpha + S/B, gradients G and buckets of b, all buckets take alpha * G/b + G/B. Waiting for the first bucket
    to fill costs up to b/B more: all of it if the backward pass produces gradients no faster than they are sent,
    nothing if it takes no time. The square root is the minimum with b/B, and the gain is computed with it. The interval
    also covers the gain without b/B, and adds the uncertainty of the fit on both sides.
    """
    line = basis.line
    if model_bytes is None or whole_us is None:
        return _Try()
    if line is None or not line.fits:
        if line is None:
            say_misfit = "No other bucket_cap_mb can be suggested: too few sizes were measured."
        else:
            say_misfit = (
                "No other bucket_cap_mb can be suggested: this curve does not follow alpha + S/B "
                f"(the residual is {line.residual:.0%}), so try larger and smaller ones."
            )
        return _Try(why_not=say_misfit)
    largest = min(model_bytes, basis.sweep.points[-1].size_bytes)
    mib = max(1, round(min(math.sqrt(line.alpha_us / line.us_per_byte * model_bytes), largest) / MIB))
    fewer_calls = model_bytes / BUCKET_BYTES - model_bytes / (mib * MIB)
    smaller = BUCKET_BYTES - mib * MIB
    gain, doubt = _gain(line, fewer_calls, smaller)
    if gain - doubt <= 0 or gain < LEAST_GAIN * whole_us:
        return _Try(why_not="No other bucket_cap_mb is clearly better than the default of 25.")
    other, other_doubt = _gain(line, fewer_calls, 0)
    low, high = min(gain - doubt, other - other_doubt), max(gain + doubt, other + other_doubt)
    return _Try(mib=mib, gain_us=gain, low_us=low, high_us=high)


def _gain(line: FittedLine, fewer_calls: float, smaller_bytes: float) -> tuple[float, float]:
    """Return the time in us of this many calls (alpha each) plus this many bytes, and its uncertainty."""
    variance = (
        fewer_calls**2 * line.var_alpha
        + smaller_bytes**2 * line.var_slope
        + 2 * fewer_calls * smaller_bytes * line.covariance
    )
    gain = line.alpha_us * fewer_calls + line.us_per_byte * smaller_bytes
    return gain, SIGMAS * math.sqrt(max(0.0, variance))


def _say_bucket(basis: _Basis, share: float | None) -> str:
    time_us = basis.time_us(BUCKET_BYTES)
    if time_us is None:
        largest = format_size(basis.sweep.points[-1].size_bytes)
        return f"The time of DDP's default bucket of 25 MiB is unknown: the largest measured size is {largest}."
    said = f"DDP's default bucket of 25 MiB takes {format_time(time_us)}"
    if share is None or basis.plateau is None:
        return f"{said}."
    # If the bucket already reaches the plateau, a disturbed size beyond it is no reason to ask for more.
    full = size_at(basis.sweep, NEAR_FULL * basis.plateau.gb_s) if share < NEAR_FULL else None
    enough = f", of which {NEAR_FULL:.0%} takes {full / MIB:.0f} MiB" if full and full > BUCKET_BYTES else ""
    return f"{said} and reaches {share:.0%} of the plateau{enough}."


def _say_whole(
    basis: _Basis, model_size: int | None, model_bytes: int | None, whole_us: float | None
) -> tuple[str, ...]:
    if model_size is None or model_bytes is None:
        return ()
    what = f"{_count(model_size)} gradients in {basis.sweep.first.dtype} ({model_bytes / 1e9:.3g} GB)"
    if whole_us is None:
        return (f"The time of {what} is unknown: measure up to 32 MiB or more.",)
    beyond = (
        ""
        if basis.measured(BUCKET_BYTES)
        else ", based on the plateau, because 25 MiB is larger than the measured sizes"
    )
    return (f"{what[0].upper()}{what[1:]} in such buckets take {format_time(whole_us)} without overlap{beyond}.",)


def _saved(gain_us: float) -> str:
    return f"{format_time(abs(gain_us))} {'lost' if gain_us < 0 else 'saved'}"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
