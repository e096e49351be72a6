"""Facts about a process that may explain why it makes no progress or died.

They are its system call, locks, children, memory, connections, and how much work it did over some seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """The system call in which a process's main thread sleeps."""

    call: str
    """Its name: "read", "flock", "clock_nanosleep"."""
    fd: int | None = None
    """The first file descriptor among its arguments, if the call takes one."""
    file: str | None = None
    """What the descriptor refers to: a path, "pipe", "socket", "eventfd"."""
    remote: str | None = None
    """The other end of a TCP connection, "10.0.0.4:29500"."""
    alone_on_fd0: bool = False
    """It waits only for input on descriptor 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLock:
    """A lock on a file, from /proc/locks. Processes of other hosts (NFS) and containers have no pid there."""

    path: str | None
    kind: str
    """"flock", "fcntl" or "ofd"."""
    holder_pid: int | None
    holder: str
    """The command of the holder; empty if it is not visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that holds what a rank waits for: the other end of a connection, or a file."""

    pid: int
    command: str


class LockKind(str, Enum):
    """What a lock file means to the processes that poll for it."""

    MARKER = "marker"
    """The lock is held as long as the file exists."""
    OWN_LOOP = "own-loop"
    """Like ``MARKER``, but the script's own loop polls for the file."""
    KERNEL = "kernel"
    """The kernel holds the lock on the file, and releases it when its owner ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFile:
    """A lock file that a rank polls for."""

    path: str
    kind: LockKind
    exists: bool
    age_s: float | None = None
    """Time since it was last written."""
    holders: tuple[Owner, ...] = ()
    """Processes that have it open or locked, except those that poll for it."""
    unseen: int = 0
    """How many processes of its owner could not be inspected."""
    named_pid: int | None = None
    """The pid that the file contains."""
    named_lives: bool | None = None
    """Whether that process is alive. None also if it may be on another host."""
    named_host: str | None = None
    """The host of that process, if it is not this one."""
    shared: bool = False
    """The file is on a network file system, so other hosts may use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSought:
    """The store that a rank is connecting to inside ``init_process_group``."""

    host: str
    port: int
    rank: int
    """The rank argument of that call. Rank 0 serves the store unless the launcher's agent does."""
    method: str
    """"env://", "tcp://", or empty for any other method."""
    of_agent: bool
    """TORCHELASTIC_USE_AGENT_STORE is set: the launcher's agent serves the store, and every rank is a client."""
    given: str | None = None
    """MASTER_ADDR and MASTER_PORT when the process began, as "node0:29500"."""
    set_at: Frame | None = None
    """The user's line that replaced that address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostChild:
    """A child process that has ended. ``exit_code`` or ``signal`` is set if it is known how."""

    pid: int
    name: str
    exit_code: int | None = None
    signal: str | None = None
    reaped: bool = False
    """The parent has collected its exit status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident memory of a process: in the last sample, and the highest value seen."""

    used_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The figures of torch's allocator for one GPU."""

    device: int
    allocated_bytes: int
    most_allocated_bytes: int
    reserved_bytes: int
    most_reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A limited space and how much of it was in use."""

    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtError:
    """The memory of a process at the time an exception left its script."""

    memory: Memory | None = None
    address_space: Space | None = None
    """RLIMIT_AS and what counts against it, or None if there is no such limit."""
    devices: tuple[DeviceMemory, ...] = ()
    shared_memory: Space | None = None
    """The file system at /dev/shm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An established TCP connection whose data the peer does not acknowledge. Ends look like "10.0.0.4:29500"."""

    local: str
    remote: str
    unsent_bytes: int
    """Bytes that the process wrote and that are not acknowledged."""
    retries: int
    """How often the kernel has resent the oldest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The TCP connections of one process. They are established unless a field says otherwise."""

    by_address: tuple[tuple[str, int], ...] = ()
    """Local addresses with their number of connections, most first."""
    ends: tuple[str, ...] = ()
    """The local ends of all connections. They show whether a peer's connection leads here."""
    stalled: tuple[Connection, ...] = ()
    unanswered: tuple[str, ...] = ()
    """Remote ends that have not answered its request for a connection."""
    listening: tuple[str, ...] = ()
    """Addresses on which any process in the same network namespace listens, such as "0.0.0.0:29500"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLine:
    """A warning in NCCL's log."""

    pid: int | None
    """The process that wrote it, or None if the line does not say."""
    source: str
    """Where in NCCL: "transport/net_ib.cc:123"; empty if the line does not say."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one process did, as rates over the observation time."""

    over_s: float
    cores: float
    """CPUs that all its threads used together."""
    wanted: float | None
    """The share of time that its main thread ran or waited for a core, or None if the kernel does not say."""
    read_bytes_s: float | None
    """Bytes read from files and pipes, cached or not. None if there is no permission to see that."""
    written_bytes_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingChild:
    """A busy descendant of a rank."""

    pid: int
    name: str
    """The command without secrets, or the kernel's name for a Python process."""
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """A connection over which a process receives."""

    remote: str
    """"10.0.0.4:443"."""
    bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCauses:
    """All such facts about one rank. A field is None or empty if it could not be read."""

    blocked: Blocked | None = None
    kernel_function: str | None = None
    """The kernel function in which the main thread sleeps: /proc/PID/wchan."""
    waits_for_lock: FileLock | None = None
    """The lock that it waits for in the kernel."""
    locks_of_others: tuple[FileLock, ...] = ()
    """Locks that other processes hold on files. A process that polls for a lock may wait for one of these."""
    lock_path: str | None = None
    """The lock file that a Python loop polls for, according to its stack."""
    lock_file: LockFile | None = None
    """The state of that file."""
    store_port: int | None = None
    """MASTER_PORT when the process began."""
    store: StoreSought | None = None
    """The store that it has not reached yet."""
    listener: Owner | None = None
    """The process that listens at the other end of ``blocked``, if it is visible from here."""
    lost_children: tuple[LostChild, ...] = ()
    commands: tuple[tuple[int, str], ...] = ()
    """Pid and command line of its living children, except its own Python processes. Secrets are removed."""
    connections: Connections | None = None
    memory: Memory | None = None
    children_memory: Memory | None = None
    """The memory of all its descendants together."""
    children_count: int = 0
    """How many descendants there were at their peak of memory."""
    busy_cores: float | None = None
    """CPUs that it and its descendants used over the last seconds, or None if it was not observed that long."""
    work: Work | None = None
    """What its own threads did over the last seconds."""
    working_children: tuple[WorkingChild, ...] = ()
    """Its busiest descendants, the busiest first."""
    receiving: Receiving | None = None
    """The connection over which it or a descendant received most while evidence was taken."""
    at_error: AtError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCauses:
    """The memory that the processes of a host share."""

    group: Space | None = None
    """The cgroup that leaves the least memory: its limit and its peak use."""
    machine: Space | None = None
    """All memory of the machine and its peak use."""
    shared_memory: Space | None = None
    """The file system at /dev/shm and its peak use."""
