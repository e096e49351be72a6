"""Which interfaces and RDMA ports NCCL and Gloo use on a node, and the commands that open its firewall.

NCCL uses the first interface that runs and has an address: from NCCL_SOCKET_IFNAME, else by a fixed order that begins
with ib*. Gloo uses those from GLOO_SOCKET_IFNAME, else the one whose address the host name resolves to, else loopback.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.reading import NotRead, Unread, Why, known, need
from ddpdoctor.model.words import name_list
from ddpdoctor.rules.variables import find_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpdoctor.model import node as nodes

    Ip = ipaddress.IPv4Address | ipaddress.IPv6Address

NCCL_CONF = "nccl-conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value and its source."""

    name: str
    value: str
    path: str | None = None  # the file, or None for the environment

    def __str__(self) -> str:
        return f"{self.name}={self.value}" + (f" in {self.path}" if self.path else "")

    @property
    def kind(self) -> str | None:
        """The kind of problem of a wrong value: ``nccl-conf`` if it comes from one of NCCL's files, else None."""
        return NCCL_CONF if self.path else None

    @property
    def removal(self) -> str:
        """How to remove it."""
        return f"remove {self.name} from {self.path}" if self.path else f"unset {self.name}"

    @property
    def number(self) -> int | None:
        """The number that NCCL reads: the leading one of the value, or None if there is none."""
        return find_number(self.value)


def find_setting(node: nodes.Node, process: nodes.NodeProcess, name: str) -> Setting | None:
    """Return what NCCL would read, or None if it is not set or empty; the environment wins over files."""
    if name in process.variables:
        value = process.variables[name]
        return Setting(name=name, value=value) if value else None
    for file in known(node.conf_files) or ():
        if file.variables.get(name) and name not in (*file.hidden_by_env, *file.hidden_by_file):
            return Setting(name=name, value=file.variables[name], path=file.path)
    return None


MARKS = "^="


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEntry:
    """One entry of the list: ``NAME[:PORT[:RAIL[:PLANE]]]``."""

    name: str
    port: int | None  # None: every port

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclList:
    """A value of one of the variables, read as NCCL does (parseStringList and matchIfList, src/misc/utils.cc)."""

    exclude: bool  # the value begins with ^: all but these
    exact: bool  # the value has =, after any ^: whole names, not beginnings
    entries: tuple[ListEntry, ...]

    def takes(self, name: str, port: int | None = None) -> bool:
        """Return whether NCCL would use this interface or port if it were up. An empty list means every name."""
        listed = not self.entries or any(self.matches(entry, name, port) for entry in self.entries)
        return listed is not self.exclude

    def matches(self, entry: ListEntry, name: str, port: int | None = None) -> bool:
        """Return whether an entry matches, by the whole name or a prefix. An interface has no port."""
        same = name == entry.name if self.exact else name.startswith(entry.name)
        return same and (port is None or entry.port in {None, port})

    def names(self, name: str) -> bool:
        """Return whether the value asks for exactly this name, not for a prefix that others share."""
        return not self.exclude and any(entry.name == name for entry in self.entries)

    @property
    def marked(self) -> tuple[str, ...]:
        """Return the entries that have their own ^ or =: NCCL reads these marks only before the first name."""
        return tuple(str(entry) for entry in self.entries if entry.name[0] in MARKS)


def parse_nccl_list(text: str) -> NcclList:
    """Return the list that a value means. NCCL takes any text; an entry without meaning matches nothing."""
    rest = text.removeprefix("^")
    entries = []
    for part in rest.removeprefix("=").split(","):
        name, port, *_ = (*part.split(":"), "")
        digits = re.match(r"\s*(\d+)", port)  # as C's atoi does: leading digits, else 0; an empty field: all ports
        entries += [ListEntry(name=name, port=(int(digits[1]) if digits else 0) if port else None)] if name else []
    return NcclList(exclude=text.startswith("^"), exact=rest.startswith("="), entries=tuple(entries))


