"""The measurements of a bench as curves: plateau, latency and fit, compared with a reference or with another bench."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from ddpdoctor.model import bandwidth as bw
from ddpdoctor.model.launch import find_variable
from ddpdoctor.model.words import count_of, format_digits, format_rate, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Sweep = tuple[bw.Measurement, ...]  # one curve's measurements by size: at least one, and each size once


ENOUGH_ITERATIONS = 5  # this many calls hold the median between the smallest and the largest with 94 % (1 - 2 / 2**5)
# With fewer calls, the median may be off by this factor. Our choice: the effect of one disturbed call of three on a
# shared machine.
FEW_FACTOR = 2.0
# Collectives that torch offers both in place and out of place; for the others the place is not mentioned.
TWO_PLACES = frozenset({bw.Collective.ALL_GATHER, bw.Collective.REDUCE_SCATTER})


def sort_sweeps(results: Iterable[bw.Measurement]) -> tuple[Sweep, ...]:
    """Return the curves in the order in which their first points were measured."""
    groups: dict[object, dict[int, bw.Measurement]] = {}
    for result in results:
        groups.setdefault(curve_of(result), {})[result.size_bytes] = result
    return tuple(tuple(points[size] for size in sorted(points)) for points in groups.values())


CASE = ("collective", "dtype", "redop", "mode", "in_place")  # what the measurements of one curve have in common


def curve_of(measurement: bw.Measurement) -> tuple[Any, ...]:
    """Return the values of ``CASE``."""
    return tuple(getattr(measurement, name) for name in CASE)


def time_bounds(point: bw.Measurement) -> tuple[float, float]:
    """Return the range in us of the median, from its own interval, or wider if there were few calls."""
    if point.iterations >= ENOUGH_ITERATIONS:
        return point.p50_low_us, point.p50_high_us
    return min(point.p50_low_us, point.p50_us / FEW_FACTOR), max(point.p50_high_us, point.p50_us * FEW_FACTOR)


def time_at(sweep: Sweep, size_bytes: float) -> float | None:
    """Return the time in us at a size, interpolated between measured sizes, or None beyond the largest.

    The interpolation uses logarithmic axes, on which these curves are nearly straight from point to point. Below the
    smallest size it returns that size's time: a call costs no less.
    """
    if size_bytes <= sweep[0].size_bytes:
        return sweep[0].p50_us
    for below, above in pairwise(sweep):
        if size_bytes <= above.size_bytes:
            return _interpolate(size_bytes, (below.size_bytes, below.p50_us), (above.size_bytes, above.p50_us))
    return None


def size_at(sweep: Sweep, gb_s: float) -> int | None:
    """Return the size above which the bus bandwidth stays at a value or more, or None if the curve does not cross it.

    The last crossing counts: a curve that rises, falls and rises again stays above it only from there.
    """
    points = [(measurement.size_bytes, measurement.busbw_gb_s) for measurement in sweep if measurement.busbw_gb_s]
    crossing = None
    for (size, below), (next_size, above) in pairwise(points):
        if below < gb_s <= above:
            crossing = round(_interpolate(gb_s, (below, size), (above, next_size)))
    return crossing


def _interpolate(at: float, point: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the value at ``at`` on the line through two points on logarithmic axes."""
    share = math.log(at / point[0]) / math.log(other[0] / point[0])
    return point[1] * math.exp(share * math.log(other[1] / point[1]))


def range_words(low: float, high: float | None) -> str:
    """Return "460-480 GB/s", or "460 GB/s" if both ends read the same."""
    if high is None or format_rate(low) == format_rate(high):
        return format_rate(low)
    return f"{format_digits(low)}-{format_rate(high)}"


def name_case(case: bw.Curve | bw.Change | bw.Wrong) -> str:
    """Return "all_reduce float32", plus the operator if it is not a sum, and the place if there are two."""
    redop = f" {case.redop}" if case.redop not in {None, "sum"} else ""
    place = " in place" if case.in_place and case.collective in TWO_PLACES else ""
    return f"{case.collective.value} {case.dtype}{redop}{place}"


# How far below a figure of the table a system is still healthy. Our choice: Azure's gate for its H200 nodes is 431
# GB/s, 9 % below the 473 that others measure on them
# (https://github.com/Azure/azurehpc-health-checks/blob/main/conf/nd96isr_h200_v5.conf).
REFERENCE_MARGIN = 0.10
# The table's figures are for sums of these dtypes: NVLink switches, for example, do not add 8-bit integers.
FLOATS = ("float32", "float16", "bfloat16")
EXPECT = "--expect"


