"""DD111 to DD114: environment variables that are unknown, have wrong values, are deprecated, or do harm."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import first_names
from ddpdoctor.model.variables import find_variable
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.environment.launch import ranks_of
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.variable_flaws import (
    Flaw,
    find_danger,
    find_deprecated,
    find_too_new,
    find_unknown,
    find_wrong_value,
    read_context,
    show,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.model.node import Node, NodeProcess
    from ddpdoctor.model.variables import Variable
    from ddpdoctor.rules.variable_dangers import VariableContext

    Flaws = Callable[[NodeProcess, VariableContext], Iterable[Flaw | None]]
    """A function that yields what is wrong with the variables of a process."""

MOST_SHOWN = 6
OF_THE_LAUNCH = frozenset({"slurm", "k8s", "mpi", "launcher", "build", "loader", "network"})
"""Components whose variables are not listed as checked, because a launcher sets dozens of them."""


@rule(
    "DD111", "env-unknown", Severity.WARNING, "A variable is set that nothing reads",
    group=CheckGroup.VARIABLES, needs=("software",), reads="names of environment variables, NCCL's version",
)  # fmt: skip
def check_env_unknown(node: Node) -> Answer:
    """Report variables that look like those of NCCL, torch, Gloo or torchrun, but that none of them reads."""

    def flaws(process: NodeProcess, context: VariableContext) -> Iterable[Flaw | None]:
        yield from (find_unknown(name, context) for name in process.other_names)
        yield from (find_too_new(variable, value, context) for variable, value in _listed(process))

    others = sorted({name for process in node.processes for name in process.other_names})
    strangers = f"and {', '.join(others)}" if others else "and no similar names"
    return judged(_draw(node, flaws), f"{_count(node)} {strangers}")


@rule(
    "DD112", "env-value", Severity.WARNING, "A variable has an invalid value",
    group=CheckGroup.VARIABLES, needs=(), reads="environment variables of NCCL, torch, Gloo, CUDA and OpenMP",
)  # fmt: skip
def check_env_value(node: Node) -> Answer:
    """Report variables whose value has the wrong form."""
    return judged(_draw(node, _over_listed(find_wrong_value)), _shown(node))


@rule(
    "DD113", "env-deprecated", Severity.WARNING, "A variable is obsolete",
    group=CheckGroup.VARIABLES, needs=("software",), reads="environment variables, versions of torch and NCCL",
)  # fmt: skip
def check_env_deprecated(node: Node) -> Answer:
    """Report variables that have a new name, that are no longer read, or that never existed."""
    return judged(_draw(node, _over_listed(find_deprecated)), _shown(node))


@rule(
    "DD114", "env-danger", Severity.WARNING, "A variable slows down jobs or hides faults",
    group=CheckGroup.VARIABLES, needs=("rdma",), reads="environment variables",
)  # fmt: skip
def check_env_danger(node: Node) -> Answer:
    """Report variables with a harmful value, most often leftovers of a search for a fault."""

    def flaws(process: NodeProcess, context: VariableContext) -> Iterable[Flaw | None]:
        for variable, value in _listed(process):
            if not (variable.name == "NCCL_IB_DISABLE" and context.active_port):
                yield find_danger(variable, value, context)

    return judged(_draw(node, flaws), _shown(node))


def _over_listed(
    question: Callable[[Variable, str, VariableContext], Flaw | None],
) -> Flaws:
    """Ask one question of every listed variable of a process."""
    return lambda process, context: (question(variable, value, context) for variable, value in _listed(process))


def _listed(process: NodeProcess) -> list[tuple[Variable, str]]:
    found = ((find_variable(name), value) for name, value in process.variables.items())
    return [(variable, value) for variable, value in found if variable is not None]


def _draw(node: Node, flaws: Flaws) -> list[Problem]:
    return [
        _problem(process, flaw)
        for process in node.processes
        for flaw in flaws(process, read_context(node, process))
        if flaw is not None
    ]


def _problem(process: NodeProcess, flaw: Flaw) -> Problem:
    return Problem(
        summary=flaw.summary,
        evidence=(_origin(process, flaw.name), *flaw.evidence),
        fix=_write_fix(flaw),
        severity=flaw.severity,
        confidence=flaw.confidence,
        ranks=ranks_of([process]),
    )


def _origin(process: NodeProcess, name: str) -> str:
    if name in process.variables:
        return f"{name}={show(process.variables[name])} is set in the environment"
    return f"{name} is set in the environment; its value is not shown"


def _write_fix(flaw: Flaw) -> str:
    """Return the shell command that sets the intended variable, or removes this one."""
    name = flaw.name
    if not name.isidentifier() or not name.isascii():
        return f"remove {shlex.quote(name)} from the environment, for example with env -u {shlex.quote(name)}"
    if not flaw.set_name:
        return f"unset {name}"
    if flaw.set_name == name:
        return f"export {name}={shlex.quote(flaw.set_value or '')}"
    return f'export {flaw.set_name}="${name}"; unset {name}'


def _count(node: Node) -> str:
    names = {variable.name for process in node.processes for variable, _ in _listed(process)}
    return f"{len(names)} known variable{'' if len(names) == 1 else 's'}" if names else "no known variables"


def _shown(node: Node) -> str:
    """Return some of the settings that were checked, with those of NCCL, torch and Gloo first."""
    settings = {
        f"{variable.name}={show(value)}": (variable.component not in {"nccl", "torch", "gloo"}, variable.name)
        for process in node.processes
        for variable, value in _listed(process)
        if variable.component not in OF_THE_LAUNCH and not variable.name.startswith("TORCHELASTIC_")
    }
    names = sorted(settings, key=lambda text: settings[text])
    return first_names(names, MOST_SHOWN) or "no variable of NCCL, torch, Gloo, CUDA or OpenMP is set"
