"""Judges the facts of the nodes and builds the report."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.rendezvous.member import chosen_rules
from ddpdoctor.diagnose.rendezvous.messages import Sentence
from ddpdoctor.diagnose.reports import make_report
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import JobStatus, JobSummary
from ddpdoctor.model.launch import NodeOptions
from ddpdoctor.model.reaching import Contact
from ddpdoctor.rules.engine import fleet_facts
from ddpdoctor.rules.engine import judge as ask
from ddpdoctor.rules.registry import rules_of
from ddpdoctor.rules.rendezvous.meeting import Meeting
from ddpdoctor.rules.verdict import in_order, order_findings

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.model.findings import Check, Finding, Judgment, Report
    from ddpdoctor.model.reaching import NodePair, Rendezvous, Transfer

PAIRS_SHOWN = 32 * 31
"""Our choice: up to this many pairs, the report lists all. Above it, the report lists only failing pairs."""
_PREFIX = "PET_"


def judge(rendezvous: Rendezvous, started_at: str, ended_at: str) -> Sentence:
    """Run all rules, those about machines first, so that later rules do not report consequences of their findings."""
    findings, checks = judge_meeting(rendezvous, judge_machines(rendezvous))
    return Sentence(
        findings=order_findings(findings),
        checks=checks,
        nnodes=rendezvous.nnodes,
        hosts=tuple(visit.host for visit in rendezvous.visits if visit.arrived),
        started_at=started_at,
        ended_at=ended_at,
    )


def judge_machines(rendezvous: Rendezvous) -> Judgment:
    """Judge the machines and how the job is launched on them."""
    return ask(chosen_rules(), fleet_facts(rendezvous.fleet))


def judge_meeting(rendezvous: Rendezvous, judged: Judgment) -> tuple[tuple[Finding, ...], tuple[Check, ...]]:
    """Add the results of the rendezvous rules. Each rule gets the findings of the rules before it."""
    findings = judged.findings
    checks: list[Check] = []
    for rule in in_order(rules_of("rendezvous")):
        more = ask([rule], {Meeting: [Meeting(rendezvous=rendezvous, found=findings)]})
        findings = (*findings, *more.findings)
        checks += more.checks
    return findings, (*judged.checks, *sorted(checks, key=lambda check: check.code))


def build_report(sentence: Sentence, wanted: RendezvousOptions, data: dict[str, Any], world_size: int | None) -> Report:
    """Return the report of a verdict. ``data`` holds this node's facts."""
    findings = as_typed(sentence.findings, wanted.options)
    return make_report(
        command=wanted.command,
        started_at=sentence.started_at,
        ended_at=sentence.ended_at,
        job=JobSummary(world_size=world_size, nnodes=sentence.nnodes, status=JobStatus.NOT_RUN, exit_status=None),
        findings=findings,
        checks=sentence.checks,
        data=data,
    )


def rendezvous_data(rendezvous: Rendezvous) -> dict[str, Any]:
    """Return the facts in the form of the report."""
    pairs = rendezvous.pairs
    if len(pairs) > PAIRS_SHOWN:
        pairs = tuple(pair for pair in pairs if not is_whole((pair,)))
    plain = encode(replace(rendezvous, pairs=pairs, fleet=replace(rendezvous.fleet, nodes=())))
    fleet = plain.pop("fleet")
    return {
        "verb": "check-rendezvous",
        "hosts": [node.host for node in rendezvous.fleet.nodes],
        "launcher": fleet["launcher"],
        "world_size": fleet["world_size"],
        "missing_ranks": fleet["missing"],
        "gathering": fleet["problems"],
        "nodes": [encode(node) for node in rendezvous.fleet.nodes],
        "rendezvous": {**plain, "pairs_tried": len(rendezvous.pairs)},
    }


def as_typed(findings: Iterable[Finding], options: NodeOptions) -> tuple[Finding, ...]:
    """Return the findings with option names in place of the variables that the options set."""
    names = [name for name in options.variables() if name.startswith(_PREFIX)]
    if not names:
        return tuple(findings)
    pattern = re.compile(rf"(?:export )?\b({'|'.join(names)})\b")

    def typed(text: str) -> str:
        return pattern.sub(lambda found: option_of(found[1]), text)

    return tuple(
        replace(
            finding,
            summary=typed(finding.summary),
            evidence=tuple(typed(sentence) for sentence in finding.evidence),
            fix=typed(finding.fix),
        )
        for finding in findings
    )


def option_of(variable: str) -> str:
    """Return torchrun's option for a variable: PET_NODE_RANK is --node-rank."""
    return "--" + variable.removeprefix(_PREFIX).lower().replace("_", "-")


def is_whole(pairs: Iterable[NodePair]) -> bool:
    """Return whether all pairs were tried and work."""
    return all(
        pair.connecting is not None
        and pair.connecting.contact is Contact.CONNECTED
        and _arrived(pair.small)
        and _arrived(pair.large)
        for pair in pairs
    )


def _arrived(transfer: Transfer | None) -> bool:
    return transfer is None or transfer.contact is Contact.CONNECTED


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOptions:
    """The options of the command."""

    options: NodeOptions = field(default_factory=NodeOptions)
    port_range: tuple[int, int] | None = None
    """The first and last port for the connections of pairs. None: any port that the kernel assigns."""
    timeout_s: float = 30.0
    """How long the nodes wait for each other."""
    folder: Path | None = None
    """--report-dir. Nodes that share this folder can meet through it."""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousChecked:
    """The report of one node. All nodes have the same findings, except a node that met no other."""

    report: Report
    number: int
    """Number of this node."""
    judged: bool
    """Whether this node judged. It writes report.json, and the others write node-N.json."""
    shows: bool
    """Whether this node prints the report. If a launcher merges all output, only the judging node prints, and each node
    that met no other."""
