"""Fits t(S) = alpha + S / bandwidth to a curve, by closed-form least squares on relative errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Fit

if TYPE_CHECKING:
    from ddpdoctor.rules.bandwidth.series import Series

FEWEST_SIZES = 4
"""Two points give any line. Our choice: two more show whether it fits."""
MOST_RESIDUAL = 0.10
"""Our choice: a healthy curve over NVLink, on which the algorithm changes with the size, leaves 11 % (8 H200,
https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/results/all-reduce-8xH200.md). Its two figures
then mean nothing: in the middle the line is off by 19 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLine:
    """A fitted line, with variances computed from its own residual."""

    alpha_us: float
    us_per_byte: float
    residual: float
    """Root mean square of the relative errors."""
    var_alpha: float
    var_slope: float
    covariance: float

    @property
    def fits(self) -> bool:
        """Whether the line fits well enough for its two figures to mean something."""
        return self.residual <= MOST_RESIDUAL and self.alpha_us > 0 and self.us_per_byte > 0


def fit_line(series: Series) -> FittedLine | None:
    """Fit p50 over size. Each point has the weight 1 / p50**2, so that small sizes count as much as large ones.

    Return None for fewer than four sizes.
    """
    points = [(one.size_bytes, one.p50_us) for one in series.points]
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


def fit_of(line: FittedLine | None) -> Fit | None:
    """Return a line in the form of the report. A line that falls with the size has no bandwidth: None."""
    if line is None or line.us_per_byte <= 0:
        return None
    return Fit(
        alpha_us=line.alpha_us,
        bandwidth_gb_s=1 / line.us_per_byte / 1e3,
        residual=line.residual,
        fits=line.fits,
    )
