"""Runs a trial in a rank: switches the settings between steps, measures, and ends all ranks at the same step.

All ranks make the same plan without a message: a step begins at the first training forward after an optimizer step. A
running DDP model gets other settings by rebuilding its reducer, as when it is unpickled. A launch can also have one
setting from its start, which works under torch.compile too. After a crash, ``RANK.jsonl`` shows which one was tried.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch

from . import device_times, hooks
from .settings import read_settings
from .state import guarded, here, pass_on
from .storage.files import make_folder, write_at_once
from .storage.secrets import hide_in_text
from .wrappers import around, unless, wraps

BASE = "base"  # the settings of the script
AGAIN = "again"  # the settings of the script once more: what differs between the two is noise
SEED = 0
LEFT_OUT = 3  # steps after a switch that are not measured: the first has one bucket, and the second builds them anew
MEASURED = 5  # measured steps of a block
# Our choice: measured steps of a launch that has one setting. They are few beside the time that a start takes.
MEASURED_IN_LAUNCH = 20
ACCUMULATED = 4  # our choice: over how many steps a trial accumulates gradients
# Reduce gradients in one step of so many. Only for scripts with one forward a step.
ACCUMULATE = "accumulate=%d" % ACCUMULATED
MIB = 2**20
BUCKETS = (16, 8, 4, 1)  # our choice: the numbers of buckets for which caps are tried
LEAST_CAP_BYTES = MIB // 4


def choose_caps(gradient_bytes: int, present_bytes: int) -> List[int]:
    """Return the bucket caps to try, in bytes: powers of two that give about 16, 8, 4 and 1 buckets."""
    parts = [max(gradient_bytes // count, LEAST_CAP_BYTES) for count in BUCKETS]
    wanted = {1 << max(part - 1, 0).bit_length() for part in parts}  # the next power of two
    return sorted(wanted - {present_bytes})


def steps_to_measure(setting: str) -> int:
    """Return how many steps of a block are measured. With accumulation they are whole cycles."""
    return 2 * ACCUMULATED if setting == ACCUMULATE else MEASURED


def choose(settings: List[str], only: str) -> List[str]:
    """Return the settings whose names, without their values, are in a list with commas. Empty: all of them."""
    names = (BASE, AGAIN, *only.split(","))
    return [setting for setting in settings if not only or setting.partition("=")[0] in names]


def order_blocks(settings: List[str], rounds: int, first: int = 0) -> List[Tuple[int, str]]:
    """Return (round, setting) for each block: each round has all settings in its own order, from ``first``."""
    import random

    dice, blocks = random.Random(SEED), []  # noqa: S311 - an order, no secret
    for number in range(first, first + rounds):
        shuffled = list(settings)
        dice.shuffle(shuffled)
        blocks += [(number, setting) for setting in shuffled]
    return blocks


CAP = "bucket_cap="  # followed by a number of bytes
VIEWS = "gradient_as_bucket_view"
STATIC = "static_graph"
BUFFERS = "buffers_off"
UNUSED = "find_unused_off"  # DDP does not look for unused parameters
NO_SYNC = "no_sync"  # of several forwards in a step, only the last one's backward reduces
HALF = "bf16_reduction"
AUTOCAST = "bf16_autocast"  # the forward runs under ``torch.autocast`` with bfloat16
UNREDUCED = "unreduced"  # no reduction at all: what communication costs in total
# Attributes of DDP without which its reducer cannot be built anew. Torch 2.13 has all of them.
NEEDED = (
    "_bucket_config", "_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper",
    "_comm_hooks", "forward_sync_buffers",
)  # fmt: skip
# The settings that the script gave to DDP, and that a switch changes.
GIVEN = ("_bucket_config", "gradient_as_bucket_view", "static_graph", "find_unused_parameters", "forward_sync_buffers")


def why_not(ddp: Any) -> str:
    """Return why the reducer of this model cannot be rebuilt in a running job, or "" if it can be."""
    lacks = [name for name in NEEDED if not hasattr(ddp, name)]
    dynamo = sys.modules.get("torch._dynamo.utils")
    reasons = {
        "this torch's DDP has no %s" % ", ".join(lacks): bool(lacks),
        "the script has registered a communication hook": bool(getattr(ddp, "_comm_hooks", ())),
        "DDP has mixed_precision": getattr(ddp, "mixed_precision", None) is not None,
        "torch.compile has compiled code with the present buckets": (
            dynamo is not None and bool(dynamo.counters["frames"].get("total"))
        ),
        "DDP delays some reductions (delay_all_reduce_named_params)": bool(ddp._delay_all_reduce_params),
        "the optimizer steps in backward": any(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters()),
        "torch's Python reducer is in use": bool(getattr(ddp, "_use_python_reducer", False)),
        "the loop is inside join()": bool(ddp._join_config.enable),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def settings_for(ddp: Any, forwards: int, has_autocast: bool) -> List[str]:
    """Return the settings to try, the script's own first. ``forwards`` of a step all reduce; 0 if that varies."""
    reduced = [p for p in ddp.parameters() if p.requires_grad]
    is_single = all(str(p.dtype) == "torch.float32" for p in reduced)
    caps = choose_caps(sum(p.numel() * p.element_size() for p in reduced), ddp.bucket_bytes_cap)
    # Older versions of torch call that ``broadcast_buffers``.
    syncs_buffers = bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", False)))
    offered: Dict[str, bool] = {
        VIEWS: not ddp.gradient_as_bucket_view,
        STATIC: not ddp.static_graph and not ddp.find_unused_parameters,
        BUFFERS: syncs_buffers and any(True for _ in ddp.module.buffers()),
        ACCUMULATE: forwards == 1,
        NO_SYNC: forwards > 1,
        HALF: is_single and ddp.device_type != "cpu",  # torch refuses its hook without NCCL or XCCL
        AUTOCAST: is_single and not has_autocast,
        UNREDUCED: True,
    }
    return [BASE, AGAIN, *[CAP + str(cap) for cap in caps], *[name for name, fits in offered.items() if fits]]


