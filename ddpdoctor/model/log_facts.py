"""The facts that logs, dumps and stacks hold about a job without a recorder; ``rules/logs`` compares ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.words import first_names, grouped, rank_list

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.attached import AttachedJob
    from ddpdoctor.model.node import Node
    from ddpdoctor.model.stacks import Frame

MOST_RANKS = 2**20  # our choice: a larger number in a log is no rank and no number of ranks, and would fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """A process, as far as a source names it. An empty ``Who`` is the job as a whole, or unknown."""

    rank: int | None = None  # the global rank
    local_rank: int | None = None
    group: str = ""  # the group in which ``group_rank`` counts; empty: the default group, or unknown
    group_rank: int | None = None
    host: str = ""
    address: str = ""  # the IP address of the host, if that is all that is known of it
    pid: int | None = None
    task: int | None = None  # Slurm's task number. It is the rank if there is one task for each GPU, else the node.


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a fact was found."""

    source: str  # the name of the file as the user gave it; "-" for standard input
    line: int | None = None  # from 1; None if the source has no lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """A point in time on the clock of one host. Times on different clocks cannot be compared."""

    seconds: float  # since the epoch, as far as the source says the year and the zone; else on a scale of its own
    clock: str  # the host, or the source if the host is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective or a point-to-point operation, as far as a source describes it. Empty or None: unknown."""

    op: str = ""  # torch's name in lower case: "all_reduce", "reduce_scatter_tensor", "send"
    group: str = ""  # its name, or for old logs the number that they print; empty: the default group
    group_words: str = ""  # what a reader should see for the group: "default_pg", "PG GUID 3 (dp)"
    seq: int | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    peer: int | None = None  # the other global rank of a send or receive
    # What made it, if that is not the operation's own name and the source shows it: "barrier" for the all_reduce that
    # NCCL's barrier is, "backward" for one of DDP's reducer.
    made_by: str = ""

    def words(self) -> str:
        """Return it in words: "all_reduce #52 of default_pg"."""
        number = f" #{self.seq}" if self.seq is not None else ""
        of = f" of {self.group_words or self.group}" if self.group_words or self.group else ""
        name = "barrier" if self.made_by == "barrier" else self.op or "collective"
        return f"{name}{number}{of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact from a source."""

    who: Who = field(default_factory=Who)
    spot: Spot
    time: Time | None = None
    said: str = ""  # the words of the source that show it, one line, short, without secrets; empty for binary sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Fact):
    """This process existed, and the evidence of it was given. All other facts with a rank imply that as well."""

    gpu: str = ""  # the PCI bus number of its GPU, like that of ``Trouble``, if the source says it


@dataclass(frozen=True, slots=True, kw_only=True)
class Size(Fact):
    """How many ranks the world or a group has."""

    ranks: int
    group: str = ""  # empty: the world
    members: tuple[int, ...] | None = None  # global ranks in the order of their group ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Fact):
    """A rank waits, or waited until a time limit, for others in an operation."""

    operation: Operation
    timed_out: bool = False
    limit_s: float | None = None
    ran_s: float | None = None  # how long it had waited when it ran into the limit, if the source says so
    frames: tuple[Frame, ...] = ()  # where the operation was enqueued, outermost first
    in_init: bool = False  # in ``init_process_group`` or the rendezvous, not in a collective
    in_store: bool = False  # for a key of the store
    came: int | None = None  # how many ranks have come, this one included, if the source says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Fact):
    """A rank made this call. Its end is unknown. Numbers count per communicator, and may repeat."""

    operation: Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached(Fact):
    """How far a rank has come in a group."""

    group: str = ""
    group_words: str = ""
    enqueued: int | None = None  # the number of the last operation that it has begun; None: it is not said; 0: none yet
    completed: int | None = None
    # The rank whose time limit made it say so, if it was told by another one: it had come this far, and no further,
    # after that limit.
    told_by: int | None = None

    def done_words(self) -> str:
        """Return what it had done with its last operation: "completed", or "begun"."""
        is_done = self.enqueued is not None and self.completed is not None and self.completed >= self.enqueued
        return "completed" if is_done else "begun"


