"""DD213 and DD215: whether the nodes' network interfaces can reach each other, judged without opening a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import name_list
from ddpdoctor.model.reading import known
from ddpdoctor.model.sides import grouped
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.processes import ONE_NODE, has_several_nodes
from ddpdoctor.rules.interface_choice import choose, export, is_bridge, is_tunnel
from ddpdoctor.rules.majority import Voice, compare, describe
from ddpdoctor.rules.rdma_ports import network_ports
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.settings import find_setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.network import Interface, Network
    from ddpdoctor.model.node import Fleet, Node
    from ddpdoctor.rules.interface_choice import Choice, Pick

    Chosen = tuple[tuple[Node, Network, Choice], ...]

VARIABLES = {"NCCL": "NCCL_SOCKET_IFNAME", "Gloo": "GLOO_SOCKET_IFNAME"}
"""For each library, the variable that overrides its own choice."""
SHOWN = 8
"""How many nodes are named one by one."""


def choices_of(fleet: Fleet) -> Chosen:
    """Return what each node would use; nodes whose interfaces could not be read are left out."""
    readings = fleet.each(lambda node: node.network)
    return tuple((node, network, choose(node, network)) for node, network in readings if network.interfaces)


def first_picks(chosen: Chosen) -> Iterator[tuple[str, Node, Network, Pick]]:
    """Yield, by library and node, the interface whose address the others get."""
    for node, network, choice in chosen:
        for library, picks in (("NCCL", choice.nccl), ("Gloo", choice.gloo or ())):
            if picks:
                yield library, node, network, picks[0]


def seen_of(chosen: Chosen) -> str:
    """Say what the first few nodes would use."""
    words = [f"{node.host}: {choice}" for node, _, choice in chosen[:SHOWN]]
    more = len(chosen) - SHOWN
    return "; ".join([*words, f"and {more} more nodes"] if more > 0 else words)


@rule(
    "DD213", "iface-agree", Severity.ERROR, "A node would use an interface that other nodes cannot reach",
    after=("hostname-not-local",),
    group=CheckGroup.NETWORK, needs=("network", "names", "conf_files", "rdma"),
    reads="the choice of NCCL and Gloo on every node: variables, interfaces, addresses, the host name",
)  # fmt: skip
def check_iface_agree(fleet: Fleet) -> Answer:
    """Report nodes that would send an unreachable address to the other nodes."""
    if not has_several_nodes(fleet):
        return skipped(ONE_NODE)
    chosen = choices_of(fleet)
    problems = [_unreachable(*one) for one in first_picks(chosen)]
    problems += [_spare_bridge(*one) for one in chosen]
    found = [*(one for one in problems if one is not None), *_same_address(chosen), *_link_local(chosen)]
    return judged(found, seen_of(chosen))


def _unreachable(library: str, node: Node, network: Network, pick: Pick) -> Problem | None:
    name = pick.interface.name
    by_name = library == "Gloo" and not node.first.variables.get(VARIABLES[library])
    if pick.ip.is_loopback and not by_name:
        what = "which is loopback: the other nodes would connect to themselves"
    elif is_bridge(name):
        what = "a bridge for containers or virtual machines on the host: other nodes cannot reach it"
    elif is_tunnel(name):
        what = "which looks like a VPN: it is slow, or does not reach the other nodes"
    else:
        return None
    return Problem(
        summary=f"{library} would use {name} ({pick.ip}), {what}",
        evidence=_why(library, node),
        fix=f"{export(VARIABLES[library], network)} on all nodes",
        severity=Severity.WARNING if is_tunnel(name) else None,
        hosts=(node.host,),
    )


def _why(library: str, node: Node) -> tuple[str, ...]:
    setting = find_setting(node, node.first, VARIABLES[library])
    if setting is not None:
        return (str(setting),)
    names = known(node.names)
    if library == "Gloo" and names is not None:
        return (f"the host name resolves to {', '.join(names.own.addresses) or names.own.error}",)
    return (f"{VARIABLES[library]} is not set",)


def _spare_bridge(node: Node, network: Network, choice: Choice) -> Problem | None:
    """Return a problem if NCCL would send data over a bridge too. It does so only with TCP."""
    rdma = known(node.rdma)
    bridges = [pick for pick in choice.nccl[1:] if is_bridge(pick.interface.name)]
    if not bridges or (rdma is not None and network_ports(node, rdma)):
        return None
    names = ", ".join(dict.fromkeys(str(pick) for pick in bridges))
    return Problem(
        summary=f"NCCL would also use {names} for TCP data, but other nodes cannot reach container bridges",
        evidence=(f"it uses all active interfaces: {', '.join(map(str, choice.nccl))}",),
        fix=f"{export(VARIABLES['NCCL'], network)} on all nodes",
        severity=Severity.WARNING,
        hosts=(node.host,),
    )


def _same_address(chosen: Chosen) -> Iterator[Problem]:
    """Yield every address that two hosts would give to the others. Loopback is reported elsewhere."""
    holders = grouped(
        ((library, str(pick.ip)), (node, network, pick))
        for library, node, network, pick in first_picks(chosen)
        if not (pick.ip.is_loopback or pick.ip.is_link_local)
    )
    for (library, address), held in holders.items():
        hosts = tuple(dict.fromkeys(node.host for node, _, _ in held))
        if len(hosts) > 1:
            yield Problem(
                summary=f"{library} would use the same address {address} on {name_list(hosts)}",
                evidence=tuple(f"{node.host}: {pick}" for node, _, pick in held[:4]),
                fix=f"{export(VARIABLES[library], held[0][1])} on all nodes, with an interface whose address is unique",
                hosts=hosts,
            )


def _link_local(chosen: Chosen) -> Iterator[Problem]:
    """Yield nodes with a link-local address, which works on their own cable only, if others have a real one."""
    for library, variable in VARIABLES.items():
        picks = [(node, network, pick) for name, node, network, pick in first_picks(chosen) if name == library]
        local = [one for one in picks if one[2].ip.is_link_local]
        if local and len(local) < len(picks):
            hosts = tuple(node.host for node, _, _ in local)
            yield Problem(
                summary=(
                    f"{library} would use a link-local address on {name_list(hosts)}, but not on "
                    f"{len(picks) - len(local)} others"
                ),
                evidence=tuple(f"{node.host}: {pick}" for node, _, pick in local[:4]),
                fix=f"{export(variable, local[0][1])}, or give {local[0][2].interface.name} an address",
                hosts=hosts,
            )


@rule(
    "DD215", "mtu", Severity.WARNING, "The MTU of the interface in use differs between nodes",
    after=("iface-agree", "mesh"),
    group=CheckGroup.NETWORK, needs=("network", "names", "conf_files"),
    reads="mtu of /sys/class/net, of the interfaces that NCCL and Gloo would use on every node",
)  # fmt: skip
def check_mtu(fleet: Fleet) -> Answer:
    """Report nodes that may send packets that are too large for the others."""
    chosen = choices_of(fleet)
    if len(chosen) < 2:
        return skipped("only one node: nothing to compare")
    by_library = {library: _sizes(library, chosen) for library in VARIABLES}
    found = [problem for sizes in by_library.values() if (problem := _mtu(sizes)) is not None]
    sizes = dict.fromkeys(f"{one.name} {one.mtu}" for those in by_library.values() for _, one in those)
    return judged(found, ", ".join(sizes) or "no interface but loopback")


def _sizes(library: str, chosen: Chosen) -> list[tuple[Node, Interface]]:
    picks = [(node, pick) for name, node, _, pick in first_picks(chosen) if name == library]
    return [(node, pick.interface) for node, pick in picks if not pick.ip.is_loopback]


def _mtu(sizes: list[tuple[Node, Interface]]) -> Problem | None:
    split = compare(Voice(host=node.host, ranks=node.ranks, value=one.mtu) for node, one in sizes)
    if split is None:
        return None
    common = split.majority.value if split.majority is not None else min(side.value for side in split.minorities)
    names = dict.fromkeys(one.name for _, one in sizes if one.mtu != common)
    return Problem(
        summary=describe(split, "MTU") + ": packets that are too large for a node are dropped",
        evidence=tuple(f"{node.host}: {one.name}, {one.mtu}" for node, one in sizes if node.host in split.hosts)[:8],
        fix=" && ".join(f"ip link set dev {name} mtu {common}" for name in names) + " where it differs",
        confidence=split.confidence,
        hosts=split.hosts,
    )
