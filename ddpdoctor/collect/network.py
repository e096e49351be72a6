"""Reads interfaces, routes and names, the port for the store, the packet filter's refusing chains, and RDMA adapters.

Look-ups run in parallel: a dead DNS server costs two seconds in total.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import ask_one, ask_side_by_side
from ddpdoctor.collect.connections import LISTENING, TIME_WAIT, read_rows, read_sockets
from ddpdoctor.collect.kernel import BUS_ID
from ddpdoctor.collect.launch import text
from ddpdoctor.collect.proc import list_pids, read_link
from ddpdoctor.collect.software import read_driver
from ddpdoctor.model import node
from ddpdoctor.model.launch import is_loopback_address, parse_endpoint
from ddpdoctor.model.reading import NotRead, Unread, Why
from ddpdoctor.recorder.storage.secrets import hide_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ddpdoctor.collect.system import ReadingPlan, System

    Ask = Callable[[], tuple[str, ...]]
    Tables = dict[str, dict[str, "_Chain"]]

FOLDER = "/sys/class/net"
IFF_UP = 0x1
IFF_LOOPBACK = 0x8
LAST = 1 << 30  # sorts interfaces without an index after all others
# Ports of Istio's proxy for outgoing and incoming connections
# (https://istio.io/latest/docs/ops/deployment/application-requirements/). A pod's containers share their network, so
# the other containers see the proxy's sockets but not its processes.
ENVOY_PORTS = frozenset({15001, 15006})
LOOKUP_LIMIT_S = 2.0
REVERSED = 4  # how many of this host's own addresses we look up at most
_REVERSE = "reverse of "
# Limit for the search through all processes' descriptors for the owner of a port. Our choice: a few thousand take
# tenths of a second, and many times that on a machine with busy CPUs.
SEARCH_S = 5.0
SHOWN = 120  # how many characters of a command line we keep
# The first of these that is set says whether rank 0 runs here.
NODE_RANKS = ("RANK", "PET_NODE_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_NODEID")
# The kernel's routing tables: file, first line, base of the metric, and the columns of destination, prefix length or
# mask, flags, metric and interface.
ROUTES = (("/proc/net/route", 1, 10, (1, 7, 3, 6, 0)), ("/proc/net/ipv6_route", 0, 16, (0, 1, 8, 5, 9)))
RTF_UP = 0x1
RTF_REJECT = 0x200  # A route that refuses packets. Without another route, the kernel keeps one for "::/0" on lo.
LIMIT_S = 2.0
MAX_ACCEPTS = 20  # how many accepting rules of a chain we keep, which is enough to judge it
NFT, IPTABLES = ("nft", "list", "ruleset"), ("iptables-save",)
_COUNTER = re.compile(
    r'\bcounter packets \d+ bytes \d+ ?|\b(comment|prefix) "[^"]*" ?|\blog( (level|flags|group) \S+)* ?'
)
_CHAIN = re.compile(r"chain (\S+) \{$")
_TABLE = re.compile(r"table (\S+ \S+) \{$")
_POLICY = re.compile(r"\bpolicy (\w+);")
_JUMP = re.compile(r"(?:\bjump|\bgoto|-j|-g) ([^\s,};]+)")
_ACCEPT = re.compile(r"(?:^|\s)accept$|-j ACCEPT$")
_REFUSES = re.compile(r"(?:drop|reject(?: with .*)?|(?:-j (?:DROP|REJECT)(?: --reject-with \S+)?))$")
# Marks of rules that accept no new connections from other hosts: loopback, replies, ICMP.
_NOT_NEW = re.compile(
    r'iif(?:name)? "lo"|-i lo\b|icmp|ct status|ct state (?!\{? ?(?:\w+,)*new)|--(?:ct)?state (?!(?:\w+,)*NEW)'
)
DEVICES = "/sys/class/infiniband"
FILES = "/dev/infiniband"
VERBS = "/sys/class/infiniband_verbs"
COUNTERS = ("link_downed", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors", "symbol_error")
COUNTER_LIMIT_S = 1.0  # needed because the card's firmware has to answer each counter
BETWEEN_READS_S = 0.5  # our choice: enough for a link that fails all the time, and short before every job
PEER_MODULES = frozenset({"nvidia_peermem", "nv_peer_mem"})
# NCCL checks for these (src/transport/net_ib/gdr.cc).
PEER_FILES = (
    "/sys/module/nvidia_peermem",
    "/sys/kernel/mm/memory_peers/nv_mem",
    "/sys/kernel/mm/memory_peers/nv_mem_nc",
)
DMABUF_KERNEL = (5, 12)  # the first kernel whose RDMA core accepts other devices' memory (ib_umem_dmabuf_get)
CAP_IPC_LOCK = 14
Counters = dict[str, dict[str, int]]  # the counters of every port, by the port's folder


def read_network(system: System, _plan: ReadingPlan) -> node.Network:
    """Read interfaces, routes, ports and the packet filter; on a Mac, only interfaces and the port."""
    addresses = read_addresses(system)
    local_ports = system.text_or("/proc/sys/net/ipv4/ip_local_port_range").split()
    return node.Network(
        interfaces=_interfaces(system, addresses),
        default_interface=read_default_interface(system),
        ipv6_disabled=_is_set(system.number_or_none("/proc/sys/net/ipv6/conf/all/disable_ipv6")),
        local_ports=(int(local_ports[0]), int(local_ports[1])) if len(local_ports) == 2 else None,
        master_port=read_master_port(system, addresses),
        firewall=read_firewall(system),
        mesh_proxy=has_mesh_proxy(system),
    )


def _is_set(number: int | None) -> bool | None:
    return None if number is None else number == 1


def _interfaces(system: System, addresses: dict[str, tuple[str, ...]]) -> tuple[node.Interface, ...]:
    """Return sysfs's interfaces in the kernel's order, then aliases such as eth0:1; without sysfs, those of psutil."""
    names = system.names(FOLDER)
    names = tuple(name for name in names if system.exists(f"{FOLDER}/{name}/flags"))  # bonding_masters is a file
    if not names:  # on a Mac, or in a sandbox without /sys
        try:
            states = system.calls.interface_states()
        except OSError:
            return ()
        return tuple(
            node.Interface(
                name=name, up=up, operstate="up" if up else "down", carrier=None, loopback=name.startswith("lo"),
                virtual=False, mtu=mtu, speed_mb_s=speed_mb_s or None, addresses=addresses.get(name, ()), link_type=0,
            )
            for name, (up, mtu, speed_mb_s) in states.items()
        )  # fmt: skip
    aliases = [name for name in addresses if name not in names and name.partition(":")[0] in names]
    by_index = sorted(names, key=lambda name: (_file_number(system, name, "ifindex", LAST), name))
    interfaces = []
    for name in [*by_index, *sorted(aliases)]:
        device = name.partition(":")[0]
        flags, speed = _file_number(system, device, "flags", 0), _file_number(system, device, "speed", -1)
        carrier = system.number_or_none(f"{FOLDER}/{device}/carrier")  # unreadable if the interface is down
        target = read_link(system.path(f"{FOLDER}/{device}"))
        interface = node.Interface(
            name=name,
            up=bool(flags & IFF_UP),
            operstate=system.text_or(f"{FOLDER}/{device}/operstate", "unknown"),
            carrier=_is_set(carrier),
            loopback=bool(flags & IFF_LOOPBACK),
            virtual="/virtual/" in target if target else not system.exists(f"{FOLDER}/{device}/device"),
            mtu=_file_number(system, device, "mtu", 0),
            speed_mb_s=speed if speed > 0 else None,
            addresses=addresses.get(name, ()),
            link_type=_file_number(system, device, "type", 0),
        )
        interfaces.append(interface)
    return tuple(interfaces)


def _file_number(system: System, device: str, file: str, default: int) -> int:
    number = system.number_or_none(f"{FOLDER}/{device}/{file}")
    return default if number is None else number


def has_mesh_proxy(system: System) -> bool:
    """Return whether something listens on both ports of Istio's proxy, or False if we cannot see sockets."""
    return {row.port for row in read_rows("", system.path("/proc")) if row.state == LISTENING} >= ENVOY_PORTS


