"""Builds the user's model with the user's function, and describes what DDP's constructor would receive."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import ModelSeen, TensorSeen
from ddpdoctor.probes.user_code import users_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_LR, DEFAULT_MOMENTUM = 0.01, 0.9
"""Our choice: SGD with momentum, so that it has state, for a model that came without an optimizer."""
RETURNS = "Let it return a torch.nn.Module, or (module, optimizer), or (module, optimizer, loss_fn)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What the user's function returned. ``loss_fn(output, target)`` is None if it returned none."""

    module: Any
    optimizer: Any
    loss_fn: Callable[..., Any] | None


def build(builder: Callable[..., Any], spec: str, device: Any) -> Built:
    """Call the user's function and return what it built, with the model on ``device``. Raises ``UserError``."""
    with users_turn(f"--model {spec} failed"):
        made = builder()
    parts = made if isinstance(made, tuple) else (made,)
    _check_parts(spec, parts)
    module, optimizer, loss_fn = (*parts, None, None)[:3]
    with users_turn(f"--model {spec}: the model cannot be moved to {device}"):
        module.to(device)
    return Built(module=module, optimizer=optimizer or _default_optimizer(module, spec), loss_fn=loss_fn)


def see_model(module: Any, group: str) -> ModelSeen:
    """Return what DDP's constructor would receive: parameters, then buffers, in order."""
    tensors = tuple(_tensors(module))
    rows = [[one.name, one.shape, one.dtype, one.requires_grad, one.is_buffer] for one in tensors]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return ModelSeen(group=group, digest=digest, count=len(tensors), tensors=tensors, site=None)


def quiet_dropout(module: Any) -> int:
    """Set the probability of every dropout layer to 0, and return how many there were.

    Attention and recurrent layers store it as ``dropout``. Functional dropout inside a forward is not reached.
    """
    from torch import nn

    found = 0
    for one in module.modules():
        name = "p" if isinstance(one, nn.modules.dropout._DropoutNd) else "dropout"  # noqa: SLF001 - their only base
        share = getattr(one, name, None)
        if isinstance(share, float) and share > 0:
            setattr(one, name, 0.0)
            found += 1
    return found


def _tensors(module: Any) -> Iterator[TensorSeen]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for is_buffer, named in ((False, module.named_parameters()), (True, module.named_buffers())):
        for name, tensor in named:
            if name not in ignored:
                yield TensorSeen(
                    name=name,
                    shape=_shape(tensor),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    requires_grad=bool(tensor.requires_grad),
                    is_buffer=is_buffer,
                )


def _shape(tensor: Any) -> tuple[int, ...] | None:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a lazy module's parameter has no shape yet
        return None


def _check_parts(spec: str, parts: tuple[Any, ...]) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    module = parts[0] if parts else None
    if isinstance(module, DistributedDataParallel):
        raise UserError(
            f"--model {spec} returned a model that is already in DDP",
            help="Return the bare module: ddpdoctor wraps it in DDP.",
        )
    if len(parts) not in {1, 2, 3} or not isinstance(module, torch.nn.Module):
        raise UserError(f"--model {spec} returned {_kinds(parts)}, not a model", help=RETURNS)
    if len(parts) > 1 and not (parts[1] is None or isinstance(parts[1], torch.optim.Optimizer)):
        raise UserError(f"--model {spec} returned {_kinds(parts)}: the second is not a torch optimizer", help=RETURNS)
    if len(parts) > 2 and not (parts[2] is None or callable(parts[2])):
        raise UserError(f"--model {spec} returned {_kinds(parts)}: the third is not a function", help=RETURNS)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"--model {spec} returned a model without trainable parameters", help="DDP refuses such a model."
        )


def _kinds(parts: tuple[Any, ...]) -> str:
    names = [type(part).__name__ for part in parts]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _default_optimizer(module: Any, spec: str) -> Any:
    import torch

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with users_turn(f"--model {spec}: SGD cannot train it"):
        return torch.optim.SGD(trained, lr=DEFAULT_LR, momentum=DEFAULT_MOMENTUM)
