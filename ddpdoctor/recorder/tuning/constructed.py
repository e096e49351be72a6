"""Gives one setting to what the script constructs: a DDP model, a DataLoader, torch's threads.

A launch of a trial can have such a setting from its start. That takes no switch in the running job, so it also works
under torch.compile or with a communication hook, and for what a running job cannot change.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List

from .. import hooks
from ..state import guarded, here, pass_on
from ..wrappers import wraps
from .plan import MIB
from .switches import BUFFERS, CAP, STATIC, UNUSED, VIEWS, late_settings_for, settings_for

WORKERS = "workers="
"""Followed by the number of each loader's workers."""
THREADS = "threads="
"""Followed by the number of torch's threads in each rank."""
AT_START = frozenset((CAP.rstrip("="), VIEWS, STATIC, BUFFERS, UNUSED))
"""The settings that are arguments of DDP's constructor."""
_loaders: List[int] = []
"""For each loader with other workers than the script gave it: their number."""


def settings_at_start(models: List[Any]) -> List[str]:
    """Return the settings to try with models whose reducers cannot be built anew, by what the steps so far showed.

    Bucket caps are those for the largest model.
    """
    largest = max(models, key=_gradient_bytes)
    found: Dict[str, None] = {}
    for ddp in models:
        for setting in settings_for(ddp, forwards=0, has_autocast=True) + _late(ddp):
            if setting.partition("=")[0] in AT_START and (ddp is largest or not setting.startswith(CAP)):
                found[setting] = None
    return list(found)


def _gradient_bytes(ddp: Any) -> int:
    return sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)


def _late(ddp: Any) -> List[str]:
    """Return the settings that could stop the job, as far as no step has shown a reason against them."""
    if not late_settings_for(ddp) or not hasattr(ddp, "reducer") or not ddp.reducer._ddp_graph_static():
        return []
    unused = ddp.logger._get_ddp_logging_data().ints_map.get("unused_parameter_size", 0)
    return [STATIC] if unused else [STATIC, UNUSED]


def patch_ddp(ddp: Any, setting: str) -> None:
    """Give DDP's constructor a setting."""
    if setting.partition("=")[0] in AT_START:
        hooks.put(ddp, "__init__", _changing(lambda given, names: given.update(_ddp_arguments(setting, names))))


def _ddp_arguments(setting: str, names: Any) -> Dict[str, Any]:
    """Return the arguments that make a setting. ``names`` are those that this torch's constructor has."""
    if setting.startswith(CAP):
        caps: Dict[str, Any] = {"bucket_cap_mb": int(setting[len(CAP) :]) / MIB, "bucket_cap_mb_list": None}
        return {name: value for name, value in caps.items() if name in names}
    if setting == BUFFERS:
        has_new = "forward_sync_buffers" in names
        return {"forward_sync_buffers": False, "broadcast_buffers": None} if has_new else {"broadcast_buffers": False}
    return {VIEWS: {VIEWS: True}, STATIC: {STATIC: True, "find_unused_parameters": False}}.get(
        setting, {"find_unused_parameters": False}
    )


def patch_loader(loader: Any, setting: str) -> None:
    """Give the loaders of this rank a number of workers."""
    if setting.startswith(WORKERS):
        hooks.put(loader, "__init__", _changing(lambda given, _: _set_workers(given, int(setting[len(WORKERS) :]))))


def _set_workers(given: Dict[str, Any], count: int) -> None:
    if here.is_rank and _has_batches(given):
        given.update(num_workers=count, persistent_workers=True)
        _loaders.append(count)


def _has_batches(given: Dict[str, Any]) -> bool:
    """Return whether a loader draws several batches of a dataset by index: workers would read a stream twice."""
    from torch.utils.data import IterableDataset

    data, batches = given["dataset"], given.get("batch_sampler")
    if isinstance(data, IterableDataset):
        return False
    if batches is not None:
        return len(batches) > 1
    drawn = data if given.get("sampler") is None else given["sampler"]
    return len(drawn) > (given.get("batch_size", 1) or 1)


def set_threads(setting: str) -> None:
    """Set torch's threads, in case it was loaded without the launch's environment. The script may set others."""
    if setting.startswith(THREADS):
        import torch

        torch.set_num_threads(int(setting[len(THREADS) :]))


def why_without_effect(setting: str) -> str:
    """Return why a setting of this launch is not in effect after its first steps, or "" if it is."""
    import torch

    if setting.startswith(WORKERS) and not _loaders:
        return "the script has no DataLoader that draws several batches by index"
    if setting.startswith(THREADS) and torch.get_num_threads() != int(setting[len(THREADS) :]):
        return "the script sets %d threads itself (torch.set_num_threads)" % torch.get_num_threads()
    return ""


def _changing(change: Callable[[Dict[str, Any], Any], None]) -> Callable[[Any], Any]:
    """Return a decorator for a constructor: ``change`` gets its arguments, and the names of all that it takes."""

    def decorate(original: Any) -> Any:
        signature = inspect.signature(original)

        @guarded("tuning")
        def changed(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:  # the script's mistake: the constructor itself says which
                pass_on(error)
                return None
            change(given.arguments, signature.parameters)
            return given

        @wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes the place of one
            given = changed(self, *args, **kwargs)
            if given is None:
                original(self, *args, **kwargs)
            else:
                original(*given.args, **given.kwargs)

        return __init__

    return decorate