def read_names(system: System, plan: ReadingPlan) -> node.Names:
    """Look up all names in parallel, for two seconds at most."""
    hostname = system.calls.hostname()
    names = {"own": hostname, "master": master_name(system.env), "head": plan.head}
    asked: dict[str, Ask] = {use: partial(system.calls.resolve, name) for use, name in names.items() if name}
    # The addresses by which other hosts know this one: those of the default route's interface
    by_interface = read_addresses(system)
    default = read_default_interface(system)
    interfaces = [by_interface.get(default, ())] if default else by_interface.values()
    ips = [ipaddress.ip_interface(address).ip for addresses in interfaces for address in addresses]
    for address in [str(ip) for ip in ips if not (ip.is_loopback or ip.is_link_local)][:REVERSED]:
        asked[f"{_REVERSE}{address}"] = lambda address=address: (system.calls.reverse(address),)  # type: ignore[misc]
    asked["full name"] = lambda: (system.calls.fqdn(),)
    replies = ask_side_by_side(asked, LOOKUP_LIMIT_S)
    lookups: dict[str, node.Lookup] = {}
    for use, name in names.items():
        if name:
            reply = replies[use]
            error = None if reply.error is None else reply.error.strerror or str(reply.error)
            error = f"no answer within {LOOKUP_LIMIT_S:.0f} s" if reply.timed_out else error
            found, duration_s = reply.value or (), round(reply.duration_s, 3)
            lookups[use] = node.Lookup(
                name=name, addresses=found, error=error, timed_out=reply.timed_out, duration_s=duration_s
            )
    full = next(iter(replies["full name"].value or ()), None)
    reverse_s = max((reply.duration_s for use, reply in replies.items() if use.startswith(_REVERSE)), default=None)
    of_job = {"master": lookups.get("master"), "head": lookups.get("head")}
    return node.Names(hostname=hostname, fqdn=full, own=lookups["own"], reverse_s=reverse_s, **of_job)


