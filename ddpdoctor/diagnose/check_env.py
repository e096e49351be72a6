"""Runs `check-env`: reads this machine or gathers all of them, runs the rules, builds the report."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.launch import ByHand, seen_launch
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.diagnose.fleet import gather
from ddpdoctor.diagnose.redact import redact
from ddpdoctor.diagnose.reports import check_report
from ddpdoctor.diagnose.selection import choose_rules, sections_of
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import now
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import ExpectedVersion
from ddpdoctor.rules.engine import fleet_facts
from ddpdoctor.rules.environment.expected_versions import VERSION_OF

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.collect.bounded import ChildProcess
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.node import Fleet
    from ddpdoctor.rules.registry import Rule


EXPECT_HELP = "Write it as torch==2.13.* or driver>=550."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEnvOptions:
    """The user's options."""

    checks: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    deep: bool = False
    use_torch: bool = True
    redact: bool = False
    expect_version: tuple[str, ...] = ()
    """Versions that every node should have: "torch==2.13.*"."""
    alone: bool = False
    """Check this machine only, also in a process that a launcher started."""
    timeout_s: float = 30.0
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    command: tuple[str, ...] = ()
    torch_child: ChildProcess | None = None
    """A child process that has already started to import torch."""


def list_checks(wanted: CheckEnvOptions) -> list[str]:
    """Return a line for each chosen check: code, kind, severity, group, and what it reads.

    Raises ``UserError`` for unknown names.
    """
    rules = choose_rules(wanted.checks, wanted.skip)
    width = max(len(rule.kind) for rule in rules)
    return [
        f"{rule.code}  {rule.kind:<{width}}  {rule.severity.value:<7}  {rule.group:<9}  {rule.reads}".rstrip()
        for rule in rules
    ]


def read_expected(text: str) -> ExpectedVersion:
    """Read "torch==2.13.*". Raises ``UserError`` for an unknown name or no version specifier."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    name, specifier = re.fullmatch(r"\s*([A-Za-z]*)\s*(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if name.lower() not in VERSION_OF:
        raise UserError(
            f"--expect-version is {text!r}, which names no version that is read",
            help=f"Known: {', '.join(VERSION_OF)}.",
        )
    try:
        known = str(SpecifierSet(specifier))
    except InvalidSpecifier:
        known = ""
    if not known:
        raise UserError(
            f"--expect-version is {text!r}, which is no version", help="Such as torch==2.13.* or driver>=550."
        )
    return ExpectedVersion(name=name.lower(), specifier=known)


def check_environment(wanted: CheckEnvOptions, env: Mapping[str, str]) -> Report | None:
    """Check this machine, or all machines of the job under a launcher. Return None on ranks that do not report.

    Raises ``UserError`` for unknown checks, and if the other ranks cannot be reached.
    """
    started_at = now()
    for text in wanted.expect_version:
        read_expected(text)
    by_hand = ByHand(
        nnodes=wanted.nnodes,
        node_rank=wanted.node_rank,
        master_addr=wanted.master_addr,
        master_port=wanted.master_port,
    )
    launch = Launch() if wanted.alone else seen_launch(env, by_hand)
    rules = choose_rules(wanted.checks, wanted.skip)
    plan = ReadingPlan(
        sections=sections_of(rules), deep=wanted.deep, use_torch=wanted.use_torch, torch_child=wanted.torch_child
    )
    fleet = gather(launch, System(env=env), plan, wanted.timeout_s)
    return None if fleet is None else build_checkup(fleet, rules, wanted, started_at, env)


def build_checkup(
    fleet: Fleet, rules: Iterable[Rule], wanted: CheckEnvOptions, started_at: str, env: Mapping[str, str]
) -> Report:
    """Judge a fleet and build its report."""
    fleet = replace(fleet, expected=tuple(map(read_expected, wanted.expect_version)))
    report = check_report(rules, fleet_facts(fleet), _data(fleet), wanted.command, started_at)
    return redact(report, fleet, env) if wanted.redact else report


def _data(fleet: Fleet) -> dict[str, Any]:
    return {
        "hosts": [node.host for node in fleet.nodes],
        "launcher": fleet.launcher.value,
        "world_size": fleet.world_size,
        "missing_ranks": list(fleet.missing),
        "gathering": list(fleet.problems),
        "nodes": [encode(node) for node in fleet.nodes],
    }
