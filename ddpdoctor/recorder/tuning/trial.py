"""Runs a trial in a rank: switches the settings between steps, measures, and ends all ranks at the same step.

A step begins at the first training forward after an optimizer step. All ranks make the same forwards and steps, so they
switch and end at the same count without asking each other. ``RANK.jsonl`` in the folder ``tuning`` of the run gets a
line when a block begins and another when it ends: after a crash it says which setting was being tried.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from typing import Any, Callable, List, Optional, Tuple

from .. import hooks
from ..settings import read_settings
from ..state import guarded, here
from ..storage.files import make_folder, open_plain
from ..wrappers import around, wraps
from . import switches
from .plan import LEFT_OUT, MEASURED, order_blocks

FOLDER = "tuning"
WARM_UP = 10
"""Our choice: steps before the first switch, in which caches fill and libraries choose their algorithms."""
FORWARDS_WITHOUT_STEP = 512
"""Our choice: after so many training forwards and no step of a torch optimizer, the trial ends. Scripts accumulate
gradients over a few dozen."""


class SettingsTrial:
    """The state of the trial in this rank."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.models: List[Any] = []
        """Weak references to the DDP models that the script has made."""
        self.steps = 0
        self.forwards = 0
        self.has_stepped = False
        self.script: Optional[switches.Script] = None
        self.blocks: List[Tuple[int, str]] = []
        self.began: List[int] = []
        """When each step of the block began, in nanoseconds."""

    def forward_begins(self, ddp: Any) -> None:
        """Count a training forward; if it begins a step, switch or end where it is time."""
        self.forwards += 1
        if not self.has_stepped:
            if self.steps == 0 and self.forwards > FORWARDS_WITHOUT_STEP:
                leave({"end": "no optimizer step"})
            return
        self.has_stepped = False
        self.steps += 1
        if self.steps >= WARM_UP:
            self._step_begins(ddp)

    def _step_begins(self, ddp: Any) -> None:
        if self.script is None:
            self._begin(ddp)
            return
        self.began.append(_now_ns(ddp, len(self.began)))
        if len(self.began) == LEFT_OUT + MEASURED:
            self._end_block(ddp)

    def _begin(self, ddp: Any) -> None:
        living = [model for model in (reference() for reference in self.models) if model is not None]
        if len(living) != 1:
            leave({"end": "several models", "models": len(living)})
        reason = switches.why_not(ddp)
        if reason:
            leave({"end": "cannot switch", "reason": reason})
        self.script = switches.Script(ddp)
        settings = switches.settings_for(ddp)
        self.blocks = order_blocks(settings, self.rounds)
        write({"plan": settings, "rounds": self.rounds})
        self._try_next(ddp)

    def _end_block(self, ddp: Any) -> None:
        number, setting = self.blocks.pop(0)
        began = self.began
        steps_ns = [began[step] - began[step - 1] for step in range(LEFT_OUT, len(began))]
        write({"round": number, "setting": setting, "steps_ns": steps_ns})
        if not self.blocks:
            leave({"end": "done", "steps": self.steps})
        self._try_next(ddp)

    def _try_next(self, ddp: Any) -> None:
        self.began = []
        write({"tries": self.blocks[0][1]})
        if self.script is not None:
            switches.switch(ddp, self.script, self.blocks[0][1])


def _now_ns(ddp: Any, done: int) -> int:
    """Return the time. On a GPU the host waits for it where measuring begins and where it ends, and nowhere between."""
    if ddp.device_type == "cuda" and done in (LEFT_OUT - 1, LEFT_OUT + MEASURED - 1):
        import torch

        torch.cuda.synchronize()
    return time.monotonic_ns()


def write(entry: Any) -> None:
    """Append a line to this rank's file."""
    folder = os.path.join(here.folder, FOLDER)
    make_folder(folder)
    path = os.path.join(folder, "%s.jsonl" % os.environ.get("RANK", "0"))
    fd = open_plain(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, (json.dumps(entry) + "\n").encode())
    finally:
        os.close(fd)


def leave(entry: Any) -> None:
    """End this process at once: no ``finally`` of the script runs, no checkpoint is written, no atexit function."""
    try:
        write(entry)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        processes = sys.modules.get("multiprocessing.process")
        for child in processes.active_children() if processes is not None else ():
            child.kill()
    finally:
        os._exit(0)


_trial: Optional[SettingsTrial] = None


def patch_ddp(module: Any) -> None:
    """Follow the construction of DDP models and their forwards. This hook comes last, so that it runs first."""
    global _trial
    _trial = SettingsTrial(read_settings(os.environ).tune_rounds)
    ddp = module.DistributedDataParallel
    hooks.put(ddp, "__init__", lambda original: around(original, after=_made))
    hooks.put(ddp, "forward", _forward)


@guarded("tuning")
def _made(ddp: Any) -> None:
    if _trial is not None:
        _trial.models.append(weakref.ref(ddp))


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.training and here.is_rank:
            _before(self)
        return original(self, *args, **kwargs)

    return wraps(original)(forward)


@guarded("tuning")
def _before(ddp: Any) -> None:
    if _trial is not None:
        _trial.forward_begins(ddp)


def patch_optimizer(module: Any) -> None:
    """Note steps of torch's optimizers."""
    if hooks.has(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(_stepped)


@guarded("tuning")
def _stepped(*unused: Any) -> None:
    if _trial is not None:
        _trial.has_stepped = True
