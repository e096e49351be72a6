"""What was seen of a process that may explain why it stands still or died.

System call, locks, children, memory, connections, and how much work it did over some seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """The system call that a process's main thread sleeps in."""

    call: str
    """Its name: "read", "flock", "clock_nanosleep"."""
    fd: int | None = None
    """The file descriptor that it was given first, where the call takes one."""
    file: str | None = None
    """What the descriptor leads to: a path, "pipe", "socket", "eventfd"."""
    remote: str | None = None
    """The other end of a TCP connection, "10.0.0.4:29500"."""
    alone_on_fd0: bool = False
    """It waits for input on descriptor 0 and for nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLock:
    """A lock on a file, as /proc/locks has it. Processes of other hosts (NFS) and containers have no pid there."""

    path: str | None
    kind: str
    """"flock", "fcntl" or "ofd"."""
    holder_pid: int | None
    holder: str
    """The command of the holder; empty where it cannot be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that has what a rank waits for: the other end of a connection, or a file."""

    pid: int
    command: str


class LockKind(str, Enum):
    """What a lock file is to those who poll for it."""

    MARKER = "marker"
    """As long as the file is there, it is locked."""
    OWN_LOOP = "own-loop"
    """The same, by a loop of the script's own, which was found to look for this file."""
    KERNEL = "kernel"
    """The kernel keeps the lock on the file, and gives it back when its owner ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFile:
    """A lock file that a rank polls for."""

    path: str
    kind: LockKind
    exists: bool
    age_s: float | None = None
    """Since it was last written."""
    holders: tuple[Owner, ...] = ()
    """Processes that have it open or locked, without those that poll for it."""
    unseen: int = 0
    """Processes of its owner that could not be looked into."""
    named_pid: int | None = None
    """The process that is named in the file."""
    named_lives: bool | None = None
    """None also where it may be a process of another host."""
    named_host: str | None = None
    """The host of that process, where it is another than this one."""
    shared: bool = False
    """Other hosts may use it: it lies on a network file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSought:
    """The store to which a rank is connecting inside ``init_process_group``."""

    host: str
    port: int
    rank: int
    """The number that the rank was given there: number 0 serves the store, unless the agent does."""
    method: str
    """"env://", "tcp://", or empty where it is another."""
    of_agent: bool
    """TORCHELASTIC_USE_AGENT_STORE is set: the launcher's agent is to serve it, and every rank is a client."""
    given: str | None = None
    """MASTER_ADDR and MASTER_PORT of the environment that the process began with, "node0:29500"."""
    set_at: Frame | None = None
    """The user's line that put another address in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostChild:
    """A child process that has ended. Either ``exit_code`` or ``signal`` is set where it is known how."""

    pid: int
    name: str
    exit_code: int | None = None
    signal: str | None = None
    reaped: bool = False
    """The parent has asked how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident memory of a process: at the last look, and the most that was seen."""

    used_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What torch's allocator says of one GPU."""

    device: int
    allocated_bytes: int
    most_allocated_bytes: int
    reserved_bytes: int
    most_reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A limited space, and how much of it was in use."""

    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtError:
    """What a process had when an exception left its script."""

    memory: Memory | None = None
    address_space: Space | None = None
    """RLIMIT_AS and what counts against it; None where there is no such limit."""
    devices: tuple[DeviceMemory, ...] = ()
    shared_memory: Space | None = None
    """The file system at /dev/shm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An established TCP connection whose data the other end does not acknowledge. Ends are "10.0.0.4:29500"."""

    local: str
    remote: str
    unsent_bytes: int
    """Written by the process and not acknowledged."""
    retries: int
    """How often the kernel has sent the oldest of them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The TCP connections of one process; established ones, where nothing else is said."""

    by_address: tuple[tuple[str, int], ...] = ()
    """Own addresses, and how many connections each has, most first."""
    ends: tuple[str, ...] = ()
    """Own ends of all of them, by which a peer's connection is known to lead here."""
    stalled: tuple[Connection, ...] = ()
    unanswered: tuple[str, ...] = ()
    """Other ends that it has asked for a connection and that have not answered."""
    listening: tuple[str, ...] = ()
    """Addresses at which any process of the same network takes connections, "0.0.0.0:29500"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLine:
    """A warning of NCCL's log."""

    pid: int | None
    """The process that wrote it; None where the line does not say."""
    source: str
    """Where in NCCL: "transport/net_ib.cc:123"; empty where it does not say."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one process did, as rates over the time that it was looked at."""

    over_s: float
    cores: float
    """CPUs that all its threads used together."""
    wanted: float | None
    """The share of the time for which its main thread ran or waited for a core; None where the kernel does not say."""
    read_bytes_s: float | None
    """Of files and pipes, cached or not; None where that may not be read."""
    written_bytes_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingChild:
    """A process below a rank that does something."""

    pid: int
    name: str
    """The command without secrets, or what the kernel calls a Python process."""
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """A connection over which a process receives."""

    remote: str
    """"10.0.0.4:443"."""
    bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCauses:
    """All of it, of one rank. What could not be read is None or empty."""

    blocked: Blocked | None = None
    kernel_function: str | None = None
    """Where in the kernel the main thread sleeps: /proc/PID/wchan."""
    waits_for_lock: FileLock | None = None
    """The lock that the kernel has it wait for."""
    locks_of_others: tuple[FileLock, ...] = ()
    """Locks that other processes hold on files: what a process that polls for one may wait for."""
    lock_path: str | None = None
    """The lock file that a loop of Python's polls for, as its stack names it."""
    lock_file: LockFile | None = None
    """What was seen of that file."""
    store_port: int | None = None
    """MASTER_PORT as it was when the process began."""
    store: StoreSought | None = None
    """The store that it has not reached yet."""
    listener: Owner | None = None
    """Who takes connections at the other end of ``blocked``, where that is seen from here."""
    lost_children: tuple[LostChild, ...] = ()
    commands: tuple[tuple[int, str], ...] = ()
    """Pid and command line of its living children that are no Python of its own, secrets removed."""
    connections: Connections | None = None
    memory: Memory | None = None
    children_memory: Memory | None = None
    """Of all its descendants together."""
    children_count: int = 0
    """How many of them there were when they used the most."""
    busy_cores: float | None = None
    """CPUs that it and all below it used over the last seconds; None where it was not looked at for that long."""
    work: Work | None = None
    """What its own threads did over the last seconds."""
    working_children: tuple[WorkingChild, ...] = ()
    """The processes below it that did most, the busiest first."""
    receiving: Receiving | None = None
    """The connection over which it, or a process below it, received most while evidence was taken."""
    at_error: AtError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCauses:
    """What the processes of a host share."""

    group: Space | None = None
    """The cgroup that leaves the least memory: its limit, and the most that was seen in use."""
    machine: Space | None = None
    """All memory of the machine, and the most that was seen in use."""
    shared_memory: Space | None = None
    """The file system at /dev/shm, and the most that was seen in use."""
