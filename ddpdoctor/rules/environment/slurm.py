"""DD236, DD237 and DD238: whether a Slurm step fits the torch job that runs in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.launch import by_torchrun, expand_counts, expand_hosts, in_slurm_step, text_of
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import count_of
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.launch import ranks_of, show_variables
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Node, NodeProcess

NOT_SLURM = "this does not run under Slurm"
NO_STEP = "this is the shell of a Slurm job: srun has not started a step yet"
NO_DEVICE = ("", "-1", "NoDevFiles")
"""Entries that end the list of CUDA_VISIBLE_DEVICES. Slurm writes the last one for a step without GPUs."""
_SHOWN = (
    "SLURM_NNODES", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_GPUS_ON_NODE", "RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The tasks and nodes of the step, or of the whole job if no step was started."""

    in_step: bool
    tasks: int
    nodes: int
    job_nodes: int | None
    tasks_here: int | None
    """The number of tasks on the node of the process."""
    most_on_a_node: int


def read_shape(process: NodeProcess) -> StepShape | None:
    """Return the shape, or None if this does not run under Slurm or its numbers are missing."""
    tasks = process.number("SLURM_NTASKS") or process.number("SLURM_NPROCS")
    nodes = process.number("SLURM_NNODES")
    if tasks is None or nodes is None:
        return None
    counts = _counts(process)
    here = process.number("SLURM_NODEID")
    return StepShape(
        in_step=in_slurm_step(process),
        tasks=tasks,
        nodes=nodes,
        job_nodes=_job_nodes(process),
        tasks_here=counts[here] if here is not None and 0 <= here < len(counts) else None,
        most_on_a_node=max(counts, default=-(-tasks // max(nodes, 1))),
    )


def _counts(process: NodeProcess) -> tuple[int, ...]:
    try:
        return expand_counts(text_of(process, "SLURM_STEP_TASKS_PER_NODE") or text_of(process, "SLURM_TASKS_PER_NODE"))
    except ValueError:
        return ()


def _job_nodes(process: NodeProcess) -> int | None:
    """Return the job's number of nodes. Inside a step, SLURM_JOB_NUM_NODES is still the job's, SLURM_NNODES is not."""
    nodes = process.number("SLURM_JOB_NUM_NODES")
    if nodes is not None:
        return nodes
    try:
        return len(expand_hosts(text_of(process, "SLURM_JOB_NODELIST")))
    except ValueError:
        return None


@rule(
    "DD236", "slurm-shape", Severity.ERROR, "The Slurm step does not match the torch job",
    group=CheckGroup.LAUNCH, needs=(),
    reads="SLURM_NTASKS, SLURM_NNODES, SLURM_PROCID, SLURM_STEP_TASKS_PER_NODE, SLURM_GPUS_ON_NODE, WORLD_SIZE, RANK",
)  # fmt: skip
def check_slurm_shape(node: Node) -> Answer:
    """Report a step that starts neither one task for each rank nor one torchrun on each node."""
    found = [(process, shape) for process in node.processes if (shape := read_shape(process)) is not None]
    if not found:
        return skipped(NOT_SLURM)
    problems = [problem for process, shape in found for problem in _misshapen(process, shape)]
    if not problems and not any(in_slurm_step(process) or by_torchrun(process) for process, _ in found):
        return skipped(NO_STEP)
    return judged(problems, show_variables(found[0][0], _SHOWN))


def _misshapen(process: NodeProcess, shape: StepShape) -> Iterator[Problem]:
    ranks = ranks_of([process])
    if by_torchrun(process):
        yield from _torchrun(process, shape, ranks)
    elif shape.in_step and shape.tasks > 1:
        world, rank, task = process.number("WORLD_SIZE"), process.number("RANK"), process.number("SLURM_PROCID")
        for_torchrun = shape.tasks == shape.nodes and rank is None
        if world is not None and world != shape.tasks and not for_torchrun:
            few = world > shape.tasks
            yield Problem(
                summary=f"WORLD_SIZE is {world}, but srun started {shape.tasks} tasks: "
                + (
                    f"they wait for {world - shape.tasks} ranks that never start"
                    if few
                    else "there are more tasks than ranks"
                ),
                evidence=(show_variables(process, _SHOWN),),
                fix="export WORLD_SIZE=$SLURM_NTASKS in each task, or start torchrun once on each node: "
                "srun --ntasks-per-node=1 torchrun …",
                severity=None if rank is not None else Severity.WARNING,
                ranks=ranks,
            )
        if rank is not None and task is not None and rank != task:
            yield Problem(
                summary="RANK is not SLURM_PROCID: tasks may share a rank or run on unexpected nodes",
                evidence=(f"RANK is {rank} and SLURM_PROCID is {task}",),
                fix="export RANK=$SLURM_PROCID in each task, not in the batch script",
                severity=Severity.WARNING,
                ranks=ranks,
            )
    yield from _more_ranks_than_gpus(process, shape, ranks)
    if shape.in_step and shape.tasks > 1 and shape.job_nodes is not None and shape.nodes < shape.job_nodes:
        yield Problem(
            summary=f"the step runs on {shape.nodes} of the {shape.job_nodes} nodes of the job",
            fix=f"srun --nodes={shape.job_nodes} …, if all nodes should train",
            severity=Severity.INFO,
            ranks=ranks,
        )


def _torchrun(process: NodeProcess, shape: StepShape, ranks: tuple[int, ...]) -> Iterator[Problem]:
    groups, job_nodes = process.number("GROUP_WORLD_SIZE"), shape.job_nodes or shape.nodes
    evidence: tuple[str, ...] = ()
    if groups is None:
        return
    if shape.in_step and shape.most_on_a_node > 1:
        times = f"{shape.most_on_a_node} times per node"
        what = f"srun starts torchrun {times}, and each torchrun starts ranks for the whole node"
    elif shape.in_step and groups < shape.nodes:
        counted = count_of(groups, "node")
        what = f"torchrun counts {counted}, but the step has {shape.nodes}: they do not all train together"
        evidence = (f"GROUP_WORLD_SIZE is {groups}, SLURM_NNODES is {shape.nodes}",)
    elif groups == 1 and job_nodes > 1:
        why = "the step has one task" if shape.in_step else "it was started without srun"
        what = f"the job has {job_nodes} nodes, but torchrun uses one: {why}"
    else:
        return
    yield Problem(
        summary=what,
        evidence=evidence,
        fix="srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES …",
        severity=Severity.WARNING,
        ranks=ranks,
    )


def _more_ranks_than_gpus(process: NodeProcess, shape: StepShape, ranks: tuple[int, ...]) -> Iterator[Problem]:
    local = process.number("LOCAL_WORLD_SIZE") if by_torchrun(process) else shape.tasks_here
    gpus = process.number("SLURM_GPUS_ON_NODE")
    if local is None or gpus is None or local <= gpus or gpus < 1:
        return
    if not by_torchrun(process) and not shape.in_step:
        return
    yield Problem(
        summary=f"{local} ranks run on this node, but Slurm gave it {count_of(gpus, 'GPU')}",
        evidence=(f"SLURM_GPUS_ON_NODE is {gpus}",),
        fix=f"--gpus-per-node={local}, or at most {gpus} ranks per node",
        severity=Severity.WARNING,
        ranks=ranks,
    )


@rule(
    "DD237", "srun-cpus", Severity.WARNING, "srun gave a task fewer CPUs than requested",
    group=CheckGroup.LAUNCH, needs=(), reads="SLURM_CPUS_PER_TASK, SRUN_CPUS_PER_TASK, sched_getaffinity",
)  # fmt: skip
def check_srun_cpus(node: Node) -> Answer:
    """Report tasks that may use fewer CPUs than the batch script's `--cpus-per-task`."""
    tasks = [process for process in node.processes if in_slurm_step(process)]
    if not tasks:
        return skipped(NO_STEP if any("SLURM_JOB_ID" in one.variables for one in node.processes) else NOT_SLURM)
    asked = tasks[0].number("SLURM_CPUS_PER_TASK")
    if asked is None:
        return skipped("the job did not request a number of CPUs per task")
    fewest, those = _fewest_cpus(tasks)
    seen = f"{asked} CPUs requested per task, {fewest} usable"
    if fewest >= asked:
        return passed(seen)
    return judged([_too_few_cpus(asked, fewest, those)], seen)


def _fewest_cpus(tasks: list[NodeProcess]) -> tuple[int, list[NodeProcess]]:
    """Return the smallest number of CPUs of a task, and the processes of all tasks with that number."""
    if by_torchrun(tasks[0]):
        return len({cpu for process in tasks for cpu in process.cpus}), tasks
    fewest = min(len(process.cpus) for process in tasks)
    return fewest, [process for process in tasks if len(process.cpus) == fewest]


def _too_few_cpus(asked: int, fewest: int, those: list[NodeProcess]) -> Problem:
    passed_on = text_of(those[0], "SRUN_CPUS_PER_TASK")
    return Problem(
        summary=(
            f"the job requested {asked} CPUs per task, but srun lets a task use only {fewest}, shared with its loader "
            "workers"
        ),
        evidence=(f"SRUN_CPUS_PER_TASK is {passed_on or 'not set'}",),
        fix=f"export SRUN_CPUS_PER_TASK={asked} in the batch script, or srun --cpus-per-task={asked}",
        ranks=ranks_of(those),
    )


@rule(
    "DD238", "gpus-per-task", Severity.WARNING, "Each task sees only one GPU, so cuda:LOCAL_RANK does not exist",
    group=CheckGroup.LAUNCH, needs=("torch",),
    reads="CUDA_VISIBLE_DEVICES, LOCAL_RANK, SLURM_LOCALID, torch.cuda.device_count",
)  # fmt: skip
def check_gpus_per_task(node: Node) -> Answer:
    """Report tasks of a Slurm step that see fewer GPUs than their local rank needs."""
    tasks = [process for process in node.processes if in_slurm_step(process) and not by_torchrun(process)]
    if not tasks:
        started = any(by_torchrun(process) for process in node.processes)
        return skipped("torchrun assigns the GPUs" if started else NOT_SLURM)
    seen = [(process, visible) for process in tasks if (visible := _visible(node, process)) is not None]
    if not seen or not any(visible for _, visible in seen):
        return skipped("the tasks see no GPU")
    short = [(process, visible) for process, visible in seen if 0 < visible <= (_local_number(process) or 0)]
    words = f"{len(seen)} tasks on this node, {seen[0][1]} GPU visible to the first"
    return judged([_short_of_gpus(short)], words) if short else passed(words)


def _visible(node: Node, process: NodeProcess) -> int | None:
    """Return how many GPUs a task sees, or None if it is not known."""
    text = process.variables.get("CUDA_VISIBLE_DEVICES")
    if text is not None:
        entries = [entry.strip() for entry in text.split(",")]
        return next((place for place, entry in enumerate(entries) if entry in NO_DEVICE), len(entries))
    torch = known(node.torch)
    return torch.device_count if torch is not None and torch.import_error is None else None


def _local_number(process: NodeProcess) -> int | None:
    local = process.number("LOCAL_RANK")
    return local if local is not None else process.number("SLURM_LOCALID")


def _short_of_gpus(short: list[tuple[NodeProcess, int]]) -> Problem:
    process, visible = short[-1]
    count = process.number("SLURM_GPUS_ON_NODE")
    gpus = f"--gpus-per-node={count}" if count is not None and count > 1 else "--gpus-per-node=N"
    return Problem(
        summary=f"each task sees only {count_of(visible, 'GPU')}, so cuda:LOCAL_RANK does not exist in the later "
        "tasks of a node",
        evidence=(
            show_variables(process, ("SLURM_LOCALID", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK")),
        ),
        fix=f"srun {gpus} instead of --gpus-per-task, or torch.cuda.set_device(0) in each task",
        confidence=Confidence.MEDIUM,
        ranks=ranks_of(process for process, _ in short),
    )
