"""Which settings of DDP a trial tries, in which order, and how it puts them into effect.

All ranks make the same plan without a message between them. A running DDP model gets other settings by building its
reducer anew, as DDP does when it is unpickled.

A launch of a trial can also have one setting from its start, in what the script constructs: a DDP model, a DataLoader,
torch's threads. That takes no switch in the running job, so it also works under torch.compile or with a communication
hook, and for what a running job cannot change.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from typing import Any, Callable, Dict, List, Tuple

from . import hooks
from .settings import read_settings
from .state import guarded, here, pass_on
from .wrappers import wraps

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
    names = set(only.split(",")) if only else set()
    return [one for one in settings if not names or one in (BASE, AGAIN) or one.partition("=")[0] in names]


def order_blocks(settings: List[str], rounds: int, first: int = 0) -> List[Tuple[int, str]]:
    """Return (round, setting) for each block. Each round has all settings, in an order of its own.

    ``first`` is the number of the first round.
    """
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


class Script:
    """The settings that the script gave to DDP."""

    def __init__(self, ddp: Any) -> None:
        self.config = ddp._bucket_config
        self.views = bool(ddp.gradient_as_bucket_view)
        self.static = bool(ddp.static_graph)
        self.finds_unused = bool(ddp.find_unused_parameters)
        self.syncs_buffers = bool(ddp.forward_sync_buffers)


def why_not(ddp: Any) -> str:
    """Return why the reducer of this model cannot be built anew in a running job, or "" if it can be."""
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
    """Return the settings to try with this model, the script's own first.

    Args:
        ddp: The model.
        forwards: Training forwards in each step that all reduce; 0 if it varies, or if the script uses no_sync.
        has_autocast: Whether the script's forward runs under autocast already.
    """
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


def switch(ddp: Any, script: Script, setting: str) -> None:
    """Put a setting into effect. It must be called on all ranks at the same step, before that step's first forward.

    Gradients are dropped, since they may be parts of the old reducer's buckets.
    """
    ddp.reducer._remove_autograd_hooks()
    for parameter in ddp.parameters():
        parameter.grad = None
    config = script.config
    if setting.startswith(CAP):
        cap = int(setting[len(CAP) :])
        config = dataclasses.replace(
            config, bucket_bytes_cap=cap, per_bucket_bytes_caps=(), first_bucket_bytes_cap=cap
        )  # fmt: skip
    ddp._bucket_config = config
    ddp.bucket_bytes_cap = config.bucket_bytes_cap
    ddp.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
    ddp.bucket_bytes_cap_default = config.first_bucket_bytes_cap < config.bucket_bytes_cap
    ddp.gradient_as_bucket_view = script.views or setting == VIEWS
    ddp.forward_sync_buffers = script.syncs_buffers and setting != BUFFERS
    ddp.require_backward_grad_sync = setting != UNREDUCED
    ddp.find_unused_parameters = script.finds_unused and setting not in (UNUSED, STATIC)
    is_static = script.static or setting == STATIC
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
    """Return the settings to try with models whose reducers cannot be built anew, by what the steps so far showed.

    Bucket caps are those for the largest model. Of the settings that could stop the job, those are left against which
    no step has shown a reason.
    """
    largest = max(
        models, key=lambda ddp: sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
    )
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


def patch_ddp(ddp: Any, setting: str) -> None:
    """Give DDP's constructor a setting."""
    if setting.partition("=")[0] in AT_START:
        hooks.put(ddp, "__init__", functools.partial(_changing, _ddp_arguments, setting))


def _ddp_arguments(setting: str, unused: Any, names: Any) -> Dict[str, Any]:
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


def patch_loader(module: Any) -> None:
    """Give the loaders of this rank the number of workers that this launch tries."""
    setting = read_settings(os.environ).tune_setting
    if setting.startswith(WORKERS):
        hooks.put(module.DataLoader, "__init__", functools.partial(_changing, _loader_arguments, setting))


def _loader_arguments(setting: str, given: Dict[str, Any], unused: Any) -> Dict[str, Any]:
    if not here.is_rank or not _has_batches(given):
        return {}
    count = int(setting[len(WORKERS) :])
    _loaders.append(count)
    return {"num_workers": count, "persistent_workers": True}


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


def why_without_effect(setting: str) -> str:
    """Return why a setting of this launch is not in effect after its first steps, or "" if it is."""
    import torch

    if setting.startswith(WORKERS) and not _loaders:
        return "the script has no DataLoader that draws several batches by index"
    if setting.startswith(THREADS) and torch.get_num_threads() != int(setting[len(THREADS) :]):
        return "the script sets %d threads itself (torch.set_num_threads)" % torch.get_num_threads()
    return ""


def _changing(arguments_of: Callable[..., Dict[str, Any]], setting: str, original: Any) -> Any:
    """Return a constructor that also gets what ``arguments_of`` returns, by its arguments and the names of all."""
    signature = inspect.signature(original)

    @guarded("tuning")
    def changed(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:  # the script's mistake: the constructor itself says which
            pass_on(error)
            return None
        given.arguments.update(arguments_of(setting, given.arguments, signature.parameters))
        return given

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes the place of one
        given = changed(self, *args, **kwargs)
        if given is None:
            original(self, *args, **kwargs)
        else:
            original(*given.args, **given.kwargs)

    return __init__
