"""Which ranks hold the same part of a tensor, by its placements on a device mesh. Shards are nobody else's."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

Sharing = Tuple[str, Tuple[int, ...]]
"""The dimensions of the mesh in which a tensor is the same, "dp" or "dp+tp", and the ranks that hold it, sorted."""


def sharing_of(tensor: Any) -> Optional[Sharing]:
    """Return who holds the same part of a DTensor; None where no other rank does, or a sum is still to be made."""
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        return None
    return _sharing(tensor.device_mesh, [d for d, placement in enumerate(placements) if placement.is_replicate()])


def sharing_in(mesh: Any) -> Optional[Sharing]:
    """Return who holds the same, where all ranks of a mesh do."""
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
    """Return whether a tensor is a DTensor, without an import of that."""
    return hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor")


def local_part(tensor: Any) -> Any:
    """Return what this rank holds of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if is_placed(tensor) else tensor
