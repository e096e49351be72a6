"""Tasks and nodes of a Slurm step, read from its variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.rendezvous import in_slurm_step, text_of
from ddpdoctor.model.slurm import expand_counts, expand_hosts

if TYPE_CHECKING:
    from ddpdoctor.model.node import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The tasks and nodes of the step, or of the whole job if no step was started."""

    in_step: bool
    tasks: int
    nodes: int
    job_nodes: int | None
    tasks_here: int | None
    """The number of tasks on the node of the process."""
    most_on_a_node: int


def read_shape(process: Process) -> Shape | None:
    """Return the shape, or None if this does not run under Slurm or its numbers are missing."""
    tasks = process.number("SLURM_NTASKS") or process.number("SLURM_NPROCS")
    nodes = process.number("SLURM_NNODES")
    if tasks is None or nodes is None:
        return None
    counts = _counts(process)
    here = process.number("SLURM_NODEID")
    return Shape(
        in_step=in_slurm_step(process),
        tasks=tasks,
        nodes=nodes,
        job_nodes=_job_nodes(process),
        tasks_here=counts[here] if here is not None and 0 <= here < len(counts) else None,
        most_on_a_node=max(counts, default=-(-tasks // max(nodes, 1))),
    )


def _counts(process: Process) -> tuple[int, ...]:
    try:
        return expand_counts(text_of(process, "SLURM_STEP_TASKS_PER_NODE") or text_of(process, "SLURM_TASKS_PER_NODE"))
    except ValueError:
        return ()


def _job_nodes(process: Process) -> int | None:
    """Return the job's number of nodes. Inside a step, SLURM_JOB_NUM_NODES is still the job's, SLURM_NNODES is not."""
    told = process.number("SLURM_JOB_NUM_NODES")
    if told is not None:
        return told
    try:
        return len(expand_hosts(text_of(process, "SLURM_JOB_NODELIST")))
    except ValueError:
        return None
