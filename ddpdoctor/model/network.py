"""Names, addresses and interfaces of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.reading import Unread


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The result of resolving a name on this host. Either ``addresses`` or ``error`` is set."""

    name: str
    addresses: tuple[str, ...]
    error: str | None
    timed_out: bool
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of this host, and how it resolves the names of others."""

    hostname: str
    fqdn: str | None
    own: Lookup
    """The lookup of the host name, as Gloo does it."""
    master: Lookup | None
    """The lookup of MASTER_ADDR or of the rendezvous endpoint's host, or None if neither is given."""
    head: Lookup | None
    """The lookup of the full name of rank 0's host, which torchrun publishes. None without gathering."""
    reverse_s: float | None
    """Duration of the slowest reverse lookup of an own address, or the time limit if one did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    """IFF_UP: somebody has switched it on."""
    operstate: str
    """The value in sysfs: up, down, unknown, …"""
    carrier: bool | None
    loopback: bool
    virtual: bool
    """There is no device behind it: a bridge, veth, tunnel, docker0."""
    mtu: int
    speed_mb_s: int | None
    """Megabits per second from sysfs, or None if it gives none."""
    addresses: tuple[str, ...]
    """With prefix length: "10.0.0.4/24", "fd00::2/64"."""
    link_type: int
    """ARPHRD_*: 1 Ethernet, 32 InfiniBand, 772 loopback."""

    @property
    def running(self) -> bool:
        """Whether it can carry traffic now: IFF_RUNNING, which is IFF_UP with operstate up or unknown."""
        return self.up and self.operstate in {"up", "unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """Whether a process can listen on MASTER_PORT here, and who holds it."""

    port: int
    free: bool = False
    error: str | None = None
    time_wait: bool = False
    """Only a closed connection in TIME_WAIT blocks the port."""
    owner_pid: int | None = None
    owner: str | None = None
    """The command of the process that listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallChain:
    """A chain of a packet filter that refuses incoming packets by default."""

    name: str
    """Prefixed with the tool that shows it: "nft inet filter input"."""
    refusal: str
    """"policy drop", or the last rule: "reject with icmpx admin-prohibited"."""
    accepts: tuple[str, ...]
    """Rules in this chain, or one that it jumps to, that accept new connections, in the tool's notation."""
    manager: str = ""
    """"firewalld" or "ufw" if the names of chains show that one of them wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Interfaces, and how the kernel and a firewall treat ports."""

    interfaces: tuple[Interface, ...]
    """In the kernel's order, by index: the order in which NCCL sees them."""
    default_interface: str | None
    """The interface of the IPv4 default route, else of the IPv6 one."""
    ipv6_disabled: bool | None
    local_ports: tuple[int, int] | None
    """ip_local_port_range: the ports that the kernel assigns to clients."""
    master_port: PortUse | Unread
    """Unread if no MASTER_PORT is given or the store would be on another host."""
    firewall: tuple[FirewallChain, ...] | Unread
    """Chains that refuse incoming packets by default; empty: there are none."""
    mesh_proxy: bool = False
    """The proxy of a service mesh (Istio's Envoy) listens in this network namespace."""
