"""Who holds the same part of a tensor on a device mesh."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ddpdoctor.recorder.replicas.mesh import sharing_in, sharing_of


@dataclass
class Placement:
    kind: str

    def is_partial(self) -> bool:
        return self.kind == "partial"

    def is_replicate(self) -> bool:
        return self.kind == "replicate"


@dataclass
class Mesh:
    """As much of torch's DeviceMesh as placements are read by, seen from one rank."""

    shape: tuple[int, ...]
    own: int
    mesh_dim_names: tuple[str, ...] | None = None

    @property
    def mesh(self) -> Any:
        return torch.arange(torch.Size(self.shape).numel()).reshape(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def get_coordinate(self) -> list[int] | None:
        found = (self.mesh == self.own).nonzero()
        return found[0].tolist() if len(found) else None


@dataclass
class Placed:
    device_mesh: Mesh
    placements: tuple[Placement, ...]


S, R, P = Placement("shard"), Placement("replicate"), Placement("partial")
NAMES = ("dp", "tp")


@pytest.mark.parametrize(
    ("shape", "names", "placements", "own", "expected"),
    [
        pytest.param((4,), None, (S,), 1, None, id="a shard is nobody else's"),
        pytest.param((4,), None, (R,), 1, ("dim_0", (0, 1, 2, 3)), id="replicated on all"),
        pytest.param((2, 2), NAMES, (R, S), 3, ("dp", (1, 3)), id="hybrid FSDP: by the replicating dimension"),
        pytest.param((2, 2), NAMES, (S, R), 2, ("tp", (2, 3)), id="sharded over dp, replicated in tp"),
        pytest.param((2, 2), NAMES, (R, R), 2, ("dp+tp", (0, 1, 2, 3)), id="replicated in both"),
        pytest.param((2, 2), NAMES, (S, S), 2, None, id="sharded in both"),
        pytest.param((4,), None, (P,), 1, None, id="still to be summed up"),
        pytest.param((2, 2), NAMES, (R, P), 1, None, id="still to be summed up in one dimension"),
        pytest.param((4, 1), NAMES, (S, R), 1, None, id="a dimension of one rank"),
        pytest.param((2,), None, (R,), 7, None, id="a rank that is not on the mesh"),
    ],
)
def test_by_placements(shape, names, placements, own, expected) -> None:
    assert sharing_of(Placed(Mesh(shape, own, names), placements)) == expected


def test_plain_parameters_are_held_by_the_whole_mesh() -> None:
    assert sharing_in(Mesh((2,), 0, ("tp",))) == ("tp", (0, 1))
