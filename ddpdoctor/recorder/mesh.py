"""Fingerprints what several ranks of a device mesh hold in common, as ``fingerprinting`` does for DDP.

These are the shards of hybrid FSDP in its replicating dimension, DTensors placed as ``Replicate``, and plain parameters
in modules that were passed to ``parallelize_module``. Nothing makes buffers and plain frozen parameters equal: those
that did not change between the first two steps are fingerprinted once, and what ``to_empty`` left as it was is noted.
"""

from __future__ import annotations

import itertools
import re
import sys
import weakref
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Tuple

from . import fingerprinting, frames, groups, hooks, schedule
from .fingerprinting import Rows, fingerprints_of, may_fingerprint, optimizer_values, write
from .schedule import FingerprintFiles
from .state import check_every, guarded, here, pass_on
from .storage import fingerprint_file
from .wrappers import around

# The dimensions of the mesh in which a tensor is the same, "dp" or "dp+tp", and the ranks that hold it, sorted.
Sharing = Tuple[str, Tuple[int, ...]]
# Modules that are kept. Our choice: enough for a model of a thousand blocks, each passed with its parts.
MAX_MODULES = 4096
# Tensors made by ``to_empty`` that are kept. Our choice: more than models have that are not sharded.
MAX_EMPTIED = 2**16
MAX_UNWRITTEN = 8  # Names of tensors without a value that are noted. Our choice: layers of a model count as one.
FULLY_SHARD, PARALLELIZE, FSDP1 = "fully_shard", "parallelize_module", "FullyShardedDataParallel"
# By the last part of a module's name: its function that distributes modules over a mesh.
_PLACES = {"_fully_shard": FULLY_SHARD, "api": PARALLELIZE, "_api": "distribute_module"}
_OF_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Buffers of BatchNorm. Each rank has its own, also in a branch or a mode in which they do not change.
_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
# Weak references to distributed modules, each with the function that did it, and its mesh or ``Sharing``; None: all.
_modules: List[Tuple[Any, str, Any]] = []
_looked_at: Any = weakref.WeakSet()  # outermost modules whose constants were collected
# By id: a weak reference to a tensor that ``to_empty`` made, and its mark at that time.
_emptied: Dict[int, Tuple[Any, Any]] = {}
_numbers = itertools.count(1)


