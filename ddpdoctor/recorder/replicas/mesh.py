"""Fingerprints the parameters that several ranks of a device mesh hold in common.

These are the shards of hybrid FSDP in its replicating dimension, DTensors placed as ``Replicate``, and plain parameters
in modules that were passed to ``parallelize_module``. They are fingerprinted at an optimizer's steps, on the same
schedule as DDP's replicas, and compared among the ranks that hold the same part. Plain shards are not compared.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

from .. import frames, hooks
from ..state import check_every, guarded, here
from ..storage import fingerprint_layout
from ..wrappers import wraps
from .files import FingerprintFiles
from .fingerprinting import may_look, next_due
from .values import fitted, optimizer_values

Row = Tuple[Any, ...]
Rows = List[Tuple[Row, Any]]
Sharing = Tuple[str, Tuple[int, ...]]
"""The dimensions of the mesh in which a tensor is the same, "dp" or "dp+tp", and the ranks that hold it, sorted."""
Shared = Dict[Sharing, List[Tuple[str, Any]]]
"""Names and weak references to parameters, by the ranks that share them."""

MAX_MODULES = 4096
"""Modules that are kept. Our choice: enough for a model of a thousand blocks, each passed with its parts."""

_modules: List[Tuple[Any, Any]] = []
"""Weak references to modules that were distributed over a mesh, each with the mesh of its plain parameters, or None."""
_steppers: Dict[int, _Stepper] = {}
_numbers = itertools.count(1)


class _Stepper:
    """What is kept about an optimizer."""

    def __init__(self, optimizer: Any, number: int) -> None:
        self.reference = weakref.ref(optimizer, functools.partial(_forget, _steppers, id(optimizer)))
        self.number = number
        self.steps = 0
        self.due = 1
        self.held: FrozenSet[int] = frozenset()
        """Ids of its parameters when ``shared`` was found. It keeps them alive, so no other tensor gets their ids."""
        self.shared: Shared = {}
        self.gradients: Dict[Sharing, Tuple[Rows, Any]] = {}
        self.files: Dict[Sharing, FingerprintFiles] = {}


def _forget(steppers: Dict[int, _Stepper], key: int, gone: Any) -> None:
    """Forget an optimizer that is gone. At interpreter exit the globals of this module may be gone too."""
    found = steppers.get(key)
    if found is not None and found.reference is gone:
        del steppers[key]


@guarded("mesh step begins")
def before_step(optimizer: Any, *unused: Any) -> None:
    """Fingerprint the gradients that a step is made with, if the step is due."""
    if not _modules or not here.is_rank:
        return
    stepper = _stepper_of(optimizer)
    if stepper.steps + 1 == stepper.due and may_look():
        for sharing, named in _shared(stepper, optimizer):
            rows = [_row(fingerprint_layout.GRADIENT, name, "", p, p.grad) for name, p in named if _has_gradient(p)]
            stepper.gradients[sharing] = (rows, _fingerprints_of(rows))


@guarded("mesh step ends")
def after_step(optimizer: Any) -> None:
    """Write the fingerprints after a step, if the step is due."""
    stepper = _steppers.get(id(optimizer)) if _modules else None
    if stepper is None or stepper.reference() is not optimizer:
        return
    stepper.steps += 1
    if stepper.steps != stepper.due:
        return
    stepper.due = next_due(stepper.steps, check_every())
    if may_look():
        for sharing, named in _shared(stepper, optimizer):
            _write(stepper, sharing, named, optimizer)
    stepper.gradients = {}


def _stepper_of(optimizer: Any) -> _Stepper:
    found = _steppers.get(id(optimizer))
    if found is None or found.reference() is not optimizer:
        found = _steppers[id(optimizer)] = _Stepper(optimizer, next(_numbers))
    return found


def _write(stepper: _Stepper, sharing: Sharing, named: List[Tuple[str, Any]], optimizer: Any) -> None:
    gradients, taken = stepper.gradients.get(sharing, ([], None))
    rows = [_row(fingerprint_layout.PARAMETER, name, "", tensor, tensor) for name, tensor in named]
    for name, tensor in named:
        parts = optimizer.state.get(tensor)
        for part, value in parts.items() if isinstance(parts, dict) else ():
            if hasattr(value, "shape"):
                rows.append(_row(fingerprint_layout.STATE, name, str(part), value, value))
    values = dict(optimizer_values(optimizer), steps=stepper.steps, reductions=stepper.steps, forwards=1)
    values["site"] = frames.describe_user(sys._getframe(1))
    files = stepper.files.get(sharing)
    if files is None:
        files = stepper.files[sharing] = FingerprintFiles(_about(stepper, sharing))
    every = gradients + rows
    prints = (taken.value() if taken is not None else b"") + _fingerprints_of(rows).value()
    files.write(stepper.steps, fitted(values), [row for row, _ in every], prints)


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
    held = frozenset(id(tensor) for group in optimizer.param_groups for tensor in group["params"])
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


def _row(what: str, name: str, part: str, like: Any, tensor: Any) -> Tuple[Row, Any]:
    local = local_part(tensor)
    return (what, name, part, tuple(like.shape), str(like.dtype)[6:]), local  # without "torch."


def _fingerprints_of(rows: Rows) -> Any:
    from .fingerprint import Fingerprints

    return Fingerprints([tensor for _, tensor in rows])


def patch_fully_shard(module: Any) -> None:
    """Note the modules that are passed to ``fully_shard``."""
    hooks.put(module, "fully_shard", _noting)


def patch_parallelize(module: Any) -> None:
    """Note the modules that are passed to ``parallelize_module``, and the mesh, because it leaves plain parameters."""
    hooks.put(module, "parallelize_module", functools.partial(_noting, leaves_plain=True))


def patch_distribute(module: Any) -> None:
    """Note the modules that are passed to ``distribute_module``."""
    hooks.put(module, "distribute_module", _noting)


def _noting(original: Callable[..., Any], leaves_plain: bool = False) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _note(args[0] if args else kwargs.get("module"), _mesh(args, kwargs) if leaves_plain else None)
        return result

    return run


def _mesh(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("device_mesh")


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
