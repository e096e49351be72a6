"""The facts about a job: its ranks, their calls and stacks, and how they ended. No judgment, no I/O.

All times are nanoseconds of CLOCK_MONOTONIC, which the processes of one host share.
``None`` means "not known". An empty tuple means "checked, and there was none".
"""

from __future__ import annotations

import signal
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import Consistency, NonFinite
    from ddpdoctor.model.data import LoaderSeen
    from ddpdoctor.model.launch import Connecting
    from ddpdoctor.model.node import Node
    from ddpdoctor.model.stacks import Frame, StackSample
    from ddpdoctor.model.steps import FetchTimes, GradientTimes, LineSeen, Speed, StepTimes

RUN_FORMAT = "ddpdoctor-run"
RUN_VERSION = 1
END_NAME = "end.json"  # a ``JobEnd``, in the run folder
REACHED_NAME = "reached.json"  # a node's attempts to connect to the other nodes: a list of ``Connecting``
RECORD_NAME = "record.json"  # a ``RecordPlace``, in a run folder whose record is elsewhere while the job runs
# The comparison of replicas so far, a ``Consistency``, written every few seconds while the job runs.
REPLICAS_NAME = "replicas.json"
# What a member knows of all members while the job runs: a ``NodesSeen``, written every few seconds.
MEMBERS_NAME = "members.json"
JUMPS = frozenset({"continue", "break", "return"})
LOOPS = frozenset({"for", "fixed-for", "while"})
# Values of ``Call.op`` that are phases of training, not collectives. ``work_wait`` is Work.wait of an open call.
PHASES = frozenset({"init_process_group", "new_group", "destroy_process_group", "ddp_init", "work_wait"}) | {
    "ddp_forward",
    "ddp_forward_no_grad",
    "backward",
    "next_batch",
    "epoch",
}
# Values of ``Call.op`` that concern one peer only.
POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """The system call in which a process's main thread sleeps."""

    call: str  # its name: "read", "flock", "clock_nanosleep"
    fd: int | None = None  # the first file descriptor among its arguments, if the call takes one
    file: str | None = None  # what the descriptor refers to: a path, "pipe", "socket", "eventfd"
    remote: str | None = None  # the other end of a TCP connection, "10.0.0.4:29500"
    alone_on_fd0: bool = False  # it waits only for input on descriptor 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLock:
    """A lock on a file, from /proc/locks. Processes of other hosts (NFS) and containers have no pid there."""

    path: str | None
    kind: str  # "flock", "fcntl" or "ofd"
    holder_pid: int | None
    holder: str  # the command of the holder; empty if it is not visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that holds what a rank waits for: the other end of a connection, or a file."""

    pid: int
    command: str


class LockKind(str, Enum):
    """What a lock file means to the processes that poll for it."""

    MARKER = "marker"  # the lock is held as long as the file exists
    OWN_LOOP = "own-loop"  # like ``MARKER``, but the script's own loop polls for the file
    KERNEL = "kernel"  # the kernel holds the lock on the file, and releases it when its owner ends


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFile:
    """A lock file that a rank polls for."""

    path: str
    kind: LockKind
    exists: bool
    age_s: float | None = None  # time since it was last written
    holders: tuple[Owner, ...] = ()  # processes that have it open or locked, except those that poll for it
    unseen: int = 0  # how many processes of its owner could not be inspected
    named_pid: int | None = None  # the pid that the file contains
    named_lives: bool | None = None  # Whether that process is alive. None also if it may be on another host.
    named_host: str | None = None  # the host of that process, if it is not this one
    shared: bool = False  # the file is on a network file system, so other hosts may use it


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSought:
    """The store that a rank is connecting to inside ``init_process_group``."""

    host: str
    port: int
    rank: int  # The rank argument of that call. Rank 0 serves the store unless the launcher's agent does.
    method: str  # "env://", "tcp://", or empty for any other method
    of_agent: bool  # TORCHELASTIC_USE_AGENT_STORE is set: the agent serves the store, every rank is a client
    given: str | None = None  # MASTER_ADDR and MASTER_PORT when the process began, as "node0:29500"
    set_at: Frame | None = None  # the user's line that replaced that address


