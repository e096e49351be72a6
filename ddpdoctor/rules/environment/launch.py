"""DD231 and DD232: the variables that make a process a rank are complete and in range."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import name_list
from ddpdoctor.model.rendezvous import OTHER_RANK_VARIABLES, RANK_VARIABLES, text_of
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.processes import FIRST_HOST_OF_SLURM, ranks_of, show_variables
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Node, NodeProcess

_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
_BELOW = (
    ("RANK", "WORLD_SIZE", "ranks"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "local ranks"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE", "node ranks"),
    ("PET_NODE_RANK", "PET_NNODES", "node ranks"),
)
"""A number, the number it must be below, and what such numbers are called."""
_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
MAX_PORT = 65_535
NO_LAUNCHER = "no launcher's variables are set"
_MADE_UP = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Values that make one process a job of one rank."""


@rule(
    "DD231", "env-complete", Severity.ERROR, "A launch variable is missing or not a number",
    after=("fqdn-forward",),
    group=CheckGroup.LAUNCH, needs=(), reads="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
)  # fmt: skip
def check_env_complete(node: Node) -> Answer:
    """Report a rank that has only some of the variables that `init_process_group` reads."""
    found = [process for process in node.processes if any(name in process.variables for name in RANK_VARIABLES)]
    if not found:
        return skipped(NO_LAUNCHER)
    problems = [*_no_numbers(found), *_missing(found)]
    return judged(problems, show_variables(found[0], RANK_VARIABLES))


def _no_numbers(processes: list[NodeProcess]) -> Iterator[Problem]:
    """Yield one problem for each value that is not a whole number."""
    for name in _NUMBERS:
        for text in dict.fromkeys(text_of(process, name) for process in processes):
            if text and not _is_number(text):
                yield Problem(
                    summary=f"{name} is {text!r}, which is not an integer: init_process_group raises ValueError",
                    fix=f"export {name} as an integer",
                    ranks=ranks_of(process for process in processes if text_of(process, name) == text),
                )


def _is_number(text: str) -> bool:
    """Say whether Python's int() accepts a text, which is what torch uses."""
    try:
        int(text)
    except ValueError:
        return False
    return True


def _missing(processes: list[NodeProcess]) -> Iterator[Problem]:
    """Yield one problem for each set of missing names."""
    by_names: dict[tuple[str, ...], list[NodeProcess]] = {}
    for process in processes:
        missing = tuple(name for name in RANK_VARIABLES if not text_of(process, name))
        if missing and not _is_preparation(process, missing):
            by_names.setdefault(missing, []).append(process)
    for missing, those in by_names.items():
        yield _missing_problem(missing, those)


def _is_preparation(process: NodeProcess, missing: tuple[str, ...]) -> bool:
    """Say whether the variables are those that a script exports before it starts the ranks."""
    if "RANK" not in missing or any(name in process.variables for name in missing):
        return False
    return "WORLD_SIZE" in missing or _numbered_by_others(process)


def _numbered_by_others(process: NodeProcess) -> bool:
    return any(name in process.variables for name in (*OTHER_RANK_VARIABLES, "SLURM_JOB_ID"))


def _missing_problem(missing: tuple[str, ...], processes: list[NodeProcess]) -> Problem:
    first = processes[0]
    empty = [name for name in missing if name in first.variables]
    is_rank = "RANK" not in missing and not _numbered_by_others(first)
    are = "is" if len(missing) == 1 else "are"
    return Problem(
        summary=f"{name_list(missing)} {are} not set: init_process_group fails with "
        f'"environment variable {missing[0]} expected, but not set"',
        evidence=(
            f"set variables: {show_variables(first, RANK_VARIABLES)}",
            *(f"{name} is empty, which counts as unset" for name in empty),
        ),
        fix="start the ranks with torchrun, or in each process: "
        + " ".join(["export", *(f"{name}={_example(name, first)}" for name in missing)]),
        severity=None if is_rank else Severity.WARNING,
        ranks=ranks_of(processes),
    )


