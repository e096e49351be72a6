"""What is known of the machines of a job: a node is a host (or container), a fleet all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.reading import NOT_ASKED, NotRead, Unread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpdoctor.model.gpus import Gpus, GpuTrial, KernelView, StuckProcess
    from ddpdoctor.model.limits import Clock, Limits
    from ddpdoctor.model.links import Pci, Rdma
    from ddpdoctor.model.load import Load
    from ddpdoctor.model.network import Names, Network
    from ddpdoctor.model.software import Software, TorchBuild

Section = TypeVar("Section")


class Launcher(str, Enum):
    """Who started the processes that look."""

    NONE = "none"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    NNODES = "nnodes"
    """Started by hand on every node, with --nnodes."""
    ENVIRONMENT = "environment"
    """Started by something that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and nothing more."""
    OWN = "ddpdoctor"
    """Started by a ddpdoctor that waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfFile:
    """A file of NCCL's from which variables come that the environment does not show."""

    path: str
    variables: dict[str, str]
    """Of the allow-list; others have an empty value."""
    hidden_by_env: tuple[str, ...]
    """Names that the environment sets too: it wins."""
    hidden_by_file: tuple[str, ...]
    """Names that a file read earlier sets too: that one wins."""
    bad_lines: tuple[int, ...]
    """Lines that are neither NAME=VALUE nor a comment; NCCL says nothing of them."""
    lines: dict[str, int] = field(default_factory=dict)
    """Where the file sets a name, counted from 1."""
    repeated_lines: tuple[int, ...] = ()
    """Lines that set once more what the file has set above: the first one wins."""
    unread: str = ""
    """Why it could not be read; empty: it was."""
    since: str = ""
    """The first NCCL that reads it; empty: all do."""
    until: str = ""
    """The last NCCL that reads it; empty: all do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that looked: a rank of the job, or the user's own shell where there is no job."""

    rank: int | None
    """None where no launcher says one."""
    local_rank: int | None
    pid: int
    variables: dict[str, str]
    """Environment variables on the allow-list, with values."""
    other_names: tuple[str, ...]
    """Names that look like a variable of NCCL, torch, Gloo or torchrun and are on no list: never with a value."""
    cpus: tuple[int, ...]
    """The CPUs it may run on."""
    under_wrap: bool = False
    """Whether `ddpdoctor wrap` started it, and so set some variables itself."""

    def number(self, name: str) -> int | None:
        """Return a variable as a whole number; None where it is missing or is none."""
        text = self.variables.get(name, "").strip()
        return int(text) if text.isascii() and text.removeprefix("-").isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine, or one container of it, with the processes of the job that run there."""

    host: str
    index: int = 0
    """In the order of their lowest ranks."""
    processes: tuple[Process, ...] = ()
    """By rank; at least one."""
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
    def first(self) -> Process:
        """The process of the lowest rank."""
        return self.processes[0]


SECTIONS = tuple(one.name for one in fields(Node) if one.name not in {"host", "index", "processes"})
"""What is read of a node, each by a collector of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All that looked, in one job or in none."""

    nodes: tuple[Node, ...]
    launcher: Launcher = Launcher.NONE
    world_size: int | None = None
    """Processes that the launcher was to start; None where there is none."""
    nnodes: int | None = None
    """Nodes that the launcher was told of, where it says."""
    missing: tuple[int, ...] = ()
    """Ranks that did not answer in time."""
    silent_hosts: tuple[str, ...] = ()
    """Where those of them run that said hello."""
    problems: tuple[str, ...] = field(default=())
    """What went wrong with the gathering: "rank 3 sent what could not be read"."""

    @property
    def gathered(self) -> bool:
        """Whether several processes were to look."""
        return self.launcher is not Launcher.NONE

    def processes(self) -> Iterator[tuple[Node, Process]]:
        """Yield every process with its node, by node and rank."""
        for node in self.nodes:
            for process in node.processes:
                yield node, process

    def each(self, section: Callable[[Node], Section | Unread]) -> tuple[tuple[Node, Section], ...]:
        """Return the nodes of which a section was read, with it; raises ``NotRead`` where it was on none."""
        readings = [(node, section(node)) for node in self.nodes]
        found = tuple((node, reading) for node, reading in readings if not isinstance(reading, Unread))
        unread = next((reading for _, reading in readings if isinstance(reading, Unread)), None)
        if not found and unread is not None:
            raise NotRead(unread)
        return found
