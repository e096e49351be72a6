"""What was seen of a job: ranks, their calls, stacks and ends. No judgement, no I/O.

All times are nanoseconds of CLOCK_MONOTONIC, which the processes of one host share.
Absence is typed: ``None`` means "not known", an empty tuple means "looked, and there was none".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.causes import HostCauses, NcclLine, ProcessCauses
    from ddpdoctor.model.consistency import Consistency, NonFinite
    from ddpdoctor.model.control_flow import ControlFlow
    from ddpdoctor.model.data import LoaderSeen
    from ddpdoctor.model.node import Node
    from ddpdoctor.model.nodes import NodesSeen
    from ddpdoctor.model.reaching import Connecting
    from ddpdoctor.model.reducer import ReducerSaid
    from ddpdoctor.model.stacks import Frame, Look
    from ddpdoctor.model.steps import FetchTimes, LineSeen, StepTimes


class Life(str, Enum):
    """How far a process has come."""

    RUNNING = "running"
    EXITED = "exited"
    """Ended by itself; see ``exit_code``."""
    SIGNALED = "signaled"
    """Ended by a signal; see ``signal``."""
    NEVER_STARTED = "never-started"
    """The job's world has this rank, and no process of it was ever seen."""
    GONE = "gone"
    """Ended, and nobody could say how."""


class DeviceState(str, Enum):
    """How far a call has come that is pending on a device, as torch's flight recorder says."""

    SCHEDULED = "scheduled"
    """Queued: its kernel has not started."""
    STARTED = "started"
    """Its kernel runs."""
    UNKNOWN = "unknown"
    """Queued or running: without ``TORCH_NCCL_ENABLE_TIMING``, and with nccl2, torch cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded call: a collective, a point-to-point call, or a phase of training.

    ``op`` is what ran ("all_reduce"), ``api`` what the user typed ("broadcast_object_list"). Phases carry the
    names of ``PHASES``. ``seq`` is the number of the collective within its group, from 1, with point-to-point
    calls taken out; ``None`` for phases and point-to-point calls.
    """

    index: int
    op: str
    api: str
    group: str
    seq: int | None
    dtype: str | None
    shape: tuple[int, ...] | None
    tensors: int
    """How many tensors were passed in the list; 1 for a single tensor, 0 for none."""
    peer: int | None
    """The other global rank of a point-to-point call, the root of a rooted collective, else None."""
    redop: str | None
    site: Frame | None
    """The innermost user line that made the call."""
    started_ns: int
    ended_ns: int | None
    """None while the call has not returned, or, for an asynchronous call, has not completed."""
    is_async: bool
    failed: bool
    """The call ended by raising."""
    thread_is_main: bool
    begun: int | None = None
    """Of a phase: how many collectives its group had begun when it started; None where that is not known."""
    awaits: int | None = None
    """Of ``work_wait``: the index of the asynchronous call that is waited for."""
    device_state: DeviceState | None = None
    """Set where torch's flight recorder holds the call as not completed on the device. The host may have gone on."""
    native: bool = False
    """C++ made the call, such as DDP's reducer or compiled code: no Python call was recorded, and ``site`` is None."""


PHASES = frozenset(
    {
        "init_process_group",
        "new_group",
        "destroy_process_group",
        "ddp_init",
        "ddp_forward",
        "ddp_forward_no_grad",
        "backward",
        "next_batch",
        "epoch",
        "work_wait",
    }
)
"""Values of ``Call.op`` that are phases of training, not collectives. ``work_wait`` is Work.wait of an open call."""

POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
"""Values of ``Call.op`` that concern one peer only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """How long a completed collective ran on the device, waits included: the rank that came last ran shortest."""

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
    enqueued: int
    """Collectives begun in this group, those of DDP's C++ reducer included, point-to-point calls taken out."""
    mesh_dim: str = ""
    """The dimension of the device mesh that it was made for, such as "tp"; empty where it was made by other means."""
    timeout_s: float | None = None
    """torch's own time limit for a call of this group; None where the backend does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that left the script, a thread, or a recorded call."""

    type: str
    message: str
    time_ns: int
    thread_is_main: bool
    uncaught: bool
    """True where it ended its thread or process; False where only a recorded call raised it."""
    in_call: str | None
    """The ``op`` of the recorded call that raised it, or None where it came from elsewhere."""
    frames: tuple[Frame, ...]
    """The traceback, outermost first; for an error passed on from a loader worker, the worker's frames."""
    from_child: bool = False
    """True where the frames are those of a child process, such as a DataLoader worker."""
    reducer: ReducerSaid | None = None
    """Where DDP's reducer raised it: of which parameters it complains."""
    passed_on_as: str = ""
    """The type of the error that torch raised because of this one, as a pipeline does; empty where it raised none."""
    of_ranks: tuple[int, ...] = ()
    """The ranks of whose errors torch has told all ranks, as a distributed checkpoint does; empty for other errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A descendant of a rank: a DataLoader worker, a multiprocessing child, a subprocess."""

    pid: int
    name: str
    """The command, or what multiprocessing calls it."""
    proc_state: str | None
    looks: tuple[Look, ...]
    idle: bool
    """True where it waits for work: in a queue's get, or in the worker loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSeen:
    """A parameter or a buffer of a module, as the module names it."""

    name: str
    shape: tuple[int, ...] | None
    """None for a parameter of a lazy module that has no shape yet."""
    dtype: str
    requires_grad: bool
    is_buffer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """A module as DDP's constructor was given it."""

    group: str
    """Name of the process group that DDP reduces in."""
    digest: str
    """Equal for models whose tensors are equal in number, order, names, shapes, dtypes and ``requires_grad``."""
    count: int
    """Parameters and, where DDP synchronizes them, buffers."""
    tensors: tuple[TensorSeen, ...]
    """The first of them, in order; fewer than ``count`` where not all found room."""
    site: Frame | None
    """The user's line that made the DDP model."""
    finds_unused: bool | None = None
    """``find_unused_parameters=True`` was given; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeCall:
    """Where a rank was on its way to the last call that needed others."""

    until_ns: int
    """When that call began; 0 where it was not seen, as one that failed at once."""
    lines: tuple[Frame, ...]
    """The user's lines at which it was met, the most frequent first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """All that was seen of one rank."""

    rank: int
    local_rank: int | None
    host: str
    pid: int | None
    attempt: int
    life: Life
    exit_code: int | None = None
    """Set where ``life`` is EXITED."""
    signal: str | None = None
    """``SIGKILL`` and the like; set where ``life`` is SIGNALED."""
    ended_ns: int | None = None
    after_stop: bool = False
    """True where it ended after the launcher, ddpdoctor or the user had begun to stop the job."""
    oom_killed: bool | None = None
    """Whether the kernel's OOM killer sent the signal; None where it cannot be told."""
    proc_state: str | None = None
    """State letter of /proc/PID/stat at the time of evidence: R, S, D, T, t, Z."""
    cpu_share: float | None = None
    """How much of one core it has used since its last progress; above 1 with several threads."""
    traced_by: int | None = None
    """The pid of a debugger that is attached, where there is one."""
    frozen_since_ns: int | None = None
    """Since when the watcher has seen it stopped (state T or t) at every look."""
    recorded: bool = False
    """A recorder wrote into this process."""
    answered: bool = False
    """The recorder's own thread answered, that is, the GIL was to be had."""
    started_ns: int | None = None
    world_size: int | None = None
    """As given to ``init_process_group``, once it was called."""
    init_timeout_s: float | None = None
    """The time limit of ``init_process_group``, once it was called."""
    initialized: bool = False
    """``init_process_group`` has returned."""
    main_ended_ns: int | None = None
    """When the script's own code had ended and the interpreter began to shut down."""
    exit_call: Frame | None = None
    """The user line of the last sys.exit or os._exit."""
    exit_asked: str | None = None
    """The argument of that call, as repr writes it: "3", "None"."""
    before_call: BeforeCall | None = None
    last_place: Frame | None = None
    """The last user line seen before the end."""
    fatal_place: Frame | None = None
    """The innermost user line of the dump that a fatal signal left."""
    fatal_outside: bool = False
    """The fatal signal struck a thread that runs no Python, such as NCCL's watchdog."""
    open_calls: tuple[Call, ...] = ()
    """Calls that have not ended, oldest first; then those that are pending on a device (``Call.device_state``)."""
    device_times: tuple[DeviceTime, ...] = ()
    """The last collectives that completed on the device, oldest first; empty where torch does not time them."""
    recent_calls: Sequence[Call] = ()
    """Calls that have ended, oldest first, as many as the ring still holds: thousands, packed (``CallLog``)."""
    groups: tuple[GroupState, ...] = ()
    looks: tuple[Look, ...] = ()
    children: tuple[Child, ...] = ()
    raised: tuple[Raised, ...] = ()
    handled: Raised | None = None
    """The error that the main thread was handling when it was looked at: it stands in an ``except`` or ``finally``."""
    models: tuple[ModelSeen, ...] = ()
    """The modules that DDP was given, in the order of its construction."""
    unfinished: ReducerSaid | None = None
    """What its last backward left DDP waiting for."""
    nonfinite: tuple[NonFinite, ...] | None = None
    """Its first local gradients that held inf or NaN; None where nobody looked."""
    loaders: tuple[LoaderSeen, ...] | None = None
    """The loaders of data that it used; None where nobody looked."""
    step_times: StepTimes | None = None
    """How long its last training steps took; None where none were seen."""
    fetch_times: FetchTimes | None = None
    """How long its loader workers took to make batches; None where it has none."""
    lines_seen: tuple[LineSeen, ...] = ()
    """Lines at which it was met while it trained, the most frequent first."""
    steps: int = 0
    batches: int = 0
    epochs: int = 0
    last_progress_ns: int | None = None
    """When the parent last saw this rank make progress."""
    lost: str | None = None
    """Why nothing, or not all, could be recorded of this rank."""
    lacks: tuple[str, ...] = ()
    """The hooks of the recorder that its torch, or its launcher's, has no place for."""
    causes: ProcessCauses | None = None
    """What was seen of its process that may explain why it stands still or died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSeen:
    """What another node's ``wrap`` saw of its own host, beside its ranks."""

    host: str
    causes: HostCauses | None = None
    machine: Node | None = None
    reached: tuple[Connecting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that was seen of a job, at one moment."""

    now_ns: int
    hang_timeout_s: float
    ranks: tuple[Rank, ...]
    world_size: int | None
    """Ranks that the launcher was asked for over all nodes; None where that is not known."""
    nnodes: int
    local_ranks_expected: int | None
    """Ranks that this node's launcher was asked to start."""
    ended: bool
    """The launcher has ended."""
    launcher_status: int | None = None
    launched_ns: int = 0
    stopping_since_ns: int | None = None
    """When somebody began to stop the job: the launcher at a failure, ddpdoctor, or the user."""
    interrupted_by: str | None = None
    """``SIGINT`` or ``SIGTERM`` where the user or the scheduler ended the job."""
    node_rank: int | None = None
    may_run_elsewhere: bool = False
    """Nobody has said that all ranks run on this host, where they can be seen."""
    debug_level: str = "OFF"
    torch_version: str | None = None
    host_causes: HostCauses | None = None
    """What its processes share on this host."""
    machine: Node | None = None
    """This host's network and GPUs, read where a collective did not complete."""
    control_flow: tuple[ControlFlow, ...] = ()
    """How control flows through the user's files, read where ranks went different ways; empty: not read."""
    consistency: Consistency | None = None
    """What its replicas were like; None where they were not compared."""
    nccl_lines: tuple[NcclLine, ...] = ()
    """The last warnings of NCCL's own logs."""
    members: NodesSeen | None = None
    """The other nodes' ``wrap``, and what they saw; None where this one is alone by its launch."""
    host: str = ""
    """The one that this view is of."""
    elsewhere: tuple[HostSeen, ...] = ()
    """The other hosts whose facts are here too."""
    reached: tuple[Connecting, ...] = ()
    """What this host saw of the place where the nodes meet, tried when ranks were missing; empty: not tried."""


def shell_status(status: int) -> int:
    """Return the exit status that a shell shows for a process: 128 plus the number of the signal that ended it."""
    return status if status >= 0 else 128 - status