def _look_up(bench: bw.Bench, first: bw.Measurement) -> tuple[bw.Reference | None, str]:
    backend, names = bench.settings.backend, sorted({member.device_name for member in bench.members})
    if all(member.device == "cpu" for member in bench.members):
        return None, f"no reference for {backend} on CPUs: the peak is unknown"
    if len(names) > 1:
        return None, f"no reference for mixed hardware: {', '.join(names)}"
    rows = [row for row in bw.read_references() if row.gpu.fullmatch(names[0])]
    if not rows or backend != "nccl":
        return None, f"no reference for this hardware: {backend} on {names[0]}"
    if first.dtype not in FLOATS or first.redop not in {None, "sum"}:
        return None, "the references are for sums of float32, float16 and bfloat16"
    setup = (len(bench.members), len({member.host for member in bench.members}), first.collective)
    fitting = [row for row in rows if (row.ranks, row.nodes, row.collective) == setup]
    if not fitting:
        there = "; ".join(dict.fromkeys(f"{row.collective.value} of {row.ranks} on {row.nodes}" for row in rows))
        what = f"{first.collective.value} of {setup[0]} {names[0]} on {count_of(setup[1], 'host')}"
        return None, f"no reference for {what} (available: {there})"
    off = _switched_off(bench)
    row = next((row for row in fitting if (row.algorithm == "ring") is bool(off)), fitting[0])
    other = next((bandwidth.reference for bandwidth in fitting if bandwidth is not row), None)
    if other is None:
        return row.reference, ""
    if row.algorithm == "ring":
        return row.reference, f"{off} is set: without it, {other.gb_s:.0f} GB/s is typical"
    return row.reference, f"a ring without NVLS (reduction in the switch) gives {other.gb_s:.0f} GB/s"


def _switched_off(bench: bw.Bench) -> str:
    """Return the variable that turns off reduction in the switch on some rank, or "" if it is on."""
    for member in bench.members:
        if member.variables.get("NCCL_NVLS_ENABLE", "").strip() == "0":
            return "NCCL_NVLS_ENABLE=0"
        algorithms = member.variables.get("NCCL_ALGO", "")
        # "Ring,Tree", "^NVLS", "broadcast:ring;allreduce:tree,ring"
        for part in algorithms.lower().replace(" ", "").split(";"):
            collective, _, names = part.rpartition(":")
            if names and collective in {"", "allreduce"}:
                if ("nvls" in names.removeprefix("^").split(",")) is names.startswith("^"):
                    return f"NCCL_ALGO={algorithms}"
                break
    return ""


