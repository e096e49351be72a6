"""Asks the rules of `check-rendezvous`, each with what the ones before it have found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.reaching import Contact
from ddpdoctor.rules.registry import Group
from ddpdoctor.rules.rendezvous.large import check_payloads
from ddpdoctor.rules.rendezvous.mesh import check_mesh, failure_of
from ddpdoctor.rules.rendezvous.scene import Scene
from ddpdoctor.rules.rendezvous.store import check_tcp_store, fails
from ddpdoctor.rules.rendezvous.trial import check_start_trial
from ddpdoctor.rules.ruling import run_rules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.findings import Check, Finding
    from ddpdoctor.model.reaching import Rendezvous

RULES = (check_tcp_store, check_mesh, check_payloads, check_start_trial)
"""Causes before what follows from them."""


def judge_rendezvous(rendezvous: Rendezvous, found: Iterable[Finding] = ()) -> tuple[list[Finding], list[Check]]:
    """Return what the nodes' meeting shows to be wrong, and how each rule came out.

    ``found`` is what the checks of each machine, and of how the job is launched, have found: what follows from those is
    not found again. The findings returned do not repeat them.
    """
    before = tuple(found)
    findings: list[Finding] = []
    checks: list[Check] = []
    for rule in RULES:
        more, outcomes = run_rules([rule], Scene(rendezvous=rendezvous, found=(*before, *findings)))
        findings += more
        checks += [_in_group(check, rendezvous) for check in outcomes]
    return findings, checks


def _in_group(check: Check, rendezvous: Rendezvous) -> Check:
    """Return the outcome of a rule as those of the checks of each machine are: under its kind, with what was seen."""
    ran = check.outcome in {Outcome.PASSED, Outcome.FAILED}
    return replace(check, group=Group.NETWORK.value, seen=_seen(check.id, rendezvous) if ran else "")


def _seen(kind: str, rendezvous: Rendezvous) -> str:
    """Return what a rule went by: a phrase."""
    if kind == "tcp-store":
        doors = [visit.door for visit in rendezvous.visits if visit.door is not None]
        return f"{sum(not fails(door) for door in doors)} of {len(doors)} nodes reach {doors[0].host}:{doors[0].port}"
    if kind == "start-trial":
        trials = rendezvous.trials
        return f"{sum(trial.ok for trial in trials)} of {len(trials)} nodes started and reduced a tensor"
    tried = [pair for pair in rendezvous.pairs if pair.connecting is not None]
    if kind == "mesh":
        return f"{sum(failure_of(pair) is None for pair in tried)} of {len(tried)} ordered pairs connect"
    sent = [pair.large for pair in tried if pair.large is not None]
    return f"{sum(one.contact is Contact.CONNECTED for one in sent)} of {len(sent)} large payloads arrived"
