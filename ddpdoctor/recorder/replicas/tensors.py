"""The tensors of a replica by name, as they are looked at: parameters, gradients, buffers, state of the optimizer."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from ..storage import fingerprint_layout
from .ddp_models import Replica

Row = Tuple[Any, ...]
"""As in the table of a file of fingerprints: what, name, part, shape, dtype."""
Rows = List[Tuple[Row, Any]]
"""With the tensor of each, None where this rank has none now."""
_COMPILED = "_orig_mod."
"""What torch.compile puts into names."""
_SHARDED = "ZeroRedundancyOptimizer"
"""Each rank has the state of some parameters only."""


def named_parameters(replica: Replica) -> List[Tuple[str, Any]]:
    """Return the parameters that DDP holds equal, tied ones once. Empty where the module is gone."""
    module = replica.module()
    found = module.named_parameters() if module is not None else ()
    return [(name.replace(_COMPILED, ""), tensor) for name, tensor in found if name not in replica.ignored]


def parameter_rows(named: List[Tuple[str, Any]]) -> Rows:
    """Return the parameters themselves."""
    return [(_row(fingerprint_layout.PARAMETER, name, "", tensor), tensor) for name, tensor in named]


def gradient_rows(named: List[Tuple[str, Any]]) -> Rows:
    """Return the gradients of parameters that train."""
    return [
        (_row(fingerprint_layout.GRADIENT, name, "", tensor), tensor.grad)
        for name, tensor in named
        if tensor.requires_grad or tensor.grad is not None
    ]


def state_rows(named: List[Tuple[str, Any]], optimizer: Any) -> Rows:
    """Return the tensors of an optimizer's state, where it is whole on each rank."""
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
    """Return the buffers that DDP would send, were it asked to."""
    module = replica.module()
    found = module.named_buffers() if module is not None else ()
    return [
        (_row(fingerprint_layout.BUFFER, name.replace(_COMPILED, ""), "", tensor), tensor)
        for name, tensor in found
        if name not in replica.ignored
    ]


def _row(what: str, name: str, part: str, tensor: Any) -> Row:
    return what, name, part, tuple(tensor.shape), str(tensor.dtype)[6:]  # without "torch."
