"""How a process was started, according to its variables: by whom, on how many nodes, and with which store."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.node import NodeProcess

SLURM_SPECIAL_STEPS = 0xFFFFFFF0
"""Step ids from here up are not from `srun`: 0xfffffffa is the interactive step of salloc, 0xfffffffb is the batch
script (slurm.h)."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that init_process_group reads with env:// (torch/distributed/rendezvous.py)."""
OTHER_RANK_VARIABLES = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables from which a script can set RANK itself."""
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})

_ENDPOINT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>.+?))(?::(?P<port>[0-9]{1,5}))?")
_NNODES = re.compile(r"(?:([0-9]{1,6}):)?([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of the store, and the variable that sets it."""

    variable: str
    host: str
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """The number of nodes of the job, and its source: "GROUP_WORLD_SIZE is 2"."""

    nodes: int
    source: str


def text_of(process: NodeProcess, name: str) -> str:
    """Return a variable, stripped of white space. It is empty if unset, which is the same to torch."""
    return process.variables.get(name, "").strip()


def by_torchrun(process: NodeProcess) -> bool:
    """Return whether torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in process.variables


def in_slurm_step(process: NodeProcess) -> bool:
    """Return whether srun started this process or its launcher. It is false in the shell of sbatch and salloc."""
    step = process.number("SLURM_STEP_ID")
    return step is not None and step < SLURM_SPECIAL_STEPS


def nodes_range(text: str) -> tuple[int, int] | None:
    """Parse torchrun's --nnodes ("2" or "1:4") into the least and most nodes, or return None if it is malformed."""
    found = _NNODES.fullmatch(text.strip())
    if found is None:
        return None
    return int(found[1] or found[2]), int(found[2])


def read_node_count(process: NodeProcess) -> NodeCount | None:
    """Return the number of nodes in the variables, or None if there is none.

    torchrun's own count comes first, because its command line can override what Slurm or an operator sets.
    """
    groups = process.number("GROUP_WORLD_SIZE")
    if by_torchrun(process) and groups is not None:
        return NodeCount(nodes=groups, source=f"GROUP_WORLD_SIZE is {groups}")
    world, local = process.number("WORLD_SIZE"), process.number("LOCAL_WORLD_SIZE")
    if world is not None and local is not None and 0 < local <= world:
        return NodeCount(nodes=-(-world // local), source=f"WORLD_SIZE is {world} and LOCAL_WORLD_SIZE is {local}")
    given = nodes_range(text_of(process, "PET_NNODES"))
    if given is not None:
        return NodeCount(nodes=given[1], source=f"PET_NNODES is {text_of(process, 'PET_NNODES')}")
    nodes = process.number("SLURM_NNODES")
    if in_slurm_step(process) and nodes is not None:
        return NodeCount(nodes=nodes, source=f"SLURM_NNODES is {nodes}")
    return None


def parse_endpoint(text: str, variable: str) -> Endpoint | None:
    """Parse HOST, HOST:PORT or [IPV6]:PORT as torchrun does, or return None if it is empty."""
    found = _ENDPOINT.fullmatch(text.strip())
    if found is None:
        return None
    port = found["port"]
    return Endpoint(variable=variable, host=found["v6"] or found["host"], port=int(port) if port is not None else None)


def endpoints(process: NodeProcess) -> tuple[Endpoint, ...]:
    """Return all addresses in the variables: of the ranks' store and of torchrun's rendezvous."""
    found = [
        Endpoint(variable=variable, host=text_of(process, variable), port=process.number(variable[:-4] + "PORT"))
        for variable in ("MASTER_ADDR", "PET_MASTER_ADDR")
        if text_of(process, variable)
    ]
    rendezvous = parse_endpoint(text_of(process, "PET_RDZV_ENDPOINT"), "PET_RDZV_ENDPOINT")
    return (*found, rendezvous) if rendezvous is not None else tuple(found)


def is_loopback_address(text: str) -> bool:
    """Return whether a text is an address in 127.0.0.0/8 or ::1."""
    address = _address(text)
    return address is not None and address.is_loopback


def is_loopback(host: str) -> bool:
    """Return whether a name or address always means the local host. 0.0.0.0 and :: do so when connecting."""
    address = _address(host)
    if address is not None:
        return address.is_loopback or address.is_unspecified
    return host.lower().rstrip(".") in LOOPBACK_NAMES


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
