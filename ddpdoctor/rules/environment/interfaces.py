"""DD211 to DD215: network interfaces that exist, can carry data, and can reach those of the other nodes."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.words import grouped, name_list
from ddpdoctor.rules import network as net
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped, unknown
from ddpdoctor.rules.environment.launch import ONE_NODE, has_several_nodes, ranks_of
from ddpdoctor.rules.majority import compare_nodes, describe, disagreement
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Fleet, Interface, Network, Node, NodeProcess

    Chosen = tuple[tuple[Node, Network, net.Choice], ...]


# For each library, the variable that overrides its own choice.
VARIABLES = {"NCCL": "NCCL_SOCKET_IFNAME", "Gloo": "GLOO_SOCKET_IFNAME"}
SHOWN = 8  # how many nodes are named one by one


def choices_of(fleet: Fleet) -> Chosen:
    """Return what each node would use; nodes whose interfaces could not be read are left out."""
    readings = fleet.each(lambda node: node.network)
    return tuple((node, network, net.choose(node, network)) for node, network in readings if network.interfaces)


def first_picks(chosen: Chosen) -> Iterator[tuple[str, Node, Network, net.Pick]]:
    """Yield, by library and node, the interface whose address the others get."""
    for node, network, choice in chosen:
        for library, picks in (("NCCL", choice.nccl), ("Gloo", choice.gloo or ())):
            if picks:
                yield library, node, network, picks[0]


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
    problems = [problem for pick in first_picks(chosen) for problem in _unreachable(*pick)]
    for node, network, choice in chosen:
        rdma = known(node.rdma)
        bridges = [pick for pick in choice.nccl[1:] if net.is_bridge(pick.interface.name)]
        if bridges and not (rdma is not None and net.network_ports(node, rdma)):  # only over TCP it uses several
            names = ", ".join(dict.fromkeys(map(str, bridges)))
            summary = f"NCCL would also use {names} for TCP data, but other nodes cannot reach container bridges"
            evidence: tuple[str, ...] = (f"it uses all active interfaces: {', '.join(map(str, choice.nccl))}",)
            fix, severity = f"{net.export(VARIABLES['NCCL'], network)} on all nodes", Severity.WARNING
            hosts: tuple[str, ...] = (node.host,)
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix, severity=severity, hosts=hosts))
    seen = [f"{node.host}: {choice}" for node, _, choice in chosen[:SHOWN]]
    if len(chosen) > SHOWN:
        seen.append(f"and {len(chosen) - SHOWN} more nodes")
    # Addresses that two hosts would give to the others; loopback is reported elsewhere
    holders = grouped(
        ((library, str(pick.ip)), (node, network, pick))
        for library, node, network, pick in first_picks(chosen)
        if not (pick.ip.is_loopback or pick.ip.is_link_local)
    )
    for (library, address), held in holders.items():
        hosts = tuple(dict.fromkeys(node.host for node, _, _ in held))
        if len(hosts) > 1:
            summary = f"{library} would use the same address {address} on {name_list(hosts)}"
            evidence = tuple(f"{node.host}: {pick}" for node, _, pick in held[:4])
            fix = (
                f"{net.export(VARIABLES[library], held[0][1])} on all nodes, with an interface whose address is unique"
            )
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix, hosts=hosts))
    # Link-local addresses work on their own cable only, which matters if others have a real one.
    for library, variable in VARIABLES.items():
        picks = [(node, network, pick) for name, node, network, pick in first_picks(chosen) if name == library]
        local = [pick for pick in picks if pick[2].ip.is_link_local]
        if local and len(local) < len(picks):
            hosts, real = tuple(node.host for node, _, _ in local), len(picks) - len(local)
            summary = f"{library} would use a link-local address on {name_list(hosts)}, but not on {real} others"
            evidence = tuple(f"{node.host}: {pick}" for node, _, pick in local[:4])
            fix = f"{net.export(variable, local[0][1])}, or give {local[0][2].interface.name} an address"
            problems.append(Problem(summary=summary, evidence=evidence, fix=fix, hosts=hosts))
    return judged(problems, "; ".join(seen))


def _unreachable(library: str, node: Node, network: Network, pick: net.Pick) -> Iterator[Problem]:
    name, variable = pick.interface.name, VARIABLES[library]
    by_name = library == "Gloo" and not node.first.variables.get(variable)
    if pick.ip.is_loopback and not by_name:
        what = "which is loopback: the other nodes would connect to themselves"
    elif net.is_bridge(name):
        what = "a bridge for containers or virtual machines on the host: other nodes cannot reach it"
    elif net.is_tunnel(name):
        what = "which looks like a VPN: it is slow, or does not reach the other nodes"
    else:
        return
    setting, names = net.find_setting(node, node.first, variable), known(node.names)
    why = f"{variable} is not set" if setting is None else str(setting)
    if setting is None and library == "Gloo" and names is not None:
        why = f"the host name resolves to {', '.join(names.own.addresses) or names.own.error}"
    summary, fix = f"{library} would use {name} ({pick.ip}), {what}", f"{net.export(variable, network)} on all nodes"
    severity = Severity.WARNING if net.is_tunnel(name) else None
    yield Problem(summary=summary, evidence=(why,), fix=fix, severity=severity, hosts=(node.host,))


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
    problems, seen = [], []
    for library in VARIABLES:
        picks = ((node, pick) for name, node, _, pick in first_picks(chosen) if name == library)
        sizes = [(node, pick.interface) for node, pick in picks if not pick.ip.is_loopback]
        seen += [f"{nic.name} {nic.mtu}" for _, nic in sizes]
        split = compare_nodes((node, nic.mtu) for node, nic in sizes)
        if split is None:
            continue
        common = split.majority.value if split.majority is not None else min(side.value for side in split.minorities)
        names = dict.fromkeys(nic.name for _, nic in sizes if nic.mtu != common)
        differing = [f"{node.host}: {nic.name}, {nic.mtu}" for node, nic in sizes if node.host in split.hosts]
        summary = describe(split, "MTU") + ": packets that are too large for a node are dropped"
        fix = " && ".join(f"ip link set dev {name} mtu {common}" for name in names) + " where it differs"
        problems.append(disagreement(split, summary, fix, evidence=tuple(differing[:8])))
    return judged(problems, ", ".join(dict.fromkeys(seen)) or "no interface but loopback")


NCCL, GLOO, TENSORPIPE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
EXACT = (GLOO, TENSORPIPE)


@rule(
    "DD211", "ifname-exists", Severity.ERROR, "A variable names a network interface that does not exist",
    after=("hostname-unresolvable",),
    group=CheckGroup.NETWORK, needs=("network", "conf_files"),
    reads="NCCL_SOCKET_IFNAME (also in NCCL's files), GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME, /sys/class/net",
)  # fmt: skip
def check_ifname_exists(node: Node) -> Answer:
    """Report interface variables that match no interface of this machine."""
    network = need(node.network)
    if not network.interfaces:
        return unknown("the interfaces of this machine could not be read")
    found: dict[net.Setting, NodeProcess] = {}  # each value once
    for process in node.processes:
        for name in (NCCL, GLOO, TENSORPIPE):
            setting = net.find_setting(node, process, name)
            if setting is None or net.is_ignored(setting.value) or (name in EXACT and setting.path is not None):
                continue  # only NCCL reads files
            found.setdefault(setting, process)
    if not found:
        return skipped("none of NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME is set")
    problems = [problem for setting, process in found.items() for problem in _judge_setting(network, process, setting)]
    there = ", ".join(interface.name for interface in network.interfaces)
    return judged(problems, f"{', '.join(dict.fromkeys(map(str, found)))}; there are {there}")


def _judge_setting(network: Network, process: NodeProcess, setting: net.Setting) -> Iterator[Problem]:
    if setting.name == NCCL:
        wanted = net.parse_nccl_list(setting.value)
        fitting = [interface.name for interface in network.interfaces if wanted.takes(interface.name)]
        evidence = (f"interfaces: {', '.join(interface.name for interface in network.interfaces)}",)
        if not fitting:
            what = "it excludes every interface" if wanted.exclude else "no interface has that name"
            best = net.best_interface(network) or "INTERFACE"
            summary = f'{setting}: {what}, so NCCL fails with "no socket interface found"'
            fix = f"put {NCCL}={best} into {setting.path}" if setting.path else f"export {NCCL}={best}"
            yield Problem(summary=summary, evidence=evidence, fix=fix, ranks=ranks_of([process]), kind=setting.kind)
        elif wanted.marked:
            first, *others = setting.value.split(",")
            with_marks_once = ",".join([first, *(other.lstrip(net.MARKS) for other in others)])
            misread = f"{wanted.marked[0]} is read as a name"
            yield Problem(
                summary=f"{setting}: NCCL reads ^ and = only before the first name, so {misread}",
                evidence=(*evidence, f"it currently matches: {', '.join(fitting)}"),
                fix=f"export {NCCL}={with_marks_once}",
                severity=Severity.WARNING,
                ranks=ranks_of([process]),
                kind=setting.kind,
            )
        return
    names = net.parse_gloo_names(setting.value) if setting.name == GLOO else (setting.value,)
    there = {interface.name for interface in network.interfaces}
    wrong = [name for name in names if name not in there]
    if wrong:
        summary = f"{setting.name}={setting.value}: {_why_not(wrong[0], setting, there)}"
        seen = (f"interfaces: {', '.join(interface.name for interface in network.interfaces)}",)
        fix = net.export(setting.name, network)
        yield Problem(summary=summary, evidence=seen, fix=fix, ranks=ranks_of([process]))


def _why_not(name: str, setting: net.Setting, there: set[str]) -> str:
    library = "Gloo" if setting.name == GLOO else "TensorPipe"
    if name[:1] and name[0] in net.MARKS:
        return f"{name[0]} is NCCL syntax, but {library} reads it as part of the name"
    if not name.strip():
        return "the list has an empty name"
    if name.strip() in there:
        return f"{library} reads the space as part of the name"
    if setting.name == TENSORPIPE and "," in name:
        return "TensorPipe accepts one name, not a list"
    longer = sorted(other for other in there if other.startswith(name))
    if longer:
        return f"{library} needs the full name, and {name} is only a prefix of {longer[0]}"
    return f"interface {name} does not exist"


@rule(
    "DD212", "iface-up", Severity.ERROR, "An interface that NCCL or Gloo would use is down or has no address",
    after=("ifname-exists",),
    group=CheckGroup.NETWORK, needs=("network", "names", "conf_files"),
    reads="flags, operstate and carrier in /sys/class/net, addresses, the host name's address, variables of NCCL and "
    "Gloo",
)  # fmt: skip
def check_iface_up(node: Node) -> Answer:
    """Report interfaces that the libraries would use, or are set to use, but that cannot carry data."""
    network = need(node.network)
    if not network.interfaces:
        return unknown("the interfaces of this machine could not be read")
    choice = net.choose(node, network)
    of_nccl, of_gloo = _setting_text(node, NCCL), _setting_text(node, GLOO)
    # Unusable interfaces that NCCL_SOCKET_IFNAME names in full, or all that match if no usable one is left
    wanted = net.parse_nccl_list(of_nccl)
    problems = [
        _down("NCCL", interface, network, f"{NCCL}={of_nccl}", severity=Severity.WARNING if choice.nccl else None)
        for interface in (network.interfaces if wanted.entries and not wanted.exclude else ())
        if wanted.takes(interface.name)
        and not (interface.addresses and interface.running)
        and (not choice.nccl or wanted.names(interface.name))
    ]
    by_name = {interface.name: interface for interface in network.interfaces}
    problems += [
        _down("Gloo", by_name[name], network, f"{GLOO}={of_gloo}")
        for name in net.parse_gloo_names(of_gloo)
        if name in by_name and not (by_name[name].addresses and by_name[name].running)
    ]
    if not of_gloo:
        idle = [pick.interface for pick in choice.gloo or () if not pick.interface.running]
        problems += [_down("Gloo", interface, network, "the host name's address is on it") for interface in idle]
    return judged(problems, str(choice))


def _setting_text(node: Node, name: str) -> str:
    setting = net.find_setting(node, node.first, name)
    return "" if setting is None or net.is_ignored(setting.value) else setting.value


def _down(
    library: str, interface: Interface, network: Network, why: str, *, severity: Severity | None = None
) -> Problem:
    if not interface.up:
        state = "is down"
    elif interface.carrier is False or not interface.running:
        state = "has no link"
    else:
        state = "has no address"
    name = interface.name
    others = net.best_interface(network)
    variable = NCCL if library == "NCCL" else GLOO
    mend = f"ip link set dev {name} up" if not interface.up else f"ip address show dev {name}"
    carrier = {True: "carrier", False: "no carrier", None: "unknown carrier"}[interface.carrier]
    addresses = ", ".join(interface.addresses) or "no address"
    facts = f"{'up' if interface.up else 'down'}, state {interface.operstate}, {carrier}, {addresses}"
    summary = f"{library} would use {name}, which {state}"
    fix = mend + (f", or export {variable}={others}" if others not in {None, name} else "")
    return Problem(summary=summary, evidence=(f"{name}: {facts}", why), fix=fix, severity=severity)


@rule(
    "DD214", "v4v6", Severity.WARNING, "Some nodes would use IPv4 and others IPv6",
    group=CheckGroup.NETWORK, needs=("network", "names", "conf_files"),
    reads="the families of the chosen addresses and the master's addresses, NCCL_SOCKET_FAMILY, disable_ipv6",
)  # fmt: skip
def check_v4v6(fleet: Fleet) -> Answer:
    """Report that some nodes use IPv4 and others IPv6."""
    chosen = choices_of(fleet)
    problems = []
    for library in VARIABLES:
        picks = [(node, pick) for name, node, _, pick in first_picks(chosen) if name == library]
        split = compare_nodes((node, pick.ip.version) for node, pick in picks)
        if split is not None:
            fix = "export NCCL_SOCKET_FAMILY=AF_INET on all nodes"
            if library == "Gloo":
                one_family = "give the host names addresses of one family on all nodes"
                fix = f"{one_family}, or set GLOO_SOCKET_IFNAME to an interface"
            use = describe(split, f"{library} would use", words=lambda version: f"IPv{version}")
            evidence = tuple(f"{node.host}: {pick}" for node, pick in picks if node.host in split.hosts)[:4]
            problems.append(disagreement(split, f"{use}: they cannot connect to each other", fix, evidence=evidence))
    problems += _master_families(fleet)
    for node, network, _ in chosen:
        setting = net.find_setting(node, node.first, "NCCL_SOCKET_FAMILY")
        family = net.NCCL_FAMILIES.get(setting.value) if setting is not None else None
        if setting is None or family is None:
            continue
        if all(pick.ip.is_loopback for pick in net.match_nccl(network, "^lo", family)):
            those = ((interface.name, ", ".join(interface.addresses)) for interface in network.interfaces[:8])
            there = (f"{name}: {addresses or 'no address'}" for name, addresses in those)
            summary = f"{setting}: no interface of the node has an IPv{family} address"
            problems.append(Problem(summary=summary, evidence=tuple(there), fix=setting.removal, hosts=(node.host,)))
    nodes = "one node" if len(chosen) == 1 else f"{len(chosen)} nodes"
    families = sorted({f"{library} IPv{pick.ip.version}" for library, _, _, pick in first_picks(chosen)})
    return judged(problems, f"{', '.join(families) or 'no address'} on {nodes}")


def _master_families(fleet: Fleet) -> Iterator[Problem]:
    """Yield nodes that resolve the master to a family that other nodes lack, or that is switched off here."""
    families = []
    for node in fleet.nodes:
        names = known(node.names)
        addresses = names.master.addresses if names is not None and names.master is not None else ()
        if addresses:
            versions = {ipaddress.ip_address(address.partition("%")[0]).version for address in addresses}
            families.append((node, known(node.network), versions))
    if families and not set.intersection(*(versions for _, _, versions in families)):
        split = compare_nodes((node, " and ".join(f"IPv{kind}" for kind in sorted(seen))) for node, _, seen in families)
        if split is not None:
            fix = "set MASTER_ADDR to an address that all nodes can reach"
            yield disagreement(split, describe(split, "the master's name has"), fix)
    for node, network, versions in families:
        if versions == {6} and network is not None and network.ipv6_disabled:
            summary = "the master's name resolves only to IPv6 addresses, but IPv6 is disabled"
            evidence = ("/proc/sys/net/ipv6/conf/all/disable_ipv6 is 1",)
            fix = "sysctl -w net.ipv6.conf.all.disable_ipv6=0, or set MASTER_ADDR to an IPv4 address"
            yield Problem(summary=summary, evidence=evidence, fix=fix, hosts=(node.host,))
