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
from .storage.files import make_folder, open_plain
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
    left_out,
    order_blocks,
    settings_at_start,
    steps_to_measure,
    why_without_effect,
)
from .wrappers import around, wraps

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
        device_times.reads_all = True
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
        self.script: Optional[tune_switches.Script] = None
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
        if self.script is None:
            if not ddp.require_backward_grad_sync:
                self.per_step.add(0)
            self.has_autocast = self.has_autocast or _is_autocast(ddp)
        elif self.setting == ACCUMULATE:
            measured = len(self.began) + 1 - LEFT_OUT
            ddp.require_backward_grad_sync = measured <= 0 or measured % ACCUMULATED == 0
        elif self.setting == tune_switches.NO_SYNC:
            ddp.require_backward_grad_sync = self.in_step == max(self.per_step)

    def refuse(self, error: BaseException) -> None:
        """Go on with the script's settings until all ranks drop this one, at the end of the block."""
        text = hide_in_text(str(error)[:2000]).split("\n")[0]
        self.refused = self.refused or "%s: %s" % (type(error).__name__, text[:200])

    def _step_begins(self, ddp: Any) -> None:
        if self.script is None:
            self._begin_or_measure(ddp)
            return
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
        if self.steps == WARM_UP:
            import multiprocessing

            if multiprocessing.parent_process() is not None:  # started by a Python of the script's
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
        self.script = tune_switches.Script(ddp)
        forwards = self._forwards()
        self.per_step = {forwards}
        settings = choose(tune_switches.settings_for(ddp, forwards, self.has_autocast), self.only)
        self.blocks = order_blocks(settings, self.rounds)
        needs = WARM_UP + sum(LEFT_OUT + steps_to_measure(setting) for _, setting in self.blocks)
        write({"plan": settings, "rounds": self.rounds, "forwards": forwards, "needs": needs})
        unfit = left_out(self.only, [*settings, *tune_switches.late_settings_for(ddp)])
        for name in unfit:
            write({"refused": name, "reason": "it does not fit this job"})
        self._try_next(ddp)

    def _try_next(self, ddp: Any) -> None:
        """Switch to the setting of the next block that no rank refuses."""
        self.began = []
        device_times.is_paused = True
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
            tune_switches.switch(ddp, self.script, setting)

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
        late = choose(tune_switches.late_settings_for(ddp), self.only)
        if late and varies:
            late = self._refuse_late(late, late, "the parameters that go unused change from step to step")
        elif late and some:
            late = self._refuse_late(late, [tune_switches.UNUSED], "a parameter goes unused")
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


def _why_fixed(ddp: Any, models: int) -> Dict[str, Any]:
    """Return how to say that this job's settings cannot be switched while it runs; empty if they can be."""
    if models > 1:
        return {"end": "several models", "models": models}
    reason = tune_switches.why_not(ddp)
    return {"end": "cannot switch", "reason": reason} if reason else {}


def _is_autocast(ddp: Any) -> bool:
    import torch

    return bool(torch.is_autocast_enabled(ddp.device_type))


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
LEFT = "left"
"""A file in that folder, made by the first rank of this host that leaves."""
TOGETHER_S = 5.0
"""Our choice: how long a rank waits for the others of its host to come to their end. If one goes first, the last
reduction of another may still read from its connection."""
LOOK_EVERY_S = 0.05
GRACE_S = 2.0
"""Our choice: a rank that is not stuck comes to its own end within this time after another has left."""


def write(entry: Any) -> None:
    """Append a line to this rank's file."""
    folder = _folder()
    make_folder(folder)
    _append(os.path.join(folder, "%s.jsonl" % _number()), json.dumps(entry) + "\n")


def leave(entry: Any) -> None:
    """End this process at once: no ``finally`` of the script runs, no checkpoint is written, no atexit function."""
    try:
        write(entry)
        device_times.settle_gradients()
        _append(os.path.join(_folder(), LEFT), _number() + "\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        until = time.monotonic() + TOGETHER_S
        while time.monotonic() < until and len(_numbers_left()) < count:
            time.sleep(LOOK_EVERY_S)
        processes = sys.modules.get("multiprocessing.process")
        for child in processes.active_children() if processes is not None else ():
            child.kill()
    finally:
        os._exit(0)


def leave_with_others() -> None:
    """Follow another rank of this host that leaves, from a thread: this rank may wait for it in a reduction."""
    import threading

    threading.Thread(target=_follow, name="ddpdoctor-trial", daemon=True).start()


def _follow() -> None:
    path = os.path.join(_folder(), LEFT)
    while not os.path.exists(path):
        time.sleep(LOOK_EVERY_S)
    time.sleep(GRACE_S)
    leave({"end": "with another rank"})


def _numbers_left() -> Any:
    with open(os.path.join(_folder(), LEFT)) as file:
        return set(file.read().split())


def _append(path: str, text: str) -> None:
    fd = open_plain(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _folder() -> str:
    return os.path.join(here.folder, FOLDER)


def _number() -> str:
    return os.environ.get("RANK", "0")


UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""How DDP's error begins after a backward in which a parameter had no gradient (c10d/reducer.cpp)."""
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
    """Note steps of torch's optimizers. By then torch is there, so its threads can be set."""
    tune_switches.set_threads(read_settings(os.environ).tune_setting)
    if hooks.has(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(_stepped)


def patch_loader(module: Any) -> None:
    """Give loaders the workers that this launch tries."""
    tune_switches.patch_loader(module.DataLoader, read_settings(os.environ).tune_setting)


@guarded("tuning")
def _made(ddp: Any) -> None:
    if _trial is not None:
        _trial.models.append(weakref.ref(ddp))


@guarded("tuning")
def _stepped(*unused: Any) -> None:
    if _trial is not None and here.is_rank:
        _trial.optimizer_stepped()


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _trial is None or not (torch.is_grad_enabled() and self.training and here.is_rank):
            return original(self, *args, **kwargs)
        _before(_trial, self)
        if _trial.setting == AUTOCAST and not _trial.refused:
            return _under_autocast(_trial, original, self, *args, **kwargs)
        if _trial.setting == UNUSED:
            return _all_used(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return wraps(original)(forward)


def _before(trial: SettingsTrial, ddp: Any) -> None:
    """Take the trial further. If that fails, this job cannot go on as the script means it."""
    try:
        trial.forward_begins(ddp)
    except Exception as error:  # noqa: BLE001 - the recorder's wall
        here.failed("tuning", error)
        leave({"end": "failed", "reason": "%s: %s" % (type(error).__name__, error)})


def _under_autocast(trial: SettingsTrial, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a forward in bfloat16 where torch deems that safe. Its outputs are those of a forward without it."""
    import torch
    from torch.utils._pytree import tree_map

    try:
        with torch.autocast(ddp.device_type, dtype=torch.bfloat16):
            outputs = original(ddp, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the model cannot do that
        pass_on(error)
        trial.refuse(error)
        return original(ddp, *args, **kwargs)
    return tree_map(_single, outputs)


def _single(value: Any) -> Any:
    import torch

    is_half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_half else value


def _all_used(original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a forward. If a parameter went unused in the step before, end the trial: the other ranks wait for it."""
    try:
        return original(ddp, *args, **kwargs)
    except RuntimeError as error:
        if not str(error).startswith(UNFINISHED):
            raise
        write({"refused": UNUSED, "reason": "a parameter went unused in a later step"})
        leave({"end": "done"})


_thrown_away: Set[str] = set()
"""Paths that torch.save was given. What is there is not what the script has just saved."""


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
