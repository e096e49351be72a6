"""The tensors of a replica that are fingerprinted, by name: parameters, gradients, buffers, state of the optimizer."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ..storage import fingerprint_layout
from .ddp_models import Replica

Row = Tuple[Any, ...]
"""As in the table of a fingerprint file: what, name, part, shape, dtype."""
Rows = List[Tuple[Row, Any]]
"""Each row with its tensor, or None if this rank has none now."""
_COMPILED = "_orig_mod."
"""The part that torch.compile inserts into names."""
_SHARDED = "ZeroRedundancyOptimizer"
"""With this optimizer each rank has the state of only some parameters."""


def held_by(optimizer: Any) -> List[Any]:
    """Return the parameters that an optimizer changes."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def named_parameters(replica: Replica) -> List[Tuple[str, Any]]:
    """Return the parameters that DDP keeps equal, tied ones once. Empty if the module is gone."""
    module = replica.module()
    found = module.named_parameters() if module is not None else ()
    return [(name.replace(_COMPILED, ""), tensor) for name, tensor in found if name not in replica.ignored]


def parameter_rows(named: List[Tuple[str, Any]]) -> Rows:
    """Return the parameters themselves."""
    return [(_row(fingerprint_layout.PARAMETER, name, "", tensor), tensor) for name, tensor in named]


def gradient_rows(named: List[Tuple[str, Any]]) -> Rows:
    """Return the gradients of the parameters that are trained."""
    return [
        (_row(fingerprint_layout.GRADIENT, name, "", tensor), tensor.grad)
        for name, tensor in named
        if tensor.requires_grad or tensor.grad is not None
    ]


def state_rows(named: List[Tuple[str, Any]], optimizer: Any) -> Rows:
    """Return the tensors of an optimizer's state; empty if the state is sharded over ranks."""
    import torch

    if any(kind.__name__ == _SHARDED for kind in type(optimizer).__mro__):
        return []
    states: Dict[Any, Any] = optimizer.state
    found = []
    for name, tensor in named:
        parts = states.get(tensor)
        for part, value in parts.items() if isinstance(parts, dict) else ():
            if isinstance(value, torch.Tensor):
                found.append((_row(fingerprint_layout.STATE, name, str(part), value), value))
    return found


def buffer_rows(replica: Replica) -> Rows:
    """Return the buffers that DDP would broadcast if ``broadcast_buffers`` is on."""
    module = replica.module()
    found = module.named_buffers() if module is not None else ()
    return [
        (_row(fingerprint_layout.BUFFER, name.replace(_COMPILED, ""), "", tensor), tensor)
        for name, tensor in found
        if name not in replica.ignored
    ]


def _row(what: str, name: str, part: str, tensor: Any) -> Row:
    return what, name, part, tuple(tensor.shape), str(tensor.dtype)[6:]  # without "torch."
