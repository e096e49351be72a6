"""Gives a running DDP model other settings. It builds the reducer anew, as DDP does when it is unpickled."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Dict, List

from .plan import ACCUMULATE, AGAIN, BASE, choose_caps

CAP = "bucket_cap="
"""Followed by a number of bytes."""
VIEWS = "gradient_as_bucket_view"
STATIC = "static_graph"
BUFFERS = "buffers_off"
UNUSED = "find_unused_off"
"""DDP does not look for unused parameters."""
NO_SYNC = "no_sync"
"""Of several forwards in a step, only the last one's backward reduces."""
HALF = "bf16_reduction"
AUTOCAST = "bf16_autocast"
"""The forward runs under ``torch.autocast`` with bfloat16."""
UNREDUCED = "unreduced"
"""No reduction at all: what communication costs in total."""
NEEDED = (
    "_bucket_config", "_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper",
    "_comm_hooks", "forward_sync_buffers",
)  # fmt: skip
"""Attributes of DDP without which its reducer cannot be built anew. Torch 2.13 has all of them."""


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
    reasons = {
        "this torch's DDP has no %s" % ", ".join(lacks): bool(lacks),
        "the script has registered a communication hook": bool(getattr(ddp, "_comm_hooks", ())),
        "DDP has mixed_precision": getattr(ddp, "mixed_precision", None) is not None,
        "torch.compile has compiled code with the present buckets": _has_compiled(),
        "DDP delays some reductions (delay_all_reduce_named_params)": bool(ddp._delay_all_reduce_params),
        "the optimizer steps in backward": any(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters()),
        "torch's Python reducer is in use": bool(getattr(ddp, "_use_python_reducer", False)),
        "the loop is inside join()": bool(ddp._join_config.enable),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _has_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"].get("total"))


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
    offered: Dict[str, bool] = {
        VIEWS: not ddp.gradient_as_bucket_view,
        STATIC: not ddp.static_graph and not ddp.find_unused_parameters,
        BUFFERS: _syncs_buffers(ddp) and any(True for _ in ddp.module.buffers()),
        ACCUMULATE: forwards == 1,
        NO_SYNC: forwards > 1,
        HALF: is_single and ddp.device_type != "cpu",  # torch refuses its hook without NCCL or XCCL
        AUTOCAST: is_single and not has_autocast,
        UNREDUCED: True,
    }
    return [BASE, AGAIN, *[CAP + str(cap) for cap in caps], *[name for name, fits in offered.items() if fits]]


def _syncs_buffers(ddp: Any) -> bool:
    """Return whether DDP sends buffers before a forward. Older versions of torch call that ``broadcast_buffers``."""
    return bool(getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", False)))


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
    _set_caps(ddp, script.config, setting)
    ddp.gradient_as_bucket_view = script.views or setting == VIEWS
    ddp.forward_sync_buffers = script.syncs_buffers and setting != BUFFERS
    ddp.require_backward_grad_sync = setting != UNREDUCED
    ddp.find_unused_parameters = script.finds_unused and setting not in (UNUSED, STATIC)
    _build_reducer(ddp, is_static=script.static or setting == STATIC)
    if setting == HALF:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        ddp.register_comm_hook(ddp.process_group, bf16_compress_hook)


def _set_caps(ddp: Any, config: Any, setting: str) -> None:
    if setting.startswith(CAP):
        cap = int(setting[len(CAP) :])
        config = dataclasses.replace(
            config, bucket_bytes_cap=cap, per_bucket_bytes_caps=(), first_bucket_bytes_cap=cap
        )  # fmt: skip
    ddp._bucket_config = config
    ddp.bucket_bytes_cap = config.bucket_bytes_cap
    ddp.bucket_bytes_cap_list = list(config.per_bucket_bytes_caps)
    ddp.bucket_bytes_cap_default = config.first_bucket_bytes_cap < config.bucket_bytes_cap


def _build_reducer(ddp: Any, *, is_static: bool) -> None:
    """Do what DDP's constructor does last, and ``DDP.__setstate__``."""
    ddp._comm_hooks.clear()
    parameters, expects_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expects_sparse, names, is_static)
    ddp._has_rebuilt_buckets = False
    ddp.static_graph = False  # _set_static_graph does nothing if it is set
    if is_static:
        ddp._set_static_graph()
