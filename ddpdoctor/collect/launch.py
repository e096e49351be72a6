"""Reads how this process was launched: its rank and machine, its launcher, and its place among the job's nodes.

Options become the PET_* variables that torchrun reads for them, so that every check of the variables sees them. If
several sources have values, the first one counts: a torchrun that started us, then options and PET_* variables, then a
Slurm step, then an operator's RANK, WORLD_SIZE and MASTER_ADDR.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.proc import read_link
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import (
    EXCHANGE_PORT,
    JobSettings,
    Launch,
    NodeLaunch,
    expand_hosts,
    is_loopback,
    nodes_range,
    parse_endpoint,
    select_variables,
)
from ddpdoctor.model.node import Launcher, NodeProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.system import System
    from ddpdoctor.model.launch import NodeOptions

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
# Set by torchrun, Open MPI, other MPI launchers and Slurm; the first that is a number counts. Slurm comes last: what
# mpirun starts in a Slurm job also has the variables of the step that runs mpirun's daemon, of which a node has one.
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# First port and count of the ports on which ddpdoctor's processes meet. They are below Linux's default
# ip_local_port_range (32768 to 60999) and above the ports of common services.
EXCHANGE_PORTS = (16_384, 12_288)
STORE_PORTS = (28_672, 4_096)  # the same for the store of the step's job: above ddpdoctor's, below ip_local_port_range
DEFAULT_PORT = 29500  # torchrun's default
OWN_VARIABLE = "DDPDOCTOR_RANKS"  # the pid of the ddpdoctor that started this rank; set only in such ranks
C10D_PORT = 29400  # for an endpoint without a port (torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py)
MAX_PORT = 65_535
# The values of is_host that torch accepts (torch/distributed/elastic/rendezvous/api.py, get_as_bool).
_BOOLEANS = dict.fromkeys(("1", "true", "t", "yes", "y"), True) | dict.fromkeys(("0", "false", "f", "no", "n"), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The machine, and the container on it, in which a process runs."""

    host: str
    machine: str  # equal for processes that share the kernel and the network, because they are one node
    container: str  # equal for processes that also share files and pids


def read_process(system: System, *, rank: int | None = None, local_rank: int | None = None) -> NodeProcess:
    """Return the facts of this process; ``rank`` and ``local_rank`` are used if no variable has them."""
    (variables, others), under_wrap = select_variables(system.env), "DDPDOCTOR_RUN" in system.env
    own_rank, own_local_rank = read_rank(system.env), read_local_rank(system.env)
    rank, local_rank = rank if own_rank is None else own_rank, local_rank if own_local_rank is None else own_local_rank
    return NodeProcess(
        rank=rank,
        local_rank=local_rank,
        pid=os.getpid(),
        variables=variables,
        other_names=others,
        cpus=system.calls.cpus(),
        under_wrap=under_wrap,
    )


def read_identity(system: System) -> Identity:
    """Return on which machine and in which container this process runs.

    The boot id identifies a kernel, and the network namespace a container on it. The mount namespace does not make a
    node, because Apptainer gives each task its own.
    """
    host = system.calls.hostname()
    boot = system.text_or("/proc/sys/kernel/random/boot_id")
    network, mounts, pids = (read_link(system.path(f"/proc/self/ns/{kind}")) for kind in ("net", "mnt", "pid"))
    return Identity(host=host, machine=f"{host}/{boot}/{network}", container=f"{mounts}/{pids}")


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process: Slurm's own steps (batch, interactive) are from 0xfffffff0."""
    step = number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step < 0xFFFFFFF0 and "SLURM_PROCID" in env


def text(env: Mapping[str, str], *names: str) -> str:
    """Return the first of these variables that is not blank, without white space around it, or an empty string."""
    return next((value for name in names if (value := env.get(name, "").strip())), "")


