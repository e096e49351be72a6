"""Fingerprints the parameters that several ranks of a device mesh hold in common.

These are the shards of hybrid FSDP in its replicating dimension, DTensors placed as ``Replicate``, and plain parameters
in modules that were passed to ``parallelize_module``. They are fingerprinted at an optimizer's steps, on the same
schedule as DDP's replicas, and compared among the ranks that hold the same part. Plain shards are not compared.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import weakref
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from .. import frames, hooks
from ..state import check_every, guarded, here
from ..storage import fingerprint_layout
from ..wrappers import wraps
from . import schedule, tensors
from .files import FingerprintFiles
from .fingerprinting import fingerprints_of, may_fingerprint, write
from .schedule import StepCounter
from .tensors import Rows
from .values import optimizer_values

Sharing = Tuple[str, Tuple[int, ...]]
"""The dimensions of the mesh in which a tensor is the same, "dp" or "dp+tp", and the ranks that hold it, sorted."""
Shared = Dict[Sharing, List[Tuple[str, Any]]]
"""Names and weak references to parameters, by the ranks that share them."""

MAX_MODULES = 4096
"""Modules that are kept. Our choice: enough for a model of a thousand blocks, each passed with its parts."""

_PLACES = {"_fully_shard": "fully_shard", "api": "parallelize_module", "_api": "distribute_module"}
"""By the last part of a module's name: its function that distributes modules over a mesh."""

_modules: List[Tuple[Any, Any]] = []
"""Weak references to modules that were distributed over a mesh, each with the mesh of its plain parameters, or None."""
_steppers: Any = weakref.WeakKeyDictionary()
"""By optimizer."""
_numbers = itertools.count(1)


class _Stepper(StepCounter):
    """What is kept about an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_numbers)
        self.held: FrozenSet[int] = frozenset()
        """Ids of its parameters when ``shared`` was found. It keeps them alive, so no other tensor gets their ids."""
        self.shared: Shared = {}
        self.gradients: Dict[Sharing, Tuple[Rows, Any]] = {}
        self.files: Dict[Sharing, FingerprintFiles] = {}


@guarded("mesh step begins")
def before_step(optimizer: Any, *unused: Any) -> None:
    """Fingerprint the gradients that a step is made with, if the step is due."""
    if not _modules or not here.is_rank:
        return
    stepper = _steppers.get(optimizer)
    if stepper is None:
        stepper = _steppers[optimizer] = _Stepper()
    if stepper.begins() and may_fingerprint():
        began_s = time.perf_counter()
        for sharing, named in _shared(stepper, optimizer):
            rows = _local(tensors.gradient_rows([(name, p) for name, p in named if _has_gradient(p)]))
            stepper.gradients[sharing] = (rows, fingerprints_of(rows))
        schedule.spend(began_s)


@guarded("mesh step ends")
def after_step(optimizer: Any) -> None:
    """Write the fingerprints after a step, if the step is due."""
    stepper = _steppers.get(optimizer) if _modules else None
    if stepper is None or not stepper.ended():
        return
    if may_fingerprint():
        began_s = time.perf_counter()
        for sharing, named in _shared(stepper, optimizer):
            _write(stepper, sharing, named, optimizer)
        schedule.spend(began_s)
    stepper.gradients = {}


def _write(stepper: _Stepper, sharing: Sharing, named: List[Tuple[str, Any]], optimizer: Any) -> None:
    gradients, taken = stepper.gradients.get(sharing, ([], None))
    rows = _local(tensors.parameter_rows(named) + tensors.state_rows(named, optimizer))
    values = dict(
        optimizer_values(optimizer),
        steps=stepper.steps,
        reductions=stepper.steps,
        forwards=1,
        every=schedule.distance(),
    )
    values["site"] = frames.describe_user(sys._getframe(1))
    files = stepper.files.get(sharing)
    if files is None:
        files = stepper.files[sharing] = FingerprintFiles(_about(stepper, sharing))
    before = taken.value() if taken is not None else b""
    write(files, stepper.steps, values, gradients + rows, before + fingerprints_of(rows).value())


def _about(stepper: _Stepper, sharing: Sharing) -> Dict[str, Any]:
    """Return a stream's table without its rows."""
    from ..calls import groups

    dims, ranks = sharing
    return {
        "clock": fingerprint_layout.STEP, "group": fingerprint_layout.MESH + dims, "ranks": list(ranks), "model": 1,
        "optimizer": stepper.number, "rank": int(groups.c10d.get_rank()),
    }  # fmt: skip


def _shared(stepper: _Stepper, optimizer: Any) -> List[Tuple[Sharing, List[Tuple[str, Any]]]]:
    """Return the parameters of an optimizer that other ranks hold too, by the ranks that share them.

    Their names are found only once. Later, modules may have been garbage collected on some ranks and not on others.
    """
    held = frozenset(id(tensor) for tensor in tensors.held_by(optimizer))
    if held != stepper.held:
        stepper.held, stepper.shared = held, _find_shared(held)
    return [
        (sharing, [(name, tensor) for name, reference in named if (tensor := reference()) is not None])
        for sharing, named in stepper.shared.items()
    ]


