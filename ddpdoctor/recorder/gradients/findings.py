"""Keeps findings of inf or NaN in gradients until it is clear whether training used those gradients, and notes them.

A gradient that a script throws away does no harm. It was used if a torch optimizer steps while it is there, or if
parameters hold inf or NaN afterwards.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any, Callable, Dict, Optional, Tuple

from ..state import here

MAX_NOTED = 8
"""Noted findings whose gradients were used, and as many whose were not. Our choice: users need mostly the first one."""
LONG_ROW = 20
"""This many scaled losses in a row without finite gradients are noted. Our choice: a scaler that begins at 2**16 and
halves the scale each time is then far below 1."""

INPUT, PARAMETER, LOSS, GRADIENT = "input", "parameter", "loss", "gradient"

_numbers = itertools.count(1)
_noted = {False: 0, True: 0}


class Findings:
    """The findings in one model. ``first_ruined`` returns the first parameter with inf or NaN, or None."""

    def __init__(self, first_ruined: Callable[[], Optional[str]]) -> None:
        self.first_ruined = first_ruined
        self._times = 0
        self._in_a_row = 0
        self._noted_row = False
        self._last: Dict[str, Any] = {}
        self.pending: Dict[str, Any] = {}
        """The last finding for which it is not yet known whether it was used."""

    @property
    def are_enough(self) -> bool:
        """Whether no further finding would be noted."""
        return _noted[True] >= MAX_NOTED

    def saw_finite(self, reduces: bool) -> None:
        """Note that all gradients of a backward are finite."""
        if reduces:
            self._in_a_row, self._noted_row = 0, False
        if self.pending:
            self.settle()

    def saw(self, entry: Dict[str, Any], reduces: bool) -> None:
        """Note a backward whose gradients are not finite. Those added up for one reduction are one finding."""
        if self.pending.get("step") == entry["step"]:
            self._count(self.pending, reduces)
            return
        self.settle()
        self._count(entry, reduces)
        self.pending = entry
        if not is_normal(entry):
            self._note(entry)

    def _count(self, entry: Dict[str, Any], reduces: bool) -> None:
        if reduces:
            self._times += 1
            self._in_a_row += 1
        entry.update(times=self._times, row=self._in_a_row)
        if entry["scaled"] and self._in_a_row >= LONG_ROW and not self._noted_row:
            self._noted_row = True
            self._note(entry)

    def settle(self) -> None:
        """Decide whether the pending finding was used. If so, inf or NaN is in the parameters by now."""
        if self.pending and self.first_ruined() is not None:
            self.was_used()
        self.pending = {}

    def was_used(self) -> None:
        """Note that the pending finding was used."""
        if not self.pending["used"]:
            self.pending["used"] = 1
            self._note(self.pending)

    def end(self) -> None:
        """Note the final count of findings, if it has grown since the last note."""
        self.settle()
        if self._last and self._times > self._last["times"] and here.ring is not None:
            here.ring.note(dict(self._last, times=self._times))

    def _note(self, entry: Dict[str, Any]) -> None:
        used = bool(entry["used"])
        if here.ring is None or _noted[used] >= MAX_NOTED:
            return
        _noted[used] += 1
        entry.setdefault("id", next(_numbers))
        self._last = dict(entry, k="nonfinite", at=time.monotonic_ns())
        here.ring.note(self._last, vital=True)
        here.ring.set("nonfinite", sum(_noted.values()))


def is_normal(entry: Dict[str, Any]) -> bool:
    """Return whether this is normal with a gradient scaler, which causes it now and then and skips the step."""
    if not entry["scaled"]:
        return False
    return entry["origin"] == GRADIENT or (entry["origin"] == LOSS and not entry["loss_nan"])


def origin_of(inputs: Tuple[str, str], ruined: Optional[str], loss: float) -> Tuple[str, str]:
    """Return what was not finite first, and a sentence that says so.

    ``inputs`` is the label of an input and what is wrong with it, both empty if all are finite. ``ruined`` is a
    parameter that was not finite before this backward.
    """
    label, held = inputs
    lost = not math.isfinite(loss)
    if ruined is not None:
        return PARAMETER, "%s was not finite before this backward" % ruined
    if label and (lost or held.startswith("NaN")):
        return INPUT, "%s holds %s" % (label, held)
    if lost:
        return LOSS, "the loss was %r" % loss
    return GRADIENT, ""
