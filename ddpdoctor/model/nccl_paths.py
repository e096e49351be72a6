"""How NCCL connects the ranks of a job, as its own log (NCCL_DEBUG=INFO) says it. No judgment, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Fact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.node import Node


class DataWay(str, Enum):
    """How data go from one rank to another."""

    P2P = "directly between GPUs"
    INDIRECT = "through another GPU"
    SHM = "through the host's memory"
    GDRDMA = "over the network, straight from GPU memory"
    NET = "over the network, through the host's memory"
    TCP = "over TCP"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclEdge:
    """One connection of a process. Ranks are those of a communicator that the line does not name."""

    own: int
    peer: int
    way: DataWay
    text: str
    """NCCL's words: "P2P/CUMEM", "NET/IB/0/GDRDMA"."""
    channels: int
    """In one direction."""
    said: str
    """The first line that says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclMember:
    """A process in one communicator."""

    communicator: str
    """Equal in all its processes."""
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclPaths(Fact):
    """What one process says of its connections."""

    members: tuple[NcclMember, ...] = ()
    edges: tuple[NcclEdge, ...] = ()
    network: str = ""
    """"IB", "Socket", or the name of a plugin."""
    adapters: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters that NCCL found: "mlx5_0"."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Variables of NCCL that its environment sets."""
    dmabuf: bool = False
    """NCCL says that the GPU's memory can be given to an adapter by DMA-BUF."""
    nvls: bool | None = None
    """Whether NVLS (NVLink SHARP) is available; None: it is not said."""
    channels: int | None = None
    """For collectives, of the communicator that was set up last."""
    algorithms: Mapping[str, int] = field(default_factory=dict)
    """How often each choice was made: "AllReduce RING SIMPLE"."""
    init_s: float | None = None
    """The longest time that setting up a communicator took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSeen(Fact):
    """What `check-env` found on a machine of the job."""

    node: Node