class MeshFingerprints:
    """The fingerprints of what one optimizer holds in common with other ranks of a mesh, at its steps."""

    def __init__(self, optimizer: Any) -> None:
        self._number = next(_numbers)
        # Ids of its parameters when ``_shared`` was found. It keeps them alive, so no other tensor gets their ids.
        self._held: FrozenSet[int] = frozenset()
        self._shared: Dict[Sharing, List[Tuple[str, Any]]] = {}  # names and weak references to parameters
        self._gradients: Dict[Sharing, Tuple[Rows, Any]] = {}
        self._files: Dict[Sharing, FingerprintFiles] = {}
        # Name, weak reference and mark of what may turn out to be constant. Empty once that was compared.
        self._constants: Dict[Sharing, List[Tuple[str, Any, Any]]] = {}
        held = frozenset(map(id, fingerprinting.held_by(optimizer) if may_fingerprint() else ()))
        for prefix, module in _outermost(held):
            if module not in _looked_at:
                _looked_at.add(module)
                for sharing, name, tensor in _unsynchronized(module):
                    entry = (prefix + _OF_WRAPPERS.sub("", name), weakref.ref(tensor), _mark(tensor))
                    self._constants.setdefault(sharing, []).append(entry)

    def take_before(self, optimizer: Any) -> None:
        """Fingerprint the gradients, except a partial one, which may rightly differ among ranks."""
        for sharing, named in self._find(optimizer):
            present = [(name, p, p.grad) for name, p in named if p.grad is not None]
            alike = [
                (name, p) for name, p, grad in present
                if is_placed(grad) == is_placed(p) and (not is_placed(p) or grad.placements == p.placements)
            ]  # fmt: skip
            rows = _local(fingerprinting.gradient_rows(alike))
            self._gradients[sharing] = (rows, fingerprints_of(rows))

    def take_after(self, number: int, optimizer: Any) -> None:
        if not self._gradients:
            self.take_before(optimizer)
        site = frames.describe_user(sys._getframe(1))
        counts = {"steps": number, "reductions": number, "forwards": 1, "site": site}
        for sharing, named in self._find(optimizer):
            gradients, taken = self._gradients.get(sharing, ([], None))
            rows = _local(fingerprinting.parameter_rows(named) + fingerprinting.state_rows(named, optimizer))
            values = dict(optimizer_values(optimizer), **counts, every=schedule.distance())
            if sharing not in self._files:
                self._files[sharing] = FingerprintFiles(self._about(sharing, 1))
            prints = (taken.value() if taken is not None else b"") + fingerprints_of(rows).value()
            write(self._files[sharing], number, values, gradients + rows, prints)
        self._gradients = {}
        if number > 1:
            for sharing, entries in self._constants.items():
                self._write_constants(sharing, entries, counts)
            self._constants = {}

    def _about(self, sharing: Sharing, model: int) -> Dict[str, Any]:
        """Return a stream's table without its rows. Constants are model 2, because they have other points in time."""
        dims, ranks = sharing
        return {
            "clock": fingerprint_file.STEP, "group": fingerprint_file.MESH + dims, "ranks": list(ranks),
            "model": model, "optimizer": self._number, "rank": int(groups.c10d.get_rank()),
        }  # fmt: skip

    def _find(self, optimizer: Any) -> List[Tuple[Sharing, List[Tuple[str, Any]]]]:
        """Return the parameters that other ranks hold too, by ranks. Found once: ranks may collect modules unevenly."""
        held = frozenset(id(tensor) for tensor in fingerprinting.held_by(optimizer))
        if held != self._held:
            meshes: Dict[int, Any] = {}  # by parameter that is plain
            for reference, how, mesh in _modules:
                module = reference() if how == PARALLELIZE and mesh is not None else None
                if module is not None:
                    meshes.update({id(parameter): mesh for parameter in module.parameters()})
            self._held, self._shared = held, {}
            seen = set()
            for prefix, module in _outermost(held):
                for name, tensor in module.named_parameters():
                    if id(tensor) in held and id(tensor) not in seen:
                        seen.add(id(tensor))
                        sharing = _sharing_of(tensor, meshes.get(id(tensor))) if tensor.requires_grad else None
                        if sharing is not None:
                            self._shared.setdefault(sharing, []).append((prefix + name, weakref.ref(tensor)))
        return [
            (sharing, [(name, tensor) for name, reference in named if (tensor := reference()) is not None])
            for sharing, named in self._shared.items()
        ]

    def _write_constants(self, sharing: Sharing, entries: List[Any], counts: Dict[str, Any]) -> None:
        """Write what did not change since the first step. A row of another shape is another row."""
        rows: Rows = []
        unwritten: Dict[str, None] = {}
        for name, reference, mark in entries:
            tensor = reference()
            if tensor is None:
                continue
            shape, dtype = tuple(tensor.shape), str(tensor.dtype)[6:]  # without "torch."
            is_constant = _mark(tensor) == mark
            row = (fingerprint_file.BUFFER, name, "%s%s" % (dtype, list(shape)), shape, dtype)
            rows.append((row, tensor if is_constant else None))
            made, then = _emptied.get(id(tensor), (None, None))
            if is_constant and made is not None and made() is tensor and then == mark:
                unwritten[re.sub(r"\d+", "*", name)[:120]] = None
        if any(tensor is not None for _, tensor in rows):
            files = FingerprintFiles(self._about(sharing, 2), most_records=1)
            write(files, counts["steps"], dict(counts, unwritten=list(unwritten)[:MAX_UNWRITTEN]), rows)


def shares_of(optimizer: Any) -> Optional[MeshFingerprints]:
    return MeshFingerprints(optimizer) if _modules and here.is_rank else None


fingerprinting.more_of.append(shares_of)


def _sharing_of(tensor: Any, mesh: Any) -> Optional[Sharing]:
    """Return the ranks that hold the same tensor, or None if it cannot be compared."""
    # Values that ranks compute separately have equal bits on a CPU. GPU kernels may add in any order, so on GPUs only
    # tensors that are also sharded are compared, as in hybrid FSDP, because their gradients are reduced.
    on_cpu = tensor.device.type == "cpu"
    if is_placed(tensor):
        return sharing_of(tensor) if on_cpu or any(placement.is_shard() for placement in tensor.placements) else None
    return sharing_in(mesh) if mesh is not None and on_cpu and type(tensor).__name__ == "Parameter" else None


def _outermost(held: FrozenSet[int]) -> List[Tuple[str, Any]]:
    """Return the modules that were passed and are in no other such one, and a prefix for names if there are several."""
    given = [module for reference, _, _ in _modules if (module := reference()) is not None]
    inner = {id(part) for module in given for part in module.modules() if part is not module}
    outer = {id(m): m for m in given if id(m) not in inner and any(id(p) in held for p in m.parameters())}
    several = len(outer) > 1
    return [("%s %d: " % (type(m).__name__, n) if several else "", m) for n, m in enumerate(outer.values(), 1)]


