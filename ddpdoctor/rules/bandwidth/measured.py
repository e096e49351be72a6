"""What the rules of `allreduce-bench` are handed: what was measured, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Bench, Comparison, Curve, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A bench with its curves.

    A check that nobody asked for and that cannot tell is skipped; one that the user demanded is inconclusive then.
    """

    bench: Bench
    curves: tuple[Curve, ...] = ()
    comparison: Comparison | None = None
    reasons: tuple[Reason, ...] = ()
    """What could explain a low number."""
    expect_gb_s: float | None = None
    """--expect: the bus bandwidth that the user demands at the plateau."""
    fail_below: float | None = None
    """--fail-below as a share (0.9): demanded of every size against the baseline; None: it is not demanded."""
