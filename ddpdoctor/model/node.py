"""Facts about the machines of a job. A node is one host or container, and a fleet is all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.reading import NOT_ASKED, NotRead, Unread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpdoctor.model.gpus import Gpus, GpuTrial, KernelView, StuckProcess
    from ddpdoctor.model.limits import Clock, Limits, Load
    from ddpdoctor.model.links import Pci, Rdma
    from ddpdoctor.model.network import Names, Network
    from ddpdoctor.model.software import Software, TorchBuild

Section = TypeVar("Section")


class Launcher(str, Enum):
    """Who started the collecting processes."""

    NONE = "none"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    NNODES = "nnodes"
    """Started by hand on every node, with --nnodes."""
    ENVIRONMENT = "environment"
    """Started by something that sets only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    OWN = "ddpdoctor"
    """Started by a ddpdoctor that waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfFile:
    """A configuration file of NCCL, which sets variables that are not in the environment."""

    path: str
    variables: dict[str, str]
    """Variables outside the allow-list have an empty value."""
    hidden_by_env: tuple[str, ...]
    """Names that the environment sets too. The environment wins."""
    hidden_by_file: tuple[str, ...]
    """Names that an earlier file sets too. The earlier file wins."""
    bad_lines: tuple[int, ...]
    """Lines that are neither NAME=VALUE nor a comment. NCCL ignores them silently."""
    lines: dict[str, int] = field(default_factory=dict)
    """The line, from 1, that sets each name."""
    repeated_lines: tuple[int, ...] = ()
    """Lines that set a name again. The first setting wins."""
    unread: str = ""
    """Why it could not be read; empty if it was read."""
    since: str = ""
    """The first NCCL version that reads it; empty: all."""
    until: str = ""
    """The last NCCL version that reads it; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """A collecting process: a rank of the job, or the user's own shell if there is no job."""

    rank: int | None
    """None if no launcher sets one."""
    local_rank: int | None
    pid: int
    variables: dict[str, str]
    """Environment variables on the allow-list, with values."""
    other_names: tuple[str, ...]
    """Unknown names that look like a variable of NCCL, torch, Gloo or torchrun. Their values are never kept."""
    cpus: tuple[int, ...]
    """The CPUs it may run on."""
    under_wrap: bool = False
    """Whether `ddpdoctor wrap` started it and therefore set some variables itself."""

    def number(self, name: str) -> int | None:
        """Return a variable as a whole number, or None if it is missing or not a number."""
        text = self.variables.get(name, "").strip()
        return int(text) if text.isascii() and text.removeprefix("-").isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine, or one container on it, with the processes of the job that run there."""

    host: str
    index: int = 0
    """Position among the nodes, sorted by lowest rank."""
    processes: tuple[NodeProcess, ...] = ()
    """At least one, sorted by rank."""
    conf_files: tuple[ConfFile, ...] | Unread = NOT_ASKED
    software: Software | Unread = NOT_ASKED
    torch: TorchBuild | Unread = NOT_ASKED
    limits: Limits | Unread = NOT_ASKED
    clock: Clock | Unread = NOT_ASKED
    names: Names | Unread = NOT_ASKED
    network: Network | Unread = NOT_ASKED
    gpus: Gpus | Unread = NOT_ASKED
    kernel_log: KernelView | Unread = NOT_ASKED
    stuck_processes: tuple[StuckProcess, ...] | Unread = NOT_ASKED
    gpu_trial: GpuTrial | Unread = NOT_ASKED
    pci: Pci | Unread = NOT_ASKED
    rdma: Rdma | Unread = NOT_ASKED
    load: Load | Unread = NOT_ASKED

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run here, sorted."""
        return tuple(sorted(process.rank for process in self.processes if process.rank is not None))

    @property
    def first(self) -> NodeProcess:
        """The process of the lowest rank."""
        return self.processes[0]


SECTIONS = tuple(one.name for one in fields(Node) if one.name not in {"host", "index", "processes"})
"""The sections of a node. Each has its own collector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedVersion:
    """A version that every node should have."""

    name: str
    """Of what: "torch", "nccl", "python", "driver" or "kernel"."""
    specifier: str
    """A version specifier of Python, such as ">=2.13,<3"."""

    @property
    def text(self) -> str:
        """Return it as the user wrote it."""
        return f"{self.name}{self.specifier}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All collecting machines, with or without a job."""

    nodes: tuple[Node, ...]
    launcher: Launcher = Launcher.NONE
    world_size: int | None = None
    """Processes that the launcher should start, or None without a launcher."""
    nnodes: int | None = None
    """Nodes that the launcher should use, if it says."""
    missing: tuple[int, ...] = ()
    """Ranks that did not answer in time."""
    silent_hosts: tuple[str, ...] = ()
    """Hosts of those missing ranks that said hello."""
    problems: tuple[str, ...] = field(default=())
    """What went wrong during gathering: "rank 3 sent what could not be read"."""
    expected: tuple[ExpectedVersion, ...] = ()
    """The versions that the user expects."""

    @property
    def gathered(self) -> bool:
        """Whether several processes were expected to collect."""
        return self.launcher is not Launcher.NONE

    def processes(self) -> Iterator[tuple[Node, NodeProcess]]:
        """Yield every process with its node, by node and rank."""
        for node in self.nodes:
            for process in node.processes:
                yield node, process

    def each(self, section: Callable[[Node], Section | Unread]) -> tuple[tuple[Node, Section], ...]:
        """Return each node for which a section was read, with that section. Raises ``NotRead`` if there is none."""
        readings = [(node, section(node)) for node in self.nodes]
        found = tuple((node, reading) for node, reading in readings if not isinstance(reading, Unread))
        unread = next((reading for _, reading in readings if isinstance(reading, Unread)), None)
        if not found and unread is not None:
            raise NotRead(unread)
        return found