def late_settings_for(ddp: Any) -> List[str]:
    """Return the settings that could stop the job if a later step uses other parameters. They come last."""
    return [UNUSED, STATIC] if ddp.find_unused_parameters and not ddp.static_graph else []


def switch(ddp: Any, given: Dict[str, Any], setting: str) -> None:
    """Put a setting into effect, on all ranks before one forward. Gradients are dropped: they may be old buckets."""
    ddp.reducer._remove_autograd_hooks()
    for parameter in ddp.parameters():
        parameter.grad = None
    config = given["_bucket_config"]
    if setting.startswith(CAP):
        cap = int(setting[len(CAP) :])
        caps = {"bucket_bytes_cap": cap, "per_bucket_bytes_caps": (), "first_bucket_bytes_cap": cap}
        config = dataclasses.replace(config, **caps)
    ddp._bucket_config = config
    ddp.bucket_bytes_cap = config.bucket_bytes_cap
    ddp.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
    ddp.bucket_bytes_cap_default = config.first_bucket_bytes_cap < config.bucket_bytes_cap
    ddp.gradient_as_bucket_view = bool(given["gradient_as_bucket_view"]) or setting == VIEWS
    ddp.forward_sync_buffers = bool(given["forward_sync_buffers"]) and setting != BUFFERS
    ddp.require_backward_grad_sync = setting != UNREDUCED
    ddp.find_unused_parameters = bool(given["find_unused_parameters"]) and setting not in (UNUSED, STATIC)
    is_static = bool(given["static_graph"]) or setting == STATIC
    ddp._comm_hooks.clear()
    parameters, expects_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expects_sparse, names, is_static)
    ddp._has_rebuilt_buckets = False
    ddp.static_graph = False  # _set_static_graph does nothing if it is set
    if is_static:
        ddp._set_static_graph()
    if setting == HALF:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        ddp.register_comm_hook(ddp.process_group, bf16_compress_hook)


