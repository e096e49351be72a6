"""Sets torch's debug level DETAIL if ``wrap`` asks for it: on every job, or by default on jobs that use only Gloo.

DETAIL makes the host wait for all ranks before each collective, so that it cannot run ahead of a GPU. Only the script
says which backend it uses, in ``init_process_group``. All ranks pass the same one, so all decide the same.
"""

from __future__ import annotations

import os
from typing import Any, Optional, Set

from ..state import guarded
from ..wrappers import wraps

VARIABLE = "DDPDOCTOR_DETAIL"
"""Set to ``always`` or ``gloo`` if ``wrap`` asks for DETAIL. It affects only Pythons that have a recorder."""
ON_GLOO = "gloo"
_is_withheld = False
"""Whether this module has turned DETAIL off for a group that uses another backend."""


def turn_on(distributed: Any) -> None:
    """Set the level after torch has read its own variable. A script that sets another level later overrides it.

    It depends on no other part of the recorder, because if only some ranks had it, all would wait in init.
    """
    if os.environ.get(VARIABLE):
        distributed.set_debug_level(distributed.DebugLevel.DETAIL)


def patch(c10d: Any) -> None:
    """Decide again, right before torch makes the default group. Subgroups follow it, whatever their backend."""
    original = c10d.init_process_group
    if os.environ.get(VARIABLE) != ON_GLOO:
        return

    @wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("backend",), args), **kwargs)
        _decide(c10d, given.get("backend"), given.get("device_id"))
        return original(*args, **kwargs)

    c10d.init_process_group = init_process_group


@guarded("debug level")
def _decide(c10d: Any, backend: Any, device_id: Any) -> None:
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


def backends_of(c10d: Any, backend: Any, device_id: Any) -> Set[str]:
    """Return the names of the backends that ``init_process_group`` will use.

    torch 2.6 to 2.15 take a backend's name, or ``cpu:gloo,cuda:nccl``. Without a name torch uses the backend of the
    device's type, and without a device that of the accelerator in the machine.
    """
    if backend is None and device_id is not None:
        backend = c10d.Backend.default_device_backend_map.get(_device_type(device_id))
    name = str(backend or "undefined").lower()
    if name == "undefined":
        chosen = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
        return {str(one).lower() for one in chosen.values()}
    return {part.rpartition(":")[2].strip() for part in name.split(",")}


def _device_type(device_id: Any) -> Optional[str]:
    """Return the type of a device, such as ``cuda``. A plain number means a device of the accelerator."""
    if isinstance(device_id, int):
        import torch

        return str(torch.accelerator.current_accelerator().type)
    return str(getattr(device_id, "type", "")) or None
