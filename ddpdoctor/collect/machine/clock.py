"""Reads whether the kernel holds the wall clock for synchronised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.limits import Clock

if TYPE_CHECKING:
    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System


def read_clock(system: System, plan: ReadingPlan) -> Clock:  # noqa: ARG001 - the form of every collector
    """Return what adjtimex says. How far the clock is off others is measured by who gathers the nodes."""
    try:
        unsynchronised = system.calls.clock_unsynchronised()
    except OSError:
        return Clock(synchronised=None, offset_s=None)
    return Clock(synchronised=not unsynchronised, offset_s=None)
