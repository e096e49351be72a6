"""DD214: whether the nodes agree on IPv4 or IPv6."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.environment.interface_agreement import VARIABLES, choices_of, first_picks
from ddpdoctor.rules.interface_choice import NCCL_FAMILIES, match_nccl
from ddpdoctor.rules.majority import Split, Voice, compare, describe
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.settings import find_setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.network import Network
    from ddpdoctor.model.node import Fleet, Node
    from ddpdoctor.rules.environment.interface_agreement import Chosen


@rule(
    "DD214", "v4v6", Severity.WARNING, "Some nodes would use IPv4 and others IPv6",
    group=CheckGroup.NETWORK, needs=("network", "names", "conf_files"),
    reads="the families of the chosen addresses and the master's addresses, NCCL_SOCKET_FAMILY, disable_ipv6",
)  # fmt: skip
def check_v4v6(fleet: Fleet) -> Answer:
    """Report that some nodes use IPv4 and others IPv6."""
    chosen = choices_of(fleet)
    problems = [problem for library in VARIABLES for problem in _mixed(library, chosen)]
    problems += _master_families(fleet)
    problems += [problem for node, network, _ in chosen for problem in _without_family(node, network)]
    nodes = "one node" if len(chosen) == 1 else f"{len(chosen)} nodes"
    families = sorted({f"{library} IPv{pick.ip.version}" for library, _, _, pick in first_picks(chosen)})
    return judged(problems, f"{', '.join(families) or 'no address'} on {nodes}")


def _mixed(library: str, chosen: Chosen) -> Iterator[Problem]:
    picks = [(node, pick) for name, node, _, pick in first_picks(chosen) if name == library]
    split = compare(Voice(host=node.host, ranks=node.ranks, value=pick.ip.version) for node, pick in picks)
    if split is None:
        return
    fix = "export NCCL_SOCKET_FAMILY=AF_INET on all nodes"
    if library == "Gloo":
        fix = "give the host names addresses of one family on all nodes, or set GLOO_SOCKET_IFNAME to an interface"
    yield Problem(
        summary=describe(split, f"{library} would use", words=lambda version: f"IPv{version}")
        + ": they cannot connect to each other",
        evidence=tuple(f"{node.host}: {pick}" for node, pick in picks if node.host in split.hosts)[:4],
        fix=fix,
        confidence=split.confidence,
        hosts=split.hosts,
    )


def _master_families(fleet: Fleet) -> Iterator[Problem]:
    """Yield nodes that resolve the master to a family that other nodes lack, or that is switched off here."""
    read = [(node, known(node.network), known(node.names)) for node in fleet.nodes]
    found = [(node, network, names.master) for node, network, names in read if names is not None]
    families = {node.host: _families(one.addresses) for node, _, one in found if one is not None and one.addresses}
    if families and not frozenset.intersection(*families.values()):
        split = compare(Voice(host=host, value=tuple(sorted(versions))) for host, versions in families.items())
        if split is not None:
            yield _split_master(split)
    for node, network, one in found:
        v6_only = one is not None and families.get(node.host) == frozenset({6})
        if v6_only and network is not None and network.ipv6_disabled:
            yield Problem(
                summary="the master's name resolves only to IPv6 addresses, but IPv6 is disabled",
                evidence=("/proc/sys/net/ipv6/conf/all/disable_ipv6 is 1",),
                fix="sysctl -w net.ipv6.conf.all.disable_ipv6=0, or set MASTER_ADDR to an IPv4 address",
                hosts=(node.host,),
            )


def _split_master(split: Split[tuple[int, ...]]) -> Problem:
    return Problem(
        summary=describe(
            split,
            "the master's name has",
            words=lambda those: " and ".join(f"IPv{version}" for version in those),
        ),
        fix="set MASTER_ADDR to an address that all nodes can reach",
        confidence=split.confidence,
        hosts=split.hosts,
    )


def _families(addresses: tuple[str, ...]) -> frozenset[int]:
    return frozenset(ipaddress.ip_address(address.partition("%")[0]).version for address in addresses)


def _without_family(node: Node, network: Network) -> Iterator[Problem]:
    setting = find_setting(node, node.first, "NCCL_SOCKET_FAMILY")
    family = NCCL_FAMILIES.get(setting.value) if setting is not None else None
    if setting is None or family is None:
        return
    picks = [pick for pick in match_nccl(network, "^lo", family) if not pick.ip.is_loopback]
    if not picks:
        yield Problem(
            summary=f"{setting}: no interface of the node has an IPv{family} address",
            evidence=tuple(f"{one.name}: {', '.join(one.addresses) or 'no address'}" for one in network.interfaces[:8]),
            fix=setting.removal,
            hosts=(node.host,),
        )