# Sizes are on one plateau if their bandwidths differ by at most this. Our choice: by alpha + S/B, a curve that gains
# less from twice the size is at 95 % of what it can reach.
ALIKE = 0.05
# However wide their intervals, sizes whose medians differ by more are not on one plateau. Our choice: noise may hide a
# slope, and must not turn it into a plateau.
MOST_NOISE = 0.25
SPAN = 2  # a plateau's largest size is at least this many times its smallest: two neighboring sizes prove nothing
# The times of small sizes count as independent of the size if they differ by at most this. Our choice: the steps of
# real curves below 64 KiB are smaller, and if the size matters, twice the size costs more.
LATENCY_ALIKE = 0.25
FEWEST_SIZES = 4  # Two points give any line. Our choice: two more show whether it fits.
# Our choice: a healthy curve over NVLink, on which the algorithm changes with the size, leaves 11 % (8 H200,
# https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/results/all-reduce-8xH200.md). Its two figures
# then mean nothing: in the middle the line is off by 19 %.
MOST_RESIDUAL = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """The bus bandwidth of the largest sizes, in GB/s, with an interval of about 95 % for the medians behind it."""

    gb_s: float
    low_gb_s: float
    high_gb_s: float
    spread: float
    from_bytes: int
    to_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The bus bandwidth at one size in GB/s, with its interval."""

    size_bytes: int
    gb_s: float
    low: float
    high: float


def find_plateau(sweep: Sweep) -> Plateau | None:
    """Return the plateau of the largest sizes, or None if they still rise or fall, or have no bus bandwidth.

    A hump at sizes that fit into a cache is not the plateau: only large messages count.
    """
    flat: list[Level] = []
    for level in reversed(levels_of(sweep)):
        alike = [*flat, level]
        values = [part.gb_s for part in alike]
        if max(values) > min(values) * (1 + MOST_NOISE):
            break
        if max(part.low for part in alike) > min(part.high for part in alike) * (1 + ALIKE):
            break
        flat = alike
    if not flat or flat[0].size_bytes < SPAN * flat[-1].size_bytes:
        return None
    values = [level.gb_s for level in flat]
    middle = median(values)
    return Plateau(
        gb_s=middle,
        low_gb_s=median(level.low for level in flat),
        high_gb_s=median(level.high for level in flat),
        spread=(max(values) - min(values)) / middle,
        from_bytes=flat[-1].size_bytes,
        to_bytes=flat[0].size_bytes,
    )


def describe_end(sweep: Sweep) -> str:
    """Return why no plateau exists: "it still rises by 40 % from 512 MiB to 1 GiB"."""
    levels = levels_of(sweep)
    if len(levels) < 2:
        return "one size is not enough"
    before, last = levels[-2:]
    change = last.gb_s / before.gb_s - 1
    sizes = f"from {format_size(before.size_bytes)} to {format_size(last.size_bytes)}"
    if abs(change) <= ALIKE:
        return f"the range {sizes} is too small"
    return f"it still {'rises' if change > 0 else 'falls'} by {abs(change):.0%} {sizes}"


def levels_of(sweep: Sweep) -> tuple[Level, ...]:
    """Return the bus bandwidth of each size, or nothing with one rank."""
    levels = []
    for point in sweep:
        if gb_s := point.busbw_gb_s:
            least_us, most_us = time_bounds(point)
            low, high = gb_s * point.p50_us / most_us, gb_s * point.p50_us / least_us
            levels.append(Level(size_bytes=point.size_bytes, gb_s=gb_s, low=low, high=high))
    return tuple(levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLine:
    """A fitted line, with variances computed from its own residual."""

    alpha_us: float
    us_per_byte: float
    residual: float  # root mean square of the relative errors
    var_alpha: float
    var_slope: float
    covariance: float

    @property
    def fits(self) -> bool:
        """Whether the line fits well enough for its two figures to mean something."""
        return self.residual <= MOST_RESIDUAL and self.alpha_us > 0 and self.us_per_byte > 0


def fit_line(sweep: Sweep) -> FittedLine | None:
    """Fit p50 over size. Each point has the weight 1 / p50**2, so that small sizes count as much as large ones.

    Return None for fewer than four sizes.
    """
    points = [(measurement.size_bytes, measurement.p50_us) for measurement in sweep]
    if len(points) < FEWEST_SIZES:
        return None
    weights = [1 / time**2 for _, time in points]
    total = sum(weights)
    sum_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True))
    sum_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True))
    sum_xx = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    sum_xy = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
    determinant = total * sum_xx - sum_x**2
    slope = (total * sum_xy - sum_x * sum_y) / determinant
    alpha = (sum_y - slope * sum_x) / total
    squares = sum(((alpha + slope * x - y) / y) ** 2 for x, y in points)
    variance = squares / (len(points) - 2)
    return FittedLine(
        alpha_us=alpha,
        us_per_byte=slope,
        residual=math.sqrt(squares / len(points)),
        var_alpha=variance * sum_xx / determinant,
        var_slope=variance * total / determinant,
        covariance=-variance * sum_x / determinant,
    )


# Without a plateau, a curve is too low only if even this many times the bandwidth of its last step in size is too low.
# Our choice: a disturbed step may have half of the bandwidth it should have.
FAR = 4.0
# If larger sizes use the same path (Gloo, through the kernel's TCP), they do not get faster than this either. Our
# choice: the fastest network card carries 800 Gbit/s, and processors copy less over loopback.
MOST_GB_S = 100.0
LEAST_SHARE = 0.01  # the smallest share of a reference that is shown; a smaller one would read as "100% below"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A bench with its curves.

    A check without an answer is skipped if the user did not ask for it, and inconclusive if the user did.
    """

    bench: bw.Bench
    curves: tuple[bw.Curve, ...] = ()
    comparison: bw.Comparison | None = None
    reasons: tuple[bw.Reason, ...] = ()  # what could explain a low number
    expect_gb_s: float | None = None  # --expect: the bus bandwidth that the user demands at the plateau
    # --fail-below as a share (0.9): every size must reach it against the baseline. None if not required.
    fail_below: float | None = None