# NCCL and Gloo ignore a value of one character: `strlen(env) > 1` (nccl src/misc/socket.cc, torch ProcessGroupGloo).
IGNORED_LENGTH = 1
# What NCCL tries in turn if nothing is set (ncclFindInterfaces, src/misc/socket.cc, 2.30). Between the first two it
# tries the subnet of NCCL_COMM_ID. It excludes none of cni*, flannel*, veth*, tailscale*, wg*.
NCCL_ORDER = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
NCCL_FAMILIES = {"AF_INET": 4, "AF_INET6": 6}  # values of NCCL_SOCKET_FAMILY; any other is ignored
NCCL_MAX = 16  # MAX_IFS: the most interfaces that NCCL uses
# Beginnings of interface names that container engines, Kubernetes and libvirt use. These interfaces lead only to
# containers on the same host, and often have the same address on every host.
VIRTUAL_BRIDGES = (
    "docker", "podman", "nerdctl", "virbr", "vnet", "lxcbr", "lxdbr", "incusbr", "veth", "cni", "cbr0", "flannel",
    "cali", "vxlan.calico", "cilium_", "weave", "antrea", "kube-ipvs", "kube-bridge", "nodelocaldns", "dummy",
)  # fmt: skip
# A bridge of `docker network create`; other br* may be bridges around a real card.
DOCKER_NETWORK = re.compile(r"br-[0-9a-f]{12}")
TUNNELS = ("tailscale", "wg", "tun", "tap", "zt", "utun", "ppp")  # beginnings of the names of VPNs' interfaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """An interface that a library uses, and the address that it sends to its peers."""

    interface: nodes.Interface
    address: str  # with the prefix length

    @property
    def ip(self) -> Ip:
        """The address alone."""
        return ipaddress.ip_interface(self.address).ip

    def __str__(self) -> str:
        return f"{self.interface.name} ({self.ip})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What both libraries use on a node."""

    nccl: tuple[Pick, ...]  # the first one serves the bootstrap; over TCP all of them carry data
    gloo: tuple[Pick, ...] | None  # None if it cannot be known

    def __str__(self) -> str:
        unknown = "it is unknown which interface Gloo would use"
        gloo = unknown if self.gloo is None else f"Gloo would use {_pick_words(self.gloo)}"
        return f"{gloo}, NCCL {_pick_words(self.nccl[:1])}"


def _pick_words(picks: Sequence[Pick]) -> str:
    return " and ".join(map(str, picks)) or "no interface"


def choose(node: nodes.Node, network: nodes.Network) -> Choice:
    """Return what both libraries would use, by the variables of the node's first process."""
    names = known(node.names)
    return Choice(
        nccl=pick_nccl(node, node.first, network),
        gloo=pick_gloo(node.first, network, names.own if names is not None else None),
    )


def pick_nccl(node: nodes.Node, process: nodes.NodeProcess, network: nodes.Network) -> tuple[Pick, ...]:
    """Return the interfaces that NCCL uses, in its order."""
    family_setting = find_setting(node, process, "NCCL_SOCKET_FAMILY")
    family = NCCL_FAMILIES.get(family_setting.value) if family_setting is not None else None
    setting = find_setting(node, process, "NCCL_SOCKET_IFNAME")
    if setting is not None and not is_ignored(setting.value):
        return match_nccl(network, setting.value, family)
    by_id = find_setting(node, process, "NCCL_COMM_ID")
    first, *others = NCCL_ORDER
    found = match_nccl(network, first, family)
    if not found and by_id is not None:  # "10.0.0.4:29600" or "[fd00::2]:29600"
        text = by_id.value
        host = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
        with contextlib.suppress(ValueError):
            remote = ipaddress.ip_address(host)
            near = (pick for pick in _addresses(network) if remote in ipaddress.ip_interface(pick.address).network)
            found = tuple(near)[:1]
    return found or next(filter(None, (match_nccl(network, other, family) for other in others)), ())


def match_nccl(network: nodes.Network, names: str, family: int | None) -> tuple[Pick, ...]:
    """Return the interfaces that a value allows and that run and have an address: all IPv4 first, each once."""
    wanted = parse_nccl_list(names)
    found: dict[str, Pick] = {}
    for pick in _addresses(network):
        takes = pick.interface.running and family in {None, pick.ip.version} and wanted.takes(pick.interface.name)
        if takes and not (pick.ip.version == 6 and pick.ip.is_loopback):
            found.setdefault(pick.interface.name, pick)
    return tuple(found.values())[:NCCL_MAX]


def _addresses(network: nodes.Network) -> Iterator[Pick]:
    """Yield all addresses in the order of getifaddrs: all IPv4 by interface, then all IPv6."""
    for version in (4, 6):
        for interface in network.interfaces:
            for address in interface.addresses:
                if ipaddress.ip_interface(address).version == version:
                    yield Pick(interface=interface, address=address)


def pick_gloo(process: nodes.NodeProcess, network: nodes.Network, own: nodes.Lookup | None) -> tuple[Pick, ...] | None:
    """Return the interfaces that Gloo uses: () if a name in the variable has no address, None if unknown."""
    text = process.variables.get("GLOO_SOCKET_IFNAME", "")
    addresses = tuple(_addresses(network))
    if not is_ignored(text):
        by_name = {pick.interface.name: pick for pick in reversed(addresses)}
        names = parse_gloo_names(text)
        return tuple(by_name[name] for name in names) if by_name.keys() >= set(names) else ()
    if own is None:
        return None
    # The interface of the host name's first address that this host can bind, else loopback. If lo is up, all of
    # 127.0.0.0/8 can be bound.
    for address in own.addresses:
        for pick in addresses:
            local = pick.interface.loopback and address.startswith("127.") and str(pick.ip).startswith("127.")
            if local or ipaddress.ip_address(address.partition("%")[0]) == pick.ip:
                return (Pick(interface=pick.interface, address=f"{address}/{pick.address.partition('/')[2]}"),)
    return tuple(pick for pick in addresses if pick.interface.loopback)[:1]


