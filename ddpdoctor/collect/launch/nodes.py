"""Reads a multi-node job from the environment and the options: this node's number, the node count, the meeting point.

Options become the PET_* variables that torchrun reads for them, so that every check of the variables sees them. If
several sources have values, the first one counts: a torchrun that started us, then options and PET_* variables, then a
Slurm step, then an operator's RANK, WORLD_SIZE and MASTER_ADDR.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.launch.launchers import DEFAULT_PORT, torchrun_launch
from ddpdoctor.collect.launch.slurm_task import EXCHANGE_PORTS, STORE_PORTS, read_slurm_task, read_step_hosts
from ddpdoctor.collect.launch.this_process import is_slurm_step, number, read_local_rank, text
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import EXCHANGE_PORT, Launch, NodeLaunch
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reaching import JobSettings
from ddpdoctor.model.rendezvous import nodes_range, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.launch import NodeOptions

C10D_PORT = 29400
"""For an endpoint without a port (torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py)."""
MAX_PORT = 65_535
_TRUE, _FALSE = {"1", "true", "t", "yes", "y"}, {"0", "false", "f", "no", "n"}
"""The values of is_host that torch accepts (torch/distributed/elastic/rendezvous/api.py, get_as_bool)."""


def effective_environment(env: Mapping[str, str], options: NodeOptions) -> dict[str, str]:
    """Return the environment with the options added, and without the variables that they override."""
    given = options.variables()
    overruled = set()
    if options.master_addr or options.rdzv_endpoint:
        overruled = {"MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT"}
    return {name: value for name, value in env.items() if name not in overruled} | given


def read_node_launch(env: Mapping[str, str]) -> NodeLaunch:
    """Return this node's launch; raises ``UserError`` if the values are not enough to meet the other nodes."""
    found = _torchrun(env) or _by_options(env) or _slurm(env) or _operator(env)
    if found is None:
        raise UserError(
            "nothing says which nodes belong to the job",
            help="On node 0 of 2: ddpdoctor check-rendezvous --nnodes 2 --node-rank 0 --master-addr HOST_OF_NODE_0; "
            "or start the command by srun or torchrun.",
        )
    return found


def _torchrun(env: Mapping[str, str]) -> NodeLaunch | None:
    found = torchrun_launch(env)
    if found is None:
        return None
    launch = replace(found, nnodes=found.nnodes or 1, port=_exchange_port(env, found.port + 1))
    settings = JobSettings(
        node_rank=number(env, "GROUP_RANK"), world_size=found.world_size, run_id=env["TORCHELASTIC_RUN_ID"]
    )  # fmt: skip
    return _node_launch(launch, settings, found.port, own_screen=False)


def _by_options(env: Mapping[str, str]) -> NodeLaunch | None:
    """Return the launch from the options, or from the PET_* variables that torchrun reads in their place."""
    nodes = text(env, "PET_NNODES")
    if not nodes:
        if text(env, "PET_NODE_RANK"):
            raise UserError("--node-rank needs --nnodes", help="Start the command on every node with both.")
        return None
    counts = nodes_range(nodes)
    if counts is None or not 1 <= counts[0] <= counts[1]:
        raise UserError(f"--nnodes {nodes} is not a number of nodes", help='Give "2", or "1:4" for an elastic job.')
    by_number = text(env, "PET_RDZV_BACKEND") in {"", "static"}
    host, port = _endpoint(env, by_number=by_number)
    rank = _node_rank(env)
    _refuse_unnumbered(rank, counts[1], by_number=by_number)
    launch = Launch(
        launcher=Launcher.NNODES,
        rank=rank or 0,
        world_size=counts[1],
        local_rank=read_local_rank(env),
        nnodes=counts[1],
        hosts=tuple(dict.fromkeys((host, *_slurm_names(env)[:1]))),
        port=_exchange_port(env, port + 1),
        run=text(env, "PET_RDZV_ID"),
    )
    settings = JobSettings(node_rank=rank, run_id=launch.run, world_size=_world_size(env, counts[1]))
    return _node_launch(
        launch, settings, port, fewest=counts[0], hosts=_slurm_names(env), by_number=by_number,
        is_host=_is_host(text(env, "PET_RDZV_CONF")), own_screen=not is_slurm_step(env),
    )  # fmt: skip


def _endpoint(env: Mapping[str, str], *, by_number: bool) -> tuple[str, int]:
    """Return the store's host and port; raises ``UserError`` if there is no host or the port is invalid."""
    given = parse_endpoint(text(env, "PET_RDZV_ENDPOINT"), "PET_RDZV_ENDPOINT")
    if given is not None:
        return given.host, _port(given.port, DEFAULT_PORT if by_number else C10D_PORT)
    host = text(env, "PET_MASTER_ADDR", "MASTER_ADDR") or next(iter(_slurm_names(env)), "")
    if not host:
        raise UserError(
            "--nnodes needs --master-addr or --rdzv-endpoint",
            help="On node 0 of 2: ddpdoctor check-rendezvous --nnodes 2 --node-rank 0 --master-addr HOST_OF_NODE_0",
        )
    return host, _port(number(env, "PET_MASTER_PORT", "MASTER_PORT"), DEFAULT_PORT)


