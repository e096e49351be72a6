"""Sets torch's debug level DETAIL if ``wrap`` asks for it, and makes it safe on Gloo, where it breaks correct jobs.

By default only jobs on Gloo get it: the host waits for all ranks before each collective, and cannot run ahead of a GPU.
Defects of torch 2.13 concern Gloo groups that DETAIL has wrapped: DDP's constructor casts the wrapper to Gloo's own
class in order to log (SIGSEGV). And the wrapper compares sequence numbers, which send and recv move only on two ranks:
the next collective fails on all with "Detected mismatch". Point-to-point calls use the wrapper's helper group instead.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any, Callable, Dict, Optional, Set, Tuple

from . import hooks
from .state import guarded, pass_on
from .wrappers import around, unless

constructing = threading.local()  # the group of the DDP model under construction, if the script named one
# By id of a wrapper: the wrapper, kept so that its id is not reused, and its helper group.
helpers: Dict[int, Tuple[Any, Any]] = {}
_c10d: Any = None


def make_safe(module: Any) -> None:
    """Skip DDP's logging call on a wrapped Gloo group, and remember each wrapper's helper group when torch makes it."""
    global _c10d
    _c10d = module

    def keeping_helper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _create_process_group_wrapper(*args: Any, **kwargs: Any) -> Any:
            made = []
            gloo = module.ProcessGroupGloo

            def make(*gloo_args: Any, **gloo_kwargs: Any) -> Any:
                made.append(gloo(*gloo_args, **gloo_kwargs))
                return made[-1]

            wrapped = args[0] if args else kwargs.get("wrapped_pg")
            is_gloo = isinstance(wrapped, gloo)
            module.ProcessGroupGloo = make
            try:
                wrapper = original(*args, **kwargs)
            finally:
                module.ProcessGroupGloo = gloo
            if is_gloo and len(made) == 1:
                helpers[id(wrapper)] = (wrapper, made[0])
            return wrapper

        return _create_process_group_wrapper

    if hasattr(module, "ProcessGroupGloo"):
        hooks.put(module, "_create_process_group_wrapper", keeping_helper)
    logger = getattr(module, "Logger", None)
    if logger is None:
        import torch._C._distributed_c10d as native

        logger = getattr(native, "Logger", None)

    @guarded("detail logger")
    def is_given_gloo(*unused: Any, **also_unused: Any) -> bool:
        return _gloo_wrapper(getattr(constructing, "group", None) or _c10d._get_default_group()) is not None

    hooks.put(logger, "set_construction_data_and_log", unless(is_given_gloo))


def _gloo_wrapper(group: Any) -> Any:
    wrapper = getattr(_c10d, "_ProcessGroupWrapper", None)
    if wrapper is None or "gloo" not in str(_c10d.get_backend(group)).lower():
        return None
    try:
        backends = [group._get_backend(device) for device in group._device_types]
    except Exception as error:  # noqa: BLE001 - an older torch: the group itself may be the wrapper
        pass_on(error)
        backends = [group]
    return next((backend for backend in backends if isinstance(backend, wrapper)), None)


def forget_helpers(group: Any) -> None:
    """Drop the helper of a group that is destroyed. Others keep theirs: all members must make calls the same way."""
    if group is None or group is _c10d.GroupMember.WORLD:
        helpers.clear()
    elif helpers:
        helpers.pop(id(_gloo_wrapper(group)), None)


def reroute(op: str, group: Any, tensor: Any, peer: Optional[int], tag: int) -> Optional[Callable[[], Any]]:
    """Return what to call instead on a wrapped Gloo group, or None. ``peer`` is a rank of the group, None for any."""
    helper = helpers.get(id(_gloo_wrapper(group)), (None, None))[1]
    if helper is None or tensor.device.type != "cpu" or peer == group.rank():
        return None
    if tensor.is_complex():
        tensor = _c10d.torch.view_as_real(tensor)

    def call() -> Any:
        if op in ("send", "isend"):
            work = helper.send([tensor], peer, tag)
        else:
            work = helper.recv_anysource([tensor], tag) if peer is None else helper.recv([tensor], peer, tag)
        if op in ("isend", "irecv"):
            return work
        work.wait()
        if op == "send":
            return None
        return int(_c10d.get_global_rank(group, work._source_rank() if peer is None else peer))

    return call


OPERATIONS = frozenset(("send", "isend", "recv", "irecv"))
# Set to ``always`` or ``gloo`` if ``wrap`` asks for DETAIL. It affects only Pythons that have a recorder.
VARIABLE = "DDPDOCTOR_DETAIL"
ON_GLOO = "gloo"
_is_withheld = False  # whether this module has turned DETAIL off for a group that uses another backend


def turn_on(distributed: Any) -> None:
    """Set the level after torch has read its variable. Uses no other part of us: all ranks have it or none."""
    if os.environ.get(VARIABLE):
        distributed.set_debug_level(distributed.DebugLevel.DETAIL)


def patch_init(c10d: Any) -> None:
    """Decide again, right before torch makes the default group. Subgroups follow it, whatever their backend."""
    if os.environ.get(VARIABLE) != ON_GLOO:
        return

    @guarded("debug level")
    def decide(backend: Any = None, *unused: Any, device_id: Any = None, **also_unused: Any) -> None:
        global _is_withheld
        import torch.distributed as levels

        level = levels.get_debug_level()
        if backends_of(c10d, backend, device_id) == {"gloo"}:
            if _is_withheld and level == levels.DebugLevel.OFF:
                levels.set_debug_level(levels.DebugLevel.DETAIL)
            _is_withheld = False
        elif level == levels.DebugLevel.DETAIL:
            levels.set_debug_level(levels.DebugLevel.OFF)
            _is_withheld = True

    c10d.init_process_group = around(before=decide)(c10d.init_process_group)


def backends_of(c10d: Any, backend: Any, device_id: Any) -> Set[str]:
    """Return the names of the backends that ``init_process_group`` will use."""
    # torch 2.6 to 2.15 take a backend's name, or ``cpu:gloo,cuda:nccl``. Without a name torch uses the backend of the
    # device's type, and without a device that of the accelerator in the machine.
    if backend is None and device_id is not None:
        if isinstance(device_id, int):  # a device of the accelerator
            import torch

            kind = str(torch.accelerator.current_accelerator().type)
        else:
            kind = str(getattr(device_id, "type", ""))
        backend = c10d.Backend.default_device_backend_map.get(kind or None)
    name = str(backend or "undefined").lower()
    if name == "undefined":
        chosen = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
        return {str(value).lower() for value in chosen.values()}
    return {part.rpartition(":")[2].strip() for part in name.split(",")}
