"""What ``attach`` saw of a running job: the records that its folder holds as JSON (``docs/design/0012-attach.md``).

``wall_ns`` is the host's wall clock, ``monotonic_ns`` its CLOCK_MONOTONIC, which is comparable on one host until it
boots again. CPU times are in clock ticks (1/100 s on Linux). What could not be read is None, or in ``refused`` with its
reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.words import grouped, name_list

if TYPE_CHECKING:
    from ddpdoctor.model.facts import Blocked

FORMAT = "ddpdoctor-attach"
VERSION = 1  # Fields may be added to a version. A field that changes its meaning makes a new one.


class RankBy(str, Enum):
    """How the rank number of a process is known."""

    ENVIRONMENT = "environment"  # from RANK, or the variable of another launcher
    # It joined a process group, but no variable has its rank: the order of pids under one parent. Low confidence.
    PID_ORDER = "pid-order"


class Movement(str, Enum):
    """Whether something changed between two looks."""

    # Of a rank: it did something else, or new data or collectives came. Of a job: all ranks that were seen moved.
    MOVING = "moving"
    PARTLY = "partly"  # of a job: some ranks moved, and others stayed where they were
    STILL = "still"  # the same lines of Python, in the same collective, without data from other ranks
    UNKNOWN = "unknown"  # nothing that could be compared was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """What the ranks of one job have in common."""

    name: str  # for ``--job``: "slurm-4711", torchrun's run id, or "host:port" of the store
    master_addr: str | None = None
    master_port: int | None = None
    run_id: str | None = None  # TORCHELASTIC_RUN_ID; "none" is torchrun's default
    slurm_job: str | None = None
    step: str | None = None  # Slurm's step, or the name space of PMIx, of a job without MASTER_ADDR
    parent_pid: int | None = None  # of ranks without any variable: the process that started them


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRank:
    """A process of this machine that is a rank of a job."""

    pid: int
    namespace_pid: int | None  # its pid in its own container, if it is another
    start_ticks: int  # when it started, in clock ticks since boot: tells it from a later process with the same pid
    rank: int | None
    rank_by: RankBy
    local_rank: int | None
    world_size: int | None
    node_rank: int | None  # GROUP_RANK of torchrun, or Slurm's node
    restart_count: int | None  # TORCHELASTIC_RESTART_COUNT: how often torchrun had started the ranks anew before
    launcher: str  # "torchrun", "srun", "mpirun", "mp.spawn", or "environment" if only RANK and WORLD_SIZE tell
    parent_pid: int
    command: str  # without secrets, cut to 200 characters
    user: str
    wrap_folder: str | None  # the run folder as the rank sees it, if ``ddpdoctor wrap`` started the job
    variables: dict[str, str]  # of its start: variables of NCCL, torch and launchers, and no others


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFacts:
    """A thread, from /proc/PID/task."""

    tid: int
    name: str  # cut to 15 characters by the kernel: "pt_gloo_runloop", "pt_nccl_watchdg"
    state: str  # R running, S sleeping, D in the kernel, T stopped by a signal, t by a debugger, Z ended
    cpu_ticks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A TCP connection of the process."""

    local: str
    remote: str  # "10.0.0.4:29500"
    state: str  # "established", "close-wait" (the other end is gone), "syn-sent" (no answer yet) or the kernel's number
    unsent_bytes: int
    retries: int
    received_bytes: int | None  # None if the kernel does not say, or in another network namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What /proc shows of a process. ``None`` fields need permission to read them."""

    state: str  # as in ``ThreadFacts``, of the main thread
    cpu_ticks: int  # of all threads, since the process started
    main_cpu_ticks: int
    # How often the main thread has gone to sleep. If it is the same in both looks, the thread slept throughout.
    main_switches: int | None
    threads: tuple[ThreadFacts, ...]
    blocked: Blocked | None  # The system call in which the main thread sleeps. None also if it runs.
    kernel_function: str | None  # wchan: the kernel function in which it sleeps
    peers: tuple[Peer, ...] | None
    children: tuple[ChildFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFacts:
    """A process below a rank, such as a loader worker."""

    pid: int
    state: str
    name: str
    cpu_ticks: int
    stacks: Any = None  # as ``RankLook.stacks``, for Python processes below a rank that waits for its loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A source that gave nothing, and how to fix that."""

    source: str  # "py-spy", "worker server", "flight recorder", "ras", "store", "/proc", or the names of nodes
    reason: str
    remedy: str = ""  # A command, or a sentence. Empty: none is known.

    def line(self) -> str:
        return f"{self.source}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """One look at one rank. The file names of ``files`` are beside it."""

    format: str = FORMAT
    version: int = VERSION
    kind: str = "look"
    number: int  # 1 or 2
    host: str
    wall_ns: int
    monotonic_ns: int
    job: JobIdentity
    rank: SeenRank
    process: ProcessFacts | None  # None: the process has ended
    stacks: Any = None  # py-spy's JSON: a list of threads with ``frames``, innermost first; None: see ``refused``
    files: tuple[str, ...] = ()  # JSON or pickles of the flight recorder, stacks of faulthandler
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLook:
    """The contents of the job's store (torch's TCPStore), read without writing or waiting."""

    format: str = FORMAT
    version: int = VERSION
    kind: str = "store"
    host: str
    wall_ns: int
    monotonic_ns: int
    job: JobIdentity
    address: str  # "10.0.0.4:29500"
    keys: tuple[str, ...]  # without torch's "/": "default_pg/0//cpu//0/3": rank 3 came to init_process_group
    complete: bool  # False: this torch cannot list keys; ``keys`` are those that exist of ``asked``
    asked: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)  # of debug servers, and TORCH_NCCL_DESYNC_DEBUG's traces


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMovement:
    """Whether a rank moved between the looks."""

    pid: int
    rank: int | None
    movement: Movement
    # What changed: "stack", "flight recorder", "received" (data from another rank that was seen), "ended". If nothing
    # changed, what was compared, with "slept" for a main thread that did not run at all.
    evidence: tuple[str, ...]
    main_cpu_ticks: int | None  # of the main thread between the looks: a rank that waits in a NCCL kernel spins
    main_slept: bool | None  # the main thread slept throughout, or was stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedJob:
    """What was seen of a job on this host."""

    format: str = FORMAT
    version: int = VERSION
    kind: str = "job"
    host: str
    wall_ns: int
    job: JobIdentity
    world_size: int | None  # None: no variable says it
    ranks: tuple[SeenRank, ...]
    looks: int
    gap_s: float  # the time between two looks
    movement: Movement
    movements: tuple[RankMovement, ...]
    refused: tuple[Refusal, ...]  # sources of the job as a whole that gave nothing
    files: tuple[str, ...]  # all files of the folder, relative to it

    @property
    def unseen(self) -> int | None:
        """How many ranks of the world were not seen here, or None if the world's size is unknown."""
        numbers = {rank.rank for rank in self.ranks} - {None}
        return None if self.world_size is None else max(0, self.world_size - len(numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """The result of asking one node, or one pod, to inspect its ranks."""

    node: str  # its name for Slurm or Kubernetes
    folder: str  # The folder beside ``nodes.json`` with what it sent. Empty: it sent nothing whole.
    reason: str = ""  # Why its ranks were not seen. Empty: they were.
    remedy: str = ""  # what to do about it; NODE stands for the node's name


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedNodes:
    """The nodes of a job that were asked to look at their ranks, in one folder with what they sent."""

    format: str = FORMAT
    version: int = VERSION
    kind: str = "nodes"
    wall_ns: int
    asked_by: str  # "srun" or "kubectl exec"
    nodes: tuple[NodeAnswer, ...]

    def unseen(self) -> list[Refusal]:
        """Return the nodes whose ranks were not seen, those with one reason together as ``source``."""
        alike = grouped(((node.reason, node.remedy), node.node) for node in self.nodes if node.reason)
        return [
            Refusal(source=name_list(nodes), reason=reason, remedy=remedy.replace("NODE", nodes[0]))
            for (reason, remedy), nodes in alike.items()
        ]