def _unsynchronized(outer: Any) -> Iterator[Tuple[Sharing, str, Any]]:
    """Yield buffers and frozen plain parameters of a module with the ranks that should hold the same."""
    # The innermost FSDP decides, because parts of a tensor parallel module may have values for their own shards. FSDP1
    # shows shards as plain parameters, and those of tensor parallel modules may have been cut by hand.
    passed: Dict[int, Dict[bool, Tuple[str, Any]]] = {}
    for reference, how, mesh in _modules:
        module = reference()
        if module is not None:
            passed.setdefault(id(module), {})[how in (FULLY_SHARD, FSDP1)] = (how, mesh)
    chosen: Dict[str, Dict[bool, Tuple[str, Any]]] = {}
    sharings: Dict[int, Optional[Sharing]] = {}  # by id of the mesh or sharing
    seen = set()
    for path, module in outer.named_modules():
        above = chosen.get(path.rpartition(".")[0], {}) if path else {}
        ways = chosen[path] = {**above, **passed.get(id(module), {})}
        how, mesh = ways.get(True) or ways.get(False) or ("", ())
        if id(mesh) not in sharings:
            found = mesh or None if isinstance(mesh, tuple) else sharing_in(mesh) if mesh is not None else None
            if mesh is None and groups.c10d.get_world_size() > 1:
                found = ("dim_0", tuple(range(int(groups.c10d.get_world_size()))))
            sharings[id(mesh)] = found
        sharing = sharings[id(mesh)]
        if sharing is None:
            continue
        named = [(key, tensor) for key, tensor in module._buffers.items() if key not in _STATISTICS]
        if how == FULLY_SHARD:
            named += [(key, p) for key, p in module._parameters.items() if p is not None and not p.requires_grad]
        for key, tensor in named:
            if tensor is not None and id(tensor) not in seen and not is_placed(tensor) and _mark(tensor) is not None:
                seen.add(id(tensor))
                yield sharing, path + "." * bool(path) + key, tensor


def _mark(tensor: Any) -> Optional[Tuple[int, int]]:
    """Return what changes when a tensor is written to or moved, or None if it has no memory that can be compared."""
    try:
        if tensor.is_meta or tensor.is_inference() or not tensor.numel() or not tensor.untyped_storage().nbytes():
            return None
        return tensor._version, tensor.data_ptr()
    except Exception as error:  # noqa: BLE001 - a sparse, lazy or fake tensor, or a class that only looks like one
        pass_on(error)
        return None


def _local(rows: Rows) -> Rows:
    return [(row, tensor._local_tensor if is_placed(tensor) else tensor) for row, tensor in rows]


def patch(module: Any) -> None:
    name = _PLACES.get(module.__name__.rpartition(".")[2], "")
    owner, called = (module, name) if name else (hooks.part(module, FSDP1), "__init__")
    how = name or FSDP1

    @guarded("mesh module")
    def note(unused: Any, /, *args: Any, **kwargs: Any) -> None:
        if not check_every():
            return
        given: Any = args[0] if args else kwargs.get("module")
        mesh = args[1] if how != FULLY_SHARD and len(args) > 1 else kwargs.get("device_mesh", kwargs.get("mesh"))
        if kwargs.get("dp_mesh_dims") is not None or (mesh is None and how != FULLY_SHARD):
            mesh = ()  # the mesh has other dimensions too, or is not known
        for part in given if isinstance(given, (list, tuple)) else [given]:
            if how == FSDP1:
                ranks = tuple(sorted(groups.c10d.get_process_group_ranks(part.process_group)))
                mesh = ("FSDP", ranks) if len(ranks) > 1 else ()
            if hasattr(part, "named_parameters") and len(_modules) < MAX_MODULES:
                _modules.append((weakref.ref(part), how, mesh))

    @guarded("to_empty")
    def note_empty(unused: Any, module: Any, /, *args: Any, recurse: bool = True, **kwargs: Any) -> None:
        for tensor in (*module.buffers(recurse), *module.parameters(recurse)) if check_every() else ():
            mark = None if is_placed(tensor) or len(_emptied) >= MAX_EMPTIED else _mark(tensor)
            if mark is not None:
                _emptied[id(tensor)] = (weakref.ref(tensor), mark)

    hooks.put(owner, called, around(then=note))
    own = sys.modules["torch"].nn.Module
    if not getattr(own.to_empty, "_ddpdoctor", False):
        hooks.put(own, "to_empty", around(then=note_empty))
        own.to_empty._ddpdoctor = True


def sharing_of(tensor: Any) -> Optional[Sharing]:
    """Return the ranks that hold the same part of a DTensor; None if no other rank does, or the part is partial."""
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        return None
    return sharing_in(tensor.device_mesh, [d for d, placement in enumerate(placements) if placement.is_replicate()])


def sharing_in(mesh: Any, dimensions: Optional[List[int]] = None) -> Optional[Sharing]:
    """Return the sharing of a tensor that is the same in dimensions of a mesh, in all of them if none are given."""
    own = mesh.get_coordinate()
    alike = [d for d in (range(mesh.ndim) if dimensions is None else dimensions) if mesh.size(d) > 1]
    if own is None or not alike:
        return None
    part = mesh.mesh[tuple(slice(None) if d in alike else own[d] for d in range(mesh.ndim))]
    names = mesh.mesh_dim_names or ["dim_%d" % d for d in range(mesh.ndim)]
    return "+".join(names[d] for d in alike), tuple(sorted(part.flatten().tolist()))


def is_placed(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing that class."""
    return hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor")
