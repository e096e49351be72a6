"""Reads which task of a Slurm step this process is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch.this_process import is_slurm_step, number
from ddpdoctor.model.slurm import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

EXCHANGE_PORTS = (16_384, 12_288)
"""First port and count of the ports on which ddpdoctor's processes meet. They are below Linux's default
ip_local_port_range (32768 to 60999) and above the ports of common services."""
STORE_PORTS = (28_672, 4_096)
"""The same for the store of the step's job: above ddpdoctor's ports and below ip_local_port_range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTask:
    """One task of a Slurm step."""

    job: int
    step: int
    task: int
    tasks: int
    nodes: int | None
    """None if Slurm does not say."""

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
