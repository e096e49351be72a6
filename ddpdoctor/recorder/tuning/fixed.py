"""Measures some steps of a launch that keeps its settings to the end, and ends all its ranks at the same step."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

from .constructed import settings_at_start, why_without_effect
from .leaving import leave, write
from .plan import BASE, MEASURED_IN_LAUNCH


class FixedSteps:
    """The steps of a launch after its warm-up."""

    def __init__(self, setting: str, end: Optional[Dict[str, Any]] = None) -> None:
        self.setting = setting
        self.end = {"end": "done"} if end is None else end
        """How the rank says that it has ended."""
        self.began: List[int] = []
        """When each step began, in nanoseconds."""

    def begin(self, models: List[Any], forwards: int, needs: int) -> None:
        """Write what is measured. Under the script's settings, also write which ones a restart can try."""
        fits = settings_at_start(models) if self.setting == BASE else []
        write({"launch": self.setting, "fits": fits, "forwards": forwards, "needs": needs})
        reason = why_without_effect(self.setting)
        if reason:
            write({"refused": self.setting, "reason": reason})
            leave(self.end)

    def step_begins(self, ddp: Any) -> None:
        """Note when a step begins, and end with the last one."""
        count = len(self.began)
        self.began.append(now_ns(ddp, is_edge=count in (0, MEASURED_IN_LAUNCH)))
        if count == MEASURED_IN_LAUNCH:
            steps_ns = [after - before for before, after in zip(self.began, self.began[1:])]
            write({"round": 0, "setting": self.setting, "steps_ns": steps_ns})
            leave(self.end)


def now_ns(ddp: Any, *, is_edge: bool) -> int:
    """Return the time. On a GPU the host waits for it where measuring begins and where it ends, and nowhere between."""
    if ddp.device_type == "cuda" and is_edge:
        import torch

        torch.cuda.synchronize()
    return time.monotonic_ns()
