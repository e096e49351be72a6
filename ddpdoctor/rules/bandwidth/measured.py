"""The input of the `allreduce-bench` rules: what was measured, and the curves computed from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Bench, Comparison, Curve, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A bench with its curves.

    A check without an answer is skipped if the user did not ask for it, and inconclusive if the user did.
    """

    bench: Bench
    curves: tuple[Curve, ...] = ()
    comparison: Comparison | None = None
    reasons: tuple[Reason, ...] = ()
    """What could explain a low number."""
    expect_gb_s: float | None = None
    """--expect: the bus bandwidth that the user demands at the plateau."""
    fail_below: float | None = None
    """--fail-below as a share (0.9): every size must reach it against the baseline. None if not required."""
