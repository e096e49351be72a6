"""Reads facts about this process: its rank, its variables and its machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.files import read_link
from ddpdoctor.model.node import NodeProcess
from ddpdoctor.model.variables import select_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.system import System

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Set by torchrun, Open MPI, other MPI launchers and Slurm; the first that is a number counts. Slurm comes last: what
mpirun starts in a Slurm job also has the variables of the step that runs mpirun's daemon, of which a node has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The machine, and the container on it, in which a process runs."""

    host: str
    machine: str
    """Equal for processes that share the kernel and the network, because they are one node."""
    container: str
    """Equal for processes that also share files and pids."""


def read_process(system: System, *, rank: int | None = None, local_rank: int | None = None) -> NodeProcess:
    """Return the facts of this process; ``rank`` and ``local_rank`` are used if no variable has them."""
    variables, others = select_variables(system.env)
    own_rank = read_rank(system.env)
    own_local_rank = read_local_rank(system.env)
    return NodeProcess(
        rank=rank if own_rank is None else own_rank,
        local_rank=local_rank if own_local_rank is None else own_local_rank,
        pid=os.getpid(),
        variables=variables,
        other_names=others,
        cpus=system.calls.cpus(),
        under_wrap="DDPDOCTOR_RUN" in system.env,
    )


def read_identity(system: System) -> Identity:
    """Return on which machine and in which container this process runs.

    The boot id identifies a kernel, and the network namespace a container on it. So the ranks of one host are one node,
    two containers are two nodes, and hosts with the same name stay distinct. The mount namespace does not make a node,
    because Apptainer gives each task its own.
    """
    host = system.calls.hostname()
    boot = system.text_or("/proc/sys/kernel/random/boot_id")
    return Identity(
        host=host,
        machine=f"{host}/{boot}/{_namespace(system, 'net')}",
        container=f"{_namespace(system, 'mnt')}/{_namespace(system, 'pid')}",
    )


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process; the shells of sbatch and salloc belong to a job, but not to a step.

    Slurm numbers its own steps (batch, extern, interactive) from 0xfffffff0.
    """
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


def read_rank(env: Mapping[str, str]) -> int | None:
    """Return the rank, or None if no launcher set it."""
    return _first_number(env, RANK_VARIABLES)


def read_local_rank(env: Mapping[str, str]) -> int | None:
    """Return the local rank, or None if no launcher set it."""
    return _first_number(env, LOCAL_RANK_VARIABLES)


def _first_number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    # The batch script's shell also has SLURM_PROCID, but it is not a rank.
    in_step = is_slurm_step(env)
    return number(env, *(name for name in names if in_step or not name.startswith("SLURM_")))


def _namespace(system: System, kind: str) -> str:
    return read_link(system.path(f"/proc/self/ns/{kind}"))