WORKERS = "workers="  # followed by the number of each loader's workers
THREADS = "threads="  # followed by the number of torch's threads in each rank
# The settings that are arguments of DDP's constructor.
AT_START = frozenset((CAP.rstrip("="), VIEWS, STATIC, BUFFERS, UNUSED))
_loaders: List[int] = []  # for each loader with other workers than the script gave it: their number


def settings_at_start(models: List[Any]) -> List[str]:
    """Return the settings to try from the start, by what the steps so far showed: caps for the largest model."""
    largest = max(models, key=lambda m: sum(p.numel() * p.element_size() for p in m.parameters() if p.requires_grad))
    found: Dict[str, None] = {}
    for ddp in models:
        late: List[str] = []
        if late_settings_for(ddp) and hasattr(ddp, "reducer") and ddp.reducer._ddp_graph_static():
            unused = ddp.logger._get_ddp_logging_data().ints_map.get("unused_parameter_size", 0)
            late = [STATIC] if unused else [STATIC, UNUSED]
        for setting in settings_for(ddp, forwards=0, has_autocast=True) + late:
            if setting.partition("=")[0] in AT_START and (ddp is largest or not setting.startswith(CAP)):
                found[setting] = None
    return list(found)


def give_to_ddp(ddp: Any, setting: str) -> None:
    if setting.partition("=")[0] in AT_START:
        hooks.put(ddp, "__init__", functools.partial(_changing, functools.partial(_ddp_arguments, setting)))


def _ddp_arguments(setting: str, unused: Any, names: Any) -> Dict[str, Any]:
    """Return the arguments that make a setting. ``names`` are those that this torch's constructor has."""
    if setting.startswith(CAP):
        caps: Dict[str, Any] = {"bucket_cap_mb": int(setting[len(CAP) :]) / MIB, "bucket_cap_mb_list": None}
        return {name: value for name, value in caps.items() if name in names}
    if setting == BUFFERS:
        has_new = "forward_sync_buffers" in names
        return {"forward_sync_buffers": False, "broadcast_buffers": None} if has_new else {"broadcast_buffers": False}
    if setting == VIEWS:
        return {VIEWS: True}
    return {"find_unused_parameters": False, **({STATIC: True} if setting == STATIC else {})}


def patch_loader(module: Any) -> None:
    setting = read_settings(os.environ).tune_setting

    def arguments_of(given: Dict[str, Any], unused: Any) -> Dict[str, Any]:
        from torch.utils.data import IterableDataset

        dataset, batches, sampler = given["dataset"], given.get("batch_sampler"), given.get("sampler")
        if not here.is_rank or isinstance(dataset, IterableDataset):  # workers would read a stream twice
            return {}
        drawn = dataset if sampler is None else sampler
        if (len(drawn) <= (given.get("batch_size", 1) or 1)) if batches is None else len(batches) <= 1:
            return {}
        count = int(setting[len(WORKERS) :])
        _loaders.append(count)
        return {"num_workers": count, "persistent_workers": True}

    if setting.startswith(WORKERS):
        hooks.put(module.DataLoader, "__init__", functools.partial(_changing, arguments_of))


def why_without_effect(setting: str) -> str:
    if setting.startswith(WORKERS) and not _loaders:
        return "the script has no DataLoader that draws several batches by index"
    if setting.startswith(THREADS) and torch.get_num_threads() != int(setting[len(THREADS) :]):
        return "the script sets %d threads itself (torch.set_num_threads)" % torch.get_num_threads()
    return ""


