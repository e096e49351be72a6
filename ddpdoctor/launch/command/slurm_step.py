"""Reads the Slurm step of this process from its environment variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch import (
    EXCHANGE_PORTS,
    STORE_PORTS,
    SlurmTask,
    is_slurm_step,
    number,
    read_slurm_task,
    read_step_hosts,
)
from ddpdoctor.model.launch import expand_counts, is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """One step of a job, and this process's place in it."""

    place: SlurmTask
    nodes: int
    node: int
    local_task: int
    local_tasks: int | None
    """The step's tasks on this node, or None if Slurm does not say."""
    hosts: tuple[str, ...]
    """The nodes' hosts, in Slurm's order; empty if the list cannot be read."""
    task_hosts: tuple[str, ...]
    """The host of each task; empty if unknown, for example with a cyclic distribution."""
    restarts: int
    """How often the job was requeued."""
    master: str
    """The MASTER_ADDR that the job's script set for the store; empty if unset, or loopback with several nodes."""
    master_port: int | None

    @property
    def own_port(self) -> int:
        """The port where ddpdoctor's processes meet."""
        return self.place.port(EXCHANGE_PORTS)

    @property
    def store(self) -> tuple[str, int]:
        """Host and port for the job's store: MASTER_ADDR and MASTER_PORT, else the first node and a derived port."""
        first = "127.0.0.1" if self.nodes == 1 else next(iter(self.hosts), "127.0.0.1")
        return self.master or first, self.master_port or self.place.port(STORE_PORTS)


def read_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the Slurm step of this process, or None if there is none or it has only one task."""
    place = read_slurm_task(env)
    if place is None or place.tasks == 1:
        return None
    nodes, node = place.nodes or 1, number(env, "SLURM_NODEID") or 0
    counts, hosts, master = _counts(env, nodes), read_step_hosts(env), env.get("MASTER_ADDR", "").strip()
    return SlurmStep(
        place=place,
        nodes=nodes,
        node=node,
        local_task=number(env, "SLURM_LOCALID") or 0,
        local_tasks=counts[node] if node < len(counts) else None,
        hosts=hosts,
        task_hosts=_task_hosts(env, hosts, counts, (place.task, place.tasks)),
        restarts=number(env, "SLURM_RESTART_COUNT") or 0,
        master="" if nodes > 1 and is_loopback(master) else master,
        master_port=number(env, "MASTER_PORT"),
    )


def idle_nodes(env: Mapping[str, str]) -> int:
    """Return how many allocated nodes stay idle because a shell of sbatch or salloc runs this without srun."""
    if is_slurm_step(env) or number(env, "SLURM_JOB_ID", "SLURM_JOBID") is None:
        return 0
    return max((number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1) - 1, 0)


def _counts(env: Mapping[str, str], nodes: int) -> tuple[int, ...]:
    try:
        counts = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
    except ValueError:
        return ()
    return counts if len(counts) == nodes else ()


def _task_hosts(
    env: Mapping[str, str], hosts: tuple[str, ...], counts: tuple[int, ...], place: tuple[int, int]
) -> tuple[str, ...]:
    """Return each task's host if tasks fill one node after another, which is Slurm's usual default."""
    task, tasks = place
    if len(hosts) != len(counts) or sum(counts) != tasks:
        return ()
    found = tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))
    dealt = env.get("SLURM_DISTRIBUTION", "block")
    own = env.get("SLURMD_NODENAME", found[task])
    return found if (dealt.startswith("block") or tasks == len(hosts)) and found[task] == own else ()