def build_curves(bench: bw.Bench, expect_gb_s: float | None, *, use_reference: bool) -> tuple[bw.Curve, ...]:
    """Return a curve for each collective, dtype, operator, mode and place that was measured.

    It is compared with --expect before the table, and with nothing if ranks share a GPU.
    """
    curves = []
    sweeps = sort_sweeps(bench.results)
    measured = {curve_of(sweep[0]) for sweep in sweeps}
    for sweep in sweeps:
        reference = None
        if shared := bw.describe_shared_gpus(bench.members):
            note = shared
        elif expect_gb_s is not None:
            note = ""
            reference = bw.Reference(gb_s=expect_gb_s, high_gb_s=None, text=EXPECT, source=EXPECT, min_size_bytes=0)
        elif not use_reference:
            note = "the comparison with references is disabled"
        else:
            reference, note = _look_up(bench, sweep[0])
        back_to_back = curve_of(replace(sweep[0], mode=bw.Mode.THROUGHPUT)) in measured
        if sweep[0].mode is bw.Mode.LATENCY and back_to_back and reference is not None:
            reference, note = None, "references are for back-to-back calls, as in throughput mode"
        plateau, line = find_plateau(sweep), fit_line(sweep)
        # Whether larger sizes use the same path, so that small ones limit what they can reach. This is not so with
        # NCCL: 8 healthy A100 give 18 GB/s at 1 MiB, where the last step has 43, and 235 GB/s at 16 GiB
        # (https://github.com/stas00/ml-engineering/blob/master/network/README.md#real-network-throughput).
        steady = bench.settings.backend == "gloo"
        assessment, share, verdict = judge(sweep, plateau, reference, note, steady=steady)
        # The small sizes that take equally long
        times: list[float] = []
        for point in sweep:
            if times and point.p50_us > min(times) * (1 + LATENCY_ALIKE):
                break
            times.append(point.p50_us)
        fit = None
        if line is not None and line.us_per_byte > 0:  # a line that falls with the size has no bandwidth
            gb_s = 1 / line.us_per_byte / 1e3
            fit = bw.Fit(alpha_us=line.alpha_us, bandwidth_gb_s=gb_s, residual=line.residual, fits=line.fits)
        curves.append(bw.Curve(
            **dict(zip(CASE, curve_of(sweep[0]), strict=True)),
            plateau_gb_s=plateau.gb_s if plateau else None,
            plateau_spread=plateau.spread if plateau else None,
            plateau_from_bytes=plateau.from_bytes if plateau else None,
            latency_us=median(times) if len(times) > 1 else None,
            fit=fit,
            half_bytes=size_at(sweep, plateau.gb_s / 2) if plateau else None,
            assessment=assessment,
            reference=reference,
            share=share,
            verdict=verdict,
        ))  # fmt: skip
    return tuple(curves)


def judge(
    sweep: Sweep, plateau: Plateau | None, reference: bw.Reference | None, note: str, *, steady: bool
) -> tuple[bw.Assessment, float | None, str]:
    """Compare a curve with its reference. Return its assessment, its share of the reference, and one sentence."""
    levels = levels_of(sweep)
    if not levels:
        return bw.Assessment.NOT_DEFINED, None, "n/a: with one rank, no data crosses a link."
    last = levels[-1]
    at_last = f"{format_rate(last.gb_s)} at {format_size(last.size_bytes)}"
    on_plateau = f"{format_rate(plateau.gb_s)} from {format_size(plateau.from_bytes)} on" if plateau else ""
    if reference is None:
        seen = on_plateau or f"{at_last}, no plateau ({describe_end(sweep)})"
        return bw.Assessment.NO_REFERENCE, None, f"{seen}; {note}."
    demanded = reference.source == EXPECT
    least_gb_s = reference.gb_s if demanded else reference.gb_s * (1 - REFERENCE_MARGIN)
    figure = range_words(reference.gb_s, reference.high_gb_s)
    name = f"{EXPECT} {figure}" if demanded else f"the reference ({reference.text}: {figure})"
    # Without a plateau at the sizes for which the reference holds, it may be fast enough already.
    full = plateau if plateau is not None and plateau.to_bytes >= reference.min_size_bytes else None
    if full is not None:
        seen, gb_s, low, high = on_plateau, full.gb_s, full.low_gb_s, full.high_gb_s
    else:
        reachable = _ceiling(sweep) if steady else math.inf
        seen, gb_s, low, high = at_last, last.gb_s, last.low, max(reachable, *(level.high for level in levels))
    share = gb_s / reference.gb_s
    if low >= least_gb_s:
        how_far = f"{share:.0f} times" if share >= 10 else f"{share:.0%} of"  # a large percentage reads badly
        return bw.Assessment.HEALTHY, share, f"{seen}: healthy, {how_far} {name}."
    if high < least_gb_s:
        how_far = f"{1 - share:.0%} below" if share >= LEAST_SHARE else f"less than {LEAST_SHARE:.0%} of"
        source = "" if demanded else f" [{reference.source}]"
        more = f"; {note}" if note else ""
        return bw.Assessment.BELOW, share, f"{seen}: {how_far} {name}{source}{more}."
    if full is not None:
        least = name if demanded else f"{format_rate(least_gb_s)}, {REFERENCE_MARGIN:.0%} below {name}"
        interval = f"{range_words(low, high)} from {format_size(full.from_bytes)} on"
        return bw.Assessment.NOISY, share, f"Too noisy to judge: {interval}, compared with {least}."
    why = f"the reference applies from {format_size(reference.min_size_bytes)} on" if plateau else describe_end(sweep)
    return bw.Assessment.NOT_REACHED, None, f"No plateau reached: {seen}, and {why}."


