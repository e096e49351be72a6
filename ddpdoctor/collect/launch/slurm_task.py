"""The task of a Slurm step that this process is, as its variables tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch.this_process import is_slurm_step, number
from ddpdoctor.model.slurm import expand_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

EXCHANGE_PORTS = (16_384, 12_288)
"""First port and how many, for where ddpdoctor's processes meet: below Linux's default ip_local_port_range (32768 to
60999) and above the ports of common services."""
STORE_PORTS = (28_672, 4_096)
"""The same for the store of a step's own job: above those where ddpdoctor meets, and below ip_local_port_range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTask:
    """A task among those of its step."""

    job: int
    step: int
    task: int
    tasks: int
    nodes: int | None
    """None where Slurm does not say."""

    @property
    def name(self) -> str:
        """The step, as Slurm writes it."""
        return f"{self.job}.{self.step}"

    def port(self, ports: tuple[int, int]) -> int:
        """Return the port of a range that all hosts of the step choose: by job and step, so that jobs do not meet."""
        first, count = ports
        return first + (31 * self.job + self.step) % count


def read_slurm_task(env: Mapping[str, str]) -> SlurmTask | None:
    """Return the task that srun started this process as; None where it did not, and in the shell of sbatch."""
    task, job = number(env, "SLURM_PROCID"), number(env, "SLURM_JOB_ID", "SLURM_JOBID")
    step = number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    tasks = number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if not is_slurm_step(env) or task is None or job is None or step is None or tasks is None or task >= tasks:
        return None
    return SlurmTask(
        job=job, step=step, task=task, tasks=tasks, nodes=number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    )


def read_step_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the step in Slurm's order; none where their list is missing or cannot be read."""
    try:
        return expand_hosts(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        return ()