def _port(given: int | None, default: int) -> int:
    if given is None:
        return default
    if not 0 < given <= MAX_PORT:
        raise UserError(f"{given} is not a port", help=f"A port is from 1 to {MAX_PORT}.")
    return given


def _node_rank(env: Mapping[str, str]) -> int | None:
    """Return this node's number from torchrun, or else from the scheduler or operator that numbers nodes or pods."""
    names = ["PET_NODE_RANK", "NODE_RANK", "GROUP_RANK"]
    if is_slurm_step(env):
        names.append("SLURM_NODEID")
    if read_local_rank(env) is None:
        names.append("RANK")
    return number(env, *names)


def _refuse_unnumbered(rank: int | None, nnodes: int, *, by_number: bool) -> None:
    if rank is None and by_number and nnodes > 1:
        raise UserError(
            "--nnodes with --master-addr needs --node-rank",
            help="Number the nodes from 0, each with its own; or give all --rdzv-endpoint HOST:PORT instead.",
        )


def _world_size(env: Mapping[str, str], nnodes: int) -> int | None:
    ranks = number(env, "PET_NPROC_PER_NODE")
    return None if ranks is None else ranks * nnodes


def _is_host(conf: str) -> bool | None:
    """Return the value of is_host in "is_host=1,read_timeout=60", or None without a valid one."""
    pairs = (part.partition("=") for part in conf.split(","))
    given = {name.strip(): value.strip().lower() for name, _, value in pairs}
    if given.get("is_host") in _TRUE:
        return True
    return False if given.get("is_host") in _FALSE else None


def _slurm(env: Mapping[str, str]) -> NodeLaunch | None:
    found = read_slurm_task(env)
    if found is None or found.nodes is None:
        return None
    names = _slurm_names(env)
    host = text(env, "MASTER_ADDR") or next(iter(names), "127.0.0.1")
    port = _port(number(env, "MASTER_PORT"), found.port(STORE_PORTS))
    launch = Launch(
        launcher=Launcher.SLURM,
        rank=found.task,
        world_size=found.tasks,
        local_rank=number(env, "SLURM_LOCALID"),
        nnodes=found.nodes,
        hosts=tuple(dict.fromkeys((host, *names[:1]))),
        port=_exchange_port(env, found.port(EXCHANGE_PORTS)),
        run=f"slurm {found.name}",
    )
    settings = JobSettings(
        node_rank=number(env, "SLURM_NODEID"), run_id=found.name, world_size=number(env, "WORLD_SIZE")
    )  # fmt: skip
    return _node_launch(launch, settings, port, hosts=names, own_screen=False)


def _slurm_names(env: Mapping[str, str]) -> tuple[str, ...]:
    return read_step_hosts(env) if is_slurm_step(env) else ()


def _operator(env: Mapping[str, str]) -> NodeLaunch | None:
    """Return the launch from RANK, WORLD_SIZE and MASTER_ADDR; without a local rank, each process is a node."""
    rank, world_size, host = number(env, "RANK"), number(env, "WORLD_SIZE"), text(env, "MASTER_ADDR")
    if rank is None or world_size is None or not host or not world_size:
        return None
    port = _port(number(env, "MASTER_PORT"), DEFAULT_PORT)
    local_rank = read_local_rank(env)
    a_node = 1 if local_rank is None else number(env, "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    nnodes = -(-world_size // a_node)
    launch = Launch(
        launcher=Launcher.ENVIRONMENT,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        nnodes=nnodes,
        hosts=(host,),
        port=_exchange_port(env, port + 1),
        run=f"{host}:{port}",
    )
    return _node_launch(launch, JobSettings(node_rank=rank // a_node, world_size=world_size), port)


def _node_launch(
    launch: Launch, settings: JobSettings, port: int, *, fewest: int | None = None, **more: Any
) -> NodeLaunch:
    """Complete what a node knows; its store is on the first host of the launch."""
    host, most = launch.hosts[0], launch.nnodes or 1
    settings = replace(settings, nnodes=most, endpoint=f"{host}:{port}")
    return NodeLaunch(launch=launch, settings=settings, host=host, port=port, fewest=fewest or most, most=most, **more)


def _exchange_port(env: Mapping[str, str], default: int) -> int:
    """Return ddpdoctor's own port: by default the one above the store's, or below it if there is none above."""
    given = number(env, EXCHANGE_PORT)
    return _port(given, default if default <= MAX_PORT else default - 2)