def _ceiling(sweep: Sweep) -> float:
    """Return the most that larger sizes can reach, in GB/s, from the bandwidth of the last step in size.

    That is the limit of t = alpha + S/B. If the two times overlap, they give no limit.
    """
    before, last = sweep[-2:] if len(sweep) > 1 else (None, sweep[-1])
    if before is None or last.busbw_gb_s is None:
        return MOST_GB_S
    step_us = time_bounds(last)[0] - time_bounds(before)[1]
    if step_us <= 0:
        return MOST_GB_S
    factor = last.busbw_gb_s * last.p50_us / last.size_bytes
    return min(MOST_GB_S, FAR * factor * (last.size_bytes - before.size_bytes) / step_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The part of a saved report that a later bench can be compared with."""

    name: str  # the file, as the user gave it
    results: tuple[bw.Measurement, ...]
    members: tuple[bw.Member, ...]
    settings: bw.BenchSettings


def cannot_tell(change: bw.Change, fail_below: float) -> bool:
    """Return whether noise makes it impossible to say that a size is not below the limit.

    The interval contains the limit, and either the size looks slower, or the interval is so wide that even twice the
    allowed loss would go unnoticed. Our choice: a gate that passes such a size would pass anything.
    """
    straddles = change.ratio_low < fail_below <= change.ratio_high
    return straddles and (change.ratio < fail_below or change.ratio_low < 1 - 2 * (1 - fail_below))


_OF_MEMBERS: tuple[tuple[str, Callable[[bw.Member], str]], ...] = (
    ("hosts", lambda member: member.host),
    ("device", lambda member: member.device_name),
    ("ranks on each GPU", lambda member: str(member.gpu_ranks)),
    ("torch", lambda member: member.torch),
    ("NCCL", lambda member: member.nccl or "none"),
    ("driver", lambda member: member.driver or "none"),
    ("ddpdoctor", lambda member: member.version),
)


def compare(bench: bw.Bench, baseline: Baseline, fail_below: float | None) -> bw.Comparison:
    """Compare case by case. Runs with different numbers of ranks share no case; the differences then say why."""
    comparable = baseline.results if len(baseline.members) == len(bench.members) else ()
    former = {(*curve_of(measurement), measurement.size_bytes): measurement for measurement in comparable}
    pairs = [(result, former.get((*curve_of(result), result.size_bytes))) for result in bench.results]
    changes = []
    for new, old in pairs:
        if old is None:
            continue
        new_low, new_high = time_bounds(new)
        old_low, old_high = time_bounds(old)
        changes.append(bw.Change(
            **dict(zip(CASE, curve_of(new), strict=True)),
            size_bytes=new.size_bytes,
            now_us=new.p50_us,
            then_us=old.p50_us,
            ratio=old.p50_us / new.p50_us,
            ratio_low=old_low / new_high,
            ratio_high=old_high / new_low,
            below=fail_below is not None and old_high / new_low < fail_below,
        ))  # fmt: skip
    sides = (baseline.members, bench.members)
    # The variables that can affect bandwidth, without those that only control logging. Another check makes sure that
    # all ranks have the same.
    before, after = (
        {
            name: value
            for name, value in (members[0].variables if members else {}).items()
            if (variable := find_variable(name)) is None or variable.kind != "debug"
        }
        for members in sides
    )
    found = [
        ("ranks", *(str(len(members)) for members in sides)),
        ("backend", baseline.settings.backend, bench.settings.backend),
        *((name, *(", ".join(dict.fromkeys(map(of, members))) for members in sides)) for name, of in _OF_MEMBERS),
        ("buffers", *("cold" if side.settings.cold else "warm" for side in (baseline, bench))),
        ("budget", *(f"{side.settings.budget_s:g} s" for side in (baseline, bench))),
        *((name, before.get(name, "not set"), after.get(name, "not set")) for name in sorted({*before, *after})),
    ]
    return bw.Comparison(
        baseline=baseline.name,
        differences=tuple(f"{name}: {then} then, {now} now" for name, then, now in found if then != now),
        changes=tuple(changes),
        missing=sum(old is None for _, old in pairs),
    )
