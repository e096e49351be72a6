"""Finds possible reasons for a low bandwidth: relevant checks of `check-env`, and the bench's own reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Reason
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.bandwidth.reasons import Effect, Weighed, order, view
from ddpdoctor.rules.bandwidth.reasons_cpu import processor_reasons
from ddpdoctor.rules.bandwidth.reasons_nccl import joined_by_nvlink, nccl_reasons
from ddpdoctor.rules.bandwidth.reasons_network import network_reasons
from ddpdoctor.rules.bandwidth.reasons_variables import variable_reasons
from ddpdoctor.rules.engine import fleet_facts, judge
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.bandwidth import Bench
    from ddpdoctor.model.findings import Finding
    from ddpdoctor.model.node import Fleet
    from ddpdoctor.rules.bandwidth.reasons import BenchNode, BenchView
    from ddpdoctor.rules.registry import Rule


class Path(Enum):
    """The data path that a check concerns."""

    ALL = "all"
    INSIDE = "between ranks of one host"
    PCIE = "between hosts, and inside one whose GPUs NVLink does not join"
    BETWEEN = "between hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckEffect:
    """How a check of `check-env` affects bandwidth."""

    effect: Effect
    path: Path
    gloo: bool = False
    """Whether it also affects Gloo, which uses neither GPUs nor RDMA."""
    infos: bool = False
    """Whether findings of severity "info" count. For other checks, these are only possible problems."""


CHECKS = {
    "nvlink": CheckEffect(effect=Effect.OTHER_WAY, path=Path.INSIDE),
    "p2p": CheckEffect(effect=Effect.OTHER_WAY, path=Path.INSIDE, infos=True),
    "ib-disabled": CheckEffect(effect=Effect.OTHER_WAY, path=Path.BETWEEN),
    "ib-hca-env": CheckEffect(effect=Effect.LIMIT, path=Path.BETWEEN),
    "uverbs": CheckEffect(effect=Effect.OTHER_WAY, path=Path.BETWEEN),
    "roce-gid": CheckEffect(effect=Effect.OTHER_WAY, path=Path.BETWEEN),
    "pcie": CheckEffect(effect=Effect.LIMIT, path=Path.PCIE),
    "acs-iommu": CheckEffect(effect=Effect.LIMIT, path=Path.PCIE),
    "ib-state": CheckEffect(effect=Effect.LIMIT, path=Path.BETWEEN),
    "ib-rate": CheckEffect(effect=Effect.LIMIT, path=Path.BETWEEN),
    "peermem": CheckEffect(effect=Effect.LIMIT, path=Path.BETWEEN),
    "mtu": CheckEffect(effect=Effect.LIMIT, path=Path.BETWEEN, gloo=True),
    "throttle": CheckEffect(effect=Effect.LIMIT, path=Path.ALL),
    "other-procs": CheckEffect(effect=Effect.SHARED, path=Path.ALL),
    "app-clocks": CheckEffect(effect=Effect.SMALL, path=Path.ALL),
    "ib-flap": CheckEffect(effect=Effect.SMALL, path=Path.BETWEEN),
    "numa": CheckEffect(effect=Effect.SMALL, path=Path.PCIE),
    "numa-balancing": CheckEffect(effect=Effect.SMALL, path=Path.ALL, gloo=True),
}
"""Checks by kind. These are left out: checks for crashes and hangs (memlock, shm, iface-agree, fabric), because the
bench would not have got this far; costs at start only (persistence); checks that do not affect a collective (omp,
temp-power); and cpu-quota, env-danger, env-value and nccl-conf, for which the bench has its own reasons."""


def find_reasons(bench: Bench, fleet: Fleet | None) -> tuple[Reason, ...]:
    """Return possible reasons for a low number, the strongest first. ``fleet`` is None if no machines were read."""
    seen = view(bench, fleet)
    return order(
        [
            *nccl_reasons(seen),
            *variable_reasons(seen),
            *([] if fleet is None else _checked(seen, fleet)),
            *processor_reasons(seen),
            *network_reasons(seen),
        ]
    )


def reason_rules() -> tuple[Rule, ...]:
    """Return the rules of `check-env` that concern bandwidth."""
    return tuple(rule for rule in rules_of("environment") if rule.kind in CHECKS)


def _checked(seen: BenchView, fleet: Fleet) -> Iterator[Weighed]:
    """Run the checks on the machines that had ranks."""
    fleet = replace(fleet, nodes=tuple(place.node for place in seen.places))
    rules = [rule for rule in reason_rules() if seen.nccl or CHECKS[rule.kind].gloo]
    by_host = {place.node.host: place for place in seen.places}
    for finding in judge(rules, fleet_facts(fleet)).findings:
        bearing = CHECKS.get(finding.kind)
        hosts = [host for host in finding.hosts if host in by_host]
        if bearing is None or (finding.severity is Severity.INFO and not bearing.infos):
            continue
        if any(_goes(bearing.path, seen, by_host[host]) for host in hosts):
            yield Weighed(effect=bearing.effect, reason=_reason(finding))


def _goes(path: Path, seen: BenchView, place: BenchNode) -> bool:
    """Return whether data took this path on a machine."""
    inside = len(place.members) > 1
    if path is Path.INSIDE:
        return inside
    if path is Path.BETWEEN:
        return seen.between_hosts
    if path is Path.PCIE:
        shm = any("SHM" in log.transports for log in seen.logs(place))
        return seen.between_hosts or (inside and (shm or not joined_by_nvlink(place)))
    return True


def _reason(finding: Finding) -> Reason:
    detail = f" ({finding.evidence[0]})" if finding.evidence else ""
    return Reason(
        text=f"{finding.summary}{detail}",
        source=f"{finding.code} {finding.kind}",
        hosts=finding.hosts,
        ranks=finding.ranks,
        fix=finding.fix,
    )
