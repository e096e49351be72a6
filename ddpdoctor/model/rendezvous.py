"""What the variables of a process say of how it was started: by whom, on how many nodes, and where its store is."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.node import Process

SLURM_SPECIAL_STEPS = 0xFFFFFFF0
"""Step ids from here up are no `srun`: 0xfffffffa is the interactive step of salloc, 0xfffffffb the batch script
(slurm.h)."""
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What init_process_group reads with env:// (torch/distributed/rendezvous.py)."""
OTHER_RANK_VARIABLES = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""From which a script can make RANK by itself."""
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})

_ENDPOINT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>.+?))(?::(?P<port>[0-9]{1,5}))?")
_NNODES = re.compile(r"(?:([0-9]{1,6}):)?([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the store is to be, and which variable says so."""

    variable: str
    host: str
    port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """How many nodes the job has, and what says so: "GROUP_WORLD_SIZE is 2"."""

    nodes: int
    source: str


def text_of(process: Process, name: str) -> str:
    """Return a variable without white space at its ends; empty where it is not set, which is the same to torch."""
    return process.variables.get(name, "").strip()


def by_torchrun(process: Process) -> bool:
    """Say whether torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in process.variables


def in_slurm_step(process: Process) -> bool:
    """Say whether srun started this process or its launcher; false in the shell of sbatch and salloc."""
    step = process.number("SLURM_STEP_ID")
    return step is not None and step < SLURM_SPECIAL_STEPS


def nodes_range(text: str) -> tuple[int, int] | None:
    """Return the fewest and most nodes of torchrun's --nnodes: "2" or "1:4"; None where it is neither."""
    found = _NNODES.fullmatch(text.strip())
    if found is None:
        return None
    return int(found[1] or found[2]), int(found[2])


def nodes_told(process: Process) -> NodeCount | None:
    """Return the number of nodes that the variables tell of; None where they tell nothing.

    torchrun's own count comes first: what Slurm or an operator says may be overruled on its command line.
    """
    groups = process.number("GROUP_WORLD_SIZE")
    if by_torchrun(process) and groups is not None:
        return NodeCount(nodes=groups, source=f"GROUP_WORLD_SIZE is {groups}")
    world, local = process.number("WORLD_SIZE"), process.number("LOCAL_WORLD_SIZE")
    if world is not None and local is not None and 0 < local <= world:
        return NodeCount(nodes=-(-world // local), source=f"WORLD_SIZE is {world} and LOCAL_WORLD_SIZE is {local}")
    told = nodes_range(text_of(process, "PET_NNODES"))
    if told is not None:
        return NodeCount(nodes=told[1], source=f"PET_NNODES is {text_of(process, 'PET_NNODES')}")
    nodes = process.number("SLURM_NNODES")
    if in_slurm_step(process) and nodes is not None:
        return NodeCount(nodes=nodes, source=f"SLURM_NNODES is {nodes}")
    return None


def parse_endpoint(text: str, variable: str) -> Endpoint | None:
    """Read HOST, HOST:PORT or [IPV6]:PORT, as torchrun does; None where it is empty."""
    found = _ENDPOINT.fullmatch(text.strip())
    if found is None:
        return None
    port = found["port"]
    return Endpoint(variable=variable, host=found["v6"] or found["host"], port=int(port) if port is not None else None)


def endpoints(process: Process) -> tuple[Endpoint, ...]:
    """Return every place that the variables give for the store: of the ranks, and of torchrun's rendezvous."""
    found = [
        Endpoint(variable=variable, host=text_of(process, variable), port=process.number(variable[:-4] + "PORT"))
        for variable in ("MASTER_ADDR", "PET_MASTER_ADDR")
        if text_of(process, variable)
    ]
    rendezvous = parse_endpoint(text_of(process, "PET_RDZV_ENDPOINT"), "PET_RDZV_ENDPOINT")
    return (*found, rendezvous) if rendezvous is not None else tuple(found)


def is_loopback_address(text: str) -> bool:
    """Say whether a text is an address in 127.0.0.0/8 or ::1."""
    address = _address(text)
    return address is not None and address.is_loopback


def is_loopback(host: str) -> bool:
    """Say whether a name or address means the host itself on every host; 0.0.0.0 and :: do so where one connects."""
    address = _address(host)
    if address is not None:
        return address.is_loopback or address.is_unspecified
    return host.lower().rstrip(".") in LOOPBACK_NAMES


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
