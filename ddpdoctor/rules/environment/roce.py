"""DD334: the address (GID) that a RoCE port sends from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.sides import grouped
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.majority import Voice, compare, describe
from ddpdoctor.rules.rdma_ports import chosen_ports, is_active, label, network_ports, words
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.settings import Setting, find_setting

if TYPE_CHECKING:
    from ddpdoctor.model.links import Gid, Rdma, RdmaDevice, RdmaPort
    from ddpdoctor.model.node import Fleet, Node

MAPPED_IPV4 = "0000:0000:0000:0000:0000:ffff:"
LINK_LOCAL = "fe80:"
V1, V2 = "IB/RoCE v1", "RoCE v2"
PICKS_ITSELF = "since NCCL 2.21 it picks the entry itself"

Ports = tuple[tuple["RdmaDevice", "RdmaPort"], ...]


@rule(
    "DD334",
    "roce-gid",
    Severity.ERROR,
    "A RoCE port has no routable address, or NCCL_IB_GID_INDEX selects a wrong one",
    group=CheckGroup.LINKS,
    needs=("rdma", "conf_files"),
    reads="/sys/class/infiniband/*/ports/*/gids, gid_attrs/types and gid_attrs/ndevs, NCCL_IB_GID_INDEX",
)
def check_roce_gid(fleet: Fleet) -> Answer:
    """Report RoCE ports whose address (GID) cannot carry the traffic."""
    roce = [
        (node, rdma, ports) for node, rdma in fleet.each(lambda node: node.rdma) if (ports := _roce_ports(node, rdma))
    ]
    if not roce:
        return skipped("no RDMA device has an active Ethernet port that NCCL would use")
    problems = [problem for node, rdma, ports in roce for problem in _node_problems(node, rdma, ports)]
    problems += _compare_hosts([(node, ports) for node, _, ports in roce])
    node, _, ports = roce[0]
    setting = _index(node)
    how = str(setting) if setting is not None else f"an entry that is {V2} with {_family(node)}"
    return judged(problems, f"{_words_of(ports)}: {how}" + f", on {len(roce)} hosts" * (len(roce) > 1))


def _node_problems(node: Node, rdma: Rdma, ports: Ports) -> list[Problem]:
    setting = _index(node)
    return _by_index(node, ports, setting) if setting is not None else _by_choice(node, ports, rdma)


def _roce_ports(node: Node, rdma: Rdma) -> Ports:
    return tuple(
        (device, port)
        for device, port in chosen_ports(node, rdma)
        if port.link_layer == "Ethernet" and is_active(port) and not device.virtual_function
    )


def _words_of(ports: Ports) -> str:
    return words([label(device, port) for device, port in ports])


def _index(node: Node) -> Setting | None:
    """Return NCCL_IB_GID_INDEX if it has an effect. With -1 or text that is not a number, NCCL chooses by itself."""
    setting = find_setting(node, node.first, "NCCL_IB_GID_INDEX")
    return setting if setting is not None and (setting.number if setting.number is not None else -1) >= 0 else None


def _family(node: Node) -> str:
    setting = find_setting(node, node.first, "NCCL_IB_ADDR_FAMILY")
    return "IPv6" if setting is not None and setting.value == "AF_INET6" else "IPv4"


def _kind(gid: Gid) -> str:
    """Return "IPv4", "IPv6" or "link-local"."""
    if gid.gid.lower().startswith(MAPPED_IPV4):
        return "IPv4"
    return "link-local" if gid.gid.lower().startswith(LINK_LOCAL) else "IPv6"


def _routes(port: RdmaPort, family: str) -> bool:
    return any(gid.type == V2 and _kind(gid) == family for gid in port.gids)


def _by_choice(node: Node, ports: Ports, rdma: Rdma) -> list[Problem]:
    """Report ports on which NCCL would find no usable entry by itself."""
    family = _family(node)
    bare = tuple((device, port) for device, port in ports if not _routes(port, family))
    if not bare:
        return []
    training = {id(port) for _, port in network_ports(node, rdma)}
    severity = Severity.ERROR if any(id(port) in training for _, port in bare) else Severity.INFO
    device = bare[0][0]
    interface = device.netdevs[0] if device.netdevs else "INTERFACE"
    kinds = sorted({f"{gid.type} {_kind(gid)}" for _, port in bare for gid in port.gids})
    return [
        Problem(
            summary=f"{_words_of(bare)} {'has' if len(bare) == 1 else 'have'} no RoCE v2 address with {family}: "
            "NCCL uses a link-local one, which cannot reach other network segments",
            evidence=(f"entries in use: {', '.join(kinds) or 'none'}",),
            fix=f"give the interface its address (ip addr add ADDRESS/PREFIX dev {interface}), "
            "or exclude the port with NCCL_IB_HCA",
            severity=severity,
            hosts=(node.host,),
        )
    ]


def _by_index(node: Node, ports: Ports, setting: Setting) -> list[Problem]:
    """Judge the entry that NCCL_IB_GID_INDEX names, over all ports."""
    judged_ports = ((_entry_fault(port, setting.number or 0), (device, port)) for device, port in ports)
    faults = grouped((fault, port) for fault, port in judged_ports if fault is not None)
    return [
        Problem(
            summary=f"{setting} selects {what} of {_words_of(tuple(those))}",
            evidence=(_right_index(ports),),
            fix=f"{setting.removal} ({PICKS_ITSELF})",
            severity=severity,
            hosts=(node.host,),
            kind=setting.kind,
        )
        for (what, severity), those in faults.items()
    ]


def _entry_fault(port: RdmaPort, index: int) -> tuple[str, Severity] | None:
    gid = next((gid for gid in port.gids if gid.index == index), None)
    if gid is None:
        return "an empty entry of the address table", Severity.ERROR
    if not gid.type:
        return "an entry whose type cannot be read here, such as one of another container,", Severity.WARNING
    if gid.type != V2:
        return "a RoCE v1 entry", Severity.ERROR if _routes(port, "IPv4") else Severity.WARNING
    own = next((entry.netdev for entry in port.gids if entry.netdev), None)  # of the port itself, or of its bond
    if own and gid.netdev != own:
        return f"an entry of another interface ({gid.netdev})", Severity.WARNING
    return None


def _right_index(ports: Ports) -> str:
    good = [
        {gid.index for gid in port.gids if gid.type == V2 and _kind(gid) == "IPv4"} for _, port in ports
    ]  # of each port
    common = set.intersection(*good) if good else set()
    if common:
        return f"RoCE v2 with IPv4 is entry {min(common)} on all {len(ports)} ports"
    return "no entry is RoCE v2 with IPv4 on all ports"


def _compare_hosts(roce: list[tuple[Node, Ports]]) -> list[Problem]:
    """Compare what NCCL_IB_GID_INDEX means on every host."""
    voices = []
    for node, ports in roce:
        setting = _index(node)
        kinds = {_meaning(port, setting.number or 0) for _, port in ports} if setting is not None else set()
        meaning = kinds.pop() if len(kinds) == 1 else ("different kinds" if kinds else None)
        voices.append(Voice(host=node.host, ranks=node.ranks, value=meaning))
    split = compare(voices)
    if split is None:
        return []
    return [
        Problem(
            summary="NCCL_IB_GID_INDEX selects different address types on different hosts, which then cannot connect: "
            + describe(split, "it is"),
            fix=f"unset NCCL_IB_GID_INDEX on all hosts ({PICKS_ITSELF})",
            confidence=split.confidence,
            hosts=split.hosts,
        )
    ]


def _meaning(port: RdmaPort, index: int) -> str:
    gid = next((gid for gid in port.gids if gid.index == index), None)
    return "an empty entry" if gid is None else f"{gid.type or 'of unknown type'} {_kind(gid)}"