def master_name(env: Mapping[str, str]) -> str | None:
    """Return the rendezvous host of the ranks, from the environment."""
    host = endpoint = text(env, "PET_RDZV_ENDPOINT")  # "host", "host:port", "[::1]:port" or "fd00::2"
    if endpoint.startswith("["):
        host = endpoint[1:].partition("]")[0]
    elif endpoint.count(":") == 1:
        host = endpoint.partition(":")[0]
    return text(env, "MASTER_ADDR") or host or text(env, "PET_MASTER_ADDR") or None


def read_master_port(system: System, addresses: Mapping[str, tuple[str, ...]]) -> node.PortUse | Unread:
    """Try to bind MASTER_PORT, if this host would serve the store and this job does not already serve it."""
    given = text(system.env, "MASTER_PORT", "PET_MASTER_PORT")
    if not given:
        endpoint = parse_endpoint(system.env.get("PET_RDZV_ENDPOINT", ""), "PET_RDZV_ENDPOINT")
        given = "" if endpoint is None or endpoint.port is None else str(endpoint.port)
    if not given:
        return Unread(why=Why.ABSENT, reason="MASTER_PORT is not set")
    if not (given.isascii() and given.isdecimal() and 0 < int(given) < 65536):
        return Unread(why=Why.ABSENT, reason="MASTER_PORT is not a port number")
    if system.env.get("TORCHELASTIC_RUN_ID"):
        return Unread(why=Why.NEEDLESS, reason="the store of this job listens on it")
    if not _serves_store(system, addresses):
        return Unread(why=Why.NEEDLESS, reason="the store would be on another host")
    port = int(given)
    error = _bind(system, port, reuse=False)
    if error is None:
        return node.PortUse(port=port, free=True)
    if error.errno != errno.EADDRINUSE:
        return node.PortUse(port=port, error=error.strerror or str(error))
    if _bind(system, port, reuse=True) is None:
        closed = any((row.port, row.state) == (port, TIME_WAIT) for row in read_rows("", system.path("/proc")))
        return node.PortUse(port=port, free=True, time_wait=closed)
    pid, owner = _find_owner(system, port)
    if system.live and pid == os.getpid():
        return Unread(why=Why.NEEDLESS, reason="this command listens on it, to collect the facts of all nodes")
    return node.PortUse(port=port, error=error.strerror or str(error), owner_pid=pid, owner=owner)


