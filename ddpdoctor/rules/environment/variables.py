"""DD111 to DD114: environment variables that are unknown, have wrong values, are deprecated, or do harm."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import first_names
from ddpdoctor.model.variables import find_variable
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.environment.processes import ranks_of
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
    """Report variables that look like those of NCCL, torch, Gloo or torchrun, but that none of them reads.

    ## What it means

    A misspelled variable has no effect and causes no message: the job runs as if it were not set.

    ## How it is recognized

    Names that begin with `NCCL_`, `TORCH_NCCL_`, `TORCH_FR_`, `TORCH_DISTRIBUTED_`, `GLOO_`, `TORCHELASTIC_`,
    `CUDA_VISIBLE_` or `OMP_NUM_`, in upper or lower case, or with a misspelling of these such as `NCLL_`, are looked up
    in a table of the names in the source of NCCL 2.3.5 to 2.30.7 and torch 1.4 to 2.13, and in the library of NCCL
    2.32.3. A name is misspelled if a known one is within two edits, or if one is a prefix of the other. Names are
    case-sensitive. ddpdoctor never reads the values of such variables.

    ## What else looks like it

    A name that is like no known one may belong to a plugin or to a newer release, so it is an info. A misspelled name
    is an info too if the installed NCCL or torch is newer than the table, and so is a variable that the installed NCCL
    is too old for. Names with the prefix of a known plugin (`OFI_NCCL_`, `NCCL_FASTRAK_`, `NCCL_UCX_`, …) are not
    checked.

    ## What to do

    Set the variable that you meant, and unset this one.

    ## Example

        nothing reads NCCL_SOCKET_IFNAMES; did you mean NCCL_SOCKET_IFNAME?
    """

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
    """Report variables whose value has the wrong form.

    ## What it means

    NCCL reads `NCCL_P2P_DISABLE=true` as 0, and `NCCL_BUFFSIZE=4M` as 4. It parses numbers with `strtoll`, which takes
    the leading digits, and 0 if there are none. From 2.32 on it uses the default then, and says so. torch is strict:
    `TORCH_DISTRIBUTED_DEBUG=VERBOSE` makes the import fail. A `TORCH_NCCL_*` flag must be 1, true, yes, t, y or 0,
    false, no, f, n. With any other value, even an empty one, `init_process_group` fails with "Invalid value for
    environment variable". In our test, a wrong `TORCH_FR_*` value made the first collective of torch 2.13 over Gloo
    hang.

    ## How it is recognized

    Every known variable has a type, taken from the source that parses it: NCCL's src/misc/param.cc and
    src/graph/tuning.cc, torch's c10d/Utils.hpp and c10/util/env.cpp. A value that ends the job is an error. A value
    that is ignored or read differently is a warning. Quotation marks that are part of a value (`docker --env-file`
    keeps them), white space at its end, and a "~" that is not expanded are wrong too.

    ## What else looks like it

    A number outside the known range, or a word that a newer NCCL may know, may be right: the confidence is medium.
    Interfaces, HCA names, ranks and addresses have their own checks.

    ## What to do

    Set a value of the form that the report names.

    ## Example

        NCCL_P2P_DISABLE=true: NCCL takes an integer, and reads this as 0 (since 2.32 as not set)
    """
    return judged(_draw(node, _over_listed(find_wrong_value)), _shown(node))


@rule(
    "DD113", "env-deprecated", Severity.WARNING, "A variable is obsolete",
    group=CheckGroup.VARIABLES, needs=("software",), reads="environment variables, versions of torch and NCCL",
)  # fmt: skip
def check_env_deprecated(node: Node) -> Answer:
    """Report variables that have a new name, that are no longer read, or that never existed.

    ## What it means

    A variable with an old name works with a warning, or not at all. A variable that was removed has no effect. Such
    variables are often copied from old tutorials and scripts.

    ## How it is recognized

    The check uses a table of the names in the source of NCCL 2.3.5 to 2.30.7 and torch 1.4 to 2.13. A name that is
    still right for the installed versions is not reported. If no version is known, a variable that was removed after
    NCCL 2.21.5 or torch 2.6, the oldest in use, is an info.

    ## What else looks like it

    If nodes have different versions of torch, one environment may set both names on purpose.

    ## What to do

    Set the new name, or unset the variable.

    ## Example

        NCCL_BLOCKING_WAIT is an old name: use TORCH_NCCL_BLOCKING_WAIT
    """
    return judged(_draw(node, _over_listed(find_deprecated)), _shown(node))


@rule(
    "DD114", "env-danger", Severity.WARNING, "A variable slows down jobs or hides faults",
    group=CheckGroup.VARIABLES, needs=("rdma",), reads="environment variables",
)  # fmt: skip
def check_env_danger(node: Node) -> Answer:
    """Report variables with a harmful value, most often leftovers of a search for a fault.

    ## What it means

    The job runs, but it is slower than it has to be, or hides a fault: `NCCL_P2P_DISABLE=1`, `NCCL_SHM_DISABLE=1`, a
    forced `NCCL_ALGO` or `NCCL_PROTO`, `CUDA_LAUNCH_BLOCKING=1`, `TORCH_DISTRIBUTED_DEBUG=DETAIL`,
    `TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, `NCCL_COMM_ID`, a `NCCL_DEBUG_FILE` that all ranks of a node share.

    ## How it is recognized

    Only a harmful value counts: `NCCL_P2P_DISABLE=0` is fine, and so is `NCCL_ALGO=^NVLS`, which forces nothing. Values
    that `ddpdoctor wrap` sets itself are fine. A value that may be intended (the flight recorder switched off, a log
    level of TRACE) is an info.

    ## What else looks like it

    A setting may be measurably faster on this cluster, or work around a known fault. Keep it then, with
    `--skip env-danger`. `NCCL_IB_DISABLE=1` is an info if there is no InfiniBand or RoCE device. If a port is active,
    ib-disabled reports it.

    ## What to do

    Unset the variable, and see whether the job still runs.

    ## Example

        CUDA_LAUNCH_BLOCKING=1: every launch waits for its kernel, so that nothing overlaps
    """

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