def _changing(arguments_of: Callable[..., Dict[str, Any]], original: Any) -> Any:
    """Return a constructor that also gets what ``arguments_of`` returns, by its arguments and the names of all."""
    signature = inspect.signature(original)

    @guarded("tuning")
    def changed(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:  # the script's mistake: the constructor itself says which
            pass_on(error)
            return None
        given.arguments.update(arguments_of(given.arguments, signature.parameters))
        return given

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes the place of one
        given = changed(self, *args, **kwargs)
        if given is None:
            original(self, *args, **kwargs)
        else:
            original(*given.args, **given.kwargs)

    return __init__


WARM_UP = 10  # our choice: steps before the first switch, in which caches fill and libraries choose their algorithms
# Our choice: after so many training forwards and no optimizer step the trial ends. Scripts accumulate a few dozen.
FORWARDS_WITHOUT_STEP = 512
# Our choice: after so many optimizer steps and no training forward of a DDP model, the trial ends.
STEPS_WITHOUT_MODEL = 64


class SettingsTrial:
    """The state of the trial in this rank. With a ``setting``, this launch has only that one."""

    def __init__(self, rounds: int, only: str, setting: str = "") -> None:
        device_times.reads_all = True
        self.rounds, self.only = rounds, only
        self.models: List[Any] = []  # weak references to the DDP models that the script has made
        self.steps = self.optimizer_steps = self.forwards = 0
        self.in_step = 0  # training forwards in this step so far
        # Of the steps before the first switch: their numbers of training forwards that reduce, 0 if one does not.
        self.per_step: set[int] = set()
        self.has_stepped = self.has_autocast = False
        self.given: Any = None  # what the script gave to DDP, once settings are switched: ``GIVEN``
        self.fixed = setting  # the setting that this launch has from its start, if it has one
        self.end: Dict[str, Any] = {"end": "done"}  # how the rank says that it has ended, if it keeps its settings
        self.setting = BASE
        self.refused = ""  # why this rank could not try the setting
        self.blocks: List[Tuple[int, str]] = []
        self.has_late = False  # the settings that could stop the job are being tried: all others are done
        # In all steps so far the same parameters, and all, had gradients. Known with ``find_unused_parameters``.
        self.same_used = self.all_used = True
        # When each step that is measured began, in nanoseconds. In a block it begins with the second step.
        self.began: List[int] = []

    def forward_begins(self, ddp: Any) -> None:
        self.forwards += 1
        if self.has_stepped:
            self.has_stepped = False
            self.steps += 1
            if self.given is not None:
                self.in_step = 0
                self._step_of_block_begins(ddp)
            else:
                self.per_step.add(self.in_step)
                self.in_step = 0
                if self.steps == WARM_UP and not self._keeps_settings(ddp):
                    self._begin(ddp)
                elif self.steps >= WARM_UP:  # restarts may try what a running job cannot
                    steps_ns = self._time_step(ddp, 1, MEASURED_IN_LAUNCH)
                    if steps_ns:
                        write({"round": 0, "setting": self.fixed or BASE, "steps_ns": steps_ns})
                        leave(self.end)
        elif self.steps == 0 and self.forwards > FORWARDS_WITHOUT_STEP:
            leave({"end": "no optimizer step"})
        self.in_step += 1
        if self.given is None:
            if not ddp.require_backward_grad_sync:
                self.per_step.add(0)
            self.has_autocast = self.has_autocast or bool(torch.is_autocast_enabled(ddp.device_type))
        elif self.setting == ACCUMULATE:
            measured = len(self.began) + 1 - LEFT_OUT
            ddp.require_backward_grad_sync = measured <= 0 or measured % ACCUMULATED == 0
        elif self.setting == NO_SYNC:
            ddp.require_backward_grad_sync = self.in_step == max(self.per_step)

    def refuse(self, error: BaseException) -> None:
        """Continue with the script's settings until all ranks drop this one, at the end of the block."""
        text = hide_in_text(str(error)[:2000]).split("\n")[0]
        self.refused = self.refused or "%s: %s" % (type(error).__name__, text[:200])

    def _time_step(self, ddp: Any, left_out: int, count: int) -> List[int]:
        """Note that a step begins. Return what ``count`` steps after the first ones took once all have ended."""
        began = self.began
        if ddp.device_type == "cuda" and len(began) + 1 in (left_out, left_out + count):
            torch.cuda.synchronize()  # the host waits for it where measuring begins and ends, and nowhere between
        began.append(time.monotonic_ns())
        took = [after - before for before, after in zip(began[left_out - 1 :], began[left_out:])]
        return took if len(took) == count else []

    def _step_of_block_begins(self, ddp: Any) -> None:
        steps_ns = self._time_step(ddp, LEFT_OUT, steps_to_measure(self.setting))
        device_times.is_paused = self.setting not in (BASE, AGAIN) or len(self.began) < LEFT_OUT
        if steps_ns:
            number, setting = self.blocks.pop(0)
            if ddp.find_unused_parameters:
                self.same_used = self.same_used and ddp.reducer._ddp_graph_static()
                counts = ddp.logger._get_ddp_logging_data().ints_map
                self.all_used = self.all_used and not counts.get("unused_parameter_size", 0)
            if on_any_rank(ddp, [bool(self.refused)])[0]:
                self._drop(setting)
            else:
                write({"round": number, "setting": setting, "steps_ns": steps_ns})
            self._try_next(ddp)

    def _keeps_settings(self, ddp: Any) -> bool:
        """Return whether this launch has one setting. If so, write what is measured, and what a restart can try."""
        import multiprocessing

        if multiprocessing.parent_process() is not None:  # started by a Python of the script's
            leave({"end": "spawned"})
        living = [model for model in (reference() for reference in self.models) if model is not None]
        if not self.fixed:
            reason = why_not(ddp) if len(living) <= 1 else ""
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
        self.given = {name: getattr(ddp, name) for name in GIVEN}
        forwards = self._forwards()
        self.per_step = {forwards}
        settings = choose(settings_for(ddp, forwards, self.has_autocast), self.only)
        self.blocks = order_blocks(settings, self.rounds)
        needs = WARM_UP + sum(LEFT_OUT + steps_to_measure(setting) for _, setting in self.blocks)
        write({"plan": settings, "rounds": self.rounds, "forwards": forwards, "needs": needs})
        fit = {setting.partition("=")[0] for setting in [*settings, *late_settings_for(ddp)]}
        for name in self.only.split(","):
            if name and name not in fit:
                write({"refused": name, "reason": "it does not fit this job"})
        self._try_next(ddp)

    def _try_next(self, ddp: Any) -> None:
        self.began = []
        device_times.is_paused = True
        while self.blocks or self._has_late_blocks(ddp):
            self.setting, self.refused = self.blocks[0][1], ""
            write({"tries": self.setting, "round": self.blocks[0][0]})
            try:
                switch(ddp, self.given, self.setting)
            except Exception as error:  # noqa: BLE001 - torch refuses a setting; the others are tried all the same
                pass_on(error)
                self.refuse(error)
            if not on_any_rank(ddp, [bool(self.refused)])[0]:
                return
            self._drop(self.setting)
            switch(ddp, self.given, BASE)
        leave({"end": "done", "steps": self.steps})

    def _drop(self, setting: str) -> None:
        write({"refused": setting, "reason": self.refused or "another rank refuses it"})
        self.blocks = [block for block in self.blocks if block[1] != setting]

    def _has_late_blocks(self, ddp: Any) -> bool:
        if self.has_late:
            return False
        self.has_late = True
        varies, some = on_any_rank(ddp, [not self.same_used, not self.all_used])
        switch(ddp, self.given, BASE)
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

            def leave_with_others() -> None:
                """Follow another rank of this host that leaves: this rank may wait for it in a reduction."""
                while not os.path.exists(os.path.join(here.folder, FOLDER, LEFT)):
                    time.sleep(LOOK_EVERY_S)
                time.sleep(GRACE_S)
                leave({"end": "with another rank"})

            threading.Thread(target=leave_with_others, name="ddpdoctor-trial", daemon=True).start()
        return bool(late)


def on_any_rank(ddp: Any, flags: List[bool]) -> List[bool]:
    """Return for each flag whether any rank has it. The group is asked directly, past the recorder's hooks."""
    import torch.distributed as dist

    device = next(ddp.parameters()).device
    values = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device=device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    ddp.process_group.allreduce([values], options).wait()
    return [bool(value) for value in values.tolist()]


FOLDER = "tuning"
LEFT = "left"  # a file in that folder, made by the first rank of this host that leaves
# Our choice: how long a rank waits for its host's others to end. Their last reduction may read from its connection.
TOGETHER_S = 5.0
LOOK_EVERY_S = 0.05
GRACE_S = 2.0  # our choice: a rank that is not stuck comes to its own end within this time after another has left


def write(entry: Any) -> None:
    folder = os.path.join(here.folder, FOLDER)
    make_folder(folder)
    write_at_once(os.path.join(folder, "%s.jsonl" % os.environ.get("RANK", "0")), json.dumps(entry) + "\n")


def leave(entry: Any) -> None:
    """End this process immediately: no ``finally`` of the script runs, no checkpoint is written, no atexit function."""
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


# How DDP's error begins after a backward in which a parameter had no gradient (c10d/reducer.cpp).
UNFINISHED = "Expected to have finished reduction in the prior iteration"
_trial: Optional[SettingsTrial] = None


def patch_ddp(module: Any) -> None:
    """Follow the construction of DDP models and their forwards. This hook comes last, so that it runs first."""
    global _trial
    settings = read_settings(os.environ)
    _trial = SettingsTrial(settings.tune_rounds, settings.tune_only, settings.tune_setting)
    ddp = module.DistributedDataParallel
    give_to_ddp(ddp, settings.tune_setting)

    @guarded("tuning")
    def made(ddp: Any) -> None:
        if _trial is not None:
            _trial.models.append(weakref.ref(ddp))

    hooks.put(ddp, "__init__", around(after=made))
    hooks.put(ddp, "forward", _forward)


def patch_optimizer(module: Any) -> None:
    """Note steps of torch's optimizers, and set torch's threads: it may have been loaded without our environment."""
    setting = read_settings(os.environ).tune_setting
    if setting.startswith(THREADS):
        torch.set_num_threads(int(setting[len(THREADS) :]))

    @guarded("tuning")
    def stepped(*unused: Any) -> None:
        if _trial is not None and here.is_rank:
            _trial.has_stepped = True
            _trial.optimizer_steps += 1
            if _trial.forwards == 0 and _trial.optimizer_steps > STEPS_WITHOUT_MODEL:
                leave({"end": "no model"})

    if hooks.has(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(stepped)


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils._pytree import tree_map

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
        # As those of a forward without it.
        return tree_map(lambda leaf: leaf.float() if getattr(leaf, "dtype", None) is torch.bfloat16 else leaf, outputs)

    return forward


_thrown_away: Set[str] = set()  # Paths that torch.save was given. What is there is not what the script has just saved.


def patch_saves(module: Any) -> None:
    """Divert ``torch.save`` to a path, and moves of such files. An open file or a buffer may be meant for a rank."""

    def diverted(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(f, (str, os.PathLike)):
                return original(obj, f, *args, **kwargs)
            import tempfile

            _thrown_away.add(_full(f))
            with tempfile.TemporaryFile() as nowhere:  # writing takes as long as in the script
                return original(obj, nowhere, *args, **kwargs)

        return save

    def is_move_of_save(src: Any, dst: Any, *unused: Any, **also_unused: Any) -> bool:
        """Scripts save under another name first. An older file of that name must not take the checkpoint's place."""
        if not _thrown_away or _full(src) not in _thrown_away:
            return False
        _thrown_away.add(_full(dst))
        return True

    hooks.put(module, "save", diverted)
    for name in ("replace", "rename"):
        hooks.put(os, name, unless(is_move_of_save))


def _full(path: Any) -> str:
    try:
        return os.path.abspath(os.fsdecode(path))
    except TypeError as error:  # a script may give anything
        pass_on(error)
        return ""
