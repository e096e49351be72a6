"""Makes TORCH_DISTRIBUTED_DEBUG=DETAIL safe on Gloo, where torch 2.13 breaks correct jobs.

It works around two defects of torch, both only for Gloo groups that DETAIL has wrapped:

- DDP's constructor casts the wrapper to Gloo's own class in order to log, which ends in SIGSEGV.
- The wrapper compares sequence numbers. send and recv move them only on the two ranks concerned, so the next collective
  fails on all ranks with "Detected mismatch". Point-to-point calls use the wrapper's helper group instead. It has the
  same members and its own connections, and its numbers are not compared.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable, Dict, Optional, Tuple

from .. import hooks
from ..state import guarded, pass_on

constructing = threading.local()
"""The group of the DDP model under construction, if the script named one."""
_helpers: Dict[int, Tuple[Any, Any]] = {}
"""By id of a wrapper: the wrapper, kept so that its id is not reused, and its helper group."""
_c10d: Any = None


def make_safe(module: Any) -> None:
    """Skip DDP's logging call on a wrapped Gloo group. The call does nothing but log."""
    logger = getattr(module, "Logger", None)
    if logger is None:
        import torch._C._distributed_c10d as native

        logger = getattr(native, "Logger", None)
    hooks.put(logger, "set_construction_data_and_log", _passing_gloo_by)


def _passing_gloo_by(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_construction_data_and_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_unsafe():
            return None
        return original(self, *args, **kwargs)

    return set_construction_data_and_log


@guarded("detail logger")
def _is_unsafe() -> bool:
    """Return whether DDP's logger would be given a wrapped Gloo group."""
    return _gloo_wrapper(getattr(constructing, "group", None) or _c10d._get_default_group()) is not None


def _gloo_wrapper(group: Any) -> Any:
    """Return the wrapper around Gloo in a group, or None."""
    wrapper = getattr(_c10d, "_ProcessGroupWrapper", None)
    if wrapper is None or "gloo" not in str(_c10d.get_backend(group)).lower():
        return None
    try:
        backends = [group._get_backend(device) for device in group._device_types]
    except Exception as error:  # noqa: BLE001 - an older torch: the group itself may be the wrapper
        pass_on(error)
        backends = [group]
    return next((backend for backend in backends if isinstance(backend, wrapper)), None)


def keep_helpers(module: Any) -> None:
    """Remember the helper group of each wrapper when torch makes them."""
    global _c10d
    _c10d = module
    if hasattr(module, "ProcessGroupGloo"):
        hooks.put(module, "_create_process_group_wrapper", functools.partial(_keeping_helper, module))


def _keeping_helper(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
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
            _helpers[id(wrapper)] = (wrapper, made[0])
        return wrapper

    return _create_process_group_wrapper


def forget_helpers(group: Any) -> None:
    """Drop the helper of a group that is about to be destroyed (of all groups, if it is the default one).

    Then the group is really freed. Other groups keep their helpers, because all members must make calls the same way.
    """
    if group is None or group is _c10d.GroupMember.WORLD:
        _helpers.clear()
    elif _helpers:
        _helpers.pop(id(_gloo_wrapper(group)), None)


def is_needed() -> bool:
    """Return whether DETAIL has wrapped any Gloo group."""
    return bool(_helpers)


def reroute(op: str, group: Any, tensor: Any, peer: Optional[int], tag: int) -> Optional[Callable[[], Any]]:
    """Return what to call instead of a point-to-point call on a wrapped Gloo group, or None if that is not needed.

    ``peer`` is the other rank within ``group``, or None for a receive from any rank.
    """
    helper = _helpers.get(id(_gloo_wrapper(group)), (None, None))[1]
    if helper is None or tensor.device.type != "cpu" or peer == group.rank():
        return None
    if tensor.is_complex():
        tensor = _c10d.torch.view_as_real(tensor)
    return functools.partial(OPERATIONS[op], helper, group, tensor, peer, tag)


def _isend(helper: Any, group: Any, tensor: Any, peer: Optional[int], tag: int) -> Any:
    return helper.send([tensor], peer, tag)


def _send(helper: Any, group: Any, tensor: Any, peer: Optional[int], tag: int) -> None:
    _isend(helper, group, tensor, peer, tag).wait()


def _irecv(helper: Any, group: Any, tensor: Any, peer: Optional[int], tag: int) -> Any:
    return helper.recv_anysource([tensor], tag) if peer is None else helper.recv([tensor], peer, tag)


def _recv(helper: Any, group: Any, tensor: Any, peer: Optional[int], tag: int) -> int:
    work = _irecv(helper, group, tensor, peer, tag)
    work.wait()
    return int(_c10d.get_global_rank(group, work._source_rank() if peer is None else peer))


OPERATIONS = {"send": _send, "isend": _isend, "recv": _recv, "irecv": _irecv}
