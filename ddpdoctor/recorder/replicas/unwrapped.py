"""Models that an optimizer trains without DDP, as in a GAN or a script that averages gradients by hand.

Whether they should be equal on all ranks is judged from what they do. If all ranks step with the same gradients, the
gradients were exchanged. So these models are fingerprinted like DDP's replicas, at the same steps.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Tuple

from ..calls import groups
from ..state import here
from ..training.ddp_constructor import pack_names

MAX_MODELS = 4
"""Per process. Our choice: a GAN has one or two besides DDP, and one optimizer per parameter would make very many."""
MAX_DEPTH = 24
"""Frames above the step that are searched for the model. Our choice: trainers call their optimizers ten or so deep."""
MAX_VALUES = 200
"""Variables of a frame that are searched for modules. Our choice."""

Named = List[Tuple[str, Any]]


class _Held:
    """Replaces a module: parameters of an optimizer, by their names in the script's modules."""

    def __init__(self, named: Named) -> None:
        self._held = [(name, weakref.ref(tensor)) for name, tensor in named]

    def named_parameters(self) -> Iterator[Tuple[str, Any]]:
        for name, reference in self._held:
            tensor = reference()
            if tensor is not None:
                yield name, tensor

    def parameters(self) -> Iterator[Any]:
        return (tensor for _, tensor in self.named_parameters())

    def modules(self) -> Iterator[Any]:
        return iter(())


class Unwrapped:
    """One such model, with the parts of ``ddp_models.Replica`` that ``StepFingerprints`` needs."""

    ignored: FrozenSet[str] = frozenset()
    on_gpu = join = False
    hook = ""
    unfinished = None
    syncs_buffers = True
    """True, because there are no buffers to compare."""

    def __init__(self, named: Named, number: int) -> None:
        self.group = str(groups.default().group_name)
        self.ranks = tuple(range(int(groups.c10d.get_world_size())))
        self.rank = int(groups.c10d.get_rank())
        self.number = -number
        """Negative, because it is no DDP model."""
        self.reduced = frozenset(id(tensor) for _, tensor in named)
        self.forwards = self.unreduced_forwards = self.reductions = self.optimizers = 0
        self.before_step = (0, 0)
        self.last_stepped: Any = None
        self.own_steps = 0
        """Steps right after a backward that reached no DDP model, so the model has its own loss."""
        self.through = 0
        """Backwards that reached a DDP model and also this one, or that ran while this one was frozen."""
        self._module = _Held(named)
        self._mark: Any = None

    def ddp(self) -> Any:
        """Return None, because there is no DDP."""
        return None

    def module(self) -> Any:
        """Return the replacement for the module."""
        return self._module

    def begin_backward(self) -> None:
        """Remember a gradient, to see later whether a backward reaches this model."""
        self._mark = self._now()

    def is_reached(self) -> bool:
        """Return whether the backward has added to gradients of this model."""
        return bool(self._now() != self._mark)

    def is_frozen(self) -> bool:
        """Return whether its first parameter gets no gradients at present."""
        first = next(self._module.parameters(), None)
        return first is not None and not first.requires_grad

    def _now(self) -> Any:
        first = next(self._module.parameters(), None)
        grad = first.grad if first is not None else None
        return None if grad is None else (id(grad), grad._version)


class _Kept:
    """The models of this process. They belong to one ring, so a forked child does not use its parent's."""

    ring: Any = None
    models: List[Unwrapped] = []  # noqa: RUF012 - replaced, never changed in place
    last_reduced = True
    """Whether the last backward reached a DDP model, or was not checked."""


_kept = _Kept()


def all_models() -> List[Unwrapped]:
    """Return the models that were found so far."""
    return _kept.models if _kept.ring is here.ring else []


def may_be_several() -> bool:
    """Return whether there are other ranks with which a model could be compared."""
    group = groups.default() if here.ring is not None else None
    return group is not None and group.size() > 1


def find(tensors: List[Any], known: Any) -> Optional[Unwrapped]:
    """Make a model of those tensors of an optimizer that are in no DDP model. Return None if it is not to be recorded.

    ``known`` holds the ids of the DDP models' parameters.
    """
    import torch

    if _kept.ring is not here.ring:
        _kept.ring, _kept.models, _kept.last_reduced = here.ring, [], True
    own = [tensor for tensor in tensors if id(tensor) not in known]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in own)
    if not own or not plain or len(_kept.models) >= MAX_MODELS:
        return None
    named = _named(own)
    found = Unwrapped(named, len(_kept.models) + 1)
    _kept.models = [*_kept.models, found]
    if here.ring is not None:
        here.ring.note({"k": "named", "rows": pack_names(named)})
    return found


def _named(tensors: List[Any]) -> Named:
    """Return parameters with names: the script's variable and the path in its module, or else their position."""
    names: Dict[int, str] = {}
    wanted = {id(tensor) for tensor in tensors}
    frame: Any = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None or len(names) == len(wanted):
            break
        for variable, module in _modules_of(frame):
            for name, tensor in module.named_parameters(variable):
                if id(tensor) in wanted:
                    names.setdefault(id(tensor), name)
        frame = frame.f_back
    return [(names.get(id(tensor), "parameter %d" % i), tensor) for i, tensor in enumerate(tensors)]


def _modules_of(frame: Any) -> Iterator[Tuple[str, Any]]:
    """Yield the modules in a frame's variables, and those in attributes of the object whose method it runs."""
    import torch

    local = frame.f_locals
    itself = getattr(local.get("self"), "__dict__", {})
    for values in (local, itself):
        for name, value in list(values.items())[:MAX_VALUES]:
            if isinstance(value, torch.nn.Module) and name != "self":
                yield name, value


def backward_begins() -> None:
    """Prepare to find out which of these models a backward reaches."""
    for model in all_models():
        model.begin_backward()


def backward_ended(reached: List[Unwrapped], any_reduced: bool) -> None:
    """Note which models a backward has reached, and whether it has reached a DDP model."""
    _kept.last_reduced = any_reduced
    if any_reduced:
        for model in _kept.models:
            model.through += model in reached or model.is_frozen()


def stepped(model: Unwrapped, steps: int) -> None:
    """Note a step of the model's optimizer. Steps also count as reductions, because there is no reducer to count."""
    model.reductions = steps
    model.own_steps += not _kept.last_reduced
