"""Runs a trial in a rank: switches the settings between steps, measures, and ends all ranks at the same step.

A launch that has one setting from its start, and a job whose settings cannot be switched, only measure.

A step begins at the first training forward after an optimizer step. All ranks make the same forwards and steps, so they
switch and end at the same count. Whether a setting was refused is agreed on at the end of each block.

``RANK.jsonl`` in the folder ``tuning`` of the run gets a line when a block begins and another when it ends: after a
crash it says which setting was being tried. What the script saves during a trial is thrown away: torch.save writes to a
file without a name.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from . import device_times, hooks, tune_switches
from .settings import read_settings
from .state import guarded, here, pass_on
from .storage.files import make_folder, write_at_once
from .storage.secrets import hide_in_text
from .tune_switches import (
    ACCUMULATE,
    ACCUMULATED,
    AGAIN,
    AUTOCAST,
    BASE,
    LEFT_OUT,
    MEASURED_IN_LAUNCH,
    UNUSED,
    choose,
    late_settings_for,
    order_blocks,
    settings_at_start,
    steps_to_measure,
    why_without_effect,
)
from .wrappers import around, wraps

WARM_UP = 10  # our choice: steps before the first switch, in which caches fill and libraries choose their algorithms
# Our choice: after so many training forwards and no step of a torch optimizer, the trial ends. Scripts accumulate
# gradients over a few dozen.
FORWARDS_WITHOUT_STEP = 512
# Our choice: after so many optimizer steps and no training forward of a DDP model, the trial ends.
STEPS_WITHOUT_MODEL = 64


class SettingsTrial:
    """The state of the trial in this rank. With a ``setting``, this launch has only that one."""

    def __init__(self, rounds: int, only: str, setting: str = "") -> None:
        device_times.reads_all = True
        self.rounds = rounds
        self.only = only
        self.models: List[Any] = []  # weak references to the DDP models that the script has made
        self.steps = 0
        self.optimizer_steps = 0
        self.forwards = 0
        self.in_step = 0  # training forwards in this step so far
        # Of the steps before the first switch: their numbers of training forwards that reduce, 0 if one does not.
        self.per_step: set[int] = set()
        self.has_stepped = False
        self.has_autocast = False
        self.script: Any = None  # what the script gave to DDP, once settings are switched
        self.fixed = setting  # the setting that this launch has from its start, if it has one
        self.end: Dict[str, Any] = {"end": "done"}  # how the rank says that it has ended, if it keeps its settings
        self.setting = BASE
        self.refused = ""  # why this rank could not try the setting
        self.blocks: List[Tuple[int, str]] = []
        self.has_late = False  # the settings that could stop the job are being tried: all others are done
        # In all steps so far the same parameters had gradients; all of them had. Only known with
        # ``find_unused_parameters``.
        self.same_used = self.all_used = True
        # When each step that is measured began, in nanoseconds. In a block it begins with the second step.
        self.began: List[int] = []

    def forward_begins(self, ddp: Any) -> None:
        """Count a training forward; if it begins a step, switch or end where it is time."""
        import torch

        self.forwards += 1
        if self.has_stepped:
            self.has_stepped = False
            self.steps += 1
            if self.script is None:
                self.per_step.add(self.in_step)
            self.in_step = 0
            if self.script is not None:
                self._step_of_block_begins(ddp)
            elif self.steps >= WARM_UP:
                self._begin_or_measure(ddp)
        elif self.steps == 0 and self.forwards > FORWARDS_WITHOUT_STEP:
            leave({"end": "no optimizer step"})
        self.in_step += 1
        if self.script is None:
            if not ddp.require_backward_grad_sync:
                self.per_step.add(0)
            self.has_autocast = self.has_autocast or bool(torch.is_autocast_enabled(ddp.device_type))
        elif self.setting == ACCUMULATE:
            measured = len(self.began) + 1 - LEFT_OUT
            ddp.require_backward_grad_sync = measured <= 0 or measured % ACCUMULATED == 0
        elif self.setting == tune_switches.NO_SYNC:
            ddp.require_backward_grad_sync = self.in_step == max(self.per_step)

    def refuse(self, error: BaseException) -> None:
        """Go on with the script's settings until all ranks drop this one, at the end of the block."""
        text = hide_in_text(str(error)[:2000]).split("\n")[0]
        self.refused = self.refused or "%s: %s" % (type(error).__name__, text[:200])

    def _step_of_block_begins(self, ddp: Any) -> None:
        last = LEFT_OUT + steps_to_measure(self.setting)
        self.began.append(now_ns(ddp, is_edge=len(self.began) + 1 in (LEFT_OUT, last)))
        device_times.is_paused = self.setting not in (BASE, AGAIN) or len(self.began) < LEFT_OUT
        if len(self.began) == last:
            number, setting = self.blocks.pop(0)
            if ddp.find_unused_parameters:
                self.same_used = self.same_used and ddp.reducer._ddp_graph_static()
                counts = ddp.logger._get_ddp_logging_data().ints_map
                self.all_used = self.all_used and not counts.get("unused_parameter_size", 0)
            if on_any_rank(ddp, [bool(self.refused)])[0]:
                self._drop(setting)
            else:
                began = self.began
                steps_ns = [began[step] - began[step - 1] for step in range(LEFT_OUT, len(began))]
                write({"round": number, "setting": setting, "steps_ns": steps_ns})
            self._try_next(ddp)

    def _begin_or_measure(self, ddp: Any) -> None:
        """Begin to switch, if this job can. Else measure it as it is: restarts may try what a running job cannot."""
        if self.steps == WARM_UP and not self._keeps_settings(ddp):
            self._begin(ddp)
            return
        count = len(self.began)
        self.began.append(now_ns(ddp, is_edge=count in (0, MEASURED_IN_LAUNCH)))
        if count == MEASURED_IN_LAUNCH:
            steps_ns = [after - before for before, after in zip(self.began, self.began[1:])]
            write({"round": 0, "setting": self.fixed or BASE, "steps_ns": steps_ns})
            leave(self.end)

    def _keeps_settings(self, ddp: Any) -> bool:
        """Return whether this launch has one setting. If so, write what is measured, and what a restart can try."""
        import multiprocessing

        if multiprocessing.parent_process() is not None:  # started by a Python of the script's
            leave({"end": "spawned"})
        living = [model for model in (reference() for reference in self.models) if model is not None]
        if not self.fixed:
            reason = tune_switches.why_not(ddp) if len(living) <= 1 else ""
            if len(living) > 1:
                self.end = {"end": "several models", "models": len(living)}
            elif reason:
                self.end = {"end": "cannot switch", "reason": reason}
            else:
                return False
        setting = self.fixed or BASE
        fits = settings_at_start(living) if setting == BASE else []
        needs = WARM_UP + MEASURED_IN_LAUNCH
        write({"launch": setting, "fits": fits, "forwards": self._forwards(), "needs": needs})
        reason = why_without_effect(setting)
        if reason:
            write({"refused": setting, "reason": reason})
            leave(self.end)
        return True

    def _forwards(self) -> int:
        return next(iter(self.per_step)) if len(self.per_step) == 1 else 0

    def _begin(self, ddp: Any) -> None:
        self.script = tune_switches.Script(ddp)
        forwards = self._forwards()
        self.per_step = {forwards}
        settings = choose(tune_switches.settings_for(ddp, forwards, self.has_autocast), self.only)
        self.blocks = order_blocks(settings, self.rounds)
        needs = WARM_UP + sum(LEFT_OUT + steps_to_measure(setting) for _, setting in self.blocks)
        write({"plan": settings, "rounds": self.rounds, "forwards": forwards, "needs": needs})
        fit = {setting.partition("=")[0] for setting in [*settings, *late_settings_for(ddp)]}
        for name in self.only.split(","):
            if name and name not in fit:
                write({"refused": name, "reason": "it does not fit this job"})
        self._try_next(ddp)

    def _try_next(self, ddp: Any) -> None:
        """Switch to the setting of the next block that no rank refuses."""
        self.began = []
        device_times.is_paused = True
        while self.blocks or self._has_late_blocks(ddp):
            self.setting, self.refused = self.blocks[0][1], ""
            write({"tries": self.setting, "round": self.blocks[0][0]})
            try:
                tune_switches.switch(ddp, self.script, self.setting)
            except Exception as error:  # noqa: BLE001 - torch refuses a setting; the others are tried all the same
                pass_on(error)
                self.refuse(error)
            if not on_any_rank(ddp, [bool(self.refused)])[0]:
                return
            self._drop(self.setting)
            tune_switches.switch(ddp, self.script, BASE)
        leave({"end": "done", "steps": self.steps})

    def _drop(self, setting: str) -> None:
        write({"refused": setting, "reason": self.refused or "another rank refuses it"})
        self.blocks = [block for block in self.blocks if block[1] != setting]

    def _has_late_blocks(self, ddp: Any) -> bool:
        """Plan once, after all others, the settings that could stop the job. Return whether there are any."""
        if self.has_late:
            return False
        self.has_late = True
        varies, some = on_any_rank(ddp, [not self.same_used, not self.all_used])
        tune_switches.switch(ddp, self.script, BASE)
        late = choose(late_settings_for(ddp), self.only)
        reason = "the parameters that go unused change from step to step" if varies else "a parameter goes unused"
        for setting in late[:]:
            if varies or (some and setting == UNUSED):
                late.remove(setting)
                write({"refused": setting, "reason": reason})
        if late:
            write({"late": late})
            self.blocks = order_blocks([BASE, *late], self.rounds, first=self.rounds)
            import threading

            threading.Thread(target=_leave_with_others, name="ddpdoctor-trial", daemon=True).start()
        return bool(late)


