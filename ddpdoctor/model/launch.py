"""Who started this process, as which of how many, and where those can meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    from ddpdoctor.model.reaching import JobTold

EXCHANGE_PORT = "DDPDOCTOR_EXCHANGE_PORT"
"""Says the port of ddpdoctor's own, where the nodes meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the environment and the command line say of the job that this process belongs to."""

    launcher: Launcher = Launcher.NONE
    rank: int = 0
    """Among the processes that gather: of torchrun or Slurm, or the node's number with --nnodes. It need not be
    the RANK that the training script would see, which is what the checks judge."""
    world_size: int = 1
    local_rank: int | None = None
    nnodes: int | None = None
    hosts: tuple[str, ...] = ()
    """Names or addresses of the host of rank 0, the likeliest first."""
    port: int = 0
    run: str = ""
    """Names this run among others that meet at the same place."""
    agent_store: bool = False
    """Whether the launcher serves a store there itself, as torchrun's agent does unless told otherwise."""

    @property
    def gathers(self) -> bool:
        """Whether there are other processes to hear of."""
        return self.launcher is not Launcher.NONE and self.world_size > 1

    @property
    def reads_node(self) -> bool:
        """Whether this is the one process of its host that reads the host."""
        return self.local_rank in {0, None}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunch:
    """What this node is told of a job whose nodes have yet to meet."""

    launch: Launch
    """Of this process: ``rank`` among those that look, ``hosts`` where the first may be, ``port`` of the own way."""
    told: JobTold
    host: str
    """Of the store, as it was given."""
    port: int
    fewest: int
    """Nodes that an elastic job starts with; all nodes of another."""
    most: int
    hosts: tuple[str, ...] = ()
    """Names of all nodes by node rank, where a scheduler says them."""
    by_number: bool = True
    """Whether node 0 serves the store; otherwise the node that takes itself for ``host``, as torchrun's c10d has it."""
    is_host: bool | None = None
    """What --rdzv-conf says of this node, which overrules that."""
    own_screen: bool = True
    """Whether each node was started by itself, so that each has somewhere to report."""

    @property
    def label(self) -> str:
        """The name of this node among the others: "node 1", or "this node"."""
        return "this node" if self.told.node_rank is None else f"node {self.told.node_rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What the options of the command say, under torchrun's names. None: not given."""

    nnodes: str | None = None
    """"2", or "1:4"."""
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: str | None = None
    exchange_port: int | None = None

    def variables(self) -> dict[str, str]:
        """Return them as the variables that torchrun reads in their place."""
        given = {
            "PET_NNODES": self.nnodes,
            "PET_NODE_RANK": self.node_rank,
            "PET_MASTER_ADDR": self.master_addr,
            "PET_MASTER_PORT": self.master_port,
            "PET_RDZV_BACKEND": self.rdzv_backend or ("c10d" if self.rdzv_endpoint else None),
            "PET_RDZV_ENDPOINT": self.rdzv_endpoint,
            "PET_RDZV_ID": self.rdzv_id,
            "PET_RDZV_CONF": self.rdzv_conf,
            EXCHANGE_PORT: self.exchange_port,
        }
        return {name: str(value) for name, value in given.items() if value is not None}
