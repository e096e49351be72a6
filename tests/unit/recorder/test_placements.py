"""Who holds the same part of a tensor on a device mesh, and which tensors of its modules are constants."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.recorder.replicas import mesh
from ddpdoctor.recorder.replicas.mesh import sharing_in, sharing_of
from ddpdoctor.recorder.storage.fingerprint_layout import ABSENT


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


class Net(nn.Module):
    """A model of a block with all kinds of tensors that nothing makes equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.block.register_buffer("freq", torch.ones(3))
        self.block.register_buffer("none", None)
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
        self.register_buffer("empty", torch.ones(0))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)


def replace_freq(net: Net) -> None:
    net.block.freq = torch.ones(3)


def change_mask(net: Net) -> None:
    net.mask.logical_not_()


def never(net: Net) -> None:
    """Change nothing."""


FREQ, MASK, FROZEN = "float32[3] of block.freq", "bool[2, 2] of mask", "float32[4] of frozen"
DP, TP = ("dp", (0, 1)), ("tp", (0, 1))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train two steps and return, by sharing, the constants that were written, and what ``to_empty`` left as it was."""
    written: dict[Any, tuple[list[str], list[str]]] = {}

    def write(files: Any, number: int, values: Any, rows: Any, taken: bytes) -> None:
        if rows and values.get("unwritten") is not None:
            assert number == 2
            present = [row for at, (row, _) in enumerate(rows) if taken[16 * at : 16 * at + 16] != ABSENT]
            names = [f"{part} of {name}" for what, name, part, *_ in present if what == "b"]
            written[files["group"].removeprefix("mesh "), tuple(files["ranks"])] = (names, values["unwritten"])

    monkeypatch.setattr(mesh, "write", write)
    monkeypatch.setattr(mesh, "FingerprintFiles", lambda about, **_: about)
    monkeypatch.setattr(mesh, "check_every", lambda: 1)
    monkeypatch.setattr(mesh, "_modules", [])
    monkeypatch.setattr(mesh, "here", SimpleNamespace(is_rank=True))
    monkeypatch.setattr(nn.Module, "to_empty", nn.Module.to_empty)
    monkeypatch.setattr("ddpdoctor.recorder.calls.groups.c10d", SimpleNamespace(get_rank=lambda: 0))
    places = {
        "fsdp._fully_shard._fully_shard": "fully_shard",
        "tensor.parallel.api": "parallelize_module",
    }
    ways = {}
    for place, name in places.items():
        module = SimpleNamespace(__name__=place, **{name: lambda module, *_, **__: module})
        mesh.patch(module)
        ways[name] = getattr(module, name)

    def train(net: Net, passed: list[tuple[str, Any, Any]], between: Any = never) -> Any:
        for way, part, dims in passed:
            own = Mesh((2,), 0, (dims,))
            ways[way](part, mesh=own) if way == "fully_shard" else ways[way](part, own)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            mesh.before_step(optimizer)
            mesh.after_step(optimizer)
            if step == 0:
                between(net)
        return written

    return train


@pytest.mark.parametrize(
    ("ways", "between", "expected"),
    [
        pytest.param(["fully_shard"], never, {DP: [FROZEN, MASK, FREQ]}, id="FSDP2"),
        pytest.param(["parallelize_module"], never, {TP: [MASK, FREQ]}, id="tensor parallel: no frozen ones"),
        pytest.param(["parallelize_module", "fully_shard"], never, {DP: [FROZEN, MASK, FREQ]}, id="FSDP goes first"),
        pytest.param(["fully_shard", "parallelize_module"], never, {DP: [FROZEN, MASK, FREQ]}, id="in any order"),
        pytest.param(["fully_shard"], replace_freq, {DP: [FROZEN, MASK]}, id="another tensor in its place"),
        pytest.param(["fully_shard"], change_mask, {DP: [FROZEN, FREQ]}, id="changed in place"),
    ],
)
def test_constants_are_what_two_steps_leave_alone(ways, between, expected, trained) -> None:
    net = Net()
    passed = [(way, net, "dp" if way == "fully_shard" else "tp") for way in ways]
    written = trained(net, passed, between)
    assert {sharing: sorted(names) for sharing, (names, _) in written.items()} == {
        sharing: sorted(names) for sharing, names in expected.items()
    }


def test_the_innermost_fsdp_says_who_should_hold_the_same(trained) -> None:
    net = Net()
    written = trained(net, [("fully_shard", net.block, "inner"), ("fully_shard", net, "dp")])
    assert written[("inner", (0, 1))][0] == [FREQ]
    assert sorted(written[DP][0]) == [MASK, FROZEN]


def test_what_to_empty_made_is_known_until_it_is_written_to(trained) -> None:
    net = Net()
    passed = [("fully_shard", net, "dp")]
    mesh.patch(SimpleNamespace(__name__="tensor._api"))
    net.to_empty(device="cpu")
    net.mask.fill_(value=True)
    with torch.no_grad():
        net.frozen.copy_(torch.ones(4))
    written = trained(net, passed)
    assert written[DP][1] == ["block.freq"]