def number(env: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a non-negative integer, or None."""
    for name in names:
        value = text(env, name)
        if value.isascii() and value.isdecimal():
            return int(value)
    return None


def read_rank(env: Mapping[str, str], names: tuple[str, ...] = RANK_VARIABLES) -> int | None:
    """Return the rank, or the number in other variables of launchers, or None if no launcher set it."""
    in_step = is_slurm_step(env)  # The batch script's shell also has SLURM_PROCID, but it is not a rank.
    return number(env, *(name for name in names if in_step or not name.startswith("SLURM_")))


def read_local_rank(env: Mapping[str, str]) -> int | None:
    """Return the local rank, or None if no launcher set it."""
    return read_rank(env, LOCAL_RANK_VARIABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTask:
    """One task of a Slurm step."""

    job: int
    step: int
    task: int
    tasks: int
    nodes: int | None  # None if Slurm does not say

    @property
    def name(self) -> str:
        """The step in Slurm's notation, such as "4711.0"."""
        return f"{self.job}.{self.step}"

    def port(self, ports: tuple[int, int]) -> int:
        """Return a port of the range; all hosts of the step get the same one, and other jobs most likely another."""
        first, count = ports
        return first + (31 * self.job + self.step) % count


def read_slurm_task(env: Mapping[str, str]) -> SlurmTask | None:
    """Return the task as which srun started this process, or None without srun and in sbatch's shell."""
    task, job = number(env, "SLURM_PROCID"), number(env, "SLURM_JOB_ID", "SLURM_JOBID")
    step = number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    tasks = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if not is_slurm_step(env) or task is None or job is None or step is None or tasks is None or task >= tasks:
        return None
    return SlurmTask(
        job=job, step=step, task=task, tasks=tasks, nodes=number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    )


def read_step_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the step in Slurm's order, or () if their list is missing or invalid."""
    try:
        return expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        return ()


def seen_launch(
    env: Mapping[str, str],
    *,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Launch:
    """Return the launch from the environment or the options; without a launcher, that is a single process.

    RANK, WORLD_SIZE and MASTER_ADDR without a launcher do not count; rules check their values. Raises ``UserError``.
    """
    started = torchrun_launch(env)
    if started is not None:
        return started
    if nnodes is None and node_rank is not None:
        raise UserError("--node-rank needs --nnodes", help="Start the command on every node with both.")
    if nnodes is None or nnodes == 1:
        return _slurm_launch(env) or Launch()
    address = master_addr or env.get("MASTER_ADDR")
    if node_rank is None or not address:
        raise UserError(
            "--nnodes needs --node-rank and --master-addr",
            help="On node 0 of 2: ddpdoctor check-env --nnodes 2 --node-rank 0 --master-addr HOST_OF_NODE_0",
        )
    if node_rank >= nnodes:
        raise UserError(f"--node-rank {node_rank} is not below --nnodes {nnodes}", help="Nodes count from 0.")
    port = master_port or number(env, "MASTER_PORT") or DEFAULT_PORT
    return Launch(
        launcher=Launcher.NNODES, rank=node_rank, world_size=nnodes, local_rank=0, nnodes=nnodes, hosts=(address,),
        port=port, run=f"nnodes {nnodes}",
    )  # fmt: skip


def seen_ranks(env: Mapping[str, str]) -> Launch:
    """Return the launch of a program that is the job's own command; here RANK and the like come from its launcher."""
    starter, launch = number(env, OWN_VARIABLE), _torchrun_launch(env)
    if starter is not None and launch is not None:
        return replace(launch, launcher=Launcher.OWN, nnodes=1, run=str(starter), agent_store=True)
    return torchrun_launch(env) or launch or _slurm_launch(env) or Launch(nnodes=1, hosts=("127.0.0.1",))


def _torchrun_launch(env: Mapping[str, str]) -> Launch | None:
    rank, world_size, port = number(env, "RANK"), number(env, "WORLD_SIZE"), number(env, "MASTER_PORT")
    address = text(env, "MASTER_ADDR")
    if rank is None or world_size is None or port is None or not address or rank >= world_size:
        return None
    local_rank, one_host = read_local_rank(env), is_loopback(address)
    return Launch(
        launcher=Launcher.ENVIRONMENT, rank=rank, world_size=world_size,
        local_rank=rank if local_rank is None and one_host else local_rank, nnodes=1 if one_host else None,
        hosts=(address,), port=port, run=f"{address}:{port}",
    )  # fmt: skip


def torchrun_launch(env: Mapping[str, str]) -> Launch | None:
    """Return the launch of a torchrun that started this process, or None."""
    launch, run_id = _torchrun_launch(env), env.get("TORCHELASTIC_RUN_ID")
    if launch is None or run_id is None:
        return None
    local_rank, nnodes = number(env, "LOCAL_RANK"), number(env, "GROUP_WORLD_SIZE")
    run = f"{run_id}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    is_agents = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(
        launch, launcher=Launcher.TORCHRUN, local_rank=local_rank, nnodes=nnodes, run=run, agent_store=is_agents
    )


def _slurm_launch(env: Mapping[str, str]) -> Launch | None:
    task = read_slurm_task(env)
    if task is None or task.tasks == 1:
        return None
    # MASTER_ADDR may be wrong, so rank 0 may also be on the step's first host.
    named = () if task.nodes == 1 else (env.get("MASTER_ADDR", ""), *read_step_hosts(env)[:1])
    return Launch(
        launcher=Launcher.SLURM, rank=task.task, world_size=task.tasks, local_rank=number(env, "SLURM_LOCALID"),
        nnodes=task.nodes, hosts=tuple(dict.fromkeys(host for host in named if host)) or ("127.0.0.1",),
        port=task.port(EXCHANGE_PORTS), run=f"slurm {task.name}",
    )  # fmt: skip


def effective_environment(env: Mapping[str, str], options: NodeOptions) -> dict[str, str]:
    """Return the environment with the options added, and without the variables that they override."""
    given = options.variables()
    overruled = set()
    if options.master_addr or options.rdzv_endpoint:
        overruled = {"MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT"}
    return {name: value for name, value in env.items() if name not in overruled} | given


def read_node_launch(env: Mapping[str, str]) -> NodeLaunch:
    """Return this node's launch; raises ``UserError`` if the values do not suffice to reach the other nodes."""
    launch = _torchrun(env) or _by_options(env) or _slurm(env) or _operator(env)
    if launch is None:
        raise UserError(
            "no option or variable defines the nodes of the job",
            help="On node 0 of 2: ddpdoctor check-rendezvous --nnodes 2 --node-rank 0 --master-addr HOST_OF_NODE_0; "
            "or start the command by srun or torchrun.",
        )
    return launch


def _torchrun(env: Mapping[str, str]) -> NodeLaunch | None:
    started = torchrun_launch(env)
    if started is None:
        return None
    launch = replace(started, nnodes=started.nnodes or 1, port=_exchange_port(env, started.port + 1))
    settings = JobSettings(
        node_rank=number(env, "GROUP_RANK"), world_size=started.world_size, run_id=env["TORCHELASTIC_RUN_ID"]
    )
    return _node_launch(launch, settings, started.port, own_screen=False)


def _by_options(env: Mapping[str, str]) -> NodeLaunch | None:
    nodes = text(env, "PET_NNODES")
    if not nodes:
        if text(env, "PET_NODE_RANK"):
            raise UserError("--node-rank needs --nnodes", help="Start the command on every node with both.")
        return None
    counts = nodes_range(nodes)
    if counts is None or not 1 <= counts[0] <= counts[1]:
        raise UserError(f"--nnodes {nodes} is not a number of nodes", help='Give "2", or "1:4" for an elastic job.')
    by_number = text(env, "PET_RDZV_BACKEND") in {"", "static"}
    names, given = _slurm_names(env), parse_endpoint(text(env, "PET_RDZV_ENDPOINT"), "PET_RDZV_ENDPOINT")
    if given is not None:
        host, port = given.host, _port(given.port, DEFAULT_PORT if by_number else C10D_PORT)
    else:
        host = text(env, "PET_MASTER_ADDR", "MASTER_ADDR") or next(iter(names), "")
        if not host:
            raise UserError(
                "--nnodes needs --master-addr or --rdzv-endpoint",
                help="On node 0 of 2: ddpdoctor check-rendezvous --nnodes 2 --node-rank 0 --master-addr HOST_OF_NODE_0",
            )
        port = _port(number(env, "PET_MASTER_PORT", "MASTER_PORT"), DEFAULT_PORT)
    in_step, local_rank = is_slurm_step(env), read_local_rank(env)
    of_scheduler, of_operator = ("SLURM_NODEID",) * in_step, ("RANK",) * (local_rank is None)
    rank = number(env, "PET_NODE_RANK", "NODE_RANK", "GROUP_RANK", *of_scheduler, *of_operator)
    if rank is None and by_number and counts[1] > 1:
        raise UserError(
            "--nnodes with --master-addr needs --node-rank",
            help="Number the nodes from 0, or give all of them the same --rdzv-endpoint HOST:PORT.",
        )
    launch = Launch(
        launcher=Launcher.NNODES, rank=rank or 0, world_size=counts[1], local_rank=local_rank, nnodes=counts[1],
        hosts=tuple(dict.fromkeys((host, *names[:1]))), port=_exchange_port(env, port + 1),
        run=text(env, "PET_RDZV_ID"),
    )  # fmt: skip
    ranks = number(env, "PET_NPROC_PER_NODE")
    settings = JobSettings(node_rank=rank, run_id=launch.run, world_size=None if ranks is None else ranks * counts[1])
    pairs = (part.partition("=") for part in text(env, "PET_RDZV_CONF").split(","))
    conf = {name.strip(): value.strip().lower() for name, _, value in pairs}
    return _node_launch(
        launch, settings, port, fewest=counts[0], hosts=names, by_number=by_number,
        is_host=_BOOLEANS.get(conf.get("is_host", "")), own_screen=not in_step,
    )  # fmt: skip


def _port(given: int | None, default: int) -> int:
    if given is None:
        return default
    if not 0 < given <= MAX_PORT:
        raise UserError(f"{given} is not a port", help=f"A port is from 1 to {MAX_PORT}.")
    return given


def _slurm(env: Mapping[str, str]) -> NodeLaunch | None:
    task = read_slurm_task(env)
    if task is None or task.nodes is None:
        return None
    names = _slurm_names(env)
    host = text(env, "MASTER_ADDR") or next(iter(names), "127.0.0.1")
    port = _port(number(env, "MASTER_PORT"), task.port(STORE_PORTS))
    launch = Launch(
        launcher=Launcher.SLURM, rank=task.task, world_size=task.tasks, local_rank=number(env, "SLURM_LOCALID"),
        nnodes=task.nodes, hosts=tuple(dict.fromkeys((host, *names[:1]))),
        port=_exchange_port(env, task.port(EXCHANGE_PORTS)), run=f"slurm {task.name}",
    )  # fmt: skip
    settings = JobSettings(
        node_rank=number(env, "SLURM_NODEID"), run_id=task.name, world_size=number(env, "WORLD_SIZE")
    )
    return _node_launch(launch, settings, port, hosts=names, own_screen=False)


def _slurm_names(env: Mapping[str, str]) -> tuple[str, ...]:
    return read_step_hosts(env) if is_slurm_step(env) else ()


def _operator(env: Mapping[str, str]) -> NodeLaunch | None:
    rank, world_size, host = number(env, "RANK"), number(env, "WORLD_SIZE"), text(env, "MASTER_ADDR")
    if rank is None or world_size is None or not host or not world_size:
        return None
    port = _port(number(env, "MASTER_PORT"), DEFAULT_PORT)
    local_rank = read_local_rank(env)
    a_node = 1 if local_rank is None else number(env, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    nnodes = -(-world_size // a_node)
    launch = Launch(
        launcher=Launcher.ENVIRONMENT, rank=rank, world_size=world_size, local_rank=local_rank, nnodes=nnodes,
        hosts=(host,), port=_exchange_port(env, port + 1), run=f"{host}:{port}",
    )  # fmt: skip
    return _node_launch(launch, JobSettings(node_rank=rank // a_node, world_size=world_size), port)


def _node_launch(
    launch: Launch, settings: JobSettings, port: int, *, fewest: int | None = None, **more: Any
) -> NodeLaunch:
    host, most = launch.hosts[0], launch.nnodes or 1
    settings = replace(settings, nnodes=most, endpoint=f"{host}:{port}")
    return NodeLaunch(launch=launch, settings=settings, host=host, port=port, fewest=fewest or most, most=most, **more)


def _exchange_port(env: Mapping[str, str], default: int) -> int:
    """Return ddpdoctor's own port: by default the one above the store's, or below it if there is none above."""
    given = number(env, EXCHANGE_PORT)
    return _port(given, default if default <= MAX_PORT else default - 2)
