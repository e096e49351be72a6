"""The rules by code and kind. A rule is a function; its docstring is the page that ``explain`` shows."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.node import SECTIONS, Fleet, Node

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Severity
    from ddpdoctor.rules.answers import Answer

FAMILIES = (
    "ddpdoctor.rules.progress.judge",
    "ddpdoctor.rules.consistency.judge",
    "ddpdoctor.rules.consistency.trial",
    "ddpdoctor.rules.data.judge",
    "ddpdoctor.rules.sharing.judge",
    "ddpdoctor.rules.checkpoints.judge",
    "ddpdoctor.rules.rendezvous.judge",
)
"""Modules whose import registers a family of rules."""
ENVIRONMENT = "ddpdoctor.rules.environment"
BANDWIDTH = "ddpdoctor.rules.bandwidth"
"""Packages of which every module is loaded, and may register rules."""

Check = Callable[..., Any]
NodeCheck = Callable[[Node], "Answer"]
FleetCheck = Callable[[Fleet], "Answer"]


class Group(str, Enum):
    """How `check-env` orders its checks on the screen."""

    VERSIONS = "versions"
    VARIABLES = "variables"
    LIMITS = "limits"
    NETWORK = "network"
    GPUS = "GPUs"
    LINKS = "links"
    LAUNCH = "launch"


class Scope(str, Enum):
    """What a rule of `check-env` is handed: each node by itself, or all of them."""

    NODE = "node"
    FLEET = "fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What `check-env` knows of one of its rules beyond code and kind."""

    group: Group
    scope: Scope
    needs: tuple[str, ...]
    """Sections of a node that the rule looks at, so that no others are read when it alone is chosen."""
    reads: str
    """For people: files, calls and variables that it goes by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that can be wrong: its code and kind, how bad it is, its page, and the function that looks for it."""

    code: str
    kind: str
    severity: Severity
    summary: str
    page: str
    check: Check
    environment: Environment | None = None
    """None for a rule that is not one of `check-env`."""


_rules: dict[str, Rule] = {}


def rule(code: str, kind: str, severity: Severity, summary: str) -> Callable[[Check], Check]:
    """Register the decorated function as a rule. A code or kind that is taken, or a missing page, is a ValueError."""

    def register(check: Check) -> Check:
        _register(code, kind, severity, summary, check, None)
        return check

    return register


def node_rule(  # noqa: PLR0913 - what a rule says of itself, each under its name
    code: str,
    kind: str,
    severity: Severity,
    summary: str,
    *,
    group: Group,
    needs: tuple[str, ...],
    reads: str,
) -> Callable[[NodeCheck], NodeCheck]:
    """Register a rule of `check-env` that looks at one node at a time."""
    more = _environment(group, Scope.NODE, needs, reads)

    def register(check: NodeCheck) -> NodeCheck:
        _register(code, kind, severity, summary, check, more)
        return check

    return register


def fleet_rule(  # noqa: PLR0913 - what a rule says of itself, each under its name
    code: str,
    kind: str,
    severity: Severity,
    summary: str,
    *,
    group: Group,
    needs: tuple[str, ...],
    reads: str,
) -> Callable[[FleetCheck], FleetCheck]:
    """Register a rule of `check-env` that looks at all nodes together."""
    more = _environment(group, Scope.FLEET, needs, reads)

    def register(check: FleetCheck) -> FleetCheck:
        _register(code, kind, severity, summary, check, more)
        return check

    return register


def _environment(group: Group, scope: Scope, needs: tuple[str, ...], reads: str) -> Environment:
    for section in needs:
        if section not in SECTIONS:
            raise ValueError(f"a node has no section {section}")
    return Environment(group=group, scope=scope, needs=needs, reads=reads)


def _register(
    code: str, kind: str, severity: Severity, summary: str, check: Check, environment: Environment | None
) -> None:
    page = inspect.cleandoc(check.__doc__ or "")
    if not page:
        raise ValueError(f"rule {code} has no docstring, which is its page")
    _refuse_reuse(code, kind)
    _rules[code] = Rule(
        code=code, kind=kind, severity=severity, summary=summary, page=page, check=check, environment=environment
    )


def _refuse_reuse(code: str, kind: str) -> None:
    if code in _rules:
        raise ValueError(f"code {code} is taken by the rule {_rules[code].kind}")
    for known in _rules.values():
        if known.kind == kind:
            raise ValueError(f"kind {kind} is taken by the rule {known.code}")


def all_rules() -> tuple[Rule, ...]:
    """Return every rule of every family, sorted by code."""
    for family in FAMILIES:
        importlib.import_module(family)
    environment_rules()
    bandwidth_rules()
    return tuple(_rules[code] for code in sorted(_rules))


def environment_rules() -> tuple[Rule, ...]:
    """Return the rules of `check-env`, sorted by code."""
    _load(ENVIRONMENT)
    return tuple(_rules[code] for code in sorted(_rules) if _rules[code].environment is not None)


def bandwidth_rules() -> tuple[Rule, ...]:
    """Return the rules of `allreduce-bench`, sorted by code. Each is asked with a ``Scene`` of that family."""
    _load(BANDWIDTH)
    return tuple(_rules[code] for code in sorted(_rules) if code.startswith("DD4"))


def _load(name: str) -> None:
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{name}.{module.name}")


def rule_of(check: Check) -> Rule:
    """Return the rule that a function was registered as; KeyError where it was not."""
    for known in _rules.values():
        if known.check is check:
            return known
    raise KeyError(check.__qualname__)


def find_rule(code_or_kind: str) -> Rule | None:
    """Return the rule with this code (in any case) or kind, or None."""
    wanted = code_or_kind.strip().lower()
    for known in all_rules():
        if wanted in (known.code.lower(), known.kind):
            return known
    return None