def _find_shared(held: FrozenSet[int]) -> Shared:
    found: Shared = {}
    for name, tensor, mesh in _named(held):
        sharing = _sharing_of(tensor, mesh) if tensor.requires_grad else None
        if sharing is not None:
            found.setdefault(sharing, []).append((name, weakref.ref(tensor)))
    return found


def _sharing_of(tensor: Any, mesh: Any) -> Optional[Sharing]:
    """Return the ranks that hold the same tensor, or None if it cannot be compared.

    Values that ranks compute separately have equal bits on a CPU. GPU kernels may add in any order, so on GPUs only
    tensors that are also sharded are compared, as in hybrid FSDP, because their gradients are reduced.
    """
    if is_placed(tensor):
        reduced = any(placement.is_shard() for placement in tensor.placements)
        return sharing_of(tensor) if reduced or tensor.device.type == "cpu" else None
    is_plain = type(tensor).__name__ == "Parameter" and tensor.device.type == "cpu"
    return sharing_in(mesh) if mesh is not None and is_plain else None


def _named(held: FrozenSet[int]) -> List[Tuple[str, Any, Any]]:
    """Return names, parameters and the meshes of plain ones. Names start at the outermost modules that were passed."""
    given = [(module, mesh) for reference, mesh in _modules if (module := reference()) is not None]
    inner = {id(part) for module, _ in given for part in module.modules() if part is not module}
    meshes: Dict[int, Any] = {}
    for module, mesh in given:
        if mesh is not None:
            meshes.update({id(parameter): mesh for parameter in module.parameters()})
    outer: Dict[int, Any] = {}
    for module, _ in given:
        if id(module) not in inner and any(id(parameter) in held for parameter in module.parameters()):
            outer[id(module)] = module
    found, seen = [], set()
    for number, module in enumerate(outer.values(), 1):
        prefix = "" if len(outer) == 1 else "%s %d: " % (type(module).__name__, number)
        for name, tensor in module.named_parameters():
            if id(tensor) in held and id(tensor) not in seen:
                seen.add(id(tensor))
                found.append((prefix + name, tensor, meshes.get(id(tensor))))
    return found


def _has_gradient(tensor: Any) -> bool:
    """Return whether the gradient is placed like its parameter. A partial gradient may rightly differ among ranks."""
    grad = tensor.grad
    if grad is None or is_placed(grad) != is_placed(tensor):
        return False
    return not is_placed(tensor) or grad.placements == tensor.placements


def _local(rows: Rows) -> Rows:
    """Return rows with this rank's parts of their tensors."""
    return [(row, local_part(tensor)) for row, tensor in rows]


def patch(module: Any) -> None:
    """Note the modules that are passed to a function. ``parallelize_module`` leaves plain parameters in its mesh."""
    name = _PLACES[module.__name__.rpartition(".")[2]]
    hooks.put(module, name, functools.partial(_noting, leaves_plain=name == "parallelize_module"))


def _noting(original: Callable[..., Any], leaves_plain: bool = False) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        mesh = args[1] if len(args) > 1 else kwargs.get("device_mesh")
        _note(args[0] if args else kwargs.get("module"), mesh if leaves_plain else None)
        return result

    return run


@guarded("mesh module")
def _note(given: Any, mesh: Any) -> None:
    if not check_every():
        return
    for module in given if isinstance(given, (list, tuple)) else [given]:
        if hasattr(module, "named_parameters") and len(_modules) < MAX_MODULES:
            _modules.append((weakref.ref(module), mesh))


def sharing_of(tensor: Any) -> Optional[Sharing]:
    """Return the ranks that hold the same part of a DTensor; None if no other rank does, or the part is partial."""
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        return None
    return _sharing(tensor.device_mesh, [d for d, placement in enumerate(placements) if placement.is_replicate()])


def sharing_in(mesh: Any) -> Optional[Sharing]:
    """Return the sharing of a tensor that all ranks of a mesh hold."""
    return _sharing(mesh, list(range(mesh.ndim)))


def _sharing(mesh: Any, alike: List[int]) -> Optional[Sharing]:
    own = mesh.get_coordinate()
    alike = [d for d in alike if mesh.size(d) > 1]
    if own is None or not alike:
        return None
    part = mesh.mesh[tuple(slice(None) if d in alike else own[d] for d in range(mesh.ndim))]
    names = mesh.mesh_dim_names or ["dim_%d" % d for d in range(mesh.ndim)]
    return "+".join(names[d] for d in alike), tuple(sorted(part.flatten().tolist()))


def is_placed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing that class."""
    return hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor")


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, or any other tensor unchanged."""
    return tensor._local_tensor if is_placed(tensor) else tensor