def is_ignored(text: str) -> bool:
    """Return whether NCCL and Gloo treat the variable as not set."""
    return len(text) <= IGNORED_LENGTH


def parse_gloo_names(text: str) -> tuple[str, ...]:
    """Return the names of a value: a plain list that keeps white space. A comma at its end makes no empty name."""
    return tuple(text.removesuffix(",").split(","))


def own_ips(network: nodes.Network | None) -> set[Ip]:
    """Return all addresses of a machine, or none if its interfaces are not known."""
    return {pick.ip for pick in _addresses(network)} if network is not None else set()


def is_bridge(name: str) -> bool:
    """Return by its name whether an interface leads only to containers or virtual machines on the same host."""
    return name.startswith(VIRTUAL_BRIDGES) or DOCKER_NETWORK.fullmatch(name) is not None


def is_tunnel(name: str) -> bool:
    """Return by its name whether an interface belongs to a VPN."""
    return name.startswith(TUNNELS)


def best_interface(network: nodes.Network) -> str | None:
    """Return the name of the interface that most likely leads to the other nodes, or None if there is none.

    It is the one of the default route, else a real card, else the first that is neither loopback nor a bridge.
    """
    running = (interface for interface in network.interfaces if interface.running and interface.addresses)
    usable = [interface for interface in running if not (interface.loopback or is_bridge(interface.name))]
    by_default = [interface.name for interface in usable if interface.name == network.default_interface]
    real = [interface.name for interface in usable if not interface.virtual and not is_tunnel(interface.name)]
    return next(iter([*by_default, *real, *(interface.name for interface in usable)]), None)


def export(variable: str, network: nodes.Network | None) -> str:
    """Return "export GLOO_SOCKET_IFNAME=eth0", with the best interface of this machine."""
    best = best_interface(network) if network is not None else None
    return f"export {variable}={best or 'INTERFACE'}"


# Link layers that NCCL's own transport uses (ncclIbInitDevices). AWS's EFA has neither, and uses a plugin.
VERBS_LAYERS = frozenset({"InfiniBand", "Ethernet"})
# Our choice: an Ethernet card that is slower, or alone, counts as the machine's everyday network card.
NETWORK_GB_S = 100.0
NETWORK_CARDS = 2
# What ports that should be alike have in common: the board, the function on its card, the port number on its device.
Place = tuple[str, str, int]


def each_port(rdma: nodes.Rdma) -> Iterator[tuple[nodes.RdmaDevice, nodes.RdmaPort]]:
    """Yield all ports with their devices."""
    for device in rdma.devices:
        for port in device.ports:
            yield device, port


def is_active(port: nodes.RdmaPort) -> bool:
    """Return whether data can pass; ACTIVE_DEFER is a link that recovers by itself."""
    return port.state in {"ACTIVE", "ACTIVE_DEFER"}


def label(device: nodes.RdmaDevice, port: nodes.RdmaPort) -> str:
    """Return "mlx5_0", or "mlx4_0:2" for a device with several ports."""
    return device.name if len(device.ports) == 1 else f"{device.name}:{port.port}"


def words(names: Sequence[str]) -> str:
    """Return "mlx5_0", "mlx5_0 and mlx5_1", or "mlx5_0, mlx5_1, mlx5_2 and 5 more", each name once."""
    return name_list(tuple(dict.fromkeys(names)))


def hca_filter(node: nodes.Node) -> NcclList:
    """Return what NCCL_IB_HCA of the node's first process allows: everything if it is not set."""
    setting = find_setting(node, node.first, "NCCL_IB_HCA")
    return parse_nccl_list(setting.value if setting is not None else "")


def chosen_ports(node: nodes.Node, rdma: nodes.Rdma) -> tuple[tuple[nodes.RdmaDevice, nodes.RdmaPort], ...]:
    """Return the ports that NCCL's own transport would use if they were up."""
    wanted = hca_filter(node)
    return tuple(
        (device, port)
        for device, port in each_port(rdma)
        if port.link_layer in VERBS_LAYERS and wanted.takes(device.name, port.port)
    )


