"""What can be wrong with one variable, wherever it is set: several questions, each answered with a flaw or None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.launch import NEWEST, OLDEST, find_variable, is_plugin_name, looks_known, read_variables
from ddpdoctor.model.node import release
from ddpdoctor.model.reading import Unread, Why, known
from ddpdoctor.rules.spelling import find_meant
from ddpdoctor.rules.variable_dangers import VariableContext, Version, does_harm
from ddpdoctor.rules.variable_values import check_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.launch import Variable
    from ddpdoctor.model.node import Node, NodeProcess

OWNERS = {"nccl": "NCCL", "torch": "torch", "gloo": "Gloo", "launcher": "torchrun"}
GONE = frozenset({"removed", "bogus"})
WRAP_SETS = frozenset({"TORCH_DISTRIBUTED_DEBUG"})
"""What `ddpdoctor wrap` sets for its ranks; there it is no danger."""
LOGGING_LEVELS = frozenset({"WARN", "INFO", "ABORT", "TRACE"})
"""With these levels of NCCL_DEBUG, NCCL opens NCCL_DEBUG_FILE."""
LONGEST_SHOWN = 60
COMMON_NCCL = (2, 30, 7)
"""Our choice if the version is not known: about the version that comes with the newest torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """What is wrong with a variable, and what to set instead."""

    name: str
    summary: str
    severity: Severity = Severity.WARNING
    confidence: Confidence = Confidence.HIGH
    evidence: tuple[str, ...] = ()
    set_name: str = ""
    """The variable to set instead; empty if this one should just be removed."""
    set_value: str | None = None
    """The value to set; None: this variable's own value."""


def read_context(node: Node, process: NodeProcess) -> VariableContext:
    """Return the context for the variables of a process."""
    rdma = node.rdma
    ports = [] if isinstance(rdma, Unread) else [port for device in rdma.devices for port in device.ports]
    absent = rdma.why is Why.ABSENT if isinstance(rdma, Unread) else not rdma.devices
    local = process.number("LOCAL_WORLD_SIZE") or 1
    return VariableContext(
        versions=_versions(node),
        variables=process.variables,
        ranks_here=max(local, len(node.processes)),
        under_wrap=process.under_wrap,
        active_port=any(port.state == "ACTIVE" for port in ports),
        no_rdma=absent,
    )


def _versions(node: Node) -> dict[str, Version]:
    software, torch = known(node.software), known(node.torch)
    texts = {
        "nccl": (torch.nccl if torch else None) or (software.nccl_wheel if software else None),
        "torch": software.torch_version if software else None,
    }
    return {name: release(text) for name, text in texts.items() if text}


def show(value: str) -> str:
    """Return a value for display: in quotation marks if it could be misread, and cut if it is long."""
    short = value if len(value) <= LONGEST_SHOWN else value[:LONGEST_SHOWN] + "…"
    return short if short.strip() == short and short.isprintable() else repr(short)


# Unknown names