class Shown(int, Enum):
    """What shows that a rank is absent, the weakest source first."""

    NUMBERS = 0  # what torch's watchdog writes of other ranks
    COUNTS = 1  # NCCL's RAS
    RECORDER = 2
    STACKS = 3
    WORDS = 4  # an error of another rank names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent(Fact):
    """According to a source, a rank has not reached the call in which others wait for it. ``who`` is that rank."""

    operation: Operation = field(default_factory=Operation)
    waiters: tuple[int, ...] = ()  # global ranks that wait for it; empty if the source names none
    in_init: bool = False
    certain: bool = True  # False if the source only suspects it
    moves: bool = False  # it makes progress elsewhere: it may only be slow
    shown: Shown = Shown.RECORDER
    expected: bool = False  # the source holds the lines of several ranks, so that those of this one should be there too
    dead: bool = False  # its process is gone, or its host
    late: bool = False  # it came after the others had run into their limit
    busy: BusyRank | None = None  # what it did instead, as its log says


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyRank(Fact):
    """The last sign of work that needs no other rank: an incomplete progress bar, or a message that it begins."""

    task: str  # what it does, as it says it: "Running tokenizer on dataset"
    share: int | None = None  # how much is done, in percent


class Nature(str, Enum):
    """What an error shows about its cause."""

    OWN = "own"  # it refers to no other process: the rank failed by itself
    PEER_LOST = "peer-lost"  # Another rank is gone. This rank is a victim.
    TIMED_OUT = "timed-out"  # A wait ran into its limit. This rank is a victim.
    STOPPED = "stopped"  # it was told to stop by its launcher, the scheduler or a person
    FOLLOWS = "follows"  # it only reports an earlier failure, as torchrun's ChildFailedError does


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Fact):
    """An error left a rank's script, a thread or a library of it."""

    type: str  # the class of the exception, or a short name of the error: "CUDA error"
    message: str
    nature: Nature
    frames: tuple[Frame, ...] = ()  # the traceback, outermost first; empty if there was none
    peers: tuple[int, ...] = ()  # global ranks that the error names as lost or late
    peer_hosts: tuple[str, ...] = ()  # hosts or addresses that it names as lost
    memory: bool = False  # memory ran out, on the device or the host
    operation: Operation | None = None  # the operation in which it was raised, if it says so
    in_worker: bool = False  # a DataLoader worker or another child of the rank died or raised it
    alone: bool = False  # no traceback shows where it was raised, and nothing that it ended a process


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Fact):
    """A process ended badly. Exactly one of ``code`` and ``signal`` is set."""

    code: int | None = None
    signal: str = ""  # "SIGKILL"
    by_launcher: bool = False  # the launcher or scheduler stopped it after something else had failed
    memory: bool = False  # the source says that memory ran out: the kernel's OOM killer or the scheduler ended it
    first: bool = False  # the source calls it the first failure (torchrun's root cause)
    frames: tuple[Frame, ...] = ()  # where it was at its end, outermost first; empty if that is not said


class Doing(str, Enum):
    """What the innermost frames of a rank's main thread show."""

    COLLECTIVE = "collective"  # it waits in a collective, in backward, or for its own device: for other ranks
    DEVICE = "device"  # it waits for its own device, which may wait for others: ``.item()``, ``synchronize()``
    DATA = "data"  # it waits for a DataLoader worker
    INIT = "init"  # it is in ``init_process_group``, the rendezvous or a store
    EXIT = "exit"  # it is ending: interpreter shutdown, ``destroy_process_group``
    OWN = "own"  # it is in the user's own code, or in a library that concerns no other rank
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked(Fact):
    """The stack of a rank's main thread at one time."""

    doing: Doing
    frames: tuple[Frame, ...]  # outermost first
    state: str = ""  # "idle", "active", "active+gil", or a state letter of /proc: what the source says of the thread
    operation: Operation | None = None  # the operation that the frames name, if they name one
    worker: bool = False  # it is the stack of a child of the rank, such as a DataLoader worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState(Fact):
    """The state of a process in /proc at the time of evidence."""

    letter: str  # R, S, D, T, t, Z, X


