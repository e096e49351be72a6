"""Models that an optimizer trains and that no DDP holds: of a GAN, of a script that averages gradients by hand.

Whether they are meant to be equal on all ranks is judged from what they do: where all ranks step with the same
gradients, these were exchanged. So they are looked at as the replicas of DDP are, at the same few steps.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Tuple

from ..calls import groups
from ..state import here

MAX_MODELS = 4
"""Of a process. Ours: a GAN has one or two beside DDP, and a script with one optimizer for each parameter very many."""
MAX_DEPTH = 24
"""Frames out from the step in which the model is looked for. Ours: trainers call their optimizers from ten or so."""
MAX_VALUES = 200
"""Variables of a frame that are looked at for modules. Ours."""

Named = List[Tuple[str, Any]]


class _Held:
    """Stands for a module: parameters of an optimizer, by the names that they have in the script's modules."""

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
    """What is kept of one such model: what ``replicas.Replica`` has, as far as its points need it."""

    ignored: FrozenSet[str] = frozenset()
    on_gpu = join = False
    hook = ""
    unfinished = None
    syncs_buffers = True
    """There are none that anybody would look at."""

    def __init__(self, named: Named, number: int) -> None:
        self.group = str(groups.default().group_name)
        self.ranks = tuple(range(int(groups.c10d.get_world_size())))
        self.rank = int(groups.c10d.get_rank())
        self.number = -number
        """Below 0: it is no DDP model."""
        self.reduced = frozenset(id(tensor) for _, tensor in named)
        self.forwards = self.unreduced_forwards = self.reductions = self.optimizers = 0
        self.before_step = (0, 0)
        self.last_stepped: Any = None
        self.own_steps = 0
        """Steps right after a backward that reached no DDP model: it is trained by a loss of its own."""
        self.through = 0
        """Backwards that reached a DDP model, and this one as well, or while it was frozen."""
        self._module = _Held(named)
        self._mark: Any = None

    def ddp(self) -> Any:
        """Return that there is no DDP."""
        return None

    def module(self) -> Any:
        """Return what stands for the module."""
        return self._module

    def begin_backward(self) -> None:
        """Remember a gradient, to tell whether a backward reaches this model."""
        self._mark = self._now()

    def is_reached(self) -> bool:
        """Return whether the backward has added to gradients of this model."""
        return bool(self._now() != self._mark)

    def is_frozen(self) -> bool:
        """Return whether a parameter of it gets no gradients at the point."""
        first = next(self._module.parameters(), None)
        return first is not None and not first.requires_grad

    def _now(self) -> Any:
        first = next(self._module.parameters(), None)
        grad = first.grad if first is not None else None
        return None if grad is None else (id(grad), grad._version)


class _Kept:
    """The models of this process; a forked child has none of its parent's."""

    ring: Any = None
    models: List[Unwrapped] = []  # noqa: RUF012 - replaced, never changed, where another ring begins
    last_reduced = True
    """The last backward reached a DDP model, or it was not looked at."""


_kept = _Kept()


def all_models() -> List[Unwrapped]:
    """Return the models that were found so far."""
    return _kept.models if _kept.ring is here.ring else []


def may_be_several() -> bool:
    """Return whether there are other ranks at all with which a model could be compared."""
    group = groups.default() if here.ring is not None else None
    return group is not None and group.size() > 1


def find(tensors: List[Any], known: Any) -> Optional[Unwrapped]:
    """Return the model of parameters that an optimizer holds and that are in no DDP; None where it is not looked at.

    ``known`` are the ids of parameters of DDP models.
    """
    import torch

    if _kept.ring is not here.ring:
        _kept.ring, _kept.models, _kept.last_reduced = here.ring, [], True
    own = [tensor for tensor in tensors if id(tensor) not in known]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in own)
    if not own or not plain or len(_kept.models) >= MAX_MODELS:
        return None
    found = Unwrapped(_named(own), len(_kept.models) + 1)
    _kept.models = [*_kept.models, found]
    return found


def _named(tensors: List[Any]) -> Named:
    """Return parameters with names: the script's variable and the path in its module, else their place."""
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
    """Return the modules that a frame's variables name, and those of the object whose method it runs."""
    import torch

    local = frame.f_locals
    itself = getattr(local.get("self"), "__dict__", {})
    for values in (local, itself):
        for name, value in list(values.items())[:MAX_VALUES]:
            if isinstance(value, torch.nn.Module) and name != "self":
                yield name, value


def backward_begins() -> None:
    """Prepare to tell which of these models a backward reaches."""
    for model in all_models():
        model.begin_backward()


def backward_ended(reached: List[Unwrapped], any_reduced: bool) -> None:
    """Note which models a backward has reached, and whether it has reached a DDP model."""
    _kept.last_reduced = any_reduced
    if any_reduced:
        for model in _kept.models:
            model.through += model in reached or model.is_frozen()


def stepped(model: Unwrapped, steps: int) -> None:
    """Note a step of the model's optimizer. There is no reduction that could be counted apart from steps."""
    model.reductions = steps
    model.own_steps += not _kept.last_reduced
