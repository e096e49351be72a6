"""Splits the record of a step into its parts. The writer sums them up, and readers use the same split."""

from __future__ import annotations

from . import ring_layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List

BEFORE, FORWARD, BETWEEN, BACKWARD = ring_layout.BEFORE, ring_layout.FORWARD, ring_layout.BETWEEN, ring_layout.BACKWARD


def parts_of(phases_us: Any, waits_us: Any, inside: Any, flags: int) -> List[int]:
    """Return the times of ``ring_layout.PARTS`` in microseconds. ``inside`` is ``ring_layout.STEP_INSIDE``.

    Times are measured one by one, so a part that is a difference is cut off at 0.
    """
    data, buffers, exposed, optimizer, own, gc = inside[:6]
    before = phases_us[BEFORE] - waits_us[BEFORE] - data - optimizer
    forward = phases_us[FORWARD] - waits_us[FORWARD]
    loss = phases_us[BETWEEN] - waits_us[BETWEEN]
    backward = phases_us[BACKWARD] - waits_us[BACKWARD]
    calls = sum(waits_us) - buffers - exposed
    split, unsplit = (0, backward) if flags & ring_layout.STEP_WAIT_UNKNOWN else (backward, 0)
    wall = sum(phases_us) + own
    parts = [data, before, buffers, forward, loss, split, unsplit, exposed, calls, optimizer, own, gc, wall]
    return [max(0, part) for part in parts]