@dataclass(frozen=True, slots=True, kw_only=True)
class Differ(Fact):
    """Ranks made different calls where they should have made the same one. ``who`` is empty."""

    # The ranks of each side and the operation that they made, the side with the most ranks first. Group ranks were
    # translated to global ones.
    sides: tuple[tuple[tuple[int, ...], Operation], ...]
    odd: tuple[int, ...] | None = None  # who differs from the majority; None: it cannot be told
    aspect: str = ""  # what differs: "operation", "shape", "dtype", "order", "number", "place"
    certain: bool = True  # False: they wait at different places, and may be right to do so
    # True: the source knows all ranks of the group, or more than half of it are on one side. False: so few are known
    # that the majority may be the odd one. None: that depends on the number of ranks in the world.
    settled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle(Fact):
    """Each of these ranks waits for the next one, and the last for the first. ``who`` is empty."""

    links: tuple[tuple[int, Operation, int], ...]  # a rank, what it waits in, and for whom


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside(Fact):
    """All members of a group are inside one operation, equal in everything, and it does not complete."""

    operation: Operation
    ranks: tuple[int, ...]
    complete: bool = True  # All members were seen. False: all members that were seen.


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Fact):
    """The network between two hosts, or what a host offers to the network, failed. ``who`` is the reporting host."""

    to: Who = field(default_factory=Who)  # the other end, if one is named
    problem: str  # what is wrong, in words that complete "h1: …"
    fix: str
    victim: bool = False  # it says that the other end closed or is gone: a consequence of the other end's failure
    local: bool = False  # the fault is on the host that says so: an interface, an adapter, shared memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble(Fact):
    """A machine or its kernel reports a fault: an Xid, an OOM kill, a lost node."""

    kind: str  # oom, xid, node-failure, shm, gpu-lost, version, interface, duplicate-gpu, port, disk
    problem: str  # what is wrong, one sentence without the host
    fix: str = ""
    fatal: bool = True  # False: it may be a consequence, or is only worth a note
    gpu: str = ""  # the PCI bus number of the GPU in lower case without the domain, "4e:00", if one is named
    ranks: tuple[int, ...] = ()  # global ranks that it names


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLine(Fact):
    """A line that its writer calls an error, without details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Fact):
    """The job was stopped from outside: a time limit, preemption, a user. Not a failure of the job itself."""

    by: str  # "time limit", "preemption", "requeue", "cancelled", "SIGHUP", "SIGINT", "signal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Fact):
    """The training, or one rank of it, ended well, or logs that it ends."""

    process_only: bool = False  # Its process ended in order. Whether the training did is not said.


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving(Fact):
    """The job made progress up to this point: a step, an epoch, or two samples that differ."""

    step: int | None = None
    logged: bool = False  # A log says so: nothing tells what came after its end. False: it was seen in two samples.
    steady_from: int | None = None  # the line of the log from which on it shows several steps; None: it shows too few


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(Fact):
    """A launcher or a library logs that it begins. After the end of a job in the same log, another run begins here."""

    starts_several: bool = False  # it starts all ranks of a node: Slurm's tasks are nodes then
    by_step: bool = False  # shown by a step with a lower number only: it counts only after the end of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted(Fact):
    """The launcher restarted the ranks after a failure, so earlier failures no longer count."""

    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Fact):
    """A look at a running job could not use a source, or did not reach a node."""

    source: str  # "py-spy", "store", or the names of nodes
    reason: str
    remedy: str = ""  # A command, or an instruction. Empty: none is known.

    def words(self, ranks: Sequence[int] = ()) -> str:
        of = f" of {rank_list(ranks)}" if ranks else ""
        return f"{self.source}{of}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint(Fact):
    """Something worth a note that is not a cause: the transport in use, a suspicious setting."""

    words: str
    kind: str = ""  # for hints of which one is enough: "nccl-version", "transport", "interface"


@dataclass(frozen=True, slots=True, order=True)
class FlightCall:
    """A collective, without what differs from one call to the next."""

    op: str  # Python's name for it: "all_reduce", "reduce_scatter_tensor"
    numels_in: tuple[int, ...]  # elements of each input; empty if there is none, or the backend does not say
    numels_out: tuple[int, ...]
    shape: tuple[int, ...]  # the shape of the first input
    dtype: str  # the dtype of the first input: "float32"; empty if unknown


@dataclass(frozen=True, slots=True)
class FlightTransfer:
    """A send or receive that has not completed."""

    op: str  # "send" or "recv"
    peer: int | None  # the other rank within the group; None: any source, or unknown
    nth: int  # its number, from 1, among all transfers of this kind with this peer that the dump holds
    numel: int | None
    created_ns: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class FlightGroup:
    """The calls of one process group, oldest first."""

    name: str
    desc: str
    members: tuple[int, ...] | None  # global ranks in the order of their group ranks, or None if the dump does not say
    calls: tuple[tuple[FlightCall, ...], ...]  # one collective each, or those of a coalesced block
    which: array[int]  # the call of each number, as an index into ``calls``
    seq: array[int]  # The numbers, strictly increasing. They count the collectives of the group.
    done: int  # How many of them, from the start, have completed. The next one, if there is one, is pending.
    knows_ends: bool  # False: the backend does not say, and ``done`` counts all but the last one
    timed_out: bool  # the pending call ran into a time limit
    limit_s: float | None  # the time limit of the pending call
    pending_ns: int | None  # wall clock at which the pending call was made
    pending_frames: tuple[Frame, ...]  # where the pending call was made, outermost first
    pending_in_backward: bool  # a thread of autograd made the pending call, and no Python did: DDP's reducer
    last_frames: tuple[Frame, ...]  # where the last call was made, outermost first
    transfers: tuple[FlightTransfer, ...]  # sends and receives that have not completed, oldest first
    made: Mapping[tuple[str, int | None], int]  # how many sends and receives the dump holds, by kind and peer
    last_made_ns: Sequence[int] = ()  # wall clock at which each of the last calls was made, as many as there are
    last_ended_ns: Sequence[int] = ()  # wall clock at which each of them was seen to have completed; 0: not known

    @property
    def last(self) -> int:
        """The number of the last collective that was made; 0: none."""
        return self.seq[-1] if self.seq else 0

    @property
    def last_done(self) -> int:
        """The number up to which collectives have completed, as far as the dump goes back."""
        return self.seq[self.done - 1] if self.done else (self.seq[0] - 1 if self.seq else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """One dump."""

    rank: int | None  # from the file's name, because the content does not say
    spot: Spot
    version: str  # "2.10"
    groups: tuple[FlightGroup, ...]
    world_size: int | None  # at least as many ranks as groups name; None: no group names its ranks
    wrapped: bool  # the ring was full: older entries are lost
    one_counter: bool  # TorchComms: one counter for all groups, so that numbers of a group were given anew by order
    first_ns: int | None  # wall clock of the oldest and of the newest entry
    last_ns: int | None
    has_frames: bool
    damaged: str = ""  # what is wrong with it, such as "cut off"; empty: nothing


class DataWay(str, Enum):
    """How data go from one rank to another."""

    P2P = "directly between GPUs"
    INDIRECT = "through another GPU"
    SHM = "through the host's memory"
    GDRDMA = "over the network, straight from GPU memory"
    NET = "over the network, through the host's memory"
    TCP = "over TCP"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclEdge:
    """One connection of a process. Ranks are those of a communicator that the line does not name."""

    own: int
    peer: int
    way: DataWay
    text: str  # NCCL's words: "P2P/CUMEM", "NET/IB/0/GDRDMA"
    channels: int  # in one direction
    said: str  # the first line that says it


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclMember:
    """A process in one communicator."""

    communicator: str  # equal in all its processes
    rank: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclPaths(Fact):
    """The connections of one process."""

    members: tuple[NcclMember, ...] = ()
    edges: tuple[NcclEdge, ...] = ()
    network: str = ""  # "IB", "Socket", or the name of a plugin
    adapters: tuple[str, ...] = ()  # InfiniBand and RoCE adapters that NCCL found: "mlx5_0"
    settings: Mapping[str, str] = field(default_factory=dict)  # variables of NCCL that its environment sets
    nvls: bool | None = None  # whether NVLS (NVLink SHARP) is available; None: it is not said
    channels: int | None = None  # for collectives, of the communicator that was set up last
    algorithms: Mapping[str, int] = field(default_factory=dict)  # "AllReduce RING SIMPLE": how often
    init_s: float | None = None  # the longest time that setting up a communicator took


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSeen(Fact):
    """What `check-env` found on a machine of the job."""

    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What one file or stream turned out to be."""

    source: str
    formats: tuple[str, ...]  # "log", "NCCL log", "flight recorder dump"; empty: nothing was recognized in it
    lines: int = 0
    bytes: int = 0
    problem: str = ""  # why it was not read to its end: "cut off", "larger than 64 MiB", "a link out of the folder"
    left_out: str = ""  # why, although it could be read: "of another job", "two days older than the others"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """All facts about one run of a job."""

    facts: tuple[Fact, ...]
    dumps: tuple[FlightDump, ...] = ()  # what the flight recorders of its ranks hold
    number: int = 0  # numbers the runs that were found in the evidence, from 0, in order of time as far as it is known
    name: str = ""  # what tells it from the other runs: "attempt 1", "job 4711", "from line 812"


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Everything that was read, sorted by runs. The last run is the one to judge."""

    runs: tuple[LoggedRun, ...]
    read: tuple[Read, ...]
    attached: tuple[AttachedJob, ...] = ()  # one for each node, without folders that were left out
    counts: Mapping[str, int] = field(default_factory=dict)  # of what was read

    def lacking(self) -> list[str]:
        """Return what could not be read or was left out, a line for all files with one reason."""
        alike = grouped((file.problem or file.left_out, file.source) for file in self.read)
        return [f"{first_names(names, 1)}: {why}" for why, names in alike.items() if why]
