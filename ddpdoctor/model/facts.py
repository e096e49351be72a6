"""The facts about a job: its ranks, their calls and stacks, and how they ended. No judgment, no I/O.

All times are nanoseconds of CLOCK_MONOTONIC, which the processes of one host share.
``None`` means "not known". An empty tuple means "checked, and there was none".
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.causes import HostCauses, NcclLine, ProcessCauses
    from ddpdoctor.model.consistency import Consistency, NonFinite
    from ddpdoctor.model.control_flow import ControlFlow
    from ddpdoctor.model.data import LoaderSeen
    from ddpdoctor.model.gradient_times import GradientTimes
    from ddpdoctor.model.node import Node
    from ddpdoctor.model.nodes import NodesSeen
    from ddpdoctor.model.reaching import Connecting
    from ddpdoctor.model.reducer import ReducerSaid
    from ddpdoctor.model.speed import Speed
    from ddpdoctor.model.stacks import Frame, StackSample
    from ddpdoctor.model.steps import FetchTimes, LineSeen, StepTimes


class Life(str, Enum):
    """Whether a process runs, and how it ended."""

    RUNNING = "running"
    EXITED = "exited"
    """Ended by itself; see ``exit_code``."""
    SIGNALED = "signaled"
    """Ended by a signal; see ``signal``."""
    NEVER_STARTED = "never-started"
    """The job's world includes this rank, but no process of it was ever seen."""
    GONE = "gone"
    """Ended in an unknown way."""


class DeviceState(str, Enum):
    """The state of a call that is pending on a device, according to torch's flight recorder."""

    SCHEDULED = "scheduled"
    """Queued: its kernel has not started."""
    STARTED = "started"
    """Its kernel runs."""
    UNKNOWN = "unknown"
    """Queued or running. torch cannot tell without ``TORCH_NCCL_ENABLE_TIMING``, or with nccl2."""


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
    tensors: int
    """Number of tensors in the list; 1 for a single tensor, 0 for none."""
    peer: int | None
    """The other global rank of a point-to-point call, or the root of a rooted collective, else None."""
    redop: str | None
    site: Frame | None
    """The innermost user line that made the call."""
    is_async: bool
    failed: bool
    """The call ended by raising."""
    thread_is_main: bool

    @property
    def numbered(self) -> bool:
        """Whether a number above zero is the sequence number of a collective within its group."""
        return bool(self.group) and self.op not in PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(CallKind):
    """One recorded call: a collective, a point-to-point call, or a phase of training."""

    index: int
    seq: int | None
    """Numbers the collectives within their group, from 1; None for phases and point-to-point calls."""
    started_ns: int
    ended_ns: int | None
    """None while the call has not returned, or has not completed if it is asynchronous."""
    begun: int | None = None
    """For a phase: how many collectives its group had begun when it started, or None if unknown."""
    awaits: int | None = None
    """For ``work_wait``: the index of the asynchronous call that it waits for."""
    device_state: DeviceState | None = None
    """Set if torch's flight recorder lists the call as incomplete on the device. The host may have gone on."""
    native: bool = False
    """C++ made the call (DDP's reducer, compiled code). No Python call was recorded, and ``site`` is None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """How long a completed collective ran on the device, including waits. The rank that came last ran shortest."""

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
    """Collectives begun in this group. Those of DDP's C++ reducer count, point-to-point calls do not."""
    mesh_dim: str = ""
    """The dimension of the device mesh that it belongs to, such as "tp"; empty if it has none."""
    timeout_s: float | None = None
    """torch's own time limit for a call of this group, or None if the backend does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception that left the script, a thread, or a recorded call."""

    type: str
    message: str
    time_ns: int
    thread_is_main: bool
    uncaught: bool
    """True if it ended its thread or process. False if only a recorded call raised it."""
    in_call: str | None
    """The ``op`` of the recorded call that raised it, or None if it came from elsewhere."""
    frames: tuple[Frame, ...]
    """The traceback, outermost first. An error that a loader worker passed on has the worker's frames."""
    from_child: bool = False
    """True if the frames are those of a child process, such as a DataLoader worker."""
    reducer: ReducerSaid | None = None
    """If DDP's reducer raised it: the parameters that it complains about."""
    passed_on_as: str = ""
    """The type of the error that torch raised because of this one, for example in a pipeline; else empty."""
    of_ranks: tuple[int, ...] = ()
    """The ranks whose errors torch passed on to all ranks, for example in a distributed checkpoint; else empty."""
    first: Raised | None = None
    """The script's own error that it followed from: its cause, or what the rank was handling when a call failed."""


