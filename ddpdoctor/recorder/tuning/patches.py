"""Hooks a trial into DDP and into torch's optimizers."""

from __future__ import annotations

import os
import weakref
from typing import Any, Callable, Optional

from .. import hooks
from ..settings import read_settings
from ..state import guarded, here, pass_on
from ..wrappers import around, wraps
from . import constructed
from .leaving import leave, write
from .switches import AUTOCAST, UNUSED
from .trial import SettingsTrial

UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""How DDP's error begins after a backward in which a parameter had no gradient (c10d/reducer.cpp)."""
_trial: Optional[SettingsTrial] = None


def patch_ddp(module: Any) -> None:
    """Follow the construction of DDP models and their forwards. This hook comes last, so that it runs first."""
    global _trial
    settings = read_settings(os.environ)
    _trial = SettingsTrial(settings.tune_rounds, settings.tune_only, settings.tune_setting)
    ddp = module.DistributedDataParallel
    constructed.patch_ddp(ddp, settings.tune_setting)
    hooks.put(ddp, "__init__", lambda original: around(original, after=_made))
    hooks.put(ddp, "forward", _forward)


def patch_optimizer(module: Any) -> None:
    """Note steps of torch's optimizers. By then torch is there, so its threads can be set."""
    constructed.set_threads(read_settings(os.environ).tune_setting)
    if hooks.has(module, "register_optimizer_step_post_hook"):
        module.register_optimizer_step_post_hook(_stepped)


def patch_loader(module: Any) -> None:
    """Give loaders the workers that this launch tries."""
    constructed.patch_loader(module.DataLoader, read_settings(os.environ).tune_setting)


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