def _example(name: str, process: NodeProcess) -> str:
    """Return a value that is right in this environment, or one for a job of one rank."""
    from_slurm = {"RANK": "$SLURM_PROCID", "WORLD_SIZE": "$SLURM_NTASKS"}
    if name in from_slurm and from_slurm[name][1:] in process.variables:
        return from_slurm[name]
    if name == "MASTER_ADDR" and "SLURM_JOB_NODELIST" in process.variables:
        return FIRST_HOST_OF_SLURM
    return _MADE_UP[name]


@rule(
    "DD232", "env-range", Severity.ERROR, "A launch variable is out of range",
    after=("env-complete",),
    group=CheckGroup.LAUNCH, needs=(), reads="RANK, LOCAL_RANK, GROUP_RANK, PET_NODE_RANK and their sizes, MASTER_PORT",
)  # fmt: skip
def check_env_range(node: Node) -> Answer:
    """Report ranks that are out of range for their world size, and ports that do not exist."""
    found = [process for process in node.processes if _range_names(process)]
    if not found:
        return skipped(NO_LAUNCHER)
    problems = [problem for process in found for problem in _out_of_range(process)]
    return judged(problems, show_variables(found[0], _range_names(found[0])))


def _range_names(process: NodeProcess) -> tuple[str, ...]:
    names = [name for low, high, _ in _BELOW for name in (low, high)]
    return tuple(name for name in (*names, *_PORTS) if text_of(process, name))


def _out_of_range(process: NodeProcess) -> Iterator[Problem]:
    ranks = ranks_of([process])
    for name, size_name, noun in _pairs(process):
        number, size = process.number(name), process.number(size_name)
        evidence, fix = (f"{name} is {number}",), f"number the {noun} from 0"
        if size is not None and size < 1:
            yield Problem(
                summary=f"{size_name} is {size}: it must be at least 1", fix=f"export {size_name}=1", ranks=ranks
            )
        elif number is not None and number < 0:
            yield Problem(summary=f"{name} is negative", evidence=evidence, fix=fix, ranks=ranks)
        elif number is not None and size is not None and number >= size:
            summary = f"{name} is not below {size_name}, which is {size}: {noun} range from 0 to {size - 1}"
            yield Problem(summary=summary, evidence=evidence, fix=f"{fix}, or raise {size_name}", ranks=ranks)
    yield from _local_size(process)
    for name in _PORTS:
        yield from _port(process, name)


def _pairs(process: NodeProcess) -> Iterator[tuple[str, str, str]]:
    """Yield the pairs to compare. Only the static rendezvous reads PET_NODE_RANK, but operators always set it."""
    static = text_of(process, "PET_RDZV_BACKEND") in {"", "static"}
    for pair in _BELOW:
        if static or pair[0] != "PET_NODE_RANK":
            yield pair


def _local_size(process: NodeProcess) -> Iterator[Problem]:
    local, world = process.number("LOCAL_WORLD_SIZE"), process.number("WORLD_SIZE")
    if local is not None and world is not None and local > world >= 1:
        yield Problem(
            summary=(
                f"LOCAL_WORLD_SIZE is {local}, but WORLD_SIZE is {world}: a node cannot have more ranks than the job"
            ),
            fix="export WORLD_SIZE as the total number of ranks on all nodes",
            ranks=ranks_of([process]),
        )


def _port(process: NodeProcess, name: str) -> Iterator[Problem]:
    port = process.number(name)
    if port is None or 1 <= port <= MAX_PORT:
        return
    if port == 0:
        if process.number("WORLD_SIZE") == 1:
            return
        summary = f"{name} is 0, which means any free port: the other ranks cannot know the port of rank 0"
    else:
        summary = f"{name} is {port}: ports range from 1 to {MAX_PORT}"
    yield Problem(summary=summary, fix=f"export {name}=29500", ranks=ranks_of([process]))