def now_ns(ddp: Any, *, is_edge: bool) -> int:
    """Return the time. On a GPU the host waits for it where measuring begins and where it ends, and nowhere between."""
    if ddp.device_type == "cuda" and is_edge:
        import torch

        torch.cuda.synchronize()
    return time.monotonic_ns()


def on_any_rank(ddp: Any, flags: List[bool]) -> List[bool]:
    """Return for each flag whether it holds on any rank. All ranks must call this at the same step.

    The process group is asked directly: the recorder's hooks would take the call for one of the script.
    """
    import torch
    import torch.distributed as dist

    device = next(ddp.parameters()).device
    values = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    ddp.process_group.allreduce([values], options).wait()
    return [bool(value) for value in values.tolist()]


FOLDER = "tuning"
LEFT = "left"  # a file in that folder, made by the first rank of this host that leaves
# Our choice: how long a rank waits for the others of its host to come to their end. If one goes first, the last
# reduction of another may still read from its connection.
TOGETHER_S = 5.0
LOOK_EVERY_S = 0.05
GRACE_S = 2.0  # our choice: a rank that is not stuck comes to its own end within this time after another has left


def write(entry: Any) -> None:
    """Append a line to this rank's file."""
    folder = os.path.join(here.folder, FOLDER)
    make_folder(folder)
    write_at_once(os.path.join(folder, "%s.jsonl" % os.environ.get("RANK", "0")), json.dumps(entry) + "\n")


