"""Keeps what was seen of gradients that hold inf or NaN until it shows whether training used them, and notes it.

A gradient that a script throws away does no harm. It was used where an optimizer of torch makes its step while it is
there, or, whoever steps, where parameters hold inf or NaN afterwards.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any, Callable, Dict, Optional, Tuple

from ..state import here

MAX_NOTED = 8
"""Findings that were used and are noted, and as many that were not. Ours: they are for the eye; the first counts."""
LONG_ROW = 20
"""So many losses that were scaled in vain, one after another, are noted. Ours: a scaler that begins at 2**16 and halves
the scale each time is then far below 1."""

INPUT, PARAMETER, LOSS, GRADIENT = "input", "parameter", "loss", "gradient"

_numbers = itertools.count(1)
_noted = {False: 0, True: 0}


class Findings:
    """What was seen in one model. ``first_ruined`` returns the first parameter that holds inf or NaN, if any does."""

    def __init__(self, first_ruined: Callable[[], Optional[str]]) -> None:
        self.first_ruined = first_ruined
        self._times = 0
        self._in_a_row = 0
        self._told_row = False
        self._last: Dict[str, Any] = {}
        self.pending: Dict[str, Any] = {}
        """The last finding of which it has not shown yet whether it was used."""

    @property
    def are_enough(self) -> bool:
        """Whether nothing that is seen from here on would be noted."""
        return _noted[True] >= MAX_NOTED

    def saw_finite(self, reduces: bool) -> None:
        """Note that all gradients of a backward are finite."""
        if reduces:
            self._in_a_row, self._told_row = 0, False
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
        if entry["scaled"] and self._in_a_row >= LONG_ROW and not self._told_row:
            self._told_row = True
            self._note(entry)

    def settle(self) -> None:
        """Decide whether what is pending was used: then it is in the parameters by now."""
        if self.pending and self.first_ruined() is not None:
            self.was_used()
        self.pending = {}

    def was_used(self) -> None:
        """Note that what is pending was used."""
        if not self.pending["used"]:
            self.pending["used"] = 1
            self._note(self.pending)

    def end(self) -> None:
        """Note how often it came, where that has grown since."""
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


def is_normal(entry: Dict[str, Any]) -> bool:
    """Return whether a gradient scaler brings this about now and then, and skips the step."""
    if not entry["scaled"]:
        return False
    return entry["origin"] == GRADIENT or (entry["origin"] == LOSS and not entry["loss_nan"])


def origin_of(inputs: Tuple[str, str], ruined: Optional[str], loss: float) -> Tuple[str, str]:
    """Return what was first not to be a number, and that as a sentence.

    ``inputs``: how an input is called and what it holds, empty where all are finite. ``ruined``: a parameter that was
    not finite before this backward.
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