def network_ports(node: nodes.Node, rdma: nodes.Rdma) -> tuple[tuple[nodes.RdmaDevice, nodes.RdmaPort], ...]:
    """Return the ports of a training network that are up.

    These are InfiniBand ports, several fast Ethernet cards, or what NCCL_IB_HCA names. A single Ethernet card counts as
    the machine's general-purpose card, however fast it is: most servers and many cloud machines have one.
    """
    up = [(device, port) for device, port in chosen_ports(node, rdma) if is_active(port)]
    fast = [device for device, port in up if (port.rate_gb_s or 0) >= NETWORK_GB_S]
    several = len({card(device) for device in fast}) >= NETWORK_CARDS
    named = hca_filter(node)
    return tuple(
        (device, port)
        for device, port in up
        if port.link_layer == "InfiniBand" or named.names(device.name) or (several and device in fast)
    )


def card(device: nodes.RdmaDevice) -> str:
    """Return what the functions of one card have in common."""
    return device.bus_id.rpartition(".")[0] if device.bus_id else device.name


def place(device: nodes.RdmaDevice, port: nodes.RdmaPort) -> Place:
    """Return what is equal for ports that should be alike: second ports are compared only to second ports."""
    function = device.bus_id.rpartition(".")[2] if device.bus_id else device.name
    return device.board or device.name, function, port.port


def need_rdma(node: nodes.Node) -> nodes.Rdma:
    """Return the RDMA devices. Raises ``NotRead`` if torch uses none: only NCCL does, and it needs a GPU."""
    rdma, gpus = need(node.rdma), node.gpus
    if isinstance(gpus, Unread) and gpus.why is Why.ABSENT:
        raise NotRead(gpus)
    if not isinstance(gpus, Unread) and not gpus.devices and not gpus.init_error:
        raise NotRead(Unread(why=Why.NEEDLESS, reason="no GPU is usable here, and only NCCL uses RDMA"))
    return rdma


# The kernel's default ip_local_port_range (Documentation/networking/ip-sysctl.rst): NCCL and Gloo listen on ports that
# the kernel picks.
EPHEMERAL = (32768, 60999)
UNKNOWN_NETWORK = "NETWORK_OF_THE_NODES"
NAMED_SOURCES = 8  # our choice: nobody checks a longer list of addresses before running the command


def open_chain(chain: nodes.FirewallChain, network: str = UNKNOWN_NETWORK) -> str:
    """Return a command that lets a network through a chain that blocks it."""
    if chain.manager == "firewalld":
        return f"firewall-cmd --zone=trusted --add-source={network}"
    if chain.manager == "ufw":
        return f"ufw allow from {network}"
    tool, _, place = chain.name.partition(" ")
    if tool == "nft":
        return f"nft insert rule {place} {'ip6' if _is_v6(network) else 'ip'} saddr {network} accept"
    return f"{_iptables(network)} -I INPUT -s {network} -j ACCEPT"


def _iptables(network: str) -> str:
    """Return the command for such addresses; the other one does not accept them."""
    return "ip6tables" if _is_v6(network) else "iptables"


def _is_v6(network: str) -> bool:
    return ":" in network


def open_ports(node: nodes.Node | None, ports: tuple[int, int] | None, sources: Iterable[str]) -> str:
    """Return a command that lets hosts reach a range of ports on a node.

    ``node`` is None if its machine is not known. ``ports`` is None for the ports that its kernel hands out. If the
    blocking chain is known, the command is for that chain, otherwise it is for iptables, as root.
    """
    machine = known(node.network) if node is not None else None
    network = network_of(machine, tuple(sources))
    refusing = known(machine.firewall) if machine is not None else None
    # IPv4 and IPv6 have separate chains.
    others = ("iptables ", "nft ip ") if _is_v6(network) else ("nft ip6 ",)
    chain = next((chain for chain in refusing or () if not chain.name.startswith(others)), None)
    if chain is not None:
        return open_chain(chain, network)
    low, high = ports or (machine.local_ports if machine is not None else None) or EPHEMERAL
    span = str(low) if low == high else f"{low}:{high}"
    return f"{_iptables(network)} -I INPUT -p tcp -s {network} --dport {span} -j ACCEPT"


def network_of(machine: nodes.Network | None, sources: tuple[str, ...]) -> str:
    """Return the machine's network that contains all these addresses, else the addresses with commas."""
    wanted = [ipaddress.ip_address(source.partition("%")[0]) for source in sources if source]
    for interface in machine.interfaces if machine is not None else ():
        for address in interface.addresses:
            network = ipaddress.ip_interface(address).network
            if wanted and all(source in network for source in wanted):
                return str(network)
    few = wanted and len(wanted) <= NAMED_SOURCES
    return ",".join(dict.fromkeys(map(str, wanted))) if few else UNKNOWN_NETWORK
