"""This process: which rank it is, what it was given, and on which machine it stands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.node import Process
from ddpdoctor.model.variables import select_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.system import System

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Of torchrun, Slurm, Open MPI and other MPI launchers: the first that is a number counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which machine, and which container of it, a process stands in."""

    host: str
    machine: str
    """Equal for two processes that share the kernel and the network: they are one node."""
    container: str
    """Equal for two processes that share files and process numbers too."""


def read_process(system: System, *, rank: int | None = None, local_rank: int | None = None) -> Process:
    """Return the facts of this process; ``rank`` and ``local_rank`` are for where no variable says them."""
    variables, others = select_variables(system.env)
    own_rank = _first_number(system.env, RANK_VARIABLES)
    own_local_rank = read_local_rank(system.env)
    return Process(
        rank=rank if own_rank is None else own_rank,
        local_rank=local_rank if own_local_rank is None else own_local_rank,
        pid=os.getpid(),
        variables=variables,
        other_names=others,
        cpus=system.calls.cpus(),
        under_wrap="DDPDOCTOR_RUN" in system.env,
    )


def read_identity(system: System) -> Identity:
    """Return where this process stands.

    Kernels are told apart by their boot id, containers of one kernel by their network namespace: two containers are two
    nodes, the ranks of one host are one, and hosts that share a name are as many as they are. A task that has mounts
    of its own (Apptainer gives each some) is no node for that.
    """
    host = system.calls.hostname()
    boot = system.text_or("/proc/sys/kernel/random/boot_id")
    return Identity(
        host=host,
        machine=f"{host}/{boot}/{_namespace(system, 'net')}",
        container=f"{_namespace(system, 'mnt')}/{_namespace(system, 'pid')}",
    )


def is_slurm_step(env: Mapping[str, str]) -> bool:
    """Say whether srun started this process: the shells of sbatch and salloc have a job, and are no step of it.

    Slurm numbers its own steps (batch, extern, interactive) from 0xfffffff0.
    """
    step = number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step < 0xFFFFFFF0 and "SLURM_PROCID" in env


def number(env: Mapping[str, str], *names: str) -> int | None:
    """Return the first of some variables that is a whole number and not negative; None where none is."""
    for name in names:
        text = env.get(name, "").strip()
        if text.isascii() and text.isdecimal():
            return int(text)
    return None


def read_local_rank(env: Mapping[str, str]) -> int | None:
    """Return the number of this rank on its host, where a launcher says it."""
    return _first_number(env, LOCAL_RANK_VARIABLES)


def _first_number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    # The batch script's own shell has SLURM_PROCID too, and is no rank.
    in_step = is_slurm_step(env)
    return number(env, *(name for name in names if in_step or not name.startswith("SLURM_")))


def _namespace(system: System, kind: str) -> str:
    try:
        return str(system.path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""
