"""Asks the rules of `check-rendezvous`, each with what the ones before it have found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.rendezvous.large import check_payloads
from ddpdoctor.rules.rendezvous.mesh import check_mesh
from ddpdoctor.rules.rendezvous.scene import Scene
from ddpdoctor.rules.rendezvous.store import check_tcp_store
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
        checks += outcomes
    return findings, checks
