"""DD334, DD335 and DD339: the address that a RoCE port sends from, and variables that select RDMA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import Unread, Why, known, need
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.majority import Voice, compare, describe
from ddpdoctor.rules.network import (
    VERBS_LAYERS,
    ListEntry,
    NcclList,
    Setting,
    chosen_ports,
    each_port,
    find_setting,
    is_active,
    label,
    network_ports,
    parse_nccl_list,
    words,
)
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.node import Fleet, Gid, Node, Rdma, RdmaDevice, RdmaPort


MAPPED_IPV4 = "0000:0000:0000:0000:0000:ffff:"
LINK_LOCAL = "fe80:"
V1, V2 = "IB/RoCE v1", "RoCE v2"
PICKS_ITSELF = "since NCCL 2.21 it picks the entry itself"

Ports = tuple[tuple["RdmaDevice", "RdmaPort"], ...]


@rule(
    "DD334", "roce-gid", Severity.ERROR,
    "A RoCE port has no routable address, or NCCL_IB_GID_INDEX selects a wrong one", group=CheckGroup.LINKS,
    needs=("rdma", "conf_files"),
    reads="/sys/class/infiniband/*/ports/*/gids, gid_attrs/types and gid_attrs/ndevs, NCCL_IB_GID_INDEX",
)  # fmt: skip
def check_roce_gid(fleet: Fleet) -> Answer:
    """Report RoCE ports whose address (GID) cannot carry the traffic."""
    roce = [
        (node, rdma, ports) for node, rdma in fleet.each(lambda node: node.rdma) if (ports := _roce_ports(node, rdma))
    ]
    if not roce:
        return skipped("no RDMA device has an active Ethernet port that NCCL would use")
    problems = []
    for node, rdma, ports in roce:
        setting = _index(node)
        problems += _by_choice(node, ports, rdma) if setting is None else _by_index(node, ports, setting)
    problems += _compare_hosts([(node, ports) for node, _, ports in roce])
    node, _, ports = roce[0]
    setting = _index(node)
    how = str(setting) if setting is not None else f"an entry that is {V2} with {_family(node)}"
    return judged(problems, f"{_words_of(ports)}: {how}" + f", on {len(roce)} hosts" * (len(roce) > 1))


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


ABSENT = "there is no RDMA device"
PortList = list[tuple["RdmaDevice", "RdmaPort"]]


@rule(
    "DD335", "ib-hca-env", Severity.ERROR, "NCCL_IB_HCA matches missing devices, or more devices than intended",
    group=CheckGroup.LINKS, needs=("rdma", "gpus", "conf_files"),
    reads="NCCL_IB_HCA (also in NCCL's files), /sys/class/infiniband",
)  # fmt: skip
def check_ib_hca_env(node: Node) -> Answer:
    """Report a value of NCCL_IB_HCA that does not fit the RDMA devices of the machine."""
    setting = find_setting(node, node.first, "NCCL_IB_HCA")
    if isinstance(node.rdma, Unread):
        gpus = known(node.gpus)
        if setting is None or node.rdma.why is not Why.ABSENT or gpus is None or not gpus.devices:
            need(node.rdma)
        problem = Problem(
            summary=f"{setting} names RDMA devices, but there are none here: NCCL will use TCP sockets",
            evidence=("/sys/class/infiniband is empty",),
            fix=f"give the container its RDMA devices (docker run --device=/dev/infiniband), or {setting.removal}"
            if setting is not None
            else "",
        )
        return judged([problem], ABSENT)
    if setting is None:
        return passed("NCCL_IB_HCA is not set: NCCL uses every active port")
    ports = [(device, port) for device, port in each_port(node.rdma) if port.link_layer in VERBS_LAYERS]
    if not ports:
        return skipped("the RDMA devices here are neither InfiniBand nor Ethernet: NCCL_IB_HCA does not apply to them")
    wanted = parse_nccl_list(setting.value)
    taken = [label(device, port) for device, port in ports if wanted.takes(device.name, port.port)]
    if not taken:
        return judged([_nothing(setting, wanted, ports)], f"{setting} matches no port")
    problems = [problem for entry in wanted.entries for problem in _entry_problems(setting, wanted, entry, ports)]
    return judged(problems, f"{setting} matches {len(taken)} of {len(ports)} ports: {words(taken)}")


def _nothing(setting: Setting, wanted: NcclList, ports: PortList) -> Problem:
    names = [device.name for device, _ in ports]
    all_of_them = ",".join(dict.fromkeys(names))
    what = "excludes every RDMA device" if wanted.exclude else "matches no RDMA device"
    return Problem(
        summary=f"{setting} {what} of this machine: NCCL will use TCP sockets",
        evidence=(f"devices here: {words(names)}", *_second_mark(wanted)),
        fix=setting.removal if setting.path else f"export NCCL_IB_HCA=={all_of_them}",
        kind=setting.kind,
    )


def _second_mark(wanted: NcclList) -> tuple[str, ...]:
    return (
        (f"= and ^ are only allowed once, before the whole list, not in {words(wanted.marked)}",)
        if wanted.marked
        else ()
    )


def _entry_problems(setting: Setting, wanted: NcclList, entry: ListEntry, ports: PortList) -> list[Problem]:
    matched = [
        device.name for device, port in ports if wanted.matches(entry, device.name, port.port)
    ]  # one name for each port
    names = tuple(dict.fromkeys(matched))
    if not names:
        return [
            Problem(
                summary=f"{entry} in {setting} matches no RDMA device of this machine",
                evidence=(f"devices here: {words([device.name for device, _ in ports])}", *_second_mark(wanted)),
                fix=f"remove {entry} from NCCL_IB_HCA, or find out why the device is missing: ls /sys/class/infiniband",
                severity=Severity.WARNING,
                kind=setting.kind,
            )
        ]
    if wanted.exact or entry.name not in names or len(names) == 1:
        return []
    more = [name for name in names if name != entry.name and not wanted.names(name)]
    return [_too_many(setting, wanted, entry, more)] if more else []


def _too_many(setting: Setting, wanted: NcclList, entry: ListEntry, more: list[str]) -> Problem:
    mark = "^=" if wanted.exclude else "="
    listed = ",".join(str(one) for one in wanted.entries)
    what = "excludes" if wanted.exclude else "takes"
    return Problem(
        summary=f"{entry} in {setting} also {what} {words(more)}: entries are prefixes of names",
        evidence=(f"use = before the list to match full names: {mark}{listed}",),
        fix=f"export NCCL_IB_HCA={mark}{listed}"
        if setting.path is None
        else f"in {setting.path}: NCCL_IB_HCA={mark}{listed}",
        severity=Severity.WARNING,
        kind=setting.kind,
    )


@rule(
    "DD339", "ib-disabled", Severity.WARNING, "A variable disables a working RDMA network", group=CheckGroup.LINKS,
    needs=("rdma", "conf_files"),
    reads="NCCL_IB_DISABLE and NCCL_NET (also in NCCL's files), /sys/class/infiniband/*/ports/*/state",
)  # fmt: skip
def check_ib_disabled(node: Node) -> Answer:
    """Report NCCL_IB_DISABLE=1, or NCCL_NET=Socket, on a machine with an RDMA network that is up."""
    rdma = need(node.rdma)
    disable = find_setting(node, node.first, "NCCL_IB_DISABLE")
    if disable is not None and disable.number:
        setting = None if disable.path else disable  # in a file it is for nccl-conf to say
    else:
        network = find_setting(node, node.first, "NCCL_NET")
        setting = network if network is not None and network.value.lower() == "socket" else None
    ports = network_ports(node, rdma)
    if setting is None:
        return passed("neither NCCL_IB_DISABLE nor NCCL_NET disables RDMA")
    if not ports:
        up = words([label(device, port) for device, port in each_port(rdma) if is_active(port)] or ["none"])
        return passed(f"{setting}, but no port is on a training network (active: {up})")
    names = words([label(device, port) for device, port in ports])
    problem = Problem(
        summary=f"{setting} disables this machine's RDMA network: NCCL will use TCP sockets",
        evidence=(f"active: {names}, {ports[0][1].rate_text or ports[0][1].link_layer}",),
        fix=setting.removal,
        kind=setting.kind,
    )
    return judged([problem], f"{setting}, and {len(ports)} ports are active")
