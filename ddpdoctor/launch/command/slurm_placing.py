"""Places a task of a Slurm step: as a node's torchrun if there is one task per node, else as a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.launch import number
from ddpdoctor.launch.command.placement import Placement, Style
from ddpdoctor.launch.command.slurm_step import SlurmStep, idle_nodes
from ddpdoctor.launch.command.torchrun_nodes import SHAPE, TorchrunSettings, variable_of
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.command.command_line import SplitCommand


def place_task(
    split: SplitCommand, torchrun: TorchrunSettings | None, step: SlurmStep, env: Mapping[str, str]
) -> Placement:
    """Return a task's place, with the options or variables that its torchrun or its rank needs.

    ``torchrun`` is torchrun's settings, or None if the command is not torchrun. Raises ``UserError`` if each of several
    tasks on a node would start the ranks of the whole node.
    """
    placed = _task(step)
    if torchrun is None or split.is_command:
        return replace(placed, style=Style.COMMAND)
    if step.place.tasks == step.nodes or torchrun.nnodes == (step.place.tasks, step.place.tasks):
        return _node_task(placed, torchrun, step)
    if given := _shape_given(split, torchrun):
        raise _too_many_tasks(step, given)
    note = _rank_note(step) if step.place.task == 0 else None
    return replace(placed, style=Style.RANK, variables=_rank_variables(step, env), note=note)


def idle_note(env: Mapping[str, str]) -> str | None:
    """Return a note if a batch script runs this on one node and leaves the others idle."""
    idle = idle_nodes(env)
    if not idle:
        return None
    nodes = "the other node is" if idle == 1 else f"the other {idle} nodes are"
    return f"this runs on one node of the Slurm allocation, and {nodes} idle; `srun ddpdoctor wrap` uses all nodes"


def _task(step: SlurmStep) -> Placement:
    """Return the part of the place that does not depend on what the task starts."""
    one_host = step.nodes == 1
    hosts = ("127.0.0.1",) if one_host else (step.master, *step.hosts[:1])
    return Placement(
        number=step.place.task,
        expected=step.place.tasks,
        most=step.place.tasks,
        hosts=tuple(dict.fromkeys(filter(None, hosts))),
        port=step.own_port,
        names=step.task_hosts,
        one_host=one_host,
        store=step.store,
        batch_job=step.place.name,
        of_ranks=step.place.tasks > step.nodes,
        nodes=step.nodes,
    )


def _node_task(placed: Placement, torchrun: TorchrunSettings, step: SlurmStep) -> Placement:
    """Add the torchrun options that the user left out: the number of nodes, the rendezvous endpoint and ID."""
    fewest, most = torchrun.nnodes or (step.place.tasks, step.place.tasks)
    added = [] if torchrun.nnodes else [f"--nnodes={step.place.tasks}"]
    by_address = any(torchrun.text(name) for name in ("--master-addr", "--node-rank", "--rdzv-endpoint"))
    if torchrun.is_c10d or not (torchrun.text("--rdzv-backend") or by_address):
        added += _c10d_args(torchrun, step)
    elif torchrun.backend == "static":
        added += _static_args(torchrun, step)
    return replace(
        placed,
        expected=fewest,
        most=most,
        of_ranks=False,
        store=torchrun.also(added).endpoint,
        torchrun_args=tuple(added),
        note=_nnodes_note(torchrun, step) if step.place.task == 0 else None,
    )


def _c10d_args(torchrun: TorchrunSettings, step: SlurmStep) -> list[str]:
    host, port = step.store
    args = [] if torchrun.is_c10d else ["--rdzv-backend=c10d"]
    if not torchrun.text("--rdzv-id"):
        # A late process from before a requeue must not join.
        args.append(f"--rdzv-id=slurm-{step.place.name}-{step.restarts}")
    if torchrun.text("--rdzv-endpoint"):
        return args
    args.append(f"--rdzv-endpoint={host}:{port}")
    # torch decides by host name who serves the store, but Slurm's node name may differ from it.
    if not torchrun.text("--rdzv-conf") and host in {"127.0.0.1", *step.hosts[:1]}:
        args.append(f"--rdzv-conf=is_host={int(step.place.task == 0)}")
    return args


def _static_args(torchrun: TorchrunSettings, step: SlurmStep) -> list[str]:
    host, port = step.store
    args = [] if torchrun.text("--node-rank") else [f"--node-rank={step.place.task}"]
    if torchrun.text("--rdzv-endpoint"):
        return args
    args += [] if torchrun.text("--master-addr") else [f"--master-addr={host}"]
    return args + ([] if torchrun.text("--master-port") else [f"--master-port={port}"])


def _rank_variables(step: SlurmStep, env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables of init_process_group, and LOCAL_RANK. A rank that the job's script chose stays."""
    host, port = step.store
    rank, size = number(env, "RANK"), number(env, "WORLD_SIZE")
    chosen = rank is not None and size == step.place.tasks and rank < size
    variables = [
        ("RANK", rank if chosen else step.place.task),
        ("WORLD_SIZE", step.place.tasks),
        ("LOCAL_RANK", step.local_task),
        ("NODE_RANK", step.node),
        ("MASTER_ADDR", host),
        ("MASTER_PORT", port),
    ]
    if step.local_tasks is not None:
        variables.append(("LOCAL_WORLD_SIZE", step.local_tasks))
    return tuple((name, str(value)) for name, value in variables)


def _shape_given(split: SplitCommand, torchrun: TorchrunSettings) -> str:
    """Return an option or variable that is meant for torchrun, or "" if there is none."""
    if split.torchrun:
        return split.torchrun[0].partition("=")[0]
    return next((variable_of(name) for name in SHAPE if torchrun.text(name)), "")


def _too_many_tasks(step: SlurmStep, given: str) -> UserError:
    nodes = "one node" if step.nodes == 1 else f"{step.nodes} nodes"
    return UserError(
        f"this Slurm step has {step.place.tasks} tasks on {nodes}, and {given} makes each of them start torchrun, "
        "which starts all ranks of a node",
        help="Nothing was started. Start one task per node: `srun --ntasks-per-node=1 ddpdoctor wrap --nproc-per-node "
        "N SCRIPT`. Or start one task per rank, without options of torchrun: `srun --ntasks-per-node=N ddpdoctor wrap "
        "SCRIPT`.",
    )


def _rank_note(step: SlurmStep) -> str:
    nodes = "one node" if step.nodes == 1 else f"{step.nodes} nodes"
    became = f"each of the {step.place.tasks} Slurm tasks on {nodes} becomes a rank"
    return f"{became}; `srun --ntasks-per-node=1` starts torchrun"


def _nnodes_note(torchrun: TorchrunSettings, step: SlurmStep) -> str | None:
    if torchrun.nnodes is None or torchrun.nnodes[0] <= step.place.tasks <= torchrun.nnodes[1]:
        return None
    return f"--nnodes is {torchrun.text('--nnodes')}, but this Slurm step has {step.place.tasks} tasks, one per node"
