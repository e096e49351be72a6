"""Runs a trial in a rank: switches the settings between steps, measures, and ends all ranks at the same step.

A launch that has one setting from its start, and a job whose settings cannot be switched, only measure.

A step begins at the first training forward after an optimizer step. All ranks make the same forwards and steps, so they
switch and end at the same count. Whether a setting was refused is agreed on at the end of each block.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from ..speed import gradient_times
from ..state import pass_on
from ..storage.secrets import hide_in_text
from . import switches
from .agreement import on_any_rank
from .fixed import FixedSteps, now_ns
from .leaving import leave, leave_with_others, write
from .plan import (
    ACCUMULATE,
    ACCUMULATED,
    AGAIN,
    BASE,
    LEFT_OUT,
    MEASURED_IN_LAUNCH,
    choose,
    left_out,
    order_blocks,
    steps_to_measure,
)

WARM_UP = 10
"""Our choice: steps before the first switch, in which caches fill and libraries choose their algorithms."""
FORWARDS_WITHOUT_STEP = 512
"""Our choice: after so many training forwards and no step of a torch optimizer, the trial ends. Scripts accumulate
gradients over a few dozen."""
STEPS_WITHOUT_MODEL = 64
"""Our choice: after so many optimizer steps and no training forward of a DDP model, the trial ends."""


class SettingsTrial:
    """The state of the trial in this rank."""

    def __init__(self, rounds: int, only: str, setting: str = "") -> None:
        gradient_times.reads_all = True
        self.rounds = rounds
        self.only = only
        self.fixed: Optional[FixedSteps] = FixedSteps(setting) if setting else None
        """Set if this launch keeps its settings."""
        self.models: List[Any] = []
        """Weak references to the DDP models that the script has made."""
        self.steps = 0
        self.optimizer_steps = 0
        self.forwards = 0
        self.in_step = 0
        """Training forwards in this step so far."""
        self.per_step: set[int] = set()
        """Of the steps before the first switch: their numbers of training forwards that reduce, 0 if one does not."""
        self.has_stepped = False
        self.has_autocast = False
        self.script: Optional[switches.Script] = None
        self.setting = BASE
        self.refused = ""
        """Why this rank could not try the setting."""
        self.blocks: List[Tuple[int, str]] = []
        self.has_late = False
        """The settings that could stop the job are being tried: all others are done."""
        self.same_used = self.all_used = True
        """In all steps so far the same parameters had gradients; all of them had. Only known with
        ``find_unused_parameters``."""
        self.began: List[int] = []
        """When each step of the block after its first began, in nanoseconds."""

    def optimizer_stepped(self) -> None:
        """Count a step of an optimizer."""
        self.has_stepped = True
        self.optimizer_steps += 1
        if self.forwards == 0 and self.optimizer_steps > STEPS_WITHOUT_MODEL:
            leave({"end": "no model"})

    def forward_begins(self, ddp: Any) -> None:
        """Count a training forward; if it begins a step, switch or end where it is time."""
        self.forwards += 1
        if self.has_stepped:
            self.has_stepped = False
            self.steps += 1
            if self.script is None:
                self.per_step.add(self.in_step)
            self.in_step = 0
            if self.steps >= WARM_UP:
                self._step_begins(ddp)
        elif self.steps == 0 and self.forwards > FORWARDS_WITHOUT_STEP:
            leave({"end": "no optimizer step"})
        self.in_step += 1
        self._forward_in_step(ddp)

    def refuse(self, error: BaseException) -> None:
        """Go on with the script's settings until all ranks drop this one, at the end of the block."""
        text = hide_in_text(str(error)[:2000]).split("\n")[0]
        self.refused = self.refused or "%s: %s" % (type(error).__name__, text[:200])

    def _forward_in_step(self, ddp: Any) -> None:
        if self.script is None:
            if not ddp.require_backward_grad_sync:
                self.per_step.add(0)
            self.has_autocast = self.has_autocast or _is_autocast(ddp)
        elif self.setting == ACCUMULATE:
            measured = len(self.began) + 1 - LEFT_OUT
            ddp.require_backward_grad_sync = measured <= 0 or measured % ACCUMULATED == 0
        elif self.setting == switches.NO_SYNC:
            ddp.require_backward_grad_sync = self.in_step == max(self.per_step)

    def _step_begins(self, ddp: Any) -> None:
        if self.script is None:
            self._begin_or_measure(ddp)
            return
        last = LEFT_OUT + steps_to_measure(self.setting)
        self.began.append(now_ns(ddp, is_edge=len(self.began) + 1 in (LEFT_OUT, last)))
        gradient_times.is_paused = self.setting not in (BASE, AGAIN) or len(self.began) < LEFT_OUT
        if len(self.began) == last:
            self._end_block(ddp)

    def _begin_or_measure(self, ddp: Any) -> None:
        """Begin to switch, if this job can. Else measure it as it is: restarts may try what a running job cannot."""
        if self.steps == WARM_UP:
            if _is_spawned():
                leave({"end": "spawned"})
            living = [model for model in (reference() for reference in self.models) if model is not None]
            if self.fixed is None:
                end = _why_fixed(ddp, len(living))
                self.fixed = FixedSteps(BASE, end) if end else None
            if self.fixed is not None:
                self.fixed.begin(living, self._forwards(), WARM_UP + MEASURED_IN_LAUNCH)
        if self.fixed is not None:
            self.fixed.step_begins(ddp)
        else:
            self._begin(ddp)

    def _forwards(self) -> int:
        return next(iter(self.per_step)) if len(self.per_step) == 1 else 0

    def _begin(self, ddp: Any) -> None:
        self.script = switches.Script(ddp)
        forwards = self._forwards()
        self.per_step = {forwards}
        settings = choose(switches.settings_for(ddp, forwards, self.has_autocast), self.only)
        self.blocks = order_blocks(settings, self.rounds)
        needs = WARM_UP + sum(LEFT_OUT + steps_to_measure(setting) for _, setting in self.blocks)
        write({"plan": settings, "rounds": self.rounds, "forwards": forwards, "needs": needs})
        unfit = left_out(self.only, [*settings, *switches.late_settings_for(ddp)])
        for name in unfit:
            write({"refused": name, "reason": "it does not fit this job"})
        self._try_next(ddp)

    def _end_block(self, ddp: Any) -> None:
        number, setting = self.blocks.pop(0)
        self._note_used(ddp)
        if on_any_rank(ddp, [bool(self.refused)])[0]:
            self._drop(setting)
        else:
            began = self.began
            steps_ns = [began[step] - began[step - 1] for step in range(LEFT_OUT, len(began))]
            write({"round": number, "setting": setting, "steps_ns": steps_ns})
        self._try_next(ddp)

    def _try_next(self, ddp: Any) -> None:
        """Switch to the setting of the next block that no rank refuses."""
        self.began = []
        gradient_times.is_paused = True
        while self._has_blocks(ddp):
            self.setting, self.refused = self.blocks[0][1], ""
            write({"tries": self.setting, "round": self.blocks[0][0]})
            try:
                self._switch(ddp, self.setting)
            except Exception as error:  # noqa: BLE001 - torch refuses a setting; the others are tried all the same
                pass_on(error)
                self.refuse(error)
            if not on_any_rank(ddp, [bool(self.refused)])[0]:
                return
            self._drop(self.setting)
            self._switch(ddp, BASE)
        leave({"end": "done", "steps": self.steps})

    def _switch(self, ddp: Any, setting: str) -> None:
        if self.script is not None:
            switches.switch(ddp, self.script, setting)

    def _drop(self, setting: str) -> None:
        write({"refused": setting, "reason": self.refused or "another rank refuses it"})
        self.blocks = [block for block in self.blocks if block[1] != setting]

    def _has_blocks(self, ddp: Any) -> bool:
        """Return whether blocks are left. After all others come those that could stop the job."""
        if self.blocks or self.has_late:
            return bool(self.blocks)
        self.has_late = True
        varies, some = on_any_rank(ddp, [not self.same_used, not self.all_used])
        self._switch(ddp, BASE)
        late = choose(switches.late_settings_for(ddp), self.only)
        if late and varies:
            late = self._refuse_late(late, late, "the parameters that go unused change from step to step")
        elif late and some:
            late = self._refuse_late(late, [switches.UNUSED], "a parameter goes unused")
        if late:
            write({"late": late})
            self.blocks = order_blocks([BASE, *late], self.rounds, first=self.rounds)
            leave_with_others()
        return bool(late)

    def _refuse_late(self, late: List[str], refused: List[str], reason: str) -> List[str]:
        for setting in late:
            if setting in refused:
                write({"refused": setting, "reason": reason})
        return [setting for setting in late if setting not in refused]

    def _note_used(self, ddp: Any) -> None:
        """Note which parameters went unused, as far as DDP looked."""
        if ddp.find_unused_parameters:
            self.same_used = self.same_used and ddp.reducer._ddp_graph_static()
            counts = ddp.logger._get_ddp_logging_data().ints_map
            self.all_used = self.all_used and not counts.get("unused_parameter_size", 0)


def _why_fixed(ddp: Any, models: int) -> Dict[str, Any]:
    """Return how to say that this job's settings cannot be switched while it runs; empty if they can be."""
    if models > 1:
        return {"end": "several models", "models": models}
    reason = switches.why_not(ddp)
    return {"end": "cannot switch", "reason": reason} if reason else {}


def _is_autocast(ddp: Any) -> bool:
    import torch

    return bool(torch.is_autocast_enabled(ddp.device_type))


def _is_spawned() -> bool:
    """Return whether another Python of the script has started this one, as torch.multiprocessing does."""
    import multiprocessing

    return multiprocessing.parent_process() is not None
