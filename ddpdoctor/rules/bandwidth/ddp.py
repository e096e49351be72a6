"""What the curve of all_reduce means for DistributedDataParallel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Advice, Collective, Mode
from ddpdoctor.model.words import format_size, format_time
from ddpdoctor.rules.bandwidth.shape import find_plateau, fit_line
from ddpdoctor.rules.bandwidth.sweeps import size_at, sort_sweeps, time_at

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Bench
    from ddpdoctor.rules.bandwidth.shape import FittedLine, Plateau
    from ddpdoctor.rules.bandwidth.sweeps import Sweep

MIB = 2**20
FIRST_BUCKET_BYTES = MIB
"""``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``: small, so that the first all-reduce starts early."""
BUCKET_BYTES = 25 * MIB
"""The default of DistributedDataParallel's ``bucket_cap_mb``."""
SIGMAS = 2.0
"""Standard deviations on either side of a gain: about 95 %."""
LEAST_GAIN = 0.02
"""A smaller gain, as a share of the whole time, counts as none. Our choice: steps of a training job vary by more."""
NEAR_FULL = 0.9
"""The share of the plateau at which the size of a bucket is no concern."""
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
    sweep = _pick(bench)
    if sweep is None or len(bench.members) < 2:
        return None
    basis = _Basis(sweep=sweep, plateau=find_plateau(sweep), line=fit_line(sweep))
    model_bytes = None if model_size is None else model_size * sweep.element_bytes
    whole_us = None if model_bytes is None else _whole_us(basis, model_bytes)
    other = _try_other(basis, model_bytes, whole_us)
    share = _share(basis, BUCKET_BYTES)
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
        text=(
            _say_bucket(basis, share),
            *_say_whole(basis, model_size, model_bytes, whole_us),
            *_say_try(other, model_bytes),
            LAST_WORD,
        ),
    )


def _pick(bench: Bench) -> Sweep | None:
    """Return the all_reduce curve to use: the first dtype before the others, throughput before latency."""
    dtypes = bench.settings.dtypes

    def place(sweep: Sweep) -> tuple[int, bool]:
        dtype = sweep.first.dtype
        return dtypes.index(dtype) if dtype in dtypes else len(dtypes), sweep.first.mode is Mode.LATENCY

    found = (one for one in sort_sweeps(bench.results) if one.first.collective is Collective.ALL_REDUCE)
    return min(found, key=place, default=None)


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
        return _Try(why_not=_say_misfit(line))
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


def _say_misfit(line: FittedLine | None) -> str:
    if line is None:
        return "No other bucket_cap_mb can be suggested: too few sizes were measured."
    return (
        "No other bucket_cap_mb can be suggested: this curve does not follow alpha + S/B "
        f"(the residual is {line.residual:.0%}), so try larger and smaller ones."
    )


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


def _say_try(other: _Try, model_bytes: int | None) -> tuple[str, ...]:
    if other.mib is not None:
        limits = f"between {_saved(other.low_us)} and {_saved(other.high_us)}"
        saved = f"it saves about {format_time(other.gain_us)} per step ({limits}) if backward hides no communication"
        return (f"Worth trying: bucket_cap_mb={other.mib}; {saved}.",)
    return (other.why_not,) if other.why_not and model_bytes is not None else ()


def _saved(gain_us: float) -> str:
    return f"{format_time(abs(gain_us))} {'lost' if gain_us < 0 else 'saved'}"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