@dataclass(frozen=True, slots=True, kw_only=True)
class LostChild:
    """A child process that has ended. ``exit_code`` or ``signal`` is set if it is known how."""

    pid: int
    name: str
    exit_code: int | None = None
    signal: str | None = None
    reaped: bool = False  # the parent has collected its exit status


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
    address_space: Space | None = None  # RLIMIT_AS and what counts against it, or None if there is no such limit
    devices: tuple[DeviceMemory, ...] = ()
    shared_memory: Space | None = None  # the file system at /dev/shm


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An established TCP connection whose data the peer does not acknowledge. Ends look like "10.0.0.4:29500"."""

    local: str
    remote: str
    unsent_bytes: int  # bytes that the process wrote and that are not acknowledged
    retries: int  # how often the kernel has resent the oldest of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The TCP connections of one process. They are established unless a field says otherwise."""

    by_address: tuple[tuple[str, int], ...] = ()  # local addresses with their number of connections, most first
    ends: tuple[str, ...] = ()  # The local ends of all connections. They show whether a peer's connection leads here.
    stalled: tuple[Connection, ...] = ()
    unanswered: tuple[str, ...] = ()  # remote ends that have not answered its request for a connection
    listening: tuple[str, ...] = ()  # in its network namespace, by any process: "0.0.0.0:29500"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLine:
    """A warning in NCCL's log."""

    pid: int | None  # the process that wrote it, or None if the line does not say
    source: str  # where in NCCL: "transport/net_ib.cc:123"; empty if the line does not say
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one process did, as rates over the observation time."""

    over_s: float
    cores: float  # CPUs that all its threads used together
    wanted: float | None  # the share of time that its main thread ran or waited for a core
    read_bytes_s: float | None  # from files and pipes, cached or not; None: not permitted
    written_bytes_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingChild:
    """A busy descendant of a rank."""

    pid: int
    name: str  # the command without secrets, or the kernel's name for a Python process
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """A connection over which a process receives."""

    remote: str  # "10.0.0.4:443"
    bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCauses:
    """All such facts about one rank. A field is None or empty if it could not be read."""

    blocked: Blocked | None = None
    kernel_function: str | None = None  # the kernel function in which the main thread sleeps: /proc/PID/wchan
    waits_for_lock: FileLock | None = None  # the lock that it waits for in the kernel
    locks_of_others: tuple[FileLock, ...] = ()  # a process that polls for a lock may wait for one
    lock_path: str | None = None  # the lock file that a Python loop polls for, according to its stack
    lock_file: LockFile | None = None  # the state of that file
    store_port: int | None = None  # MASTER_PORT when the process began
    store: StoreSought | None = None  # the store that it has not reached yet
    listener: Owner | None = None  # who listens at the other end of ``blocked``, if visible here
    lost_children: tuple[LostChild, ...] = ()
    commands: tuple[tuple[int, str], ...] = ()  # of living children without its own Python ones
    connections: Connections | None = None
    memory: Memory | None = None
    children_memory: Memory | None = None  # the memory of all its descendants together
    children_count: int = 0  # how many descendants there were at their peak of memory
    busy_cores: float | None = None  # CPUs that it and its descendants used over the last seconds
    work: Work | None = None  # what its own threads did over the last seconds
    working_children: tuple[WorkingChild, ...] = ()  # its busiest descendants, the busiest first
    receiving: Receiving | None = None  # what it or a descendant received most over
    at_error: AtError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCauses:
    """The memory that the processes of a host share."""

    group: Space | None = None  # the cgroup that leaves the least memory: its limit and its peak use
    machine: Space | None = None  # all memory of the machine and its peak use
    shared_memory: Space | None = None  # the file system at /dev/shm and its peak use


class Fault(str, Enum):
    """What is wrong with the gradients of some parameters."""

    UNFINISHED = "unfinished"  # a backward did not compute them, and DDP waits for them
    STATIC = "static"  # the same with ``static_graph=True``: they had gradients in the first step
    TWICE = "twice"  # autograd gave them twice for one forward of DDP


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerSaid:
    """Parameters of a DDP model whose gradients were missing, or ready twice, on one rank."""

    what: Fault
    names: tuple[str, ...]  # the first names in the order of the model; empty if the model is unknown
    count: int
    of: int  # number of parameters that DDP reduces, or 0 if the model is unknown
    outputs: tuple[str, ...] = ()  # variables of the script that were computed from them but not used in the loss
    site: Frame | None = None  # the user's line that called this backward, if it was recorded


class Presence(str, Enum):
    """Whether a member takes part."""

    HERE = "here"  # it sent a message recently, or it is the reporting member itself
    LEFT = "left"  # it announced its end, with a status
    SILENT = "silent"  # it stopped sending messages without announcing its end
    ABSENT = "absent"  # it never joined


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """The state of one member. Times are CLOCK_MONOTONIC of the reporting node."""

    number: int
    host: str  # empty if it never joined and its name is unknown
    presence: Presence
    heard_ns: int | None = None  # when its last message arrived
    status: int | None = None  # exit status of its launcher, if the member left
    clock_offset_ns: int | None = None  # its CLOCK_MONOTONIC minus that of the reporting node
    clock_error_ns: int | None = None  # half of the shortest round trip
    wall_offset_s: float | None = None
    gathered: bool = False  # its records are included in the facts
    ranks: tuple[int, ...] = ()  # its ranks in the last attempt, from its messages or records; empty: unknown
    alive: int | None = None  # its ranks that live, from its last message; None: unknown
    waits_s: float | None = None  # the longest time that one of them has been in a call that needs others, or None
    why: str = ""  # A phrase that says why it is missing, for example from an attempt to connect. Empty if unknown.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    """All members of a job, by number."""

    expected: int  # number of members at launch; the least number for an elastic job
    own: int  # number of the member whose view this is
    nodes: tuple[NodeSeen, ...]
    # Each member is one rank that the batch system started. If False, a launcher waits for all nodes before it starts
    # ranks. Then a node without messages must have joined if ranks run here.
    of_ranks: bool = False
    alone_since_ns: int | None = None  # since when no other member has sent a message within the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The launch of a job. `wrap` writes this before it starts anything. None: unknown or not requested."""

    format: str = RUN_FORMAT
    version: int = RUN_VERSION
    command: tuple[str, ...] | None = None  # without secrets
    started_at: str | None = None  # ISO 8601, UTC
    launched_ns: int | None = None  # CLOCK_MONOTONIC of this host
    hang_timeout_s: float | None = None
    debug_level: str | None = None
    check_every: int | None = None  # steps between two comparisons of replicas, 0 for none; None: an older version
    allow_different: tuple[str, ...] = ()
    speed: bool = False  # the user asked where the time of a step goes
    host: str = ""
    torch_version: str | None = None
    environment: dict[str, str] = field(default_factory=dict)  # variables of an allow-list
    # What started the watch, with its own name for each setting: "wrap", "pytest", "ddpdoctor.watch" or the class of a
    # callback.
    entry: str = "wrap"
    launcher: str | None = None  # how the ranks are started; "command" if the user's own command starts them
    nproc: int | None = None  # ranks on this node
    nnodes: int | None = None
    node_rank: int | None = None
    world_size: int | None = None
    watcher_pid: int | None = None  # the process of `wrap`
    watcher_ticks: int | None = None  # its start time, which distinguishes it from a later process with the same pid
    run_dir: str = ""  # if this record is elsewhere while the job runs: only then does its ``RecordPlace`` count


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlace:
    """Where a job's record is while it runs, if its run folder is on a shared file system or full."""

    host: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended, or its state when it was reported: saved so that the folder can be judged again."""

    hung: bool  # ddpdoctor stopped it because it hung
    interrupted: bool
    exit_status: int | None  # exit status of `wrap`, or None if it was cut off and the status is unknown
    started_at: str  # ISO 8601, UTC, like ``ended_at``
    ended_at: str
    ignore: tuple[str, ...] = ()  # codes of findings that the user hides


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement that decides which lines run."""

    # "function", "if", "for", "fixed-for" (over a range of constants, so equally often on all ranks), "while", "try",
    # "except", "continue", "break" or "return".
    kind: str
    line: int
    last_line: int
    body_last_line: int | None = None  # the last line of an "if" without its else branch
    decided_at: tuple[int, ...] = ()  # of one that asks a function in its file: the lines that decide its answer

    def holds(self, line: int) -> bool:
        return self.line <= line <= self.last_line

    def holds_both(self, line: int, other: int) -> bool:
        """Return whether two lines are in the same branch of the statement: a rank at one has not gone around it."""
        end = self.last_line if self.body_last_line is None else self.body_last_line
        return self.holds(line) and self.holds(other) and (line <= end) == (other <= end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFlow:
    """The statements of one file, in the order of their lines."""

    file: str
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logger:
    """One use of TensorBoard, W&B or MLflow."""

    name: str  # ``tensorboard``, ``wandb`` or ``mlflow``
    # What finds the log again. All have ``folder``: that of the event files, of W&B's files, or the one in which the
    # script used MLflow. W&B has ``id``, ``project``, ``entity``, ``mode`` and ``base_url``, and MLflow ``id`` and
    # ``tracking_uri``.
    place: Mapping[str, str]


class Life(str, Enum):
    """Whether a process runs, and how it ended."""

    RUNNING = "running"
    EXITED = "exited"  # ended by itself; see ``exit_code``
    SIGNALED = "signaled"  # ended by a signal; see ``signal``
    NEVER_STARTED = "never-started"  # the job's world includes this rank, but no process of it was ever seen
    GONE = "gone"  # ended in an unknown way


class DeviceState(str, Enum):
    """The state of a call that is pending on a device, according to torch's flight recorder."""

    SCHEDULED = "scheduled"  # queued: its kernel has not started
    STARTED = "started"  # its kernel runs
    UNKNOWN = "unknown"  # Queued or running. torch could tell with ``TORCH_NCCL_ENABLE_TIMING``.
    UNTIMED = "untimed"  # Queued or running. The backend cannot tell: nccl2, which is "nccl" in torch 2.15.
    # The last call that was queued, on a device that still has work. torch does not tell whether it has completed:
    # nccl2 under DETAIL.
    UNTOLD = "untold"
    GIVEN_UP = "given up"  # no more pending: torch gave it up at its limit, and then ended the process


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """What calls from one line with one operation, group, dtype and shape share.

    ``op`` is what ran ("all_reduce"), and ``api`` is what the user called ("broadcast_object_list"). The ``op`` of a
    phase is one of ``PHASES``.
    """

    op: str
    api: str
    group: str
    dtype: str | None
    shape: tuple[int, ...] | None
    tensors: int  # number of tensors in the list; 1 for a single tensor, 0 for none
    peer: int | None  # the other global rank of a point-to-point call, or the root of a rooted collective, else None
    redop: str | None
    site: Frame | None  # the innermost user line that made the call
    is_async: bool
    failed: bool  # the call ended by raising
    thread_is_main: bool

    @property
    def numbered(self) -> bool:
        """Whether a number above zero is the sequence number of a collective within its group."""
        return bool(self.group) and self.op not in PHASES

    def shared(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in CallKind.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(CallKind):
    """One recorded call: a collective, a point-to-point call, or a phase of training."""

    index: int
    seq: int | None  # numbers the collectives within their group, from 1; None for phases and point-to-point calls
    started_ns: int
    ended_ns: int | None  # None while the call has not returned, or has not completed if it is asynchronous
    # For a phase: how many collectives its group had begun when it started, or None if unknown.
    begun: int | None = None
    awaits: int | None = None  # for ``work_wait``: the index of the asynchronous call that it waits for
    # Set if torch's flight recorder lists the call as incomplete on the device. The host may have gone on.
    device_state: DeviceState | None = None
    native: bool = False  # C++ made it (DDP's reducer, compiled code): no Python call was recorded, and no ``site``

    @property
    def kind(self) -> CallKind:
        """The part of it that it can share with others."""
        return CallKind(**self.shared())


class CallLog(Sequence[Call]):
    """Thousands of calls in the order in which they began, packed. A ``Call`` is built on access and is not kept.

    ``which`` is the position in ``kinds``. ``numbers`` is the call's number within the group; for a phase, it is how
    many collectives had begun (negative if unknown). ``ended_ns`` is 0 while a call is open. ``ahead_ns`` is how far
    the clock of the columns is ahead of that of the calls: they are shared with the rings instead of copied.
    """

    def __init__(self, kinds: tuple[CallKind, ...], columns: Iterable[Sequence[int]], ahead_ns: int = 0) -> None:
        self.kinds = kinds
        self.ahead_ns = ahead_ns
        self._columns = tuple(columns)
        self.which, self.indexes, self.numbers, self._started_ns, self._ended_ns = self._columns

    @property
    def started_ns(self) -> Sequence[int]:
        ahead_ns = self.ahead_ns
        return [time_ns - ahead_ns for time_ns in self._started_ns] if ahead_ns else self._started_ns

    @property
    def ended_ns(self) -> Sequence[int]:
        """When each call ended, or 0."""
        ahead_ns = self.ahead_ns
        return [time_ns and time_ns - ahead_ns for time_ns in self._ended_ns] if ahead_ns else self._ended_ns

    def __len__(self) -> int:
        return len(self.which)

    @overload
    def __getitem__(self, at: int) -> Call: ...

    @overload
    def __getitem__(self, at: slice) -> CallLog: ...

    def __getitem__(self, at: int | slice) -> Call | CallLog:
        if isinstance(at, slice):
            return CallLog(self.kinds, (column[at] for column in self._columns), self.ahead_ns)
        kind = self.kinds[self.which[at]]
        number, ended_ns, is_phase = self.numbers[at], self._ended_ns[at], kind.op in PHASES
        return Call(
            **kind.shared(),
            index=self.indexes[at],
            seq=number if kind.group and not is_phase and number > 0 else None,
            started_ns=self._started_ns[at] - self.ahead_ns,
            ended_ns=ended_ns - self.ahead_ns if ended_ns else None,
            begun=number if is_phase and kind.op != "work_wait" and number >= 0 else None,
            awaits=number if kind.op == "work_wait" and number > 0 else None,
        )

    def __iter__(self) -> Iterator[Call]:
        return map(self.__getitem__, range(len(self)))

    def ended(self) -> CallLog:
        places, before = self._open_places, len(self) - len(self._open_places)
        if not places or places[0] == before:  # the first entries of each column, without a copy
            views = (memoryview(column) if isinstance(column, array) else column for column in self._columns)
            return CallLog(self.kinds, (view[:before] for view in views), self.ahead_ns)
        chosen = bytearray(b"\1") * len(self)
        for at in places:
            chosen[at] = 0
        columns = (array("q", compress(column, chosen)) for column in self._columns)
        return CallLog(self.kinds, columns, self.ahead_ns)

    def open(self) -> tuple[Call, ...]:
        return tuple(map(self.__getitem__, self._open_places))

    def shifted(self, ahead_ns: int) -> CallLog:
        """Return the calls by another clock; that of this log is ``ahead_ns`` ahead of it."""
        return CallLog(self.kinds, self._columns, self.ahead_ns + ahead_ns)

    @cached_property
    def _open_places(self) -> list[int]:
        ended_ns = self._ended_ns if isinstance(self._ended_ns, array) else array("q", self._ended_ns)
        found: list[int] = []
        try:
            while True:
                found.append(ended_ns.index(0, found[-1] + 1 if found else 0))
        except ValueError:
            return found

    @cached_property
    def counts(self) -> dict[CallKind, int]:
        return {self.kinds[which]: count for which, count in Counter(self.which).items()}

    @cached_property
    def last(self) -> dict[CallKind, int]:
        """The position of the last call of each kind."""
        return {self.kinds[which]: at for which, at in dict(zip(self.which, range(len(self)), strict=True)).items()}

    def of_kinds(self, wanted: Callable[[CallKind], bool]) -> tuple[Call, ...]:
        places = {place for place, kind in enumerate(self.kinds) if wanted(kind)}
        return tuple(self[at] for at, which in enumerate(self.which) if which in places) if places else ()

    def last_of_kinds(self, wanted: Callable[[CallKind], bool]) -> Call | None:
        at = max((at for kind, at in self.last.items() if wanted(kind)), default=None)
        return None if at is None else self[at]


NO_CALLS = CallLog((), ((),) * 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """How long a completed collective ran on the device, including waits. The rank that joined last ran shortest."""

    group: str
    seq: int
    op: str
    ran_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A process group as one rank sees it."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    enqueued: int  # Collectives begun in this group. Those of DDP's C++ reducer count, point-to-point calls do not.
    mesh_dim: str = ""  # the dimension of the device mesh that it belongs to, such as "tp"; empty if it has none
    timeout_s: float | None = None  # torch's own time limit for a call of this group, if the backend says it


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that left the script, a thread, or a recorded call."""

    type: str
    message: str
    time_ns: int
    thread_is_main: bool
    uncaught: bool  # True if it ended its thread or process. False if only a recorded call raised it.
    in_call: str | None  # the ``op`` of the recorded call that raised it, or None if it came from elsewhere
    frames: tuple[Frame, ...]  # outermost first; an error that a loader worker passed on has the worker's frames
    from_child: bool = False  # True if the frames are those of a child process, such as a DataLoader worker
    reducer: ReducerSaid | None = None  # if DDP's reducer raised it: the parameters that it complains about
    passed_on_as: str = ""  # the type of the error that torch raised because of this one, as in a pipeline
    of_ranks: tuple[int, ...] = ()  # whose errors torch passed on to all ranks, as in a distributed checkpoint
    first: Raised | None = None  # its cause, or what the rank was handling when a call failed


class Helper(str, Enum):
    """What works for a rank beside its main thread."""

    THREAD = "thread"
    CHILD = "child"
    TASK = "task"  # of asyncio
    CALL = "call"  # in a pool of threads or processes


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperError:
    """An error that ended a helper. That of a task or a call was read by nothing."""

    who: Helper
    name: str = ""  # the pid of a child, the name of a task
    error: Raised


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A descendant of a rank: a DataLoader worker, a multiprocessing child, a subprocess."""

    pid: int
    name: str  # the command, or its name in multiprocessing
    proc_state: str | None
    samples: tuple[StackSample, ...]
    idle: bool  # it waits for work in a queue's get or in the worker loop


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingFile:
    """The file of ``init_method="file://..."`` just before a rank opened it."""

    path: str
    size_bytes: int  # 0: it did not exist; torch removes it only if all ranks end well


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedByThread:
    """Another thread than the main one ended the process with an error status or a signal, as a watchdog does."""

    place: Frame | None = None  # the user's line that did it; None: no line of Python did


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSeen:
    """A parameter or a buffer of a module, under the module's name for it."""

    name: str
    shape: tuple[int, ...] | None  # None for a parameter of a lazy module that has no shape yet
    dtype: str
    requires_grad: bool
    is_buffer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """A module at the time it was passed to DDP's constructor."""

    group: str  # name of the process group that DDP reduces in
    digest: str  # of number, order, names, shapes, dtypes and ``requires_grad`` of the tensors
    count: int  # number of parameters, plus buffers if DDP synchronizes them
    tensors: tuple[TensorSeen, ...]  # The first tensors in order. Fewer than ``count`` if not all fit.
    site: Frame | None  # the user's line that made the DDP model
    finds_unused: bool | None = None  # whether ``find_unused_parameters=True`` was given, or None if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeCall:
    """Where a rank was before the last call that needed other ranks."""

    until_ns: int  # when that call began, or 0 if it was not recorded (for example because it failed at once)
    lines: tuple[Frame, ...]  # the user's lines at which it was sampled, the most frequent first


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A call of torch.save that writes a file, as scripts do for a checkpoint."""

    began_ns: int
    ended_ns: int | None  # None: it had not ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """All facts about one rank."""

    rank: int
    local_rank: int | None
    host: str
    pid: int | None
    attempt: int
    life: Life
    exit_code: int | None = None  # set if ``life`` is EXITED
    signal: str | None = None  # such as ``SIGKILL``; set if ``life`` is SIGNALED
    ended_ns: int | None = None
    after_stop: bool = False  # it ended after the launcher, ddpdoctor or the user had begun to stop the job
    oom_killed: bool | None = None  # whether the kernel's OOM killer sent the signal, or None if unknown
    proc_state: str | None = None  # state letter of /proc/PID/stat at the time of evidence: R, S, D, T, t, Z
    cpu_share: float | None = None  # of one core since its last progress; above 1 with several threads
    traced_by: int | None = None  # the pid of an attached debugger
    frozen_since_ns: int | None = None  # since when the watcher has found it stopped (state T or t) at every check
    recorded: bool = False  # a recorder ran in this process
    answered: bool = False  # the recorder's own thread answered, so the GIL was available
    device_unread: bool = False  # it uses NCCL, and torch did not say what is pending on its device
    # Whether its device has done all that its default streams were given; asked only if torch does not tell which calls
    # have completed.
    device_idle: bool | None = None
    started_ns: int | None = None
    world_size: int | None = None  # the world size given to ``init_process_group``, once it was called
    init_timeout_s: float | None = None  # the time limit of ``init_process_group``, once it was called
    init_ns: int | None = None  # when it first called ``init_process_group``
    meeting: MeetingFile | None = None  # the file in which it meets the other ranks, or None if it uses none
    initialized: bool = False  # ``init_process_group`` has returned
    main_ended_ns: int | None = None  # when the script's own code had ended and the interpreter began to shut down
    exit_call: Frame | None = None  # the user line of the last sys.exit or os._exit
    exit_asked: str | None = None  # the ``repr`` of that call's argument: "3", "None"
    ended_by_thread: EndedByThread | None = None
    exit_signal: str = ""  # whose handler in the script made that call, such as ``SIGTERM``
    before_call: BeforeCall | None = None
    last_place: Frame | None = None  # the last user line seen before the end
    fatal_place: Frame | None = None  # the innermost user line of the dump that a fatal signal left
    fatal_outside: bool = False  # the fatal signal hit a thread that runs no Python, such as NCCL's watchdog
    open_calls: tuple[Call, ...] = ()  # those that have not ended, oldest first, then those pending on a device
    device_times: tuple[DeviceTime, ...] = ()  # the last that completed on it, oldest first
    recent_calls: CallLog = NO_CALLS  # ended calls that the ring still holds, oldest first
    groups: tuple[GroupState, ...] = ()
    samples: tuple[StackSample, ...] = ()
    children: tuple[Child, ...] = ()
    raised: tuple[Raised, ...] = ()
    handled: Raised | None = None  # what the main thread was handling when it was sampled
    helper_errors: tuple[HelperError, ...] = ()  # that ended its threads, children, tasks or pool calls
    models: tuple[ModelSeen, ...] = ()  # the modules that DDP wrapped, in that order
    parameters: tuple[TensorSeen, ...] = ()  # the parameters that optimizers train without DDP
    unfinished: ReducerSaid | None = None  # the gradients that DDP still waited for after its last backward
    nonfinite: tuple[NonFinite, ...] | None = None  # the first with inf or NaN; None: not checked
    loaders: tuple[LoaderSeen, ...] | None = None  # the data loaders that it used, or None if that was not recorded
    step_times: StepTimes | None = None  # how long its last training steps took, or None if there were none
    speed: Speed | None = None  # the parts of its steps over the whole run, or None if there were none
    gradient_times: tuple[GradientTimes, ...] = ()  # empty on a GPU, and with few steps
    fetch_times: FetchTimes | None = None  # of its loader workers; None: it has none
    lines_seen: tuple[LineSeen, ...] = ()  # lines at which it was sampled while it trained, the most frequent first
    last_save: Save | None = None
    steps: int = 0
    batches: int = 0
    epochs: int = 0
    last_progress_ns: int | None = None  # later by the time that it has waited for a core since
    starved_ns: int = 0  # how long it made no progress while it or its children were ready to run and got no core
    lost: str | None = None  # why the record of this rank is missing or incomplete
    lacks: tuple[str, ...] = ()  # the recorder's hooks that its torch, or its launcher's torch, does not support
    causes: ProcessCauses | None = None  # facts about its process that may explain why it makes no progress or died


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSeen:
    """Facts that another node's ``wrap`` collected about its own host, beside its ranks."""

    host: str
    causes: HostCauses | None = None
    machine: Node | None = None
    reached: tuple[Connecting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All facts about a job at one point in time."""

    now_ns: int
    hang_timeout_s: float
    ranks: tuple[Rank, ...]
    world_size: int | None  # ranks that the launcher was asked for over all nodes, or None if unknown
    nnodes: int
    local_ranks_expected: int | None  # ranks that this node's launcher was asked to start
    ended: bool  # the launcher has ended
    launcher_status: int | None = None
    launched_ns: int = 0
    stopping_since_ns: int | None = None  # when the launcher, ddpdoctor or the user began to stop the job
    interrupted_by: str | None = None  # ``SIGINT`` or ``SIGTERM`` if the user or the scheduler ended the job
    node_rank: int | None = None
    may_run_elsewhere: bool = False  # some ranks may run on other hosts, where they are not visible
    debug_level: str = "OFF"
    entry: str = "wrap"  # what started the watch, as ``Run.entry``
    backend: str = ""  # as torch names that of the default group: "cpu:gloo,cuda:nccl". Empty before it is made.
    host_causes: HostCauses | None = None  # the memory that its processes share on this host
    machine: Node | None = None  # this host's network and GPUs, read if a collective did not complete
    control_flow: tuple[ControlFlow, ...] = ()  # read if ranks took different branches
    consistency: Consistency | None = None  # the comparison of its replicas, or None if they were not compared
    speed_asked: bool = False  # the user asked where the time of a step goes
    nccl_lines: tuple[NcclLine, ...] = ()  # the last warnings of NCCL's own logs
    members: NodesSeen | None = None  # the ``wrap`` processes of all nodes, or None if the launch has only this one
    host: str = ""  # the host whose view this is
    elsewhere: tuple[HostSeen, ...] = ()  # the other hosts whose facts are included
    reached: tuple[Connecting, ...] = ()  # attempts to connect, made when ranks were missing


def shell_status(status: int) -> int:
    """Return the exit status that a shell shows for a process: 128 plus the number of the signal that ended it."""
    return status if status >= 0 else 128 - status


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, or "signal 34" if Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
