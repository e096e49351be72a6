"""DD111 to DD114: environment variables that nobody reads, with wrong values, out of use, or left over."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.variables import find_variable
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.environment.processes import merge_equal, ranks_of
from ddpdoctor.rules.registry import Group, rule
from ddpdoctor.rules.variable_flaws import (
    Flaw,
    find_danger,
    find_deprecated,
    find_too_new,
    find_unknown,
    find_wrong_value,
    see,
    show,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.model.node import Node, Process
    from ddpdoctor.model.variables import Variable
    from ddpdoctor.rules.variable_dangers import VariableContext

    Flaws = Callable[[Process, VariableContext], Iterable[Flaw | None]]
    """What is wrong with the variables of a process."""

MOST_SHOWN = 6
OF_THE_LAUNCH = frozenset({"slurm", "k8s", "mpi", "launcher", "build", "loader", "network"})
"""Not shown as what was looked at: a launcher sets dozens of them."""


@rule(
    "DD111", "env-unknown", Severity.WARNING, "A variable is set that nobody reads",
    group=Group.VARIABLES, needs=("software",), reads="names of environment variables, NCCL's version",
)  # fmt: skip
def check_env_unknown(node: Node) -> Answer:
    """Report variables of NCCL, torch, Gloo and torchrun that none of them reads.

    ## What it means

    A misspelt variable has no effect and nobody says so: the job runs as if it were not set.

    ## How it is recognised

    Names that begin with `NCCL_`, `TORCH_NCCL_`, `TORCH_FR_`, `TORCH_DISTRIBUTED_`, `GLOO_`, `TORCHELASTIC_`,
    `CUDA_VISIBLE_` or `OMP_NUM_`, in any case of letters, or with a slip of these such as `NCLL_`, are looked up in a
    table of the names in the source of NCCL 2.3.5 to 2.30.7 and torch 1.4 to 2.13, and in the library of NCCL 2.32.3.
    A name is misspelt where a known one is within two edits, or where one is the beginning of the other. Names are
    case-sensitive. Of such names the value is never read.

    ## What else looks like it

    A name that is like no known one may belong to a plugin or to a newer release: it is reported as information only,
    and so is a misspelt one where the installed NCCL or torch is newer than the table. Names with the prefix of a
    known plugin (`OFI_NCCL_`, `NCCL_FASTRAK_`, `NCCL_UCX_`, …) are left alone. A variable that the installed NCCL is
    too old for is information too.

    ## What to do

    Set the variable that was meant, and unset this one.

    ## Example

        NCCL_SOCKET_IFNAMES is read by nobody: NCCL_SOCKET_IFNAME is the nearest name that is
    """

    def flaws(process: Process, scene: VariableContext) -> Iterable[Flaw | None]:
        yield from (find_unknown(name, scene) for name in process.other_names)
        yield from (find_too_new(variable, value, scene) for variable, value in _listed(process))

    others = sorted({name for process in node.processes for name in process.other_names})
    strangers = f"and {', '.join(others)}" if others else "and no other name that is like one"
    return judged(_draw(node, flaws), f"{_count(node)} {strangers}")


@rule(
    "DD112", "env-value", Severity.WARNING, "A variable has a value that its reader does not take",
    group=Group.VARIABLES, needs=(), reads="environment variables of NCCL, torch, Gloo, CUDA and OpenMP",
)  # fmt: skip
def check_env_value(node: Node) -> Answer:
    """Report variables whose value is of the wrong form.

    ## What it means

    NCCL reads `NCCL_P2P_DISABLE=true` as 0, and `NCCL_BUFFSIZE=4M` as 4: its numbers are read with `strtoll`, which
    takes the digits in front, and 0 where there are none; 2.32 takes the default then, and says so. torch is strict:
    `TORCH_DISTRIBUTED_DEBUG=VERBOSE` ends the import, and a `TORCH_NCCL_*` flag other than 1, true, yes, t, y or 0,
    false, no, f, n, the empty one among them, ends `init_process_group` with "Invalid value for environment variable".
    A wrong `TORCH_FR_*` value was seen to hang the first collective of torch 2.13 over Gloo.

    ## How it is recognised

    Every known variable has a type, taken from the source that parses it: NCCL's src/misc/param.cc and
    src/graph/tuning.cc, torch's c10d/Utils.hpp and c10/util/env.cpp. A value that ends the job is an error, one that
    is passed over or read otherwise a warning. Quotation marks that are part of a value (`docker --env-file` keeps
    them), white space at its end, and a "~" that nobody expands are wrong too.

    ## What else looks like it

    A number outside of the range that is known, or a word that a newer NCCL may know: confidence is medium there.
    Interfaces, HCA names, ranks and addresses have checks of their own.

    ## What to do

    Set a value of the form that the finding names.

    ## Example

        NCCL_P2P_DISABLE=true: NCCL takes a whole number, and reads this as 0 (from 2.32 on as not set)
    """
    return judged(_draw(node, _over_listed(find_wrong_value)), _shown(node))


@rule(
    "DD113", "env-deprecated", Severity.WARNING, "A variable is out of use",
    group=Group.VARIABLES, needs=("software",), reads="environment variables, versions of torch and NCCL",
)  # fmt: skip
def check_env_deprecated(node: Node) -> Answer:
    """Report variables that have a new name, that are no longer read, or that never existed.

    ## What it means

    A variable under its old name works with a warning, if at all; one that was removed has no effect, and what it was
    set for does not happen. Such variables are copied from old tutorials and scripts.

    ## How it is recognised

    From a table of the names in the source of NCCL 2.3.5 to 2.30.7 and torch 1.4 to 2.13, held against the versions
    that are installed: a name that is still right for them is not reported. Where no version is known, a variable that
    went away after NCCL 2.21.5 or torch 2.6, the oldest in use, is information only.

    ## What else looks like it

    One environment for nodes with several versions of torch may set both names on purpose.

    ## What to do

    Set the new name, or unset the variable.

    ## Example

        NCCL_BLOCKING_WAIT is an old name: TORCH_NCCL_BLOCKING_WAIT has taken its place
    """
    return judged(_draw(node, _over_listed(find_deprecated)), _shown(node))


@rule(
    "DD114", "env-danger", Severity.WARNING, "A variable is set that slows jobs down or hides their faults",
    group=Group.VARIABLES, needs=("rdma",), reads="environment variables",
)  # fmt: skip
def check_env_danger(node: Node) -> Answer:
    """Report variables with a value that does harm: most often leftovers of a search for a fault.

    ## What it means

    The job runs, and is slower than it has to be, or a fault in it will show late or never: `NCCL_P2P_DISABLE=1`,
    `NCCL_SHM_DISABLE=1`, a forced `NCCL_ALGO` or `NCCL_PROTO`, `CUDA_LAUNCH_BLOCKING=1`,
    `TORCH_DISTRIBUTED_DEBUG=DETAIL`, `TORCH_NCCL_ASYNC_ERROR_HANDLING=0`, `NCCL_COMM_ID`, a `NCCL_DEBUG_FILE` that all
    ranks of a node share.

    ## How it is recognised

    Only the value that does harm counts: `NCCL_P2P_DISABLE=0` is fine, and so is `NCCL_ALGO=^NVLS`, which forces
    nothing. What `ddpdoctor wrap` sets itself is no danger. What may be wanted as it is (the flight recorder switched
    off, a log level of TRACE) is information.

    ## What else looks like it

    A setting that was measured to be faster on this cluster, or that works round a known fault: keep it then, with
    `--skip env-danger`. `NCCL_IB_DISABLE=1` is information where there is no InfiniBand or RoCE device, and is left to
    the check ib-disabled where a port is active.

    ## What to do

    Unset the variable, and see whether the job still runs.

    ## Example

        CUDA_LAUNCH_BLOCKING=1: every launch waits for its kernel, so that nothing overlaps
    """

    def flaws(process: Process, scene: VariableContext) -> Iterable[Flaw | None]:
        for variable, value in _listed(process):
            if not (variable.name == "NCCL_IB_DISABLE" and scene.active_port):
                yield find_danger(variable, value, scene)

    return judged(_draw(node, flaws), _shown(node))


def _over_listed(
    question: Callable[[Variable, str, VariableContext], Flaw | None],
) -> Flaws:
    """Ask one question of every listed variable of a process."""
    return lambda process, scene: (question(variable, value, scene) for variable, value in _listed(process))


def _listed(process: Process) -> list[tuple[Variable, str]]:
    found = ((find_variable(name), value) for name, value in process.variables.items())
    return [(variable, value) for variable, value in found if variable is not None]


def _draw(node: Node, flaws: Flaws) -> list[Problem]:
    """Draw equal flaws of several ranks into one problem."""
    return merge_equal(
        _problem(process, flaw)
        for process in node.processes
        for flaw in flaws(process, see(node, process))
        if flaw is not None
    )


def _problem(process: Process, flaw: Flaw) -> Problem:
    return Problem(
        summary=flaw.summary,
        evidence=(_origin(process, flaw.name), *flaw.evidence),
        fix=_write_fix(flaw),
        severity=flaw.severity,
        confidence=flaw.confidence,
        ranks=ranks_of([process]),
    )


def _origin(process: Process, name: str) -> str:
    if name in process.variables:
        return f"{name}={show(process.variables[name])} is set in the environment"
    return f"{name} is set in the environment; its value is not read"


def _write_fix(flaw: Flaw) -> str:
    """Return the command for a shell that sets what was meant, or takes the variable away."""
    name = flaw.name
    if not name.isidentifier() or not name.isascii():
        return f"take {shlex.quote(name)} out of the environment, for instance by env -u {shlex.quote(name)}"
    if not flaw.set_name:
        return f"unset {name}"
    if flaw.set_name == name:
        return f"export {name}={shlex.quote(flaw.set_value or '')}"
    return f'export {flaw.set_name}="${name}"; unset {name}'


def _count(node: Node) -> str:
    names = {variable.name for process in node.processes for variable, _ in _listed(process)}
    return f"{len(names)} known variable{'' if len(names) == 1 else 's'}" if names else "no known variable"


def _shown(node: Node) -> str:
    """Return some of the settings that were looked at, those of NCCL and torch first."""
    settings = {
        f"{variable.name}={show(value)}": (variable.component not in {"nccl", "torch", "gloo"}, variable.name)
        for process in node.processes
        for variable, value in _listed(process)
        if variable.component not in OF_THE_LAUNCH and not variable.name.startswith("TORCHELASTIC_")
    }
    names = sorted(settings, key=lambda text: settings[text])
    if not names:
        return "no variable of NCCL, torch, Gloo, CUDA or OpenMP is set"
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more
