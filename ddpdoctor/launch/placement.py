"""Finds this process's place in the job: which member it is, where the members meet, and what the launcher needs."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from ddpdoctor.collect import launch
from ddpdoctor.collect.launch import SlurmTask, is_slurm_step, number
from ddpdoctor.launch.command_line import SHAPE, VARIABLES, TorchrunSettings, settings_of_command
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import Launch, expand_counts, is_loopback
from ddpdoctor.recorder.settings import RecorderSettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ddpdoctor.launch.command_line import ChosenLevel, OnHang, OutputFormat, SplitCommand

MAX_PORT = 65_535
# Our choice: the job waits for this lookup, and a name that takes longer will delay the job itself anyway.
LOOKUP_LIMIT_S = 2.0
MOST_ADDRESSES = 8
# The variables that select the job's network interfaces, by name or, for NCCL, by prefix.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Style(Enum):
    """What a member starts."""

    TORCHRUN = "torchrun"  # torchrun, which starts the ranks of a node
    RANK = "rank"  # the script itself, as one rank; the member's number is its rank
    COMMAND = "command"  # a command, unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of one ``wrap`` in its job, and what to pass to the process that it starts."""

    style: Style = Style.TORCHRUN
    number: int | None = 0  # this member's number, from 0, or None if only the rendezvous will assign it
    expected: int = 1  # how many members should join; in an elastic job, at least how many
    most: int = 1  # how many members may join at most
    hosts: tuple[str, ...] = ()  # names or addresses of the first member, the likeliest first; empty if unknown
    port: int = 0  # ddpdoctor's own port on that host
    names: tuple[str, ...] = ()  # the host names of all members, by number; empty if unknown
    of_ranks: bool = False  # whether each member is one rank instead of a node whose launcher starts ranks
    nodes: int = 1  # the number of nodes, if members are ranks
    one_host: bool = False  # whether all members are on one host
    token: bytes | None = field(default=None, repr=False)  # the job's secret, or None if it has none
    store: tuple[str, int] | None = None  # host and port of the job's own store, or None if unknown
    batch_job: str = ""  # Slurm's job and step, "1234.0"; empty elsewhere
    torchrun_args: tuple[str, ...] = ()  # options to add before the user's torchrun options
    variables: tuple[tuple[str, str], ...] = ()  # environment variables to set for the started process
    note: str | None = None  # a sentence for the user on what was chosen and how to change it, or None if nothing was

    @property
    def alone(self) -> bool:
        """Whether this is the only member."""
        return max(self.expected, self.most) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """One step of a job, and this process's place in it."""

    place: SlurmTask
    nodes: int
    node: int
    local_tasks: int | None  # the step's tasks on this node, or None if Slurm does not say
    hosts: tuple[str, ...]  # the nodes' hosts, in Slurm's order; empty if the list cannot be read
    task_hosts: tuple[str, ...]  # the host of each task; empty if unknown, for example with a cyclic distribution
    # The MASTER_ADDR that the job's script set for the store; empty if unset, or loopback with several nodes.
    master: str
    master_port: int | None

    @property
    def store(self) -> tuple[str, int]:
        """Host and port for the job's store: MASTER_ADDR and MASTER_PORT, else the first node and a derived port."""
        first = "127.0.0.1" if self.nodes == 1 else next(iter(self.hosts), "127.0.0.1")
        return self.master or first, self.master_port or self.place.port(launch.STORE_PORTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapOptions:
    """The settings of one wrapped job."""

    # The script or command to run. Its torchrun options begin with those that ddpdoctor chose (ranks, nodes).
    split: SplitCommand
    hang_timeout_s: float
    on_hang: OnHang
    debug_level: ChosenLevel | None = None  # None keeps the value of ``TORCH_DISTRIBUTED_DEBUG`` in the environment
    report_dir: Path  # the run folder, which exists, is private and is known to be writable
    # The file for the report: report.json in the run folder, or node-N.json above it on every node but the first.
    report_file: Path
    placement: Placement  # the place of this ``wrap`` in its job
    html: Path | None = None  # The file for the report as a page. Only the node that writes report.json writes it.
    format: OutputFormat = "text"
    quiet: bool = False
    ignore: tuple[str, ...] = ()  # codes of rules whose findings are left out
    ranks: RecorderSettings = field(default_factory=RecorderSettings)  # the settings of each rank's recorder
    allow_different: tuple[str, ...] = ()  # name patterns of tensors that may differ between ranks
    speed: bool = False  # whether to say where the time of a step goes, and what to change
    # A sentence on the chosen number of ranks and how to change it, or None if the user chose.
    nproc_note: str | None = None
    command: tuple[str, ...]  # the full command line as typed
    entry: str = "wrap"  # what started the watch, as ``Run.entry``


def read_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the Slurm step of this process, or None if there is none or it has only one task."""
    place = launch.read_slurm_task(env)
    if place is None or place.tasks == 1:
        return None
    nodes, node = place.nodes or 1, number(env, "SLURM_NODEID") or 0
    hosts, master = launch.read_step_hosts(env), env.get("MASTER_ADDR", "").strip()
    try:
        counts = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    except ValueError:
        counts = ()
    counts = counts if len(counts) == nodes else ()
    task_hosts: tuple[str, ...] = ()
    if len(hosts) == len(counts) and sum(counts) == place.tasks:
        found = tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))
        # Slurm's usual default: tasks fill one node after another.
        in_order = env.get("SLURM_DISTRIBUTION", "block").startswith("block") or place.tasks == len(hosts)
        is_own = found[place.task] == env.get("SLURMD_NODENAME", found[place.task])
        task_hosts = found if in_order and is_own else ()
    return SlurmStep(
        place=place, nodes=nodes, node=node, local_tasks=counts[node] if node < len(counts) else None, hosts=hosts,
        task_hosts=task_hosts, master="" if nodes > 1 and is_loopback(master) else master,
        master_port=number(env, "MASTER_PORT"),
    )  # fmt: skip


def place(split: SplitCommand, env: Mapping[str, str], exchange_port: int | None = None) -> Placement:
    """Return a process's place by node options, else by Slurm, else by RANK and WORLD_SIZE. Raises ``UserError``."""
    torchrun, style = settings_of_command(split, env), Style.COMMAND if split.is_command else Style.TORCHRUN
    if torchrun is not None:
        standalone = "--standalone" in torchrun.given or torchrun.number("--standalone") not in {None, 0}
        if standalone or torchrun.nnodes == (1, 1):
            return Placement(style=style)
    in_slurm, by_operator = "SLURM_JOB_ID" in env, env.get("RANK") and env.get("WORLD_SIZE")
    if in_slurm and (step := read_step(env)) is not None:
        placed = _by_slurm(split, torchrun, step, env)
    elif torchrun is not None and torchrun.nnodes is not None:
        (host, port), (fewest, most) = torchrun.endpoint or ("", 0), torchrun.nnodes
        own = torchrun.number("--node-rank") or 0  # only a static rendezvous uses it
        one_host = is_loopback(host)
        placed = Placement(
            style=style, number=own if torchrun.backend == "static" else None, expected=fewest, most=most,
            hosts=("127.0.0.1",) if one_host else tuple(filter(None, (host,))), port=_beside(port), one_host=one_host,
            store=torchrun.endpoint,
        )  # fmt: skip
    else:
        found = _by_variables(split, torchrun, env) if by_operator else None
        note = None
        if in_slurm and not is_slurm_step(env) and number(env, "SLURM_JOB_ID", "SLURM_JOBID") is not None:
            # A shell of sbatch or salloc, without srun
            idle = (number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1) - 1
            nodes = "the other node is" if idle == 1 else f"the other {idle} nodes are"
            what = f"this runs on one node of the Slurm allocation, and {nodes} idle"
            note = f"{what}; `srun ddpdoctor wrap` uses all nodes" if idle > 0 else None
        placed = found or Placement(style=style, note=note)
    if placed.alone:
        return placed
    from ddpdoctor.exchange.wire import job_token
    from ddpdoctor.model.node import Launcher

    launcher = Launcher.SLURM if placed.batch_job else Launcher.NNODES  # in a Slurm step, as for our other commands
    token = job_token(Launch(launcher=launcher, run=f"slurm {placed.batch_job}"), env)
    if placed.number is None and not placed.one_host and placed.store is not None and is_own_host(*placed.store):
        placed = replace(placed, number=0)  # of several members on one host, this cannot single one out
    return replace(placed, port=exchange_port or placed.port, token=token)


def _by_variables(split: SplitCommand, torchrun: TorchrunSettings | None, env: Mapping[str, str]) -> Placement | None:
    """Place a rank by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as set by an operator or another launcher."""
    rank, size, port = (number(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = env.get("MASTER_ADDR", "").strip()
    if rank is None or size is None or port is None or not host or not rank < size or size < 2:
        return None
    if torchrun is not None and (split.is_command or split.torchrun or any(map(torchrun.texts.get, SHAPE))):
        return None
    why = "because RANK and WORLD_SIZE are set; with --nproc-per-node, torchrun starts the ranks"
    note = f"becoming rank {rank} of {size}, {why}"
    one_host = is_loopback(host)
    return Placement(
        style=Style.COMMAND if split.is_command else Style.RANK, number=rank, expected=size, most=size, of_ranks=True,
        nodes=1 if one_host else -(-size // (number(env, "LOCAL_WORLD_SIZE") or 1)),
        hosts=("127.0.0.1",) if one_host else (host,), port=_beside(port), one_host=one_host, store=(host, port),
        note=None if split.is_command or rank else note,
    )  # fmt: skip


def _beside(port: int) -> int:
    if not port:
        return 0
    return port + 1 if port < MAX_PORT else port - 1


def _by_slurm(
    split: SplitCommand, torchrun: TorchrunSettings | None, step: SlurmStep, env: Mapping[str, str]
) -> Placement:
    """Place a task of a Slurm step. ``torchrun`` is None if the command is not torchrun. Raises ``UserError``."""
    one_host, tasks = step.nodes == 1, step.place.tasks
    hosts = ("127.0.0.1",) if one_host else (step.master, *step.hosts[:1])
    placed = Placement(
        number=step.place.task, expected=tasks, most=tasks, hosts=tuple(dict.fromkeys(filter(None, hosts))),
        port=step.place.port(launch.EXCHANGE_PORTS), names=step.task_hosts, one_host=one_host, store=step.store,
        batch_job=step.place.name, of_ranks=tasks > step.nodes, nodes=step.nodes,
    )  # fmt: skip
    if torchrun is None or split.is_command:
        return replace(placed, style=Style.COMMAND)
    if tasks == step.nodes or torchrun.nnodes == (tasks, tasks):
        return _node_task(placed, torchrun, step)
    nodes = "one node" if one_host else f"{step.nodes} nodes"
    meant = split.torchrun[0].partition("=")[0] if split.torchrun else ""  # an option or variable for torchrun
    if meant := meant or next((VARIABLES[name] for name in SHAPE if torchrun.texts[name]), ""):
        raise UserError(
            f"this Slurm step has {tasks} tasks on {nodes}, and {meant} makes each of them start torchrun, "
            "which starts all ranks of a node",
            help="Nothing was started. Start one task per node: `srun --ntasks-per-node=1 ddpdoctor wrap "
            "--nproc-per-node N SCRIPT`. Or start one task per rank, without options of torchrun: `srun "
            "--ntasks-per-node=N ddpdoctor wrap SCRIPT`.",
        )
    (host, port), rank, size = step.store, number(env, "RANK"), number(env, "WORLD_SIZE")
    is_chosen = rank is not None and size == tasks and rank < size  # a rank that the job's script chose stays
    variables: dict[str, object] = {
        "RANK": rank if is_chosen else step.place.task, "WORLD_SIZE": tasks,
        "LOCAL_RANK": number(env, "SLURM_LOCALID") or 0, "NODE_RANK": step.node, "MASTER_ADDR": host,
        "MASTER_PORT": port, **({} if step.local_tasks is None else {"LOCAL_WORLD_SIZE": step.local_tasks}),
    }  # fmt: skip
    became = f"each of the {tasks} Slurm tasks on {nodes} becomes a rank"
    note = f"{became}; `srun --ntasks-per-node=1` starts torchrun" if step.place.task == 0 else None
    texts = tuple((name, str(value)) for name, value in variables.items())
    return replace(placed, style=Style.RANK, variables=texts, note=note)


def _node_task(placed: Placement, torchrun: TorchrunSettings, step: SlurmStep) -> Placement:
    """Add the torchrun options that the user left out: the number of nodes, the rendezvous endpoint and ID."""
    (host, port), task, tasks, text = step.store, step.place.task, step.place.tasks, torchrun.texts
    fewest, most = torchrun.nnodes or (tasks, tasks)
    added = [] if torchrun.nnodes else [f"--nnodes={tasks}"]
    by_address = any(map(text.get, ("--master-addr", "--node-rank", "--rdzv-endpoint")))
    if torchrun.is_c10d or not (text["--rdzv-backend"] or by_address):
        added += [] if torchrun.is_c10d else ["--rdzv-backend=c10d"]
        if not text["--rdzv-id"]:
            # A late process from before a requeue must not join.
            restarts = number(torchrun.env, "SLURM_RESTART_COUNT") or 0
            added.append(f"--rdzv-id=slurm-{step.place.name}-{restarts}")
        if not text["--rdzv-endpoint"]:
            added.append(f"--rdzv-endpoint={host}:{port}")
            # torch decides by host name who serves the store, but Slurm's node name may differ from it.
            if not text["--rdzv-conf"] and host in {"127.0.0.1", *step.hosts[:1]}:
                added.append(f"--rdzv-conf=is_host={int(task == 0)}")
    elif torchrun.backend == "static":
        added += [] if text["--node-rank"] else [f"--node-rank={task}"]
        if not text["--rdzv-endpoint"]:
            added += [] if text["--master-addr"] else [f"--master-addr={host}"]
            added += [] if text["--master-port"] else [f"--master-port={port}"]
    note = None
    if torchrun.nnodes is not None and not fewest <= tasks <= most:
        note = f"--nnodes is {text['--nnodes']}, but this Slurm step has {tasks} tasks, one per node"
    return replace(
        placed, expected=fewest, most=most, of_ranks=False,
        store=TorchrunSettings((*added, *torchrun.words), torchrun.env).endpoint, torchrun_args=tuple(added),
        note=note if task == 0 else None,
    )  # fmt: skip


def is_own_host(host: str, port: int) -> bool:
    """Return whether this host can bind to an address of the name; False if the name does not resolve."""
    from ddpdoctor.exchange.reach import look_up  # a slow import, which a job on one node does not need

    try:
        addresses = look_up(host, port, LOOKUP_LIMIT_S)
    except OSError:
        return False
    for family, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address[0], 0, *address[2:]))
            return True
    return False


def own_addresses() -> tuple[str, ...]:
    """Return this host's addresses: of the job's interfaces, of its name (Gloo publishes these), then all others."""
    from ddpdoctor.collect.system import SystemCalls
    from ddpdoctor.exchange.reach import look_up

    given = ",".join(os.environ.get(variable, "") for variable in INTERFACE_VARIABLES).split(",")
    wanted = tuple(name.lstrip("=") for name in given if name)
    by_name = SystemCalls().interface_addresses()
    names = [name for name in by_name if wanted and name.startswith(wanted)]
    chosen = [address for name in names for address in by_name[name]]
    named: list[str] = []
    with contextlib.suppress(OSError):
        named = [str(address[0]) for _, address in look_up(socket.gethostname(), 0, LOOKUP_LIMIT_S)]
    every = [*chosen, *named, *(address for addresses in by_name.values() for address in addresses)]
    plain = dict.fromkeys(address.partition("/")[0] for address in every)
    parsed = ((address, ipaddress.ip_address(address.partition("%")[0])) for address in plain)
    others = (address for address, ip in parsed if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified))
    return tuple(islice(others, MOST_ADDRESSES))
