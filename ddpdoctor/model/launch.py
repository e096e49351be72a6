"""How this process was launched: by whom, with which rank and world size, and where the processes can meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    from ddpdoctor.model.reaching import JobSettings

EXCHANGE_PORT = "DDPDOCTOR_EXCHANGE_PORT"
"""Holds ddpdoctor's own port, on which the nodes meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The job of this process, according to the environment and the command line."""

    launcher: Launcher = Launcher.NONE
    rank: int = 0
    """The rank among the gathering processes: from torchrun or Slurm, or the node's number with --nnodes. It may differ
    from the RANK that the training script would see, which the checks assess."""
    world_size: int = 1
    local_rank: int | None = None
    nnodes: int | None = None
    hosts: tuple[str, ...] = ()
    """Names or addresses of the host of rank 0, the most likely first."""
    port: int = 0
    run: str = ""
    """Identifies this run among others that meet at the same address."""
    agent_store: bool = False
    """Whether the launcher itself serves a store there, as torchrun's agent does by default."""

    @property
    def gathers(self) -> bool:
        """Whether there are other processes to gather from."""
        return self.launcher is not Launcher.NONE and self.world_size > 1

    @property
    def reads_node(self) -> bool:
        """Whether this is the one process of its host that reads the host."""
        return self.local_rank in {0, None}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunch:
    """What this node knows about a job before its nodes have met."""

    launch: Launch
    """``rank`` is that among the checking processes, ``hosts`` are candidates for the first node, and ``port`` is
    ddpdoctor's own."""
    settings: JobSettings
    host: str
    """The host of the store, as given."""
    port: int
    fewest: int
    """The least number of nodes that an elastic job starts with. For other jobs, all nodes."""
    most: int
    hosts: tuple[str, ...] = ()
    """Names of all nodes by node rank, if a scheduler provides them."""
    by_number: bool = True
    """True: node 0 serves the store. False: the node that considers itself ``host`` does, as in torchrun's c10d."""
    is_host: bool | None = None
    """The setting of --rdzv-conf for this node, which overrides ``by_number``."""
    own_screen: bool = True
    """Whether each node was started separately, so that each can print its own report."""

    @property
    def label(self) -> str:
        """The name of this node among the others: "node 1", or "this node"."""
        return "this node" if self.settings.node_rank is None else f"node {self.settings.node_rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The command's options under torchrun's names. None: not given."""

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
        """Return the options as the equivalent environment variables of torchrun."""
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
