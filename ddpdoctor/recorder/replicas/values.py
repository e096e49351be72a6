"""What a rank writes in addition to the fingerprints, as JSON: the fields of ``model.consistency.Values``.

A field that has its default is left out. ``site`` is a frame from ``frames.describe``; ``settings`` is a list of pairs.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, List, Optional, Tuple

from .. import frames
from ..storage import fingerprint_layout
from ..storage.secrets import hide_in_text
from .ddp_models import Replica, all_replicas
from .tensors import held_by

MAX_NAMES = 5
"""Names of parameters that DDP does not reduce. Our choice: enough to recognize the part of the model."""
MAX_NAME = 120
MAX_VALUE = 32
"""Characters of a hyperparameter. Our choice: it cuts only two floats of full precision, as in unusual betas."""
_SCALER_FILE = "grad_scaler.py"
_LONG = ("unfinished", "untrained", "replaced", "unreduced", "unwritten", "site")
"""Fields to leave out when space runs short, the first one first."""
_NO_SETTINGS = frozenset({"params", "param_names", "initial_lr"})

Values = Dict[str, Any]


def model_values(replica: Replica, named: List[Tuple[str, Any]], optimizers: List[Any]) -> Values:
    """Return the values of a model that are known at any time. ``optimizers`` are all that have stepped here."""
    _look_at_wrapper(replica)
    held = {id(tensor): tensor for optimizer in optimizers for tensor in held_by(optimizer)}
    known = _all_parameters()
    strays = [tensor for key, tensor in held.items() if key not in known]
    unheld = [(name, tensor) for name, tensor in named if tensor.requires_grad and id(tensor) not in held]
    unreduced = [name for name, tensor in named if tensor.requires_grad and id(tensor) not in replica.reduced]
    return {
        "reductions": replica.reductions,
        "random": random_digest(replica.on_gpu),
        "dropout": _has_dropout(replica.module()),
        "unfinished": replica.unfinished["names"] if replica.unfinished else [],
        "unreduced": [name[:MAX_NAME] for name in unreduced[:MAX_NAMES]],
        "stray": len(strays),
        "unheld": len(unheld),
        "replaced": _replaced(unheld, strays, optimizers),
        "own_steps": getattr(replica, "own_steps", 0),
        "through": getattr(replica, "through", 0),
        "join": replica.join,
        "hook": replica.hook,
    }


def optimizer_values(optimizer: Any) -> Values:
    """Return the values of an optimizer that is making its step now."""
    return {
        "optimizer": type(optimizer).__name__,
        "settings": settings_of(optimizer.param_groups),
        "scale": _scale(sys._getframe(1)),
    }


def fitted(values: Values) -> Values:
    """Leave out fields with their default, then others until the text fits into a record."""
    kept = {key: value for key, value in values.items() if value or key in ("steps", "reductions", "forwards")}
    while len(json.dumps(kept, separators=(",", ":"))) > fingerprint_layout.TEXT_SIZE:
        if kept.get("settings"):
            kept["settings"] = kept["settings"][: len(kept["settings"]) // 2]
        elif all(kept.pop(name, None) is None for name in _LONG):
            return {}  # otherwise the first of them that was there has been removed
    return kept


def settings_of(param_groups: List[Dict[str, Any]]) -> List[List[str]]:
    """Return the hyperparameters of an optimizer by name. Those of later parameter groups have the number as a prefix.

    A later group lists only its learning rate and what differs from the first group.
    """
    first = _plain_settings(param_groups[0])
    found = [[key, value] for key, value in first.items()]
    for number, group in enumerate(param_groups[1:], 1):
        for key, value in _plain_settings(group).items():
            if key == "lr" or first.get(key) != value:
                found.append(["%d.%s" % (number, key), value])
    return found


def _plain_settings(group: Dict[str, Any]) -> Dict[str, str]:
    texts = {str(key): _text(value) for key, value in group.items() if key not in _NO_SETTINGS}
    return {key: text for key, text in texts.items() if text is not None}


def _text(value: Any) -> Optional[str]:
    """Return a hyperparameter as text, or None if it is not set, is in GPU memory, or is no plain value."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if value is False:
        return None
    if isinstance(value, (tuple, list)):
        return " ".join(_text(part) or "-" for part in value[:4])[:MAX_VALUE]
    if isinstance(value, str):
        return hide_in_text(value[: 4 * MAX_VALUE])[:MAX_VALUE]
    return repr(value)[:MAX_VALUE] if isinstance(value, (int, float)) else None


def random_digest(on_gpu: bool) -> str:
    """Return a digest of torch's random state, including that of the current GPU."""
    import torch

    from .fingerprint import fingerprints

    states = [torch.get_rng_state()]
    if on_gpu and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return "-".join(fingerprints([state])[:6].hex() for state in states)


def _has_dropout(module: Any) -> bool:
    import torch

    kind = torch.nn.modules.dropout._DropoutNd
    return module is not None and any(isinstance(m, kind) and m.training and m.p > 0 for m in module.modules())


def _all_parameters() -> Any:
    modules = [replica.module() for replica in all_replicas()]
    return {id(tensor) for module in modules if module is not None for tensor in module.parameters()}


def _replaced(unheld: List[Tuple[str, Any]], strays: List[Any], optimizers: List[Any]) -> List[str]:
    """Return the first parameters for which an optimizer holds a tensor of the same shape that never had a gradient.

    Such a tensor is probably the parameter from before its layer was replaced. A tensor that is trained elsewhere has a
    gradient or optimizer state.
    """
    if not unheld:
        return []
    used = [optimizer.state for optimizer in optimizers if isinstance(optimizer.state, dict)]
    idle = [_kind(one) for one in strays if one.grad is None and not any(one in state for state in used)]
    found = []
    for name, tensor in unheld:
        if tensor.grad is not None and _kind(tensor) in idle:
            idle.remove(_kind(tensor))
            found.append(name[:MAX_NAME])
    return found[:MAX_NAMES]


def _kind(tensor: Any) -> Tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def _look_at_wrapper(replica: Replica) -> None:
    """Update what can change in DDP. For a model that has ended, the last values stay."""
    ddp = replica.ddp()
    if ddp is not None:
        replica.join = bool(getattr(getattr(ddp, "_join_config", None), "enable", False))
        replica.hook = _hook_of(ddp)


def _hook_of(ddp: Any) -> str:
    """Return the name of the communication hook that the script registered, including torch's own in C++."""
    hooks = getattr(ddp, "_comm_hooks", None)
    if hooks:
        return str(getattr(hooks[-1][0], "__qualname__", type(hooks[-1][0]).__name__))[:MAX_NAME]
    logger = getattr(ddp, "logger", None)
    return str(logger._get_ddp_logging_data().strs_map.get("comm_hook", ""))[:MAX_NAME] if logger is not None else ""


def _scale(frame: Any) -> Optional[float]:
    """Return the scale of the gradient scaler that is making this step; None if there is none or it is on a GPU."""
    depth = 0
    while frame is not None and depth < frames.MAX_DEPTH:
        if frame.f_code.co_name == "step" and frame.f_code.co_filename.endswith(_SCALER_FILE):
            scale = getattr(frame.f_locals.get("self"), "_scale", None)
            return float(scale) if scale is not None and scale.device.type == "cpu" else None
        frame = frame.f_back
        depth += 1
    return None