def leave(entry: Any) -> None:
    """End this process at once: no ``finally`` of the script runs, no checkpoint is written, no atexit function."""
    try:
        write(entry)
        device_times.settle_gradients()
        left = os.path.join(here.folder, FOLDER, LEFT)
        write_at_once(left, os.environ.get("RANK", "0") + "\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        until = time.monotonic() + TOGETHER_S
        while time.monotonic() < until:
            with open(left) as file:
                if len(set(file.read().split())) >= count:
                    break
            time.sleep(LOOK_EVERY_S)
        processes = sys.modules.get("multiprocessing.process")
        for child in processes.active_children() if processes is not None else ():
            child.kill()
    finally:
        os._exit(0)


def _leave_with_others() -> None:
    """Follow another rank of this host that leaves, from a thread: this rank may wait for it in a reduction."""
    while not os.path.exists(os.path.join(here.folder, FOLDER, LEFT)):
        time.sleep(LOOK_EVERY_S)
    time.sleep(GRACE_S)
    leave({"end": "with another rank"})


# How DDP's error begins after a backward in which a parameter had no gradient (c10d/reducer.cpp).
UNFINISHED = "Expected to have finished reduction in the prior iteration"
_trial: Optional[SettingsTrial] = None


def patch_ddp(module: Any) -> None:
    """Follow the construction of DDP models and their forwards. This hook comes last, so that it runs first."""
    global _trial
    settings = read_settings(os.environ)
    _trial = SettingsTrial(settings.tune_rounds, settings.tune_only, settings.tune_setting)
    ddp = module.DistributedDataParallel
    tune_switches.patch_ddp(ddp, settings.tune_setting)
    hooks.put(ddp, "__init__", lambda original: around(original, after=_made))
    hooks.put(ddp, "forward", _forward)


def patch_optimizer(module: Any) -> None:
    """Note steps of torch's optimizers. By then torch is there, so its threads can be set.

    It may have been loaded without the launch's environment. The script may set others.
    """
    setting = read_settings(os.environ).tune_setting
    if setting.startswith(tune_switches.THREADS):
        import torch

        torch.set_num_threads(int(setting[len(tune_switches.THREADS) :]))
    if hooks.has(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(_stepped)


@guarded("tuning")
def _made(ddp: Any) -> None:
    if _trial is not None:
        _trial.models.append(weakref.ref(ddp))


@guarded("tuning")
def _stepped(*unused: Any) -> None:
    """Count a step of an optimizer."""
    if _trial is not None and here.is_rank:
        _trial.has_stepped = True
        _trial.optimizer_steps += 1
        if _trial.forwards == 0 and _trial.optimizer_steps > STEPS_WITHOUT_MODEL:
            leave({"end": "no model"})


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from torch.utils._pytree import tree_map

    def single(value: Any) -> Any:
        is_half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        return value.float() if is_half else value

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        trial = _trial
        if trial is None or not (torch.is_grad_enabled() and self.training and here.is_rank):
            return original(self, *args, **kwargs)
        try:
            trial.forward_begins(self)
        except Exception as error:  # noqa: BLE001 - the recorder's wall, but the job cannot go on as the script means it
            here.failed("tuning", error)
            leave({"end": "failed", "reason": "%s: %s" % (type(error).__name__, error)})
        if trial.setting == UNUSED:
            try:
                return original(self, *args, **kwargs)
            except RuntimeError as error:
                if not str(error).startswith(UNFINISHED):
                    raise
                # A parameter went unused in the step before, and the other ranks wait for it.
                write({"refused": UNUSED, "reason": "a parameter went unused in a later step"})
                leave({"end": "done"})
        if trial.setting != AUTOCAST or trial.refused:
            return original(self, *args, **kwargs)
        try:
            with torch.autocast(self.device_type, dtype=torch.bfloat16):  # where torch deems that safe
                outputs = original(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the model cannot do that
            pass_on(error)
            trial.refuse(error)
            return original(self, *args, **kwargs)
        return tree_map(single, outputs)  # they are those of a forward without it

    return forward


_thrown_away: Set[str] = set()  # Paths that torch.save was given. What is there is not what the script has just saved.


def patch_saves(module: Any) -> None:
    """Divert ``torch.serialization.save``, which ``torch.save`` is, and moves of files that it would have written.

    What is saved into an open file or a buffer is not diverted: it may be meant for another rank, and not for a disk.
    """
    hooks.put(module, "save", _diverted)
    for name in ("replace", "rename"):
        hooks.put(os, name, _moved)


def _diverted(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, (str, os.PathLike)):
            return original(obj, f, *args, **kwargs)
        import tempfile

        _thrown_away.add(_full(f))
        with tempfile.TemporaryFile() as nowhere:  # writing takes as long as in the script
            return original(obj, nowhere, *args, **kwargs)

    return save


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scripts save under another name first. An older file of that name must not take the checkpoint's place."""

    def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        if _thrown_away and _full(src) in _thrown_away:
            _thrown_away.add(_full(dst))
        else:
            original(src, dst, *args, **kwargs)

    move.__name__ = move.__qualname__ = original.__name__
    move.__doc__ = original.__doc__
    return move


def _full(path: Any) -> str:
    try:
        return os.path.abspath(os.fsdecode(path))
    except TypeError as error:  # a script may give anything
        pass_on(error)
        return ""