class Helper(str, Enum):
    """What works for a rank beside its main thread."""

    THREAD = "thread"
    CHILD = "child"
    TASK = "task"
    """Of asyncio."""
    CALL = "call"
    """In a pool of threads or processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperError:
    """An error that ended a helper. That of a task or a call was read by nothing."""

    who: Helper
    name: str = ""
    """The pid of a child, the name of a task."""
    error: Raised


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A descendant of a rank: a DataLoader worker, a multiprocessing child, a subprocess."""

    pid: int
    name: str
    """The command, or its name in multiprocessing."""
    proc_state: str | None
    samples: tuple[StackSample, ...]
    idle: bool
    """It waits for work in a queue's get or in the worker loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingFile:
    """The file of ``init_method="file://..."`` just before a rank opened it."""

    path: str
    size_bytes: int
    """0 if it did not exist. torch writes the ranks' addresses into it, and removes it only if all ranks end well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedByThread:
    """Another thread than the main one ended the process with an error status or a signal, as a watchdog does."""

    place: Frame | None = None
    """The user's line that did it, or None if no line of Python did (``faulthandler``, SIGALRM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSeen:
    """A parameter or a buffer of a module, under the module's name for it."""

    name: str
    shape: tuple[int, ...] | None
    """None for a parameter of a lazy module that has no shape yet."""
    dtype: str
    requires_grad: bool
    is_buffer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """A module at the time it was passed to DDP's constructor."""

    group: str
    """Name of the process group that DDP reduces in."""
    digest: str
    """Equal for models whose tensors are equal in number, order, names, shapes, dtypes and ``requires_grad``."""
    count: int
    """Number of parameters, plus buffers if DDP synchronizes them."""
    tensors: tuple[TensorSeen, ...]
    """The first tensors in order. Fewer than ``count`` if not all fit."""
    site: Frame | None
    """The user's line that made the DDP model."""
    finds_unused: bool | None = None
    """Whether ``find_unused_parameters=True`` was given, or None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeCall:
    """Where a rank was before the last call that needed other ranks."""

    until_ns: int
    """When that call began, or 0 if it was not recorded (for example because it failed at once)."""
    lines: tuple[Frame, ...]
    """The user's lines at which it was sampled, the most frequent first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A call of torch.save that writes a file, as scripts do for a checkpoint."""

    began_ns: int
    ended_ns: int | None
    """None: it had not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """All facts about one rank."""

    rank: int
    local_rank: int | None
    host: str
    pid: int | None
    attempt: int
    life: Life
    exit_code: int | None = None
    """Set if ``life`` is EXITED."""
    signal: str | None = None
    """Such as ``SIGKILL``; set if ``life`` is SIGNALED."""
    ended_ns: int | None = None
    after_stop: bool = False
    """It ended after the launcher, ddpdoctor or the user had begun to stop the job."""
    oom_killed: bool | None = None
    """Whether the kernel's OOM killer sent the signal, or None if unknown."""
    proc_state: str | None = None
    """State letter of /proc/PID/stat at the time of evidence: R, S, D, T, t, Z."""
    cpu_share: float | None = None
    """The share of one core that it has used since its last progress; above 1 with several threads."""
    traced_by: int | None = None
    """The pid of an attached debugger."""
    frozen_since_ns: int | None = None
    """Since when the watcher has found it stopped (state T or t) at every check."""
    recorded: bool = False
    """A recorder ran in this process."""
    answered: bool = False
    """The recorder's own thread answered, so the GIL was available."""
    device_unread: bool = False
    """It uses NCCL, and torch did not say what is pending on its device: it may wait there for other ranks."""
    started_ns: int | None = None
    world_size: int | None = None
    """The world size given to ``init_process_group``, once it was called."""
    init_timeout_s: float | None = None
    """The time limit of ``init_process_group``, once it was called."""
    init_ns: int | None = None
    """When it first called ``init_process_group``."""
    meeting: MeetingFile | None = None
    """The file in which it meets the other ranks, or None if it uses none."""
    initialized: bool = False
    """``init_process_group`` has returned."""
    main_ended_ns: int | None = None
    """When the script's own code had ended and the interpreter began to shut down."""
    exit_call: Frame | None = None
    """The user line of the last sys.exit or os._exit."""
    exit_asked: str | None = None
    """The ``repr`` of that call's argument: "3", "None"."""
    ended_by_thread: EndedByThread | None = None
    exit_signal: str = ""
    """The signal whose handler in the script made that call, such as ``SIGTERM``; empty if none did."""
    before_call: BeforeCall | None = None
    last_place: Frame | None = None
    """The last user line seen before the end."""
    fatal_place: Frame | None = None
    """The innermost user line of the dump that a fatal signal left."""
    fatal_outside: bool = False
    """The fatal signal hit a thread that runs no Python, such as NCCL's watchdog."""
    open_calls: tuple[Call, ...] = ()
    """Calls that have not ended, oldest first, then calls that are pending on a device (``Call.device_state``)."""
    device_times: tuple[DeviceTime, ...] = ()
    """The last collectives that completed on the device, oldest first; empty if torch does not time them."""
    recent_calls: Sequence[Call] = ()
    """Ended calls that the ring still holds, oldest first: thousands, packed in a ``CallLog``."""
    groups: tuple[GroupState, ...] = ()
    samples: tuple[StackSample, ...] = ()
    children: tuple[Child, ...] = ()
    raised: tuple[Raised, ...] = ()
    handled: Raised | None = None
    """The error that the main thread was handling in an ``except`` or ``finally`` when it was sampled."""
    helper_errors: tuple[HelperError, ...] = ()
    """The errors that ended its threads, children, tasks and calls in pools, the earliest first."""
    models: tuple[ModelSeen, ...] = ()
    """The modules that DDP wrapped, in that order."""
    parameters: tuple[TensorSeen, ...] = ()
    """The parameters that optimizers train without DDP."""
    unfinished: ReducerSaid | None = None
    """The gradients that DDP still waited for after its last backward."""
    nonfinite: tuple[NonFinite, ...] | None = None
    """Its first local gradients that held inf or NaN, or None if that was not checked."""
    loaders: tuple[LoaderSeen, ...] | None = None
    """The data loaders that it used, or None if that was not recorded."""
    step_times: StepTimes | None = None
    """How long its last training steps took, or None if there were none."""
    speed: Speed | None = None
    """The parts of its steps over the whole run, or None if there were none."""
    gradient_times: tuple[GradientTimes, ...] = ()
    """When the gradients of each DDP model were ready; empty on a GPU, and with few steps."""
    fetch_times: FetchTimes | None = None
    """How long its loader workers took to make batches, or None if it has no workers."""
    lines_seen: tuple[LineSeen, ...] = ()
    """Lines at which it was sampled while it trained, the most frequent first."""
    last_save: Save | None = None
    steps: int = 0
    batches: int = 0
    epochs: int = 0
    last_progress_ns: int | None = None
    """When the parent last saw this rank make progress, later by the time that it has waited for a core since."""
    starved_ns: int = 0
    """How long it made no progress while it or its children were ready to run and got no core."""
    lost: str | None = None
    """Why the record of this rank is missing or incomplete."""
    lacks: tuple[str, ...] = ()
    """The recorder's hooks that its torch, or its launcher's torch, does not support."""
    causes: ProcessCauses | None = None
    """Facts about its process that may explain why it makes no progress or died."""


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
    world_size: int | None
    """Ranks that the launcher was asked for over all nodes, or None if unknown."""
    nnodes: int
    local_ranks_expected: int | None
    """Ranks that this node's launcher was asked to start."""
    ended: bool
    """The launcher has ended."""
    launcher_status: int | None = None
    launched_ns: int = 0
    stopping_since_ns: int | None = None
    """When the launcher (after a failure), ddpdoctor or the user began to stop the job."""
    interrupted_by: str | None = None
    """``SIGINT`` or ``SIGTERM`` if the user or the scheduler ended the job."""
    node_rank: int | None = None
    may_run_elsewhere: bool = False
    """Some ranks may run on other hosts, where they are not visible."""
    debug_level: str = "OFF"
    entry: str = "wrap"
    """What started the watch, as ``Run.entry``."""
    torch_version: str | None = None
    host_causes: HostCauses | None = None
    """The memory that its processes share on this host."""
    machine: Node | None = None
    """This host's network and GPUs, read if a collective did not complete."""
    control_flow: tuple[ControlFlow, ...] = ()
    """The control flow of the user's files, read if ranks took different branches; empty: not read."""
    consistency: Consistency | None = None
    """The comparison of its replicas, or None if they were not compared."""
    speed_asked: bool = False
    """The user asked where the time of a step goes."""
    nccl_lines: tuple[NcclLine, ...] = ()
    """The last warnings of NCCL's own logs."""
    members: NodesSeen | None = None
    """The ``wrap`` processes of all nodes, or None if the launch has only this one."""
    host: str = ""
    """The host whose view this is."""
    elsewhere: tuple[HostSeen, ...] = ()
    """The other hosts whose facts are included."""
    reached: tuple[Connecting, ...] = ()
    """This host's attempts to connect to the rendezvous, made when ranks were missing; empty: not tried."""


def shell_status(status: int) -> int:
    """Return the exit status that a shell shows for a process: 128 plus the number of the signal that ended it."""
    return status if status >= 0 else 128 - status


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, or "signal 34" if Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