def find_unknown(name: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if a name looks like a known variable but is not one."""
    if find_variable(name) is not None or not looks_known(name) or is_plugin_name(name.upper()):
        return None
    meant = find_meant(name, _names(context))
    newer = _newer_than_table(name, context)
    if meant is None:
        return _stranger(name, newer)
    why = ", because names are case-sensitive" if name.upper() == meant else ""
    return Flaw(
        name=name,
        summary=f"nothing reads {name}{why}; did you mean {meant}?",
        severity=Severity.INFO if newer else Severity.WARNING,
        confidence=Confidence.LOW if newer else Confidence.HIGH,
        evidence=newer,
        set_name=meant,
    )


def _names(context: VariableContext) -> Iterator[str]:
    """Yield the names that somebody can mean: not those that are gone, and not those that are still to come."""
    installed = context.versions.get("nccl", COMMON_NCCL)
    for variable in read_variables().values():
        to_come = variable.component == "nccl" and release(variable.since) > installed
        if variable.kind not in GONE | {"build"} and not to_come:
            yield variable.name


def _stranger(name: str, newer: tuple[str, ...]) -> Flaw:
    return Flaw(
        name=name,
        summary=f"{name} is not a known variable, and no known name is similar",
        severity=Severity.INFO,
        confidence=Confidence.MEDIUM,
        evidence=newer
        or (f"known variables: NCCL up to {NEWEST['nccl']}, torch up to {NEWEST['torch']}; a plugin may read others",),
    )


def _newer_than_table(name: str, context: VariableContext) -> tuple[str, ...]:
    owner = "torch" if name.upper().startswith("TORCH") else "nccl"
    newest, installed = release(NEWEST[owner]), context.versions.get(owner, ())
    if installed[: len(newest)] <= newest:
        return ()
    return (f"{OWNERS[owner]} {_text(installed)} is installed; variables are known up to {NEWEST[owner]}",)


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def find_too_new(variable: Variable, value: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if the installed NCCL does not know a variable yet."""
    installed = context.versions.get("nccl", ())
    if variable.component != "nccl" or not variable.since or not installed or variable.kind in GONE:
        return None
    if installed >= release(variable.since):
        return None
    return Flaw(
        name=variable.name,
        summary=f"{variable.name}={show(value)} has no effect: NCCL reads it since {variable.since}",
        severity=Severity.INFO,
        evidence=(f"NCCL {_text(installed)} is installed",),
    )


# Wrong values


def find_wrong_value(variable: Variable, value: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if the variable's reader does not take a value; never suggest a harmful value instead."""
    wrong = None if variable.kind in GONE else check_value(variable, value)
    if wrong is None:
        return None
    wanted = bool(wrong.instead) and find_danger(variable, wrong.instead, context) is None
    return Flaw(
        name=variable.name,
        summary=f"{variable.name}={show(value)}: {wrong.what}",
        severity=Severity.ERROR if wrong.stops else Severity.WARNING,
        confidence=Confidence.HIGH if wrong.sure else Confidence.MEDIUM,
        set_name=variable.name if wanted else "",
        set_value=wrong.instead if wanted else None,
    )


# Obsolete names


def find_deprecated(variable: Variable, value: str, context: VariableContext) -> Flaw | None:  # noqa: ARG001 - all four functions are called alike
    """Return a flaw if a variable is obsolete in the installed version."""
    if variable.kind == "deprecated":
        return _old_name(variable, context)
    if variable.kind not in GONE:
        return None
    owner, installed = OWNERS[variable.component], context.versions.get(variable.component, ())
    until = release(variable.until)
    if installed and _reads(installed, variable):
        return None
    reasons = [f"{owner} {variable.until} was the last version that read it" if until else "", variable.note]
    reason = "; ".join(filter(None, reasons))
    certain = bool(installed) or not until or until < release(OLDEST[variable.component])
    return Flaw(
        name=variable.name,
        summary=f"{variable.name} has no effect: {reason}" if certain else f"{variable.name} is obsolete: {reason}",
        severity=Severity.WARNING if certain else Severity.INFO,
        evidence=_successor(variable) + _installed(variable, context),
    )


def _old_name(variable: Variable, context: VariableContext) -> Flaw | None:
    installed = context.versions.get(variable.component, ())
    successor = find_variable(variable.replaced_by)
    first = release(successor.since) if successor else ()
    if installed and (installed[: len(first)] < first or _reads(installed, variable)):
        return None
    if successor is None:
        return Flaw(
            name=variable.name,
            summary=f"{variable.name} is no longer needed: {variable.note}",
            severity=Severity.INFO,
            evidence=_installed(variable, context),
        )
    return Flaw(
        name=variable.name,
        summary=f"{variable.name} is an old name: use {successor.name}",
        evidence=_installed(variable, context),
        set_name=successor.name,
    )


def _reads(installed: Version, variable: Variable) -> bool:
    """Whether a version is no later than the last one that used a variable."""
    until = release(variable.until)
    return bool(until) and installed[: len(until)] <= until


def _successor(variable: Variable) -> tuple[str, ...]:
    """Name the similar variable of today. It is not put into the command, because its values are different."""
    return (f"{variable.replaced_by} replaces it, with different values",) if variable.replaced_by else ()


def _installed(variable: Variable, context: VariableContext) -> tuple[str, ...]:
    installed = context.versions.get(variable.component)
    return (f"{OWNERS[variable.component]} {_text(installed)} is installed",) if installed else ()


# Dangerous leftovers


def find_danger(variable: Variable, value: str, context: VariableContext) -> Flaw | None:
    """Return a flaw if a variable has a value that does harm."""
    word, _, condition = variable.danger.rpartition(" ")
    if not condition or not does_harm(condition, value, context):
        return None
    if context.under_wrap and variable.name in WRAP_SETS:
        return None
    severity = Severity.INFO if word == "info" else Severity.WARNING
    if variable.name == "NCCL_DEBUG_FILE" and context.variables.get("NCCL_DEBUG", "").upper() not in LOGGING_LEVELS:
        severity = Severity.INFO
    if variable.name == "NCCL_IB_DISABLE" and context.no_rdma:
        return _needless_ib_disable(value)
    return Flaw(name=variable.name, summary=f"{variable.name}={show(value)}: {variable.note}", severity=severity)


def _needless_ib_disable(value: str) -> Flaw:
    return Flaw(
        name="NCCL_IB_DISABLE",
        summary=f"NCCL_IB_DISABLE={show(value)} is not needed here, because there is no InfiniBand or RoCE device; "
        "with one, it would make NCCL use TCP sockets",
        severity=Severity.INFO,
    )