def _serves_store(system: System, addresses: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether rank 0 would run here, by this process's rank, or else by the master's address."""
    node_rank = text(system.env, *NODE_RANKS)
    if node_rank:
        return node_rank == "0"
    master = master_name(system.env)
    if not master or master == "localhost":
        return True
    reply = ask_one(lambda: system.calls.resolve(master), LOOKUP_LIMIT_S)
    own = {str(ipaddress.ip_interface(address).ip) for interface in addresses.values() for address in interface}
    return any(address in own or is_loopback_address(address) for address in reply.value or ())


def _bind(system: System, port: int, *, reuse: bool) -> OSError | None:
    try:
        system.calls.bind(port, reuse=reuse)
    except OSError as error:
        return error
    return None


def _find_owner(system: System, port: int) -> tuple[int | None, str | None]:
    """Return the pid and command of the process that listens; if we cannot find it, return only its user."""
    proc = system.path("/proc")
    sockets = {row.inode: row.uid for row in read_rows("", proc) if (row.port, row.state) == (port, LISTENING)}
    deadline = time.monotonic() + SEARCH_S
    for pid in list_pids(proc) if sockets else ():
        if time.monotonic() > deadline:
            break
        if not sockets.keys().isdisjoint(read_sockets(pid, proc) or ()):
            words = [word for word in system.text_or(f"/proc/{pid}/cmdline").split("\0") if word]
            if not words:
                return pid, system.text_or(f"/proc/{pid}/comm") or None
            command = " ".join(hide_secrets((Path(words[0]).name, *words[1:])))
            return pid, command if len(command) <= SHOWN else f"{command[:SHOWN]}…"
    return None, f"a process of user {next(iter(sockets.values()))}" if sockets else None


def read_addresses(system: System) -> dict[str, tuple[str, ...]]:
    """Return the addresses of every interface, or {} if they cannot be read."""
    try:
        return system.calls.interface_addresses()
    except OSError:
        return {}


def read_default_interface(system: System) -> str | None:
    """Return the interface of the default route with the lowest metric (IPv4 before IPv6), or None without one."""
    for table, first_line, base, columns in ROUTES:
        routes = []
        for line in system.text_or(table).splitlines()[first_line:]:
            fields = line.split()
            if len(fields) <= max(columns):
                continue
            destination, mask, flags, metric, interface = (fields[column] for column in columns)
            if int(destination, 16) == int(mask, 16) == 0 and int(flags, 16) & (RTF_UP | RTF_REJECT) == RTF_UP:
                routes.append((int(metric, base), interface))
        if routes:
            return min(routes)[1]
    return None


@dataclass
class _Chain:
    """A chain while it is parsed."""

    incoming: bool = False
    policy: str = ""
    rules: list[str] = field(default_factory=list)


def read_firewall(system: System) -> tuple[node.FirewallChain, ...] | Unread:
    """Return the chains that refuse incoming packets, from nft and iptables-save, or why we cannot list the rules."""
    commands = {command[0]: partial(system.calls.run, command, LIMIT_S) for command in (NFT, IPTABLES)}
    replies = ask_side_by_side(commands, LIMIT_S + 0.5)  # the command's own limit ends it first
    done = {name: reply.value.out for name, reply in replies.items() if reply.value and reply.value.status == 0}
    if not done:
        if all(isinstance(reply.error, FileNotFoundError) for reply in replies.values()):
            return Unread(why=Why.ABSENT, reason="neither nft nor iptables-save is installed")
        return Unread(why=Why.DENIED, reason="listing the packet filter's rules needs root")
    chains: dict[str, _Chain] = {}
    section = ""
    for line in done.get("iptables-save", "").splitlines():
        if line.startswith("*"):
            section = line[1:].strip()
        elif section == "filter" and line.startswith(":"):
            name, policy, *_ = [*line[1:].split(), "-"]
            chains[name] = _Chain(incoming=name == "INPUT", policy=policy.lower())
        elif section == "filter" and line.startswith("-A "):
            _, name, rule = [*line.split(" ", 2), ""][:3]
            chains.setdefault(name, _Chain()).rules.append(rule)
    iptables = tuple(_refusing("iptables", {"filter": chains}))
    tables: Tables = {}
    chain: _Chain | None = None
    for line in _joined(done.get("nft", "")):
        table, start = _TABLE.match(line), _CHAIN.match(line)
        if table:
            chains = tables.setdefault(table[1], {})
        elif start:
            chain = chains.setdefault(start[1], _Chain())
        elif line == "}":
            chain = None
        elif chain is not None and line.startswith("type "):
            given = _POLICY.search(line)
            chain.incoming, chain.policy = " hook input " in line, given[1] if given else ""
        elif chain is not None:
            chain.rules.append(_COUNTER.sub("", line).strip())
    nft = _refusing("nft", tables)
    return (*iptables, *(chain for chain in nft if not (iptables and chain.name == "nft ip filter INPUT")))


def _refusing(tool: str, tables: Tables) -> Iterator[node.FirewallChain]:
    for table, chains in tables.items():
        manager = "ufw" if any(name.startswith("ufw-") for name in chains) else ""
        if "firewalld" in table or "INPUT_ZONES" in chains:
            manager = "firewalld"
        for name, chain in chains.items():
            last = chain.rules[-1] if chain.rules else ""
            refusal = f"last rule: {last}" if _REFUSES.match(last) else ""
            if chain.policy in {"drop", "reject"}:
                refusal = f"policy {chain.policy}"
            if chain.incoming and refusal:
                rules = _reached(chains, name)
                accepts = tuple(rule for rule in rules if _ACCEPT.search(rule) and not _NOT_NEW.search(rule))
                yield node.FirewallChain(
                    name=f"{tool} {table} {name}", refusal=refusal, accepts=accepts[:MAX_ACCEPTS], manager=manager
                )


def _reached(chains: dict[str, _Chain], first: str) -> Iterator[str]:
    todo, seen = [first], {first}
    while todo:
        for rule in chains[todo.pop(0)].rules:
            yield rule
            for name in _JUMP.findall(rule):
                if name in chains and name not in seen:
                    seen.add(name)
                    todo.append(name)


def _joined(text: str) -> Iterator[str]:
    """Yield lines without indentation; a list in braces over several lines becomes one line, and sets are left out."""
    line = ""
    for part in text.splitlines():
        line = f"{line} {part.strip()}".strip()
        opens = line.endswith("{") and _TABLE.match(line) is None and _CHAIN.match(line) is None
        if line.count("{") > line.count("}") and (opens or not line.endswith("{")):
            continue
        if line and not line.startswith(("set ", "map ", "flowtable ", "ct helper ")):
            yield line
        line = ""


def read_rdma(system: System, plan: ReadingPlan, pause: Callable[[float], None] = time.sleep) -> node.Rdma:  # noqa: ARG001
    """Read all RDMA devices; if any port is up, read the error counters twice."""
    names = system.names(DEVICES)
    if not names:
        raise NotRead(Unread(why=Why.ABSENT, reason="no RDMA device found"))
    ports = [(name, port) for name in names for port in system.names(f"{DEVICES}/{name}/ports") if port.isdecimal()]
    first = _read_counters(system, ports)
    later: Counters = {}
    if any(_worded(system, f"{DEVICES}/{name}/ports/{port}/state") == "ACTIVE" for name, port in ports):
        pause(BETWEEN_READS_S)
        later = _read_counters(system, ports)
    files = [name for name in system.names(FILES) if name.startswith("uverbs")]
    usable = [name for name in files if system.calls.readable(f"{FILES}/{name}")]
    modules = {line.split(" ", 1)[0] for line in system.text_or("/proc/modules").splitlines()}
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", system.text_or("/proc/self/status"), re.MULTILINE)
    # The kernel checks CAP_IPC_LOCK in the initial user namespace.
    whole = system.text_or("/proc/self/uid_map", "0 0 4294967295").split() == ["0", "0", "4294967295"]
    # Whether kernel and driver can give the HCA access to GPU memory, or None if that is unknown
    driver, is_open = read_driver(system)
    release = system.calls.kernel()
    version = re.match(r"(\d+)\.(\d+)", release)
    has_dmabuf: bool | None
    if driver is None or version is None:
        has_dmabuf = None
    elif not is_open:
        has_dmabuf = False
    elif (int(version[1]), int(version[2])) >= DMABUF_KERNEL:
        has_dmabuf = True
    else:
        has_dmabuf = None if ".el8" in release else False  # Red Hat's kernel 4.18 has the RDMA core of later kernels.
    return node.Rdma(
        devices=tuple(_read_device(system, name, first, later) for name in names),
        peermem=bool(modules & PEER_MODULES) or any(system.exists(name) for name in PEER_FILES),
        dmabuf=has_dmabuf,
        uverbs=tuple(usable),
        uverbs_denied=tuple(name for name in files if name not in usable),
        rdma_cm=system.exists(f"{FILES}/rdma_cm"),
        ipc_lock=whole and bool(int(capabilities[1], 16) >> CAP_IPC_LOCK & 1) if capabilities else None,
    )


def _read_counters(system: System, ports: list[tuple[str, str]]) -> Counters:

    def read(folder: str) -> dict[str, int]:
        values = {counter: system.number_or_none(f"{folder}/counters/{counter}") for counter in COUNTERS}
        return {counter: value for counter, value in values.items() if value is not None}

    folders = [f"{DEVICES}/{name}/ports/{port}" for name, port in ports]
    replies = ask_side_by_side({folder: partial(read, folder) for folder in folders}, COUNTER_LIMIT_S)
    return {folder: reply.value or {} for folder, reply in replies.items()}


def _read_device(system: System, name: str, first: Counters, later: Counters) -> node.RdmaDevice:
    folder = f"{DEVICES}/{name}"
    bus_id = os.path.basename(os.path.realpath(system.path(f"{folder}/device")))  # noqa: PTH119 - only the name is needed
    ports = []
    for number in sorted(int(port) for port in system.names(f"{folder}/ports") if port.isdecimal()):
        place = f"{folder}/ports/{number}"
        rate = system.text_or(f"{place}/rate")
        rate_gb_s = re.match(r"(\d+(?:\.\d+)?) Gb/sec", rate)  # "400 Gb/sec (4X NDR)"
        gids = []
        for index in sorted(int(entry) for entry in system.names(f"{place}/gids") if entry.isdecimal()):
            gid = system.text_or(f"{place}/gids/{index}")
            if gid.strip("0:"):  # a table has hundreds of empty entries, whose attributes cannot be read
                kind = system.text_or(f"{place}/gid_attrs/types/{index}")
                netdev = system.text_or(f"{place}/gid_attrs/ndevs/{index}") or None
                gids.append(node.Gid(index=index, gid=gid, type=kind, netdev=netdev))
        port = node.RdmaPort(
            device=name, port=number, state=_worded(system, f"{place}/state"),
            phys_state=_worded(system, f"{place}/phys_state"),
            link_layer=system.text_or(f"{place}/link_layer", "Unspecified"),
            rate_gb_s=float(rate_gb_s[1]) if rate_gb_s else None, gids=tuple(gids), counters=first.get(place, {}),
            counters_later=later.get(place, {}), rate_text=rate,
        )  # fmt: skip
        ports.append(port)
    verbs = system.names(VERBS)
    return node.RdmaDevice(
        name=name, bus_id=bus_id if BUS_ID.fullmatch(bus_id) else None,
        board=system.text_or(f"{folder}/board_id") or None, firmware=system.text_or(f"{folder}/fw_ver") or None,
        ports=tuple(ports),
        uverbs=next((file for file in verbs if system.text_or(f"{VERBS}/{file}/ibdev") == name), None),
        netdevs=system.names(f"{folder}/device/net"), virtual_function=system.exists(f"{folder}/device/physfn"),
    )  # fmt: skip


def _worded(system: System, name: str) -> str:
    """Return "ACTIVE" for the file text "4: ACTIVE"."""
    number, colon, word = system.text_or(name).partition(": ")
    return word if colon else number
