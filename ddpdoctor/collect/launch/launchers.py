"""Finds who started this process: torchrun, a Slurm step, or a user on every node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch.slurm_task import EXCHANGE_PORTS, read_slurm_task, read_step_hosts
from ddpdoctor.collect.launch.this_process import number, read_local_rank, text
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.rendezvous import is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PORT = 29500
"""torchrun's default."""
OWN_VARIABLE = "DDPDOCTOR_RANKS"
"""The pid of the ddpdoctor that started this rank; set only in such ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """The values of --nnodes, --node-rank, --master-addr and --master-port."""

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def seen_launch(env: Mapping[str, str], by_hand: ByHand) -> Launch:
    """Return the launch from the environment or the options; without a launcher, that is a single process.

    torchrun wins over a Slurm step and over the options. RANK, WORLD_SIZE and MASTER_ADDR without a launcher do not
    count as a launch; rules check their values. Raises ``UserError`` for options that do not go together.
    """
    return torchrun_launch(env) or _by_hand(env, by_hand) or _slurm(env) or Launch()


def seen_ranks(env: Mapping[str, str]) -> Launch:
    """Return the launch of a program that is the job's own command; here RANK and the like come from its launcher."""
    launch = _own(env) or torchrun_launch(env) or _environment(env) or _slurm(env)
    return launch or Launch(nnodes=1, hosts=("127.0.0.1",))


def _own(env: Mapping[str, str]) -> Launch | None:
    starter, launch = number(env, OWN_VARIABLE), _environment(env)
    if starter is None or launch is None:
        return None
    return replace(launch, launcher=Launcher.OWN, nnodes=1, run=str(starter), agent_store=True)


def _environment(env: Mapping[str, str]) -> Launch | None:
    rank, world_size, port = number(env, "RANK"), number(env, "WORLD_SIZE"), number(env, "MASTER_PORT")
    address = text(env, "MASTER_ADDR")
    if rank is None or world_size is None or port is None or not address or rank >= world_size:
        return None
    local_rank, one_host = read_local_rank(env), is_loopback(address)
    return Launch(
        launcher=Launcher.ENVIRONMENT,
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None and one_host else local_rank,
        nnodes=1 if one_host else None,
        hosts=(address,),
        port=port,
        run=f"{address}:{port}",
    )


def torchrun_launch(env: Mapping[str, str]) -> Launch | None:
    """Return the launch of a torchrun that started this process, or None."""
    launch, run_id = _environment(env), env.get("TORCHELASTIC_RUN_ID")
    if launch is None or run_id is None:
        return None
    return replace(
        launch,
        launcher=Launcher.TORCHRUN,
        local_rank=number(env, "LOCAL_RANK"),
        nnodes=number(env, "GROUP_WORLD_SIZE"),
        run=f"{run_id}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _by_hand(env: Mapping[str, str], options: ByHand) -> Launch | None:
    if options.nnodes is None:
        if options.node_rank is not None:
            raise UserError("--node-rank needs --nnodes", help="Start the command on every node with both.")
        return None
    if options.nnodes == 1:
        return None
    address = options.master_addr or env.get("MASTER_ADDR")
    if options.node_rank is None or not address:
        raise UserError(
            "--nnodes needs --node-rank and --master-addr",
            help="On node 0 of 2: ddpdoctor check-env --nnodes 2 --node-rank 0 --master-addr HOST_OF_NODE_0",
        )
    if options.node_rank >= options.nnodes:
        raise UserError(
            f"--node-rank {options.node_rank} is not below --nnodes {options.nnodes}", help="Nodes count from 0."
        )
    return Launch(
        launcher=Launcher.NNODES,
        rank=options.node_rank,
        world_size=options.nnodes,
        local_rank=0,
        nnodes=options.nnodes,
        hosts=(address,),
        port=options.master_port or number(env, "MASTER_PORT") or DEFAULT_PORT,
        run=f"nnodes {options.nnodes}",
    )


def _slurm(env: Mapping[str, str]) -> Launch | None:
    found = read_slurm_task(env)
    if found is None or found.tasks == 1:
        return None
    return Launch(
        launcher=Launcher.SLURM,
        rank=found.task,
        world_size=found.tasks,
        local_rank=number(env, "SLURM_LOCALID"),
        nnodes=found.nodes,
        hosts=_slurm_hosts(env, found.nodes),
        port=found.port(EXCHANGE_PORTS),
        run=f"slurm {found.name}",
    )


def _slurm_hosts(env: Mapping[str, str], nnodes: int | None) -> tuple[str, ...]:
    """Return rank 0's possible addresses: MASTER_ADDR, and because that may be wrong, the step's first host."""
    if nnodes == 1:
        return ("127.0.0.1",)
    named = (env.get("MASTER_ADDR", ""), *read_step_hosts(env)[:1])
    return tuple(dict.fromkeys(host for host in named if host)) or ("127.0.0.1",)
